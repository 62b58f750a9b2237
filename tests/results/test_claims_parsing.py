"""The status of claim 6.3a follows from the records, whatever they say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from tests import claims

CHAPTER = "results/parsing"
SENTENCES = 40


def scores(right: int) -> dict[str, Any]:
    """What a parser leaves that finds so many of ten brackets; in the last sentence one more."""
    matched = [right] * (SENTENCES - 1) + [right + 1]
    columns = {"matched": matched, "gold": [10] * SENTENCES, "test": [10] * SENTENCES}
    counts = {name: " ".join(map(str, column)) for name, column in columns.items()}
    f1 = 10 * sum(matched) / SENTENCES
    return {"f1": f1, "low": f1 - 30, "high": f1 + 30, "well_formed": 100.0, **counts}


def run(right: int, loss: float = 0.3) -> dict[str, Any]:
    """What a run leaves."""
    found = {"free": scores(right), "constrained": scores(right)}
    return {"loss": loss, "parameters": 2_000_000, **found}


def run_with(
    runs: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch,
    claim: str = "6.3a", **others: Any,
) -> dict[str, Any]:  # fmt: skip
    """Run a check of 6.3a or another claim where there are only these runs, and the floor."""
    rows = {
        row: {"runs": {str(seed): each for seed, each in enumerate(found)}}
        for row, found in {"transformer": runs, **others}.items()
    }
    (folder / "results").mkdir()
    every = {"baselines": {"pcfg": {"test": scores(7)}}, "t": rows}
    for name, rows in every.items():
        record = {"command": "", "commit": "", "rows": rows}
        path = folder / "results" / f"parsing-{name}.json"
        path.write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.chdir(folder)
    return claims.run_claim(CHAPTER, claim)


@pytest.mark.parametrize(
    ("right", "status"),
    [
        ([], "not yet run"),
        ([9], "not resolved"),
        ([9, 8], "holds at our scale"),  # the intervals of each alone overlap
        ([9, 7], "not resolved"),
        ([4, 5, 6], "does not hold at our scale"),
        ([4, 9], "not resolved"),
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


def test_the_papers_decoding_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = [run(number) | {"free": scores(4)} for number in (9, 8)]
    run_with(mixed, tmp_path, monkeypatch)
    out = capsys.readouterr().out
    assert "status: does not hold at our scale;" in out
    assert "with the constraint: holds at our scale" in out


@pytest.mark.parametrize(
    ("ours", "free", "rival", "status"),
    [
        (9, 9, 9, "does not hold at our scale"),  # the recurrent network beats the grammar, too
        (9, 4, 9, "does not hold at our scale"),
        (9, 9, 4, "holds at our scale"),
        (9, 4, 4, "not resolved"),  # there with the constraint alone
    ],
)
def test_the_contrast_with_recurrent_networks_follows_from_the_runs(
    ours: int, free: int, rival: int, status: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    own = [run(ours) | {"free": scores(free)} for _ in range(2)]
    other = [run(rival), run(rival)]
    run_with(own, tmp_path, monkeypatch, claim="6.3d-R", rnn_attention=other)
    assert f"status: {status}\n" in capsys.readouterr().out


def test_a_record_that_does_not_follow_from_its_brackets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = run(6)
    wrong["constrained"]["f1"] += 1
    with pytest.raises(claims.CellError):
        run_with([wrong], tmp_path, monkeypatch)


def test_a_run_on_other_sentences_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = run(6)
    gold = other["constrained"]["gold"].replace("10", "11", 1)
    other["constrained"].update(gold=gold, f1=2 * 100 * (6 * 39 + 7) / 801)
    with pytest.raises(claims.CellError):
        run_with([other], tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("loss", "status"), [(0.2, "holds at our scale"), (0.4, "does not hold at our scale")]
)
def test_validation_chooses_the_width(
    loss: float,
    status: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever the test sentences say of the other width."""
    wide = [run(9, loss), run(9, loss)]
    run_with([run(5), run(5)], tmp_path, monkeypatch, transformer_256=wide)
    assert re.findall(r"^status: ([a-z ]+)", capsys.readouterr().out, re.MULTILINE) == [status]


@pytest.mark.parametrize("part", [{}, {"transformer_1600": [run(4)]}], ids=["none", "one"])
def test_the_learning_curve_says_what_it_draws(
    part: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A single curve has no legend, so its name stands above it; the caption counts its runs."""
    names = run_with([run(9), run(8)], tmp_path, monkeypatch, **part)
    shown: list[tuple[Figure, str]] = []
    names["show"] = lambda *picture: shown.append(picture)
    (cell,) = (each for each in claims.cells(CHAPTER) if "def learning_curve(" in each.source)
    exec(cell.source, names)
    if not part:
        assert not shown
        assert "not yet run" in capsys.readouterr().out
        return
    ((figure, caption),) = shown
    assert "Transformer of width 128 with 1,600 trees (1 seed), 3,396 trees (2 seeds)" in caption
    assert figure.axes[0].get_title() == "Transformer of width 128"


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        ("6.3c", '"Luong": 93.0', '"Luong": 92.0'),  # then the text would be right
        ("6.3d", "alone, more = 91.3, 92.7", "alone, more = 90.3, 92.7"),
        ("6.3d", '"Vinyals, WSJ": 88.3', '"Vinyals, WSJ": 90.5'),
    ],
)
def test_what_the_text_says_of_table_4_can_fail(claim: str, old: str, new: str) -> None:
    claims.assert_claim_can_fail(CHAPTER, claim, old, new)


def test_the_checks_have_the_numbers_of_the_table() -> None:
    """Table 4 stands in the paper's box, for readers, and again in the cell that checks it."""
    text = (claims.BOOK / f"{CHAPTER}.md").read_text(encoding="utf-8")
    box = text.split(":::{paper} 6.3 ¶4, Table 4")[1].split("\n:::")[0]
    printed = [float(number) for number in re.findall(r"\| ([\d.]+) \|\n", box)]
    found = claims.run_claim(CHAPTER, "6.3c")
    assert sorted(printed) == sorted([*found["TABLE_4"].values(), found["alone"], found["more"]])
