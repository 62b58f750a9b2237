"""What a parser without a network reaches on the Penn sample: two baselines of Table 4.

*Right-branching* knows no sentence: every tree goes down to the right, its last mark outside. The
*PCFG* is induced from the training trees, see ``benchmarks.pcfg``; how much its labels remember
is chosen on the validation split. Both are scored on the test split as the parsers are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.data.records import RecordError, read_record
from annotated_transformer.engine.parser import Parse, score_parses
from annotated_transformer.engine.records import processor_name, source_commit
from annotated_transformer.engine.treebanks import load_treebank
from annotated_transformer.results.parsing import Tree, delinearize, leaves
from benchmarks.pcfg import Chart, Grammar, Options
from benchmarks.records import keep, origin

LABELS = ("S", "NP", "VP", "PP")  # of a right-branching tree's inner nodes, to choose from
CHOICES = tuple(Options(parents, siblings) for parents in (1, 2) for siblings in (1, 2))
ENDS = {".", "?", "!", "''", "-RRB-"}  # what stands outside, at the end
Parser = Callable[[list[str]], Tree | None]


def right_branching(words: Sequence[str], label: str) -> Tree:
    """Return a tree that goes down to the right, with its last marks directly below the root."""
    inner = len(words)
    while inner > 1 and words[inner - 1] in ENDS:
        inner -= 1
    nodes = [Tree("XX", (word,)) for word in words]
    tree = nodes[inner - 1]
    for node in reversed(nodes[1 : inner - 1]):
        tree = Tree(label, (node, tree))
    below = nodes[:1] if inner == 1 else [nodes[0], tree]
    return Tree("S", (*below, *nodes[inner:]))


def score(parser: Parser, golds: Sequence[Tree]) -> dict[str, Any]:
    """Score a parser; where it finds no tree, the tree is right-branching."""
    start, failed, parses = time.perf_counter(), 0, []
    for gold in golds:
        words = leaves(gold)
        tree = parser(words)
        failed += tree is None
        parses.append(Parse(right_branching(words, "VP") if tree is None else tree, [], True))
    seconds = round(time.perf_counter() - start, 1)
    found = score_parses(golds, parses)
    del found["well_formed"]  # they cannot be otherwise
    return {"seconds": seconds, "failed": failed, **found}


def pcfg(trees: Sequence[Tree], options: Options) -> Parser:
    """Return the parser of a grammar induced from trees."""
    grammar = Grammar(trees, options)
    return lambda words: Chart(grammar, words).tree()


def best(parsers: dict[str, Parser], valid: Sequence[Tree]) -> tuple[str, dict[str, float]]:
    """Return the name of the parser with the highest F1 on the validation split, and all F1."""
    found = {name: score(parser, valid)["f1"] for name, parser in parsers.items()}
    print(json.dumps(found), flush=True)
    return max(found, key=lambda name: found[name]), found


def trees_of(text: ParallelText) -> list[Tree]:
    """Return the trees of a split."""
    return [delinearize(line.split(), source.split()) for source, line in text]


def baselines(
    train: Sequence[Tree], sizes: Sequence[int]
) -> dict[str, Callable[[], dict[str, Parser]]]:
    """Return, for each row of the record, what makes the parsers to choose from."""

    def branching() -> dict[str, Parser]:
        return {
            label: lambda words, label=label: right_branching(words, label)  # type: ignore[misc]
            for label in LABELS
        }

    def grammars(size: int) -> dict[str, Parser]:
        return {
            f"parents {each.parents}, siblings {each.siblings}": pcfg(train[:size], each)
            for each in CHOICES
        }

    rows: dict[str, Callable[[], dict[str, Parser]]] = {
        "right_branching": branching,
        "pcfg": lambda: grammars(len(train)),
    }
    for size in sizes:
        rows[f"pcfg_{size}"] = lambda size=size: grammars(size)  # type: ignore[misc]
    return rows


def main() -> None:
    """Read the options, score the rows that the record lacks, and write it after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.treebank", description=__doc__)
    parser.add_argument("--mirror", type=Path, help="folder with ptb/treebank.zip")
    parser.add_argument("--sizes", type=int, nargs="*", default=[], help="fewer training trees")
    parser.add_argument("--record", type=Path, help="keep the figures in this JSON file")
    options = parser.parse_args()
    texts = {
        split: load_treebank("treebank", split=split, mirror=options.mirror)
        for split in ("train", "val", "test")
    }
    train, valid, test = (trees_of(text) for text in texts.values())
    if wrong := [size for size in options.sizes if not 0 < size < len(train)]:
        parser.error(f"--sizes {wrong[0]}: must be at least 1 and below {len(train)}")
    rows: dict[str, Any] = {}
    if options.record and options.record.exists():
        try:
            rows = read_record(options.record, ["rows"])["rows"]
        except RecordError as error:
            parser.error(f"--record {error}; name another")
    for row, make in baselines(train, options.sizes).items():
        if row in rows:
            continue
        parsers = make()
        name, found = best(parsers, valid)
        commit, scored = source_commit(), score(parsers[name], test)
        rows[row] = {"chosen": name, "valid_f1": found, "test": scored, "commit": commit}
        print(row, name, rows[row]["test"]["f1"], flush=True)
        if options.record:
            corpus = {name: len(text) for name, text in texts.items()}
            place = {"kind": "parsing-baselines", "hardware": processor_name(), "corpus": corpus}
            keep({**origin("benchmarks.treebank"), **place, "rows": rows}, options.record)


if __name__ == "__main__":
    main()
