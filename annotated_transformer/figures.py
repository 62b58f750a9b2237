"""Figures that work in light and dark mode, on paper and without scripts.

``heatmap``, ``lines``, ``bars`` and ``canvas`` draw with matplotlib, for ``show``; ``live_heatmap``
and ``live_line_chart`` with Altair, for ``interactive_chart``. Both embed the figure in a page, and
black in it takes the colour of the page's text. Axes without labels and pictures without alt text
are errors.
"""

import base64
import html
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import Any, Final, TypeAlias, cast

import altair as alt
import matplotlib.pyplot as plt
import numpy as np
import torch
import vl_convert
from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogFormatterSciNotation
from numpy.typing import ArrayLike, NDArray

# Okabe and Ito's colour-blind-safe palette, darkened for a contrast of 3 with white and dark pages.
# That makes the colours about equally light, so curves differ in their dashes as well.
PALETTE: Final = ("#2f7ed8", "#d55e00", "#009e73", "#c05f9a", "#a67c00", "#7f7f7f")
DASHES: Final = ((1, 0), (5, 2), (1.5, 1.5), (8, 2, 2, 2), (3, 1), (10, 3))
SEQUENTIAL: Final = "viridis"  # from low (dark) to high (bright)
DIVERGING: Final = "PuOr_r"  # purple below zero, white at zero, orange above
INK: Final = "#000000"  # stands for the colour of the page's text
FAINT: Final = "#80808040"  # grid lines and masked cells, on any page

STYLE: Final[dict[Any, Any]] = {
    "axes.axisbelow": True, "axes.grid": True, "axes.edgecolor": INK, "grid.color": FAINT,
    "axes.spines.right": False, "axes.spines.top": False, "legend.frameon": False,
    "axes.titlesize": "medium", "font.size": 10, "figure.constrained_layout.use": True,
    "axes.prop_cycle": cycler(color=PALETTE, dashes=DASHES),
    "svg.fonttype": "none",  # keep text as text, to search and copy it
    "svg.hashsalt": "annotated-transformer",  # the same figure gives the same bytes
}  # fmt: skip

Values: TypeAlias = ArrayLike | torch.Tensor
Series: TypeAlias = Mapping[str, tuple[Values, Values]]


@dataclass(frozen=True, repr=False)
class Picture:
    """A figure ready for a notebook."""

    html: str  #: A self-contained page element.
    png: bytes  #: The same on a white background, for where there is no HTML.
    alt_text: str  #: What the figure shows, in a sentence or two.

    def __repr__(self) -> str:
        """Return the alternative text."""
        return self.alt_text

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        png = base64.b64encode(self.png).decode()
        return {"text/html": self.html, "image/png": png, "text/plain": self.alt_text}


@dataclass(frozen=True, repr=False)
class Table:
    """A table of text, with a header and rows.

    Raises:
        TypeError: A cell is not text.
        ValueError: A row has more or fewer cells than the header.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        """Check that the rows match the header."""
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"{len(self.head)} columns, but a row of {len(row)}: {list(row)}")
            if not all(isinstance(cell, str) for cell in row):
                raise TypeError(f"cells must be text: {list(row)}")

    def __repr__(self) -> str:
        """Return the table as plain text with aligned columns."""
        lines = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in padded)

    def _repr_html_(self) -> str:
        lines = [("th", self.head), *(("td", row) for row in self.rows)]
        cells = ["".join(f"<{t}>{html.escape(c)}</{t}>" for c in line) for t, line in lines]
        return f'<table class="dataframe"><tr>{"</tr><tr>".join(cells)}</tr></table>'


def _inline(svg: str, alt_text: str) -> str:
    """Prepare an SVG file for embedding in a page: unique ids, the page's colour, scaled."""
    if not alt_text.strip():
        raise ValueError("alt_text is empty: describe what the figure shows")
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # would apply to the whole page
    salt = "f" + sha256((svg + alt_text).encode()).hexdigest()[:8]  # or ids in a page would clash
    # The same image twice in a figure has the same id twice; nothing refers to it.
    svg = re.sub(r'(<image\b[^>]*?) id="[^"]*"', r"\1", svg)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{salt}-", svg)
    label = html.escape(" ".join(alt_text.split()))
    style = 'fill="currentColor" stroke-linejoin="round" style="max-width:100%;height:auto"'
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}" {style}', 1)


