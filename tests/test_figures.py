"""Figures say what they show, in places that a reader and a machine can find."""

import json
import random
import re
import sys
import types
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import altair as alt
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import QuadMesh
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from annotated_transformer import figures
from annotated_transformer.figures import (
    DASHES,
    PALETTE,
    Picture,
    Table,
    bars,
    canvas,
    heatmap,
    interactive_chart,
    lines,
    live_heatmap,
    live_line_chart,
    show,
)

NUMBERS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
ROWS, COLUMNS = ["der", "Hund"], ["the", "dog", "the"]
NAMES: dict[str, Any] = {"row_label": "query", "column_label": "key"}
CURVES = {"up": ([1, 2, 3], [1, 4, 9]), "down": ([1, 2, 3], [3, 2, 1])}
AXES: dict[str, Any] = {"x_label": "update", "y_label": "rate"}
STATIC = Path(__file__).parents[1] / "book" / "_static"


def texts(labels: Iterable[Text]) -> list[str]:
    return [label.get_text() for label in labels]


def page_svg(picture: Picture, index: int = 0) -> ET.Element:
    """Parse an inline drawing, which must be well-formed for that."""
    found = re.findall(r"<svg.*?</svg>", picture.html, flags=re.DOTALL)
    return ET.fromstring(found[index])


