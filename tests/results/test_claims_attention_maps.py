"""The checks of the chapter notice heads that do something else.

Training takes too long here: random weights take the place of the model's, with heads planted
that look where the claims say. The chapter itself runs the checks on a trained model.
"""

import functools
from dataclasses import replace

import pytest
import torch

from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.results.attention_maps import (
    BEHAVIOURS,
    Maps,
    Part,
    antecedents,
    article_nouns,
    articles,
    brackets,
    pronouns,
    translations,
)
from tests import claims

CHAPTER = "results/attention_maps"
PLANTED = {  # of eight heads
    ("encoder", 3): [antecedents],
    ("decoder", 1): [brackets],
    ("cross", 2): [translations],
    ("cross", 6): [article_nouns, pronouns],
}


def looked_at(pairs, planted, seed=0):
    """Maps of a model whose heads look where they should, nine times in ten."""
    chance = torch.Generator().manual_seed(seed)
    every = []
    for pair in pairs:
        source, target = (*pair.english, "</s>"), ("<s>", *pair.german)
        sizes: dict[Part, tuple[int, int]] = {
            "encoder": (len(source), len(source)),
            "decoder": (len(target), len(target)),
            "cross": (len(target), len(source)),
        }
        weights = {part: torch.rand(8, *size, generator=chance) for part, size in sizes.items()}
        weights["decoder"] += torch.full(sizes["decoder"], -9.0).triu(1)
        for (part, head), tasks in planted.items():
            for links in tasks:
                for row, column in links(pair):
                    weights[part][head, row, column] += 2 * (torch.rand((), generator=chance) < 0.9)
        shaped = {part: w.softmax(-1).unflatten(0, (2, 4)) for part, w in weights.items()}
        every.append(Maps(source, target, shaped))
    return every


@functools.cache
def planted():
    pairs = {split: grammar_pairs(split, size) for split, size in (("val", 150), ("test", 300))}
    seen = {split: looked_at(pairs[split], PLANTED) for split in pairs}
    unseen = {split: looked_at(pairs[split], {}, seed=1) for split in pairs}
    return pairs, seen, unseen


INSTEAD = {  # a cell that holds the first is replaced by the second
    "tokenizers = learn_tokenizers(": "config = replace(tiny, N=2, h=4)",
    "losses = [": "pass",
    "seen = {split: look_at": f"from {__name__} import planted\npairs, seen, unseen = planted()",
    "those = [": "pass",
    "def right_words": "pass",
    "whole = right_words()": """
whole = (0.95, 0.98)
without = {(part, i, j): (0.94, 0.97) for part in PLACES for i in range(2) for j in range(4)}
without["cross", 1, 2] = (0.6, 0.95)
""",
}


def stand_in(source):
    """Return what is run in the place of a cell: neither training nor drawing."""
    found = [new for old, new in INSTEAD.items() if old in source]
    assert len(found) <= 1
    return "pass" if "show(" in source or "live(" in source else (*found, source)[0]


@pytest.fixture(autouse=True)
def untrained(monkeypatch):
    every = claims.cells(CHAPTER)
    assert all(sum(old in cell.source for cell in every) == 1 for old in INSTEAD)
    found = tuple(replace(cell, source=stand_in(cell.source)) for cell in every)
    monkeypatch.setattr(claims, "cells", lambda _: found)


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        # the model before its training
        ("A.1", "trained = of(seen, part)", "trained = of(unseen, part)"),
        ("A.2", "trained = of(seen, part)", "trained = of(unseen, part)"),
        ("A.3", "trained = of(seen, part)", "trained = of(unseen, part)"),
        # keys are shuffled
        ("A.2", "weights[:, :, rows].argmax", "weights.flip(3)[:, :, rows].argmax"),
        # the row that reads a word, and not the one that chooses it
        ("A.1", "weights[:, :, rows].argmax", "weights.roll(-1, 2)[:, :, rows].argmax"),
        ("A.3", "weights[:, :, rows].argmax", "weights.roll(-1, 2)[:, :, rows].argmax"),
        # the key before the first part of the verb
        ("A.1", "min(parts) + 1))", "min(parts)))"),
        # no record of a long run
        ("A.1", "folder = find_records()", "folder = None"),
        # two heads that do the same
        ("A.3", "agreeing, shares = agreement", "agreeing, shares = translator, agreement[1]"),
        # no head is needed
        ("4.h", "needed = max(lost", "needed = min(lost"),
        # heads of an untrained model
        ("4.h", "trained = of(seen, part)", "trained = of(unseen, part)"),
    ],
)
def test_broken_heads_are_noticed(claim, old, new):
    claims.assert_claim_can_fail(CHAPTER, claim, old, new)


def test_planted_tasks_are_known():
    assert {task for tasks in PLANTED.values() for task in tasks} <= set(BEHAVIOURS.values())
    assert articles in BEHAVIOURS.values()