def show(figure: Figure, alt_text: str) -> Picture:
    """Turn a matplotlib figure into a picture for the page, and close it.

    Args:
        figure: The figure; black in it takes the colour of the page's text.
        alt_text: What the figure shows.

    Raises:
        ValueError: If ``alt_text`` is empty.
    """
    svg, png = io.StringIO(), io.BytesIO()
    undated = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(STYLE):
        figure.savefig(svg, format="svg", transparent=True, metadata=undated)
        figure.set_layout_engine("none")  # all is in its place now
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
        size: Width and height of the figure in inches; five inches fit a phone.
        options: Passed to ``Figure.subplots``, such as ``sharex=True``.

    Returns:
        The figure, and its axes in an array of shape ``(rows, columns)``.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=size)
        return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _axes(
    ax: Axes | None, size: tuple[float, float], title: str, **labels: str
) -> tuple[Figure, Axes]:
    """Return a figure and its axes, new ones if none are given, with the labels of x and y."""
    _require(**labels)
    axes: Axes = canvas(size=size)[1][0, 0] if ax is None else ax
    axes.set(title=title, **dict(zip(("xlabel", "ylabel"), labels.values(), strict=True)))
    return cast(Figure, axes.get_figure(root=True)), axes


def _array(values: Values) -> NDArray[Any]:
    """Convert a tensor (any device, with or without gradient), an array or a list."""
    if isinstance(values, torch.Tensor):  # NumPy has no bfloat16
        values = values.detach().cpu().to(None if values.dtype == torch.bool else torch.float64)
    return np.asarray(values)


def _require(**labels: str) -> None:
    """Check that no label is empty."""
    if empty := [name for name, label in labels.items() if not label.strip()]:
        raise ValueError(f"{empty[0]} is empty: every axis needs a label")


def _matrix(values: Values, rows: Sequence[object], columns: Sequence[object]) -> NDArray[Any]:
    """Return a matrix after checking its shape against its labels."""
    matrix = _array(values)
    if matrix.shape != (shape := (len(rows), len(columns))):
        raise ValueError(f"matrix has shape {matrix.shape}, but its labels need {shape}")
    return matrix


def _colour_range(values: NDArray[Any]) -> tuple[float, float]:
    """Return the limits of the colour scale, symmetric about zero if any value is negative."""
    finite = values[np.isfinite(values)]
    low, high = float(finite.min(initial=0)), float(finite.max(initial=0))
    reach = max(-low, high) or 1.0
    return (-reach if low < 0 else 0.0), reach


