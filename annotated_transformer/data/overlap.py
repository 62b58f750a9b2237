"""Sentences that two splits share: what is tested on should not be learned from.

Both languages count, because a model that has learned the translation has seen the answer. Shared
sentences are reported, not removed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from annotated_transformer.data.cleaning import BLOCK, fingerprints
from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.data.drift import find_drift

SIDES = ("source", "target")


def _line_fingerprints(lines: Iterable[str]) -> list[int]:
    """Return the fingerprints of lines, stripped."""
    return [int(mark) for mark in fingerprints((line.strip(), "") for line in lines)]


def _first_lines(lines: Sequence[str]) -> dict[int, int]:
    """Return the fingerprints of all lines that are not blank, each with its first line."""
    found: dict[int, int] = {}
    for number, mark in enumerate(_line_fingerprints(lines), 1):
        if lines[number - 1].strip():
            found.setdefault(mark, number)
    return found


class SplitOverlap:
    """Finds sentences that two splits share, in either language; blank lines do not count.

    Its memory grows with the texts for evaluation, not with the training text.

    Args:
        held_out: The texts for evaluation, by split.
    """

    def __init__(self, held_out: Mapping[str, ParallelText]) -> None:
        self._lines = {
            split: (_first_lines(text.source), _first_lines(text.target))
            for split, text in held_out.items()
        }
        self._in_train: dict[str, list[set[int]]] = {split: [set(), set()] for split in held_out}

    def watch(self, pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        """Hand the pairs of the training text on, noting sentences that are held out."""
        pairs = iter(pairs)
        while block := list(itertools.islice(pairs, BLOCK)):
            for side in range(2) if self._lines else ():
                found = set(_line_fingerprints(pair[side] for pair in block))
                for split, lines in self._lines.items():
                    self._in_train[split][side] |= found & lines[side].keys()
            yield from block

    def notes(self) -> Iterator[tuple[str, str]]:
        """Go through the pairs of splits that share sentences.

        Yields:
            The split whose report should say so; how many sentences of which split stand in the
            other, and the first of them.
        """
        for split, shared in self._in_train.items():
            if any(shared):
                yield "train", self._note(split, "the training text", shared)
        for one, two in itertools.combinations(self._lines, 2):
            sides = zip(self._lines[one], self._lines[two], strict=True)
            both = [first.keys() & second.keys() for first, second in sides]
            if any(both):
                yield two, self._note(two, one, both)

    def _note(self, split: str, other: str, shared: Iterable[Set[int]]) -> str:
        return "; ".join(
            f"{len(found)} different {side} sentences of {split} stand in {other} too, "
            f"the first in its line {min(lines[mark] for mark in found)}"
            for side, found, lines in zip(SIDES, shared, self._lines[split], strict=True)
            if found
        )


def corpus_warnings(train: ParallelText, held_out: Mapping[str, ParallelText]) -> Iterator[str]:
    """Warn about texts in memory: of sides that drift, of sentences in two splits."""
    yield from filter(None, map(find_drift, (train, *held_out.values())))
    overlap = SplitOverlap(held_out)
    for _ in overlap.watch(train):
        pass
    yield from (note for _, note in overlap.notes())
