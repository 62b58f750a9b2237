"""The checks of the multi-head chapter notice broken heads."""

import pytest
import torch

from tests.claims import assert_claim_can_fail, cells

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
        ("3.2g", "Pointer(h, **widths)", "Pointer(2, **widths)"),
        ("3.2g", "Pointer(h, **widths)", "Pointer(1, **widths)"),
        (  # heads that all look at the same places are no better than one
            "3.2g",
            "return fused_attention(q, k, v, mask)",
            "return fused_attention(*(x.mean(1, True).expand_as(x) for x in (q, k)), v, mask)",
        ),
        ("3.2h", "return fused_attention(q, k, v, mask)", "return fused_attention(q, k, v)"),
        ("3.2h", "q = F.linear(query, wq, bq)", "q = F.linear(query.flip(1), wq, bq)"),
        ("3.2h", "t, t, t, subsequent_mask(5)", "t, t, t"),
        ("3.2h", "layer(target.unsqueeze(0), s, s, source_mask)", "layer(s, s, s, source_mask)"),
    ],
)
def test_broken_heads_are_noticed(claim, old, new):
    assert_claim_can_fail(CHAPTER, claim, old, new)


def test_the_task_asks_for_two_places():
    (source,) = (cell.source for cell in cells(CHAPTER) if "def marked(" in cell.source)
    names = {"torch": torch, "Tensor": torch.Tensor, "F": torch.nn.functional}
    exec(source, names)
    for answer in ("pair", "sum"):
        tokens, target = names["marked"](50, answer, torch.Generator().manual_seed(0))
        assert tokens.shape == (50, 10, 10)
        for sentence, wanted in zip(tokens, target, strict=True):
            assert sentence[:, 8:].sum(0).tolist() == [1, 1]
            (a,), (b,) = (sentence[:, mark].nonzero().flatten().tolist() for mark in (8, 9))
            assert a != b
            at_a, at_b = sentence[a, :8], sentence[b, :8]
            total = (at_a + at_b) / 2**0.5
            expected = torch.cat([at_a, at_b] if answer == "pair" else [total, total])
            torch.testing.assert_close(wanted, expected)
        assert 0.8 < target.var() < 1.2
