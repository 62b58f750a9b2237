# Written from book/figures.md: edit the chapter instead.
"""Figures that read in light, in dark, on paper and without scripts."""

import base64
import html
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import altair as alt
import matplotlib.pyplot as plt
import numpy as np
import seaborn
import torch
import vl_convert
from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from numpy.typing import ArrayLike, NDArray

PALETTE: Final = ("#2f7ed8", "#d55e00", "#009e73", "#c05f9a", "#a67c00", "#7f7f7f")
DASHES: Final = ((1, 0), (5, 2), (1.5, 1.5), (8, 2, 2, 2), (3, 1), (10, 3))
SEQUENTIAL: Final = "viridis"  # from nothing (dark) to much (bright)
DIVERGING: Final = "PuOr_r"  # purple below zero, white at zero, orange above
INK: Final = "#000000"  # stands for the colour of the page's text
FAINT: Final = "#80808040"  # grid lines and hidden cells, on any page


@dataclass(frozen=True, repr=False)
class Picture:
    """A figure ready for a notebook: HTML, a PNG for places without HTML, and a text.

    Attributes:
        html: The figure as HTML that needs nothing else.
        png: The figure as an image on a white ground.
        alt_text: What one sees, in a sentence or two.
    """

    html: str
    png: bytes
    alt_text: str

    def __repr__(self) -> str:
        """Return the alternative text."""
        return self.alt_text

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        png = base64.b64encode(self.png).decode()
        return {"text/html": self.html, "image/png": png, "text/plain": self.alt_text}


def _inline(svg: str, alt_text: str) -> str:
    """Make an SVG file part of a page: own ids, the page's colour, scaled to fit."""
    if not alt_text.strip():
        raise ValueError("alt_text is empty: say what one sees in the figure")
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    # A style sheet inside a drawing would apply to the whole page.
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    salt = "f" + sha256((svg + alt_text).encode()).hexdigest()[:8]
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{salt}-", svg)
    label = html.escape(" ".join(alt_text.split()))
    look = 'fill="currentColor" stroke-linejoin="round" style="max-width:100%;height:auto"'
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}" {look}', 1)


STYLE: Final[dict[Any, Any]] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=PALETTE, dashes=DASHES),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "grid.color": FAINT,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it can be searched and copied
    "svg.hashsalt": "annotated-transformer",  # the same figure, the same bytes
}


def show(figure: Figure, alt_text: str) -> Picture:
    """Turn a matplotlib figure into a picture on the page, and close it.

    Args:
        figure: The figure; what is black in it follows the page's text.
        alt_text: What one sees in it.

    Raises:
        ValueError: If ``alt_text`` is empty.
    """
    svg, png = io.StringIO(), io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(STYLE):
        figure.savefig(svg, format="svg", transparent=True, metadata=nothing)
        figure.savefig(png, format="png", facecolor="white", dpi=120)
    plt.close(figure)
    return Picture(_inline(svg.getvalue(), alt_text), png.getvalue(), alt_text)


def canvas(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (5.0, 3.0), **options: Any
) -> tuple[Figure, NDArray[np.object_]]:
    """Start a figure in the book's style.

    Args:
        rows: Rows of axes.
        columns: Columns of axes.
        size: Width and height of the whole figure in inches.
        options: Passed to ``Figure.subplots``, such as ``sharex=True``.

    Returns:
        The figure, and its axes in an array of shape ``(rows, columns)``.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=size)
        return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _array(values: ArrayLike | torch.Tensor) -> NDArray[Any]:
    """Take a tensor (any device, with or without gradient), an array or a list."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        # NumPy has no bfloat16.
        return np.asarray(values if values.dtype == torch.bool else values.double())
    return np.asarray(values)


def _named(**labels: str) -> None:
    """Insist that every axis says what it shows."""
    for name, label in labels.items():
        if not label.strip():
            raise ValueError(f"{name} is empty: every axis says what it shows")


