"""What is wrong with a parallel text, by the checks of ``train`` and ``prepare``."""

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from annotated_transformer.data.cleaning import CleaningReport, clean_pairs, stream_sides
from annotated_transformer.data.corpora import ParallelText, Preparation
from annotated_transformer.data.files import CorpusError

REMEDIES = {  # in the order of the table
    "lines without a partner": "compare the ends of both files; a line is missing somewhere",
    "drift": "a line is missing or doubled near there; align the files again",
    "broken characters": "convert the files to UTF-8, and remove NUL bytes",
    "blank": "remove the pairs; train and prepare leave them out",
    "too long": "split them into sentences; prepare leaves them out",
    "length ratio": "check whether one side is cut or belongs elsewhere; prepare leaves them out",
    "duplicate": "keep one of each; prepare does",
    "in the validation text": "remove the pairs, else validation measures memory",
    "same on both sides": "remove them, but for names and numbers, else the model learns to copy",
    "not in NFC": "apply unicodedata.normalize('NFC', line); an accent is a character of its own",
    "invisible characters": "put spaces for tabs, and remove what your languages do not need",
}  #: The kinds of findings, each with what to do about it.
ALONE, DRIFT, SHARED = "lines without a partner", "drift", "in the validation text"
COPIED, APART, INVISIBLE = "same on both sides", "not in NFC", "invisible characters"
# Controls, soft hyphens, zero-width characters, direction marks, line separators, byte order marks.
UNSEEN = re.compile("[\x01-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u2064\ufeff]")


@dataclass(frozen=True)
class Finding:
    """One kind of fault in a parallel text."""

    kind: str  #: A key of ``REMEDIES``.
    count: int  #: Number of lines; 1 for a drift, which begins at its line.
    lines: list[int]  #: Numbers of the first of them, from 1.
    detail: str = ""  #: More about it; may be empty.

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES[self.kind]


@dataclass
class _Examples(CleaningReport):
    """A report that also remembers the first lines of each kind."""

    most: int = 5
    lines_of: dict[str, list[int]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: str, name: str, number: int) -> None:
        """Count a pair, and remember its line."""
        super().drop(reason, name, number)
        if len(lines := self.lines_of.setdefault(reason, [])) < self.most:
            lines.append(number)

    def note_drift(self, message: str, options: Preparation) -> None:
        """Remember where the sides drift."""
        place, told, rest = message.partition(": the lengths")
        self.details[DRIFT] = told[2:] + rest
        self.drop(DRIFT, "", int(place.split()[-1]))


def diagnose_corpus(
    source: str | Path,
    target: str | Path,
    *,
    valid: ParallelText | None = None,
    options: Preparation | None = None,
    examples: int = 5,
) -> tuple[int, list[Finding]]:
    """Return the number of pairs in two files, and what is wrong with them.

    The files are streamed once, so their size does not matter.

    Args:
        source: A file in any format of ``read_parallel``.
        target: Its translation: line n of one should translate line n of the other.
        valid: Text for validation, which should share no sentence with the files.
        options: The limits ``max_words`` and ``max_ratio``.
        examples: Maximum lines to name for each finding.

    Raises:
        CorpusError: A file cannot be read, or is empty.
    """
    first, second = stream_sides(source, target)
    report = _Examples(most=examples)
    one, two = itertools.tee(_paired(first[1], second[1], valid, report))
    sides = (first[0], (a for a, _ in one)), (second[0], (b for _, b in two))
    for _ in clean_pairs(*sides, report, options):
        pass
    if not report.pairs:
        empty = target if "source" in report.details.get(ALONE, "") else source
        raise CorpusError(f"{empty}: the file is empty; give one sentence per line")
    found = [
        Finding(kind, report.dropped[kind], report.lines_of[kind], report.details.get(kind, ""))
        for kind in REMEDIES
        if kind in report.dropped
    ]
    return report.pairs, found


def _paired(
    source: Iterable[str], target: Iterable[str], valid: ParallelText | None, report: _Examples
) -> Iterator[tuple[str, str]]:
    """Yield pairs up to the end of the shorter side; report the rest, and what validation has."""
    sides = (valid.source, valid.target) if valid else ()
    known = [set(map(str.strip, side)) - {""} for side in sides]
    for number, pair in enumerate(itertools.zip_longest(source, target), 1):
        one, two = pair
        if one is None or two is None:
            report.details[ALONE] = f"only the {'source' if two is None else 'target'} has them"
            report.drop(ALONE, "", number)
            continue
        faults = {
            SHARED: any(line.strip() in held for line, held in zip(pair, known, strict=False)),
            COPIED: one.strip() == two.strip() != "",
            APART: not all(unicodedata.is_normalized("NFC", line) for line in pair),
            INVISIBLE: any(UNSEEN.search(line) for line in pair),
        }
        for kind in filter(faults.get, faults):
            report.drop(kind, "", number)
        yield one, two
