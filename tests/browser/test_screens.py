"""What readers see on a screen and on paper: captions, numbers, folded cells, light pages."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

HTML = Path(__file__).parents[2] / "_build" / "html"
PAGES = {
    path.relative_to(HTML).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted((HTML / "book").rglob("*.html"))
}
ATTENTION = "book/model/attention.html"
BOARD = "book/results/scoreboard.html"
CHAPTERS = (ATTENTION, "book/model/multi_head.html", "book/engineering/using.html")
LIVE = (CHAPTERS[1], "book/index.html")  # with the live model
KINDS = (*CHAPTERS, LIVE[1], BOARD)
HEAVIEST = 1_500_000  # bytes of a page and its own images
TOOLS = re.compile(r"#\s*(noqa|type:\s*ignore|fmt:\s*(skip|off|on))")


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Open a window of 1280 px without a page."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    yield page
    page.close()


def too_heavy(text: str, images: int = 0) -> bool:
    """Whether a page, without what pages share, weighs too much."""
    return len(text.encode()) + images > HEAVIEST


def test_pages_are_light() -> None:
    for path, text in PAGES.items():
        names = set(re.findall(r'_images/([\w.-]+)"', text))
        assert not too_heavy(text, sum((HTML / "_images" / n).stat().st_size for n in names)), path
        assert "fontawesome.js" not in text, path
        assert ("mathjax/" in text) == ('class="math' in text), path
    assert too_heavy("x" * HEAVIEST + "x")


def test_every_computed_figure_has_a_number_and_a_caption() -> None:
    count = 0
    for path, text in PAGES.items():
        drawings = text.count('<svg role="img"') - text.count('<svg role="img" aria-label="Figure ')
        assert drawings == 0, f"{path}: {drawings} drawings without a caption"
        figures = re.findall(r'<figure class="computed.*?</figure>', text, re.DOTALL)
        for figure in figures:
            assert re.search(r'caption-number">Figure (\d+\.)?\d+ <', figure), path
            assert re.search(r'caption-text">[^<]{10,}', figure), path
        count += len(figures)
    assert count > 80


def test_figures_stand_in_the_middle(page: Page, site: str) -> None:
    page.goto(f"{site}/{ATTENTION}")
    for drawing in page.locator("figure.computed svg[role=img]:visible").all():
        middle = drawing.evaluate(
            """e => {
              const [a, b] = [e, e.closest(".cell_output")].map((x) => x.getBoundingClientRect());
              return a.left + a.width / 2 - b.left - b.width / 2;
            }"""
        )
        assert abs(middle) < 3
    caption = page.locator("figure.computed figcaption .caption-text").first
    assert caption.evaluate("e => getComputedStyle(e).fontWeight") == "400"


def test_equations_of_the_paper_have_its_numbers() -> None:
    numbers = {
        name: number
        for text in PAGES.values()
        for number, name in re.findall(
            r'<span class="eqno">\((.*?)\)<a class="headerlink" href="#(equation-[^"]+)"', text
        )
    }
    paper = {name: number for name, number in numbers.items() if "." not in number}
    assert paper == {"equation-eq-attention": "1", "equation-eq-ffn": "2", "equation-eq-rate": "3"}
    assert len(numbers) > len(paper) + 10
    assert len(set(numbers.values())) == len(numbers)


def test_code_shows_no_comment_for_tools() -> None:
    for path, text in PAGES.items():
        cells = re.findall(r'<div class="cell_input.*?</pre>', text, re.DOTALL)
        assert not [c for c in cells if TOOLS.search(re.sub("<[^>]+>", "", c))], path


def test_docstrings_unfold(page: Page, site: str) -> None:
    page.goto(f"{site}/{ATTENTION}")
    button, rest = page.locator("button.doc-more").first, page.locator(".doc-rest").first
    assert not rest.is_visible()
    button.focus()
    page.keyboard.press("Enter")
    assert rest.is_visible()
    assert "Args:" in rest.inner_text()
    page.keyboard.press("Enter")
    assert not rest.is_visible()


FOLDED = """<!doctype html><html lang="en"><title>t</title><script src="page.js"></script>
<a href="#claim">link</a><div style="height:3000px"></div>
<div class="cell {tag}" id="claim"><details><summary>Checked</summary><p>proof</p></details></div>
"""


@pytest.mark.parametrize("tag", ["tag_checked", "tag_other"])
@pytest.mark.parametrize("way", ["address", "link"])
def test_a_link_to_a_folded_proof_opens_it(page: Page, site: str, tag: str, way: str) -> None:
    path = HTML / "_static" / f"folded-{tag}-{way}.html"
    path.write_text(FOLDED.format(tag=tag), encoding="utf-8")
    try:
        page.goto(f"{site}/_static/{path.name}{'#claim' * (way == 'address')}")
        assert page.locator("p").is_visible() == (way == "address" and tag == "tag_checked")
        page.locator("a").click()
        page.wait_for_timeout(100)
        assert page.locator("p").is_visible() == (tag == "tag_checked")
    finally:
        path.unlink()


# What is folded, and what the live model answers to
CONTROLS = (
    *(".toggle-button", "details.hide > summary", "button.doc-more"),
    *(f".translator {name}:not([disabled])" for name in ("input", "select", "textarea", "button")),
)


@pytest.mark.parametrize("path", KINDS)
def test_the_keyboard_reaches_every_control_and_shows_where_it_is(
    page: Page, site: str, path: str
) -> None:
    page.goto(f"{site}/{path}")
    page.wait_for_load_state("networkidle")
    wanted = page.locator(", ".join(f".bd-article {name}:visible" for name in CONTROLS)).count()
    reached, unseen, stops = 0, [], 0
    page.locator(".bd-article h1").click(position={"x": 2, "y": 2})  # the walk begins at the title
    for _ in range(1000):
        page.keyboard.press("Tab")
        where = page.evaluate(
            """(controls) => {
              const e = document.activeElement, style = getComputedStyle(e);
              return {
                inside: Boolean(e.closest(".bd-article")),
                control: e.matches(controls),
                seen: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
                name: e.outerHTML.slice(0, 80),
              };
            }""",
            ", ".join(CONTROLS),
        )
        if not where["inside"]:
            break  # past the end of the page
        stops += 1
        reached += where["control"]
        if not where["seen"]:
            unseen.append(where["name"])
    assert stops > 10
    assert bool(wanted) == (path != BOARD)
    assert bool(page.locator(".translator input:visible").count()) == (path in LIVE)
    assert reached == wanted
    assert unseen == []


def test_formulas_are_no_stops_of_the_keyboard(page: Page, site: str) -> None:
    page.goto(f"{site}/{ATTENTION}")
    page.evaluate("() => window.MathJax.startup.promise")
    assert page.locator("mjx-container").count() > 10
    assert page.locator("mjx-container[tabindex]").count() == 0


def test_the_scoreboard_fits_a_phone(page: Page, site: str) -> None:
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"{site}/{BOARD}")
        out = page.evaluate(
            """() => [...document.querySelectorAll("table.scoreboard td")].filter((cell) => {
              const range = document.createRange();
              range.selectNodeContents(cell);
              const [text, box] = [range, cell].map((x) => x.getBoundingClientRect());
              return text.right > box.right + 1 || box.right > innerWidth;
            }).map((cell) => cell.textContent.slice(0, 30))"""
        )
        assert out == []


WIDE_TABLES = "book/results/variations.html"


@pytest.mark.parametrize("path", [*KINDS, WIDE_TABLES])
def test_paper_shows_what_can_be_read_and_no_buttons(page: Page, site: str, path: str) -> None:
    page.goto(f"{site}/{path}")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 700, "height": 1000})
    assert page.locator(".bd-article :is(button, input, select):visible").count() == 0
    # Folded code is left out; of a folded proof, its one line says what was checked.
    folded = "details.hide:not([open])"
    assert page.locator(f".bd-article {folded}:not(.tag_checked *):visible").count() == 0
    proofs = page.locator(f".bd-article .tag_checked > {folded}:visible").count()
    assert bool(proofs) == (path in (*CHAPTERS, WIDE_TABLES))
    cut = page.evaluate(
        """() => [...document.querySelectorAll(".bd-article :is(pre, td)")]
          .filter((e) => e.clientWidth && (e.scrollWidth > e.clientWidth + 1
            || e.getBoundingClientRect().right > innerWidth)).length"""
    )
    assert cut == 0  # also of wide tables, whose boxes scroll on a screen
    unbroken = page.evaluate(  # long code would leave half a page blank
        """() => [...document.querySelectorAll(
            ".bd-article :is(.cell_input, .cell_input *, pre, table)")]
          .filter((e) => e.matches("div, pre, table"))
          .map((e) => getComputedStyle(e))
          .filter((style) => style.breakInside !== "auto" || style.containerType !== "normal"
            || !["block", "table", "none"].includes(style.display)).length"""
    )
    assert unbroken == 0


def test_links_show_what_they_lead_to(page: Page, site: str) -> None:
    """By pointer and by keyboard; Escape closes, and the pointer may move onto the card."""
    page.goto(f"{site}/book/model/multi_head.html")
    card = page.locator("#hover-card")
    link = page.locator('.bd-article a.internal[href*="bibliography.html#"]').first
    link.scroll_into_view_if_needed()
    assert card.is_hidden()
    link.hover()
    card.wait_for(state="visible")
    assert "The annotated transformer" in card.inner_text()
    assert link.get_attribute("aria-describedby") == "hover-card"
    card.hover()
    page.wait_for_timeout(500)
    assert card.is_visible()
    page.keyboard.press("Escape")
    assert card.is_hidden()
    page.keyboard.press("Tab")
    link.focus()
    card.wait_for(state="visible")
    page.keyboard.press("Tab")
    assert link.get_attribute("aria-describedby") is None
    far = page.locator('.bd-article a.internal[href*="bibliography.html#"]').last
    before = page.evaluate("scrollY")
    far.focus()
    page.wait_for_timeout(500)
    assert page.evaluate("scrollY") != before  # the page has scrolled to it
    assert card.is_visible()
    assert far.get_attribute("aria-describedby") == "hover-card"


def test_cards_say_something() -> None:
    """Citations, sections, equations, claims and boxes have cards, and none is broken."""
    kinds = dict.fromkeys(("bibliography.html#id", "#sec-", "#equation-", "#score-", "#paper-"), 0)
    for path, text in PAGES.items():
        for data in re.findall(r'id="cards">(.*?)</script>', text, re.DOTALL):
            for href, html in json.loads(data).items():
                words = re.sub(r"<[^>]*>", " ", html).strip()
                assert words, f"{path}: {href}"
                assert not re.search(r"\\[a-zA-Z]|\{", words), f"{path}: {href}: {words}"
                for kind in kinds:
                    kinds[kind] += kind in href
    assert min(kinds.values()) > 5, kinds
