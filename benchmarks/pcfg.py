"""A parser that counts: a probabilistic context-free grammar, and the search of its best tree.

The textbook's baseline: rules with the relative frequencies of a treebank, made binary with a
short memory of siblings (and of the parent, if asked for), words by what tags they had, unknown
words by their shape, and the most probable tree by dynamic programming over all spans (CKY).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from annotated_transformer.data.symbols import word_shape
from annotated_transformer.results.parsing import Tree

INNER = "@"  # begins the labels that making rules binary adds
RARE = 2  # a word seen less often is known by its shape alone
PRIOR = 1.0  # how many sightings the shape of a known word counts for
LOW = np.float32(-np.inf)


@dataclass(frozen=True)
class Options:
    """What a label remembers.

    Attributes:
        parents: 1 for the label alone, 2 to remember its parent's, too.
        siblings: How many of the sisters generated before a rule's rest remembers.
    """

    parents: int = 1
    siblings: int = 1


def is_tag(tree: Tree) -> bool:
    """Whether the only child is a word."""
    return isinstance(tree.children[0], str)


def in_place(word: str, first: bool) -> str:
    """Return an unknown word's shape; the capital of a sentence's first word is another one."""
    return word_shape(word) + "F" * (first and word[:1].isupper())


class Grammar:
    """A grammar induced from trees.

    Args:
        trees: The training trees.
        options: What a label remembers.
    """

    def __init__(self, trees: Sequence[Tree], options: Options) -> None:
        self.options = options
        rules: Counter[tuple[str, ...]] = Counter()
        roots: Counter[str] = Counter()
        self.sightings = Counter(
            word for tree in trees for word, _ in tagged(tree)
        )  # of every word
        seen: Counter[tuple[str, str]] = Counter()
        for tree in trees:
            roots[self.name(tree, "")] += 1
            rules.update(self.rules(tree, ""))
            for number, (word, tag) in enumerate(tagged(tree)):
                seen[word, tag] += 1
                if self.sightings[word] < RARE:
                    seen[in_place(word, not number), tag] += 1
        self._number(rules)
        self._lexicon(seen)
        total = sum(roots.values())
        self.roots = np.full(len(self.labels), LOW)
        for label, count in roots.items():
            self.roots[self.index[label]] = math.log(count / total)

    def name(self, tree: Tree, parent: str) -> str:
        """Return a node's label with what it remembers."""
        remembers = self.options.parents > 1 and not is_tag(tree)
        return f"{tree.label}^{parent}" if remembers else tree.label

    def rules(self, tree: Tree, parent: str) -> Iterator[tuple[str, ...]]:
        """Yield the binary and unary rules of a tree: left side, then the right side."""
        if is_tag(tree):
            return
        below = [child for child in tree.children if isinstance(child, Tree)]
        left, right = self.name(tree, parent), [self.name(each, tree.label) for each in below]
        for place in range(len(right) - 2):
            kept = right[max(0, place + 1 - self.options.siblings) : place + 1]
            rest = f"{INNER}{self.name(tree, parent)}|{'|'.join(kept)}"
            yield left, right[place], rest
            left = rest
        yield (left, *right[-2:])
        for each in below:
            yield from self.rules(each, tree.label)

    def _number(self, rules: Counter[tuple[str, ...]]) -> None:
        """Number the labels, and lay out the rules as arrays."""
        totals: Counter[str] = Counter()
        for rule, count in rules.items():
            totals[rule[0]] += count
        self.labels = sorted({label for rule in rules for label in rule})
        self.index = {label: number for number, label in enumerate(self.labels)}
        worth = {rule: math.log(count / totals[rule[0]]) for rule, count in rules.items()}
        binary = sorted(
            (*(self.index[label] for label in rule), value)
            for rule, value in worth.items()
            if len(rule) == 3
        )
        columns = list(zip(*binary, strict=True))
        self.above, self.left, self.right = (np.array(columns[i]) for i in range(3))
        self.worth = np.array(columns[3], dtype=np.float32)
        self.parents, self.starts = np.unique(self.above, return_index=True)
        size = len(self.labels)
        self.unary = np.full((size, size), LOW)  # best chain from the row's label to the column's
        self.next = np.full((size, size), -1)  # the label after the row's in that chain
        for rule, value in worth.items():
            if len(rule) == 2 and rule[0] != rule[1]:
                a, b = self.index[rule[0]], self.index[rule[1]]
                self.unary[a, b], self.next[a, b] = value, b
        for via in np.flatnonzero((self.unary > LOW).any(0) & (self.unary > LOW).any(1)):
            through = self.unary[:, via, None] + self.unary[None, via]
            better = through > self.unary
            np.fill_diagonal(better, False)
            self.next = np.where(better, self.next[:, via, None], self.next)
            self.unary = np.where(better, through, self.unary)
        self.tops = np.flatnonzero((self.unary > LOW).any(1))  # labels with chains

    def _lexicon(self, seen: Counter[tuple[str, str]]) -> None:
        """Prepare what a word says of its tag: P(tag | word) / P(tag), as logarithms."""
        self.tags = sorted({tag for _, tag in seen})
        number = {tag: i for i, tag in enumerate(self.tags)}
        self.places = np.array([self.index[tag] for tag in self.tags])
        self.table: dict[str, np.ndarray] = {}
        for (word, tag), count in seen.items():
            row = self.table.setdefault(word, np.zeros(len(self.tags)))
            row[number[tag]] += count
        words = [row for word, row in self.table.items() if self.sightings[word]]
        self.usual = np.sum(words, axis=0) / np.sum(words)
        self.rare = np.sum(
            [row for word, row in self.table.items() if not self.sightings[word]], axis=0
        )

    def words(self, word: str, first: bool) -> np.ndarray:
        """Return the logarithms of P(word | tag) up to a constant, for every label."""
        own = self.table.get(in_place(word, first), np.zeros(len(self.tags))) + 0.01 * self.rare
        share = own / own.sum()
        if (count := self.sightings[word]) >= RARE:
            share = (self.table[word] + PRIOR * share) / (count + PRIOR)
        found = np.full(len(self.labels), LOW)
        with np.errstate(divide="ignore"):
            found[self.places] = np.log(share / self.usual)
        return found


