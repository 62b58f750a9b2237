"""The sliders of the complexity chapter move formulas and measured points together."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

CHAPTER = "book/model/complexity.html"
# Curves by their colour and the corners of their paths, dots, and the dashed lines at n: all on
# the screen's scale, as both charts have their own.
DRAWN = """() => {
  const box = document.querySelector(".live-figure .moving");
  const all = (kind) => [...box.querySelectorAll(`.${kind}.role-mark > :is(path, line)`)];
  const at = (mark, x, y) => {
    const point = new DOMPoint(x, y).matrixTransform(mark.getScreenCTM());
    return [point.x + scrollX, point.y + scrollY];
  };
  const corners = (path) => [...path.getAttribute("d").matchAll(/(-?[\\d.]+),(-?[\\d.]+)/g)]
    .map((pair) => at(path, Number(pair[1]), Number(pair[2])));
  return {
    curves: all("mark-line").map((path) => [path.getAttribute("stroke"), corners(path)]),
    dots: all("mark-symbol").map((path) => [path.getAttribute("fill"), at(path, 0, 0)]),
    rules: all("mark-rule").map((line) => at(line, 0, 0)[0]),
  };
}"""


@pytest.fixture
def page(browser: Browser, site: str) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.goto(f"{site}/{CHAPTER}")
    page.wait_for_selector(".live-figure[data-live=yes] input[type=range]")
    yield page
    context.close()


def slide(page: Page, place: int, value: int) -> None:
    """Move a slider, the first is 0, and wait until the page has drawn what follows."""
    page.locator(".live-figure input[type=range]").nth(place).evaluate(
        """(slider, value) => {
          slider.value = value;
          slider.dispatchEvent(new Event("input"));
          slider.dispatchEvent(new Event("change"));
          return new Promise((done) => setTimeout(done, 300));
        }""",
        value,
    )


def assert_dots_on_curves(drawn: dict[str, Any]) -> None:
    assert len(drawn["curves"]) == 5 + 5
    assert len(drawn["dots"]) == 5 * 3 + 5 * 4
    for colour, (x, y) in drawn["dots"]:
        near = [
            max(abs(x - a), abs(y - b))
            for stroke, corners in drawn["curves"]
            if stroke == colour
            for a, b in corners
        ]
        assert min(near) < 0.5, (colour, x, y)


def test_measured_points_lie_on_the_curves_wherever_the_sliders_stand(page: Page) -> None:
    before = page.evaluate(DRAWN)
    assert_dots_on_curves(before)
    slide(page, 0, 4)  # n: the dashed lines alone
    after = page.evaluate(DRAWN)
    assert after["curves"] == before["curves"]
    assert len(after["rules"]) == 2
    assert all(new < old for new, old in zip(after["rules"], before["rules"], strict=True))
    for place, value in ((1, 6), (2, 4), (3, 2)):  # d, k, r
        slide(page, place, value)
        before, after = after, page.evaluate(DRAWN)
        assert after["curves"] != before["curves"]
        assert_dots_on_curves(after)
