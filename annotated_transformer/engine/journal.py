"""The log of a run: one JSON object per line, readable even after the process was killed."""

import contextlib
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from annotated_transformer.data.files import parse_object, regular_file, write_atomically

_NOT_FINITE = ("nan", "inf", "-inf")  # JSON has no numbers for these


def _parse(line: bytes) -> dict[str, float]:
    """Return the numbers in one line."""
    entry = parse_object(line)
    if "update" not in entry:
        raise ValueError("it has no update number")
    for name, value in entry.items():
        if isinstance(value, str) and value in _NOT_FINITE:
            entry[name] = float(value)
        elif not isinstance(value, int | float):
            raise ValueError(f"{value!r} is not a number")
    return entry


def _parse_file(path: Path) -> list[tuple[bytes, dict[str, float]]]:
    """Return the lines of a journal, raw and parsed, without an incomplete last one."""
    found = []
    lines = regular_file(path).read_bytes().split(b"\n")
    lines = lines if lines[-1] else lines[:-1]  # nothing follows the end of the last line
    for number, line in enumerate(lines, 1):
        try:
            found.append((line, _parse(line)))
        except ValueError as error:
            if number == len(lines):  # the process was killed while it wrote
                break
            raise ValueError(f"{path}, line {number}: not a valid log line: {error}") from None
    return found


def read_journal(path: Path) -> list[dict[str, float]]:
    """Read a journal, even while a run is writing it: each line's ``update`` and measurements.

    An incomplete last line, from a process killed while writing, is left out.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line other than the last is invalid; the message names file and line.
    """
    return [entry for _, entry in _parse_file(Path(path))]


def _truncate(path: Path, update: float) -> None:
    """Atomically keep only the complete lines up to an update."""
    if not path.exists():
        return
    kept = [line + b"\n" for line, entry in _parse_file(path) if entry["update"] <= update]
    if (data := b"".join(kept)) != path.read_bytes():
        write_atomically(path, data)


class Journal(contextlib.AbstractContextManager["Journal"]):
    """The log of a run, to which lines are appended, one JSON object per line.

    An existing file is continued; an incomplete last line is dropped.

    Args:
        path: The file; its folder must exist.
        tensorboard: Also write files for TensorBoard into this folder.

    Raises:
        ImportError: The package tensorboard is needed, but not installed.
        ValueError: The file exists and a line other than its last is invalid.
    """

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self.path = Path(path)
        self._board: Any = None  # TensorBoard's writer, from the first line on
        self._make_board: Callable[..., Any] | None = None
        if tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                told = f"needs the package tensorboard ({error}): pip install tensorboard"
                raise ImportError(told) from error
            self._make_board = partial(SummaryWriter, str(tensorboard))
        _truncate(self.path, math.inf)
        self._file = self.path.open("ab")

    def write(self, update: int, **numbers: float | None) -> None:
        """Append one line and flush it, so that a kill loses at most this line.

        None is left out; NaN and infinities become the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
        """
        known = {name: value for name, value in numbers.items() if value is not None}
        line: dict[str, float | str] = {"update": int(update)}
        for name, value in known.items():  # perhaps a tensor of one element
            number = int(value) if isinstance(value, int) else float(value)
            line[name] = number if math.isfinite(number) else str(number)
        self._file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        self._file.flush()
        if self._make_board is not None:
            self._board = self._board or self._make_board()
            for name, value in known.items():
                self._board.add_scalar(name, value, update)

    def rewind(self, update: int) -> None:
        """Drop all lines after an update, for a run that resumes from there."""
        self.close()
        try:
            _truncate(self.path, update)
        finally:
            self._file = self.path.open("ab")
        if self._make_board is not None:  # TensorBoard hides older values from purge_step on
            self._make_board = partial(self._make_board, purge_step=update + 1)

    def close(self) -> None:
        """Close the files."""
        with contextlib.suppress(OSError):  # what is not on disk yet was said not to be
            self._file.close()
        if self._board is not None:
            self._board.close()
        self._board = None

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()
