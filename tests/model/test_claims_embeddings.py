"""The checks of the chapter on embeddings fail when the code is broken."""

import pytest

from tests.claims import assert_claim_can_fail

BROKEN = [
    ("3.4b", "self.lut(x) * math.sqrt(self.d_model)", "self.lut(x)"),
    ("3.4b", "[angles.sin(), angles.cos()]", "[9 * angles.sin(), 9 * angles.cos()]"),
    ("3.5a", "[angles.sin(), angles.cos()]", "[angles.cos(), angles.sin()]"),
    ("3.5b", "positions / 10000 **", "positions / 1000 **"),
    ("3.5c", "[cos, sin, -sin, cos]", "[cos, -sin, sin, cos]"),
    ("3.5c", "10000 ** (even / d_model)", "10000 ** (even / d_model) + positions.sqrt()"),
    (  # a table that cannot learn, and says the same of every place
        "3.5d",
        "nn.Parameter(torch.randn(1, max_len, d_model) * d_model**-0.5)",
        "nn.Parameter(torch.zeros(1, max_len, d_model), requires_grad=False)",
    ),
    (  # angles without a rule: nothing to carry over to places never trained
        "3.5e",
        "positions / 10000 ** (even / d_model)",
        "1e4 * (positions * (even + 1)).sin()",
    ),
]


@pytest.mark.parametrize(("claim", "old", "new"), BROKEN)
def test_broken(claim, old, new):
    assert_claim_can_fail("model/embeddings", claim, old, new)
