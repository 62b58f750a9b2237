# Written from book/results/parsing.md: edit the chapter instead.
"""Trees as sequences of symbols, and how parsers are scored (Section 6.3)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from annotated_transformer.notation import SPECIAL_TOKENS


@dataclass(frozen=True)
class Tree:
    """A constituent and its parts, in order.

    Attributes:
        label: Its kind, such as ``NP``; of a single word the part of speech.
        children: Its parts; or one word, which makes it a *preterminal*.
    """

    label: str
    children: tuple[Tree | str, ...]

    @property
    def word(self) -> str | None:
        """The word of a preterminal; None for any other constituent."""
        first = self.children[0]
        return first if isinstance(first, str) else None

    def __repr__(self) -> str:
        """Return the tree in Penn brackets: ``(NP (DT the) (NN baker))``."""
        out: list[str] = []
        for node, opens in walk(self):
            word = "" if node.word is None else f" {node.word}"
            out.append(f" ({node.label}{word}" if opens else ")")
        return "".join(out).lstrip()


def walk(tree: Tree) -> Iterator[tuple[Tree, bool]]:
    """Yield every constituent where it opens (True) and where it closes (False).

    Without recursion, so that a tree may be as deep as memory allows.
    """
    waiting = [(tree, True)]
    while waiting:
        node, opens = waiting.pop()
        yield node, opens
        if opens:
            parts = [(c, True) for c in node.children if isinstance(c, Tree)]
            waiting += [(node, False), *reversed(parts)]


def leaves(tree: Tree) -> list[str]:
    """Return the words of a tree, in order."""
    nodes = [node for node, opens in walk(tree) if opens]
    return [node.word for node in nodes if node.word is not None]


def tags(tree: Tree) -> list[str]:
    """Return the parts of speech of a tree's words, in order."""
    nodes = [node for node, opens in walk(tree) if opens]
    return [node.label for node in nodes if node.word is not None]


def read_trees(text: str) -> list[Tree]:
    """Read trees in Penn brackets, any number of them, on any number of lines.

    Raises:
        ValueError: Brackets are unbalanced, or one has neither a word nor parts; the
            message names line and column.
    """
    trees: list[Tree] = []
    stack: list[tuple[int, list[str], list[Tree]]] = []  # start, atoms, parts
    for found in re.finditer(r"[()]|[^\s()]+", text):
        at, token = found.start(), found[0]
        if token == "(":
            stack.append((at, [], []))
        elif not stack:
            remedy = "remove it, or open a bracket before it"
            raise ValueError(f"{line_and_column(text, at)}: {token!r} stands outside; {remedy}")
        elif token != ")":
            stack[-1][1].append(token)
        else:
            start, atoms, parts = stack.pop()
            tree = parse_constituent(atoms, parts, text, start)
            (stack[-1][2] if stack else trees).append(tree)
    if stack:
        where = line_and_column(text, stack[-1][0])
        raise ValueError(f"{where}: the bracket is never closed; add a )")
    return trees


def line_and_column(text: str, at: int) -> str:
    """Return the line and the column of a character, counted from 1."""
    line = text.count("\n", 0, at) + 1
    return f"line {line}, column {at - text.rfind(chr(10), 0, at)}"


def parse_constituent(atoms: Sequence[str], parts: Sequence[Tree], text: str, start: int) -> Tree:
    """Return what stands between two brackets: a tag and a word, or a label and parts.

    Raises:
        ValueError: It is neither.
    """
    if len(atoms) == 2 and not parts:
        return Tree(atoms[0], (atoms[1],))
    if len(atoms) < 2 and parts:
        return Tree(atoms[0] if atoms else "", tuple(parts))
    count = f"{len(atoms)} words and {len(parts)} brackets"
    remedy = "write (TAG word), or (LABEL ...) around other brackets"
    raise ValueError(f"{line_and_column(text, start)}: a bracket around {count}; {remedy}")


