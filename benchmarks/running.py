"""Let recurrent translators learn the book's grammar, and translate the running sentence.

One form keeps the source in a vector of fixed size, the other has additive attention. The code
is that of the chapter on sequences to sequences, taken out of its cells; only the sentences are
others: all that the grammar writes for training. Tokens are words. A seed decides initial weights
and order. Seeds that the record has already are not measured again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.engine.records import processor
from annotated_transformer.pretrained import RUNNING
from benchmarks.chapters import definitions
from benchmarks.records import keep, origin

FORMS = ("none", "additive")


def prepared() -> dict[str, Any]:
    """Return what the chapter defines, with the grammar's sentences and words for its own."""
    names = definitions("background/seq2seq")
    names["training"] = list(grammar_pairs("train"))
    for language in ("german", "english"):
        sentences = [getattr(pair, language) for pair in names["training"]]
        names[language] = names["vocabulary"](sentences)
    return names


def measure(names: dict[str, Any], form: str, updates: int, seed: int) -> dict[str, Any]:
    """Train a form; return its share of exact sentences, and what it does with the running one."""
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
    """Read the options, measure, print, write the record after each seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.running", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0")
    parser.add_argument("--updates", type=int, default=2000, help="of each model")
    parser.add_argument("--record", type=Path, help="keep the figures in this JSON file")
    options = parser.parse_args()
    names = prepared()
    runs: dict[str, Any] = {}
    if options.record and options.record.exists():
        runs = json.loads(options.record.read_text(encoding="utf-8"))["runs"]
    for seed in range(options.seeds):
        if str(seed) in runs:
            continue
        runs[str(seed)] = {form: measure(names, form, options.updates, seed) for form in FORMS}
        print(seed, json.dumps(runs[str(seed)], ensure_ascii=False), flush=True)
        if options.record:
            record = {
                **origin("benchmarks.running"),
                "hardware": processor(),
                "updates": options.updates,
                "source": RUNNING.german,
                "target": RUNNING.english,
                "runs": runs,
            }
            keep(record, options.record)


if __name__ == "__main__":
    main()
