"""Feed-forward network, dropout and sub-layers against plain arithmetic."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from annotated_transformer.model import layers
from annotated_transformer.model.layers import (
    LEVELS,
    Dropout,
    PositionwiseFeedForward,
    SublayerConnection,
    clones,
    keep_mask,
)

seeds = st.integers(0, 2**31)
orders = pytest.mark.parametrize("norm", ["post", "pre"])


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@settings(max_examples=30)
@given(seeds, st.lists(st.integers(1, 4), max_size=3))
def test_feed_forward_is_two_convolutions(seed, shape):
    torch.manual_seed(seed)
    ffn = PositionwiseFeedForward(6, 10, 0.0).double()
    x = normal(*shape, 6)
    y = ffn(x)
    assert y.shape == x.shape
    flat = x.reshape(1, -1, 6).mT
    hidden = F.conv1d(flat, ffn.w_1.weight.unsqueeze(-1), ffn.w_1.bias).clamp(min=0)
    theirs = F.conv1d(hidden, ffn.w_2.weight.unsqueeze(-1), ffn.w_2.bias).mT.reshape_as(x)
    torch.testing.assert_close(y, theirs)
    inputs = [x, *ffn.parameters()]
    mine, others = (torch.autograd.grad(z.sin().sum(), inputs) for z in (y, theirs))
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other)


def test_feed_forward_drops_hidden_units_in_training_only():
    ffn, x = PositionwiseFeedForward(6, 400, 0.5), torch.randn(3, 6)
    seen = []
    ffn.w_2.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ffn(x)
    ffn.eval()(x)
    trained, evaluated = seen
    assert torch.equal(evaluated, ffn.w_1(x).relu())
    alive = evaluated > 0
    assert 0.3 < (trained[alive] == 0).float().mean() < 0.7
    torch.testing.assert_close(trained[trained > 0], 2 * evaluated[trained > 0])


@settings(max_examples=40)
@given(seeds, st.lists(st.integers(0, 7), max_size=3), st.sampled_from([0.01, 0.1, 0.5, 0.9]))
def test_dropout_zeroes_or_scales(seed, shape, p):
    torch.manual_seed(seed)
    x = (torch.rand(shape) + 1).requires_grad_()
    y = Dropout(p)(x)
    assert y.shape == x.shape
    factor = 1 / (1 - round(p * LEVELS) / LEVELS)
    torch.testing.assert_close(y, x * (y != 0) * factor)
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, (y != 0) * factor)


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.3, 0.5, 0.999])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rate_and_independence(p, seed):
    torch.manual_seed(seed)
    count = 2**19
    keep = keep_mask(torch.empty(count), p)
    true_rate = round(p * LEVELS) / LEVELS
    assert abs(true_rate - p) <= 0.5 / LEVELS
    error = math.sqrt(true_rate * (1 - true_rate) / count)
    assert abs((~keep).double().mean().item() - true_rate) < 6 * error
    dropped = (~keep).double() - true_rate
    for lag in (1, 2, 3, 4, 5):  # inside a word of 64 bits, and across
        product = (dropped[:-lag] * dropped[lag:]).mean().item()
        assert abs(product) < 6 * true_rate * (1 - true_rate) / math.sqrt(count)


def test_all_sixteen_patterns_of_a_word_are_equally_likely():
    torch.manual_seed(0)
    count = 2**18
    keep = keep_mask(torch.empty(4 * count), 0.5).view(count, 4)
    patterns = (keep * torch.tensor([1, 2, 4, 8])).sum(-1).bincount(minlength=16)
    expected = count / 16
    chi_square = ((patterns - expected) ** 2 / expected).sum().item()
    assert chi_square < 50  # 15 degrees of freedom: one in 80,000 exceeds it


def test_dropout_repeats_with_the_seed():
    drop, x = Dropout(0.5), torch.ones(100)
    torch.manual_seed(3)
    first = drop(x)
    second = drop(x)
    torch.manual_seed(3)
    assert torch.equal(drop(x), first)
    assert not torch.equal(first, second)


def test_dropout_does_nothing_in_evaluation_or_at_zero():
    x = torch.randn(5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert repr(Dropout(0.25)) == "Dropout(p=0.25)"


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0])
def test_dropout_refuses_what_is_no_probability(p):
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        Dropout(p)


def test_dropout_elsewhere_is_pytorchs(monkeypatch):
    monkeypatch.setattr(layers.F, "dropout", lambda x, p: ("pytorch", p))
    assert Dropout(0.5)(torch.empty(3, device="meta")) == ("pytorch", 0.5)


def test_derivative_of_dropout():
    def drop(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)  # the same decisions each time
        return Dropout(0.5)(x)

    assert torch.autograd.gradcheck(drop, normal(4, 5))


def test_clones_share_nothing():
    copies = clones(nn.Linear(2, 2), 3)
    assert len(copies) == 3
    assert len({p.data_ptr() for p in copies.parameters()}) == 6
    assert torch.equal(copies[0].weight, copies[2].weight)


@orders
def test_sublayer_follows_its_equation(norm):
    frame, inner = SublayerConnection(6, 0.0, norm=norm).double(), nn.Linear(6, 6).double()
    nn.init.normal_(frame.norm.weight)
    nn.init.normal_(frame.norm.bias)
    x = normal(2, 3, 6)

    def ln(x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        return (x - mean) / (variance + 1e-5).sqrt() * frame.norm.weight + frame.norm.bias

    printed = ln(x + inner(x)) if norm == "post" else x + inner(ln(x))
    y = frame(x, inner)
    torch.testing.assert_close(y, printed)
    inputs = [x, *frame.parameters(), *inner.parameters()]
    mine, others = (torch.autograd.grad(z.sin().sum(), inputs) for z in (y, printed))
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other)


def test_post_norm_is_the_default():
    x = torch.randn(3, 6)
    torch.testing.assert_close(
        SublayerConnection(6, 0.0)(x, torch.zeros_like), F.layer_norm(x, [6])
    )


def test_a_silent_sublayer_leaves_a_pre_norm_sum_alone():
    x = torch.randn(3, 6)
    assert torch.equal(SublayerConnection(6, 0.1, norm="pre")(x, torch.zeros_like), x)


@orders
def test_dropout_acts_between_sublayer_and_sum(norm):
    torch.manual_seed(0)
    frame = SublayerConnection(64, 0.5, norm=norm)
    frame.norm = nn.Identity()
    added = frame(torch.full((50, 64), 8.0), torch.ones_like) - 8
    assert set(added.unique().tolist()) == {0.0, 2.0}
    assert 0.4 < (added == 0).float().mean() < 0.6


def test_neighbours_and_padding_do_not_matter():
    frame, inner = SublayerConnection(6, 0.0).double(), PositionwiseFeedForward(6, 8, 0.0).double()
    x = normal(2, 3, 6)
    torch.testing.assert_close(frame(F.pad(x, (0, 0, 0, 2)), inner)[:, :3], frame(x, inner))
    torch.testing.assert_close(frame(x[:1], inner), frame(x, inner)[:1])