def linearize(tree: Tree) -> list[str]:
    """Return a tree as symbols, as Vinyals et al. do, but with tags (Section 6.3).

    A bracket carries its label where it opens and where it closes, and each word is
    replaced by its part of speech: ``(NP``, ``DT``, ``NN``, ``)NP``.
    """
    symbols = []
    for node, opens in walk(tree):
        if node.word is None:
            symbols.append(f"({node.label}" if opens else f"){node.label}")
        elif opens:
            symbols.append(node.label)
    return symbols


OUTER = ("", "TOP", "ROOT")


def strip_function_tags(label: str) -> str:
    """Return a label without its function tags: ``NP`` for ``NP-SBJ-1``."""
    return label if label.startswith("-") else re.split("[-=]", label)[0]


def clean_tree(tree: Tree) -> Tree | None:
    """Return a tree without traces, function tags and the outer bracket.

    Returns:
        None if no word is left.
    """
    parts = [list[Tree]()]
    for node, opens in walk(tree):
        if opens:
            parts.append([])
            continue
        inside = parts.pop()
        children = tuple(inside) if node.word is None else node.children
        if children and node.label != "-NONE-":
            parts[-1].append(Tree(strip_function_tags(node.label), children))
    root = parts[0][0] if parts[0] else None
    while root is not None and root.label in OUTER and len(root.children) == 1:
        (only,) = root.children
        if isinstance(only, str):
            break
        root = only
    return root


ROOT = "TOP"  # joins what is not one tree; the scorer drops it
NO_TAG = "XX"  # the part of speech of a word that got none


def delinearize(symbols: Sequence[str], words: Sequence[str]) -> Tree:
    """Return a tree over exactly these words; the inverse of ``linearize``.

    What a model generates need not be a tree, and is repaired:

    - A closing bracket also closes what was opened after its partner, and is ignored
      if it has none. What is open at the end is closed there.
    - Tags beyond the last word are ignored. Words without a tag get ``XX``, in the
      outermost bracket. Brackets around no word are dropped.
    - What is not one tree is joined by a bracket ``TOP``, which is not scored.

    Raises:
        ValueError: There are no words.
    """
    if not words:
        raise ValueError("a tree needs at least one word; leave empty lines out")
    found, used = build_trees(symbols, words)
    rest = [Tree(NO_TAG, (word,)) for word in words[used:]]
    if len(found) == 1 and found[0].word is None:
        return Tree(found[0].label, (*found[0].children, *rest))
    parts = (*found, *rest)
    return parts[0] if len(parts) == 1 else Tree(ROOT, parts)


def build_trees(symbols: Sequence[str], words: Sequence[str]) -> tuple[list[Tree], int]:
    """Return the trees that symbols make, and how many of the words they used."""
    labels, parts, used = [" "], [list[Tree]()], 0  # open ones, the outside first

    def close() -> None:
        label, inside = labels.pop(), parts.pop()
        if inside:
            parts[-1].append(Tree(label, tuple(inside)))

    for symbol in symbols:
        if symbol.startswith("("):
            labels.append(symbol[1:])
            parts.append([])
        elif symbol.startswith(")"):
            if symbol[1:] in reversed(labels):
                while labels[-1] != symbol[1:]:
                    close()
                close()
        elif used < len(words):
            parts[-1].append(Tree(symbol, (words[used],)))
            used += 1
    while len(labels) > 1:
        close()
    return parts[0], used


def well_formed(symbols: Sequence[str], words: Sequence[str]) -> bool:
    """Whether symbols are one tree over exactly these words: nothing to repair."""
    return bool(words) and linearize(delinearize(symbols, words)) == list(symbols)


@dataclass(frozen=True)
class Rules:
    """What the scorer ignores, and what it takes to be the same: those of COLLINS.prm.

    The outer bracket without a label, as in the treebank's files, is ignored as well.

    Attributes:
        dropped: Labels of constituents and tags of words that do not count.
        labels: Labels and tags that are taken for others.
        words: Words that are taken for others.
    """

    dropped: frozenset[str] = frozenset(["", "TOP", "-NONE-", *", : `` '' .".split()])
    labels: Mapping[str, str] = field(default_factory=lambda: {"PRT": "ADVP"})
    words: Mapping[str, str] = field(default_factory=dict)