def _labelled(labels: Sequence[object], most: int) -> range:
    """Return which labels to show: all tokens, but only some of many numbers."""
    numbers = all(isinstance(label, int) for label in labels)
    return range(0, len(labels), -(-len(labels) // most) if numbers else 1)


def _draw_cells(values: NDArray[Any], axes: Axes, limits: tuple[float, float]) -> QuadMesh:
    """Colour the cells of a matrix; NaN and infinite ones stay empty."""
    boolean, (low, high) = values.dtype == bool, limits
    cmap: Any = ListedColormap([FAINT, PALETTE[0]]) if boolean else (SEQUENTIAL, DIVERGING)[low < 0]
    style = {"cmap": cmap, "edgecolor": "white", "linewidth": 0.4 if boolean else 0}
    style["rasterized"] = values.size > 2000  # many cells are smaller as an image
    cells = np.ma.masked_invalid(values.astype(float))
    mesh = axes.pcolormesh(cells, vmin=low, vmax=high, **style)
    axes.set(xlim=(0, values.shape[1]), ylim=(values.shape[0], 0))  # the first row on top
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return mesh


def _write_values(values: NDArray[Any], mesh: QuadMesh, axes: Axes) -> None:
    """Write each value into its cell, in a colour that contrasts with it."""
    style: dict[str, Any] = {"fontsize": "small", "ha": "center", "va": "center"}
    for (i, j), value in np.ndenumerate(values):
        red, green, blue, _ = mesh.cmap(mesh.norm(value))
        ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "#222222"
        text = f"{value:.2g}".replace("inf", "∞").replace("-", "−")
        axes.text(j + 0.5, i + 0.5, text, color=ink if np.isfinite(value) else INK, **style)


def heatmap(
    matrix: Values,
    rows: Sequence[object],
    columns: Sequence[object],
    *,
    row_label: str,
    column_label: str,
    title: str = "",
    value_label: str = "",
    annotate: bool = False,
    limits: tuple[float, float] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw a matrix as coloured cells, with the first row on top.

    Args:
        matrix: Shape ``(len(rows), len(columns))``; NaN and infinite values stay empty.
        rows: Labels of the rows (queries, if they are tokens); they may repeat.
        columns: Labels of the columns (keys).
        row_label: What the rows are.
        column_label: What the columns are.
        title: Title of the axes.
        value_label: What the values are, next to the colour scale; of booleans, what is true.
        annotate: Write each value into its cell.
        limits: Ends of the colour scale, to compare panels; from the values by default.
        ax: Axes to draw on; new ones by default.

    Raises:
        ValueError: If the matrix does not match its labels, or a label is empty.
    """
    values = _matrix(matrix, rows, columns)
    size = (min(5.0, 2.2 + 0.28 * len(columns)), min(5.0, 1.3 + 0.26 * len(rows)))
    figure, axes = _axes(ax, size, title, column_label=column_label, row_label=row_label)
    mesh = _draw_cells(values, axes, limits or _colour_range(values))
    turned = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
    tilt: Any = {} if all(len(str(label)) < 4 for label in columns) else turned
    for axis, names, most, style in ((axes.yaxis, rows, 20, {}), (axes.xaxis, columns, 10, tilt)):
        chosen = _labelled(names, most)
        axis.set_ticks([i + 0.5 for i in chosen], [str(names[i]) for i in chosen], **style)
    if values.dtype != bool or value_label:
        bar = figure.colorbar(mesh, ax=axes, label=value_label)
        if values.dtype == bool:
            bar.set_ticks([0.25, 0.75], labels=["no", "yes"])
    if annotate:
        _write_values(values, mesh, axes)
    return figure


def _strokes(curves: int) -> list[tuple[str, tuple[float, ...]]]:
    """Return a colour and dashes for each curve; reused colours get different dashes."""
    return [(PALETTE[i % 6], DASHES[(i + i // 6) % 6]) for i in range(curves)]


class _PlainLog(LogFormatterSciNotation):
    """Labels of a logarithmic axis that read 0.2 rather than 2 times a power of ten."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of a tick, empty where too many would stand close together."""
        text, view = super().__call__(x, pos), cast(Any, self.axis).get_view_interval()
        return f"{x:,g}" if text and view[0] > 1e-5 and view[1] < 1e6 else str(text)


def _scale(axes: Axes, log_x: bool, log_y: bool) -> None:
    """Make axes logarithmic where they are asked to be."""
    for name in ["x"] * log_x + ["y"] * log_y:
        axes.set(**{f"{name}scale": "log"})
        getattr(axes, f"{name}axis").set(major_formatter=_PlainLog(), minor_formatter=_PlainLog())


def lines(
    series: Series,
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
    ax: Axes | None = None,
) -> Figure:
    """Draw named curves, distinguished by colour and dashes.

    Args:
        series: For each name the x and y values, of shape ``(points,)`` each.
        x_label: What the x-axis shows, with its unit.
        y_label: What the y-axis shows, with its unit.
        title: Title of the axes.
        log_x: Use a logarithmic x-axis.
        log_y: Use a logarithmic y-axis.
        ax: Axes to draw on; new ones by default.

    Raises:
        ValueError: If a label is empty.
    """
    figure, axes = _axes(ax, (5.0, 3.0), title, x_label=x_label, y_label=y_label)
    for (name, (x, y)), (colour, dashes) in zip(series.items(), _strokes(len(series)), strict=True):
        axes.plot(_array(x), _array(y), label=name, color=colour, dashes=dashes)
    _scale(axes, log_x, log_y)
    if len(series) > 1:
        axes.legend(frameon=False)
    return figure


def bars(
    values: Mapping[str, float],
    *,
    value_label: str,
    name_label: str,
    title: str = "",
    log: bool = False,
    ax: Axes | None = None,
) -> Figure:
    """Draw one horizontal bar per name, the first on top, with its value at the end.

    The labels say what the values are, with their unit, and what the names are; other arguments
    are as in ``lines``.
    """
    size = (5.0, 1.0 + 0.32 * len(values))
    figure, axes = _axes(ax, size, title, value_label=value_label, name_label=name_label)
    widths = [float(value) for value in values.values()]
    most = max(filter(np.isfinite, map(abs, widths)), default=0)
    full = max(0, 3 - int(f"{most:.3e}"[-3:]))  # decimals that give the largest value four digits
    used = max((len(f"{w:.{full}f}".rstrip("0").partition(".")[2]) for w in widths), default=0)
    ends = [f"{w:.4g}" if log and abs(w) < 1000 else f"{w:,.{used}f}" for w in widths]
    axes.bar_label(axes.barh(list(values), widths, color=PALETTE[0]), ends, padding=3)
    _scale(axes, log, False)
    if most >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20M
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


_TEXT = {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "titleFontWeight": "normal"}
_LINES = {"domainColor": INK, "tickColor": INK, "gridColor": FAINT, "titleFontSize": 12}
CHART_STYLE: Final[dict[Any, Any]] = {
    "background": "transparent", "font": "sans-serif", "view": {"stroke": None},
    "axis": _TEXT | _LINES, "legend": _TEXT, "text": {"color": INK},
    "title": {"color": INK, "fontSize": 13, "fontWeight": "normal"},
    "range": {"category": list(PALETTE)},
}  # fmt: skip
LIVE: Final = Template(Path(__file__).with_name("live_figure.html").read_text(encoding="utf-8"))


def interactive_chart(chart: alt.TopLevelMixin, alt_text: str) -> Picture:
    """Turn an Altair chart, with titles on its axes, into a picture, as ``show`` does a figure.

    It is interactive where scripts run.
    """
    spec: dict[str, Any] = chart.to_dict() | {"description": alt_text, "config": CHART_STYLE}
    version = alt.SCHEMA_VERSION.removeprefix("v").rpartition(".")[0]
    still = vl_convert.vegalite_to_svg(spec, vl_version=version)
    png = vl_convert.vegalite_to_png(spec | {"background": "white"}, vl_version=version, scale=1.5)
    text = json.dumps(spec).replace("</", r"<\/").replace(INK, "currentColor")
    page = LIVE.substitute(still=_inline(still, alt_text), spec=text).rstrip("\n")
    if "google.colab" in sys.modules:  # which shows each output in its own frame
        page = chart.to_html(fullhtml=False)
    return Picture(page, png, alt_text)


def _positions(names: Sequence[object], title: str) -> dict[str, Any]:
    """Return axis and scale with a position for each name, so that names may repeat."""
    chosen = _labelled(names, 20)
    text = json.dumps([str(name) if i in chosen else "" for i, name in enumerate(names)])
    axis = alt.Axis(title=title, labelExpr=f"{text}[datum.value]", ticks=False)
    return {"axis": axis, "scale": alt.Scale(domain=list(range(len(names))))}


def live_heatmap(
    matrix: Values,
    rows: Sequence[object],
    columns: Sequence[object],
    *,
    row_label: str,
    column_label: str,
    title: str = "",
    value_label: str = "value",
    hover: bool = False,
) -> alt.Chart:
    """Draw a matrix whose cells show their values; arguments as in ``heatmap``.

    A click on a cell highlights its row until a double click; with ``hover``, pointing is enough.
    """
    _require(row_label=row_label, column_label=column_label)
    values = _matrix(matrix, rows, columns)
    cells = [
        {"i": i, "j": j, "row": str(rows[i]), "column": str(columns[j]), "value": float(value)}
        for (i, j), value in np.ndenumerate(values)
        if np.isfinite(value)
    ]
    on, clear = ("pointerover", "pointerout") if hover else ("click", "dblclick")
    pick = alt.selection_point(fields=["i"], on=on, clear=clear)
    low, high = _colour_range(values)  # Vega has names of its own for our colour maps
    shade = alt.Scale(scheme="purpleorange" if low < 0 else "viridis", domain=[low, high])
    width, height = (min(24 * len(side), 480) for side in (columns, rows))  # square if few
    empty = alt.Chart(alt.InlineData(values=cells), title=title, width=width, height=height)
    names = [json.dumps(f"{label} ") for label in (row_label, column_label, value_label)]
    said = "{} + datum.row + ', ' + {} + datum.column + ', ' + {} + format(datum.value, '.3~g')"
    chart: alt.Chart = (
        empty.mark_rect(description=alt.expr(said.format(*names)))
        .add_params(pick)
        .encode(
            x=alt.X("j:O", **_positions(columns, column_label)),
            y=alt.Y("i:O", **_positions(rows, row_label)),
            color=alt.Color("value:Q", scale=shade, title=value_label),
            opacity=alt.condition(pick, alt.value(1), alt.value(0.25)),
            tooltip=[
                alt.Tooltip("row:N", title=row_label),
                alt.Tooltip("column:N", title=column_label),
                alt.Tooltip("value:Q", title=value_label, format=".3~g"),
            ],
        )
    )
    return chart


def live_line_chart(
    series: Series,
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
) -> alt.LayerChart:
    """Draw named curves; a click in the legend highlights one. Arguments as in ``lines``."""
    _require(x_label=x_label, y_label=y_label)
    points = [
        {"curve": name, "x": float(a), "y": float(b)}
        for name, (x, y) in series.items()
        for a, b in zip(_array(x), _array(y), strict=True)
    ]
    pick = alt.selection_point(fields=["curve"], bind="legend")
    # Not nearest=True, with which Vega-Lite 6.4 loses the curve's name in the tooltip.
    near = alt.selection_point(on="pointerover", clear="pointerout", empty=False)
    dashes = alt.Scale(domain=list(series), range=[list(d) for _, d in _strokes(len(series))])
    fit = max(1, 54 // (6 + max(map(len, series))))
    legend = alt.Legend(title=None, orient="bottom", columns=fit, labelLimit=0, symbolType="stroke")
    kind = {False: alt.Scale(zero=False, nice=False), True: alt.Scale(type="log", nice=False)}
    base = alt.Chart(alt.InlineData(values=points), title=title).encode(
        x=alt.X("x:Q", title=x_label, scale=kind[log_x]),
        y=alt.Y("y:Q", title=y_label, scale=alt.Scale(type="log") if log_y else alt.Scale()),
        color=alt.Color("curve:N", scale=alt.Scale(domain=list(series)), legend=legend),
    )
    curves = base.mark_line().encode(
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
    layers = [curves.add_params(pick), dots.add_params(near)]
    return alt.LayerChart(layer=layers, width=360, height=220)
