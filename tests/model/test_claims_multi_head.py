"""The checks of the multi-head chapter notice broken heads."""

from typing import Any

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
            "unflatten(-1, (h, -1)).transpose(1, 2)",
            "unflatten(-1, (-1, h)).transpose(2, 3).transpose(1, 2)",
        ),
        ("3.2e", "w_q, w_k, w_v, w_o = self.linears", "w_k, w_q, w_v, w_o = self.linears"),
        ("3.2e", "w_q, w_k, w_v, w_o = self.linears", "w_q, w_v, w_k, w_o = self.linears"),
        ("3.2e", "w_v(value)", "w_v(value + key)"),
        ("3.2e", "w_v(value)", "w_v(key + 0 * value)"),
        ("3.2e", "mask.unsqueeze(1)", "mask.unsqueeze(1).logical_not()"),
        ("3.2e", "mask = mask.unsqueeze(1)", "mask = None"),
        ("3.2e", "w_o(x.transpose", "w_o((x.detach() * 2 - x).transpose"),
        ("3.2f-P", "return d_k or d_model // h, d_v", "return d_k or d_model, d_v"),
        (
            "3.2f-M",
            "MultiHeadedAttention(h, d_model, dropout=0.0) for h",
            "MultiHeadedAttention(h, d_model, 0.0, d_k=d_model, d_v=d_model) for h",
        ),
        ("3.2g", "Pointer(h, **widths)", "Pointer(2, **widths)"),
        ("3.2g", "Pointer(h, **widths)", "Pointer(1, **widths)"),
        ("3.2g", "gate = 10 * ", "gate = 0 * "),  # without the ReLU's help all is mixed
        (  # heads that all look at the same positions are no better than one
            "3.2g",
            "attention(q, k, v, mask",
            "attention(*(x.mean(1, True).expand_as(x) for x in (q, k)), v, mask",
        ),
        ("3.2h", "mask = mask.unsqueeze(1)", "mask = None"),
        ("3.2h", "w_q(query)", "w_q(query.flip(1))"),
        ("3.2h", "t, t, t, subsequent_mask(5)", "t, t, t"),
        ("3.2h", "layer(inputs, s, s, source_mask)", "layer(s, s, s, source_mask)"),
    ],
)
def test_broken_heads_are_noticed(claim: str, old: str, new: str) -> None:
    assert_claim_can_fail(CHAPTER, claim, old, new)


def test_the_task_asks_for_two_places() -> None:
    (source,) = (cell.source for cell in cells(CHAPTER) if "def marked(" in cell.source)
    names: dict[str, Any] = {"torch": torch, "Tensor": torch.Tensor, "F": torch.nn.functional}
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
