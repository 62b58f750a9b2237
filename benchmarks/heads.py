"""Repeat with several seeds what the chapter on attention maps shows of one model.

By how much does a head beat its baselines at each task that the grammar knows the answers of? And
what does the model lose without the head that pronouns need most? The code is the chapter's. A
seed decides first weights and order. Seeds that the record has already are not measured again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from annotated_transformer.engine.records import processor
from annotated_transformer.fast.products import keep_large_blocks, limit_kernels
from benchmarks.chapters import definitions
from benchmarks.records import keep, origin

CHAPTER = "results/attention_maps"
VALUES = {
    *("options", "text", "tokenizers", "config", "encoded", "sizes", "drawn", "pairs", "unseen"),
    *("Finding", "Head", "DISTANCES", "NOUNS", "ARTICLES", "blocks"),
}


def main() -> None:
    """Read the options, measure, print, write the record after each seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="how many, from 0")
    parser.add_argument("--record", type=Path, help="keep the figures in this JSON file")
    options = parser.parse_args()
    runs = {}
    if options.record and options.record.exists():
        runs = json.loads(options.record.read_text(encoding="utf-8"))["runs"]
    torch.set_num_threads(1)
    names = definitions(CHAPTER, VALUES)
    limit_kernels()
    keep_large_blocks()
    for seed in range(options.seeds):
        if str(seed) in runs:
            continue
        print(f"seed {seed} of {options.seeds} ...", flush=True)
        runs[str(seed)] = names["findings"](seed)
        print(json.dumps(runs[str(seed)]), flush=True)
        if options.record:
            place = {"hardware": processor(), "updates": names["options"].optim.updates}
            keep({**origin("benchmarks.heads"), **place, "runs": runs}, options.record)


if __name__ == "__main__":
    main()
