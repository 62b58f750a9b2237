# Written from book/translation/cleaning.md: edit the chapter instead.
"""Text as a stream, pairs that do not belong, and sides that drift."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from annotated_transformer.data.corpora import (
    counted,
    read_parallel,
    text_format,
    without_tags,
)
from annotated_transformer.data.files import CorpusError
from annotated_transformer.data.text import stream_lines

Side: TypeAlias = tuple[str, Iterable[str]]  # a name for errors and reports, and the lines


def stream_sides(source: str | Path, target: str | Path) -> tuple[Side, Side]:
    """Open both sides of a parallel text, each in the format that its name tells.

    Args:
        source: The file in the first language; for its name see ``text_format``.
        target: The file in the second language.

    Returns:
        For each side a name and its lines, as ``clean`` takes them. Where lines are not
        those of the file, the name says so.

    Raises:
        CorpusError: A file with segments is damaged, or the two do not belong together.
            What is wrong with a stream is found when it is read.
    """
    files = Path(source), Path(target)
    kinds = [text_format(file) for file in files]
    if "segments" in kinds:
        text = read_parallel(*files, drop_blank=False)
        sides: list[Iterable[str]] = [text.source, text.target]
    else:
        streams = [stream_lines(file, errors="surrogateescape") for file in files]
        sides = [
            without_tags(lines) if kind == "tags" else lines
            for lines, kind in zip(streams, kinds, strict=True)
        ]
    names = [file.name + counted(file) for file in files]
    return (names[0], sides[0]), (names[1], sides[1])


@dataclass(frozen=True)
class Rules:
    """Which pairs of a training text are left out."""

    max_words: int = 200
    """Most words of a sentence."""
    max_ratio: float = 4.0
    """Most words on one side for each on the other."""
    keep_duplicates: bool = False
    """Keep pairs that were there before."""

    def reason(self, source: str, target: str) -> str:
        """Say why a pair is left out; empty if it is not. Duplicates are found elsewhere."""
        lengths = []
        for side in (source, target):
            if not side.isascii() and (_broken(side) or "\ufffd" in side):
                return "broken characters"
            lengths.append(len(side.split()))
        if not all(lengths):
            return "blank"
        if max(lengths) > self.max_words:
            return "too long"
        if max(lengths) > self.max_ratio * min(lengths):
            return "length ratio"
        return ""


REASONS = ("broken characters", "blank", "too long", "length ratio", "duplicate")


def _broken(text: str) -> bool:
    """Whether a text has bytes that were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def fingerprints(pairs: Iterable[tuple[str, str]]) -> NDArray[np.uint64]:
    """Return 64 bits for each pair; equal pairs have equal ones."""
    digests = [
        hashlib.blake2b(f"{a}\n{b}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
        for a, b in pairs
    ]
    return np.frombuffer(b"".join(digests), dtype="<u8")


class Seen:
    """A set of fingerprints that only grows: 8 bytes for each, 16 while it is put in order."""

    def __init__(self) -> None:
        self.runs: list[NDArray[np.uint64]] = []  # sorted, each more than twice its next

    def __len__(self) -> int:
        """Return how many there are."""
        return sum(map(len, self.runs))

    def known(self, values: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Tell which values are in the set."""
        found = np.zeros(len(values), dtype=bool)
        for run in self.runs:
            place = np.minimum(np.searchsorted(run, values), len(run) - 1)
            found |= run[place] == values
        return found

    def add(self, values: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add values, and tell which of them occur for the first time."""
        unique, first = np.unique(values, return_index=True)
        fresh = ~self.known(unique)
        new = np.zeros(len(values), dtype=bool)
        new[first[fresh]] = True
        if fresh.any():
            self.runs.append(unique[fresh])
        while len(self.runs) > 1 and len(self.runs[-2]) <= 2 * len(self.runs[-1]):
            merged = np.concatenate([self.runs.pop(), self.runs.pop()])
            merged.sort()
            self.runs.append(merged)
        return new


@dataclass
class Report:
    """What became of the pairs of a split.

    Attributes:
        pairs: How many were read.
        dropped: How many were left out, by reason.
        first: Where the first of each kind stands.
        notes: What else should be known.
    """

    pairs: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def kept(self) -> int:
        """How many pairs are left."""
        return self.pairs - sum(self.dropped.values())

    def drop(self, reason: str, place: str) -> None:
        """Count a pair that is left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.first.setdefault(reason, place)

    def lines(self) -> Iterator[str]:
        """Say it in words, line by line."""
        yield f"{self.kept} of {self.pairs} pairs kept"
        for reason, count in self.dropped.items():
            share = count / self.pairs
            yield f"  {count} dropped ({share:.2%}), {reason}, first {self.first[reason]}"
        yield from (f"  {note}" for note in self.notes)


FARTHEST = 5  # lines
SHIFTS = tuple(side * lines for lines in range(1, FARTHEST + 1) for side in (-1, 1))
ALARM = 100.0  # far above what sides that fit come to; a drift is there within 100 lines or so
BLOCK = 10_000


class DriftCheck:
    """Watches the lengths of two sides, block by block, for a shift of one to five lines."""

    def __init__(self) -> None:
        self.lengths = np.zeros((0, 2), dtype=np.int64)  # with the last lines of the past
        self.line = 0  # lines seen
        self.sums = dict.fromkeys(SHIFTS, 0.0)
        self.starts = dict.fromkeys(SHIFTS, 1)  # the line after which each sum was last zero

    def add(self, lengths: NDArray[np.int64]) -> tuple[int, int] | None:
        """Look at the next lines.

        Args:
            lengths: ``(lines, 2)``, characters of source and target.

        Returns:
            None if the sides fit; else the first suspicious line, from 1, and the shift.
        """
        self.lengths = np.concatenate([self.lengths[-2 * FARTHEST :], lengths])
        first = self.line - (len(self.lengths) - len(lengths)) + 1  # its line number
        self.line += len(lengths)
        logs = np.log1p(self.lengths)
        if len(logs) <= 2 * FARTHEST:
            return None
        inner = np.arange(FARTHEST, len(logs) - FARTHEST)
        ratios = {d: logs[inner, 0] - logs[inner + d, 1] for d in (0, *SHIFTS)}
        middle = np.median(ratios[0])
        spread = min(np.median(np.abs(ratio - middle)) for ratio in ratios.values())
        scale = max(0.1, 1.4826 * float(spread))  # of the best fit: the one without drift
        square = {d: ((ratio - middle) / scale) ** 2 for d, ratio in ratios.items()}
        alarms = []
        for shift in SHIFTS:
            evidence = np.clip((square[0] - square[shift]) / 2, -3, 3)
            if found := self._sum_up(shift, evidence, first + FARTHEST):
                alarms.append((found[1], abs(shift), found[0], shift))
        return min(alarms)[2:] if alarms else None

    def _sum_up(
        self, shift: int, evidence: NDArray[np.float64], first: int
    ) -> tuple[int, int] | None:
        """Go on with a sum; return where the drift begins and where it was noticed."""
        total = np.concatenate([[0.0], self.sums[shift] + np.cumsum(evidence)])
        low = np.minimum(np.minimum.accumulate(total), 0.0)
        total -= low
        zeros = np.flatnonzero(total[1:] <= 0)
        over = np.flatnonzero(total[1:] > ALARM)
        if len(over):
            zeros = zeros[zeros < over[0]]
        if len(zeros):
            self.starts[shift] = first + int(zeros[-1]) + 1
        self.sums[shift] = float(total[-1])
        return (self.starts[shift], first + int(over[0])) if len(over) else None


def clean(
    source: Side,
    target: Side,
    report: Report,
    rules: Rules | None = None,
    seen: Seen | None = None,
    *,
    drift: bool = True,
) -> Iterator[tuple[str, str]]:
    """Go through a parallel text and yield the pairs that are fit for training, stripped.

    Args:
        source: A name for errors, and the lines.
        target: Likewise.
        report: Is filled in.
        rules: What to leave out.
        seen: The pairs that were there before, if duplicates are to be found across texts.
        drift: Whether a drift is an error; else it is noted in the report.

    Raises:
        CorpusError: The counts of the lines differ, or the sides drift.
    """
    rules, seen = rules or Rules(), Seen() if seen is None else seen
    check: DriftCheck | None = DriftCheck()
    number = 0
    for block in _blocks(source, target):
        if check and (found := check.add(np.array([[len(a), len(b)] for a, b in block]))):
            text = drift_text(source[0], target[0], *found)
            if drift:
                raise CorpusError(f"{text}; {ALIGN}")
            report.notes.append(text)
            check = None  # once is enough
        block = [(a.strip(), b.strip()) for a, b in block]
        new = seen.add(fingerprints(block))
        for pair, fresh in zip(block, new.tolist(), strict=True):
            number += 1
            reason = rules.reason(*pair)
            if not (reason or fresh or rules.keep_duplicates):
                reason = "duplicate"
            if reason:
                report.drop(reason, f"{source[0]}, line {number}")
            else:
                yield pair
        report.pairs += len(block)


def _blocks(source: Side, target: Side) -> Iterator[list[tuple[str, str]]]:
    """Take the lines of both sides together, ten thousand at a time."""
    sides, number = (iter(source[1]), iter(target[1])), 0
    while True:
        first, second = (list(itertools.islice(side, BLOCK)) for side in sides)
        number += min(len(first), len(second))
        if len(first) != len(second):
            short, long = (source, target) if len(first) < len(second) else (target, source)
            raise CorpusError(
                f"{short[0]} ends after line {number}, and {long[0]} goes on; "
                "line n of one file must translate line n of the other"
            )
        if not first:
            return
        yield list(zip(first, second, strict=True))


ALIGN = "align the files again, or go on with --allow-drift"


def drift_text(source: str, target: str, line: int, shift: int) -> str:
    """Say in words what :class:`DriftCheck` found."""
    return (
        f"{source}, line {line}: the lengths suggest that from about here on, line n is translated "
        f"by line n{shift:+d} of {target}"
    )
