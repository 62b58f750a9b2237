"""Every page of the built book works in a browser that reaches nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Route

HTML = Path(__file__).parents[2] / "_build" / "html"
SKIPPED = ("_static", "_sources", "_modules", "_images")
PAGES = [
    path
    for path in sorted(page.relative_to(HTML).as_posix() for page in HTML.rglob("*.html"))
    if not path.startswith(SKIPPED) and path != "index.html"  # this one only redirects
]
WIDE, NARROW = 1280, 400


@contextmanager
def opened(
    browser: Browser, site: str, path: str, scheme: Literal["light", "dark"] = "light"
) -> Iterator[tuple[Page, list[str]]]:
    """Open a page without a network, and note everything that goes wrong."""
    wrong: list[str] = []
    viewport = {"width": WIDE, "height": 900}
    context = browser.new_context(viewport=viewport, color_scheme=scheme)

    def route(request: Route) -> None:
        url = request.request.url
        if url.startswith((f"{site}/", "data:", "blob:")):
            request.continue_()
        else:
            wrong.append(f"asks the network for {url}")
            request.abort()

    def console(message: ConsoleMessage) -> None:
        where = urlsplit(message.location.get("url", "")).path
        wrong.append(f"console: {message.type}: {message.text} ({where})")

    context.route("**/*", route)
    page = context.new_page()
    page.on("console", console)
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on(
        "response",
        lambda response: (
            response.ok
            or response.status == 304
            or wrong.append(f"{response.status} for {response.url}")
        ),
    )
    page.goto(f"{site}/{path}", wait_until="load")
    page.evaluate("() => window.MathJax?.startup?.promise")
    page.wait_for_load_state("networkidle")
    yield page, wrong
    context.close()


def too_wide(page: Page) -> list[str]:
    """Return what makes the page scroll sideways."""
    return page.evaluate(
        """() => {
          const width = document.documentElement.clientWidth;
          if (document.documentElement.scrollWidth <= width) return [];
          const scrolls = (element) => {
            for (let e = element.parentElement; e; e = e.parentElement)
              if (["auto", "scroll", "hidden"].includes(getComputedStyle(e).overflowX))
                return e !== document.body && e !== document.documentElement;
            return false;
          };
          return [...document.querySelectorAll("main *")]
            .filter((e) => e.getBoundingClientRect().right > width + 1 && !scrolls(e))
            .map((e) => `${e.tagName}.${e.className}: ${e.textContent.slice(0, 40)}`)
            .slice(0, 5).concat("the page scrolls sideways");
        }"""
    )


def untypeset(page: Page) -> list[str]:
    """Return the formulas that MathJax left as they were, or could not read."""
    return page.evaluate(
        r"""() => [
          ...[...document.querySelectorAll(".math")]
            .filter((e) => !e.querySelector("mjx-container")),
          ...document.querySelectorAll("mjx-merror, [data-mjx-error]"),
        ].map((e) => `not typeset: ${e.textContent.trim().slice(0, 60)}`)"""
    )


def dead_charts(page: Page) -> list[str]:
    """Return the charts that did not come to life."""
    return page.evaluate(
        """async () => {
          const charts = [...document.querySelectorAll(".vega-embed, [id^=altair-viz]")];
          const alive = (e) => e.querySelector("canvas, svg.marks, svg");
          for (let i = 0; i < 50 && !charts.every(alive); i++)
            await new Promise((done) => setTimeout(done, 100));
          return charts.filter((e) => !alive(e)).map((e) => `dead chart ${e.id}`);
        }"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_page(browser: Browser, site: str, path: str, scheme: Literal["light", "dark"]) -> None:
    """No request leaves, the console is empty, and what should be drawn is."""
    with opened(browser, site, path, scheme) as (page, wrong):
        faults = untypeset(page) + dead_charts(page) + too_wide(page)
        page.set_viewport_size({"width": NARROW, "height": 900})
        page.wait_for_timeout(100)
        faults += [f"at {NARROW} px: {fault}" for fault in too_wide(page)]
        assert wrong + faults == []
        assert page.evaluate("document.documentElement.dataset.theme") == scheme


def test_entry_leads_to_the_book(browser: Browser, site: str) -> None:
    """The address of the site opens the first page."""
    page = browser.new_page()
    page.goto(f"{site}/index.html")
    page.wait_for_url(f"{site}/book/index.html")
    page.close()


def test_something_was_tested() -> None:
    """The book has pages, among them math and live charts."""
    texts = [(HTML / path).read_text(encoding="utf-8") for path in PAGES]
    assert any('class="math' in text for text in texts)
    assert any("vega-embed" in text for text in texts)


BROKEN = {
    "outside": '<img src="https://example.com/x.png" alt="">',
    "console": "<script>console.log('hello')</script>",
    "error": "<script>throw new Error('no')</script>",
    "missing": '<script src="nowhere.js"></script>',
    "math": '<span class="math">x^2</span>',
    "chart": '<div id="altair-viz-1" class="vega-embed"></div>',
    "wide": '<main><div style="width:3000px">wide</div></main>',
}


@pytest.mark.parametrize("kind", ["sound", *BROKEN])
def test_broken_page_is_noticed(browser: Browser, site: str, kind: str) -> None:
    """Each of the checks above fails on a page made to break it."""
    body = f"<!doctype html><title>t</title><main></main>{BROKEN.get(kind, '')}"
    path = HTML / "_static" / f"broken-{kind}.html"
    path.write_text(body, encoding="utf-8")
    try:
        with opened(browser, site, f"_static/{path.name}") as (page, wrong):
            found = wrong + untypeset(page) + dead_charts(page) + too_wide(page)
    finally:
        path.unlink()
    assert bool(found) == (kind != "sound"), found
