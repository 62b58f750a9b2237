"""Repeat the experiments of the chapter on sequence-to-sequence models with several seeds.

How many sentences of each length are translated exactly, with one fixed context, with additive
and with dot-product attention, and how often the largest weight is where the grammar aligns? The
sentences are the chapter's, and so is the code: its functions are taken out of its cells. A seed
sets initial weights and order. Seeds that are already in the record are not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from annotated_transformer.engine.records import processor_name
from benchmarks.chapters import definitions
from benchmarks.records import keep, kept_runs, origin

VALUES = {"longest", "training", "test", "german", "english", "updates", "every", "kinds"}
LONGER = 3  # times as many updates, for the dot-product form once more


def measure(names: dict[str, Any], form: str, updates: int, seed: int) -> dict[str, Any]:
    """Train a variant; return exact match by clauses, and alignment accuracy by words."""
    model = names["train"](form, updates, seed)
    test = {**names["test"], 5: names["chains"]("test", [5], size=40, seed=5)}
    found: dict[str, Any] = {
        "exact": {str(k): round(names["exact"](model, pairs), 4) for k, pairs in test.items()}
    }
    if form != "none":
        found["agreement"] = {
            kind: agreement(names, lambda pair: names["weights_of"](model, pair), known)
            for kind, known in names["kinds"].items()
        }
    return found


def agreement(names: dict[str, Any], choose: Any, known: Any) -> float:
    """Return how often the source word with the largest weight is right, on the test set."""
    share: float = names["agreement"](choose, known, names["every"])
    return round(share, 4)


def main() -> None:
    """Parse the options, measure, print, and write the record after each seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0")
    parser.add_argument("--record", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    names = definitions("background/seq2seq", VALUES)
    forms = {form: (form, count) for form, count in names["updates"].items()}
    forms["dot, longer"] = ("dot", LONGER * names["updates"]["dot"])
    counts = {name: count for name, (_, count) in forms.items()}
    runs = kept_runs(parser, options.record, counts)
    for seed in range(options.seeds):
        if str(seed) in runs:
            continue
        runs[str(seed)] = {name: measure(names, *form, seed) for name, form in forms.items()}
        print(seed, json.dumps(runs[str(seed)]), flush=True)
        if options.record:
            record = {
                **origin("benchmarks.lengths"),
                "hardware": processor_name(),
                "updates": counts,
                "diagonal": {
                    kind: agreement(names, names["diagonal"], known)
                    for kind, known in names["kinds"].items()
                },
                "runs": runs,
            }
            keep(record, options.record)


if __name__ == "__main__":
    main()
