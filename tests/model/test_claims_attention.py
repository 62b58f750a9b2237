"""The checks of the attention chapter notice broken attention."""

import pytest

from tests.claims import assert_claim_can_fail

CHAPTER = "model/attention"


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        ("3.2a", " / math.sqrt(query.size(-1))", ""),
        ("3.2a", "/ math.sqrt(query.size(-1))", "/ query.size(-1)"),
        ("3.2a", "weights = scores.softmax(dim=-1)", "weights = scores.softmax(dim=-2)"),
        ("3.2a", "scores.masked_fill(mask == 0,", "scores.masked_fill(mask != 0,"),
        (
            "3.2a",
            "return weights @ value, weights",
            "return weights @ (2 * value - value.detach()), weights",
        ),
        ("3.2a", "weights = weights.masked_fill(mask == 0, 0.0)", "pass"),  # NaN
        ("3.2h", "scores.masked_fill(mask == 0, -math.inf)", "scores.masked_fill(mask == 0, -1e9)"),
        ("3.2h", "scores = scores.masked_fill(mask == 0, -math.inf)", "pass"),
        ("3.2h", "scores.masked_fill(mask == 0, -math.inf)", "scores * mask"),
        ("3.2h", "weights = weights.masked_fill(mask == 0, 0.0)", "weights = weights + 0.01"),
        (
            "3.2c",
            "(torch.rand(2, pairs, d_k, generator=generator) - 0.5)",
            "torch.rand(2, pairs, d_k)",
        ),
        ("3.2c", "* 12**0.5", "* 2"),
        ("3.2c", "return (q * k).sum(-1)", "return (q * k).mean(-1)"),
        ("3.2d", "(d_k**0.5 if scaled else 1.0)", "1.0"),
        ("3.2d", "(d_k**0.5 if scaled else 1.0)", "d_k**0.5"),
    ],
)
def test_broken_attention_is_noticed(claim, old, new):
    assert_claim_can_fail(CHAPTER, claim, old, new)
