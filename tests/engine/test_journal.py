"""A log that survives a kill, and goes back; the same numbers for TensorBoard."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.data.files import FileError
from annotated_transformer.engine.journal import Journal, read_journal
from annotated_transformer.engine.runlog import RunLog
from annotated_transformer.engine.state import TrainState
from tests.processes import needs_full

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Journal(path) as journal:
        journal.write(5, loss=1.5, tokens=300, share_of_peak=None, skipped=False)
        assert read_journal(path) == [{"update": 5, "loss": 1.5, "tokens": 300, "skipped": 0}]
        tensors: dict[str, Any] = {"loss": torch.tensor(0.5), "norm": torch.tensor(2)}
        journal.write(10, **tensors)
    lines = [json.loads(line) for line in path.read_text().splitlines()]  # plain JSON
    assert lines[1] == {"update": 10, "loss": 0.5, "norm": 2.0}
    assert isinstance(read_journal(path)[0]["tokens"], int)


def test_nan_and_infinities_come_back(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Journal(path) as journal:
        journal.write(1, a=math.nan, b=math.inf, c=-math.inf)

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    line = path.read_text()
    assert json.loads(line, parse_constant=refuse) == {
        "update": 1, "a": "nan", "b": "inf", "c": "-inf",
    }  # fmt: skip
    (entry,) = read_journal(path)
    assert math.isnan(entry["a"])
    assert (entry["b"], entry["c"]) == (math.inf, -math.inf)


NUMBERS = st.dictionaries(
    st.sampled_from(["loss", "rate", "norm", "tokens"]), st.integers() | st.floats()
)


@settings(max_examples=40)
@given(rows=st.lists(NUMBERS, max_size=6), cut=st.integers(0, 400))
def test_a_file_cut_anywhere_loses_one_line_at_most(
    rows: list[dict[str, float]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "log.jsonl"
    with Journal(path) as journal:
        for number, row in enumerate(rows):
            journal.write(number, **row)
    whole, data = read_journal(path), path.read_bytes()
    assert repr(whole) == repr([{"update": n, **row} for n, row in enumerate(rows)])
    kept = data[:cut]
    path.write_bytes(kept)
    complete = kept.count(b"\n")
    found = read_journal(path)
    assert complete <= len(found) <= complete + 1  # a line may lack its end alone
    assert repr(found) == repr(whole[: len(found)])
    with Journal(path) as journal:  # goes on in a new line
        journal.write(99)
    assert repr(read_journal(path)) == repr([*found, {"update": 99}])


@pytest.mark.parametrize(
    "line",
    ["", '{"update": 2', '{"loss": 2}', "[1]", "7", '{"update": 2, "loss": "low"}',
     '{"update": 2, "loss": null}', "\x00\x00", "\udcff"],
)  # fmt: skip
def test_a_broken_line_is_named_unless_it_is_the_last(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    broken = line.encode("utf-8", "surrogateescape")
    path.write_bytes(b'{"update": 1}\n' + broken + b"\n")
    assert read_journal(path) == [{"update": 1}]
    path.write_bytes(b'{"update": 1}\n' + broken + b'\n{"update": 3}\n')
    where = re.escape(f"{path}, line 2: ")
    with pytest.raises(ValueError, match=where):
        read_journal(path)
    with pytest.raises(ValueError, match=where):
        Journal(path)
    assert path.read_bytes().endswith(b'\n{"update": 3}\n')  # nothing is thrown away


def test_no_file_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_journal(tmp_path / "log.jsonl")
    (tmp_path / "log.jsonl").touch()
    assert read_journal(tmp_path / "log.jsonl") == []


def test_rewinding_drops_what_came_after(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Journal(path) as journal:
        for update in (10, 20, 20, 30, 40):
            journal.write(update, loss=update)
        journal.rewind(20)
        assert [line["update"] for line in read_journal(path)] == [10, 20, 20]
        journal.write(30, loss=7)
    with path.open("ab") as file:
        file.write(b'{"update": 4')
    with Journal(path) as journal:
        journal.rewind(35)
        journal.write(50)
    assert [line["update"] for line in read_journal(path)] == [10, 20, 20, 30, 50]
    assert read_journal(path)[3]["loss"] == 7
    with Journal(path) as journal:
        journal.rewind(0)
    assert path.read_bytes() == b""
    assert sorted(tmp_path.iterdir()) == [path]  # nothing is left over


def test_a_failed_rewind_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    journal = Journal(path)
    journal.write(10)
    journal.write(20)

    def refuse(*_: object) -> None:
        raise OSError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(FileError, match="killed here"):
            journal.rewind(10)
    assert [line["update"] for line in read_journal(path)] == [10, 20]
    journal.write(30)  # still open
    journal.close()
    assert [line["update"] for line in read_journal(path)] == [10, 20, 30]


def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    sizes = []
    with Journal(path) as journal:
        for update in range(3):
            journal.write(update, loss=1.0)
            sizes.append(path.stat().st_size)  # flushed, and whole
            assert path.read_bytes().endswith(b"\n")
    assert sizes == sorted(set(sizes))


WRITER = """
import sys
from pathlib import Path
from annotated_transformer.data.files import FileError
from annotated_transformer.engine.journal import Journal
journal = Journal(Path(sys.argv[1]))
for update in range(10**9):
    journal.write(update, loss=update / 7, tokens=update)
