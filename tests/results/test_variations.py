"""Rows of Table 3: the rule keeps its promise on simulated runs; any record can be read."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from annotated_transformer.data.records import RecordError
from annotated_transformer.engine.sweep import load_grid
from annotated_transformer.model import transformer
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.results.machine_translation import student_t
from annotated_transformer.results.variations import (
    MOST_PAIRS,
    judge_rows,
    paired_difference,
    pairs_needed,
    read_sweep,
)
from tests import claims

PAGE = "results/variations"
SEEDS = 5
SIMULATED = 1500


def record_of(losses: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return a grid's record with these losses, seed by seed; BLEU falls with them."""
    rows = {
        row: {
            "runs": {
                str(seed): {
                    **{"loss": loss, "bleu": 40 - 10 * loss},
                    **{"parameters": 1000, "seconds": 60.0},
                }
                for seed, loss in enumerate(found)
            }
        }
        for row, found in losses.items()
    }
    fields = dict.fromkeys(("command", "commit", "date", "search"), "")
    return {"kind": "sweep", **fields, "hardware": {"processor": "a processor"}, "rows": rows}


def simulated(rng: np.random.Generator, effects: Mapping[str, float]) -> dict[str, Any]:
    """Draw a grid whose rows cost so many per cent, with noise of one per cent."""
    base = rng.normal(1.0, 0.05, SEEDS)  # what the seed does to all rows
    own = {
        row: list(base * (1 + (effect + rng.normal(0, 1, SEEDS)) / 100))
        for row, effect in effects.items()
    }
    return record_of({"base": list(base), **own})


def shares(effects: Mapping[str, float], predicted: Mapping[str, int]) -> dict[str, float]:
    """Return how often each verdict falls on simulated grids."""
    rng = np.random.default_rng(0)
    each = [(row, sign, "loss") for row, sign in predicted.items()]
    found = [judge_rows(simulated(rng, effects), each) for _ in range(SIMULATED)]
    return {word: found.count(word) / SIMULATED for word in set(found)}


@pytest.mark.parametrize(
    ("effects", "most"), [({"a": 0}, 0.035), ({"a": 0, "b": 0}, 0.01), ({"a": 0, "b": 9}, 0.035)]
)
def test_chance_alone_hardly_ever_holds(effects: Mapping[str, float], most: float) -> None:
    """One end of a 95 % interval: 1 in 40, and never more with rows that hold besides."""
    found = shares(effects, dict.fromkeys(effects, 1))
    assert found.get("holds at our scale", 0) <= most


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_many_rows_are_no_more_chances_to_be_refuted(rows: int) -> None:
    effects = {f"row{i}": 0.0 for i in range(rows)}
    found = shares(effects, dict.fromkeys(effects, 1))
    assert found.get("does not hold at our scale", 0) <= 0.035


def test_large_effects_are_found() -> None:
    assert shares({"a": 5, "b": -5}, {"a": 1, "b": -1}) == {"holds at our scale": 1.0}
    assert shares({"a": 5, "b": 5}, {"a": 1, "b": -1}) == {"does not hold at our scale": 1.0}


@pytest.mark.parametrize(("effect", "spread"), [(1.0, 1.0), (0.5, 1.0), (-3.0, 2.0), (0.2, 0.7)])
def test_so_many_pairs_find_it_four_times_of_five(effect: float, spread: float) -> None:
    n = pairs_needed(effect, spread)
    assert n is not None
    drawn = np.random.default_rng(1).normal(abs(effect), spread, (20_000, n))
    bound = student_t(n - 1) * drawn.std(axis=1, ddof=1) / n**0.5
    assert 0.74 < (drawn.mean(axis=1) > bound).mean() < 0.86


def test_no_number_of_pairs_finds_nothing() -> None:
    assert pairs_needed(0.0, 1.0) is None
    assert pairs_needed(1e-3, 1.0) is None
    large = pairs_needed(0.1, 1.0)
    assert large is not None
    assert 700 < large < MOST_PAIRS  # ((1.96 + 0.84) / 0.1) ** 2 = 785


