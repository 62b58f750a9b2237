"""Rehearse the runs on WMT 2014, command by command, on generated text of its shape.

The corpus of section 5.1 is not available everywhere, and a run on it needs a GPU. What can go
wrong in such a run shows on a small scale: 100,000 generated pairs are prepared, the paper's base
model is trained on them in two processes, killed in the middle without warning and resumed; its
last checkpoints are averaged, and it translates and is scored with compounds split, as in Table 2.
The translations are worthless. The rehearsal checks that every command accepts the output of the
one before it, and measures how long each takes. For the paper's runs, the time on current GPUs is
computed from the operations of their matrix products.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from annotated_transformer.cli.output import check_target
from annotated_transformer.engine.checkpointer import checkpoint_paths
from annotated_transformer.engine.config import UsageError, load_recipe
from annotated_transformer.engine.devices import DEVICES
from annotated_transformer.engine.journal import read_journal
from annotated_transformer.engine.records import processor_name
from annotated_transformer.model.complexity import training_flops
from annotated_transformer.model.transformer import PRESETS
from benchmarks.prepare import write_corpus
from benchmarks.records import keep, origin

PACKAGE = [sys.executable, "-m", "annotated_transformer"]
RECIPES = ("paper-base-en-de", "paper-big-en-de", "paper-base-en-fr", "paper-big-en-fr")
GPUS = ("A100 80GB SXM", "H100 SXM", "H200 SXM")
SHARES = {"base": 0.10, "big": 0.21}  # of an H200's peak that our steps reached: step-gpu.json
LENGTH = 28  # tokens of a sentence of news, for the operations of attention
TESTED, VALID = 20, 100  # sentences to translate, and to validate on


class RehearsalError(RuntimeError):
    """A command failed; the message has its last lines."""


def last_words(said: str) -> str:
    """Return the error lines of a command's output, or its last lines."""
    ours = [line for line in said.splitlines() if line.startswith("annotated-transformer:")]
    return "\n".join(ours) or said[-2000:]


def run(command: list[str], name: str) -> tuple[float, str]:
    """Run a command to its end; return its seconds and its output."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RehearsalError(f"{name}: exit status {done.returncode}\n{last_words(done.stderr)}")
    return time.perf_counter() - start, done.stdout + done.stderr


def updates_made(folder: Path) -> int:
    """Return the number of updates in the log of a run, even while it is being written."""
    log = folder / "log.jsonl"
    entries = read_journal(log) if log.exists() else []
    return max((int(entry["update"]) for entry in entries), default=0)


def updates_saved(folder: Path) -> int:
    """Return from which update a run can resume.

    Raises:
        RehearsalError: From none: the run would begin again.
    """
    saved = checkpoint_paths(folder)
    if not saved:
        raise RehearsalError("train: killed before its first checkpoint; raise --updates")
    return int(saved[-1].stem)


def family(parent: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [parent]
    for pid in found:
        with contextlib.suppress(OSError):  # it has just ended
            for thread in (Path("/proc") / str(pid) / "task").iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def kill_at(command: list[str], folder: Path, updates: int, patience: float) -> float:
    """Start training, kill all its processes after some updates, and return the seconds.

    Raises:
        RehearsalError: If it ended by itself, or did not get that far in ``patience`` seconds.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, stderr=output, stdout=output)
        try:
            while updates_made(folder) < updates:
                if process.poll() is not None or time.perf_counter() - start > patience:
                    output.seek(0)
                    raise RehearsalError(f"train: not to be killed\n{last_words(output.read())}")
                time.sleep(0.2)
        finally:
            for pid in family(process.pid):  # each worker has a session of its own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    return time.perf_counter() - start


