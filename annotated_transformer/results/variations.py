# Written from book/results/variations.md: edit the chapter instead.
"""Rows of Table 3 against the base model, seed by seed (Section 6.2)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from annotated_transformer.data.records import RecordError, read_record
from annotated_transformer.results.machine_translation import judge_claim, student_t

SWEEP = ("kind", "command", "commit", "date", "hardware", "search", "rows")


def read_sweep(folder: Path | None, name: str) -> dict[str, Any] | None:
    """Read the record of a grid.

    Returns:
        None where it has not been run, or there is no folder of records.

    Raises:
        RecordError: The file is no record of a sweep.
    """
    path = None if folder is None else folder / f"{name}.json"
    if path is None or not path.exists():
        return None
    record = read_record(path, SWEEP)
    if record["kind"] != "sweep":
        raise RecordError(f"{path}: is no record of a sweep; run the sweep again")
    return record


def paired_difference(
    record: Mapping[str, Any] | None, row: str, measure: str = "loss"
) -> list[float]:
    """Compare a row with the base, the first row, for every seed that both have.

    Args:
        record: The record of a grid; None if there is none.
        row: Name of the row.
        measure: ``loss``, in per cent of the base's, or ``bleu``, in points of BLEU.

    Returns:
        The row's measure minus the base's, seed by seed.
    """
    rows = {} if record is None else record["rows"]
    if row not in rows:
        return []
    base, runs = next(iter(rows.values()))["runs"], rows[row]["runs"]
    pairs = [(runs[seed][measure], base[seed][measure]) for seed in base if seed in runs]
    if measure == "loss":
        return [100 * (own - other) / other for own, other in pairs]
    return [own - other for own, other in pairs]


Prediction = tuple[str, int, str]  #: A row, +1 if it is above the base or −1, and the measure.


def judge_rows(record: Mapping[str, Any] | None, predicted: Sequence[Prediction]) -> str:
    """Judge a statement that makes several predictions about a grid.

    Args:
        record: The record of the grid.
        predicted: The predictions; for their measures see ``paired_difference``.

    Returns:
        The status, as the scoreboard has it.
    """
    found = [[sign * x for x in paired_difference(record, row, measure)]
             for row, sign, measure in predicted]  # fmt: skip
    if not all(found):
        return "not yet run"
    if any(judge_claim(each, level=1 - 0.05 / len(found)).high < 0 for each in found):
        return "does not hold at our scale"
    held = all(judge_claim(each).low > 0 for each in found)
    return "holds at our scale" if held else "not resolved"


MOST_PAIRS = 1000  #: More than these are not counted.
EIGHTY = 0.8416  # four fifths of a normal distribution lie below this many standard deviations


def pairs_needed(effect: float, spread: float) -> int | None:
    """Return how many paired seeds find an effect four times out of five, at 95 %.

    Args:
        effect: The true mean difference.
        spread: Standard deviation of a difference.

    Returns:
        None for more than ``MOST_PAIRS``.
    """
    for n in range(2, MOST_PAIRS + 1):
        bound = 1.96 if n > 120 else student_t(n - 1)
        if abs(effect) >= (bound + EIGHTY) * spread / n**0.5:
            return n
    return None
