"""Cleaning of parallel text: bad pairs, misaligned sides, and overlap with test sentences."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from annotated_transformer.data.corpora import (
    ParallelText,
    Preparation,
    check_segments,
    line_note,
    open_side,
)
from annotated_transformer.data.files import CorpusError
from annotated_transformer.data.text import MAX_SENTENCE

BLOCK = 10_000  #: Lines that are searched for a drift at a time.
CONTEXT = 1000  # preceding lines that are searched again for a drift
MAX_SHIFT = 5  # lines
SHIFTS = [sign * lines for lines in range(1, MAX_SHIFT + 1) for sign in (-1, 1)]
# Far above the values of aligned sides; a drift reaches it within about 100 lines.
THRESHOLD = 100.0
BROKEN = re.compile("[\ufffd\ud800-\udfff]")  # lone surrogates stand for invalid UTF-8

Side: TypeAlias = tuple[str, Iterable[str]]  # a name for errors and reports, and the lines
Pairs: TypeAlias = Iterable[tuple[str, str]]


def stream_sides(source: str | Path, target: str | Path) -> tuple[Side, Side]:
    """Open both sides of a parallel text, in the formats given by their names (``text_format``).

    Returns:
        For each side a name and its lines, as ``clean_pairs`` takes them. If lines are not
        numbered as in the file, the name says so.

    Raises:
        CorpusError: A file with segments is damaged, or the two do not belong together.
            Errors in a stream are raised when it is read.
    """
    paths = source, target
    (one, names), (two, others) = (open_side(path, errors="surrogateescape") for path in paths)
    check_segments(source, target, names, others)
    first, second = (Path(path).name + line_note(path) for path in paths)
    return (first, one), (second, two)


def drop_reason(source: str, target: str, options: Preparation | None = None) -> str:
    """Return why a pair is unfit for training, or an empty string.

    The limits are the options ``max_words`` and ``max_ratio``; by default they are loose.
    """
    options = options or Preparation()
    lengths = []
    for side in (source, target):
        if "\0" in side or (not side.isascii() and BROKEN.search(side)):
            return "broken characters"
        lengths.append(len(side.split()))
    if not all(lengths):
        return "blank"
    if max(lengths) > options.max_words or max(len(source), len(target)) > MAX_SENTENCE:
        return "too long"
    if max(lengths) > options.max_ratio * min(lengths):
        return "length ratio"
    return ""


def pair_hashes(pairs: Pairs) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each pair."""
    lines = (f"{a}\n{b}".encode("utf-8", "surrogateescape") for a, b in pairs)
    digests = [hashlib.blake2b(line, digest_size=8).digest() for line in lines]
    return np.frombuffer(b"".join(digests), dtype="<u8")


