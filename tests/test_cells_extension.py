"""What our Sphinx extensions make of cells, figures and equations."""

import re
import types
from typing import Any

import pytest
from docutils import nodes
from export import chapters

from tests.test_page_extensions import extension

DOCSTRING = (
    '<div class="cell_input docutils container">\n<pre>'
    '<span class="sa">r</span><span class="sd">"""Say it.</span>\n\n'
    '<span class="sd">    Args:</span>\n<span class="sd">        x: A number.</span>\n'
    '<span class="sd">    """</span>\n    <span class="k">return</span></pre>'
)


@pytest.fixture(scope="module")
def cells() -> Any:
    return extension("cells")


@pytest.fixture(scope="module")
def captions() -> Any:
    return extension("captions")


def chapter(source: str, tags: list[str]) -> tuple[nodes.document, nodes.container]:
    """Return a page with one cell, and the cell."""
    tree = nodes.document(None, None)
    cell = nodes.container(nb_element="cell_code", cell_metadata={"tags": tags})
    code = nodes.container(nb_element="cell_code_source")
    code += nodes.literal_block(source, source)
    cell += code
    tree += cell
    return tree, cell


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("x = 1  # noqa: E741", "x = 1"),
        ("x = f()  # type: ignore[arg-type]  # the stub errs", "x = f()"),
        ("x = [1]  # fmt: skip", "x = [1]"),
        ("# fmt: off\nx = 1", "x = 1"),
        ("x = 1  # a reason", "x = 1  # a reason"),
        ("a\n\nb", "a\n\nb"),
    ],
)
def test_comments_for_tools_are_not_shown(cells: Any, line: str, shown: str) -> None:
    assert cells.without_tool_comments(line) == shown


def test_a_checked_cell_is_folded_under_its_comment(cells: Any) -> None:
    tree, cell = chapter("# Ours equals PyTorch's.\nassert True", ["checked"])
    cells.prepare(None, tree)
    assert cell["hide_mode"] == "all"
    assert cell["prompt_show"] == cell["prompt_hide"] == "Checked: Ours equals PyTorch's"
    tree, cell = chapter("# Plain.\nassert True", [])
    cells.prepare(None, tree)
    assert "hide_mode" not in cell


@pytest.mark.parametrize(
    ("printed", "wraps"),
    [
        ("status: not resolved; grammar, by seconds", True),
        ("one 1\ntwo 2\n\nthree: (1, 2)", True),
        ("one      1\nthree    3", False),
        ("list:\n    one", False),
        ("a\tb", False),
    ],
)
def test_printed_sentences_may_wrap_and_columns_may_not(
    cells: Any, printed: str, wraps: bool
) -> None:
    tree, cell = chapter("print(x)", [])
    output = nodes.container(nb_element="cell_code_output")
    output += nodes.literal_block(printed, printed, classes=["output"])
    cell += output
    cells.prepare(None, tree)
    assert output[0]["classes"] == ["output", *["sentences"] * wraps]


def test_without_a_comment_the_claim_is_the_label(cells: Any) -> None:
    claims = cells.load_claims()
    name, claim = next(iter(claims.items()))
    label = cells.label("assert True", [f"claim-{name}"])
    assert label.startswith("Checked: " + claim.claim[:20].replace("`", "").replace("*", "")[:10])
    assert len(label) <= cells.LONGEST + len("Checked: ")
    assert cells.label("assert True", []) == "Checked"
    assert cells.label("print(x)", [f"claim-{name}"]).startswith("Checked: ")


def test_what_checks_nothing_is_not_called_a_check(cells: Any) -> None:
    assert cells.label("# Two ways to run it\nx = 1", ["checked"]) == "Details: Two ways to run it"
    assert cells.label("x = 1", ["checked"]) == "Details"


@pytest.mark.parametrize(
    ("source", "inside"),
    [
        ("# Two rows of numbers.\nx = 1", "Two rows of numbers"),
        ("# fmt: off\nx = 1", ""),
        ("@dataclass\nclass A:\n    def f(self): ...\n\n\ndef b(): ...", "A, b"),
        ("def a(): ...\ndef b(): ...\ndef c(): ...\ndef d(): ...", "a, b, c, …"),
        ("import math\n\ndef a(): ...\n\n\nshow(a())", "a, figure"),
        ("import math\nfrom x import y", "imports"),
        ("from x import (\n    y,\n)\n\n# All of it\n", "imports"),
        ("from x import y\n\nprint(y)", "imports, …"),
        ("#: The fields of a record.\nFIELDS = ()", "The fields of a record"),
        ("rows = []\nTable(head, rows) if rows else None", "table"),
        ("x = 1  # nothing that show(x) draws", ""),
    ],
)
def test_a_folded_cell_says_what_is_in_it(cells: Any, source: str, inside: str) -> None:
    tree, cell = chapter(source, ["hide-input"])
    cell.attributes |= {"hide_mode": "input", "prompt_show": "Show", "prompt_hide": "Hide"}
    cells.prepare(None, tree)
    end = f": {inside}" if inside else ""
    assert (cell["prompt_show"], cell["prompt_hide"]) == (f"Show{end}", f"Hide{end}")


