"""Bad input of every kind, for every command: one line, status 2, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from annotated_transformer.cli.arguments import KINDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc")
pytest.importorskip("resource", reason="needs Unix")

from tests.cli.forks import Forks  # noqa: E402
from tests.cli.sweep import Case, build, execute, judge  # noqa: E402
from tests.cli.sweep_drawn import cases, rules  # noqa: E402
from tests.cli.sweep_folders import (  # noqa: E402
    damaged_folders,
    recipes,
    stray_files,
    wrong_configurations,
)
from tests.cli.sweep_processes import (  # noqa: E402
    environments,
    limits,
    outputs,
    pipes,
    signals,
    streams,
)
from tests.cli.sweep_words import contradictions, diagnosed, option_values, texts  # noqa: E402

ALL: list[Case] = [
    *texts(), *diagnosed(), *option_values(), *contradictions(),
    *damaged_folders(), *wrong_configurations(), *recipes(), *stray_files(),
    *outputs(), *streams(), *pipes(), *signals(), *limits(), *environments(),
]  # fmt: skip
CASES = {case.name: case for case in ALL}
FAULTS = {  # each with a case that must find it when it is put back
    "follow_the_locale": "translate, ascii",
    "drop_short_writes": "translate, a disk with 300 bytes",
    "ignore_own_files": "train, source: missing",
    "overwrite_the_input": "translate in -o in",
    "trust_the_configuration": "translate with other heads",
    "trust_the_state": "train with altered states",
    "overwrite_the_best": "train without training",
    "delete_all_parts": "train beside .mine.part",
    "trust_pickles": "translate with model.safetensors: pickled weights",
}


class Bench:
    """Where cases run."""

    def __init__(self, forks: Forks, root: Path) -> None:
        self.forks, self.root = forks, root
        self.sound = build(forks, root)

    def judge(self, case: Case, fault: str = "") -> list[str]:
        """Return what is wrong with a case."""
        outcome = execute(case, self.forks, self.root, fault=fault)
        return [f"{each}: {outcome}" for each in judge(case, outcome, self.sound)]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """Start the process that forks, and make what all cases share, where nobody may look, too."""
    root = Path(tempfile.mkdtemp())
    with Forks() as started:
        yield Bench(started, root)
    shutil.rmtree(root)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=ascii(case.name)[1:-1]) for case in CASES.values()]
)
def test_bad_input_is_one_line(case: Case, bench: Bench) -> None:
    assert bench.judge(case) == []


def test_the_sweep_is_wide() -> None:
    count = Counter("".join(case.typed[:1]) for case in ALL)
    assert len(CASES) == len(ALL) >= 2000  # each has a name of its own
    assert all(count[command] >= 20 for command in KINDS), count


@pytest.mark.parametrize(("fault", "name"), FAULTS.items())
def test_faults_that_are_put_back_are_found(fault: str, name: str, bench: Bench) -> None:
    assert bench.judge(CASES[name]) == []
    assert bench.judge(CASES[name], fault) != []


@settings(max_examples=500, derandomize=True, database=None, deadline=None)
@given(drawn=cases())
def test_what_nobody_thought_of_is_one_line(drawn: Case, bench: Bench) -> None:
    outcome = execute(drawn, bench.forks, bench.root)
    case, outcome = rules(drawn, outcome)
    assert judge(case, outcome) == [], outcome


PROGRAM = [sys.executable, "-m", "annotated_transformer"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_libraries_are_loaded(number: signal.Signals) -> None:
    """PyTorch takes a second or more; Python itself has begun after a tenth."""
    words = [*PROGRAM, "translate", "nowhere"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while b"libtorch" not in maps.read_bytes():
            time.sleep(0.005)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, b"")
    assert err == b"annotated-transformer: interrupted\n"


@pytest.mark.parametrize("limit", ["ulimit -n 16", "unset HOME"])
def test_limits_while_libraries_are_loaded(limit: str) -> None:
    line = f"{limit}; exec '{sys.executable}' -m annotated_transformer translate nowhere"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    (told,) = done.stderr.splitlines()
    assert told.startswith("annotated-transformer: ")


def test_help_and_errors_are_quick() -> None:
    """A quarter of a second, beside one and a half for PyTorch: half of that is never reached."""

    def taken(*words: str) -> float:
        before = os.times()
        subprocess.run(words, capture_output=True)
        after = os.times()
        user, system = (getattr(after, n) - getattr(before, n) for n in
                        ("children_user", "children_system"))  # fmt: skip
        return float(user + system)

    torch = taken(sys.executable, "-c", "import torch")
    for line in ("--help", "train --help", "train --udpates 3", "translate --beam x"):
        assert taken(*PROGRAM, *line.split()) < torch / 2
