"""Every page of the built book works in a browser that reaches nothing else."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Response, Route, TimeoutError

HTML = Path(__file__).parents[2] / "_build" / "html"
SKIPPED = ("_static", "_sources", "_modules", "_images")
PAGES = [
    path
    for path in sorted(page.relative_to(HTML).as_posix() for page in HTML.rglob("*.html"))
    if not path.startswith(SKIPPED) and path != "index.html"  # this one only redirects
]
WIDE, NARROW = 1280, 400
AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


Scheme = Literal["light", "dark"]


def order_of(path: str) -> tuple[tuple[Scheme, Scheme], tuple[int, int]]:
    """Return the schemes and the widths in which a page is seen, in their order.

    Loading and axe are slow, so they are crossed, not multiplied: a page is opened in one scheme
    and switched to the other, as a reader would do it, and each scheme is seen at one width. From
    page to page all pairs take turns.
    """
    number = PAGES.index(path)
    schemes: tuple[Scheme, Scheme] = ("light", "dark") if number % 2 == 0 else ("dark", "light")
    return schemes, (WIDE, NARROW) if number % 4 < 2 else (NARROW, WIDE)


@contextmanager
def opened(
    browser: Browser, site: str, path: str, scheme: Scheme = "light"
) -> Iterator[tuple[Page, list[str]]]:
    """Open a page without a network, and note everything that goes wrong."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": WIDE, "height": 900}, color_scheme=scheme)

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

    def answered(response: Response) -> None:
        if not response.ok and response.status != 304:
            wrong.append(f"{response.status} for {response.url}")

    context.route("**/*", route)
    page = context.new_page()
    page.on("console", console)
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("response", answered)
    for patience in (10_000, 30_000):  # milliseconds: now and then the end of a request is lost
        page.goto(f"{site}/{path}", wait_until="load")
        page.evaluate("() => window.MathJax?.startup?.promise")
        with suppress(TimeoutError):
            page.wait_for_load_state("networkidle", timeout=patience)
            break
    else:
        wrong.append("the network is never idle")
    yield page, wrong
    context.close()


def too_wide(page: Page) -> list[str]:
    """Return what makes the page scroll sideways."""
    found: list[str] = page.evaluate(
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
    return found


def cut_off(page: Page) -> list[str]:
    """Return the code, and the output of 100 characters and less, that its box cuts off."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll(".cell_input pre, .cell_output pre")]
          .filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth)
          .filter((e) => e.closest(".cell_input")
            || Math.max(...e.textContent.split("\\n").map((line) => line.length)) <= 100)
          .map((e) => `cut off: ${e.textContent.slice(0, 60)}`)"""
    )
    return found


def broken_words(page: Page) -> list[str]:
    """Return the words of code in tables that go on in the next line."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll(".bd-article table:not(.scoreboard) code")]
          .flatMap((code) => {
            const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
            const [range, found] = [new Range(), []];
            for (let text; (text = walker.nextNode());)
              for (const word of text.data.matchAll(/\\S+/g)) {
                range.setStart(text, word.index);
                range.setEnd(text, word.index + word[0].length);
                const boxes = [...range.getClientRects()];
                const lines = new Set(boxes.map((box) => Math.round(box.top)));
                if (lines.size > 1) found.push(`broken in a table: ${word[0]}`);
              }
            return found;
          })"""
    )
    return found


def untypeset(page: Page) -> list[str]:
    """Return the formulas that MathJax left as they were, or could not read."""
    found: list[str] = page.evaluate(
        r"""() => [
          ...[...document.querySelectorAll(".math")]
            .filter((e) => !e.querySelector("mjx-container")),
          ...document.querySelectorAll("mjx-merror, [data-mjx-error]"),
        ].map((e) => `not typeset: ${e.textContent.trim().slice(0, 60)}`)"""
    )
    return found