COLLINS = Rules()


@dataclass(frozen=True)
class Counts:
    """The counts of a scorer, for one sentence or for many."""

    matched: int = 0  #: Brackets that are in both trees.
    gold: int = 0  #: Brackets of the treebank's trees.
    test: int = 0  #: Brackets of the parser's trees.
    crossing: int = 0  #: The parser's brackets that cross one of the treebank's.
    words: int = 0  #: Words that are scored, without punctuation.
    tags: int = 0  #: Of these, words whose parts of speech agree.
    exact: int = 0  #: Sentences whose brackets are all right.
    sentences: int = 0  #: All sentences.
    errors: int = 0  #: Left out, because their scored words differ.
    skipped: int = 0  #: Left out, because the parser gave none.


class BracketCounts(Counts):
    """Counts of sentences, which can be added, and the shares that follow from them."""

    def __add__(self, other: BracketCounts) -> BracketCounts:
        """Add up the counts of different sentences."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return BracketCounts(*(one + two for one, two in pairs))

    @property
    def recall(self) -> float:
        """The share of the treebank's brackets that were found, 0 if there are none."""
        return self.matched / max(1, self.gold)

    @property
    def precision(self) -> float:
        """The share of the parser's brackets that are right, 0 if there are none."""
        return self.matched / max(1, self.test)

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        return 2 * self.matched / max(1, self.gold + self.test)


Span = tuple[str, int, int]  # label, first word, the word after the last


def brackets(tree: Tree, rules: Rules) -> tuple[Counter[Span], list[tuple[str, str]]]:
    """Return a tree's labelled spans, and its words with their tags, as scored."""
    spans, kept, starts = Counter[Span](), list[tuple[str, str]](), list[int]()
    for node, opens in walk(tree):
        label, end = strip_function_tags(node.label), len(kept)
        if label in rules.dropped:
            continue
        label = rules.labels.get(label, label)
        if node.word is None and opens:
            starts.append(end)
        elif node.word is None:
            start = starts.pop()
            if start < end:
                spans[label, start, end] += 1
        elif opens:
            kept.append((rules.words.get(node.word, node.word), label))
    return spans, kept


def score_tree(gold: Tree, test: Tree | None, rules: Rules = COLLINS) -> BracketCounts:
    """Compare a parser's tree with the treebank's, by the standard scorer's rules.

    Args:
        gold: The treebank's tree.
        test: The parser's tree; None, or one without scored words, is skipped.
        rules: What to ignore.
    """
    right, words = brackets(gold, rules)
    found, others = brackets(test, rules) if test else (Counter[Span](), [])
    if not others:
        return BracketCounts(sentences=1, skipped=1)
    if [word for word, _ in words] != [word for word, _ in others]:
        return BracketCounts(sentences=1, errors=1)
    return BracketCounts(
        matched=(right & found).total(),
        gold=right.total(),
        test=found.total(),
        crossing=sum(found[span] for span in found if crosses_any(span, right)),
        words=len(words),
        tags=sum(one == two for one, two in zip(words, others, strict=True)),
        exact=int(right == found),
        sentences=1,
    )


def crosses_any(span: Span, others: Iterable[Span]) -> bool:
    """Whether a span overlaps one of the others, with neither inside the other."""
    _, start, end = span
    return any(a < start < b < end or start < a < end < b for _, a, b in others)


def bracket_score(
    golds: Sequence[Tree], tests: Sequence[Tree | None], rules: Rules = COLLINS
) -> BracketCounts:
    """Return the counts of all sentences together; see ``score_tree``.

    Raises:
        ValueError: There are more of one than of the other.
    """
    if len(golds) != len(tests):
        what = f"{len(golds)} trees of the treebank, {len(tests)} of the parser"
        raise ValueError(f"{what}: give one for each sentence")
    counts = (score_tree(*pair, rules) for pair in zip(golds, tests, strict=True))
    return sum(counts, BracketCounts())


