"""Train recurrent translators on the book's grammar, and translate the running sentence.

One variant keeps the source in a vector of fixed size, the other has additive attention. The code
is taken from the cells of the chapter on sequence-to-sequence models; only the sentences differ:
all that the grammar generates for training. Tokens are words. A seed sets the initial weights and
the order of the data. Seeds that are already in the record are not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.engine.records import processor_name
from annotated_transformer.pretrained import RUNNING
from benchmarks.chapters import definitions
from benchmarks.records import keep, kept_runs, origin

FORMS = ("none", "additive")


def prepared() -> dict[str, Any]:
    """Return the chapter's definitions, but with the grammar's sentences and words."""
    names = definitions("background/seq2seq")
    names["training"] = list(grammar_pairs("train"))
    for language in ("german", "english"):
        sentences = [getattr(pair, language) for pair in names["training"]]
        names[language] = names["vocabulary"](sentences)
    return names


def measure(names: dict[str, Any], form: str, updates: int, seed: int) -> dict[str, Any]:
    """Train a variant; return its exact match, and its translation of the running sentence."""
    model = names["train"](form, updates, seed)
    source, _, _ = names["batch"]([RUNNING])
    words, (output,) = list(names["english"]), names["greedy"](model, source, most=30).tolist()
    found: dict[str, Any] = {
        "exact": round(names["exact"](model, list(grammar_pairs("test", 500))), 4),
        "translation": " ".join(words[i] for i in output if words[i] not in ("<pad>", "</s>")),
    }
    if form != "none":
        found["weights"] = [
            [round(w, 4) for w in row] for row in names["weights_of"](model, RUNNING).tolist()
        ]
    return found


def main() -> None:
    """Parse the options, measure, print, and write the record after each seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.running", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0")
    parser.add_argument("--updates", type=int, default=2000, help="updates of each model")
    parser.add_argument("--record", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    names = prepared()
    runs = kept_runs(parser, options.record, options.updates)
    for seed in range(options.seeds):
        if str(seed) in runs:
            continue
        runs[str(seed)] = {form: measure(names, form, options.updates, seed) for form in FORMS}
        print(seed, json.dumps(runs[str(seed)], ensure_ascii=False), flush=True)
        if options.record:
            record = {
                **origin("benchmarks.running"),
                "hardware": processor_name(),
                "updates": options.updates,
                "source": RUNNING.german,
                "target": RUNNING.english,
                "runs": runs,
            }
            keep(record, options.record)


if __name__ == "__main__":
    main()
