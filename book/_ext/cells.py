"""How a chapter's cells look on the page: folded proofs, quiet labels, short docstrings.

A cell with the tag ``checked`` is folded under the label "Checked: ...", which says what it
checks: the first comment of the cell, or else the claim that it settles. What only prepares the
next checks is "Details: ...". The bar of any other folded cell says what is in it: "Show code:
judge, figure". Comments for our tools (``noqa``, ``type: ignore``, ``fmt: skip``) are left out, and
of a docstring the page shows what comes before its first section (``Args:``, ``Returns:``); the
rest unfolds. The source keeps all.
"""

import re

from bodies import rewrite_bodies
from docutils import nodes
from scoreboard import load_claims, parse_tags, tags_of
from sphinx.application import Sphinx

CHECKED = "checked"
ALIGNED = re.compile(r"(?m)^[ \t]|\S {2}|\t")  # columns, or lines below others
LABEL = re.compile(r"\A\s*#:?\s*(?P<text>[^#!%:].*?)\s*$", re.MULTILINE)  # "#:" documents a name
LONGEST = 100  # characters of a label
NAMED = 3  # functions and classes that the bar of a folded cell names
DEFINED = re.compile(r"^(?:async )?(?:def|class) (\w+)", re.MULTILINE)
NO_IMPORT = re.compile(r"^(?!import |from |[\s)#]|\Z)", re.MULTILINE)
KINDS = {"figure": r"^[^#]*\b(?:show|live)\(", "table": r"^[^#]*\bTable\("}  # a cell's output
TOOLS = re.compile(r"[ \t]*#[ \t]*(?:noqa\b|type:[ \t]*ignore\b|fmt:[ \t]*(?:skip|off|on)\b).*$")
DOC = re.compile(r'<span class="sd">"""(?:(?!""").)*"""</span>', re.DOTALL)
SECTION = re.compile(
    r'<span class="sd">\s*(?:Args|Attributes|Examples?|Notes?|Raises|Returns|Shape|Yields):</span>'
)
SOURCE = re.compile(r'<div class="cell_input docutils container">.*?</pre>', re.DOTALL)
MORE = '<button type="button" class="doc-more" aria-expanded="false" aria-label="whole docstring">'


def without_tool_comments(source: str) -> str:
    """Return a cell's source without what only a linter or a type checker reads."""
    found = []
    for line in source.split("\n"):
        short = TOOLS.sub("", line)
        if short.strip() or not line.strip():
            found.append(short)
    return "\n".join(found)


def claim_of(tags: list[str]) -> str:
    """Return the statement of the first claim that a cell's tags name, or nothing."""
    claims = load_claims()
    return next((claims[key].claim for key, _ in parse_tags(tags) if key in claims), "")


def shortened(text: str) -> str:
    """Return a label's text without its full stop, and not longer than a bar is wide."""
    if len(text) > LONGEST:
        text = text[: LONGEST - 1].rsplit(" ", 1)[0].rstrip(" ,;:") + "…"
    return text.rstrip(".")


def label(source: str, tags: list[str]) -> str:
    """Return the line under which a checked cell is folded.

    One that asserts nothing, and settles no claim, holds details or prepares the next.
    """
    kind = "Checked" if "assert" in source or any("claim-" in tag for tag in tags) else "Details"
    comment = LABEL.match(source)
    text = comment["text"] if comment else claim_of(tags).replace("`", "").replace("*", "")
    return f"{kind}: {shortened(text)}" if text else kind


def contents(source: str) -> str:
    """Return what is in a folded cell: its first comment, or the names of what it defines.

    What it draws or imports is named as well (an ellipsis says that it does more than import);
    nothing, if it only computes.
    """
    if comment := LABEL.match(source):
        return shortened(comment["text"])
    names = DEFINED.findall(source)
    found = [*names[:NAMED], *(["…"] if names[NAMED:] else [])]
    found += [kind for kind, call in KINDS.items() if re.search(call, source, re.MULTILINE)]
    if not found and source.startswith(("import ", "from ")):
        found = ["imports", *(["…"] if NO_IMPORT.search(source) else [])]
    return ", ".join(found)


def prepare(app: Sphinx, doctree: nodes.document) -> None:
    """Fold the checked cells of a chapter, clean the source of all, and mark printed sentences.

    Those wrap on a phone; lines that are aligned with others would not survive it.
    """
    for cell in doctree.findall(nodes.container):
        if cell.get("nb_element") == "cell_code_output":
            for block in cell.findall(nodes.literal_block):
                block["classes"] += [] if ALIGNED.search(block.astext()) else ["sentences"]
        if cell.get("nb_element") != "cell_code":
            continue
        tags = tags_of(cell)
        for block in sources(cell):
            if CHECKED in tags:
                words = label(block.astext(), tags)
                cell["hide_mode"], cell["prompt_show"], cell["prompt_hide"] = "all", words, words
            text = without_tool_comments(block.astext())
            if CHECKED not in tags and cell.get("hide_mode") and (inside := contents(text)):
                for prompt in ("prompt_show", "prompt_hide"):
                    cell[prompt] = f"{cell[prompt]}: {inside}"
            block.rawsource = text
            block.children = []
            block += nodes.Text(text)


def sources(cell: nodes.container) -> list[nodes.literal_block]:
    """Return the blocks of a cell that hold its code."""
    return [
        block
        for part in cell.children
        if isinstance(part, nodes.container) and part.get("nb_element") == "cell_code_source"
        for block in part.findall(nodes.literal_block)
    ]


def fold_docstring(match: re.Match[str]) -> str:
    """Put a docstring from its first section on behind a button, but for the closing quotes."""
    lines = match[0].split("\n")
    first = next((i for i, line in enumerate(lines) if SECTION.match(line)), None)
    if first is None:
        return match[0]
    while not lines[first - 1].strip():  # the empty line before the section goes with it
        first -= 1
    head, rest = "\n".join(lines[:first]), "\n".join(lines[first:-1])
    # The button stands after the quotes: a first line may be 100 characters long.
    return f'{head}<span class="doc-rest">\n{rest}</span>\n{lines[-1]}{MORE}</button>'


def fold_docstrings(body: str) -> str:
    """Shorten the docstrings in the cells of a page."""
    return SOURCE.sub(lambda cell: DOC.sub(fold_docstring, cell[0]), body)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("doctree-read", prepare)
    rewrite_bodies(app, fold_docstrings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
