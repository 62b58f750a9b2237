"""Two sides of a parallel text that drift: from some line on, line n translates line n + d.

The lengths give it away: those of a sentence and its translation go together, those of neighbours
do not. For each shift, the evidence of line after line is summed up (CUSUM, Page 1954).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from annotated_transformer.data.corpora import ParallelText

MAX_SHIFT = 5  # lines
SHIFTS = [sign * lines for lines in range(1, MAX_SHIFT + 1) for sign in (-1, 1)]
THRESHOLD = (
    100.0  # far above what sides that fit come to; a drift gets there within 100 lines or so
)
ALIGN_AGAIN = "align the files again, or go on with --allow-drift"


class DriftDetector:
    """Watches the lengths of two sides, block by block, for a shift of one to five lines."""

    def __init__(self) -> None:
        self._lengths = np.zeros((0, 2), dtype=np.int64)  # the last lines of the block before
        self._lines = 0  # seen so far
        self._sums = np.zeros(len(SHIFTS))
        self._starts = [1] * len(SHIFTS)  # the line after which each sum was last zero

    def add(self, lengths: NDArray[np.int64]) -> tuple[int, int] | None:
        """Take the next lines.

        Args:
            lengths: ``(lines, 2)``, characters of source and target.

        Returns:
            None if the sides fit; else the first suspicious line, from 1, and the shift.
        """
        self._lengths = np.concatenate([self._lengths[-2 * MAX_SHIFT :], lengths])
        self._lines += len(lengths)
        logs = np.log1p(self._lengths)
        if len(logs) <= 2 * MAX_SHIFT:
            return None
        inner = np.arange(MAX_SHIFT, len(logs) - MAX_SHIFT)
        first = self._lines - len(logs) + 1 + MAX_SHIFT  # the number of the first inner line
        ratios = np.stack([logs[inner, 0] - logs[inner + d, 1] for d in (0, *SHIFTS)])
        ratios -= np.median(ratios[0])
        spread = np.median(np.abs(ratios), axis=1).min()  # of the best fit: the one without drift
        squares = (ratios / max(0.1, 1.4826 * spread)) ** 2
        evidence = np.clip((squares[0] - squares[1:]) / 2, -3, 3)  # one odd line proves little
        sums = self._sums[:, None] + np.cumsum(evidence, axis=1)
        sums -= np.minimum(np.minimum.accumulate(sums, axis=1), 0)  # never below zero
        self._sums = sums[:, -1]
        alarms = []
        for i, (shift, over) in enumerate(zip(SHIFTS, sums > THRESHOLD, strict=True)):
            noticed = int(over.argmax()) if over.any() else len(inner)
            if len(zeros := np.flatnonzero(sums[i, :noticed] <= 0)):
                self._starts[i] = first + int(zeros[-1]) + 1
            if over.any():
                alarms.append((noticed, abs(shift), self._starts[i], shift))
        return min(alarms)[2:] if alarms else None


def drift_message(source: str, target: str, line: int, shift: int) -> str:
    """Say where the lengths of two texts, called by these names, suggest a drift."""
    return (
        f"{source}, line {line}: the lengths suggest that from about here on, line n is translated "
        f"by line n{shift:+d} of {target}"
    )


def find_drift(text: ParallelText) -> str:
    """Say where the sides of a text in memory drift; empty if they fit."""
    lengths = [[len(source), len(target)] for source, target in text]
    found = DriftDetector().add(np.array(lengths, dtype=np.int64).reshape(-1, 2))
    if found is None:
        return ""
    line, shift = found
    for blank in text.blank:  # lines that were dropped before
        line += blank <= line
    source, target = (text.checksums[side][0] + text.among(side) for side in (0, 1))
    return drift_message(source, target, line, shift)
