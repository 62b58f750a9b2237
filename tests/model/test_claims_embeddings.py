"""The checks of the chapter on embeddings fail when the code is broken."""

import pytest

from tests.claims import assert_claim_can_fail

BROKEN = [
    ("3.4b", "self.lut(x) * math.sqrt(self.d_model)", "self.lut(x)"),
    ("3.5a", "[angles.sin(), angles.cos()]", "[angles.cos(), angles.sin()]"),
    ("3.5b", "positions / 10000 **", "positions / 1000 **"),
    ("3.5c", "[cos, sin, -sin, cos]", "[cos, -sin, sin, cos]"),
]


@pytest.mark.parametrize(("claim", "old", "new"), BROKEN)
def test_broken(claim, old, new):
    assert_claim_can_fail("model/embeddings", claim, old, new)
