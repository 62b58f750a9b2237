"""The scoreboard: every claim of the paper, its status, and where it is checked.

The claims are data (``book/_data/claims.json``). A cell that checks a claim has a
tag ``claim-<id>``, or ``claim-<id>-<kind>`` where it settles only one kind of
check, and ``status-does-not-hold`` where it shows that the claim fails. A cell that
prints a line ``status: not resolved; ...`` states the status itself, as those do that
judge several runs. What needs a long run is settled by a cell of kind R, which reads
the records of it.

While the book is read, every tagged cell gets an anchor; when it is written, the
directive ``{scoreboard}`` becomes a summary and one table for each section.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from gathered import Gathered
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "book" / "_data" / "claims.json"

HOLDS = "holds"
AT_OUR_SCALE = "holds at our scale"
UNRESOLVED = "not resolved"
OPEN = "not yet run"
FAILS_AT_OUR_SCALE = "does not hold at our scale"
FAILS = "does not hold"
STATUSES = (HOLDS, AT_OUR_SCALE, UNRESOLVED, OPEN, FAILS_AT_OUR_SCALE, FAILS)  # ever more cautious
STATED = re.compile(r"^status: ([a-z ]+?)(?:[;,(].*)?$", re.MULTILINE)

KINDS = {"P": "proved", "M": "measured", "R": "recorded"}
TAG = re.compile(r"claim-(?P<id>[0-9A]\.\w+?)(?:-(?P<kind>[PMR]))?")
OVERRIDE = "status-does-not-hold"

SECTIONS = {
    "1": "1 Introduction",
    "2": "2 Background",
    "3": "3 Model architecture",
    "4": "4 Why self-attention",
    "5": "5 Training",
    "6": "6 Results",
    "A": "Appendix: what the heads look at",
}


class ScoreboardError(Exception):
    """The claims, the tags or the records do not fit together."""


@dataclass(frozen=True)
class Part:
    """One check that a claim needs: its kind, and what is checked."""

    kind: str
    text: str


@dataclass(frozen=True)
class Claim:
    """A checkable statement of the paper."""

    id: str
    section: str
    claim: str
    parts: tuple[Part, ...]
    command: str = ""
    needs: str = ""
    definition: bool = False  # of a layer, or a setting: the check tests our code, not the paper


@dataclass(frozen=True)
class Cell:
    """A cell that checks a claim, where it is, and the status that its output states, if any."""

    claim: str
    kind: str | None
    fails: bool
    page: str
    anchor: str
    stated: str = ""

    def settles(self, kind: str) -> bool:
        """Whether the cell settles this kind of check; for R, it must say so."""
        return self.kind == kind or (self.kind is None and kind != "R")

    def status(self, kind: str) -> str:
        """Return what the cell says of this kind of check: only what is proved is unrestricted."""
        if self.stated:
            return self.stated
        if self.fails:
            return FAILS if kind == "P" else FAILS_AT_OUR_SCALE
        return HOLDS if kind == "P" else AT_OUR_SCALE


@dataclass(frozen=True)
class Verdict:
    """The status of one part of a claim."""

    part: Part
    status: str
    cells: tuple[Cell, ...] = ()


def load_claims(path: Path = CLAIMS) -> dict[str, Claim]:
    """Read the claims, in the order of the paper."""
    claims = {}
    for row in json.loads(path.read_text(encoding="utf-8")):
        parts = tuple(Part(**part) for part in row.pop("parts"))
        if row["id"] in claims:
            raise ScoreboardError(f"{path}: claim {row['id']} is there twice")
        claims[row["id"]] = Claim(**row, parts=parts)
    return claims


def parse_tags(tags: Iterable[str]) -> list[tuple[str, str | None]]:
    """Return the claims, and kinds where given, that a cell's tags name."""
    found = []
    for tag in tags:
        if tag.startswith("claim-"):
            if (match := TAG.fullmatch(tag)) is None:
                raise ScoreboardError(f"tag {tag} is not of the form claim-3.5c")
            found.append((match["id"], match["kind"]))
    return found


def stated_status(output: str) -> str:
    """Return the status that a cell's output states in a line of its own, or nothing.

    Raises:
        ScoreboardError: The scoreboard does not know that status.
    """
    found = STATED.findall(output)
    for status in found:
        if status not in STATUSES:
            raise ScoreboardError(f"{status!r} is no status: it is one of {', '.join(STATUSES)}")
    return worst(found) if found else ""


def settle(claim: Claim, cells: Iterable[Cell]) -> list[Verdict]:
    """Return the status of each part of a claim: the most cautious of the cells that check it."""
    cells = [cell for cell in cells if cell.claim == claim.id]
    verdicts = []
    for part in claim.parts:
        mine = tuple(cell for cell in cells if cell.settles(part.kind))
        verdicts.append(Verdict(part, worst(cell.status(part.kind) for cell in mine), mine))
    return verdicts


