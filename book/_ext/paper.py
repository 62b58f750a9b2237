"""The paper's thread: boxes that retell its paragraphs, and a page that lists them all.

A chapter retells a paragraph in a box::

    :::{paper} 3.2.1 ¶1, Figure 2
    :line: What the paragraph says, in one line.
    Our own words.
    :::

The label is a section with one or more paragraphs, ``Abstract``, ``Acknowledgements``,
or a numbered ``Figure``, ``Table``, ``Equation`` or ``Footnote``; several stand with
commas between them. What the paper consists of, in its order, and the chapter where
each of its paragraphs is at home, is data (``book/_data/paper.json``). A label that is
not in it stops the build.

The directive ``{paper-paragraphs}`` becomes a table for each section of the paper, with
a link to every box.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from gathered import Gathered
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import SphinxError
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
LEDGER = ROOT / "book" / "_data" / "paper.json"

ALONE = ("Abstract", "Acknowledgements")
NUMBERED = re.compile(r"(?:Figure|Table|Equation|Footnote) \d+")
PARAGRAPHS = re.compile(r"(?P<section>\d(?:\.\d)*)(?P<paragraphs>(?: ¶\d+)+)")
FENCE = re.compile(r"^(?P<fence>:{3,}|`{3,})\{paper\}[ \t]*(?P<labels>.*)$", re.MULTILINE)
LINE = re.compile(r"\n:line:[ \t]*(?P<line>.+)")
OLD = re.compile(r"^(?::{3,}|`{3,})\{admonition\} Paper\b|^:class: paper\b", re.MULTILINE)


class PaperError(SphinxError):
    """A box and the ledger of the paper do not fit together."""

    category = "Paper box"


@dataclass(frozen=True)
class Entry:
    """A part of the paper that needs a box: a paragraph, a figure, a table and the like.

    ``page`` is the chapter where it is at home, ``section`` the paper's section that it
    belongs to, and ``why`` the reason if its first box in part I is out of the paper's
    order.
    """

    label: str
    section: str
    page: str
    why: str = ""


@dataclass(frozen=True)
class Ledger:
    """All of the paper in its order, and the titles of its sections."""

    titles: Mapping[str, str]
    entries: Mapping[str, Entry]


@dataclass(frozen=True)
class Box:
    """A box of the book: its page, its labels, its anchors there, and its one line."""

    page: str
    labels: tuple[str, ...]
    anchors: tuple[str, ...] = ()
    line: str = ""


def load_ledger(path: Path = LEDGER) -> Ledger:
    """Read the ledger.

    Raises:
        PaperError: A label is not well formed, is there twice, or lacks its section's title.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    entries: dict[str, Entry] = {}
    for row in data["entries"]:
        entry = Entry(**row)
        try:
            alone = parse_labels(entry.label) == (entry.label,)
        except PaperError as error:
            raise PaperError(f"{path.name}: {error}") from None
        if not alone or entry.label in entries:
            raise PaperError(f"{path.name}: {entry.label!r} is no single label, or there twice")
        if entry.section not in data["sections"]:
            raise PaperError(f"{path.name}: section {entry.section} has no title")
        entries[entry.label] = entry
    return Ledger(data["sections"], entries)


def parse_labels(text: str) -> tuple[str, ...]:
    """Return the labels that a box names: ``3.1 ¶1 ¶2, Table 1`` has three.

    Raises:
        PaperError: A label is not of one of the known forms, or is named twice.
    """
    labels: list[str] = []
    for piece in (" ".join(part.split()) for part in text.split(",")):
        if piece in ALONE or NUMBERED.fullmatch(piece):
            labels.append(piece)
        elif match := PARAGRAPHS.fullmatch(piece):
            section, numbers = match["section"], match["paragraphs"].split()
            labels += [f"{section} {number}" for number in numbers]
        else:
            raise PaperError(
                f"{piece!r} is no label: write '3.2.1 ¶1 ¶2', 'Figure 2' or 'Abstract', for example"
            )
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise PaperError(f"{twice[0]!r} is named twice in one box")
    return tuple(labels)


def check_labels(text: str, ledger: Ledger) -> tuple[str, ...]:
    """Return the labels that a box names, all of which the ledger must have."""
    labels = parse_labels(text)
    if unknown := [label for label in labels if label not in ledger.entries]:
        raise PaperError(f"the paper has no {unknown[0]!r} (see {LEDGER.name})")
    return labels


def anchor_of(label: str) -> str:
    """Return the anchor of a label: ``3.2.1 ¶1`` has ``paper-3-2-1-1``."""
    return "paper-" + re.sub(r"[^a-z0-9]+", "-", label.lower())


