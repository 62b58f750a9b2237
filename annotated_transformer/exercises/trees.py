"""Exercises on trees and the sequences that stand for them."""

from __future__ import annotations

from typing import Final

from annotated_transformer.exercises.declare import Draw, Exercise
from annotated_transformer.results.parsing import Tree, leaves, linearize, read_trees, tags

LABELS: Final = ("S", "NP", "VP", "PP")
WORDS: Final = (("DT", "the"), ("NN", "baker"), ("VBZ", "sleeps"), ("IN", "on"))


def _random_tree(draw: Draw, depth: int) -> Tree:
    """Return a tree of random labels over at least one word."""
    parts: list[Tree] = []
    for _ in range(draw.integer(1, 3)):
        if depth and draw.integer(0, 1):
            parts.append(_random_tree(draw, depth - 1))
        else:
            tag, word = WORDS[draw.integer(0, len(WORDS) - 1)]
            parts.append(Tree(tag, (word,)))
    return Tree(LABELS[draw.integer(0, len(LABELS) - 1)], tuple(parts))


def _bracketed_tags(tree: Tree) -> list[str]:
    """Put brackets around parts of speech as well, which is wrong."""
    symbols = linearize(tree)
    return [x for s in symbols for x in ([s] if s[0] in "()" else [f"({s}", s, f"){s}"])]


def _words_kept(tree: Tree) -> list[str]:
    """Keep the words in place of their tags, which is wrong."""
    words = iter(leaves(tree))
    return [symbol if symbol[0] in "()" else next(words) for symbol in linearize(tree)]


def _flat(tree: Tree) -> list[str]:
    """Leave out the brackets inside, which is wrong."""
    return [f"({tree.label}", *tags(tree), f"){tree.label}"]


EXAMPLES: Final = (
    "(NP (DT the) (NN baker))"
    "(S (NP (DT the) (NN baker)) (VP (VBZ sleeps)))"
    "(S (VP (VBZ sleeps) (PP (IN on) (NP (NN bread)))))"
)
LINEARIZE: Final = Exercise(
    linearize,
    [(tree,) for tree in read_trees(EXAMPLES)],
    lambda draw: (_random_tree(draw, draw.integer(1, 3)),),
    {
        "closing brackets without their labels: write )NP, not )":
            lambda tree: [s if s[0] != ")" else ")" for s in linearize(tree)],
        "closing brackets missing": lambda tree: [s for s in linearize(tree) if s[0] != ")"],
        "words kept: each word is replaced by its part of speech": _words_kept,
        "brackets around the parts of speech, too": _bracketed_tags,
        "turned around: the symbols go from left to right": lambda t: linearize(t)[::-1],
        "only the outermost bracket: call yourself for each child": _flat,
    },
)  # fmt: skip
