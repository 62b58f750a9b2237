"""Real processes: kills, interruptions, several at once."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from annotated_transformer.engine.checkpointer import checkpoint_paths
from annotated_transformer.engine.checkpoints import load_tensors
from annotated_transformer.engine.journal import read_journal
from tests.cli.command import SIZES
from tests.processes import ONE_THREAD, Command, needs_proc


def wait_for(path: Path, running: Callable[[], bool]) -> None:
    """Wait until a file is there or the process ended."""
    while not path.exists() and running():
        time.sleep(0.01)


def test_kill_and_ctrl_c_change_nothing(texts: list[str], tmp_path: Path) -> None:
    options = [*SIZES.split(), "--updates", "40", *texts, "--save-every", "0"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    words = ["train", *options, "--out", str(stopped)]
    undisturbed = Command(["train", *options, "--out", str(straight)], tmp_path / "straight.err")
    # Killed without warning, at a moment drawn by chance.
    chance = random.Random(time.time_ns())
    killed = Command(words, tmp_path / "killed.err")
    wait_for(stopped / "config.json", killed.running)
    time.sleep(chance.uniform(0, 0.5))
    killed.signal(signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    # Ctrl-C, as soon as there is a checkpoint that is newer.
    (stopped / "model.safetensors").unlink(missing_ok=True)
    interrupted = Command(words, tmp_path / "interrupted.err")
    wait_for(stopped / "training", interrupted.running)
    wait_for(stopped / "model.safetensors", interrupted.running)
    interrupted.signal(signal.SIGINT)
    status, message = interrupted.end()
    assert status == 130
    assert re.search(r"interrupted( after update \d+; run the same command.*)?$", message)
    assert "Traceback" not in message
    status, message = Command(words, tmp_path / "last.err").end()
    assert status == 0
    assert "Traceback" not in message
    assert undisturbed.end()[0] == 0
    first, second = (load_tensors(checkpoint_paths(f)[-1])[0] for f in (straight, stopped))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert list(stopped.rglob("*.part")) == []


TORCHRUN = "--standalone --nproc-per-node=2 --max-restarts=1 -m annotated_transformer"


def start_together(words: list[str], said: Path) -> Command:
    """Start the command in two processes."""
    return Command([*TORCHRUN.split(), *words], said, **ONE_THREAD)


@needs_proc
def test_two_processes_survive_a_termination_and_a_kill(texts: list[str], tmp_path: Path) -> None:
    options = [*SIZES.split(), "--updates", "20", *texts, "--save-every", "0", "--quiet"]
    words = ["train", *options, "--out", str(tmp_path / "run")]
    first = start_together(words, tmp_path / "first.err")
    wait_for(tmp_path / "run/model.safetensors", first.running)
    first.signal(signal.SIGTERM)  # a cluster wants its machine back
    status, message = first.end()
    assert status != 0
    assert re.search(r"interrupted after update \d+; run the same command", message), message
    done = int(checkpoint_paths(tmp_path / "run")[-1].stem)
    assert 0 < done < 20
    second = start_together(words, tmp_path / "second.err")
    while checkpoint_paths(tmp_path / "run")[-1].stem == f"{done:08d}":
        assert second.running()
        time.sleep(0.01)
    pid = second.process.pid
    kin = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(kin[-1]), signal.SIGKILL)  # one of the two; torchrun starts both again
    status, message = second.end()
    assert status == 0, message
    record = json.loads((tmp_path / "run/record.json").read_text(encoding="utf-8"))
    assert record["updates"] == 20
    assert record["hardware"]["processes"] == 2
    rows = read_journal(tmp_path / "run/log.jsonl")
    assert [row["update"] for row in rows if "loss" in row] == [20]
