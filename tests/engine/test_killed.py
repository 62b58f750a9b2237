"""Runs that are killed at moments drawn by rng end with the bits of one that was not."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from annotated_transformer.engine.checkpointer import checkpoint_paths
from annotated_transformer.engine.checkpoints import load_tensors
from annotated_transformer.engine.journal import read_journal
from tests.processes import together

PROGRAM = '''
"""Train in forked processes, which are killed. Forked, so that torch is imported only once."""
import contextlib, json, os, random, shutil, signal, socket, sys, time, traceback
from pathlib import Path
import torch
from annotated_transformer.engine.checkpointer import checkpoint_paths
from annotated_transformer.engine.config import Options
from annotated_transformer.engine.trainer import Trainer
from annotated_transformer.engine.processes import process_group
from annotated_transformer.data.corpora import load_corpus

texts = load_corpus("grammar", size=60), load_corpus("grammar", split="val", size=12)


def options_of(stage):
    return Options().replace(
        layers=1, d_model=32, d_ff=64, vocabulary=300, updates=stage["updates"], warmup=4,
        max_tokens=256, dropout=stage["dropout"], max_len=128, average=3, average_every=4,
        accumulate=2, save_every=0.0, log_every=5, sharded=stage["sharded"])


def train(stage):
    torch.set_num_threads(1)
    with process_group() as world:
        Trainer(options_of(stage), Path(stage["folder"]), texts, world).train(progress=False)


def start(stage):
    size, kills = stage["size"], stage["kills"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(size):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        code = 1
        try:
            if size > 1:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank),
                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            else:
                for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                    os.environ.pop(name, None)
            if not kills or os.environ.get("LOUD"):
                train(stage)
            else:
                with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
                    train(stage)
            code = 0
        except BaseException:
            if not kills or "LOUD" in os.environ:
                traceback.print_exc()
        finally:
            os._exit(code)
    return children


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(stage):
    folder, size, kills = Path(stage["folder"]), stage["size"], stage["kills"]
    rng = random.Random(stage["seed"])
    killed, places, cut = 0, set(), 0
    # More, where a slow machine came no further than to one place
    while killed < kills or (len(places) < 2 and killed < 4 * kills):
        children = start(stage)
        if killed % 2:  # when it goes on; else at the start, too
            newest, patience = checkpoint_paths(folder)[-1:], time.monotonic() + 20
            while checkpoint_paths(folder)[-1:] == newest and time.monotonic() < patience:
                time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        victim = rng.choice(children)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        if killed % 3 == 0:  # of all, else of one
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        grace = time.monotonic() + 1  # the others notice, or are killed, as torchrun does
        codes = {}
        while len(codes) < size and time.monotonic() < grace:
            for pid in set(children) - set(codes):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        for pid in set(children) - set(codes):
            os.kill(pid, signal.SIGKILL)
            codes[pid] = ended(pid)
        if codes[victim] == -signal.SIGKILL:
            killed += 1
        found = checkpoint_paths(folder)
        if found:
            places.add(int(found[-1].stem))
            if len(found) > 1 and killed % 2 == 0:  # the disk has lost its last writes
                data = found[-1].read_bytes()
                found[-1].write_bytes(data[: rng.randrange(len(data))])
                cut += 1
            if int(found[-1].stem) >= stage["updates"] - 2:  # not to run out of updates
                shutil.rmtree(folder)
    return killed, cut, len(places)


for stage in json.loads(sys.argv[1]):
    if stage["kills"]:
        Path(sys.argv[0]).with_suffix(".json").write_text(json.dumps(kill(stage)))
    assert [ended(pid) for pid in start(stage)] == [0] * stage["size"]
'''


def stage(
    folder: Path,
    size: int,
    *,
    kills: int = 0,
    seed: int = 0,
    updates: int = 40,
    dropout: float = 0.2,
    sharded: bool = False,
) -> dict[str, Any]:
    """Return what the program does with a folder: train to so many updates, after some kills."""
    return {
        **{"folder": str(folder), "size": size, "kills": kills, "seed": seed},
        **{"updates": updates, "dropout": dropout, "sharded": sharded},
    }


def run(folder: Path, *stages: dict[str, Any]) -> list[int]:
    """Run the program; return kills, cut files, and at how many updates they came."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    together(1, program, json.dumps(stages))  # one, which starts the others
    told = program.with_suffix(".json")
    found: list[int] = json.loads(told.read_text(encoding="utf-8")) if told.exists() else []
    return found


