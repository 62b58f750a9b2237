"""The scoreboard says of each claim what its cells and records say."""

import json
from pathlib import Path

import pytest
import scoreboard
from conftest import ROOT
from scoreboard import AT_OUR_SCALE, FAILS, HOLDS, OPEN, Cell, Claim, Part, Record

CLAIMS = scoreboard.load_claims()


def claim(kinds: str) -> Claim:
    return Claim("3.5d", "3.5", "Something.", tuple(Part(kind, "") for kind in kinds))


def cell(kind: str | None = None, fails: bool = False, of: str = "3.5d") -> Cell:
    return Cell(of, kind, fails, "book/a", "claim-3-5d")


@pytest.mark.parametrize(
    ("kinds", "cells", "records", "expected"),
    [
        ("P", [], [], [OPEN]),
        ("P", [cell(of="3.5c")], [], [OPEN]),
        ("P", [cell()], [], [HOLDS]),
        ("M", [cell()], [], [AT_OUR_SCALE]),
        ("P", [cell(), cell(fails=True)], [], [FAILS]),
        ("PM", [cell()], [], [HOLDS, AT_OUR_SCALE]),
        ("PM", [cell("P")], [], [HOLDS, OPEN]),
        ("PM", [cell("P"), cell("M", fails=True)], [], [HOLDS, FAILS]),
        ("MR", [cell()], [], [AT_OUR_SCALE, OPEN]),
        ("MR", [], [Record(AT_OUR_SCALE, "a.json")], [OPEN, AT_OUR_SCALE]),
        ("R", [cell()], [], [OPEN]),
        ("R", [cell("R")], [], [OPEN]),
        ("R", [cell("R", fails=True)], [], [FAILS]),
        ("R", [cell("R", fails=True)], [Record(HOLDS, "a")], [FAILS]),
        ("MR", [cell("M", fails=True)], [], [FAILS, OPEN]),
        ("R", [], [Record(HOLDS, "a"), Record(FAILS, "b")], [FAILS]),
        ("R", [], [Record(HOLDS, "a"), Record(AT_OUR_SCALE, "b")], [AT_OUR_SCALE]),
    ],
)
def test_status(kinds: str, cells: list[Cell], records: list[Record], expected: list[str]) -> None:
    verdicts = scoreboard.settle(claim(kinds), cells, records)
    assert [verdict.status for verdict in verdicts] == expected


def test_every_claim_is_counted_once() -> None:
    board = {
        "a": scoreboard.settle(claim("P"), [cell()], []),
        "b": scoreboard.settle(claim("PM"), [cell()], []),
        "c": scoreboard.settle(claim("MR"), [cell()], []),
        "d": scoreboard.settle(claim("MR"), [cell(fails=True)], []),
        "e": scoreboard.settle(claim("R"), [], []),
    }
    assert scoreboard.summarise(board) == {
        HOLDS: 1,
        AT_OUR_SCALE: 1,
        "settled in part": 1,
        FAILS: 1,
        OPEN: 1,
    }


def test_tags() -> None:
    tags = ["hide-input", "claim-3.5c", "claim-A.1-M", "status-does-not-hold"]
    assert scoreboard.parse_tags(tags) == [("3.5c", None), ("A.1", "M")]
    with pytest.raises(scoreboard.ScoreboardError, match="not of the form"):
        scoreboard.parse_tags(["claim-x"])


def test_claims_are_the_papers() -> None:
    assert len(CLAIMS) == 54
    assert len({claim.claim for claim in CLAIMS.values()}) == 54
    for name, one in CLAIMS.items():
        assert scoreboard.parse_tags([f"claim-{name}"]) == [(name, None)]
        assert {part.kind for part in one.parts} <= set("PMR")
        assert one.parts
        assert name.split(".")[0] in scoreboard.SECTIONS
        recorded = "R" in {part.kind for part in one.parts}
        assert bool(one.command) == recorded, name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"claims": ["3.5d"]}, "must map a claim to its status"),
        ({"claims": {"9.9z": {"status": HOLDS}}}, "unknown claim 9.9z"),
        ({"claims": {"3.5d": {"status": "good"}}}, "not one of"),
    ],
)
def test_bad_record_is_refused(tmp_path: Path, content: dict, message: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps(content))
    with pytest.raises(scoreboard.ScoreboardError, match=message):
        scoreboard.load_records(CLAIMS, tmp_path)


def test_records_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"seed": 1}))
    (tmp_path / "b.json").write_text(
        json.dumps({"claims": {"3.5d": {"status": HOLDS, "note": "three seeds"}}})
    )
    expected = {"3.5d": [Record(HOLDS, "b.json", "three seeds")]}
    assert scoreboard.load_records(CLAIMS, tmp_path) == expected


def test_records_of_the_project_fit() -> None:
    scoreboard.load_records(CLAIMS, ROOT / "results")
