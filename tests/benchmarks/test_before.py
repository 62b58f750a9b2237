"""An older checkout is measured with its own package, in turns with this one."""

import json
import sys
from pathlib import Path
from types import TracebackType

import pytest

from benchmarks import __main__ as program
from benchmarks import before
from benchmarks.workers import ROOT, Worker, WorkerError

OLD = {  # what the jobs need of a checkout from before the fast layer
    "__init__": "",
    "notation": "EOS = 2",
    "model/transformer": "make_model = lambda *vocabularies, **sizes: sizes",
    "training/batches": "make_batch = lambda sources, targets: len(sources)",
    "training/optimizer": "make_adam = lambda model, rate: rate",
    "training/loop": "def update(model, batches, optimizer, schedule, smoothing):\n"
    "    assert (model['N'], batches, optimizer, smoothing) == (3, [64], 1e-4, 0.1)",
    "training/speed": "prepare_cpu = lambda: 'products'",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in OLD.items():
        path = tmp_path / "annotated_transformer" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return tmp_path


def test_a_job_runs_with_the_package_of_the_checkout(checkout: Path) -> None:
    with before.start("before", "small", checkout) as worker:
        assert worker.ask("go") > 0
        assert worker.ask("go") > 0
        memory = worker.peak_memory
    assert memory > 2**20 or not Path("/proc").exists()
    assert worker.process.returncode is not None


def test_a_package_from_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"small: the package is .*annotated_transformer, not"):
        before.start("before", "small", tmp_path)


def test_a_job_that_fails_says_why(checkout: Path) -> None:
    (checkout / "annotated_transformer/training/loop.py").write_text("raise OSError('no loop')\n")
    with pytest.raises(WorkerError, match=r"(?s)'small, before' failed.*no loop"):
        before.start("before", "small", checkout)


class Fake:
    """A worker with given times."""

    def __init__(self, times: list[float], memory: int, log: list[str], name: str) -> None:
        self.times, self.peak_memory, self.log, self.name = times, memory, log, name

    def ask(self, _: str) -> float:
        self.log.append(self.name)
        return self.times.pop(0)

    def __enter__(self) -> "Fake":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.log.append(f"end of {self.name}")


def test_both_take_turns_and_make_a_record(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[str] = []

    def start(name: str, _: str, folder: Path) -> Fake:
        assert folder == {"before": checkout, "now": ROOT}[name]
        old = name == "before"
        return Fake([4.0, 2.0, 9.0] if old else [1.0, 2.0, 3.0], 200 if old else 100, log, name)

    monkeypatch.setattr(before, "start", start)
    path = checkout / "record.json"
    words = ["before", str(checkout), "--jobs", "one", "--rounds", "3", "--record", str(path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    program.main()
    assert log == ["before", "now"] * 3 + ["end of now", "end of before"]
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["before"] == "unknown"
    row = record["jobs"]["one"]
    assert (row["median"], row["best"], row["memory"]) == (0.5, 0.5, 0.5)
    assert row["seconds"] == {"before": [4.0, 2.0, 9.0], "now": [1.0, 2.0, 3.0]}
    assert row["peak_bytes"] == {"before": 200, "now": 100}
    assert "0.500   0.500   0.500" in capsys.readouterr().out


def test_a_folder_without_a_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        before.main([str(tmp_path)])
    assert "no checkout of the package" in capsys.readouterr().err


def test_a_worker_that_ends_is_an_error() -> None:
    code = "import sys; sys.stdin.readline(); sys.exit('gone')"
    with Worker("short", ["-c", code]) as worker, pytest.raises(WorkerError, match=r"short.*gone"):
        worker.ask("go")
    with Worker("short", ["-c", ""]) as worker:
        worker.process.wait()
        with pytest.raises(WorkerError, match="'short' failed"):
            worker.ask("go")  # nobody reads it