def with_tags(tree: Tree, given: Sequence[str]) -> Tree:
    """Return the tree with other parts of speech, such as the treebank's.

    The scorer drops punctuation by its tags, so both trees need the same ones.

    Raises:
        ValueError: There is not one tag for each word.
    """
    words = leaves(tree)
    if len(words) != len(given):
        raise ValueError(f"{len(words)} words, {len(given)} tags: give one for each word")
    changed = iter(given)
    symbols = [s if s[0] in "()" else next(changed) for s in linearize(tree)]
    return delinearize(symbols, words)


class Symbols:
    """A vocabulary of linearized trees, by the kinds of its symbols.

    Args:
        symbols: The vocabulary, by number; special symbols belong to no tree.
        eos: The number of the end symbol.
        most: How many brackets may open in a row; the bound makes decoding end.

    Raises:
        ValueError: No tree can be made of these symbols.
    """

    def __init__(self, symbols: Sequence[str], eos: int, most: int = 8) -> None:
        special = {*SPECIAL_TOKENS, symbols[eos]}
        plain = [(i, s) for i, s in enumerate(symbols) if s not in special]
        self.closing = {s[1:]: i for i, s in plain if s[0] == ")"}
        self.opening = {i: s[1:] for i, s in plain if s[0] == "(" and s[1:] in self.closing}
        self.tags = [i for i, s in plain if s[0] not in "()"]
        self.size, self.eos, self.most = len(symbols), eos, most
        if not self.tags or not self.opening or most < 1:
            what = "tags, brackets that open and close, and most >= 1"
            raise ValueError(f"these symbols make no tree: give {what}")


@dataclass(frozen=True)
class Unfinished:
    """The state of a tree while its symbols are generated.

    Attributes:
        opened: Labels of the open brackets, the outermost first.
        words: Words so far.
        row: Opening brackets in a row at the end.
        symbols: Symbols so far.
    """

    opened: tuple[str, ...] = ()
    words: int = 0
    row: int = 0
    symbols: int = 0

    def then(self, symbol: int, known: Symbols) -> Unfinished:
        """Return what is known after one more symbol, allowed where it stands."""
        opened, words, n = self.opened, self.words, self.symbols + 1
        if symbol in known.opening:
            opened = (*opened, known.opening[symbol])
            return Unfinished(opened, words, self.row + 1, n)
        if opened and symbol == known.closing[opened[-1]]:
            return Unfinished(opened[:-1], words, 0, n)
        return Unfinished(opened, words + 1, 0, n)


class TreeConstraint(Symbols):
    """Which symbols may come next, so that the output becomes a tree; see ``Symbols``."""

    def mask(self, tree: Unfinished, words: int, limit: int | None = None) -> Tensor:
        """Return which symbols may follow: boolean, shape ``(V,)``.

        Args:
            tree: The state so far.
            words: Number of words of the sentence.
            limit: Maximum symbols, end included; a bracket opens if it can close, the first always.

        Raises:
            ValueError: There are no words.
        """
        if words < 1:
            raise ValueError(f"{words} words: a tree needs at least one word")
        opened, left = tree.opened, words - tree.words
        shortest = tree.symbols + left + len(opened) + 3  # if one more opens
        fits = limit is None or shortest <= limit or (not opened and words > 1)
        allowed = torch.zeros(self.size, dtype=torch.bool)
        if tree.symbols and not opened:
            allowed[self.eos] = True  # the tree is complete
        elif left > 0:
            allowed[self.tags] = bool(opened) or words == 1
            allowed[list(self.opening)] = tree.row < self.most and fits
        if opened and not tree.row and (left < 1 or len(opened) > 1):
            allowed[self.closing[opened[-1]]] = True
        return allowed