def _matrix(
    values: ArrayLike | torch.Tensor, rows: Sequence[object], columns: Sequence[object]
) -> NDArray[Any]:
    """Return a matrix whose shape fits its labels."""
    matrix = _array(values)
    if matrix.shape != (len(rows), len(columns)):
        shape = (len(rows), len(columns))
        raise ValueError(f"matrix of shape {matrix.shape} with labels for {shape}")
    return matrix


def _range(values: NDArray[Any]) -> tuple[float, float]:
    """Return the ends of a scale of colours: around zero, if any number is negative."""
    numbers = values[np.isfinite(values)]
    low, high = float(numbers.min(initial=0)), float(numbers.max(initial=0))
    reach = max(-low, high) or 1.0
    return (-reach if low < 0 else 0.0), reach


def _axes(ax: Axes | None, size: tuple[float, float], **labels: str) -> Axes:
    """Return axes (new ones, if there are none) with their labels and title set."""
    axes: Axes = canvas(size=size)[1][0, 0] if ax is None else ax
    axes.set(**labels)
    return axes


def _figure(axes: Axes) -> Figure:
    """Return the figure that axes belong to."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def _shown(labels: Sequence[object], most: int) -> range:
    """Return which labels to write: all tokens, but of many numbers only some."""
    numbers = all(isinstance(label, int) for label in labels)
    return range(0, len(labels), -(-len(labels) // most) if numbers else 1)


def _tick(axis: Any, labels: Sequence[object], most: int, **look: Any) -> None:
    """Label the cells along one axis."""
    places = _shown(labels, most)
    axis.set_ticks([i + 0.5 for i in places], [str(labels[i]) for i in places], **look)


def heatmap(
    matrix: ArrayLike | torch.Tensor,
    rows: Sequence[object],
    columns: Sequence[object],
    *,
    row_label: str,
    column_label: str,
    title: str = "",
    value_label: str = "",
    annotate: bool = False,
    ax: Axes | None = None,
) -> Figure:
    """Draw a matrix as cells of colour, its first row on top.

    Args:
        matrix: Shape ``(len(rows), len(columns))``, of numbers or of true and false.
        rows: Labels of the rows (queries, where they are tokens); they may repeat.
        columns: Labels of the columns (keys).
        row_label: What the rows are.
        column_label: What the columns are.
        title: Title of the axes.
        value_label: What the numbers are, beside the scale of colours.
        annotate: Write each value into its cell.
        ax: Axes to draw on; new ones otherwise.

    Raises:
        ValueError: If the matrix does not fit its labels, or a label is empty.
    """
    _named(row_label=row_label, column_label=column_label)
    values = _matrix(matrix, rows, columns)
    low, high = _range(values)
    size = (min(5.0, 2.2 + 0.28 * len(columns)), min(5.0, 1.3 + 0.26 * len(rows)))
    axes = _axes(ax, size, ylabel=row_label, xlabel=column_label, title=title)
    look: dict[str, Any] = {"cmap": DIVERGING if low < 0 else SEQUENTIAL}
    if values.dtype == bool:
        look = {"cmap": ListedColormap([FAINT, PALETTE[0]])}
        look |= {"edgecolor": "#808080", "linewidth": 0.4}
    # A drawing of many cells is smaller as an image. Cells without a number stay empty.
    look |= {"vmin": low, "vmax": high, "rasterized": values.size > 2000}
    look |= {"cbar": False, "xticklabels": False, "yticklabels": False}
    seaborn.heatmap(values.astype(float), mask=~np.isfinite(values), ax=axes, **look)
    axes.set(xlabel=column_label, ylabel=row_label)
    (mesh,) = axes.collections
    axes.grid(visible=False)
    upright = all(len(str(label)) < 4 for label in columns)
    turned = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
    _tick(axes.yaxis, rows, 20)
    _tick(axes.xaxis, columns, 10, **({} if upright else turned))
    if values.dtype != bool:
        _figure(axes).colorbar(mesh, ax=axes, label=value_label)
    if annotate:
        for (i, j), value in np.ndenumerate(values):
            red, green, blue, _ = mesh.cmap(mesh.norm(value))
            ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "#222222"
            ink = ink if np.isfinite(value) else INK
            text = f"{value:.2g}".replace("inf", "∞").replace("-", "−")
            look = {"color": ink, "fontsize": "small", "ha": "center", "va": "center"}
            axes.text(j + 0.5, i + 0.5, text, **look)
    return _figure(axes)


def _strokes(curves: int) -> list[tuple[str, tuple[float, ...]]]:
    """Return a colour and dashes for each curve; a colour that returns has other dashes."""
    rounds = (DASHES[n:] + DASHES[:n] for n in range(len(DASHES)))
    pairs = [pair for dashes in rounds for pair in zip(PALETTE, dashes, strict=True)]
    return [pairs[i % len(pairs)] for i in range(curves)]


def lines(
    series: Mapping[str, tuple[ArrayLike | torch.Tensor, ArrayLike | torch.Tensor]],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
    ax: Axes | None = None,
) -> Figure:
    """Draw named curves, told apart by colour and by dashes.

    Args:
        series: For each name the x and the y values, of shape ``(points,)`` each.
        x_label: What is along, with its unit.
        y_label: What is up, with its unit.
        title: Title of the axes.
        log_x: Use a logarithmic scale along.
        log_y: Use a logarithmic scale up.
        ax: Axes to draw on; new ones otherwise.

    Raises:
        ValueError: If a label is empty.
    """
    _named(x_label=x_label, y_label=y_label)
    axes = _axes(ax, (5.0, 3.0), xlabel=x_label, ylabel=y_label, title=title)
    for (name, (x, y)), (colour, dashes) in zip(series.items(), _strokes(len(series)), strict=True):
        axes.plot(_array(x), _array(y), label=name, color=colour, dashes=dashes)
    axes.set_xscale("log" if log_x else "linear")
    axes.set_yscale("log" if log_y else "linear")
    if len(series) > 1:
        axes.legend(frameon=False)
    return _figure(axes)


def bars(
    values: Mapping[str, float],
    *,
    value_label: str,
    name_label: str,
    title: str = "",
    log: bool = False,
    ax: Axes | None = None,
) -> Figure:
    """Draw one horizontal bar a name, the first on top, with its value at its end.

    Args:
        values: The value of each name.
        value_label: What the values are, with their unit.
        name_label: What the names are.
        title: Title of the axes.
        log: Use a logarithmic scale.
        ax: Axes to draw on; new ones otherwise.

    Raises:
        ValueError: If a label is empty.
    """
    _named(value_label=value_label, name_label=name_label)
    size = (5.0, 1.0 + 0.32 * len(values))
    axes = _axes(ax, size, xlabel=value_label, ylabel=name_label, title=title)
    sizes = [float(value) for value in values.values()]
    drawn = axes.barh(list(values), sizes, color=PALETTE[0])
    ends = [f"{size:,.0f}" if abs(size) >= 1000 else f"{size:.4g}" for size in sizes]
    axes.bar_label(drawn, ends, padding=3)
    axes.set_xscale("log" if log else "linear")
    if max(map(abs, sizes), default=0) >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20M
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return _figure(axes)


CHART_STYLE: Final[dict[Any, Any]] = {
    "background": "transparent",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {
        **dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor"), INK),
        **{"gridColor": FAINT, "labelFontSize": 12, "titleFontSize": 12},
        "titleFontWeight": "normal",
    },
    "legend": {
        **{"labelColor": INK, "titleColor": INK, "labelFontSize": 12},
        "titleFontWeight": "normal",
    },
    "title": {"color": INK, "fontSize": 13, "fontWeight": "normal"},
    "text": {"color": INK},
    "range": {"category": list(PALETTE)},
}

LIVE: Final = """\
<div class="live-figure">
<style>
.live-figure .moving, .live-figure[data-live=yes] .still {{ display: none }}
.live-figure[data-live=yes] .moving {{ display: block }}
.live-figure svg {{ max-width: 100%; height: auto }}
@media print {{
  .live-figure .still {{ display: block !important }}
  .live-figure .moving {{ display: none !important }}
}}
</style>
<div class="still">{still}</div>
<div class="moving" data-by="vega-embed"></div>
<script type="application/json">{spec}</script>
<script>
(() => {{
  const start = () => window.vegaEmbed && document
    .querySelectorAll(".live-figure:not([data-live])").forEach((box) => {{
      box.dataset.live = "soon";
      const spec = JSON.parse(box.querySelector("script").textContent);
      const look = {{ renderer: "svg", actions: false }};
      vegaEmbed(box.querySelector(".moving"), spec, look)
        .then(() => {{ box.dataset.live = "yes"; }});
    }});
  if (document.readyState === "complete") start(); else addEventListener("load", start);
}})();
</script>
</div>"""


def live(chart: alt.TopLevelMixin, alt_text: str) -> Picture:
    """Turn an Altair chart into a picture that comes alive where scripts run.

    Args:
        chart: The chart, with titles on its axes.
        alt_text: What one sees in it.

    Raises:
        ValueError: If ``alt_text`` is empty.
    """
    spec: dict[str, Any] = chart.to_dict()
    spec["description"] = alt_text
    spec["config"] = CHART_STYLE
    version = alt.SCHEMA_VERSION.removeprefix("v").rpartition(".")[0]
    still = vl_convert.vegalite_to_svg(spec, vl_version=version)
    png = vl_convert.vegalite_to_png(spec | {"background": "white"}, vl_version=version, scale=1.5)
    text = json.dumps(spec).replace("</", r"<\/").replace(INK, "currentColor")
    page = LIVE.format(still=_inline(still, alt_text), spec=text)
    if "google.colab" in sys.modules:
        page = chart.to_html(fullhtml=False)
    return Picture(page, png, alt_text)


def _labels(names: Sequence[object], title: str) -> alt.Axis:
    """Return an axis that writes names where the data have positions."""
    shown = _shown(names, 20)
    text = json.dumps([str(name) if i in shown else "" for i, name in enumerate(names)])
    return alt.Axis(title=title, labelExpr=f"{text}[datum.value]", ticks=False)


def _places(names: Sequence[object]) -> alt.Scale:
    """Return a scale with a place for each name, even where no cell has a number."""
    return alt.Scale(domain=list(range(len(names))))


def live_heatmap(
    matrix: ArrayLike | torch.Tensor,
    rows: Sequence[object],
    columns: Sequence[object],
    *,
    row_label: str,
    column_label: str,
    title: str = "",
    value_label: str = "value",
    hover: bool = False,
) -> alt.Chart:
    """Draw a matrix whose cells tell their value; arguments as in ``heatmap``.

    With ``hover``, a row is singled out by pointing at it, and not by a click.
    """
    _named(row_label=row_label, column_label=column_label)
    values = _matrix(matrix, rows, columns)
    cells = [
        {"i": i, "j": j, "row": str(rows[i]), "column": str(columns[j]), "value": float(value)}
        for (i, j), value in np.ndenumerate(values)
        if np.isfinite(value)
    ]
    on, clear = ("pointerover", "pointerout") if hover else ("click", "dblclick")
    pick = alt.selection_point(fields=["i"], on=on, clear=clear)
    low, high = _range(values)
    # Vega's names of our maps of colours.
    shade = alt.Scale(scheme="purpleorange" if low < 0 else "viridis", domain=[low, high])
    chart: alt.Chart = (
        alt.Chart(alt.InlineData(values=cells), title=title)
        .mark_rect()
        .encode(
            x=alt.X("j:O", axis=_labels(columns, column_label), scale=_places(columns)),
            y=alt.Y("i:O", axis=_labels(rows, row_label), scale=_places(rows)),
            color=alt.Color("value:Q", scale=shade, title=value_label),
            opacity=alt.condition(pick, alt.value(1), alt.value(0.25)),
            tooltip=[
                alt.Tooltip("row:N", title=row_label),
                alt.Tooltip("column:N", title=column_label),
                alt.Tooltip("value:Q", title=value_label, format=".3~g"),
            ],
        )
        .add_params(pick)
        # Cells are square while few, and the whole stays within a page.
        .properties(width=min(24 * len(columns), 480), height=min(24 * len(rows), 480))
    )
    return chart


def live_lines(
    series: Mapping[str, tuple[ArrayLike | torch.Tensor, ArrayLike | torch.Tensor]],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
) -> alt.LayerChart:
    """Draw named curves that can be singled out; arguments as in ``lines``."""
    _named(x_label=x_label, y_label=y_label)
    points = [
        {"curve": name, "x": float(a), "y": float(b)}
        for name, (x, y) in series.items()
        for a, b in zip(_array(x), _array(y), strict=True)
    ]
    pick = alt.selection_point(fields=["curve"], bind="legend")
    # Not nearest=True: Vega-Lite 6.4 then loses the name of the curve in the tooltip.
    near = alt.selection_point(on="pointerover", clear="pointerout", empty=False)
    names = alt.Scale(domain=list(series))
    beside = max(1, 54 // (6 + max(map(len, series))))
    legend = alt.Legend(
        title=None, orient="bottom", columns=beside, labelLimit=0, symbolType="stroke"
    )
    kind = {False: alt.Scale(zero=False, nice=False), True: alt.Scale(type="log", nice=False)}
    base = alt.Chart(alt.InlineData(values=points), title=title).encode(
        x=alt.X("x:Q", title=x_label, scale=kind[log_x]),
        y=alt.Y("y:Q", title=y_label, scale=alt.Scale(type="log") if log_y else alt.Scale()),
        color=alt.Color("curve:N", scale=names, legend=legend),
    )
    strokes = [list(dashes) for _, dashes in _strokes(len(series))]
    dashes = alt.Scale(domain=list(series), range=strokes)
    curve = base.mark_line().encode(
        strokeDash=alt.StrokeDash("curve:N", scale=dashes, legend=legend),
        opacity=alt.condition(pick, alt.value(1), alt.value(0.15)),
    )
    dots = base.mark_circle(size=120).encode(
        opacity=alt.condition(near, alt.value(1), alt.value(0)),
        tooltip=[
            alt.Tooltip("curve:N"),
            alt.Tooltip("x:Q", title=x_label, format=",.4~g"),
            alt.Tooltip("y:Q", title=y_label, format=",.4~g"),
        ],
    )
    layers = alt.layer(curve.add_params(pick), dots.add_params(near))
    chart: alt.LayerChart = layers.properties(width=360, height=220)
    return chart


@dataclass(frozen=True, repr=False)
class Table:
    """A table of text, a head and rows under it.

    Attributes:
        head: What the columns are.
        rows: Each with as many cells as the head.

    Raises:
        TypeError: A cell is no text.
        ValueError: A row has more or fewer cells.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        """Refuse rows that do not fit the head."""
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"{len(self.head)} columns, but a row of {len(row)}: {list(row)}")
            if not all(isinstance(cell, str) for cell in row):
                raise TypeError(f"cells are text: {list(row)}")

    def __repr__(self) -> str:
        """Return the table as plain text."""
        lines = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in padded)

    def _repr_html_(self) -> str:
        lines = [("th", self.head), *(("td", row) for row in self.rows)]
        cells = ["".join(f"<{t}>{html.escape(c)}</{t}>" for c in line) for t, line in lines]
        return f'<table class="dataframe"><tr>{"</tr><tr>".join(cells)}</tr></table>'
