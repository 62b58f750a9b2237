"""Measure the speed ladder of the book: from the article's training step to the fastest.

The rungs of ``benchmarks.rungs`` run in turns, each in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from annotated_transformer.engine.records import processor_name
from annotated_transformer.fast.products import choose_products
from annotated_transformer.model.transformer import ModelConfig
from benchmarks.machine import matmul_peak, memory_bandwidth, roofline, seconds_of
from benchmarks.records import keep, origin
from benchmarks.rungs import (
    WORKS,
    Work,
    climb,
    counted_flops,
    needed_flops,
    rungs_for,
    target_tokens,
)
from benchmarks.workers import Worker, reply, resident


def work_of(fields: Mapping[str, Any]) -> Work:
    """Return the work described by a dictionary, as in a record or for a worker."""
    return Work(**{**fields, "config": ModelConfig(**fields["config"])})


def serve(argument: str) -> None:
    """Run one rung: a pass for each line, answered with its seconds; with counts at the end.

    Args:
        argument: JSON with the height, the work, the device and the threads.
    """
    task = json.loads(argument)
    work, device, cuda = work_of(task["work"]), task["device"], task["device"] == "cuda"
    torch.set_num_threads(task["threads"])
    before = resident("VmRSS")
    trainer = climb(rungs_for(device)[: task["height"] + 1], work, device)
    reply("ready")
    for line in sys.stdin:
        if line.strip() == "end":
            break
        if cuda:  # memory goes back to the other rungs after each turn, so it must warm up
            trainer.run()
        reply(seconds_of(trainer.run))
        if cuda:
            torch.cuda.empty_cache()
    memory = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM") - before
    answer = {"memory_bytes": memory, "tokens": target_tokens(trainer.batches)}
    torch.set_num_threads(1)
    reply({**answer, "flops": counted_flops(trainer)})  # last, since counting takes memory


@dataclass(frozen=True)
class Measured:
    """The measurements of one rung.

    Attributes:
        name: Name of the rung.
        what: What the rung changes.
        seconds: Time of each pass, in the order of the rounds.
        tokens: Target tokens in a pass.
        memory_bytes: Peak memory, without the imports.
        flops: Operations in the matrix products of a pass, as counted.
    """

    name: str
    what: str
    seconds: list[float] = field(repr=False)
    tokens: int
    memory_bytes: int
    flops: int

    @property
    def speed(self) -> float:
        """Target tokens per second, from the median pass."""
        return self.tokens / statistics.median(self.seconds)

    def ratio(self, other: Measured) -> float:
        """Return the speedup over ``other``: the median over the rounds."""
        pairs = zip(other.seconds, self.seconds, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def measure_ladder(
    work: Work, *, rounds: int = 5, device: str = "cpu", heights: Sequence[int] | None = None
) -> list[Measured]:
    """Measure rungs of a device, in turns of one pass each.

    Args:
        work: What each rung has to do.
        rounds: Passes of each rung.
        device: ``"cpu"`` or ``"cuda"``.
        heights: Numbers of the rungs among those of the device; all unless given.

    Raises:
        WorkerError: A rung failed.
    """
    rungs = rungs_for(device)
    task = {"work": asdict(work), "device": device, "threads": torch.get_num_threads()}
    with contextlib.ExitStack() as stack:
        workers = {}
        for height in range(len(rungs)) if heights is None else heights:
            argument = json.dumps({**task, "height": height})
            command = ["-m", "benchmarks.ladder", "--work", argument]
            workers[height] = stack.enter_context(Worker(rungs[height].name, command))
        for worker in workers.values():
            worker.answer()
        turns = [[w.ask("pass") for w in workers.values()] for _ in range(rounds + 1)]
        ends = []
        for worker in workers.values():
            ends.append(worker.ask("end"))
            worker.close()  # counting took memory, which the next one needs on a GPU
    times = zip(*turns[1:], strict=True)  # the first round warms up
    return [
        Measured(rungs[height].name, rungs[height].what, list(seconds), **end)
        for height, seconds, end in zip(workers, times, ends, strict=True)
    ]


def make_ladder_record(size: str, *, rounds: int = 5, device: str = "cpu") -> dict[str, Any]:
    """Measure the ladder and the machine; return the fields of the record.

    Args:
        size: A key of ``WORKS``.
        rounds: Passes of each rung.
        device: ``"cpu"`` or ``"cuda"``.
    """
    work = WORKS[size]
    rungs = [asdict(one) for one in measure_ladder(work, rounds=rounds, device=device)]
    if device == "cpu":
        choose_products()
        peaks = {"float32": matmul_peak(device)}
    else:
        sizes = (2048, 4096, 8192)
        peaks = {"float32": matmul_peak(device, sizes=sizes)}
        torch.set_float32_matmul_precision("high")
        peaks["TF32"] = matmul_peak(device, sizes=sizes)
        peaks["bfloat16"] = matmul_peak(device, torch.bfloat16, sizes)
    return {
        "kind": "ladder",
        "size": size,
        "work": asdict(work),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "device": device,
        "peaks": peaks,
        "bandwidth": memory_bandwidth(device, 128 if device == "cpu" else 2048),
        "roofline": roofline(device),
        "needed_flops": needed_flops(work),
        "rungs": rungs,
    }


def show(record: dict[str, Any]) -> None:
    """Print the ladder and the machine's limit."""
    rungs = [Measured(**rung) for rung in record["rungs"]]
    print(f"{'':20}{'tokens/s':>10}{'speed':>8}{'gain':>8}{'MB':>9}{'GFLOP':>9}")
    for below, one in zip([rungs[0], *rungs], rungs, strict=False):
        print(
            f"{one.name:20}{one.speed:10,.0f}{one.ratio(rungs[0]):8.2f}{one.ratio(below):8.2f}"
            f"{one.memory_bytes / 1e6:9,.0f}{one.flops / 1e9:9,.1f}"
        )
    for kind, rate in record["peaks"].items():
        limit = rungs[0].tokens * rate / record["needed_flops"]
        print(f"limit, {kind}: {rate / 1e9:,.0f} GFLOP/s, products alone {limit:,.0f} tokens/s")
    print(f"memory: {record['bandwidth'] / 1e9:,.1f} GB/s")


def main() -> None:
    """Parse the options, measure, print and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description=__doc__)
    parser.add_argument("--size", choices=sorted(WORKS), help="small; on a GPU paper")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each rung")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--record", type=Path, help="write the figures into this JSON file")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        serve(options.work)
        return
    if options.rounds < 1:
        parser.error("at least one round is needed")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here")
    size = options.size or ("paper" if device == "cuda" else "small")
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    record = {
        **origin("benchmarks.ladder"),
        "hardware": {"processor": processor_name(), "gpu": gpu},
        **make_ladder_record(size, rounds=options.rounds, device=device),
    }
    show(record)
    if options.record:
        keep(record, options.record)


if __name__ == "__main__":
    main()
