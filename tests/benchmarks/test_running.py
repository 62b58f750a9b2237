"""The recurrent benchmark: what a seed leaves in the record, and that no seed is run twice."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.pretrained import RUNNING
from benchmarks import running


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The chapter's definitions, with the grammar's sentences; made once, for it takes seconds."""
    return running.prepared()


def test_all_of_the_grammar_is_trained_on(names: dict[str, Any]) -> None:
    pairs = grammar_pairs("train")
    assert len(names["training"]) == len(pairs)
    for language in ("german", "english"):
        assert {word for pair in pairs for word in getattr(pair, language)} <= set(names[language])


@pytest.mark.parametrize("form", running.FORMS)
def test_a_form_is_trained_and_translates(names: dict[str, Any], form: str) -> None:
    """After two updates of the chapter's own code."""
    found = running.measure(names, form, 2, 0)
    assert 0 <= found["exact"] <= 1
    assert set(found["translation"].split()) <= set(names["english"]) - {"<pad>", "</s>"}
    assert ("weights" in found) == (form != "none")
    if form != "none":
        rows = torch.tensor(found["weights"])
        assert rows.shape == (len(RUNNING.english), len(RUNNING.german))
        assert rows.min() >= 0
        assert (rows.sum(-1) < 1).all()  # the rest lies on the end symbol
        assert (rows.sum(-1) > 0.8).all()


def test_a_seed_is_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, int, int]] = []

    def measure(_: dict[str, Any], form: str, updates: int, seed: int) -> dict[str, Any]:
        if seed == 1 and len(measured) < 3:
            measured.append(("stopped", updates, seed))
            raise KeyboardInterrupt
        measured.append((form, updates, seed))
        return {"exact": 0.5}

    monkeypatch.setattr(running, "prepared", dict)
    monkeypatch.setattr(running, "measure", measure)
    path = tmp_path / "record.json"
    words = ["running", "--seeds", "2", "--updates", "7", "--record", str(path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(KeyboardInterrupt):
        running.main()
    assert set(json.loads(path.read_text(encoding="utf-8"))["runs"]) == {"0"}
    running.main()
    record = json.loads(path.read_text(encoding="utf-8"))
    ran = [one for one in measured if one[0] != "stopped"]
    assert ran == [(form, 7, seed) for seed in (0, 1) for form in running.FORMS]
    assert record["runs"]["1"] == {form: {"exact": 0.5} for form in running.FORMS}
    assert (record["updates"], record["source"]) == (7, [*RUNNING.german])
    assert "commit" in record
