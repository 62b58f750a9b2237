"""What our small Sphinx extensions add to a page."""

import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

ROOT = Path(__file__).parents[1]
LITERAL = '<code><span class="pre">train</span> <span class="pre">--pair</span></code>'
TABLE = f'<table class="docutils"><tr><td>\n{LITERAL}</td></tr></table>'


def extension(name: str) -> Any:
    """Load an extension as Sphinx does, from a folder that is on the path."""
    if (folder := str(ROOT / "book" / "_ext")) not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, ROOT / "book" / "_ext" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runtime() -> Any:
    return extension("runtime")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "under 1 s"),
        (1.4, "1 s"),
        (12.3, "12 s"),
        (59.6, "1 min 00 s"),
        (125, "2 min 05 s"),
    ],
)
def test_durations_read_well(runtime: Any, seconds: float, text: str) -> None:
    assert runtime.duration(seconds) == text


def test_one_core_is_singular(runtime: Any) -> None:
    assert runtime.line(3, 1) == "Run time: 3 s on 1 CPU core"
    assert runtime.line(3, 2) == "Run time: 3 s on 2 CPU cores"
    assert runtime.cores() >= 1


def page(
    runtime: Any, monkeypatch: pytest.MonkeyPatch, data: dict[str, float | None] | None
) -> list[str]:
    """Run the extension on a page with a title and one paragraph."""
    collector = types.SimpleNamespace(get_exec_data=lambda env, name: data)
    monkeypatch.setattr(runtime, "NbMetadataCollector", collector)
    text = nodes.paragraph("", "First sentence.")
    tree = nodes.document(None, None)
    tree += nodes.section("", nodes.title("", "A chapter"), text)
    runtime.add_line(types.SimpleNamespace(env=types.SimpleNamespace(docname="a")), tree)
    return [node.astext() for node in tree[0]]


def test_run_time_stands_below_the_title(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    title, line, text = page(runtime, monkeypatch, {"runtime": 12.0})
    assert (title, text) == ("A chapter", "First sentence.")
    assert line.startswith("Run time: 12 s on ")


@pytest.mark.parametrize("data", [None, {}, {"runtime": None}])
def test_a_page_that_did_not_run_says_nothing(
    runtime: Any, monkeypatch: pytest.MonkeyPatch, data: dict[str, float | None] | None
) -> None:
    assert page(runtime, monkeypatch, data) == ["A chapter", "First sentence."]


def put(tmp_path: Path, body: str) -> str:
    """Run the drawing extension on the body of a page."""
    ours = '<?xml version="1.0"?>\n<svg aria-labelledby="t" fill="currentColor"></svg>\n'
    (tmp_path / "ours.svg").write_text(ours)
    (tmp_path / "plain.svg").write_text('<svg fill="red"></svg>')
    got: str = extension("inline_svg").inline(body, tmp_path)
    return got


def test_our_drawings_go_into_the_page(tmp_path: Path) -> None:
    got = put(tmp_path, '<p><img alt="A &amp; B" src="../_images/ours.svg" /></p>')
    assert got.startswith(
        '<p><span class="drawing-box"><svg aria-label="A &amp; B" class="drawing"'
    )
    assert "aria-labelledby" not in got  # one label, that of the chapter
    assert "<?xml" not in got
    assert got.endswith("</svg></span></p>")


def test_without_a_text_the_drawing_describes_itself(tmp_path: Path) -> None:
    assert 'aria-labelledby="t"' in put(tmp_path, '<img alt="" src="_images/ours.svg" />')


@pytest.mark.parametrize("name", ["plain", "unknown"])
def test_other_images_stay(tmp_path: Path, name: str) -> None:
    body = f'<img alt="x" src="../_images/{name}.svg" />'
    assert put(tmp_path, body) == body


def test_words_of_code_stay_whole_in_tables_and_options_everywhere() -> None:
    context = {"body": LITERAL + TABLE + LITERAL + TABLE, "script_files": []}
    extension("offline").page_scripts(None, "a", "page.html", context, None)
    plain = '<code>train <span class="pre">--pair</span></code>'
    assert context["body"] == plain + TABLE + plain + TABLE


SMALL = {
    "index": "# Home\n\n```{toctree}\none\ntwo\n```\n",
    "one": "# One\n\nSee {doc}`two`.\n\n## First\n\n### Deeper\n",
    "two": "# Two\n\n## Second\n\n```{toctree}\nthree\n```\n",
    "three": "# Three\n\n## Third\n",
}


def built(folder: Path, extensions: list[str]) -> dict[str, str]:
    """Build a small book in the theme of ours; return its pages."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name, text in SMALL.items():
        (source / f"{name}.md").write_text(text)
    config: dict[str, Any] = {"extensions": ["myst_parser", *extensions], "project": "Small"}
    config["html_theme"] = "sphinx_book_theme"
    with docutils_namespace():
        app = Sphinx(source, None, folder / "html", folder / "trees", "html", config, status=None)
        app.build()
    return {path.name: path.read_text() for path in (folder / "html").glob("*.html")}


def test_a_quick_build_makes_the_same_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = extension("quick")
    titles = Mock(side_effect=quick.titles)
    monkeypatch.setattr(quick, "titles", titles)
    monkeypatch.setitem(sys.modules, "quick", quick)
    monkeypatch.setattr(quick.gc, "set_threshold", lambda *_: None)  # stays with the tests
    pages = built(tmp_path / "quick", ["quick"])
    assert titles.call_count == len(SMALL)  # it was used, once for each page
    assert {f"{name}.html" for name in SMALL} <= pages.keys()
    assert pages == built(tmp_path / "usual", [])


def test_titles_leave_the_sections_and_keep_lists_of_pages() -> None:
    quick = extension("quick")
    inner = nodes.bullet_list("", nodes.list_item("", nodes.paragraph("", "Section")))
    item = nodes.list_item("", nodes.paragraph("", "Title"), inner)
    toc = nodes.bullet_list("", item)
    assert quick.titles(toc).astext() == "Title"
    assert "Section" in toc.astext()  # for the page's own contents
    inner[0] += addnodes.toctree()
    assert quick.titles(toc) is toc


def test_columns_of_numbers_stand_at_the_right() -> None:
    """Gaps are no words, and one word makes a column one of words."""
    rows = [("row", "score", "note"), ("1 head", "12.3 ± 0.4", "1"), ("2", "–", "one"),
            ("3", "−1,000", "")]  # fmt: skip
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    table = f'<table class="dataframe"><tr>{"</tr><tr>".join(lines)}</tr></table>'
    other = "<table><tr><td>1</td></tr></table>"
    found = extension("tables").align_numbers(f"<p>{table}</p>{other}")
    marked = re.findall(r'<td class="number">(.*?)</td>', found)
    assert marked == ["score", "12.3 ± 0.4", "–", "−1,000"]
    assert re.sub(' class="number"', "", found) == f"<p>{table}</p>{other}"
