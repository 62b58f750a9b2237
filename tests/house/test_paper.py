"""The paper's thread: every paragraph has its box, and a box that is wrong stops the build."""

import io
import json
import types
from collections import Counter
from pathlib import Path
from typing import Any

import house
import paper
import pytest
import yaml
from paper import Box, Entry, Ledger, PaperError
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

ROOT = Path(__file__).parents[2]
LEDGER = paper.load_ledger()

PARAGRAPHS = {  # of each section, as the paper has them
    **{"1": 4, "2": 4, "3": 2, "3.1": 2, "3.2": 1, "3.2.1": 4, "3.2.2": 3, "3.2.3": 3},
    **{"3.3": 2, "3.4": 1, "3.5": 3, "4": 6, "5": 1, "5.1": 1, "5.2": 1, "5.3": 1, "5.4": 3},
    **{"6.1": 4, "6.2": 3, "6.3": 5, "7": 4},
}


def part_one() -> list[str]:
    """Return the pages of part I, after those that come before it."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    parts = {part["caption"]: [one["file"] for one in part["chapters"]] for part in toc["parts"]}
    return [toc["root"], *parts["Before you start"], *parts["I. The paper"]]


# --- the book ------------------------------------------------------------------------


def test_the_ledger_has_all_of_the_paper() -> None:
    counts = Counter(entry.section for label, entry in LEDGER.entries.items() if "¶" in label)
    assert counts == PARAGRAPHS
    assert counts.total() + len(paper.ALONE) == 60
    others = {label for label in LEDGER.entries if "¶" not in label}
    assert others == {
        *("Abstract", "Acknowledgements", "Footnote 4", "Footnote 5"),
        *(f"Table {number}" for number in range(1, 5)),
        *(f"Figure {number}" for number in range(1, 6)),
        *(f"Equation {number}" for number in range(1, 4)),
    }
    assert len({paper.anchor_of(label) for label in LEDGER.entries}) == len(LEDGER.entries) == 74


def test_every_paragraph_has_its_box() -> None:
    assert paper.faults(LEDGER, paper.scan_book(), house.reading_order(ROOT)) == []


def test_boxes_follow_the_paper() -> None:
    assert paper.disorder(LEDGER, paper.scan_book(), part_one()) == []


def test_no_box_is_without_a_label() -> None:
    old = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "book").rglob("*.md")
        if paper.OLD.search(path.read_text(encoding="utf-8"))
    ]
    assert old == []
    assert paper.OLD.search("\n:::{admonition} Paper\n:class: paper\nText.\n:::\n")


# --- labels ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "labels", "title"),
    [
        ("3.2.1 ¶1", ("3.2.1 ¶1",), "§3.2.1 ¶1"),
        ("3.2.1 ¶1 ¶2", ("3.2.1 ¶1", "3.2.1 ¶2"), "§3.2.1 ¶1 ¶2"),
        ("Abstract", ("Abstract",), "Abstract"),
        ("4 ¶4,  Table 1, 2 ¶1", ("4 ¶4", "Table 1", "2 ¶1"), "§4 ¶4, Table 1, §2 ¶1"),
        ("Equation 1, Footnote 4", ("Equation 1", "Footnote 4"), "Equation 1, Footnote 4"),
    ],
)
def test_labels(text: str, labels: tuple[str, ...], title: str) -> None:
    assert paper.check_labels(text, LEDGER) == labels
    assert paper.title_of(labels) == title


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3.2.1", "'3.2.1' is no label: write '3.2.1 ¶1 ¶2'"),
        ("3.2.1 1", "'3.2.1 1' is no label"),
        ("§3.2.1 ¶1", "'§3.2.1 ¶1' is no label"),
        ("Figure", "'Figure' is no label"),
        ("3.1 ¶1,", "'' is no label"),
        ("3.1 ¶1, 3.1 ¶1", "'3.1 ¶1' is named twice in one box"),
        ("3.1 ¶3", "the paper has no '3.1 ¶3'"),
        ("3.1 ¶1, Figure 6", "the paper has no 'Figure 6'"),
    ],
)
def test_wrong_labels_are_refused(text: str, message: str) -> None:
    with pytest.raises(PaperError, match=message):
        paper.check_labels(text, LEDGER)


def test_anchors() -> None:
    assert paper.anchor_of("3.2.1 ¶1") == "paper-3-2-1-1"
    assert paper.anchor_of("Footnote 4") == "paper-footnote-4"
    before = [Box("a", ("3.1 ¶1",)), Box("a", ("3.1 ¶2", "Figure 1"))]
    assert paper.free_anchor("Figure 2", before) == "paper-figure-2"
    assert paper.free_anchor("Figure 1", before) == "paper-figure-1-2-box"


@pytest.mark.parametrize(
    "row",
    [
        {"label": "1", "section": "1", "page": "a"},
        {"label": "1 ¶1", "section": "9", "page": "a"},
        {"label": "1 ¶2", "section": "1", "page": "a"},
    ],
)
def test_a_ledger_with_errors_is_refused(tmp_path: Path, row: dict[str, str]) -> None:
    good = {"label": "1 ¶2", "section": "1", "page": "a"}
    path = tmp_path / "paper.json"
    path.write_text(json.dumps({"sections": {"1": "1 One"}, "entries": [good]}))
    assert list(paper.load_ledger(path).entries) == ["1 ¶2"]
    path.write_text(json.dumps({"sections": {"1": "1 One"}, "entries": [good, row]}))
    with pytest.raises(PaperError, match=r"paper\.json"):
        paper.load_ledger(path)


# --- the rules, seen to fail -------------------------------------------------------------


def ledger(*entries: Entry) -> Ledger:
    return Ledger({"1": "1 One", "2": "2 Two"}, {entry.label: entry for entry in entries})


SMALL = ledger(
    Entry("1 ¶1", "1", "a"),
    Entry("1 ¶2", "1", "a"),
    Entry("2 ¶1", "2", "b"),
    Entry("2 ¶2", "2", "c"),
)


def test_boxes_are_found_in_the_source() -> None:
    text = (
        "Text.\n\n:::{paper} 1 ¶1\n:line: In one line.\nWords.\n:::\n\n"
        "::::{paper} 1 ¶2, Table 1\nWords.\n::::\n"
    )
    assert paper.scan("a", text) == [
        Box("a", ("1 ¶1",), line="In one line."),
        Box("a", ("1 ¶2", "Table 1")),
    ]


def test_missing_boxes_are_found() -> None:
    boxes = [Box("a", ("1 ¶1", "1 ¶2"), line="A"), Box("b", ("2 ¶1",), line="B")]
    assert paper.faults(SMALL, boxes, ["a", "b"]) == []  # chapter c is not written yet
    assert paper.faults(SMALL, boxes, ["a", "b", "c"]) == ["c: no box for §2 ¶2"]
    assert paper.faults(SMALL, boxes[1:], ["a", "b"]) == [
        "a: no box for §1 ¶1",
        "a: no box for §1 ¶2",
    ]
    away = [*boxes, Box("a", ("2 ¶2",))]
    assert paper.faults(SMALL, away, ["a", "b"]) == ["a: no box for §2 ¶2 has a :line:"]
    assert paper.faults(SMALL, away, ["a", "b", "c"]) == ["c: no box for §2 ¶2"]
    unknown = [*boxes, Box("b", ("2 ¶3",), line="C")]
    assert paper.faults(SMALL, unknown, ["a", "b"]) == ["b: the paper has no '2 ¶3'"]


def test_disorder_is_found() -> None:
    boxes = [Box("a", ("1 ¶1",)), Box("a", ("1 ¶2",)), Box("b", ("2 ¶1",)), Box("c", ("2 ¶2",))]
    order = ["a", "b", "c"]
    assert paper.disorder(SMALL, boxes, order) == []
    assert paper.disorder(SMALL, [*boxes, Box("c", ("1 ¶1",))], order) == []  # a repetition
    swapped = [boxes[1], boxes[0], *boxes[2:]]
    assert paper.disorder(SMALL, swapped, order) == ["a: §1 ¶1 comes after §1 ¶2 (a)"]
    early = [boxes[0], Box("a", ("2 ¶2",)), *boxes[1:]]
    assert paper.disorder(SMALL, early, order) == ["a: §1 ¶2 comes after §2 ¶2 (a)"]
    assert paper.disorder(SMALL, early, ["a", "b"]) == []  # its home is still to come
    other = [Box("z", ("2 ¶1",)), *boxes]
    assert paper.disorder(SMALL, other, order) == []  # another part of the book


def test_an_exception_must_be_one() -> None:
    late = Entry("2 ¶2", "2", "c", why="Told where it is needed.")
    excused = ledger(*(entry for entry in SMALL.entries.values() if entry.label != "2 ¶2"), late)
    boxes = [Box("a", ("1 ¶1",)), Box("a", ("1 ¶2",)), Box("b", ("2 ¶1",)), Box("c", ("2 ¶2",))]
    early = [boxes[0], Box("a", ("2 ¶2",)), *boxes[1:]]
    assert paper.disorder(excused, early, ["a", "b", "c"]) == []
    found = paper.disorder(excused, boxes, ["a", "b", "c"])
    assert found == ["c: §2 ¶2 is in order; its reason can go"]


def test_a_row_has_the_line_of_the_home() -> None:
    first, home = Box("z", ("1 ¶1",), line="Elsewhere"), Box("a", ("1 ¶1", "1 ¶2"), line="Home")
    rows = list(paper.rows_of(SMALL.entries.values(), [first, home]))
    assert rows == [
        (["1 ¶1", "1 ¶2"], "Home", [home, first]),
        (["2 ¶1"], "", []),
        (["2 ¶2"], "", []),
    ]


# --- in Sphinx -----------------------------------------------------------------------------

BOX = ":::{paper} 3.2.1 ¶1\n:line: What it says.\nA query {math}`q` asks.\n:::\n"
INDEX = "# Book\n\n```{toctree}\nfirst\nsecond\n```\n\n```{paper-paragraphs}\n```\n"


def build(folder: Path) -> str:
    """Build a small book of two chapters, and return its warnings."""
    warnings = io.StringIO()
    with docutils_namespace():
        app = Sphinx(
            *(folder, None, folder / "_build", folder / "_trees", "html"),
            confoverrides={
                "extensions": ["myst_parser", "paper"],
                "myst_enable_extensions": ["colon_fence"],
                "project": "A book",
            },
            status=None,
            warning=warnings,
        )
        app.build()
    return warnings.getvalue()


def page(folder: Path, name: str) -> str:
    return (folder / "_build" / f"{name}.html").read_text(encoding="utf-8")


def test_a_box_becomes_an_admonition_and_a_row(tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text(INDEX)
    (tmp_path / "first.md").write_text(f"# First\n\n{BOX}\n{BOX}")
    (tmp_path / "second.md").write_text("# Second\n\nNo box.\n")
    assert build(tmp_path) == ""
    first = page(tmp_path, "first")
    assert '<div class="paper admonition" id="paper-3-2-1-1">' in first
    assert 'id="paper-3-2-1-1-2-box"' in first
    assert '<p class="admonition-title">Paper · §3.2.1 ¶1</p>' in first
    assert ":line:" not in first
    index = page(tmp_path, "index")
    assert 'href="first.html#paper-3-2-1-1">First</a>' in index
    assert "<p>What it says.</p>" in index
    assert index.count("No box yet.") == 73

    (tmp_path / "second.md").write_text(f"# Second\n\n{BOX.replace('¶1', '¶2, Table 2')}")
    assert build(tmp_path) == ""  # only what changed is read again
    index = page(tmp_path, "index")
    assert 'href="second.html#paper-3-2-1-2">Second</a>' in index
    assert 'href="second.html#paper-table-2">Second</a>' in index
    assert 'href="first.html#paper-3-2-1-1">First</a>' in index

    (tmp_path / "first.md").write_text("# First\n\nNo box any more.\n")
    assert build(tmp_path) == ""
    assert "first.html#paper" not in page(tmp_path, "index")


def test_what_parallel_readers_found_is_kept() -> None:
    mine: Any = types.SimpleNamespace()
    other: Any = types.SimpleNamespace()
    for env, page in ((mine, "a"), (other, "b"), (other, "gone")):
        paper.BOXES.by_page(env)[page] = [Box(page, ("1 ¶1",))]
        paper.BOXES.lists(env).add(page)
    app: Any = None
    paper.BOXES.purge(app, other, "gone")
    paper.BOXES.merge(app, mine, {"b", "c"}, other)
    assert set(paper.BOXES.by_page(mine)) == paper.BOXES.lists(mine) == {"a", "b"}


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (BOX.replace("¶1", "¶9"), "second, line 3: the paper has no '3.2.1 ¶9' (see paper.json)"),
        (BOX.replace(" ¶1", ""), "second, line 3: '3.2.1' is no label: write '3.2.1 ¶1 ¶2'"),
        (":::{paper} 3.2.1 ¶1\n:::\n", "second, line 3: the box for §3.2.1 ¶1 is empty"),
    ],
)
def test_a_wrong_box_stops_the_build(tmp_path: Path, box: str, message: str) -> None:
    (tmp_path / "index.md").write_text(INDEX)
    (tmp_path / "first.md").write_text("# First\n")
    (tmp_path / "second.md").write_text(f"# Second\n\n{box}")
    with pytest.raises(PaperError) as error:
        build(tmp_path)
    assert str(error.value).startswith(message)
