"""Compare the speed of this commit with that of an older one, given as a checkout.

Each job runs in two processes, one with the older package and one with this one. They take turns,
so that a busy machine slows both down equally.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from annotated_transformer.engine.records import processor_name
from benchmarks.records import keep, origin
from benchmarks.workers import ROOT, Worker, WorkerError

JOBS = {
    "small": "a training step: N 3, d 256, vocabulary 8,000, 64 pairs",
    "base": "a training step of the base model, 74 pairs",
    "greedy": "greedy search with the base model, 32 sentences",
    "beam": "beam search with the base model, 4 hypotheses of 32 sentences",
    "one": "greedy search with the base model, one sentence",
}


def start(name: str, job: str, folder: Path) -> Worker:
    """Start a job with the package in a folder.

    Raises:
        WorkerError: If the process failed, or imported the package from elsewhere.
    """
    worker = Worker(f"{job}, {name}", [str(ROOT / "benchmarks" / "jobs.py"), job], folder)
    try:
        found = Path(worker.answer())
        if folder not in found.parents:
            raise WorkerError(f"{job}: the package is {found.parent}, not that in {folder}")
        worker.answer()
    except BaseException:
        worker.close()
        raise
    return worker


def measure(job: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Run a job with both packages in turns.

    Returns:
        Seconds and peak memory of each; and ``now`` over ``before`` of the ``median`` and the
        ``best`` of the times, and of ``memory``.
    """
    with start("before", job, folder) as before, start("now", job, ROOT) as now:
        pairs = [(before.ask("go"), now.ask("go")) for _ in range(rounds)]
        memory = before.peak_memory, now.peak_memory
    old, new = ([pair[i] for pair in pairs] for i in (0, 1))
    return {
        "what": JOBS[job],
        "seconds": {"before": old, "now": new},
        "peak_bytes": {"before": memory[0], "now": memory[1]},
        "median": statistics.median(new) / statistics.median(old),
        "best": min(new) / min(old),
        "memory": memory[1] / memory[0] if memory[0] else None,
    }


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, or ``unknown``."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main(words: Sequence[str] | None = None) -> None:
    """Parse the options, measure, print and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks before", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of the older commit")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=[*JOBS], help="all unless given")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each")
    parser.add_argument("--record", type=Path, help="write the figures into this JSON file")
    options = parser.parse_args(words)
    folder = options.folder.resolve()
    if not (folder / "annotated_transformer" / "__init__.py").is_file():
        parser.error(f"{options.folder}: no checkout of the package; git worktree add makes one")
    if options.rounds < 1:
        parser.error("at least one round is needed")
    found = {}
    print(f"{'now, before = 1':16}{'median':>8}{'best':>8}{'memory':>8}")
    for job in options.jobs:
        try:
            row = found[job] = measure(job, folder, options.rounds)
        except WorkerError as error:
            raise SystemExit(str(error)) from None
        print(
            f"{job:16}{row['median']:8.3f}{row['best']:8.3f}{row['memory'] or 0:8.3f}", flush=True
        )
        if options.record:
            record = {
                "kind": "before",
                **origin("benchmarks"),
                "hardware": {"processor": processor_name(), "threads": torch.get_num_threads()},
                "before": commit_of(folder),
                "rounds": options.rounds,
                "jobs": found,
            }
            keep(record, options.record)


if __name__ == "__main__":
    main()