def title_of(labels: Sequence[str]) -> str:
    """Return what stands above a box, or in the list: ``§3.2.1 ¶1 ¶2, Figure 2``."""
    pieces: list[str] = []
    before = ""
    for label in labels:
        section, _, paragraph = label.partition(" ¶")
        if paragraph and section == before:
            pieces[-1] += f" ¶{paragraph}"
        else:
            pieces.append(f"§{label}" if paragraph else label)
        before = section if paragraph else ""
    return ", ".join(pieces)


# --- the sources, as the tests see them --------------------------------------------


def scan(page: str, text: str) -> list[Box]:
    """Return the boxes in a chapter's source."""
    found = []
    for match in FENCE.finditer(text):
        option = LINE.match(text, match.end())
        line = option["line"].strip() if option else ""
        found.append(Box(page, parse_labels(match["labels"]), line=line))
    return found


def scan_book(root: Path = ROOT) -> list[Box]:
    """Return the boxes of all chapters, by page."""
    found = []
    for path in sorted((root / "book").rglob("*.md")):
        page = path.relative_to(root).with_suffix("").as_posix()
        try:
            found += scan(page, path.read_text(encoding="utf-8"))
        except PaperError as error:
            raise PaperError(f"{page}: {error}") from None
    return found


def faults(ledger: Ledger, boxes: Iterable[Box], pages: Iterable[str]) -> list[str]:
    """Return one line for each entry without a box or a line, and each unknown label.

    An entry needs a box in its home, as soon as that is one of the ``pages`` of the book.
    """
    boxes, pages = list(boxes), set(pages)
    found = []
    for box in boxes:
        unknown = [label for label in box.labels if label not in ledger.entries]
        found += [f"{box.page}: the paper has no {label!r}" for label in unknown]
    for entry in ledger.entries.values():
        mine = [box for box in boxes if entry.label in box.labels]
        if entry.page in pages and not any(box.page == entry.page for box in mine):
            found.append(f"{entry.page}: no box for {title_of([entry.label])}")
        elif mine and not any(box.line for box in mine):
            found.append(f"{mine[0].page}: no box for {title_of([entry.label])} has a :line:")
    return found


def disorder(ledger: Ledger, boxes: Iterable[Box], order: Sequence[str]) -> list[str]:
    """Return what is out of the paper's order among the first boxes in the pages of ``order``.

    An entry whose ledger line says why may stand anywhere, but only if it has to. What has no
    home in these pages yet is not looked at.
    """
    rank = {label: number for number, label in enumerate(ledger.entries)}
    inside = sorted((box for box in boxes if box.page in order), key=lambda b: order.index(b.page))
    first: dict[str, str] = {}
    for box in inside:
        for label in box.labels:
            if ledger.entries[label].page in order:
                first.setdefault(label, box.page)
    found = []
    strict = [label for label in first if not ledger.entries[label].why]
    for before, label in pairwise(strict):
        if rank[label] < rank[before]:
            found.append(
                f"{first[label]}: {title_of([label])} comes after {title_of([before])}"
                f" ({first[before]})"
            )
    if all(entry.page in order for entry in ledger.entries.values()):
        found += needless(first, strict, rank)
    return found


def needless(first: Mapping[str, str], strict: list[str], rank: Mapping[str, int]) -> list[str]:
    """Return the exceptions that are in order among those that are none."""
    found, places = [], list(first)
    for label in (one for one in places if one not in strict):
        here = places.index(label)
        if all((rank[one] < rank[label]) == (places.index(one) < here) for one in strict):
            found.append(f"{first[label]}: {title_of([label])} is in order; its reason can go")
    return found


# --- Sphinx ------------------------------------------------------------------------

BOXES: Gathered[Box] = Gathered("paper_boxes")


class paragraphs(nodes.General, nodes.Element):  # type: ignore[misc]  # noqa: N801 (docutils style)
    """Stands for the list of paragraphs until every chapter has been read."""


class PaperDirective(SphinxDirective):
    """``{paper} 3.2.1 ¶1``: a box with what the paper says there."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {"line": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Return the box, and remember it."""
        self.env.note_dependency(str(LEDGER))
        try:
            labels = check_labels(self.arguments[0], load_ledger())
            if not self.content:
                raise PaperError(f"the box for {title_of(labels)} is empty")
        except PaperError as error:
            raise PaperError(f"{self.env.docname}, line {self.lineno}: {error}") from None
        mine = BOXES.by_page(self.env).setdefault(self.env.docname, [])
        anchors = tuple(free_anchor(label, mine) for label in labels)
        mine.append(Box(self.env.docname, labels, anchors, self.options.get("line", "")))
        box = nodes.admonition("", classes=["paper"], ids=list(anchors))
        self.set_source_info(box)
        box += nodes.title("", f"Paper · {title_of(labels)}")
        self.state.nested_parse(self.content, self.content_offset, box)
        return [box]