def data(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a chart, which Altair keeps apart."""
    values: list[dict[str, Any]]
    (values,) = spec["datasets"].values()
    return values


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# Colours


@pytest.mark.parametrize("page", ["#ffffff", "#121212"])
@pytest.mark.parametrize("colour", PALETTE)
def test_palette_stands_out(colour: str, page: str) -> None:
    low, high = sorted((luminance(colour), luminance(page)))
    assert (high + 0.05) / (low + 0.05) >= 3


def test_curves_differ_without_colour() -> None:
    assert len(set(PALETTE)) == len(PALETTE) == len(set(DASHES)) == 6


def test_no_two_of_many_curves_look_the_same() -> None:
    series = {str(i): ([0, 1], [i, i]) for i in range(36)}
    drawn = lines(series, x_label="x", y_label="y").axes[0].lines
    looks = {(line.get_color(), str(vars(line)["_unscaled_dash_pattern"])) for line in drawn}
    assert len(looks) == len(drawn) == 36
    chart = live_line_chart(series, x_label="x", y_label="y").to_dict()
    encoding = chart["layer"][0]["encoding"]
    dashes = encoding["strokeDash"]["scale"]["range"]
    assert len(dashes) == len(encoding["color"]["scale"]["domain"]) == 36
    # Vega takes the six colours in turn.
    assert len({(i % 6, *look) for i, look in enumerate(dashes)}) == 36


# Matrices: what the reader sees at a place is what the matrix holds there


def test_heatmap_rows_are_rows() -> None:
    axes = heatmap(NUMBERS, ROWS, COLUMNS, **NAMES, title="head 1").axes[0]
    assert texts(axes.get_yticklabels()) == ROWS
    assert texts(axes.get_xticklabels()) == COLUMNS
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("query", "key")
    assert axes.get_title() == "head 1"
    assert axes.yaxis_inverted()  # the first row on top
    assert not any(spine.get_visible() for spine in axes.spines.values())


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, "gradient", "bfloat16"])
def test_heatmap_writes_each_value_at_its_place(kind: Any) -> None:
    values = {
        "gradient": lambda v: torch.tensor(v, requires_grad=True),
        "bfloat16": lambda v: torch.tensor(v, dtype=torch.bfloat16),
    }.get(kind, kind)(NUMBERS)
    figure = heatmap(values, ROWS, COLUMNS, **NAMES, annotate=True)
    axes = figure.axes[0]
    figure.canvas.draw()
    seen = {}
    for text in axes.texts:
        x, y = text.get_position()
        nearest = [
            min(zip(ticks, names, strict=True), key=lambda tick: abs(tick[0] - place))
            for ticks, names, place in (
                (axes.get_yticks(), enumerate(ROWS), y),
                (axes.get_xticks(), enumerate(COLUMNS), x),
            )
        ]
        seen[nearest[0][1], nearest[1][1]] = float(text.get_text())
    assert seen == {
        ((i, ROWS[i]), (j, COLUMNS[j])): NUMBERS[i][j] for i in range(2) for j in range(3)
    }
    # The first row is drawn above the second.
    heights = {t.get_text(): t.get_window_extent().y0 for t in axes.get_yticklabels()}
    assert heights["der"] > heights["Hund"]


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_heatmap_colours_follow_values(rows: int, columns: int, random: random.Random) -> None:
    values = np.array([[random.random() for _ in range(columns)] for _ in range(rows)])
    figure = heatmap(values, list(range(rows)), list(range(columns)), **NAMES)
    mesh = next(c for c in figure.axes[0].collections if isinstance(c, QuadMesh))
    assert np.array_equal(np.asarray(mesh.get_array()).reshape(rows, columns), values)


def test_negative_values_part_at_zero() -> None:
    mesh = heatmap([[-1.0, 3.0]], ["a"], ["b", "c"], **NAMES).axes[0].collections[0]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (-3, 3)
    scale = live_heatmap([[-1.0, 3.0]], ["a"], ["b", "c"], **NAMES).to_dict()
    assert scale["encoding"]["color"]["scale"]["domain"] == [-3, 3]


def test_positive_values_start_at_zero() -> None:
    mesh = heatmap([[1.0, 3.0]], ["a"], ["b", "c"], **NAMES).axes[0].collections[0]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0, 3)


def test_masked_scores_stay_empty() -> None:
    scores = torch.tensor([[1.0, float("-inf")]])
    figure = heatmap(scores, ["a"], ["b", "c"], **NAMES, annotate=True)
    mesh = figure.axes[0].collections[0]
    assert np.ma.getmaskarray(np.ma.asarray(mesh.get_array())).ravel().tolist() == [False, True]
    assert [t.get_text() for t in figure.axes[0].texts] == ["1", "−∞"]
    chart = live_heatmap(scores, ["a"], ["b", "c"], **NAMES).to_dict()
    assert [cell["column"] for cell in data(chart)] == ["b"]
    assert chart["encoding"]["x"]["scale"]["domain"] == [0, 1]


def test_masks_have_no_scale() -> None:
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    figure = heatmap(mask, list("abc"), list("abc"), **NAMES, annotate=True)
    assert len(figure.axes) == 1  # no colour bar
    assert [t.get_text() for t in figure.axes[0].texts] == list("100110111")


def test_a_mask_may_have_a_legend() -> None:
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    figure = heatmap(mask, list("abc"), list("abc"), **NAMES, value_label="may attend")
    mesh, bar = cast(QuadMesh, figure.axes[0].collections[0]), figure.axes[1]
    figure.draw_without_rendering()
    assert bar.get_ylabel() == "may attend"
    colours = {
        label.get_text(): mesh.to_rgba(np.array([y]))[0]
        for y, label in zip(bar.get_yticks(), bar.get_yticklabels(), strict=True)
    }
    values = np.asarray(mesh.get_array()).ravel()
    drawn = np.asarray(mesh.get_facecolor())
    assert all(
        (drawn[i] == colours["yes" if true else "no"]).all() for i, true in enumerate(values)
    )
    assert set(values) == {0, 1}


def test_panels_may_share_a_scale() -> None:
    axes = canvas(1, 2)[1]
    for ax, factor in zip(axes[0], (1.0, 0.1), strict=True):
        heatmap(factor * np.array([[-1.0, 1.0]]), ["a"], ["b", "c"], **NAMES, limits=(-2, 2), ax=ax)
    left, right = (ax.collections[0] for ax in axes[0])
    assert left.get_clim() == right.get_clim() == (-2, 2)
    assert left.cmap(left.norm(0.5)) == right.cmap(right.norm(0.5))


def test_many_numbers_are_labelled_thinly_and_tokens_always() -> None:
    matrix = np.zeros((100, 60))
    axes = heatmap(matrix, list(range(100)), ["token"] * 60, **NAMES).axes[0]
    rows = texts(axes.get_yticklabels())
    assert 10 <= len(rows) <= 20
    assert [int(row) + 0.5 for row in rows] == list(axes.get_yticks())
    assert len(texts(axes.get_xticklabels())) == 60


@pytest.mark.parametrize("draw", [heatmap, live_heatmap])
def test_labels_must_fit(draw: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\), but its labels need \(3, 2\)"):
        draw(NUMBERS, COLUMNS, ROWS, **NAMES)


@pytest.mark.parametrize("draw", [heatmap, live_heatmap])
@pytest.mark.parametrize("missing", NAMES)
def test_matrix_axes_must_be_named(draw: Callable[..., Any], missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        draw(NUMBERS, ROWS, COLUMNS, **(NAMES | {missing: " "}))


# Lines and bars


def test_lines_hold_their_series() -> None:
    axes = lines(CURVES, **AXES, log_y=True).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("update", "rate")
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "log")
    # Three, two and one decade: labels are plain numbers, and do not crowd.
    for top in (300, 30, 8):
        figure = lines({"a": ([1, 2], [0.3, top])}, **AXES, log_y=True)
        figure.canvas.draw()
        ticks = figure.axes[0].yaxis.get_ticklabels(which="both")
        labels = [tick.get_text() for tick in ticks if tick.get_text()]
        assert {"1"} < set(labels)
        assert all(float(label.replace(",", "")) for label in labels)
        assert len(labels) < 14
    figure = lines({"a": ([1, 2], [1e-6, 1])}, **AXES, log_y=True)  # one notation on an axis
    figure.canvas.draw()
    labels = [tick.get_text() for tick in figure.axes[0].yaxis.get_ticklabels(which="both")]
    assert all("10^{" in label for label in labels if label)
    drawn = {line.get_label(): line for line in axes.lines}
    assert list(drawn) == list(CURVES)
    for name, (x, y) in CURVES.items():
        assert np.asarray(drawn[name].get_xydata()).tolist() == [
            list(p) for p in zip(x, y, strict=True)
        ]
    legend = axes.get_legend()
    assert legend is not None
    assert texts(legend.get_texts()) == list(CURVES)
    assert len({line.get_color() for line in axes.lines}) == 2


def test_bars_are_named_and_measured() -> None:
    axes = bars({"encoder": 18.0, "decoder": 25.0}, value_label="M", name_label="part").axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("M", "part")
    assert texts(axes.get_yticklabels()) == ["encoder", "decoder"]
    bars_drawn = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    assert [bar.get_width() for bar in bars_drawn] == [18, 25]
    assert axes.yaxis_inverted()  # the first on top
    assert texts(axes.texts) == ["18", "25"]


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ((0.146, 0.14623), ["0.1460", "0.1462"]),
        ((36.8421, 6.98304, 4.5491), ["36.84", "6.98", "4.55"]),
        ((100, 33.0001), ["100", "33"]),
        ((99.96, 0.5), ["99.96", "0.50"]),
        ((1234.5, -2000), ["1,234", "-2,000"]),
        ((0, 0), ["0", "0"]),
        ((float("nan"), 2.5), ["", "2.5"]),  # of no bar there is no end
    ],
)
def test_bars_of_a_figure_have_equally_many_decimals(
    values: tuple[float, ...], ends: list[str]
) -> None:
    names = dict(zip("abc", values, strict=False))
    assert texts(bars(names, value_label="x", name_label="y").axes[0].texts) == ends


def test_bars_on_a_logarithmic_scale_have_equally_many_digits() -> None:
    figure = bars({"a": 0.0123456, "b": 12.34567}, value_label="x", name_label="y", log=True)
    assert texts(figure.axes[0].texts) == ["0.01235", "12.35"]


def test_long_numbers_stay_readable() -> None:
    figure = bars({"whole": 65_000_000}, value_label="parameters", name_label="model")
    figure.canvas.draw()
    axes = figure.axes[0]
    assert texts(axes.texts) == ["65,000,000"]
    assert "60M" in texts(axes.get_xticklabels())


@pytest.mark.parametrize("draw", [lines, live_line_chart])
@pytest.mark.parametrize("missing", AXES)
def test_line_axes_must_be_named(draw: Callable[..., Any], missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        draw(CURVES, **(AXES | {missing: ""}))


def test_bar_axes_must_be_named() -> None:
    with pytest.raises(ValueError, match="value_label"):
        bars({"a": 1.0}, value_label="", name_label="part")


def test_parts_share_a_canvas() -> None:
    figure, axes = canvas(1, 2, size=(6, 3))
    assert axes.shape == (1, 2)
    assert heatmap(NUMBERS, ROWS, COLUMNS, **NAMES, ax=axes[0, 0]) is figure
    assert lines(CURVES, **AXES, ax=axes[0, 1]) is figure
    assert figure.get_size_inches().tolist() == [6, 3]


# On the page


def test_picture_follows_the_text_and_needs_nothing() -> None:
    picture = show(lines(CURVES, **AXES), 'Up "and" down')
    assert picture.png.startswith(b"\x89PNG")
    assert repr(picture) == 'Up "and" down'
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {"text/html", "image/png", "text/plain"}
    svg = page_svg(picture)
    assert svg.get("aria-label") == 'Up "and" down'
    assert svg.get("role") == "img"
    assert svg.get("viewBox")  # without it the drawing could not shrink
    assert "currentColor" in picture.html
    assert figures.INK not in picture.html
    assert "<style" not in picture.html
    assert not re.search(r'(href|src)="(?!#)', picture.html)
    assert "update" in picture.html  # text stays text


def test_picture_is_closed() -> None:
    figure, _ = plt.subplots()
    show(figure, "nothing")
    assert not plt.fignum_exists(figure.number)


def test_same_figure_same_bytes() -> None:
    pictures = [show(heatmap(NUMBERS, ROWS, COLUMNS, **NAMES), "numbers") for _ in range(2)]
    assert pictures[0] == pictures[1]
    charts = [interactive_chart(live_line_chart(CURVES, **AXES), "curves") for _ in range(2)]
    assert charts[0] == charts[1]


def test_drawings_on_one_page_do_not_share_names() -> None:
    pages = [show(lines({"a": ([0, 1], [0, k])}, **AXES), "a").html for k in (1, 2)]
    ids = [set(re.findall(r'\bid="([^"]+)"', page)) for page in pages]
    assert ids[0]
    assert not ids[0] & ids[1]
    for page, own in zip(pages, ids, strict=True):
        used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)
        assert {a or b for a, b in used} <= own


@pytest.mark.parametrize("empty", ["", "  "])
def test_alternative_text_is_mandatory(empty: str) -> None:
    with pytest.raises(ValueError, match="alt_text"):
        show(lines(CURVES, **AXES), empty)
    with pytest.raises(ValueError, match="alt_text"):
        interactive_chart(live_line_chart(CURVES, **AXES), empty)


# Charts


def shown_cells(chart: alt.Chart) -> tuple[dict[str, Any], list[tuple[str, str, float]]]:
    """What a live matrix says, by the labels that the reader sees on its axes."""
    spec = chart.to_dict()
    labels = {}
    for axis, field in (("x", "j"), ("y", "i")):
        assert spec["encoding"][axis]["field"] == field
        expression = spec["encoding"][axis]["axis"]["labelExpr"]
        names, _, rest = expression.rpartition("[datum.value]")
        assert not rest
        labels[field] = json.loads(names)
    return spec, [(labels["i"][c["i"]], labels["j"][c["j"]], c["value"]) for c in data(spec)]


def test_live_heatmap_rows_are_rows() -> None:
    spec, cells = shown_cells(live_heatmap(NUMBERS, ROWS, COLUMNS, **NAMES))
    assert cells == [(ROWS[i], COLUMNS[j], NUMBERS[i][j]) for i in range(2) for j in range(3)]
    assert spec["encoding"]["y"]["axis"]["title"] == "query"
    assert spec["encoding"]["x"]["axis"]["title"] == "key"
    for cell, (row, column, _) in zip(data(spec), cells, strict=True):
        assert (cell["row"], cell["column"]) == (row, column)  # what the tooltip says


@pytest.mark.parametrize(("hover", "event"), [(False, "click"), (True, "pointerover")])
def test_rows_are_picked_by_click_or_by_pointing(hover: bool, event: str) -> None:
    (pick,) = live_heatmap(NUMBERS, ROWS, COLUMNS, **NAMES, hover=hover).to_dict()["params"]
    assert (pick["select"]["on"], pick["select"]["fields"]) == (event, ["i"])


def test_large_live_heatmap_stays_on_the_page() -> None:
    spec = live_heatmap(np.eye(100), list(range(100)), list(range(100)), **NAMES).to_dict()
    assert max(spec["width"], spec["height"]) <= 480
    labels = json.loads(spec["encoding"]["x"]["axis"]["labelExpr"].partition("[datum")[0])
    assert len(labels) == 100
    assert all(label in ("", str(place)) for place, label in enumerate(labels))
    assert 10 <= sum(map(bool, labels)) <= 20


def test_live_lines_hold_their_series() -> None:
    spec = live_line_chart(CURVES, **AXES, log_x=True, log_y=True).to_dict()
    values = data(spec)
    for name, (x, y) in CURVES.items():
        mine = [(v["x"], v["y"]) for v in values if v["curve"] == name]
        assert mine == list(zip(x, y, strict=True))
    for layer in spec["layer"]:
        for axis, label in (("x", "update"), ("y", "rate")):
            assert layer["encoding"][axis]["title"] == label
            assert layer["encoding"][axis]["scale"]["type"] == "log"


def test_live_lines_refuse_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        live_line_chart({"a": ([1, 2], [1])}, **AXES)


def test_live_has_a_still_picture_and_its_chart() -> None:
    picture = interactive_chart(
        live_heatmap(NUMBERS, ["</script>", "b"], COLUMNS, **NAMES), "numbers"
    )
    still = page_svg(picture)
    assert still.get("aria-label") == "numbers"
    (spec,) = re.findall(r'<script type="application/json">(.*?)</script>', picture.html, re.S)
    chart = json.loads(spec)
    assert chart["description"] == "numbers"
    assert data(chart)[0]["row"] == "</script>"
    assert "vega-embed" in picture.html  # by which the build knows that Vega is needed
    assert figures.INK not in picture.html
    assert not re.search(r'(href|src)="(?!#)', picture.html)
    assert picture.png.startswith(b"\x89PNG")


def test_live_takes_any_chart() -> None:
    points = alt.InlineData(values=[{"a": 1, "b": 2}])
    chart = alt.Chart(points).mark_point().encode(x=alt.X("a:Q"), y=alt.Y("b:Q"))
    assert "<svg" in interactive_chart(chart | chart, "two points").html


def test_colab_uses_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    picture = interactive_chart(live_line_chart(CURVES, **AXES), "curves")
    assert "cdn.jsdelivr.net" in picture.html


# The drawings by hand


@pytest.mark.parametrize(
    "name", [*"transformer attention multi_head how_far stacked_and_dilated".split()]
)
def test_drawing_describes_itself_and_follows_the_text(name: str) -> None:
    text = (STATIC / f"{name}.svg").read_text()
    svg = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    labels = svg.attrib["aria-labelledby"].split()
    (title,), (desc,) = (svg.findall(f"{space}{tag}") for tag in ("title", "desc"))
    described = {title.get("id"), desc.get("id")}
    assert set(labels) == described
    assert svg.get("fill") == "currentColor"
    # Inside a page, its styles and names must stay its own.
    own = svg.attrib["id"]
    style = svg.findtext(f"{space}style")
    assert style is not None
    selectors = re.findall(r"^\s*([^{]+)\{", style, re.MULTILINE)
    assert all(s.startswith((f"#{own} ", "svg:root")) for s in selectors)
    assert all(i.startswith(own) for i in re.findall(r'\bid="([^"]+)"', text))
    # At 400 px, less the margins of the page, text keeps at least 8 px.
    width = float(svg.attrib["viewBox"].split()[2])
    sizes = [float(size) for size in re.findall(r"font-size[:=]\W*([\d.]+)", text)]
    assert min(sizes) * 360 / width >= 7
    assert float(svg.attrib["font-size"]) * 360 / width >= 9


def test_tables_show_their_cells() -> None:
    made = Table(["a", "long head"], [["1 < 2", "x"], ["", "&"]])
    assert repr(made).splitlines() == ["a      long head", "1 < 2  x", "       &"]
    tree = ET.fromstring(made._repr_html_())
    assert [[cell.text or "" for cell in row] for row in tree] == [list(made.head), *made.rows]
    assert [cell.tag for cell in tree[0]] == ["th", "th"]
    with pytest.raises(ValueError, match="2 columns, but a row of 1: \\['x'\\]"):
        Table(["a", "b"], [["x"]])
    with pytest.raises(TypeError, match="cells must be text"):
        Table(["a"], [[1]])  # type: ignore[list-item]


def test_an_image_shown_twice_leaves_no_id_twice() -> None:
    """Matplotlib names an image by what it contains."""
    figure, axes = canvas(1, 2)
    for ax in axes.flat:
        ax.imshow([[0.0, 1.0], [1.0, 0.0]])
    ids = re.findall(r'\bid="([^"]*)"', show(figure, "Twice the same.").html)
    assert ids
    assert len(ids) == len(set(ids))