def worst(statuses: Iterable[str]) -> str:
    """Return the most cautious of some statuses; of none, that nothing was run."""
    return max(statuses, key=STATUSES.index, default=OPEN)


def summarize(board: dict[str, list[Verdict]]) -> Counter[str]:
    """Count the claims by their most cautious status; where only some parts ran, in part."""
    counts: Counter[str] = Counter()
    for verdicts in board.values():
        statuses = {verdict.status for verdict in verdicts}
        status = worst(statuses)
        counts["settled in part" if status == OPEN and len(statuses) > 1 else status] += 1
    return counts


# --- Sphinx ------------------------------------------------------------------

CELLS: Gathered[Cell] = Gathered("claim_cells")


class placeholder(nodes.General, nodes.Element):  # type: ignore[misc]  # noqa: N801 (docutils style)
    """Stands for the scoreboard until every chapter has been read."""


class ScoreboardDirective(SphinxDirective):
    """``{scoreboard}``: the table of all claims."""

    def run(self) -> list[nodes.Node]:
        """Leave a placeholder and remember the page."""
        self.env.note_dependency(str(CLAIMS))
        CELLS.lists(self.env).add(self.env.docname)
        return [placeholder()]


def mark_cells(app: Sphinx, doctree: nodes.document) -> None:
    """Give each tagged cell of a chapter an anchor, and remember it."""
    page, claims = app.env.docname, load_claims()
    cells: list[Cell] = []
    for node in doctree.findall(nodes.container):
        if node.get("nb_element") != "cell_code":
            continue
        tags = tags_of(node)
        for claim, kind in parse_tags(tags):
            if claim not in claims:
                raise ScoreboardError(f"{page}: a cell is tagged with claim {claim}")
            anchor = "claim-" + claim.replace(".", "-").lower()
            taken = {cell.anchor for cell in cells}
            number = 2
            while anchor in taken:
                anchor = f"claim-{claim.replace('.', '-').lower()}-{number}"
                number += 1
            node["ids"].append(anchor)
            try:
                said = stated_status("\n".join(outputs_of(node)))
            except ScoreboardError as error:
                raise ScoreboardError(f"{page}: claim {claim}: {error}") from None
            cells.append(Cell(claim, kind, OVERRIDE in tags, page, anchor, said))
    CELLS.by_page(app.env)[page] = cells


def tags_of(cell: nodes.container) -> list[str]:
    """Return the tags of a cell of a chapter."""
    return list((cell.get("cell_metadata") or {}).get("tags", []))


def outputs_of(cell: nodes.container) -> Iterator[str]:
    """Yield what a cell of a chapter printed."""
    for node in cell.findall(nodes.container):
        if node.get("nb_element") == "cell_code_output":
            yield from (text.astext() for text in node.findall(nodes.literal_block))


