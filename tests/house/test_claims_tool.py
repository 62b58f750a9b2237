"""Which cells are run before the one that checks a claim, and how a module is broken for it."""

import pytest
import torch

from annotated_transformer.model.attention import attention
from tests.claims import Cell, broken, needed

CHECK = frozenset({"claim-9.9"})


@pytest.mark.parametrize(
    ("earlier", "check", "both"),
    [
        (
            "for n in range(3):\n    seen = n",
            "for n in (1, 2):\n    seen = n\n    assert seen",
            False,
        ),
        ("n = 5", "for n in range(n):\n    assert n < 5", True),
        ("last = 5", "for n in (1, 2):\n    assert n < last", True),
        ("total = 0", "for n in (1, 2):\n    total = total + n\nassert total == 3", True),
        ("total = 0", "for n in (1, 2):\n    total += n\nassert total == 3", True),
        ("pair = 1, 2", "for one, other in [pair]:\n    assert one < other", True),
        ("n = 5", "n = 3\nassert n == 3", False),
        ("def f(n):\n    return n", "for n in (1, 2):\n    assert f(n) == n", True),
    ],
)
def test_cells_are_run_for_the_names_that_they_give(earlier: str, check: str, both: bool) -> None:
    first, second = Cell(1, earlier, frozenset()), Cell(2, check, CHECK)
    assert needed((first, second), "9.9") == ([first, second] if both else [second])


def test_a_module_is_broken_for_those_who_imported_it_and_mended_after() -> None:
    one = torch.ones(1, 4)
    whole, _ = attention(one, one, one)
    with broken("model/attention", "return weights @ value, weights", "return -value, weights"):
        assert torch.equal(attention(one, one, one)[0], -whole)
    assert torch.equal(attention(one, one, one)[0], whole)
    with pytest.raises(AssertionError, match="occurs 0 times"), broken("model/attention", "?", ""):
        pass
