"""The checks of the attention chapter notice broken attention, and its examples are right."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.claims import assert_claim_can_fail, run_claim

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
            "(torch.rand(2, pairs, d_k, generator=rng) - 0.5)",
            "torch.rand(2, pairs, d_k)",
        ),
        ("3.2c", "* 12**0.5", "* 2"),
        ("3.2c", "return (q * k).sum(-1)", "return (q * k).mean(-1)"),
        ("3.2b-P", " / math.sqrt(query.size(-1))", ""),
        ("3.2b-P", "query @ w @ key.mT", "query @ w.mT @ key.mT"),
        ("3.2b-P", "query @ w @ key.mT", "(query @ w).tanh() @ key.mT"),
        ("3.2b-P", "(hidden.tanh() @ w)", "(hidden.tanh().relu() @ w)"),  # one operation more
        ("3.2b-P", "(key @ w_k).mT / math.sqrt(w_q.size(-1))", "(key @ w_k).mT"),  # one less
        ("3.2b-P", "elif torch.Tag.pointwise in func.tags:", "elif False:"),
        (
            "3.2b-M",
            "return additive_scores(q, k, w_q, w_k, w)",
            "return dot_scores(q, k, w_q, w_k)",
        ),
        ("3.2d", '(q.size(-1) ** 0.5 if kind == "scaled" else 1.0)', "1.0"),
        ("3.2d", '(q.size(-1) ** 0.5 if kind == "scaled" else 1.0)', "q.size(-1) ** 0.5"),
        (
            "3.2d",
            "w = torch.randn(d_k, 1, generator=rng) / d_k**0.5",
            "w = torch.randn(d_k, 1, generator=rng)",
        ),
        (  # vectors that start small do not saturate the softmax: then all forms learn
            "3.2d",
            "queries, keys = start * torch.randn(2,",
            "queries, keys = 0.1 * torch.randn(2,",
        ),
        ("3.2d", "small = 128**-0.25", "small = 1.0"),  # the start that makes up for the factor
    ],
)
def test_broken_attention_is_noticed(claim: str, old: str, new: str) -> None:
    assert_claim_can_fail(CHAPTER, claim, old, new)


@pytest.fixture(scope="module")
def forms() -> dict[str, Any]:
    return run_claim("model/attention", "3.2b")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_additive_scores_agree_with_loops(forms: dict[str, Any]) -> None:
    q, k, w_q, w_k, w = numbers(2, 3, 4), numbers(2, 5, 4), *numbers(2, 4, 6), numbers(6, 1)
    scores = forms["additive_scores"](q, k, w_q, w_k, w)
    assert scores.shape == (2, 3, 5)
    for b in range(2):
        for i in range(3):
            for j in range(5):
                inside = [
                    sum(float(q[b, i, c] * w_q[c, u] + k[b, j, c] * w_k[c, u]) for c in range(4))
                    for u in range(6)
                ]
                expected = sum(float(w[u]) * math.tanh(inside[u]) for u in range(6))
                assert scores[b, i, j].item() == pytest.approx(expected, abs=1e-12)


def test_multiplicative_scores_are_a_bilinear_form(forms: dict[str, Any]) -> None:
    q, k, w = numbers(3, 4), numbers(5, 4, seed=1), numbers(4, 4, seed=2)
    layer = nn.Bilinear(4, 4, 1, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(w.unsqueeze(0))
        pairs = layer(q.repeat_interleave(5, 0), k.repeat(3, 1)).view(3, 5)
    torch.testing.assert_close(forms["multiplicative_scores"](q, k, w), pairs)


def test_matrix_products_are_counted_as_by_pytorch(forms: dict[str, Any]) -> None:
    q, k, w_q, w_k = numbers(3, 4), numbers(5, 4), *numbers(2, 4, 4)
    with forms["Operations"]() as ours:
        forms["dot_scores"](q, k, w_q, w_k)
    with FlopCounterMode(display=False) as theirs:
        forms["dot_scores"](q, k, w_q, w_k)
    assert ours.count == theirs.get_total_flops() + 3 * 5  # and a division for each score


def test_what_is_kept_is_what_the_derivatives_need(forms: dict[str, Any]) -> None:
    x, w = numbers(10, 4).requires_grad_(), numbers(4, 4).requires_grad_()
    assert forms["kept"](lambda x, w: x @ w, x, w) == 0  # the inputs alone
    assert forms["kept"](lambda x, w: (x @ w).tanh(), x, w) == 40
    assert forms["kept"](lambda x, w: (x @ w).tanh() @ w.T, x, w) == 40  # not twice


def test_learning_needs_the_root_for_every_seed_and_rate() -> None:
    learn = run_claim("model/attention", "3.2d", fewer=True)["learn"]
    for seed in range(2, 5):
        scaled, unscaled = (
            learn(kind, 256, [0.01, 0.1], models=2, seed=seed) for kind in ("scaled", "unscaled")
        )  # (rates, models)
        assert scaled.min() > 0.95
        assert (unscaled.amax(1) < scaled.amin(1)).all()
