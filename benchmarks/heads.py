"""Repeat the experiments of the chapter on attention maps with several seeds.

By how much does a head beat its baselines at each task whose answers the grammar knows? And what
does the model lose without the head that pronouns need most? The code is the chapter's. A seed
sets the initial weights and the order of the data. Seeds already in the record are not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from annotated_transformer.engine.records import processor_name
from annotated_transformer.fast.products import keep_large_blocks, limit_kernels
from benchmarks.chapters import definitions
from benchmarks.records import keep, kept_runs, origin

CHAPTER = "results/attention_maps"
VALUES = {
    *("options", "text", "tokenizers", "config", "encoded", "sizes", "drawn", "pairs", "unseen"),
    *("Finding", "Head", "DISTANCES", "NOUNS", "ARTICLES", "blocks"),
}


def main() -> None:
    """Parse the options, measure, print, and write the record after each seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds, from 0")
    parser.add_argument("--record", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = definitions(CHAPTER, VALUES)
    updates = names["options"].optim.updates
    runs = kept_runs(parser, options.record, updates)
    limit_kernels()
    keep_large_blocks()
    for seed in range(options.seeds):
        if str(seed) in runs:
            continue
        print(f"seed {seed} of {options.seeds} ...", flush=True)
        runs[str(seed)] = names["findings"](seed)
        print(json.dumps(runs[str(seed)]), flush=True)
        if options.record:
            place = {"hardware": processor_name(), "updates": updates}
            keep({**origin("benchmarks.heads"), **place, "runs": runs}, options.record)


if __name__ == "__main__":
    main()
