"""The checks of the multi-head chapter notice broken heads."""

import pytest

from tests.claims import assert_claim_can_fail

CHAPTER = "model/multi_head"


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        ("3.2e", ".transpose(1, 2).flatten(2)", ".flatten(1).view(x.size(0), x.size(2), -1)"),
        (
            "3.2e",
            "x.view(*x.shape[:-1], self.h, width).transpose(1, 2)",
            "x.view(*x.shape[:-1], width, self.h).transpose(2, 3).transpose(1, 2)",
        ),
        ("3.2e", "q, k, v = x.split(self.sizes, dim=-1)", "k, q, v = x.split(self.sizes, dim=-1)"),
        ("3.2e", "F.linear(key, weight[self.sizes[0] :]", "F.linear(key, weight[: -self.sizes[0]]"),
        ("3.2e", "F.linear(value, wv, bv)", "F.linear(value + key, wv, bv)"),
        ("3.2e", "heads != 0).unsqueeze(1)", "heads != 0).unsqueeze(1).logical_not()"),
        ("3.2e", "return fused_attention(q, k, v, mask)", "return fused_attention(q, k, v)"),
        ("3.2e", "y: Tensor = self.out_proj(x)", "y: Tensor = self.out_proj(x.detach() * 2 - x)"),
        ("3.2f-P", "self.d_k = d_model // h if", "self.d_k = d_model if"),
        (
            "3.2f-M",
            "MultiHeadedAttention(h, d_model, dropout=0.0) for h",
            "MultiHeadedAttention(h, d_model, 0.0, d_k=d_model, d_v=d_model) for h",
        ),
        ("3.2h", "return fused_attention(q, k, v, mask)", "return fused_attention(q, k, v)"),
        ("3.2h", "q = F.linear(query, wq, bq)", "q = F.linear(query.flip(1), wq, bq)"),
        ("3.2h", "t, t, t, subsequent_mask(5)", "t, t, t"),
        ("3.2h", "layer(target.unsqueeze(0), s, s, source_mask)", "layer(s, s, s, source_mask)"),
    ],
)
def test_broken_heads_are_noticed(claim, old, new):
    assert_claim_can_fail(CHAPTER, claim, old, new)
