"""Layer and head of a live map can be chosen, and its rows and cells tell what they hold."""

import json
from typing import Literal

import pytest
from playwright.sync_api import Browser

PAGE = "book/results/attention_maps.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_heads_can_be_chosen(browser: Browser, site: str, scheme: Literal["light", "dark"]) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.goto(f"{site}/{PAGE}")
    box = page.locator(".live-figure[data-live=yes]").first
    box.wait_for()
    text = box.locator("script[type='application/json']").text_content()
    assert text is not None
    spec = json.loads(text)
    (data,) = spec["datasets"].values()
    cells = box.locator(".moving .mark-rect path")
    menus = box.locator(".moving select")
    assert menus.count() == 2
    number = next(k for k, cell in enumerate(data) if (cell["i"], cell["j"]) == (2, 3))
    for layer, head in ((0, 0), (1, 2)):
        menus.nth(0).select_option(str(layer + 1))
        menus.nth(1).select_option(str(head + 1))
        page.mouse.move(0, 0)
        cells.nth(number).hover()
        told = page.locator("#vg-tooltip-element").inner_text().split()
        cell = data[number]
        assert told[:5] == ["query", cell["row"], "key", cell["column"], "weight"]
        assert abs(float(told[5]) - cell["of"][layer][head]) < 1e-3
    page.wait_for_function(
        """(rows) => {
          const cells = [...document.querySelector(".live-figure")
            .querySelectorAll(".moving .mark-rect path")];
          return rows.every((row, k) =>
            (Number(cells[k].getAttribute("opacity")) === 1) === (row === 2));
        }""",
        arg=[cell["i"] for cell in data],
    )
    # The menus are read on the page's ground: their names have the colour of the text.
    text = page.evaluate("getComputedStyle(document.body).color")
    names = box.locator(".vega-bindings").evaluate("e => getComputedStyle(e).color")
    assert names == text
    context.close()
