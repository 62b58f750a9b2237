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

from annotated_transformer.engine.sweep import load_grid
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


def grammar_alone(folder: Path) -> None:
    """Copy the records of the grammar, and one of another kind, which marks the folder."""
    shutil.copytree(RESULTS / "comparison", folder / "results" / "comparison")
    shutil.copy(RESULTS / "lengths.json", folder / "results")


QUICK = {"def update_seconds": "update_seconds = lambda model, n: 1.0\nLENGTHS, TOKENS = (8,), 8\n"
         "per_token = {name: (list(LENGTHS), [1.0]) for name in MODELS}",
         "def operations": "work = work_real = dict.fromkeys(MODELS, 1e6)",
         "def own_weights": "pass",
         "best = beam_search": "pass", "my_interval": "pass"}  # fmt: skip


def changed(old: str, new: str) -> dict[str, str]:
    """Return the one cell that holds a text, with another text in its place."""
    (source,) = (cell.source for cell in claims.cells(CHAPTER) if old in cell.source)
    return {old: source.replace(old, new)}


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
    old: str,
    new: str,
    status: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    grammar_alone(tmp_path)
    text = {"# What the text says of BLEU": "pass"}  # of our records' own prices
    claims.run_page(CHAPTER, changed(old, new) | QUICK | text)
    found = re.findall(r"^status: ([a-z ]+)", capsys.readouterr().out, re.MULTILINE)
    assert found == [status]


def test_a_record_of_another_model_does_not_move_the_level() -> None:
    worse = '[{"curve": [{"valid_loss": 9.0, "seconds": 1.0, "update": 1}]}]'
    more = changed("CLAIMED =", f'by_model["rnn-dot"] = {worse}\nCLAIMED =')
    plain, other = (claims.run_page(CHAPTER, change | QUICK) for change in ({}, more))
    assert "rnn-dot" in other["by_model"]
    assert plain["level"] == other["level"] < 1


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


# --- on real text ----------------------------------------------------------------------------

KINDS = {"rnn": "rnn-attention", "convolution": "convolution", "transformer": "transformer"}
BEST = {"rnn": "rnn_250", "convolution": "convolution_1000", "transformer": "transformer_500"}
Points = dict[str, tuple[float, float, float]]  # BLEU with a third and with all, price of a token
EQUAL: Points = {kind: (20.0, 25.0, 1.0) for kind in KINDS}


def write_sweeps(
    folder: Path, points: Points, third: int = 3, full: int = 3, *, left_out: str = ""
) -> None:
    """Write both records; other rates than the best have a worse loss, and any BLEU."""
    grids = {"architectures-third": (0, third, 566), "architectures": (1, full, 1700)}
    for name, (place, seeds, updates) in grids.items():
        rows: dict[str, Any] = {}
        for row in load_grid(name).rows:
            kind, best = row.split("_")[0], row in BEST.values()
            bleu, price = points[kind][place], points[kind][2]
            other = 90.0 if row.endswith("_125") else 1.0  # to mislead a choice by BLEU
            count = seeds if best else 1 - place if seeds else 0
            rows[row] = {"options": {}, "runs": {
                str(s): {"loss": 2.0 - 0.5 * best, "bleu": bleu + 0.1 * s if best else other,
                         "seconds": price * updates * (1 + 0.01 * s), "updates": updates}
                for s in range(count)
            }}  # fmt: skip
        rows.pop(left_out, None)
        record = {"kind": "sweep", "rows": rows}
        record |= dict.fromkeys(("command", "commit", "date", "hardware", "search"), "")
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")


