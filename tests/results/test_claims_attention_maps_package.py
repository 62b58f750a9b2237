"""What the chapter finds in the model of the package vanishes when something else is counted.

The small models are left out here: ``test_claims_attention_maps.py`` has their record.
"""

import functools
from dataclasses import replace

import pytest

from annotated_transformer.data.grammar import Pair
from annotated_transformer.results.attention_maps import Maps
from benchmarks.chapters import definitions
from tests import claims

CHAPTER = "results/attention_maps"


@functools.cache
def read_once() -> tuple[dict[str, list[Pair]], dict[str, list[Maps]]]:
    """What the chapter reads of the package's model, for all tests of it."""
    names = definitions(CHAPTER, {"system", "sizes", "drawn"})
    pairs = {s: list(filter(names["one_token_each"], p)) for s, p in names["drawn"].items()}
    return pairs, names["read"](names["system"].model, names["system"].tokenizers, pairs)


READ = f"from {__name__} import read_once\nheld_out, attended = read_once()\n"
SMALL = "tokenizers = learn_tokenizers("  # from here on the chapter is about the small models


def package_only(source: str) -> str:
    """Return what is run of a cell: sentences are drawn, and read, once for all tests."""
    if "held_out = {" in source:
        return READ + source[source.index("resolving =") :]
    return "pass" if "drawn = {" in source else source


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    every = claims.cells(CHAPTER)
    (end,) = (i for i, cell in enumerate(every) if SMALL in cell.source)
    assert sum("held_out = {" in cell.source for cell in every[:end]) == 1
    found = tuple(replace(cell, source=package_only(cell.source)) for cell in every[:end])
    monkeypatch.setattr(claims, "cells", lambda _: found)


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        # the blind rule takes the first noun, or heads look at the wrong keys
        ("A.2", "(it, max(i for", "(it, min(i for"),
        ("A.2", "weights[:, :, rows].argmax", "weights.flip(3)[:, :, rows].argmax"),
        # the key before the first part of the verb
        ("A.1", "min(parts) + 1))", "min(parts)))"),
        # an article and itself
        ("A.3", "(i, next(k for", "(i, i + 0 * next(k for"),
        # a head that is still there, a weight that was not turned
        ("4.h", "part.zero_()", "part.mul_(1)"),
        ("4.h", "+= change", "+= 0 * change"),
    ],
)
def test_the_model_of_the_package_can_fail_a_claim(claim: str, old: str, new: str) -> None:
    claims.assert_claim_can_fail(CHAPTER, claim, old, new)
