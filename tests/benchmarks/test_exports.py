"""The benchmark of exports measures what the chapter measures, on whatever system and text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from annotated_transformer.fast.screen import multiplies_bytes

if TYPE_CHECKING:  # it loads the libraries of all targets, which only these tests need
    from benchmarks import exports


LOW = {"int8", "ours int8", "ours bfloat16"}  # weights of fewer bits


def test_the_record_holds_every_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import exports

    monkeypatch.setattr(exports, "ROUNDS", 1)
    path = tmp_path / "record.json"
    words = ["exports", "--corpus", "grammar", "--split", "test", "--sentences", "6"]
    words += ["--record", str(path)]
    monkeypatch.setattr(sys, "argv", words)
    before = Path.cwd()
    exports.main()
    assert Path.cwd() == before
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["sentences"] == 6
    own = [name for name in exports.OWN if name != "ours int8" or multiplies_bytes()]
    assert list(record["rows"]) == [*own, *exports.TARGETS]
    for name, row in record["rows"].items():
        assert row["seconds"] > 0
        assert row["identical"] == 6 or name in LOW
        assert row["bleu"] > 80
        assert name in LOW | {"ours"} or row["apart"] < 1e-4


def test_each_takes_turns_and_the_best_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import exports

    clock = iter([0, 5, 5, 6, 10, 12, 20, 29, 30, 33, 40, 48])
    monkeypatch.setattr("benchmarks.machine.time.perf_counter", lambda: next(clock))
    seen: list[tuple[str, int]] = []
    decode: dict[str, exports.Decode] = {
        "one": lambda batch: seen.append(("one", len(batch))),
        "other": lambda batch: seen.append(("other", len(batch))),
    }
    found = exports.seconds(decode, [[4]] * 40)
    assert seen == 3 * [("one", 32), ("one", 8), ("other", 32), ("other", 8)]
    assert found == {"one": 2, "other": 1}
