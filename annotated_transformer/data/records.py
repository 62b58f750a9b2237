"""Read the records of long runs, which come with the repository in its folder ``results``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from annotated_transformer.data.files import load_object

#: The fields of a record of a training run.
TRAINING = (
    *("command", "commit", "date", "seed", "corpus", "options", "parameters", "hardware"),
    *("updates", "seconds", "curve", "scores"),
)
#: The fields of a record of one system that was decoded in several ways.
ABLATION = ("kind", "command", "commit", "date", "training", "corpus", "split", "hardware", "steps")
NO_RECORDS = "The folder results/ is not here: records come with the repository, not the package."


class RecordError(ValueError):
    """A record that cannot be used; the message names the file and what is wrong."""


def find_records(start: Path | None = None) -> Path | None:
    """Return the folder ``results`` of ``start`` (here by default) or of a folder above it."""
    start = Path.cwd() if start is None else start
    folders = (folder / "results" for folder in [start, *start.parents])
    return next((f for f in folders if any(f.glob("*.json"))), None)


def find_record(name: str) -> dict[str, Any] | None:
    """Read a record of that folder; None where there is none, which is printed."""
    folder = find_records()
    if folder and (path := folder / name).is_file():
        return read_record(path)
    print(f"The folder results/ has no {name}." if folder else NO_RECORDS)
    return None


def read_record(path: Path, fields: Sequence[str] = ()) -> dict[str, Any]:
    """Read a record.

    Args:
        path: File of the record.
        fields: Which fields it must have.

    Raises:
        RecordError: The file is no JSON object, or a field is missing.
    """
    try:
        data = load_object(path)
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read: {error}") from None
    if missing := [field for field in fields if field not in data]:
        raise RecordError(f"{path}: has no {', '.join(missing)}; make the record again")
    return data


def is_described(record: Mapping[str, Any], commit: str) -> bool:
    """Whether a page's text is about this record, made by ``commit``; says so if it is another."""
    if not (same := str(record["commit"]).startswith(commit)):
        print(f"The text is about the record of {commit}, and this is {record['commit'][:8]}'s.")
    return same


def read_records(folder: Path | None, fields: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read the records of one kind, by the names of their files.

    Args:
        folder: Folder of the records; None returns no record.
        fields: Which fields a record of that kind has: ``TRAINING`` or ``ABLATION``.

    Raises:
        RecordError: A file is no JSON object, or a record of the kind lacks a field.
    """
    found = {}
    for path in sorted(folder.glob("*.json")) if folder else []:
        data = read_record(path)
        if ("curve" in data) if "curve" in fields else (data.get("kind") == "ablation"):
            found[path.stem] = read_record(path, fields)
    return found
