"""Measure the speed ladder of the book: from the article's training step to the fastest.

The rungs are those of the chapter *The speed ladder*, each in a process of its own, in turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from annotated_transformer.engineering.speed import (
    WORKS,
    make_ladder_record,
    measured_rungs,
)
from annotated_transformer.translation.system import processor
from benchmarks.records import keep, origin


def show(record: dict[str, Any]) -> None:
    """Print the ladder, and the limit of the machine."""
    rungs = measured_rungs(record)
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
    """Read the options, measure, print, write a record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description=__doc__)
    parser.add_argument("--size", choices=sorted(WORKS), help="small; on a GPU paper")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each rung")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--record", type=Path, help="write the figures into this JSON file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("at least one round is needed")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here")
    size = options.size or ("paper" if device == "cuda" else "small")
    record = {
        **origin("benchmarks.ladder"),
        "hardware": {
            "processor": processor(),
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        },
        **make_ladder_record(size, rounds=options.rounds, device=device),
    }
    show(record)
    if options.record:
        keep(record, options.record)


if __name__ == "__main__":
    main()