def fill(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put the tables where the directive was, and links at the tagged cells."""
    for node in list(doctree.findall(placeholder)):
        node.replace_self(list(render(app, docname)))
    board = next(iter(sorted(CELLS.lists(app.env))), None)
    if board is None or docname == board:
        return
    anchors = {cell.anchor: cell for cell in CELLS.by_page(app.env).get(docname, [])}
    claims = load_claims()
    for node in list(doctree.findall(nodes.container)):
        for anchor in [name for name in node["ids"] if name in anchors]:
            cell = anchors[anchor]
            uri = app.builder.get_relative_uri(docname, board)
            row = f"{uri}#score-{cell.claim.replace('.', '-').lower()}"
            line = nodes.paragraph(classes=["claim-link"])
            words = link_text(claims[cell.claim])
            line += nodes.reference("", words, refuri=row, internal=True)
            folded = node[0] if "checked" in tags_of(node) else node  # a proof with its link
            folded.insert(0, line)


def link_text(claim: Claim) -> str:
    """Return what a link to a claim reads: its id, and what it says."""
    return f"Claim {claim.id}: " + "".join(node.astext() for node in inline(claim.claim))


def render(app: Sphinx, docname: str) -> Iterator[nodes.Node]:
    """Yield the summary and the tables."""
    claims = load_claims()
    cells = [cell for _, found in sorted(CELLS.by_page(app.env).items()) for cell in found]
    board = {key: settle(claim, cells) for key, claim in claims.items()}
    yield summary(claims, board)
    for prefix, heading in SECTIONS.items():
        rows = [claims[key] for key in claims if key.split(".")[0] == prefix]
        if rows:
            yield nodes.rubric("", heading)
            body = [row_of(app, docname, claim, board[claim.id]) for claim in rows]
            yield table(["", "Claim", "Check", "Status"], [6, 44, 26, 24], body)


def plural(status: str) -> str:
    """Return a status as it is said of several claims."""
    return status.replace("does not", "do not").replace("holds", "hold")


def summary(claims: dict[str, Claim], board: dict[str, list[Verdict]]) -> nodes.Node:
    """Return a paragraph with the counts."""
    counts = summarize(board)
    words = [
        f"{counts[status]} {status if counts[status] == 1 else plural(status)}"
        for status in (*STATUSES[:3], FAILS_AT_OUR_SCALE, FAILS, "settled in part", OPEN)
        if counts[status] or status in (HOLDS, OPEN)
    ]
    defined = [key for key, claim in claims.items() if claim.definition]
    text = f"Of {len(board)} claims: {', '.join(words)}."
    text += f" Of these, {len(defined)} state definitions or settings, which our code implements"
    text += " as printed."
    return nodes.paragraph("", "", nodes.strong("", text), classes=["summary"])


def row_of(
    app: Sphinx, docname: str, claim: Claim, verdicts: list[Verdict]
) -> list[list[nodes.Node]]:
    """Return the cells of a claim's row."""
    target = nodes.target("", "", ids=[f"score-{claim.id.replace('.', '-').lower()}"])
    name = nodes.paragraph("", "", target, nodes.strong("", claim.id))
    statement = nodes.paragraph("", "", *inline(claim.claim))
    kind = "; a definition" if claim.definition else ""
    where = nodes.inline("", f"(§\u00a0{claim.section}{kind})", classes=["section"])
    statement += [nodes.Text(" "), where]
    checks: list[nodes.Node] = []
    states: list[nodes.Node] = []
    for verdict in verdicts:
        line = nodes.paragraph("", "", nodes.emphasis("", KINDS[verdict.part.kind]))
        if verdict.part.text:
            line += [nodes.Text(": "), *inline(verdict.part.text)]
        checks.append(line)
        states += status_of(app, docname, claim, verdict, len(verdicts) > 1)
    return [[name], [statement], checks, states]


def status_of(
    app: Sphinx, docname: str, claim: Claim, verdict: Verdict, several: bool
) -> list[nodes.Node]:
    """Return the status of a part, with links to the cells that settle it."""
    css = "scoreboard-status-" + verdict.status.replace(" ", "-")
    line = nodes.paragraph("", "", nodes.inline("", verdict.status, classes=[css]))
    if several:
        line.insert(0, nodes.Text(f"{KINDS[verdict.part.kind]}: "))
    for number, cell in enumerate(verdict.cells, start=1):
        uri = app.builder.get_relative_uri(docname, cell.page) + f"#{cell.anchor}"
        label = "cell" if len(verdict.cells) == 1 else f"cell\u00a0{number}"
        line += [nodes.Text(", "), nodes.reference("", label, refuri=uri, internal=True)]
    found: list[nodes.Node] = [line]
    if verdict.part.kind == "R" and verdict.status == OPEN:
        if claim.command:
            found.append(nodes.paragraph("", "", nodes.literal("", claim.command)))
        if claim.needs:
            found.append(nodes.paragraph("", "", *inline(claim.needs)))
    return found


def inline(text: str) -> list[nodes.Node]:
    """Return a text with `code` and *emphasis* as nodes."""
    found: list[nodes.Node] = []
    for piece in re.split(r"(`[^`]+`|(?<!\w)\*[^*]+\*(?!\w))", text):
        if piece.startswith("`"):
            found.append(nodes.literal("", piece.strip("`")))
        elif piece.startswith("*") and piece.endswith("*") and len(piece) > 2:
            found.append(nodes.emphasis("", piece.strip("*")))
        elif piece:
            found.append(nodes.Text(piece))
    return found


def table(head: list[str], widths: list[int], rows: list[list[list[nodes.Node]]]) -> nodes.table:
    """Return a table with a head."""
    group = nodes.tgroup("", cols=len(head))
    group += [nodes.colspec("", colwidth=width) for width in widths]
    titles = [nodes.entry("", nodes.paragraph("", text)) for text in head]
    group += nodes.thead("", nodes.row("", *titles))
    body = [nodes.row("", *[nodes.entry("", *entry) for entry in row]) for row in rows]
    group += nodes.tbody("", *body)
    return nodes.table("", group, classes=["scoreboard", "colwidths-given"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.add_node(placeholder)
    app.add_directive("scoreboard", ScoreboardDirective)
    app.connect("doctree-read", mark_cells)
    CELLS.connect(app)
    app.connect("doctree-resolved", fill)
    return {
        "version": "1",
        "env_version": 1,
        "parallel_read_safe": True,
        "parallel_write_safe": True,
    }
