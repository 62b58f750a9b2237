"""What users may rely on is kept, and a name or an argument that goes is noticed."""

import copy
import json
import re

import pytest
from house import ROOT

from tests import stable

PROMISED: dict[str, stable.Names] = json.loads(stable.FILE.read_text("utf-8"))


def test_promises_are_kept() -> None:
    assert stable.broken(PROMISED, stable.present()) == []
    assert {*PROMISED} == {*stable.MODULES}
    assert all(len(names) > 30 for names in PROMISED.values())
    assert {"attention", "make_model", "Batch"} <= PROMISED["annotated_transformer"].keys()
    readme = (ROOT / "README.md").read_text("utf-8")
    assert re.search(r"## What you can rely on\n\nIn 0\.x", readme)


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        (["a", "b="], ["a", "b="], True),
        (["a", "b="], ["a", "b=", "c="], True),
        (["a", "b"], ["a", "b="], True),
        (["a", "b="], ["a", "b"], False),
        (["a", "b="], ["a", "b=", "c"], False),
        (["a", "b="], ["b=", "a"], False),
        (["a", "b="], ["a"], False),
        (["a"], ["x"], False),
        (["a"], None, False),
        (None, None, True),
    ],
)
def test_change_of_arguments_is_noticed(
    old: list[str] | None, new: list[str] | None, kept: bool
) -> None:
    assert (stable.broken({"m": {"f": old}}, {"m": {"f": new, "g": []}}) == []) == kept


def test_name_that_is_gone_is_noticed() -> None:
    now = copy.deepcopy(PROMISED)
    del now["annotated_transformer"]["attention"]
    assert stable.broken(PROMISED, now) == ["annotated_transformer.attention is gone"]


def test_positional_parameters_are_read() -> None:
    def function(a: int, b: int = 3, *rest: int, c: int, d: int = 3) -> None: ...

    assert stable.positional(function) == ["a", "b="]
    assert stable.positional(3) is None
