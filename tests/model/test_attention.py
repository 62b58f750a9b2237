"""Attention against PyTorch's kernel, brute force, and what a mask promises."""

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from annotated_transformer.model.attention import attention

sizes = st.integers(1, 6)
seeds = st.integers(0, 2**31)


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def with_gradients(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    steering = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
    return [y, *torch.autograd.grad(y, inputs, steering)]


def assert_equal(ones: Sequence[Tensor], others: Sequence[Tensor], atol: float = 1e-12) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@settings(max_examples=40)
@given(seeds, sizes, sizes, sizes, sizes, st.sampled_from([0.0, 0.3, 0.8, 1.0]))
def test_agrees_with_the_kernel_in_value_and_gradient(
    seed: int, n: int, m: int, d_k: int, d_v: int, share: float
) -> None:
    q, k, v = draw(seed, (2, 3, n, d_k), (2, 3, m, d_k), (2, 3, m, d_v))
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 1, n, m, generator=generator) < share
    for some in (None, mask):
        theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=some)
        ours = attention(q, k, v, some)[0]
        assert ours.shape == (2, 3, n, d_v)
        assert_equal(with_gradients(ours, q, k, v), with_gradients(theirs, q, k, v))


def test_agrees_with_loops() -> None:
    q, k, v = (x.detach() for x in draw(0, (3, 4), (5, 4), (5, 2)))
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    output, weights = attention(q, k, v, mask)
    for i in range(3):
        seen = [j for j in range(5) if mask[i, j]]
        powers = {j: math.exp(float(q[i] @ k[j]) / math.sqrt(4)) for j in seen}
        for j in range(5):
            share = powers.get(j, 0.0) / sum(powers.values())
            assert weights[i, j].item() == pytest.approx(share, abs=1e-12)
        total = sum(powers[j] / sum(powers.values()) * v[j] for j in seen)
        torch.testing.assert_close(output[i], total)


@settings(max_examples=30)
@given(seeds, sizes, sizes)
def test_weights_are_shares_of_what_may_be_seen(seed: int, n: int, m: int) -> None:
    q, k = draw(seed, (n, 4), (m, 4))
    mask = torch.rand(n, m, generator=torch.Generator().manual_seed(seed)) < 0.5
    weights = attention(q, k, k, mask)[1]
    assert (weights >= 0).all()
    assert (weights[~mask] == 0).all()
    torch.testing.assert_close(weights.sum(-1), mask.any(-1).double())


@settings(max_examples=20)
@given(seeds, st.integers(2, 6))
def test_no_leak_from_what_is_hidden(seed: int, n: int) -> None:
    (x, wild) = draw(seed, (1, n, 4), (1, n, 4))
    mask = causal(n)
    for t in range(1, n):
        changed = torch.cat([x[:, :t], 1e5 * wild[:, t:]], dim=1)
        before, after = (attention(y, y, y, mask)[0][:, :t] for y in (x, changed))
        assert torch.equal(before, after)
        assert (torch.autograd.grad(after.sum(), wild)[0] == 0).all()


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    (x,) = draw(0, (2, 3, 4, 8))
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    mask[0, 0, 1], mask[1] = False, False
    y = attention(x, x, x, mask)[0]
    assert (y[0, :, 1] == 0).all()
    assert (y[1] == 0).all()
    assert (y[0, :, 0] != 0).any()
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert slope.isfinite().all()
    assert (slope[1] == 0).all()


def test_masks_of_numbers_work_as_in_the_article() -> None:
    (x,) = draw(0, (2, 4, 8))
    mask = causal(4)
    assert_equal(attention(x, x, x, mask), attention(x, x, x, mask.long()))
    assert_equal(attention(x, x, x, mask), attention(x, x, x, mask.double()))


def test_dropout_is_applied_to_the_weights() -> None:
    (x,) = draw(0, (2, 4, 8))
    output, weights = attention(x, x, x, dropout=nn.Dropout(0.5))
    assert (weights == 0).any()
    torch.testing.assert_close(output, weights @ x)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], 2 * attention(x, x, x)[1][kept])
