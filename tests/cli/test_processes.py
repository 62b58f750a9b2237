"""Real processes: kills, interruptions, several at once."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from annotated_transformer.engine.checkpointer import checkpoint_paths
from annotated_transformer.engine.checkpoints import load_tensors
from annotated_transformer.engine.journal import read_journal
from tests.cli.command import SIZES

PROGRAM = """
import sys
from annotated_transformer.cli import main, systems, train

systems.prepare_cpu = train.prepare_cpu = lambda: "float32 products: as they come"
sys.exit(main.main())
"""


def start(words: list[str]) -> "subprocess.Popen[str]":
    """Start the command in a process of its own, on one thread."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    """Wait until a file is there or the process ended."""
    while not path.exists() and process.poll() is None:
        time.sleep(0.01)


def test_kill_and_ctrl_c_change_nothing(texts: list[str], tmp_path: Path) -> None:
    options = [*SIZES.split(), "--updates", "40", *texts, "--save-every", "0"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    words = ["train", *options, "--out", str(stopped)]
    with start(["train", *options, "--out", str(straight)]) as process:
        # Killed without warning, at a moment drawn by chance.
        chance = random.Random(time.time_ns())
        with start(words) as killed:
            wait_for(stopped / "config.json", killed)
            time.sleep(chance.uniform(0, 0.5))
            killed.kill()
        # Ctrl-C, as soon as there is a checkpoint that is newer.
        (stopped / "model.safetensors").unlink(missing_ok=True)
        with start(words) as interrupted:
            wait_for(stopped / "training", interrupted)
            wait_for(stopped / "model.safetensors", interrupted)
            interrupted.send_signal(signal.SIGINT)
            assert interrupted.stderr is not None
            message = interrupted.stderr.read()
        assert interrupted.returncode == 130
        assert re.search(r"interrupted( after update \d+; run the same command.*)?$", message)
        assert "Traceback" not in message
        with start(words) as last:
            assert last.stderr is not None
            assert "Traceback" not in last.stderr.read()
        assert last.returncode == 0
    assert process.returncode == 0
    first, second = (load_tensors(checkpoint_paths(f)[-1])[0] for f in (straight, stopped))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert list(stopped.rglob("*.part")) == []


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=1"


def start_together(words: list[str]) -> subprocess.Popen[str]:
    """Start the command in two processes."""
    command = [sys.executable, *TORCHRUN.split(), "-m", "annotated_transformer", *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes as Linux shows them")
def test_two_processes_survive_a_termination_and_a_kill(texts: list[str], tmp_path: Path) -> None:
    options = [*SIZES.split(), "--updates", "30", *texts, "--save-every", "0", "--quiet"]
    words = ["train", *options, "--out", str(tmp_path / "run")]
    with start_together(words) as process:  # a cluster wants its machine back
        wait_for(tmp_path / "run/model.safetensors", process)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        message = process.stderr.read()
    assert process.returncode != 0
    assert re.search(r"interrupted after update \d+; run the same command", message), message
    done = int(checkpoint_paths(tmp_path / "run")[-1].stem)
    assert 0 < done < 30
    with start_together(words) as process:
        while checkpoint_paths(tmp_path / "run")[-1].stem == f"{done:08d}":
            assert process.poll() is None
            time.sleep(0.01)
        kin = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(kin[-1]), signal.SIGKILL)  # one of the two; torchrun starts both again
        assert process.stderr is not None
        message = process.stderr.read()
    assert process.returncode == 0, message
    record = json.loads((tmp_path / "run/record.json").read_text(encoding="utf-8"))
    assert record["updates"] == 30
    assert record["hardware"]["processes"] == 2
    rows = read_journal(tmp_path / "run/log.jsonl")
    assert [row["update"] for row in rows if "loss" in row] == [30]
