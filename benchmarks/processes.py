"""Compare one process with two threads, two processes with one each, and bfloat16, in training.

The three setups take turns of a few updates, so that a busy machine slows all of them down
equally. Weights and sentences are those of the other benchmarks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from annotated_transformer.engine.precision import PreciseLoss, Precision
from annotated_transformer.engine.processes import process_group
from annotated_transformer.engine.records import processor_name
from annotated_transformer.fast.products import prepare_cpu
from annotated_transformer.model.transformer import build_model
from annotated_transformer.training.distributed import local_batches, replica_loss, replicate
from annotated_transformer.training.loop import update
from annotated_transformer.training.optimizer import make_adam
from benchmarks.contenders import SIZES, make_pairs
from benchmarks.machine import seconds_of
from benchmarks.records import keep, origin

WAYS = {  # processes, threads of each, precision
    "one process, two threads": (1, 2, "float32"),
    "two processes, one thread each": (2, 1, "float32"),
    "one process, two threads, bfloat16": (1, 2, "bfloat16"),
}


def work(name: str, precision: str, updates: int) -> None:
    """Make some updates, and print their median time in seconds; run by each process."""
    size = SIZES[name]
    with process_group() as world:
        prepare_cpu()
        torch.manual_seed(0)
        model = build_model(size.vocabulary, size.vocabulary, size.config)
        loss = PreciseLoss(model, Precision(precision))  # type: ignore[arg-type]
        replica = replicate(loss, world)
        optimizer, batch = make_adam(model, lr=1e-4), make_pairs(size)

        def step() -> None:
            shares = local_batches([batch], lambda one: one, world)
            update(replica, shares, optimizer, smoothing=0.1, loss=replica_loss, world=world)

        times = [seconds_of(step) for _ in range(updates + 2)]
        if world.main:
            print(statistics.median(times[2:]))


def turn(size: str, way: str, updates: int) -> float:
    """Run one setup in processes of its own; return the seconds per update."""
    processes, threads, precision = WAYS[way]
    inner = ["-m", "benchmarks.processes", "--work", size, precision, str(updates)]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    words = [*launch, *inner] if processes > 1 else inner
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    """Parse the options, measure, print and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--updates", type=int, default=8, help="updates of each turn")
    parser.add_argument("--record", type=Path, help="write the figures into this JSON file")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work[0], options.work[1], int(options.work[2]))
        return
    found = {}
    for size in SIZES:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.turns):
            for way, each in times.items():
                each.append(turn(size, way, options.updates))
        medians = {way: statistics.median(each) for way, each in times.items()}
        first = medians[next(iter(WAYS))]
        found[size] = {way: round(seconds, 4) for way, seconds in medians.items()}
        for way, seconds in medians.items():
            print(f"{size:6} {way:36} {seconds:7.3f} s, {first / seconds:.2f} x", flush=True)
    if options.record:
        record = {
            "kind": "processes",
            **origin("benchmarks.processes"),
            "hardware": {"processor": processor_name()},
            "seconds": found,
        }
        keep(record, options.record)


if __name__ == "__main__":
    main()