def test_seeds_are_paired() -> None:
    """What the seed does to both cancels: the interval is that of the differences alone."""
    rng = np.random.default_rng(2)
    losses = rng.normal(1.0, 0.5, 9)
    record = record_of({"base": list(losses), "a": list(losses * 1.02)})
    del record["rows"]["a"]["runs"]["3"]
    found = paired_difference(record, "a")
    assert len(found) == 8
    assert found == pytest.approx([2.0] * 8)
    assert statistics.stdev(found) < 1e-9


def test_only_records_of_sweeps_are_read(tmp_path: Path) -> None:
    assert read_sweep(None, "grid") is None
    assert read_sweep(tmp_path, "grid") is None
    path = tmp_path / "grid.json"
    path.write_text("{}")
    with pytest.raises(RecordError, match=r"grid\.json: has no kind"):
        read_sweep(tmp_path, "grid")
    path.write_text(json.dumps({**record_of({}), "kind": "ablation"}))
    with pytest.raises(RecordError, match=r"grid\.json: is no record of a sweep"):
        read_sweep(tmp_path, "grid")


@pytest.fixture(scope="module", autouse=True)
def built_once() -> Iterator[None]:
    """The page counts the parameters of twenty models, and is run again and again here.

    Only these are kept: a module that is imported meanwhile takes this function for good.
    """
    real, kept = transformer.build_model, cache(transformer.build_model)

    def build(*arguments: Any, **named: Any) -> EncoderDecoder:
        without_memory = torch.get_default_device().type == "meta"
        return (kept if without_memory else real)(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "build_model", build)
        yield


def write(folder: Path, name: str, seeds: int, *missing: str) -> None:
    """Write a record of a grid with so many seeds, without some rows."""
    grid, rng = load_grid(name), np.random.default_rng(3)
    losses = {row: list(rng.normal(1, 0.01, seeds)) for row in grid.rows if row not in missing}
    record = record_of(losses)
    for row in record["rows"]:
        record["rows"][row]["options"] = grid.described()[row]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")


@pytest.mark.parametrize("seeds", [(0, 0), (1, 0), (3, 0), (2, 2), (0, 3)])
def test_any_record_fits_the_page(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seeds: tuple[int, int],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, count in zip(("table3-grammar", "table3-small"), seeds, strict=True):
        if count:
            write(tmp_path / "results", name, count, *(("E", "C_N1") if count == 2 else ()))
    claims.run_page(PAGE)
    out = capsys.readouterr().out
    found = re.findall(r"^status: ([a-z ]+)", out, re.MULTILINE)
    seeds_told = re.findall(r"each row has (.+?) of the (\d+) seeds", " ".join(out.split()))
    assert seeds_told == [  # two rows of a record with two seeds have not been run
        ("0 to 2" if count == 2 else str(count), str(load_grid(name).seeds))
        for name, count in zip(("table3-grammar", "table3-small"), seeds, strict=True)
        if count
    ]
    timed = re.findall(r"Seconds are the median .*? on a processor\.", " ".join(out.split()))
    assert len(timed) == len(seeds_told)
    assert len(found) == 6
    assert (set(found) == {"not yet run"}) == (max(seeds) == 0)
    if max(seeds) == 1:  # one run of each settles nothing
        assert set(found) == {"not resolved"}


def test_a_scale_with_one_seed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no interval, so it neither settles a statement nor opens one."""
    monkeypatch.chdir(tmp_path)
    found = []
    for name, count in (("table3-grammar", 3), ("table3-small", 1)):
        write(tmp_path / "results", name, count)
        claims.run_page(PAGE)
        out = capsys.readouterr().out
        found.append(re.findall(r"^status: ([a-z ]+)", out, re.MULTILINE))
    assert found[0] == found[1]
    assert out.count("without Multi30k (one seed)") == 5  # all but the positions' statement
