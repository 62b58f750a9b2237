"""Trees drawn as text for a terminal, and as SVG for a page, in the colour of the page's text."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

ROW, LETTER, GAP = 38, 8.2, 14  # pixels: a level of the tree, a letter's width, between words


class Node(Protocol):
    """A labelled tree; the only child of its lowest nodes is a word."""

    @property
    def label(self) -> str:
        """The name of the constituent."""

    @property
    def children(self) -> "Sequence[Node | str]":
        """Its parts."""


def draw_text(tree: Node) -> str:
    """Draw a tree as lines of text: a constituent a line, its parts below it and to the right.

    Returns:
        Lines without an end of line after the last.
    """
    lines: list[str] = []
    waiting: list[tuple[Node, str, str]] = [(tree, "", "")]  # with what stands to its left
    while waiting:
        node, lead, below = waiting.pop()
        first = node.children[0]
        lines.append(f"{lead}{node.label}" + (f"  {first}" if isinstance(first, str) else ""))
        parts = [child for child in node.children if not isinstance(child, str)]
        for i, part in reversed(list(enumerate(parts))):
            branch, trunk = ("├─ ", "│  ") if i < len(parts) - 1 else ("└─ ", "   ")
            waiting.append((part, below + branch, below + trunk))
    return "\n".join(lines)


@dataclass
class Placed:
    """A label of the drawing, and where it stands."""

    text: str
    x: float
    y: float
    parts: "list[Placed]"
    word: bool = False


def tree_layout(tree: Node) -> tuple[Placed, float, float]:
    """Place a tree's labels, words in one row at the bottom; return its root, width and height."""
    right, deepest = GAP / 2, 0
    root = Placed(tree.label, 0, 0, [])
    waiting: list[tuple[Node, Placed, int, bool]] = [(tree, root, 1, True)]
    words: list[Placed] = []
    while waiting:
        node, placed, depth, opens = waiting.pop()
        first = node.children[0]
        if isinstance(first, str):
            width = LETTER * max(len(first), len(node.label))
            placed.x, placed.y = right + width / 2, depth * ROW
            placed.parts = [Placed(first, placed.x, 0, [], word=True)]
            words += placed.parts
            right, deepest = right + width + GAP, max(deepest, depth)
        elif opens:
            parts = [child for child in node.children if not isinstance(child, str)]
            placed.parts = [Placed(part.label, 0, 0, []) for part in parts]
            below = [(p, q, depth + 1, True) for p, q in zip(parts, placed.parts, strict=True)]
            waiting += [(node, placed, depth, False), *reversed(below)]
        else:
            placed.x = (placed.parts[0].x + placed.parts[-1].x) / 2
            placed.y = depth * ROW
    for word in words:
        word.y = (deepest + 1) * ROW
    return root, right, (deepest + 1) * ROW + GAP


def draw_svg(tree: Node, text: str = "") -> str:
    """Draw a tree as an SVG element, root on top, in the colour of the text around it."""
    root, width, height = tree_layout(tree)
    lines, names, words, waiting = [], [], [], [root]
    while waiting:
        node = waiting.pop()
        slant = ' font-style="italic"' if node.word else ""
        names.append(f'<text x="{node.x:.1f}" y="{node.y}"{slant}>{html.escape(node.text)}</text>')
        for part in node.parts:
            ends = f'y1="{node.y + 5}" x2="{part.x:.1f}" y2="{part.y - 15}"'
            lines.append(f'<line x1="{node.x:.1f}" {ends}/>')
        words += [part.text for part in node.parts if part.word]
        waiting += reversed(node.parts)
    label = html.escape(text or f"Tree of the sentence: {' '.join(words)}")
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    style = 'style="max-width:100%;height:auto" font-family="sans-serif" font-size="14"'
    return (
        f'<svg role="img" aria-label="{label}" {style} {size} xmlns="http://www.w3.org/2000/svg">'
        f'<g stroke="currentColor" stroke-width="1" stroke-opacity="0.5">{"".join(lines)}</g>'
        f'<g fill="currentColor" text-anchor="middle">{"".join(names)}</g></svg>'
    )


@dataclass(frozen=True, repr=False)
class TreePicture:
    """A tree drawn in a notebook, and as text where there is no HTML."""

    tree: Node
    text: str = ""  #: What the picture shows; the sentence by default.

    def __repr__(self) -> str:
        """Return the tree drawn as text."""
        return draw_text(self.tree)

    def _repr_html_(self) -> str:
        return draw_svg(self.tree, self.text)
