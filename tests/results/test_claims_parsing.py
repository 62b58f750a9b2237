"""The status of claim 6.3a follows from the records, whatever they say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import claims

CHAPTER = "results/parsing"
FLOOR = {"f1": 70.0, "low": 68.0, "high": 72.0, "matched": "7", "gold": "10", "test": "10"}


def run(right: int) -> dict[str, Any]:
    """What a run leaves: F1 of 100 brackets, with an interval of three on either side."""
    ends = {"low": right - 3.0, "high": right + 3.0}
    counts = {"matched": f"{right} 0", "gold": "90 10", "test": "50 50"}
    scores = {"f1": float(right), "well_formed": 100.0, **ends, **counts}
    return {"free": scores, "constrained": dict(scores)}


def run_with(runs: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the check of 6.3a where there are only these runs, and the floor."""
    seeds = {str(seed): each for seed, each in enumerate(runs)}
    (folder / "results").mkdir()
    every = {"baselines": {"pcfg": {"test": FLOOR}}, "t": {"transformer": {"runs": seeds}}}
    for name, rows in every.items():
        record = {"command": "", "commit": "", "rows": rows}
        path = folder / "results" / f"parsing-{name}.json"
        path.write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.chdir(folder)
    claims.run_claim(CHAPTER, "6.3a")


@pytest.mark.parametrize(
    ("right", "status"),
    [
        ([], "not yet run"),
        ([90], "not resolved"),
        ([90, 80], "holds at our scale"),
        ([90, 73], "not resolved"),
        ([40, 50, 60], "does not hold at our scale"),
        ([40, 90], "not resolved"),
    ],
)
def test_the_status_follows_from_the_runs(
    right: list[int],
    status: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_with([run(number) for number in right], tmp_path, monkeypatch)
    assert re.findall(r"^status: ([a-z ]+)", capsys.readouterr().out, re.MULTILINE) == [status]


def test_a_record_that_does_not_follow_from_its_brackets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = run(60)
    wrong["constrained"]["f1"] = 61.0
    with pytest.raises(claims.CellError):
        run_with([wrong], tmp_path, monkeypatch)
