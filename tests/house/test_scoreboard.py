"""The scoreboard says of each claim what its cells say."""

import pytest
import scoreboard
from scoreboard import AT_OUR_SCALE, FAILS, HOLDS, OPEN, Cell, Claim, Part

CLAIMS = scoreboard.load_claims()


def claim(kinds: str) -> Claim:
    return Claim("3.5d", "3.5", "Something.", tuple(Part(kind, "") for kind in kinds))


def cell(kind: str | None = None, fails: bool = False, of: str = "3.5d") -> Cell:
    return Cell(of, kind, fails, "book/a", "claim-3-5d")


@pytest.mark.parametrize(
    ("kinds", "cells", "expected"),
    [
        ("P", [], [OPEN]),
        ("P", [cell(of="3.5c")], [OPEN]),
        ("P", [cell()], [HOLDS]),
        ("M", [cell()], [AT_OUR_SCALE]),
        ("P", [cell(), cell(fails=True)], [FAILS]),
        ("PM", [cell()], [HOLDS, AT_OUR_SCALE]),
        ("PM", [cell("P")], [HOLDS, OPEN]),
        ("PM", [cell("P"), cell("M", fails=True)], [HOLDS, FAILS]),
        ("MR", [cell()], [AT_OUR_SCALE, OPEN]),
        ("MR", [cell("R")], [OPEN, AT_OUR_SCALE]),
        ("R", [cell()], [OPEN]),
        ("R", [cell("R")], [AT_OUR_SCALE]),
        ("R", [cell("R"), cell("R", fails=True)], [FAILS]),
        ("MR", [cell("M", fails=True)], [FAILS, OPEN]),
    ],
)
def test_status(kinds: str, cells: list[Cell], expected: list[str]) -> None:
    verdicts = scoreboard.settle(claim(kinds), cells)
    assert [verdict.status for verdict in verdicts] == expected


def test_every_claim_is_counted_once() -> None:
    board = {
        "a": scoreboard.settle(claim("P"), [cell()]),
        "b": scoreboard.settle(claim("PM"), [cell()]),
        "c": scoreboard.settle(claim("MR"), [cell()]),
        "d": scoreboard.settle(claim("MR"), [cell(fails=True)]),
        "e": scoreboard.settle(claim("R"), []),
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