def tagged(tree: Tree) -> Iterator[tuple[str, str]]:
    """Yield the words of a tree with their tags."""
    for child in tree.children:
        if isinstance(child, str):
            yield child, tree.label
        else:
            yield from tagged(child)


def closed(grammar: Grammar, scores: np.ndarray) -> np.ndarray:
    """Return scores ``(labels,)`` of a span, where unary chains may stand above."""
    found: np.ndarray = scores.copy()
    chains = (grammar.unary[grammar.tops] + scores).max(1)
    found[grammar.tops] = np.maximum(found[grammar.tops], chains)
    return found


def products(grammar: Grammar, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return every binary rule's score at every split: ``(splits, rules)``."""
    found: np.ndarray = left[:, grammar.left] + right[:, grammar.right] + grammar.worth
    return found


class Chart:
    """The best scores of every label over every span of a sentence, before unary and after."""

    def __init__(self, grammar: Grammar, words: Sequence[str]) -> None:
        self.grammar, self.words = grammar, words
        count = len(words)
        self.base = np.full((count, count + 1, len(grammar.labels)), LOW)
        self.full = self.base.copy()
        for i, word in enumerate(words):
            self.base[i, i + 1] = grammar.words(word, not i)
            self.full[i, i + 1] = closed(grammar, self.base[i, i + 1])
        for width in range(2, count + 1):
            for i in range(count + 1 - width):
                self._fill(i, i + width)

    def _fill(self, i: int, j: int) -> None:
        grammar = self.grammar
        left, right = self.full[i, i + 1 : j], self.full[i + 1 : j, j]
        best = products(grammar, left, right).max(0)
        self.base[i, j, grammar.parents] = np.maximum.reduceat(best, grammar.starts)
        self.full[i, j] = closed(grammar, self.base[i, j])

    def tree(self) -> Tree | None:
        """Return the most probable tree; None where the grammar has none."""
        scores = self.full[0, len(self.words)] + self.grammar.roots
        if not np.isfinite(scores.max()):
            return None
        (found,) = self.nodes(int(scores.argmax()), 0, len(self.words))
        return found

    def nodes(self, label: int, i: int, j: int) -> list[Tree]:
        """Return the best tree of a label over a span; several for a rule's rest."""
        grammar = self.grammar
        if self.base[i, j, label] < self.full[i, j, label]:  # a chain stands above
            below = int((grammar.unary[label] + self.base[i, j]).argmax())
            chain = [label]
            while (label := int(grammar.next[chain[-1], below])) != below:
                chain.append(label)
            (found,) = self.plain(below, i, j)
            for each in reversed(chain):
                found = Tree(self.shown(each), (found,))
            return [found]
        return self.plain(label, i, j)

    def plain(self, label: int, i: int, j: int) -> list[Tree]:
        """Return the same, with no chain above."""
        grammar = self.grammar
        if j == i + 1:
            return [Tree(grammar.labels[label], (self.words[i],))]
        place = int(np.searchsorted(grammar.parents, label))
        first = int(grammar.starts[place])
        ends = [*grammar.starts, len(grammar.above)]
        part = slice(first, int(ends[place + 1]))
        left, right = self.full[i, i + 1 : j], self.full[i + 1 : j, j]
        scores = left[:, grammar.left[part]] + right[:, grammar.right[part]] + grammar.worth[part]
        split, rule = divmod(int(scores.argmax()), scores.shape[1])
        k, rule = i + 1 + split, first + rule
        below = self.nodes(int(grammar.left[rule]), i, k)
        below += self.nodes(int(grammar.right[rule]), k, j)
        name = grammar.labels[label]
        return below if name.startswith(INNER) else [Tree(self.shown(label), tuple(below))]

    def shown(self, label: int) -> str:
        """Return a label without what it remembers."""
        return self.grammar.labels[label].partition("^")[0]
