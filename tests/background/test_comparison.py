"""What a training had cost when it reached a loss, and the cell that compares prices."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chapters import definitions
from tests import claims

CHAPTER = "background/comparison"
RESULTS = Path(__file__).resolve().parents[2] / "results"
PRICES = "min(costs[s] for costs in others) / first[s]"
price = definitions(CHAPTER)["price"]
losses = st.lists(st.floats(0.1, 9), min_size=1, max_size=6)


@given(losses, st.floats(0.05, 10), st.data())
def test_price_is_where_the_curve_first_crosses_the_level(
    values: list[float], level: float, data: st.DataObject
) -> None:
    """Beside a search along a fine grid of the same curve."""
    steps = data.draw(
        st.lists(st.floats(0.5, 50), min_size=len(values), max_size=len(values)), label="steps"
    )
    times = np.cumsum(steps)
    curve = [{"seconds": t, "valid_loss": v} for t, v in zip(times, values, strict=True)]
    found = price(curve, level)
    grid = np.linspace(times[0], times[-1], 20_001)
    below = grid[np.interp(grid, times, values) <= level]
    if found is None:
        assert min(values) > level
    else:
        assert min(values) <= level
        assert times[0] <= found <= times[-1]
        assert np.interp(found, times, values) <= level + 1e-6
        if len(below):
            assert found <= below[0] + 1e-6
        assert not (np.interp(grid[grid < found - 1e-6], times, values) <= level - 1e-9).any()


def test_price_in_updates() -> None:
    curve = [{"update": 100, "seconds": 9.0, "valid_loss": 3.0}]
    curve.append({"update": 300, "seconds": 10.0, "valid_loss": 1.0})
    assert price(curve, 2.0, "update") == 200
    assert price(curve, 2.0) == 9.5
    assert price([], 2.0) is None


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        (PRICES, "2 + 0.01 * s", "holds at our scale"),
        (PRICES, "0.5 - 0.01 * s", "does not hold at our scale"),
        (PRICES, "1 + 0.1 * (-1) ** s", "not resolved"),
        (PRICES, "2 + 0.01 * s if unit == 'seconds' else 0.5 - 0.01 * s", "not resolved"),
        ("folder = find_records()", "folder = None", "not yet run"),
    ],
)
def test_the_status_is_that_of_the_prices(
    old: str, new: str, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    claims.run_claim(CHAPTER, "6.1e", (old, new))
    found = re.findall(r"^status: ([a-z ]+)", capsys.readouterr().out, re.MULTILINE)
    assert found == [status]


def test_a_record_of_another_model_does_not_move_the_level() -> None:
    worse = '[{"curve": [{"valid_loss": 9.0, "seconds": 1.0, "update": 1}]}]'
    more = ("CLAIMED =", f'by_model["rnn-dot"] = {worse}\nCLAIMED =')
    plain, other = (claims.run_claim(CHAPTER, "6.1e", change) for change in (None, more))
    assert "rnn-dot" in other["by_model"]
    assert plain["level"] == other["level"] < 1


QUICK = {"def update_seconds": "update_seconds = lambda model, n: 1.0\nLENGTHS, TOKENS = (8,), 8\n"
         "per_token = {name: (list(LENGTHS), [1.0]) for name in MODELS}",
         "def operations": "work = dict.fromkeys(MODELS, 1e6)",
         "def own_weights": "pass"}  # fmt: skip
ADDED: dict[str, dict[str, Any]] = {
    "another seed, better": {"seed": 9, "better": 0.2, "seconds": 0.5},
    "another seed, never there": {"seed": 9, "better": -3.0},
    "another task": {"updates": 9000, "better": 0.9},
    "another seed, other tokens and scorer": {"tokens": 7, "signature": "other"},
}


@pytest.mark.parametrize("model", ["transformer", "convolution", "rnn"])
@pytest.mark.parametrize("added", ADDED)
def test_another_record_does_not_break_the_page(
    model: str, added: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RESULTS, tmp_path / "results")
    path = tmp_path / "results" / "comparison" / f"grammar-{model}-0.json"
    record, change = json.loads(path.read_text(encoding="utf-8")), ADDED[added]
    record["seed"] = record["options"]["seed"] = change.get("seed", 0)
    record["options"]["updates"] = change.get("updates", record["options"]["updates"])
    record["tokens"] = change.get("tokens", record["tokens"])
    record["scores"]["test"]["bleu_signature"] += str(change.get("signature", ""))
    for point in record["curve"]:
        point["valid_loss"] -= change.get("better", 0.0)
        point["seconds"] *= change.get("seconds", 1)
    path.with_name("added.json").write_text(json.dumps(record), encoding="utf-8")
    names = claims.run_page(CHAPTER, QUICK)
    assert len(names["by_model"][model]) == 4 - ("updates" in change)


def test_without_records_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = claims.run_page(CHAPTER, QUICK)
    out = capsys.readouterr().out
    assert out.count(names["NO_RECORDS"]) == 1
    assert "status: not yet run" in out
