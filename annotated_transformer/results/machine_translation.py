# Written from book/results/machine_translation.md: edit the chapter instead.
"""Costs of training, and tables made from records (section 6.1)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SUSTAINED = {"K80": 2.8e12, "K40": 3.7e12, "M40": 6.0e12, "P100": 9.5e12}


def training_cost(days: float, gpus: int, gpu: str) -> float:
    """Return time × GPUs × sustained operations per second, the cost of Table 2.

    Args:
        days: Training time.
        gpus: How many worked at it.
        gpu: Their type, a key of ``SUSTAINED`` (footnote of section 6.1).

    Raises:
        KeyError: The paper has no estimate for that type.
    """
    return days * 24 * 3600 * gpus * SUSTAINED[gpu]


TRAINING = ("command", "commit", "date", "seed", "corpus", "options", "parameters", "hardware",
            "updates", "seconds", "curve", "scores")  # fmt: skip
ABLATION = ("kind", "command", "commit", "date", "training", "corpus", "split", "hardware", "steps")


class RecordError(ValueError):
    """A record that cannot be used; the message names the file and what is wrong."""


def find_records(start: Path | None = None) -> Path | None:
    """Return the folder ``results`` beside this folder or one above it, if there is one."""
    start = Path.cwd() if start is None else start
    folders = (folder / "results" for folder in [start, *start.parents])
    return next((f for f in folders if any(f.glob("*.json"))), None)


def read_record(path: Path, fields: Sequence[str] = ()) -> dict[str, Any]:
    """Read a record.

    Args:
        path: Its file.
        fields: Which fields it must have.

    Raises:
        RecordError: The file is no JSON object, or a field is missing.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise RecordError(f"{path}: not a JSON object")
    missing = [field for field in fields if field not in data]
    if missing:
        raise RecordError(f"{path}: has no {', '.join(missing)}; make the record again")
    return data


def read_records(folder: Path | None, fields: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read the records of one kind, by the names of their files.

    Args:
        folder: Where they are; None for none.
        fields: Which fields a record of that kind has; ``TRAINING`` or ``ABLATION``.

    Raises:
        RecordError: A file is no JSON object, or a record of the kind lacks a field.
    """
    found = {}
    for path in sorted(folder.glob("*.json")) if folder else []:
        data = read_record(path)
        if ("curve" in data) if "curve" in fields else (data.get("kind") == "ablation"):
            found[path.stem] = read_record(path, fields)
    return found


def spread(values: Iterable[float]) -> str:
    """Return the mean of results, and their standard deviation where there are several."""
    found = list(values)
    mean = sum(found) / len(found)
    if len(found) < 2:
        return f"{mean:.2f} (one seed)"
    deviation = (sum((v - mean) ** 2 for v in found) / (len(found) - 1)) ** 0.5
    return f"{mean:.2f} ± {deviation:.2f}"
