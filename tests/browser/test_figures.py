"""Figures answer to the mouse, print, follow the theme, and need no scripts."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ElementHandle, Locator, Page

HTML = Path(__file__).parents[2] / "_build" / "html"
FIGURES = "book/reference/figures.html"
LIVE = [
    path.relative_to(HTML).as_posix()
    for path in sorted((HTML / "book").rglob("*.html"))
    if 'class="live-figure"' in path.read_text(encoding="utf-8")
]
# What is behind an element: the nearest background that is not transparent.
BEHIND = """(element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (colour !== "rgba(0, 0, 0, 0)") return colour;
  }
}"""


@pytest.fixture
def page(browser: Browser, site: str) -> Iterator[Page]:
    """Open the chapter on figures in the dark, its charts alive."""
    context = browser.new_context(color_scheme="dark", viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.goto(f"{site}/{FIGURES}")
    page.wait_for_selector(".live-figure[data-live=yes]")
    yield page
    context.close()


@pytest.mark.parametrize("path", LIVE)
def test_charts_come_to_life(browser: Browser, site: str, path: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{site}/{path}")
    page.wait_for_function(
        "document.querySelectorAll('.live-figure:not([data-live=yes])').length === 0"
    )
    for box in page.locator(".live-figure").all():
        assert box.locator(".moving svg").count() == 1
        if box.locator(".moving").evaluate("e => e.offsetParent !== null"):
            assert not box.locator(".still").is_visible()
    context.close()


def test_figures_page_has_charts() -> None:
    assert FIGURES in LIVE


def test_cell_tells_its_place_and_click_keeps_its_row(page: Page) -> None:
    cells = page.locator(".live-figure").first.locator(".moving .mark-rect path")
    cells.nth(7).hover()  # the second row of five, the third column
    told = page.locator("#vg-tooltip-element").inner_text().split()
    assert told[:4] == ["query", "cat", "key", "saw"]
    cells.nth(7).click()
    page.wait_for_function(
        """() => {
          const cells = [...document.querySelectorAll(".moving .mark-rect path")];
          return cells.slice(0, 25).every((cell, i) =>
            (Number(cell.getAttribute("opacity")) === 1) === (5 <= i && i < 10));
        }"""
    )


def test_legend_singles_out_a_curve(page: Page) -> None:
    box = page.locator(".live-figure").nth(1)
    box.locator(".moving .role-legend-label text").nth(1).click()
    page.wait_for_function(
        """() => [...document.querySelectorAll(".live-figure")][1]
          .querySelectorAll(".moving .mark-line path[opacity='0.15']").length === 2"""
    )
    box.locator(".moving .mark-symbol path").nth(50).hover()
    assert "2 waves" in page.locator("#vg-tooltip-element").inner_text()


def test_a_chart_is_read_and_used_by_keyboard(page: Page) -> None:
    chart = page.locator(".live-figure .moving").first
    said = chart.locator(".chart-said")
    chart.focus()
    assert "Arrow keys" in said.inner_text()
    moves = {
        "Home": "the the",
        "ArrowRight": "the cat",
        "ArrowDown": "cat cat",
        "ArrowLeft": "cat the",
    }
    for key, names in moves.items():
        chart.press(key)
        row, column = names.split()
        assert said.inner_text().startswith(f"query {row}, key {column}, weight 0.")
    chart.press("ArrowLeft")  # nothing lies there
    assert said.inner_text().startswith("query cat, key the, ")
    frame, cell = chart.locator(".chart-at"), chart.locator(".mark-rect path").nth(5)
    outer, inner = frame.bounding_box(), cell.bounding_box()
    assert outer is not None
    assert inner is not None
    assert max(abs(outer[side] + 3 - inner[side]) for side in ("x", "y")) < 2
    kept = """(few) => [...document.querySelectorAll(".moving")][0]
      .querySelectorAll(".role-mark.mark-rect path[opacity='1']").length === few"""
    chart.press("Enter")
    page.wait_for_function(kept, arg=5)
    assert said.inner_text().startswith("Selected: query cat")
    chart.press("Escape")
    page.wait_for_function(kept, arg=25)
    assert not frame.is_visible()


def test_a_legend_is_used_by_keyboard(page: Page) -> None:
    chart = page.locator(".live-figure .moving").nth(1)
    chart.press("End")
    assert chart.locator(".chart-said").inner_text() == "3 waves"
    chart.press("Enter")
    page.wait_for_function(
        """() => [...document.querySelectorAll(".moving")][1]
          .querySelectorAll(".mark-line path[opacity='0.15']").length === 2"""
    )


def test_a_chart_is_named_by_what_its_sliders_say(page: Page, site: str) -> None:
    page.goto(f"{site}/book/model/attention.html")
    chart = page.locator(".live-figure[data-live=yes] .moving:has(.vega-bind)").first
    before = chart.get_attribute("aria-label") or ""
    assert re.match(r"Figure [\d.]+, angle of the query, in degrees 75, ", before)
    chart.locator("input[type=range]").first.press("ArrowRight")
    assert "angle of the query, in degrees 80" in (chart.get_attribute("aria-label") or "")


def test_the_query_can_be_dragged(page: Page, site: str) -> None:
    page.goto(f"{site}/book/model/attention.html")
    box = page.locator(".live-figure[data-live=yes]:has(.vega-bind)").first
    sliders = box.locator("input[type=range]")

    def set_to() -> list[float]:
        return [float(slider.input_value()) for slider in sliders.all()]

    plane = box.locator(".moving .concat_0_group path.background").first
    plane.scroll_into_view_if_needed()
    square = plane.bounding_box()
    assert square is not None
    size = square["width"] / 6.4  # of one unit: the plane reaches from -3.2 to 3.2
    x, y = square["x"] + 3.2 * size, square["y"] + 3.2 * size  # the origin
    page.mouse.move(x + size, y - size)
    assert set_to() == [75, 1]  # not pressed
    page.mouse.down()
    page.mouse.move(x - 2 * size, y, steps=4)
    page.mouse.up()
    assert set_to() in ([180, 2], [-180, 2])
    page.mouse.move(x, y - size)
    assert set_to()[1] == 2  # let go
    page.wait_for_function("n => n.ariaLabel.includes('query 2')", arg=chart_of(box))


def chart_of(box: Locator) -> ElementHandle:
    """Return the chart in a box."""
    found = box.locator(".moving").element_handle()
    assert found is not None
    return found


def test_paper_gets_the_still_picture_in_dark_ink(page: Page) -> None:
    page.evaluate(
        """() => addEventListener("beforeprint", () => {
          window.ink = getComputedStyle(document.querySelector(".still svg")).color;
        })"""
    )
    page.pdf()
    assert max(map(int, re.findall(r"\d+", page.evaluate("window.ink")))) < 100
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.emulate_media(media="print")
    box = page.locator(".live-figure").first
    assert box.locator(".still").is_visible()
    assert not box.locator(".moving").is_visible()


def test_without_scripts_the_still_picture_stays(browser: Browser, site: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site}/{FIGURES}")
    box = page.locator(".live-figure").first
    assert box.locator(".still").is_visible()
    assert not box.locator(".moving").is_visible()
    context.close()


def test_figures_stand_on_the_page_itself(page: Page) -> None:
    for figure in page.locator(".cell_output svg[role=img]").all():
        around = figure.evaluate(f"e => ({BEHIND})(e.closest('.cell'))")
        assert figure.evaluate(BEHIND) == around
    text = page.evaluate("getComputedStyle(document.querySelector('article p')).color")
    assert page.locator(".cell_output svg[role=img]").first.evaluate(
        "e => getComputedStyle(e).color"
    ) in {text, page.evaluate("getComputedStyle(document.body).color")}
