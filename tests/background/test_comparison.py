"""What a training had cost when it reached a loss, and the cell that compares prices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from annotated_transformer.background.comparison import price
from tests import claims

CHAPTER = "background/comparison"
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


SECONDS = 'prices(name, "seconds") for name in'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SECONDS, "[1.0, 2.0] for name in"),  # all alike
        (SECONDS, '[-p for p in prices(name, "seconds")] for name in'),  # the other way round
        ("assert by_model, ", "by_model.clear()\nassert by_model, "),
    ],
)
def test_the_comparison_notices_other_prices(old: str, new: str) -> None:
    claims.assert_claim_can_fail(CHAPTER, "6.1e", old, new)


def test_a_record_of_another_model_does_not_move_the_level() -> None:
    worse = '[{"curve": [{"valid_loss": 9.0, "seconds": 1.0, "update": 1}]}]'
    more = ("CLAIMED =", f'by_model["rnn-dot"] = {worse}\nCLAIMED =')
    plain, other = (claims.run_claim(CHAPTER, "6.1e", change) for change in (None, more))
    assert "rnn-dot" in other["by_model"]
    assert plain["level"] == other["level"] < 1