def dead_charts(page: Page) -> list[str]:
    """Return the charts that did not come to life."""
    found: list[str] = page.evaluate(
        """async () => {
          const charts = [...document.querySelectorAll(".vega-embed, [id^=altair-viz]")];
          const alive = (e) => e.querySelector("canvas, svg.marks, svg");
          for (let i = 0; i < 50 && !charts.every(alive); i++)
            await new Promise((done) => setTimeout(done, 100));
          return charts.filter((e) => !alive(e)).map((e) => `dead chart ${e.id}`);
        }"""
    )
    return found


WORDS = ":is(.bd-article, pre) :is(span, em, strong, code):not([id], [role])"


def keep_one_of_each_kind(page: Page, selector: str = "body *:not(script, style, svg)") -> None:
    """Turn elements that hold text alone into plain text, but for one of each kind.

    Axe looks at every element, and pages have thousands in a few dozen colours. A kind is what
    decides colours: tags, classes and styles of an element and of all around it, with the colours
    that it has, and the backgrounds behind it. What is inside a picture is not looked at.
    """
    page.evaluate(
        """(selector) => {
          document.querySelectorAll("svg[role=img] > *").forEach((e) => e.remove());
          const kinds = new Map();  // of all elements, before anything changes
          for (const e of document.body.querySelectorAll("*")) {
            const s = getComputedStyle(e);
            kinds.set(e, [kinds.get(e.parentElement), e.tagName, e.className, e.style.cssText,
              s.color, s.backgroundColor, s.opacity, s.fontSize, s.fontWeight].join("|"));
          }
          const kept = new Set();
          const every = [...document.querySelectorAll(selector)].reverse();  // inner ones first
          const { body } = document;
          body.remove();  // a change is cheap where no style sheet sees it
          for (const e of every) {
            if (e.firstElementChild || !e.textContent) continue;
            if (kept.has(kinds.get(e))) e.replaceWith(e.textContent);
            else kept.add(kinds.get(e));
          }
          body.normalize();
          document.documentElement.append(body);
        }""",
        selector,
    )


COLOURS = ["color-contrast", "link-in-text-block"]  # axe's rules that compare colours


def found_by_axe(page: Page, colours: bool) -> list[str]:
    """Return what axe finds against WCAG 2.1, levels A and AA: in colours, or in all else."""
    found: list[str] = page.evaluate(
        """async ([colours, rules]) => {
          const { violations } = await axe.run(document, {
            runOnly: colours ? rules : ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"],
            resultTypes: ["violations"],
            preload: false,
            rules: {
              "label-content-name-mismatch": { enabled: !colours },
              ...Object.fromEntries(rules.map((rule) => [rule, { enabled: colours }])),
            },
          });
          return violations.flatMap(({ id, nodes }) => nodes.slice(0, 3).map((node) =>
            `${id}: ${node.html.slice(0, 100)}: ${node.failureSummary.slice(-150)}`));
        }""",
        [colours, COLOURS],
    )
    return found


def barriers(page: Page) -> list[str]:
    """Return what keeps people out, but for colours; this changes the page."""
    page.evaluate(AXE)
    ids: list[str] = page.evaluate('[...document.querySelectorAll("main [id]")].map((e) => e.id)')
    keep_one_of_each_kind(page, WORDS)
    twice = [f"two elements have id {i}" for i, count in Counter(ids).items() if count > 1]
    return found_by_axe(page, colours=False) + twice


def pale(page: Page) -> list[str]:
    """Return the words that are too pale, or links like other words; this changes the page."""
    keep_one_of_each_kind(page)
    return found_by_axe(page, colours=True)