class FingerprintSet:
    """A growing set of fingerprints in sorted arrays: 8 bytes each, 16 during a merge."""

    def __init__(self) -> None:
        self.runs: list[NDArray[np.uint64]] = []  # sorted, each more than twice as long as the next

    def add(self, values: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add values, and return a mask of those that occur for the first time."""
        unique, first = np.unique(values, return_index=True)
        fresh = np.ones(len(unique), dtype=bool)
        for run in self.runs:
            place = np.minimum(np.searchsorted(run, unique), len(run) - 1)
            fresh &= run[place] != unique
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
    """The results of cleaning a split."""

    pairs: int = 0  #: Number of pairs read.
    dropped: dict[str, int] = field(default_factory=dict)  #: Number of pairs dropped, by reason.
    #: Place of the first pair dropped, by reason.
    first: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  #: Warnings.

    def drop(self, reason: str, name: str, number: int) -> None:
        """Count a pair that was dropped, given its text's name and its line."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.first.setdefault(reason, f"{name}, line {number}")

    @property
    def kept(self) -> int:
        """Number of pairs kept."""
        return self.pairs - sum(self.dropped.values())

    def note_drift(self, message: str, options: Preparation) -> None:
        """Record a drift between the sides, or raise CorpusError if it is not allowed."""
        if not options.allow_drift:
            raise CorpusError(f"{message}; realign the files, or continue with --allow-drift")
        self.notes.append(message)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        yield f"{self.kept} of {self.pairs} pairs kept"
        for reason, count in self.dropped.items():
            share = count / self.pairs
            yield f"  {count} dropped ({share:.2%}), {reason}, first {self.first[reason]}"
        yield from (f"  {note}" for note in self.notes)


def clean_pairs(
    source: Side,
    target: Side,
    report: CleaningReport,
    options: Preparation | None = None,
    seen: FingerprintSet | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a parallel text that are fit for training, with whitespace stripped.

    Args:
        source: A name for errors, and the lines.
        target: The same for the target side.
        report: The report to fill in.
        options: Limits, and whether a drift is an error or only noted in the report.
        seen: Pairs that occurred before, to find duplicates across texts.

    Raises:
        CorpusError: The sides have different numbers of lines, or drift.
    """
    seen = FingerprintSet() if seen is None else seen
    options, fits, number = options or Preparation(), True, 0
    lengths = np.zeros((0, 2), dtype=np.int64)
    for block in _blocks(source, target):
        lengths = np.concatenate([lengths[-CONTEXT:], [[len(a), len(b)] for a, b in block]])
        if fits and (found := find_shift(lengths)):
            first = number + len(block) - len(lengths) + found[0]
            message = _drift_message(source[0], target[0], first, found[1])
            report.note_drift(message, options)
            fits = False  # once is enough
        block = [(a.strip(), b.strip()) for a, b in block]
        for pair, is_new in zip(block, seen.add(pair_hashes(block)).tolist(), strict=True):
            number += 1
            reason = drop_reason(*pair, options)
            if not (reason or is_new or options.keep_duplicates):
                reason = "duplicate"
            if reason:
                report.drop(reason, source[0], number)
            else:
                yield pair
        report.pairs += len(block)


def _blocks(source: Side, target: Side) -> Iterator[list[tuple[str, str]]]:
    """Yield pairs of lines, ``BLOCK`` at a time."""
    pairs, number = itertools.zip_longest(source[1], target[1]), 0
    while block := list(itertools.islice(pairs, BLOCK)):
        if None in block[-1]:
            number += sum(None not in pair for pair in block)
            short, long = (source, target) if block[-1][0] is None else (target, source)
            told = f"{short[0]} ends after line {number}, but {long[0]} continues"
            raise CorpusError(f"{told}; line n of one file must translate line n of the other")
        number += len(block)
        yield block


def find_shift(lengths: NDArray[np.int64]) -> tuple[int, int] | None:
    """Find where two sides drift, so that from some line on, line n is translated by line n + d.

    The lengths of a sentence and its translation are correlated, those of neighbouring lines are
    not. For each d from -5 to 5, the evidence is accumulated line by line (CUSUM, Page 1954).

    Args:
        lengths: ``(lines, 2)``, characters of source and target.

    Returns:
        None if the sides are aligned; otherwise the first suspicious line, from 1, and d.
    """
    logs = np.log1p(lengths)
    if len(logs) <= 2 * MAX_SHIFT:
        return None
    inner = np.arange(MAX_SHIFT, len(logs) - MAX_SHIFT)
    ratios = np.stack([logs[inner, 0] - logs[inner + d, 1] for d in (0, *SHIFTS)])
    ratios -= np.median(ratios[0])
    spread = np.median(np.abs(ratios), axis=1).min()  # of the best fit, which has no drift
    squares = (ratios / max(0.1, 1.4826 * spread)) ** 2
    evidence = np.clip((squares[0] - squares[1:]) / 2, -3, 3)  # one odd line is weak evidence
    sums = np.cumsum(evidence, axis=1)
    sums -= np.minimum(np.minimum.accumulate(sums, axis=1), 0)  # never below zero
    alarms = []
    for shift, row in zip(SHIFTS, sums, strict=True):
        if len(noticed := np.flatnonzero(row > THRESHOLD)):
            zeros = np.flatnonzero(row[: noticed[0]] <= 0)
            first = int(zeros[-1]) + MAX_SHIFT + 2 if len(zeros) else 1
            alarms.append((int(noticed[0]), abs(shift), first, shift))
    return min(alarms)[2:] if alarms else None


def _drift_message(source: str, target: str, line: int, shift: int) -> str:
    """Describe where the lengths of two named texts suggest a drift."""
    return (
        f"{source}, line {line}: the lengths suggest that from about here on, line n is translated "
        f"by line n{shift:+d} of {target}"
    )


def find_drift(text: ParallelText) -> str:
    """Describe where the sides of a text in memory drift; empty if they are aligned."""
    lengths = [[len(source), len(target)] for source, target in text]
    found = find_shift(np.array(lengths, dtype=np.int64).reshape(-1, 2))
    if found is None:
        return ""
    line, shift = found
    source, target = (text.checksums[side][0] + text.line_note(side) for side in (0, 1))
    return _drift_message(source, target, text.line_numbers()[line - 1], shift)


def note_overlap(
    pairs: Pairs, name: str, held_out: Mapping[str, ParallelText], notes: list[str]
) -> Iterator[tuple[str, str]]:
    """Pass pairs through; at the end, note which evaluation sentences occurred among them.

    Both languages count, because a model trained on the translation has seen the answer. Blank
    lines do not. Memory grows with the evaluation texts, not with the pairs.

    Args:
        pairs: The pairs of a text.
        name: The text's name in the notes.
        held_out: The evaluation texts, by split.
        notes: A note is appended for each split with shared sentences.
    """
    places: dict[tuple[str, int], dict[str, int]] = {}  # of a split and a side: line -> number
    for split, text in held_out.items():
        for side, lines in enumerate((text.source, text.target)):
            found = places[split, side] = {}
            for number, line in enumerate(map(str.strip, lines), 1):
                found.setdefault(line, number)
            found.pop("", None)
    shared: dict[tuple[str, int], set[int]] = {key: set() for key in places}
    for pair in pairs:
        for key, found in places.items():
            if number := found.get(pair[key[1]].strip(), 0):
                shared[key].add(number)
        yield pair
    for split in held_out:
        said = [
            f"{len(numbers)} distinct {side} sentences of {split} also occur in {name}, "
            f"the first on line {min(numbers)} of {split}"
            for n, side in enumerate(("source", "target"))
            if (numbers := shared[split, n])
        ]
        if said:
            notes.append("; ".join(said))


def corpus_warnings(train: ParallelText, held_out: Mapping[str, ParallelText]) -> Iterator[str]:
    """Yield warnings about texts in memory: drifting sides, evaluation sentences in training."""
    yield from filter(None, map(find_drift, (train, *held_out.values())))
    notes: list[str] = []
    for _ in note_overlap(train, "the training text", held_out, notes):
        pass
    yield from notes
