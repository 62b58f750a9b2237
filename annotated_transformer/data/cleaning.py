"""Parallel text as a stream, without the pairs that are unfit for training."""

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
from annotated_transformer.data.drift import ALIGN_AGAIN, DriftDetector, drift_message
from annotated_transformer.data.files import CorpusError
from annotated_transformer.data.text import stream_lines

BLOCK = 10_000  # lines taken together
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
    if "segments" in kinds:  # a test set: small, and its segments have numbers to compare
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


def drop_reason(source: str, target: str, *, max_words: int = 200, max_ratio: float = 4.0) -> str:
    """Say why a pair is unfit for training; empty if it is not. The bounds are loose.

    Args:
        source: A sentence.
        target: Its translation.
        max_words: Most words of a sentence.
        max_ratio: Most words on one side for each on the other.
    """
    lengths = []
    for side in (source, target):
        if not side.isascii() and ("\ufffd" in side or _has_bad_bytes(side)):
            return "broken characters"
        lengths.append(len(side.split()))
    if not all(lengths):
        return "blank"
    if max(lengths) > max_words:
        return "too long"
    if max(lengths) > max_ratio * min(lengths):
        return "length ratio"
    return ""


def _has_bad_bytes(text: str) -> bool:
    """Whether a text has lone surrogates, which stand for bytes that were not UTF-8."""
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


class FingerprintSet:
    """A growing set of fingerprints in sorted arrays: 8 bytes each, 16 while they are merged."""

    def __init__(self) -> None:
        self.runs: list[NDArray[np.uint64]] = []  # sorted, each more than twice its next

    def __len__(self) -> int:
        """Return how many there are."""
        return sum(map(len, self.runs))

    def contains(self, values: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Tell which values are in the set."""
        found = np.zeros(len(values), dtype=bool)
        for run in self.runs:
            place = np.minimum(np.searchsorted(run, values), len(run) - 1)
            found |= run[place] == values
        return found

    def add(self, values: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add values, and tell which of them occur for the first time."""
        unique, first = np.unique(values, return_index=True)
        fresh = ~self.contains(unique)
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
class CleaningReport:
    """What became of the pairs of a split.

    Attributes:
        pairs: How many were read.
        dropped: How many were dropped, by reason.
        first: Where the first of each kind stands.
        notes: Warnings.
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
        """Count a pair that is dropped."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.first.setdefault(reason, place)

    def lines(self) -> Iterator[str]:
        """Yield the lines of a message."""
        yield f"{self.kept} of {self.pairs} pairs kept"
        for reason, count in self.dropped.items():
            share = count / self.pairs
            yield f"  {count} dropped ({share:.2%}), {reason}, first {self.first[reason]}"
        yield from (f"  {note}" for note in self.notes)


def clean(
    source: Side,
    target: Side,
    report: CleaningReport,
    *,
    max_words: int = 200,
    max_ratio: float = 4.0,
    keep_duplicates: bool = False,
    allow_drift: bool = False,
    seen: FingerprintSet | None = None,
) -> Iterator[tuple[str, str]]:
    """Go through a parallel text and yield the pairs that are fit for training, stripped.

    Args:
        source: A name for errors, and the lines.
        target: Likewise.
        report: Is filled in.
        max_words: See ``drop_reason``.
        max_ratio: See ``drop_reason``.
        keep_duplicates: Keep pairs that occurred before.
        allow_drift: Note a drift in the report instead of raising an error.
        seen: The pairs that occurred before, to find duplicates across texts.

    Raises:
        CorpusError: The sides differ in their number of lines, or drift.
    """
    seen = FingerprintSet() if seen is None else seen
    detector: DriftDetector | None = DriftDetector()
    number = 0
    for block in _blocks(source, target):
        if detector and (found := detector.add(np.array([[len(a), len(b)] for a, b in block]))):
            message = drift_message(source[0], target[0], *found)
            if not allow_drift:
                raise CorpusError(f"{message}; {ALIGN_AGAIN}")
            report.notes.append(message)
            detector = None  # once is enough
        block = [(a.strip(), b.strip()) for a, b in block]
        for pair, is_new in zip(block, seen.add(fingerprints(block)).tolist(), strict=True):
            number += 1
            reason = drop_reason(*pair, max_words=max_words, max_ratio=max_ratio)
            if not (reason or is_new or keep_duplicates):
                reason = "duplicate"
            if reason:
                report.drop(reason, f"{source[0]}, line {number}")
            else:
                yield pair
        report.pairs += len(block)


def _blocks(source: Side, target: Side) -> Iterator[list[tuple[str, str]]]:
    """Take the lines of both sides together, ``BLOCK`` at a time."""
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