def tiny_letters(page: Page) -> list[str]:
    """Return the figures that have shrunk until their letters are too small to be read.

    Exponents and indices, less than ten pixels at full size, are not counted.
    """
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("main figure svg")].flatMap((svg) => {
          const box = svg.viewBox.baseVal, width = svg.getBoundingClientRect().width;
          if (!box || !box.width || !width) return [];
          const [full, now] = [svg.width.baseVal.value / box.width, width / box.width];
          const sizes = [...svg.querySelectorAll("text, tspan:not(.sub)")]
            .map((e) => parseFloat(getComputedStyle(e).fontSize)).filter((s) => s * full >= 10);
          const least = Math.min(...sizes) * now;
          const name = svg.closest("figure").id;
          return least < 9 ? [`letters of ${least.toFixed(1)} px in ${name}`] : [];
        })"""
    )
    return found


def unwrapped(page: Page) -> list[str]:
    """Return the printed sentences that scroll sideways."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll(".cell_output .sentences pre")]
          .filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1)
          .map((e) => `a printed sentence scrolls: ${e.textContent.slice(0, 60)}`)"""
    )
    return found


def unreachable(page: Page) -> list[str]:
    """Return the controls that the keyboard passes over, or that do not show that they have it."""
    found: list[str] = page.evaluate(
        """() => {
          const names = "a[href], button, input, select, textarea, summary, [role=button]";
          const controls = [...document.querySelectorAll(`main :is(${names})`)]
            .filter((e) => e.checkVisibility({visibilityProperty: true}) && !e.disabled);
          const faults = controls.flatMap((e) => {
            e.focus({focusVisible: true, preventScroll: true});
            const style = getComputedStyle(e);
            const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
            const kept = document.activeElement === e && e.tabIndex >= 0;
            return kept && seen ? [] : [`${kept ? "unseen" : "unreachable"}: ${e.outerHTML}`];
          });
          document.activeElement.blur();
          return faults.map((fault) => fault.slice(0, 100));
        }"""
    )
    return found


def spoilt_on_paper(page: Page) -> list[str]:
    """Return what a printer cuts off, and the buttons that it prints; this narrows the window."""
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 700, "height": 1000})
    found: list[str] = page.evaluate(
        """() => [
          ...[...document.querySelectorAll("main :is(pre, td)")]
            .filter((e) => e.clientWidth && (e.scrollWidth > e.clientWidth + 1
              || e.getBoundingClientRect().right > innerWidth)),
          ...[...document.querySelectorAll("main :is(button, input:not([type=search]), select)")]
            .filter((e) => e.checkVisibility({visibilityProperty: true})),
        ].map((e) => `on paper: ${e.outerHTML.slice(0, 80)}`)"""
    )
    page.emulate_media(media="screen")
    return found


def resize(page: Page, width: int) -> None:
    """Give the window another width."""
    size = page.viewport_size
    if size is None or size["width"] != width:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(450)  # the theme looks 300 ms later which boxes scroll


def switch(page: Page, scheme: Scheme) -> None:
    """Change the colours by the page's own button, which takes turns of three."""
    page.add_style_tag(content="*, *::before, *::after { transition: none !important }")
    for _ in range(3):
        if page.evaluate("document.documentElement.dataset.theme") != scheme:
            page.evaluate("document.querySelector('.theme-switch-button').click()")
    assert page.evaluate("document.documentElement.dataset.theme") == scheme


@pytest.mark.parametrize("path", PAGES)
def test_page(browser: Browser, site: str, path: str) -> None:
    """No request leaves, the console is empty, and what should be drawn is, in both schemes."""
    (first, second), widths = order_of(path)
    with opened(browser, site, path, first) as (page, wrong):
        assert page.evaluate("document.documentElement.dataset.theme") == first
        faults = untypeset(page) + dead_charts(page) + too_wide(page) + cut_off(page)
        faults += broken_words(page) + unreachable(page) + spoilt_on_paper(page)
        resize(page, NARROW)
        narrow = too_wide(page) + tiny_letters(page) + broken_words(page) + unwrapped(page)
        faults += [f"at {NARROW} px: {fault}" for fault in narrow]
        resize(page, widths[0])
        switch(page, second)
        faults += dead_charts(page) + barriers(page)
        faults += [f"{second} at {widths[0]} px: {fault}" for fault in pale(page)]
        resize(page, widths[1])
        switch(page, first)
        faults += [f"{first} at {widths[1]} px: {fault}" for fault in pale(page)]
        assert wrong + faults == []


