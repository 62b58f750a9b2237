"""The log of a run: one JSON object a line, which survives when the process is killed."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from annotated_transformer.data.files import parse_json, write_atomically

_NOT_FINITE = ("nan", "inf", "-inf")  # JSON has no numbers for these


def _parse(line: bytes) -> dict[str, float]:
    """Return the numbers in one line."""
    entry = parse_json(line)
    if not isinstance(entry, dict) or "update" not in entry:
        raise ValueError("it does not say its update")
    for name, value in entry.items():
        if isinstance(value, str) and value in _NOT_FINITE:
            entry[name] = float(value)
        elif not isinstance(value, int | float):
            raise ValueError(f"{value!r} is not a number")
    return entry


def _parse_file(path: Path) -> list[tuple[bytes, dict[str, float]]]:
    """Return the lines of a journal, as bytes and parsed, without a broken last one."""
    found = []
    lines = path.read_bytes().split(b"\n")
    lines = lines if lines[-1] else lines[:-1]  # nothing follows the end of the last line
    for number, line in enumerate(lines, 1):
        try:
            found.append((line, _parse(line)))
        except ValueError as error:
            if number == len(lines):  # the process was killed while it wrote
                break
            raise ValueError(f"{path}, line {number}: not a line of a journal: {error}") from None
    return found


def read_journal(path: Path) -> list[dict[str, float]]:
    """Read a journal, also while a run writes it.

    A broken last line is left out: the process was killed while it wrote.

    Args:
        path: The file.

    Returns:
        Its lines; each has its ``update``, and what else was measured.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line other than the last is broken; the message names file and line.
    """
    return [entry for _, entry in _parse_file(Path(path))]


def _truncate(path: Path, update: float) -> None:
    """Leave only whole lines, and of these the ones up to an update; the file changes at once."""
    if not path.exists():
        return
    kept = [line + b"\n" for line, entry in _parse_file(path) if entry["update"] <= update]
    if (data := b"".join(kept)) != path.read_bytes():
        write_atomically(path, data)


class _TensorBoard:
    """Writes the same numbers for TensorBoard, which draws them in a browser."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"files for TensorBoard need its package ({error}): pip install tensorboard"
            ) from error
        self.folder, self.make_writer = folder, SummaryWriter
        self.writer: Any = None
        self.purge_step: int | None = None  # TensorBoard hides what came from here on

    def write(self, update: int, numbers: Mapping[str, float]) -> None:
        if self.writer is None:
            self.writer = self.make_writer(str(self.folder), purge_step=self.purge_step)
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, update)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.writer = None


class Journal(contextlib.AbstractContextManager["Journal"]):
    """A log of a run, one JSON object a line, to which lines are added.

    Opened on a file that exists, it continues it; a broken last line is dropped.

    Args:
        path: The file; its folder must exist.
        tensorboard: Also write files for TensorBoard into this folder.

    Raises:
        ImportError: The package tensorboard is needed, and is not installed.
        ValueError: The file exists and has a broken line that is not its last.
    """

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self.path = Path(path)
        self._tensorboard = None if tensorboard is None else _TensorBoard(tensorboard)
        _truncate(self.path, math.inf)
        self._file = self.path.open("ab")

    def write(self, update: int, **numbers: float | None) -> None:
        """Add one line and flush it: a kill breaks at most this line.

        Args:
            update: Number of updates so far.
            numbers: What was measured, by name. None is left out; NaN and infinities are
                written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
        """
        known = {name: value for name, value in numbers.items() if value is not None}
        line: dict[str, float | str] = {"update": int(update)}
        for name, value in known.items():  # perhaps a tensor of one element
            number = int(value) if isinstance(value, int) else float(value)
            line[name] = number if math.isfinite(number) else str(number)
        self._file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        self._file.flush()
        if self._tensorboard is not None:
            self._tensorboard.write(update, known)

    def rewind(self, update: int) -> None:
        """Drop all lines after an update, for a run that resumes from there.

        Args:
            update: The last update that counts.
        """
        self._file.close()
        try:
            _truncate(self.path, update)
        finally:
            self._file = self.path.open("ab")
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard.purge_step = update + 1

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()
