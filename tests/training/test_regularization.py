"""Label smoothing and the fused loss, against dense targets and PyTorch's own loss."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from annotated_transformer.training import regularization
from annotated_transformer.training.regularization import (
    LabelSmoothing,
    linear_cross_entropy,
    smoothed_target,
)

VARIANTS = ("paper", "others", "article")
SMOOTHING = st.sampled_from([0.0, 0.1, 0.4, 0.9])
SEED = st.integers(0, 10_000)


def article_loss(x, target, size, padding_idx, smoothing):
    """The article's computation, step by step, in its own order."""
    dist = torch.full_like(x, smoothing / (size - 2))
    dist.scatter_(1, target.unsqueeze(1), 1 - smoothing)
    dist[:, padding_idx] = 0
    dist[target == padding_idx] = 0
    return F.kl_div(x, dist, reduction="sum"), dist


@given(SEED, st.integers(3, 20), SMOOTHING, st.integers(1, 9), st.data())
def test_article_variant_gives_the_articles_values(seed, size, smoothing, rows, data):
    pad = data.draw(st.integers(0, size - 1))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator, dtype=torch.float64).log_softmax(1)
    x.requires_grad_()
    target = torch.randint(0, size, (rows,), generator=generator)
    loss = LabelSmoothing(size, pad, smoothing)
    expected, dist = article_loss(x, target, size, pad, smoothing)
    got = loss(x, target)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(loss.true_dist.double(), dist)
    for one, other in zip(
        torch.autograd.grad(got, x), torch.autograd.grad(expected, x), strict=True
    ):
        torch.testing.assert_close(one, other)


@given(SEED, st.integers(3, 12), st.sampled_from(VARIANTS), SMOOTHING)
def test_every_variant_is_the_divergence_from_its_target(seed, size, variant, smoothing):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, size, generator=generator, dtype=torch.float64).log_softmax(1)
    target = torch.randint(0, size, (6,), generator=generator)
    dense = smoothed_target(target, size, smoothing, variant=variant, dtype=torch.float64)
    sums = dense.sum(1)
    torch.testing.assert_close(sums, (target != 0).double())
    got = LabelSmoothing(size, 0, smoothing, variant=variant)(x, target)
    torch.testing.assert_close(got, F.kl_div(x, dense, reduction="sum"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_who_gets_what(variant):
    row = smoothed_target(torch.tensor([4]), 6, 0.3, variant=variant)[0]
    others = {"paper": 6, "others": 5, "article": 4}[variant]
    assert row[1].item() == pytest.approx(0.3 / others)
    assert row[0].item() == pytest.approx(0.0 if variant == "article" else 0.3 / others)
    assert row[4].item() == pytest.approx(0.7 + (0.05 if variant == "paper" else 0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_smoothing_is_the_negative_log_likelihood(variant):
    x = torch.randn(5, 9).log_softmax(1)
    target = torch.tensor([3, 0, 8, 1, 0])
    got = LabelSmoothing(9, 0, 0.0, variant=variant)(x, target)
    torch.testing.assert_close(got, F.nll_loss(x, target, ignore_index=0, reduction="sum"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_counts_for_nothing(variant, smoothing):
    loss = LabelSmoothing(7, 0, smoothing, variant=variant)
    x = torch.randn(3, 7).log_softmax(1)
    target = torch.tensor([2, 5, 1])
    noise = torch.randn(4, 7).log_softmax(1)
    padded = loss(torch.cat([x, noise]), torch.cat([target, torch.zeros(4, dtype=torch.long)]))
    torch.testing.assert_close(padded, loss(x, target))
    assert loss(noise, torch.zeros(4, dtype=torch.long)) == 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_finite_where_a_probability_is_zero(variant, smoothing):
    loss = LabelSmoothing(5, 0, smoothing, variant=variant)
    probabilities = torch.tensor([[0, 0.2, 0.7, 0.1, 0], [0, 0.2, 0.7, 0.1, 0]])
    x = probabilities.log().requires_grad_()
    value = loss(x, torch.tensor([2, 4]))
    value.backward()
    assert value.isfinite()
    assert x.grad.isfinite().all()


def test_zero_probability_of_padding_leaves_the_articles_value():
    # the article's penalty curve has such rows; today's kl_div makes them NaN
    x = torch.tensor([[0, 0.7, 0.1, 0.1, 0.1]], dtype=torch.float64).log()
    dist = article_loss(x, torch.tensor([1]), 5, 0, 0.1)[1]
    expected = F.kl_div(x[:, 1:], dist[:, 1:], reduction="sum")
    torch.testing.assert_close(LabelSmoothing(5, 0, 0.1)(x, torch.tensor([1])), expected)


def test_the_divergence_is_zero_at_its_target():
    for variant in VARIANTS:
        dense = smoothed_target(torch.tensor([3, 1]), 6, 0.2, variant=variant, dtype=torch.float64)
        loss = LabelSmoothing(6, 0, 0.2, variant=variant)(dense.log(), torch.tensor([3, 1]))
        assert abs(loss.item()) < 1e-12


@settings(max_examples=40)
@given(SEED, st.integers(0, 40), st.integers(1, 30), SMOOTHING, st.floats(0.1, 3))
def test_fused_loss_equals_pytorch(seed, rows, vocab, smoothing, scale):
    generator = torch.Generator().manual_seed(seed)
    projection = nn.Linear(5, vocab).double()
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, vocab, (rows,), generator=generator)
    wanted = (x, projection.weight, projection.bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regularization, "ROWS", 7)  # several chunks, the last one ragged
        loss, nll = linear_cross_entropy(x, projection, target, smoothing, scale)
    got = torch.autograd.grad(3 * loss, wanted)
    plain = F.cross_entropy(projection(x), target, label_smoothing=smoothing, reduction="sum")
    expected = torch.autograd.grad(3 * scale * plain, wanted)
    torch.testing.assert_close(loss, scale * plain)
    torch.testing.assert_close(nll, F.cross_entropy(projection(x), target, reduction="sum"))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_fused_gradient_by_finite_differences():
    torch.manual_seed(0)
    projection = nn.Linear(3, 4).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 3, 1, 1, 2])
    assert torch.autograd.gradcheck(
        lambda x: linear_cross_entropy(x, projection, target, 0.1, 0.5)[0], (x,)
    )


def test_fused_loss_without_gradient_and_with_huge_logits():
    projection = nn.Linear(2, 3)
    with torch.no_grad():
        projection.weight.fill_(0)
        projection.bias.copy_(torch.tensor([1e4, 0.0, -1e4]))
        loss, nll = linear_cross_entropy(torch.zeros(1, 2), projection, torch.tensor([2]))
    assert not loss.requires_grad
    assert math.isclose(nll.item(), 2e4)  # the probability itself would be zero in float32
    assert nll.dtype == torch.float64


def test_a_second_derivative_is_refused():
    projection = nn.Linear(2, 3).double()
    x = torch.randn(1, 2, dtype=torch.float64, requires_grad=True)
    loss, _ = linear_cross_entropy(x, projection, torch.tensor([2]))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()