"""


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env=environment)
    try:
        end = time.monotonic() + 60
        while not (path.exists() and path.stat().st_size > 100_000) and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        process.wait()
    lines = read_journal(path)
    assert len(lines) > 1000
    assert [line["update"] for line in lines] == list(range(len(lines)))


# --- TensorBoard -----------------------------------------------------------------------------


@needs_full
def test_a_full_disk_is_said_to_be_one(tmp_path: Path) -> None:
    """What could not be written is still in the buffer, and closing flushes it again."""
    journal = Journal(tmp_path / "log.jsonl")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._file.fileno())
    os.close(full)

    def write() -> None:
        with journal:
            RunLog(journal.path, journal, None).write(TrainState(), loss=1.0)

    with pytest.raises(FileError, match=r"log\.jsonl: "):
        write()


class Writer:
    """Stands in for PyTorch's writer."""

    made: list["Writer"]

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.points: list[tuple[str, float, int]] = []
        self.closed = False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert not self.closed
        self.points.append((name, value, step))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    Writer.made = []
    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return Writer.made


def test_tensorboard_gets_the_same_numbers(tmp_path: Path, writers: list[Writer]) -> None:
    with Journal(tmp_path / "log.jsonl", tensorboard=tmp_path / "board") as journal:
        journal.write(10, loss=2.0, share_of_peak=None)
        journal.write(20, loss=1.0, rate=0.1)
        journal.rewind(10)
        journal.write(20, loss=1.5)
    first, second = writers
    assert first.folder == second.folder == str(tmp_path / "board")
    assert first.points == [("loss", 2.0, 10), ("loss", 1.0, 20), ("rate", 0.1, 20)]
    assert first.purge_step is None
    assert second.purge_step == 11  # steps from here on are hidden; 10 stays
    assert second.points == [("loss", 1.5, 20)]
    assert first.closed
    assert second.closed


def test_a_resumed_run_hides_what_came_after(tmp_path: Path, writers: list[Writer]) -> None:
    with Journal(tmp_path / "log.jsonl", tensorboard=tmp_path) as journal:
        journal.rewind(7)
        journal.write(8, loss=1.0)
    (only,) = writers
    assert only.purge_step == 8


def test_without_tensorboard_there_is_none(tmp_path: Path, writers: list[Writer]) -> None:
    with Journal(tmp_path / "log.jsonl") as journal:
        journal.write(1, loss=1.0)
        journal.rewind(0)
    assert writers == []


def test_a_missing_tensorboard_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        Journal(tmp_path / "log.jsonl", tensorboard=tmp_path / "board")
    assert list(tmp_path.iterdir()) == []