def fair(
    folder: Path, capsys: pytest.CaptureFixture[str], work: Points | None = None
) -> tuple[str, str]:
    """Run the page on the records there; return the status, and what it says of real text."""
    capsys.readouterr()
    prices = {KINDS[kind]: price for kind, (*_, price) in (work or EQUAL).items()}
    counted = f"work = work_real = dict.fromkeys(MODELS, 1.0) | {prices}"
    names = claims.run_page(CHAPTER, QUICK | {"def operations": counted})
    rates = {row: KINDS[kind] for kind, row in BEST.items()}
    assert not names["rated"] or {row: name for name, row in names["rated"].items()} == rates
    out = capsys.readouterr().out
    found = re.findall(r"^status: ([a-z ]+); Multi30k: ([a-z ]+)", out, re.MULTILINE)
    ((status, on_text),) = found
    return status, on_text


@pytest.mark.parametrize(
    ("points", "status"),
    [
        ({"transformer": (30, 31, 1)}, "holds at our scale"),
        ({"transformer": (30, 31, 4)}, "not resolved"),  # better, but no longer cheaper
        ({"transformer": (24, 31, 1)}, "not resolved"),  # ahead only with as many updates
        ({"transformer": (30, 31, 1), "rnn": (20, 32, 1)}, "not resolved"),  # one rival of two
        ({"convolution": (20, 30, 0.9)}, "does not hold at our scale"),
        ({"convolution": (20, 30, 1.1)}, "not resolved"),  # better, and dearer
        ({"convolution": (20, 20, 0.9)}, "not resolved"),  # cheaper, and worse
        ({}, "not resolved"),
    ],
)
def test_the_rule_on_real_text(
    points: Points,
    status: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweeps(tmp_path / "results", EQUAL | points)
    assert fair(tmp_path, capsys, EQUAL | points) == (status, status)


def test_cheaper_by_both_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock alone settles nothing, in either direction."""
    monkeypatch.chdir(tmp_path)
    wins = EQUAL | {"transformer": (30.0, 31.0, 1.0)}
    write_sweeps(tmp_path / "results", wins)
    assert fair(tmp_path, capsys, wins)[1] == "holds at our scale"
    assert fair(tmp_path, capsys, wins | {"transformer": (0, 0, 4.0)})[1] == "not resolved"
    loses = EQUAL | {"rnn": (20.0, 30.0, 0.5)}
    write_sweeps(tmp_path / "results", loses)
    assert fair(tmp_path, capsys, loses)[1] == "does not hold at our scale"
    assert fair(tmp_path, capsys, EQUAL)[1] == "not resolved"


@pytest.mark.parametrize(
    ("third", "full", "left_out", "status"),
    [
        (0, 0, "", "not yet run"),
        (1, 0, "", "not yet run"),
        (3, 0, "", "not yet run"),
        (3, 3, "rnn_125", "not yet run"),  # a rate not tried could be the best
        (1, 1, "", "not resolved"),  # one seed settles nothing
        (3, 1, "", "not resolved"),
        (2, 3, "", "holds at our scale"),
    ],
)
def test_a_part_of_the_records(
    third: int,
    full: int,
    left_out: str,
    status: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    points = EQUAL | {"transformer": (30.0, 31.0, 1.0)}
    write_sweeps(tmp_path / "results", points, third, full, left_out=left_out)
    assert fair(tmp_path, capsys, points) == (status, status)  # and no grammar here


def test_before_real_text_the_grammar_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    grammar_alone(tmp_path)
    status, on_text = fair(tmp_path, capsys)
    assert on_text == "not yet run"
    assert status != "not yet run"
    write_sweeps(tmp_path / "results", EQUAL | {"transformer": (30.0, 31.0, 1.0)})
    assert fair(tmp_path, capsys) == ("holds at our scale", "holds at our scale")


def test_both_grids_have_the_same_rows() -> None:
    """A rate that was chosen with few updates can be trained with all."""
    short, full = (load_grid(name) for name in ("architectures-third", "architectures"))
    assert list(short.rows) == list(full.rows)
    for row, options in short.rows.items():
        assert options.model == full.rows[row].model
        assert options.optim.peak == full.rows[row].optim.peak
        assert options.optim.updates == full.rows[row].optim.updates // 3