def commands(folder: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """Return all commands in order, as a user types them."""
    text, prepared, system = folder / "text", folder / "wmt", folder / "run"
    train, valid = ([str(text / f"{s}.{x}") for x in ("en", "de")] for s in ("train", "valid"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    fit = ["--recipe", "paper-base-en-de", "--prepared", str(prepared), "--out", str(system)]
    fit += ["--preset", options.preset, "--updates", str(options.updates), "--accumulate", "1"]
    fit += ["--max-tokens", str(options.max_tokens), "--average", "5"]
    fit += ["--average-every", str(max(1, options.updates // 10))]
    fit += ["--save-every", "5", "--log-every", "1", "--quiet"]
    return {
        "prepare": [
            *[*PACKAGE, "prepare", str(prepared), "--train-files", *train],
            *["--valid-files", *valid, "--pair", "en-de", "--quiet"],
            *["--vocabulary", str(options.vocabulary)],
        ],
        "train": [*launch, "-m", "annotated_transformer", "train", *fit],
        "average": [*PACKAGE, "average", str(system), "--last", "5"],
        "translate": [
            *[*PACKAGE, "translate", str(system), str(folder / "test.en")],
            *["-o", str(folder / "found.de"), "--averaged", "--quiet"],
        ],
        "evaluate": [
            *[*PACKAGE, "evaluate", "--hypotheses", str(folder / "found.de")],
            *["--references", str(folder / "test.de"), "--language", "de", "--protocols"],
        ],
    }


def score_of(said: str) -> float:
    """Return BLEU with compounds split, from what ``evaluate --protocols`` says.

    Raises:
        RehearsalError: It is not there.
    """
    found = re.search(r"^ *([\d.]+) +tokenised, compounds split$", said, re.MULTILINE)
    if found is None:
        raise RehearsalError(f"evaluate: no score with compounds split\n{said}")
    return float(found[1])


def rehearse(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run all commands; return the seconds of each, and the results."""
    text, system = folder / "text", folder / "run"
    text.mkdir()
    write_corpus(text, options.pairs)
    sides = [(text / f"valid.{x}").read_text(encoding="utf-8").splitlines() for x in ("en", "de")]
    fit = [pair for pair in zip(*sides, strict=True) if all(0 < len(line) < 200 for line in pair)]
    for side, name in enumerate(("en", "de")):
        lines = [pair[side] + "\n" for pair in fit[:VALID]]
        (text / f"valid.{name}").write_text("".join(lines), encoding="utf-8")
        (folder / f"test.{name}").write_text("".join(lines[:TESTED]), encoding="utf-8")
    seconds: dict[str, float] = {}
    said: dict[str, str] = {}
    all_commands = commands(folder, options)
    for name, command in all_commands.items():
        if name == "train":
            at = options.updates // 2
            seconds["train, killed"] = kill_at(command, system, at, options.patience)
            resumed = updates_saved(system)
        before = updates_made(system)
        seconds[name], said[name] = run(command, name)
        if name == "train" and not before < updates_made(system) == options.updates:
            raise RehearsalError(f"train: {updates_made(system)} updates, {options.updates} wanted")
    words = {name: " ".join(command) for name, command in all_commands.items()}
    hidden = [(str(folder), "FOLDER"), (sys.executable, "python")]
    for place, instead in hidden:
        words = {name: line.replace(place, instead) for name, line in words.items()}
    return {
        "commands": words,
        "seconds": {name: round(one, 1) for name, one in seconds.items()},
        "updates_before_resuming": resumed,
        "bleu_compounds_split": score_of(said["evaluate"]),
    }


def expected(recipe: str) -> dict[str, Any]:
    """Return the operations of a run of the paper, and GPU hours at the share in :data:`SHARES`.

    Precision is bfloat16. That other GPUs reach the H200's share is an assumption.
    """
    options = load_recipe(recipe)
    optim = options.optim
    tokens = optim.updates * optim.accumulate * optim.max_tokens
    pair = training_flops(
        PRESETS[options.model.preset], options.data.vocabulary, [LENGTH], [LENGTH]
    )
    flops = tokens / LENGTH * pair
    peaks = {gpu: DEVICES[gpu].teraflops["bfloat16"] * 1e12 for gpu in GPUS}
    share = SHARES[options.model.preset]
    hours = {gpu: round(flops / (share * peak) / 3600, 1) for gpu, peak in peaks.items()}
    return {"updates": optim.updates, "flops": flops, "gpu_hours": hours, "share_of_peak": share}


def main() -> None:
    """Parse the options, rehearse, print and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsal", description=__doc__)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--vocabulary", type=int, default=37_000)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=512, help="of a batch of each process")
    parser.add_argument("--preset", default="base", help="sizes of the model")
    parser.add_argument("--patience", type=float, default=3600, help="seconds until it is killed")
    parser.add_argument("--folder", type=Path, help="to work in; a temporary one unless given")
    parser.add_argument("--record", type=Path, help="write the figures into this JSON file")
    options = parser.parse_args()
    try:
        check_target("--record", options.record)
        folder = Path(tempfile.mkdtemp(dir=options.folder))
    except (UsageError, OSError) as error:
        parser.error(str(error))
    try:
        found = rehearse(folder, options)
    finally:
        shutil.rmtree(folder)
    record = {
        "kind": "rehearsal",
        **origin("benchmarks.rehearsal"),
        "hardware": {"processor": processor_name()},
        "pairs": options.pairs,
        **found,
    }
    for name, one in record["seconds"].items():
        print(f"{name:16} {one:8.1f} s")
    for recipe in RECIPES:  # not kept: another measurement on a GPU would change it
        one = expected(recipe)
        hours = ", ".join(f"{gpu} {h} h" for gpu, h in one["gpu_hours"].items())
        share = f"{one['share_of_peak']:.0%} of the peak"
        print(f"{recipe:18} {one['flops']:.2g} operations: {hours} (at {share})")
    if options.record:
        keep(record, options.record)


if __name__ == "__main__":
    main()
