"""The checks of the chapter on embeddings fail when the code is broken."""

import pytest

from tests.claims import assert_claim_can_fail

BROKEN = [
    ("3.4b", "self.lut(x) * math.sqrt(self.d_model)", "self.lut(x)"),
    ("3.4b", "math.sqrt(self.d_model)", "math.sqrt(x.size(-1))"),
    ("3.5a", "[angle.sin(), angle.cos()]", "[angle.cos(), angle.sin()]"),
    ("3.5b", "position / 10000 **", "position / 1000 **"),
    ("3.5c", "[cos, sin, -sin, cos]", "[cos, -sin, sin, cos]"),
    ("3.5c", "10000 ** (even / d_model)", "10000 ** (even / d_model) + position.sqrt()"),
    (  # positions that cannot learn and say nothing: no better than none
        "3.5d",
        "nn.Parameter(torch.randn(1, max_len, d_model) * 0.5**0.5)",
        "nn.Parameter(torch.zeros(1, max_len, d_model), requires_grad=False)",
    ),
    (  # angles without a rule: nothing to carry over to positions never trained
        "3.5e",
        "position / 10000 ** (even / d_model)",
        "1e4 * (position * (even + 1)).sin()",
    ),
]


@pytest.mark.parametrize(("claim", "old", "new"), BROKEN)
def test_broken(claim: str, old: str, new: str) -> None:
    assert_claim_can_fail("model/embeddings", claim, old, new)
