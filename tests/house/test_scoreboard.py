"""The scoreboard says of each claim what its cells say."""

import types
from dataclasses import replace
from typing import Any

import pytest
import scoreboard
from docutils import nodes
from scoreboard import (
    AT_OUR_SCALE,
    FAILS,
    FAILS_AT_OUR_SCALE,
    HOLDS,
    OPEN,
    UNRESOLVED,
    Cell,
    Claim,
    Part,
)

CLAIMS = scoreboard.load_claims()


def claim(kinds: str) -> Claim:
    return Claim("3.5d", "3.5", "Something.", tuple(Part(kind, "") for kind in kinds))


def cell(kind: str | None = None, fails: bool = False, of: str = "3.5d", stated: str = "") -> Cell:
    return Cell(of, kind, fails, "book/a", "claim-3-5d", stated)


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
        ("PM", [cell("P"), cell("M", fails=True)], [HOLDS, FAILS_AT_OUR_SCALE]),
        ("MR", [cell()], [AT_OUR_SCALE, OPEN]),
        ("MR", [cell("R")], [OPEN, AT_OUR_SCALE]),
        ("R", [cell()], [OPEN]),
        ("R", [cell("R")], [AT_OUR_SCALE]),
        ("R", [cell("R"), cell("R", fails=True)], [FAILS_AT_OUR_SCALE]),
        ("MR", [cell("M", fails=True)], [FAILS_AT_OUR_SCALE, OPEN]),
        ("M", [cell(stated=UNRESOLVED)], [UNRESOLVED]),
        ("M", [cell(), cell(stated=UNRESOLVED)], [UNRESOLVED]),
        ("M", [cell(stated=FAILS_AT_OUR_SCALE), cell(stated=UNRESOLVED)], [FAILS_AT_OUR_SCALE]),
        ("MR", [cell("M", stated=AT_OUR_SCALE), cell("R", stated=OPEN)], [AT_OUR_SCALE, OPEN]),
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
        "f": scoreboard.settle(claim("PM"), [cell("P"), cell("M", stated=UNRESOLVED)]),
    }
    assert scoreboard.summarize(board) == {
        HOLDS: 1,
        AT_OUR_SCALE: 1,
        "settled in part": 1,
        FAILS_AT_OUR_SCALE: 1,
        OPEN: 1,
        UNRESOLVED: 1,
    }
    claims = {"a": replace(claim("P"), definition=True), "b": claim("PM")}
    assert scoreboard.summary(claims, board).astext() == (
        "Of 6 claims: 1 holds, 1 holds at our scale, 1 not resolved, "
        "1 does not hold at our scale, 1 settled in part, 1 not yet run. "
        "Of these, 1 state definitions or settings, which our code implements as printed."
    )


def test_definitions_are_proved_and_nothing_else() -> None:
    defined = [claim for claim in CLAIMS.values() if claim.definition]
    assert 0 < len(defined) < len(CLAIMS) / 2
    assert {part.kind for claim in defined for part in claim.parts} == {"P"}


def test_several_claims_are_counted_in_the_plural() -> None:
    both = {"a": scoreboard.settle(claim("P"), [cell()]), "b": scoreboard.settle(claim("R"), [])}
    board = both | {name.upper(): verdicts for name, verdicts in both.items()}
    board |= {n: scoreboard.settle(claim("P"), [cell(fails=True)]) for n in ("c", "d")}
    text = scoreboard.summary({}, board).astext()
    assert text.startswith("Of 6 claims: 2 hold, 2 do not hold, 2 not yet run.")


@pytest.mark.parametrize(
    ("output", "status"),
    [
        ("status: not resolved; mean +0.10, 95 % interval -0.10 to +0.30, 8 runs\n", UNRESOLVED),
        ("seeds: 8\nstatus: holds at our scale\nand more", AT_OUR_SCALE),
        ("status: holds at our scale\nstatus: not yet run, as far as is known", OPEN),
        ("its status: holds", ""),
        ("", ""),
    ],
)
def test_a_cell_may_state_its_status(output: str, status: str) -> None:
    assert scoreboard.stated_status(output) == status


def test_a_status_that_nobody_knows_is_refused() -> None:
    with pytest.raises(scoreboard.ScoreboardError, match="'maybe' is no status: it is one of hol"):
        scoreboard.stated_status("status: maybe; 8 runs")


def test_the_status_is_read_off_what_the_cell_printed() -> None:
    """Beside a cell, with the source of the cell, in which the word stands as well."""
    source = nodes.container("", nodes.literal_block("", "status: holds"))
    source["nb_element"] = "cell_code_source"
    output = nodes.container("", nodes.literal_block("", "status: not resolved; 8 runs"))
    output["nb_element"] = "cell_code_output"
    code = nodes.container("", source, output, nb_element="cell_code")
    code["cell_metadata"] = {"tags": ["claim-A.1-M"]}
    tree: Any = nodes.container("", code)
    env: Any = types.SimpleNamespace(docname="book/a")
    app: Any = types.SimpleNamespace(env=env)
    scoreboard.mark_cells(app, tree)
    (found,) = scoreboard.CELLS.by_page(env)["book/a"]
    assert (found.claim, found.kind, found.stated) == ("A.1", "M", UNRESOLVED)
    output[0] = nodes.literal_block("", "status: perhaps")
    with pytest.raises(scoreboard.ScoreboardError, match=r"book/a: claim A.1: 'perhaps'"):
        scoreboard.mark_cells(app, tree)


def test_tags() -> None:
    tags = ["hide-input", "claim-3.5c", "claim-A.1-M", "status-does-not-hold"]
    assert scoreboard.parse_tags(tags) == [("3.5c", None), ("A.1", "M")]
    with pytest.raises(scoreboard.ScoreboardError, match="not of the form"):
        scoreboard.parse_tags(["claim-x"])


def test_claims_are_the_papers() -> None:
    assert len(CLAIMS) == 58
    assert len({claim.claim for claim in CLAIMS.values()}) == 58
    for name, one in CLAIMS.items():
        assert scoreboard.parse_tags([f"claim-{name}"]) == [(name, None)]
        assert {part.kind for part in one.parts} <= set("PMR")
        assert one.parts
        kinds = [part.kind for part in one.parts]
        assert len(set(kinds)) == len(kinds), f"{one.id}: two parts would list the same cells"
        assert name.split(".")[0] in scoreboard.SECTIONS
        recorded = "R" in {part.kind for part in one.parts}
        assert bool(one.command) == recorded, name
