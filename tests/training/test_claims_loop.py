"""The check of the loop chapter notices a schedule that counts the wrong thing."""

import pytest

from tests.claims import assert_claim_can_fail


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "        loss.backward()\n",
            "        loss.backward()\n        schedule and schedule.step()\n",
        ),
        ("    if schedule is not None:", "    if False:"),
        ("        if len(group) == accumulate:", "        if group:"),
    ],
)
def test_a_schedule_that_counts_batches_is_noticed(old, new):
    assert_claim_can_fail("training/loop", "5.3b", old, new)