class ParagraphsDirective(SphinxDirective):
    """``{paper-paragraphs}``: the list of the paper's paragraphs."""

    def run(self) -> list[nodes.Node]:
        """Leave a placeholder and remember the page."""
        self.env.note_dependency(str(LEDGER))
        BOXES.lists(self.env).add(self.env.docname)
        return [paragraphs()]


def free_anchor(label: str, boxes: Iterable[Box]) -> str:
    """Return the label's anchor, with a number where a page has several of its boxes."""
    before = sum(label in box.labels for box in boxes)
    return anchor_of(label) + (f"-{before + 1}-box" if before else "")


def fill(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put the tables where the directive was."""
    for node in list(doctree.findall(paragraphs)):
        node.replace_self(list(render(app, docname)))


def reading_order(env: BuildEnvironment) -> list[str]:
    """Return the pages in the order of the tables of contents."""
    found: list[str] = []

    def visit(page: str) -> None:
        if page not in found:
            found.append(page)
            for child in env.toctree_includes.get(page, []):
                visit(child)

    visit(env.config.root_doc)
    return found


def rows_of(
    entries: Iterable[Entry], boxes: Sequence[Box]
) -> Iterator[tuple[list[str], str, list[Box]]]:
    """Yield labels, line and boxes; neighbours that share the box of their line share a row.

    The line is that of the box at the entry's home, or else of the first box that has one; the
    boxes at home come first.
    """
    rows: list[tuple[list[str], Box | None, list[Box]]] = []
    for entry in entries:
        mine = [box for box in boxes if entry.label in box.labels]
        mine.sort(key=lambda box: box.page != entry.page)
        main = next((box for box in mine if box.line), None)
        if rows and main is not None and rows[-1][1] is main:
            rows[-1][0].append(entry.label)
            rows[-1][2].extend(box for box in mine if box not in rows[-1][2])
        else:
            rows.append(([entry.label], main, mine))
    for labels, main, mine in rows:
        yield labels, main.line if main else "", mine


def render(app: Sphinx, docname: str) -> Iterator[nodes.Node]:
    """Yield a heading and a table for each section of the paper."""
    ledger, order = load_ledger(), reading_order(app.env)
    known = [box for page in order for box in BOXES.by_page(app.env).get(page, [])]
    for section, heading in ledger.titles.items():
        entries = [one for one in ledger.entries.values() if one.section == section]
        yield nodes.rubric("", heading)
        body = nodes.tbody()
        for labels, line, mine in rows_of(entries, known):
            row = nodes.row()
            row += nodes.entry("", nodes.paragraph("", short(labels)))
            row += nodes.entry("", nodes.paragraph("", line or "No box yet."))
            row += nodes.entry("", links(app, docname, labels, mine))
            body += row
        group = nodes.tgroup("", cols=3)
        group += [nodes.colspec("", colwidth=width) for width in (16, 56, 28)]
        titles = ("Part", "In one line", "In the book")
        head = [nodes.entry("", nodes.paragraph("", text)) for text in titles]
        group += [nodes.thead("", nodes.row("", *head)), body]
        yield nodes.table("", group, classes=["paper-paragraphs", "colwidths-given"])


def short(labels: Sequence[str]) -> str:
    """Return a row's labels without the section, which stands above the table."""
    return " ".join(label[label.index("¶") :] if "¶" in label else f"{label} " for label in labels)


def links(app: Sphinx, docname: str, labels: Sequence[str], boxes: Iterable[Box]) -> nodes.Node:
    """Return the chapters that retell the labels, each linked to its first box."""
    line = nodes.paragraph()
    seen: set[str] = set()
    for box in boxes:
        if box.page in seen:
            continue
        seen.add(box.page)
        anchor = next(a for one, a in zip(box.labels, box.anchors, strict=True) if one in labels)
        uri = f"{app.builder.get_relative_uri(docname, box.page)}#{anchor}"
        if len(line):
            line += nodes.Text(", ")
        line += nodes.reference("", app.env.titles[box.page].astext(), refuri=uri, internal=True)
    return line


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.add_node(paragraphs)
    app.add_directive("paper", PaperDirective)
    app.add_directive("paper-paragraphs", ParagraphsDirective)
    BOXES.connect(app)
    app.connect("doctree-resolved", fill)
    return {
        "version": "1",
        "env_version": 1,
        "parallel_read_safe": True,
        "parallel_write_safe": True,
    }