def test_no_label_of_the_book_ends_in_the_middle_of_a_sentence(cells: Any) -> None:
    """Only the first line of a comment is a label, so it must be a sentence of its own."""
    seen = 0
    for path in chapters():
        for cell in re.split(r"^```\{code-cell\}$", path.read_text(encoding="utf-8"), flags=re.M):
            if options := re.match(r"\n:tags: \[(.*\bchecked\b.*)\]\n\n", cell):
                source, seen = cell[options.end() :], seen + 1
                first, second = source.split("\n")[:2]
                label = cells.label(source, options[1].split(", "))
                assert ": " in label, f"{path.name}: {first}"
                assert not label.endswith("…"), f"{path.name}: {label}"
                whole = first.endswith((".", "?")) or not second.startswith("#")
                assert whole, f"{path.name}: {label}"
    assert seen > 200


def test_a_docstring_is_short_and_the_rest_one_button_away(cells: Any) -> None:
    got = cells.fold_docstrings(DOCSTRING)
    head, rest = got.split('<span class="doc-rest">')
    assert head.endswith("Say it.</span>")
    hidden, shown = rest.split('\n<span class="sd">    """</span><button')
    assert "Args:" in hidden
    assert hidden.endswith("A number.</span></span>")
    assert 'aria-expanded="false"' in shown
    assert got.count('"""') == 2


@pytest.mark.parametrize("text", ["<p>Args:</p>", DOCSTRING.replace("Args:", "Then")])
def test_other_text_stays(cells: Any, text: str) -> None:
    assert cells.fold_docstrings(text) == text


def test_a_computed_figure_gets_its_text_as_caption(captions: Any) -> None:
    tree = nodes.document(None, None)
    bundle = nodes.container(nb_element="mime_bundle")
    drawing = '<svg role="img" aria-label="A &amp; B rise."></svg>'
    bundle += nodes.raw("", drawing, format="html")
    tree += bundle
    captions.add_captions(None, tree)
    figure = tree[0]
    assert isinstance(figure, nodes.figure)
    assert figure["ids"] == ["computed-figure-1"]
    assert figure[1].astext() == "A & B rise."


def test_a_table_is_no_figure(captions: Any) -> None:
    tree = nodes.document(None, None)
    bundle = nodes.container(nb_element="mime_bundle")
    bundle += nodes.raw("", "<table></table>", format="html")
    tree += bundle
    captions.add_captions(None, tree)
    assert tree[0] is bundle


def test_the_drawing_is_named_by_its_number_and_described_by_its_caption(captions: Any) -> None:
    body = (
        '<figure class="computed align-default" id="computed-figure-1">'
        '<svg role="img" aria-label="It rises."></svg>'
        '<figcaption><p><span class="caption-number">Figure 3.2 </span>'
        '<span class="caption-text">It rises.</span></p></figcaption></figure>'
    )
    got = captions.name_drawings(body)
    assert '<svg role="img" aria-label="Figure 3.2">' in got
    assert got.count("It rises.") == 1


def test_equations_of_the_paper_keep_its_numbers(captions: Any) -> None:
    ours = {"equation-a": (3, 1), "equation-eq-attention": (3, 2), "equation-b": (3, 3)}
    env = types.SimpleNamespace(toc_fignumbers={"page": {"displaymath": ours}})
    captions.number_equations(None, env)
    assert ours == {
        "equation-a": (3, 1),
        "equation-eq-attention": (1,),
        "equation-b": (3, 2),
    }


def test_wide_figures_stay_legible_on_a_phone(captions: Any) -> None:
    style = 'style="max-width:100%;height:auto"'
    drawing = (
        f'<svg role="img" aria-label="x" {style} width="720pt" viewBox="0 0 720 200">'
        '<text style="font-size: 10px">word</text><text style="font-size: 7px">2</text></svg>'
    )
    figure = captions.keep_legible(drawing)
    assert "height:auto;min-width:677px" in figure  # 10 pt are 13.3 px, and may shrink to 9.4
    chart = drawing.replace("720pt", "500").replace("720", "500")
    chart = chart.replace('style="font-size: 10px"', 'font-size="12px"')
    live = captions.keep_legible(f'{chart}<div class="moving" data-by="vega-embed"></div>')
    assert live.count("min-width:392px") == 2
    assert '<div class="moving" style="min-width:392px"' in live
    assert captions.keep_legible(figure) == figure  # once is enough
    assert captions.keep_legible("<p>text</p>") == "<p>text</p>"
