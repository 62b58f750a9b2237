"""Repeat with several seeds what the chapter on sequences to sequences shows of one.

How many sentences of each length are translated exactly, with one fixed context, with additive
and with dot-product attention, and how often the largest weight is where the grammar aligns? The
sentences are the chapter's, and so is the code: its functions are taken out of its cells. A seed
decides first weights and order. Seeds that the record has already are not measured again.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import json
from pathlib import Path
from typing import Any

import jupytext

from annotated_transformer.background import seq2seq
from annotated_transformer.engine.records import processor
from benchmarks.records import keep, origin

CHAPTER = Path(__file__).parents[1] / "book" / "background" / "seq2seq.md"
VALUES = {"longest", "training", "test", "german", "english", "updates", "every", "kinds"}
KINDS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
LONGER = 3  # times as many updates, for the dot-product form once more


def kept(statement: ast.stmt) -> bool:
    """Whether a statement of the chapter defines something that is needed here."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(part, ast.Name) and part.id in VALUES for part in statement.targets)
    return isinstance(statement, KINDS)


def chapter() -> dict[str, Any]:
    """Return what the chapter's cells define, without training or drawing anything."""
    names: dict[str, Any] = dict(vars(seq2seq))
    flag = __future__.annotations.compiler_flag
    for cell in jupytext.read(CHAPTER).cells:
        skipped = {"export", "remove-cell"} & set(cell.metadata.get("tags", []))
        if cell.cell_type == "code" and not skipped:
            body = [part for part in ast.parse(cell.source).body if kept(part)]
            exec(compile(ast.Module(body, []), str(CHAPTER), "exec", flag), names)
    return names


def measure(names: dict[str, Any], form: str, updates: int, seed: int) -> dict[str, Any]:
    """Train a form; return shares of exact sentences by clauses, and of agreement by words."""
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
    """Return how often the best source word is right, over all test sentences."""
    return round(names["agreement"](choose, known, names["every"]), 4)


def main() -> None:
    """Read the options, measure, print, write the record after each seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0")
    parser.add_argument("--record", type=Path, help="keep the figures in this JSON file")
    options = parser.parse_args()
    names = chapter()
    forms = {form: (form, count) for form, count in names["updates"].items()}
    forms["dot, longer"] = ("dot", LONGER * names["updates"]["dot"])
    runs: dict[str, Any] = {}
    if options.record and options.record.exists():
        runs = json.loads(options.record.read_text(encoding="utf-8"))["runs"]
    for seed in range(options.seeds):
        if str(seed) in runs:
            continue
        runs[str(seed)] = {name: measure(names, *form, seed) for name, form in forms.items()}
        print(seed, json.dumps(runs[str(seed)]), flush=True)
        if options.record:
            record = {
                **origin("benchmarks.lengths"),
                "hardware": processor(),
                "updates": {name: count for name, (_, count) in forms.items()},
                "diagonal": {
                    kind: agreement(names, names["diagonal"], known)
                    for kind, known in names["kinds"].items()
                },
                "runs": runs,
            }
            keep(record, options.record)


if __name__ == "__main__":
    main()