def log_of(folder: Path) -> list[dict[str, float]]:
    """Return the lines of a log that tell of updates."""
    return [row for row in read_journal(folder / "log.jsonl") if "loss" in row]


def left(folder: Path) -> tuple[dict[str, bytes], dict[str, bytes], list[dict[str, float]]]:
    """Return the bits of the training, of its best and averaged weights, and its log."""
    tensors, _ = load_tensors(checkpoint_paths(folder)[-1])
    kept = [
        folder / "model.safetensors",
        folder / "averaged.safetensors",
        *sorted((folder / "snapshots").glob("*.safetensors")),
    ]
    log = [
        {name: row[name] for name in ("update", "epoch", "loss", "rate", "grad_norm", "tokens")}
        for row in log_of(folder)
    ]
    bits = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    return bits, {path.name: path.read_bytes() for path in kept}, log


@pytest.mark.parametrize(("size", "kills"), [(1, 20), (2, 6)])
def test_killed_at_any_moment(tmp_path: Path, size: int, kills: int) -> None:
    seed = time.time_ns() % 100_000
    print("seed", seed)  # of a failure
    straight = stage(tmp_path / "straight", size)
    stopped = stage(tmp_path / "killed", size, kills=kills, seed=seed)
    killed, cut, places = run(tmp_path, straight, stopped)
    assert killed >= kills
    assert cut > 0
    assert places > 1
    assert left(tmp_path / "killed") == left(tmp_path / "straight")
    assert list((tmp_path / "killed").rglob("*.part")) == []


def test_the_number_of_processes_may_change(tmp_path: Path) -> None:
    stops = [("one", 1, 24), ("several", 2, 7), ("several", 1, 15), ("several", 3, 24)]
    run(tmp_path, *(stage(tmp_path / n, size, updates=u, dropout=0.0) for n, size, u in stops))
    logs = [log_of(tmp_path / name) for name in ("one", "several")]
    assert [row["update"] for row in logs[0]] == [5, 10, 15, 20, 24]
    several = {row["update"]: row for row in logs[1]}
    for row in logs[0][1:]:  # the ends of the parts have lines of their own
        for name in ("epoch", "rate"):
            assert several[row["update"]][name] == row[name]
        assert several[row["update"]]["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-2)
    sums = [sum(row["tokens"] for row in log) for log in logs]
    assert sums[0] == sums[1]  # the same sentences, each once
    states = [load_tensors(checkpoint_paths(tmp_path / name)[-1]) for name in ("one", "several")]
    for name, tensor in states[0][0].items():
        if name.startswith("model."):
            assert (states[1][0][name] - tensor).abs().max() < 1e-2, name
    curves = [data["state"]["curve"][-1]["valid_loss"] for _, data in states]
    assert curves[0] == pytest.approx(curves[1], abs=1e-3)


def test_sharded_go_on_and_are_put_together(tmp_path: Path) -> None:
    stops = [("straight", 12), ("stopped", 5), ("stopped", 12)]
    sharded = [stage(tmp_path / name, 2, updates=u, sharded=True) for name, u in stops]
    run(tmp_path, *sharded, stage(tmp_path / "copies", 2, updates=12))
    states = [
        load_tensors(checkpoint_paths(tmp_path / name)[-1])[0] for name in ("straight", "stopped")
    ]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor), name
    # The same, but for roundings
    copies = load_tensors(checkpoint_paths(tmp_path / "copies")[-1])[0]
    assert copies.keys() == states[0].keys()
    for name, tensor in copies.items():
        if name.startswith("model."):
            assert (states[0][name] - tensor).abs().max() < 1e-2, name
