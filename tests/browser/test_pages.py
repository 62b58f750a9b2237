"""Every page of the built book works in a browser that reaches nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Route

HTML = Path(__file__).parents[2] / "_build" / "html"
SKIPPED = ("_static", "_sources", "_modules", "_images")
PAGES = [
    path
    for path in sorted(page.relative_to(HTML).as_posix() for page in HTML.rglob("*.html"))
    if not path.startswith(SKIPPED)
]
LOOKS = {
    "light": ("light", 1280),
    "dark": ("dark", 1280),
    "narrow": ("light", 400),
    "narrow-dark": ("dark", 400),
}


@contextmanager
def opened(
    browser: Browser, site: str, path: str, look: str = "light"
) -> Iterator[tuple[Page, list[str]]]:
    """Open a page without a network, and note everything that goes wrong."""
    scheme, width = LOOKS[look]
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)

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


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("path", PAGES)
def test_page(browser: Browser, site: str, path: str, look: str) -> None:
    """No request leaves, the console is empty, and what should be drawn is."""
    with opened(browser, site, path, look) as (page, wrong):
        charts = dead_charts(page)
        assert wrong + untypeset(page) + charts + too_wide(page) == []
        if path != "index.html":
            theme = page.evaluate("document.documentElement.dataset.theme")
            assert theme == LOOKS[look][0]


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
def test_broken_page_is_noticed(browser: Browser, tmp_path: Path, site: str, kind: str) -> None:
    """Each of the checks above fails on a page made to break it."""
    body = f"<!doctype html><title>t</title><main></main>{BROKEN.get(kind, '')}"
    context = browser.new_context()
    context.close()
    path = HTML / "_static" / f"broken-{kind}.html"
    path.write_text(body, encoding="utf-8")
    try:
        with opened(browser, site, f"_static/{path.name}") as (page, wrong):
            found = wrong + untypeset(page) + dead_charts(page) + too_wide(page)
    finally:
        path.unlink()
    assert bool(found) == (kind != "sound"), found