def test_entry_leads_to_the_book(browser: Browser, site: str) -> None:
    """The address of the site opens the first page."""
    page = browser.new_page()
    page.goto(f"{site}/index.html")
    page.wait_for_url(f"{site}/book/index.html")
    page.close()


@pytest.mark.parametrize(("box", "word"), [("pre", "span"), ("p", "em")])
def test_a_pale_word_is_found_among_many(browser: Browser, box: str, word: str) -> None:
    """What is left of the words with a style still has one of every colour in every kind of box."""
    page = browser.new_page()
    line = f'<{word} class="k">def</{word}> <{word} class="n">f</{word}> '
    page.set_content(
        '<html lang="en"><title>t</title><style>.k { color: #222 } .note .k { color: #ccc }</style>'
        f'<main class="bd-article"><h1>t</h1><{box}>{line * 9}</{box}>'
        f"<{box} class=note>{line * 9}</{box}></main>"
    )
    page.evaluate(AXE)
    assert [fault.split(":")[0] for fault in pale(page)] == ["color-contrast"]
    assert page.locator(f"{box} {word}").count() == 4
    page.close()


def test_axe_sees_all_pairs_of_schemes_and_widths() -> None:
    for place in (0, 1):
        seen = {(schemes[place], widths[place]) for schemes, widths in map(order_of, PAGES)}
        assert len(seen) == 4


def test_map_leads_to_the_texts() -> None:
    """The links of ``llms.txt``, one for each page."""
    links = re.findall(r"\]\((.+?)\)", (HTML / "llms.txt").read_text(encoding="utf-8"))
    assert len(links) > 40
    assert [link for link in links if not (HTML / link).is_file()] == []


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
    "cut": f'<div class="cell_input" style="width:9em"><pre>{"x" * 60}</pre></div>',
    "pale": '<p style="color:#aaa">Pale words on a white page.</p>',
    "link": '<p>A <a href="#" style="color:#111; text-decoration:none">link</a> like words.</p>',
    "unnamed": '<button type="button"></button>',
    "twice": '<main><p id="one">One</p><p id="one">Two</p></main>',
    "letters": (
        '<main><figure class="computed" id="f"><svg viewBox="0 0 4000 50" width="4000" '
        'style="max-width:100%"><text y="30" font-size="12">small</text></svg></figure></main>'
    ),
    "unwrapped": (
        '<div class="cell_output"><div class="sentences">'
        f'<pre style="overflow:hidden">{"x" * 999}</pre></div></div>'
    ),
    "passed": '<main><button type="button" tabindex="-1">Press</button></main>',
    "unseen": '<main><button type="button" style="outline:none">Press</button></main>',
    "paper": (
        '<style media="print">main div { width: 9em }</style>'
        f'<main><div><pre style="overflow:hidden">{"x" * 60}</pre></div></main>'
    ),
    "wide": '<main><div style="width:3000px">wide</div></main>',
}


@pytest.mark.parametrize("kind", ["sound", *BROKEN])
def test_broken_page_is_noticed(browser: Browser, site: str, kind: str) -> None:
    """Each of the checks above fails on a page made to break it."""
    head = '<!doctype html><html lang="en"><title>t</title><main></main>'
    body = f"{head}{BROKEN.get(kind, '')}"
    path = HTML / "_static" / f"broken-{kind}.html"
    path.write_text(body, encoding="utf-8")
    try:
        with opened(browser, site, f"_static/{path.name}") as (page, wrong):
            seen = (untypeset, dead_charts, too_wide, cut_off, tiny_letters, unwrapped)
            used = (unreachable, spoilt_on_paper, barriers, pale)
            found = [fault for check in (*seen, *used) for fault in check(page)] + wrong
    finally:
        path.unlink()
    assert bool(found) == (kind != "sound"), found
