"""Hover cards: what a link leads to, shown without leaving the page.

For each internal link of a page, this looks up its target (a section, a figure, an equation, a
box, a claim, a citation) and puts a short card into the page, as data.
``book/_static/cards.js`` shows it while the link has the pointer or the focus.
"""

import functools
import json
import posixpath
import re
from collections.abc import Iterator
from html import escape, unescape
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from formulas import mathml
from scoreboard import load_claims
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

LINK = re.compile(r'<a class="[^"]*\breference internal\b[^"]*" href="(?P<href>[^"]+)"')
CLAIM = re.compile(r"score-(?P<section>\w)-(?P<rest>\w+)")
LONGEST = 320  # characters of a card's text


def html_of(node: nodes.Node) -> str:
    """Return a paragraph's text in HTML: formulas in MathML, the rest plain."""
    if isinstance(node, nodes.math | nodes.math_block):
        return mathml(node.astext(), block=isinstance(node, nodes.math_block))
    if isinstance(node, nodes.Text):
        return escape(node.astext())
    return "".join(html_of(child) for child in node.children)


def shortened(node: nodes.Node) -> str:
    """Return the beginning of a paragraph in HTML."""
    parts, length = [], 0
    for child in node.children:
        length += len(child.astext())
        if length > LONGEST:
            if isinstance(child, nodes.Text):
                rest = child.astext()[: max(0, LONGEST - length)]
                parts.append(escape(rest.rsplit(" ", 1)[0]))
            parts.append("…")
            break
        parts.append(html_of(child))
    return "".join(parts).strip()


def card(title: str, text: str) -> str:
    """Return a card's HTML."""
    head = f"<strong>{title}</strong>" if title else ""
    return f"{head}<p>{text}</p>" if text else head


def first_paragraph(node: nodes.Element) -> str:
    """Return the first paragraph of running text below a node, shortened."""
    boxes = (nodes.Admonition, nodes.admonition, nodes.container, nodes.figure, nodes.table)
    for paragraph in node.findall(nodes.paragraph):
        if "run-time" in paragraph["classes"]:
            continue
        parent: nodes.Node | None = paragraph.parent
        while parent is not node and parent is not None:
            if isinstance(parent, (*boxes, nodes.block_quote)):
                break
            parent = parent.parent
        else:
            return shortened(paragraph)
    return ""


def places(tree: nodes.document) -> dict[str, nodes.Element]:
    """Return the elements with an id by it, and the whole by the empty one."""
    found: dict[str, nodes.Element] = {"": tree}
    for node in tree.findall(nodes.Element):
        for anchor in node.get("ids", ()):
            found.setdefault(anchor, node)
    return found


def card_of(node: nodes.Element) -> str:
    """Return the card of an element that links may lead to; nothing for the others."""
    if isinstance(node, nodes.target) and isinstance(node.parent, nodes.Element):
        after = node.parent.index(node) + 1
        return card_of(node.parent[after]) if after < len(node.parent) else ""
    if isinstance(node, nodes.math_block):
        return html_of(node)
    if isinstance(node, nodes.figure):
        caption = next(iter(node.findall(nodes.caption)), None)
        return card("", shortened(caption)) if caption else ""
    if isinstance(node, nodes.section | nodes.document):
        title = next(iter(node.findall(nodes.title)), None)
        return card(html_of(title), first_paragraph(node)) if title else ""
    if isinstance(node, nodes.Admonition | nodes.admonition):
        title = next(iter(node.findall(nodes.title)), None)
        text = next(iter(node.findall(nodes.paragraph)), None)
        return card(html_of(title) if title else "", shortened(text) if text else "")
    return ""


def citations(env: BuildEnvironment) -> dict[str, str]:
    """Return the card of each entry of the bibliography, by its anchor."""
    domain: Any = env.get_domain("cite")
    return {
        one.citation_id: card("", escape(one.formatted_entry.text.render_as("text")))
        for one in domain.citations
    }


def hrefs(body: str) -> Iterator[str]:
    """Yield what a page's internal links lead to, each once."""
    found = dict.fromkeys(unescape(match["href"]) for match in LINK.finditer(body))
    yield from (href for href in found if not href.startswith("#ex-"))  # beside its solution


class Cards:
    """The cards of a build; each page's tree is read once."""

    def __init__(self, env: BuildEnvironment) -> None:
        self.env = env
        self.places = functools.cache(lambda page: places(self._tree(page)))
        self.entries = citations(env)

    def _tree(self, page: str) -> nodes.document:
        """Return a page as it was read, with numbers of equations, and without citations."""
        tree = self.env.get_doctree(page)
        numbers = {
            name: number
            for kinds in self.env.toc_fignumbers.values()
            for name, number in kinds.get("displaymath", {}).items()
        }
        for node in list(tree.findall(addnodes.pending_xref)):
            if node["refdomain"] == "cite":
                node.parent.remove(node)
            elif node["refdomain"] == "math":
                number = numbers.get(f"equation-{node['reftarget']}", ())
                node[:] = [nodes.Text(f"({'.'.join(map(str, number))})")]
        return tree

    def of(self, page: str, href: str) -> str:
        """Return the card of a link in a page, or nothing."""
        path, _, anchor = href.partition("#")
        anchor = unquote(anchor)
        if match := CLAIM.fullmatch(anchor):
            claim = load_claims().get(f"{match['section'].upper()}.{match['rest']}")
            return card(f"Claim {claim.id}", escape(claim.claim.replace("`", ""))) if claim else ""
        if anchor in self.entries:
            return self.entries[anchor]
        other = page
        if path:
            other = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(path)))
            other = other.removesuffix(".html")
        if other not in self.env.all_docs:
            return ""
        node = self.places(other).get(anchor)
        return card_of(node) if node is not None else ""


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    made: list[Cards] = []

    def add(
        _app: Sphinx, page: str, _template: str, context: dict[str, Any], doctree: object
    ) -> None:
        if doctree is None:
            return
        if not made:  # not before every page was read
            made.append(Cards(app.env))
        found = {href: made[0].of(page, href) for href in hrefs(context["body"])}
        if cards := {href: text for href, text in found.items() if text}:
            data = json.dumps(cards, ensure_ascii=False).replace("</", "<\\/")
            context["body"] += f'\n<script type="application/json" id="cards">{data}</script>'
            app.add_js_file("cards.js")

    app.connect("html-page-context", add, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
