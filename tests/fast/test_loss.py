"""Tests of the fused loss, against PyTorch's own."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from annotated_transformer.fast import loss as fast_loss
from annotated_transformer.fast.loss import linear_cross_entropy

SMOOTHING = st.sampled_from([0.0, 0.1, 0.4, 0.9])
SEED = st.integers(0, 10_000)


@settings(max_examples=40)
@given(SEED, st.integers(0, 40), st.integers(1, 30), SMOOTHING, st.floats(0.1, 3))
def test_fused_loss_equals_pytorch(
    seed: int, rows: int, vocab: int, smoothing: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    projection = nn.Linear(5, vocab).double()
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, vocab, (rows,), generator=generator)
    wanted = (x, projection.weight, projection.bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_loss, "ROWS", 7)  # several chunks, the last one ragged
        loss, nll = linear_cross_entropy(x, projection, target, smoothing, scale)
    got = torch.autograd.grad(3 * loss, wanted)
    plain = F.cross_entropy(projection(x), target, label_smoothing=smoothing, reduction="sum")
    expected = torch.autograd.grad(3 * scale * plain, wanted)
    torch.testing.assert_close(loss, scale * plain)
    torch.testing.assert_close(nll, F.cross_entropy(projection(x), target, reduction="sum"))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_token_that_is_excluded_has_no_part_in_the_loss() -> None:
    torch.manual_seed(0)
    projection, x = nn.Linear(3, 5), torch.randn(4, 3)
    target = torch.tensor([0, 4, 1, 1])
    with torch.no_grad():
        projection.bias[3] = -math.inf
    wanted = F.cross_entropy(projection(x), target, reduction="sum")
    loss, nll = linear_cross_entropy(x, projection, target)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(nll.float(), wanted)
    expected = torch.autograd.grad(wanted, projection.weight)
    torch.testing.assert_close(torch.autograd.grad(loss, projection.weight), expected)


def test_fused_gradient_by_finite_differences() -> None:
    torch.manual_seed(0)
    projection = nn.Linear(3, 4).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 3, 1, 1, 2])
    assert torch.autograd.gradcheck(
        lambda x: linear_cross_entropy(x, projection, target, 0.1, 0.5)[0], (x,)
    )


def test_fused_loss_without_gradient_and_with_huge_logits() -> None:
    projection = nn.Linear(2, 3)
    with torch.no_grad():
        projection.weight.fill_(0)
        projection.bias.copy_(torch.tensor([1e4, 0.0, -1e4]))
        loss, nll = linear_cross_entropy(torch.zeros(1, 2), projection, torch.tensor([2]))
    assert not loss.requires_grad
    assert math.isclose(nll.item(), 2e4)  # the probability itself would be zero in float32
    assert nll.dtype == torch.float64


def test_a_second_derivative_is_refused() -> None:
    projection = nn.Linear(2, 3).double()
    x = torch.randn(1, 2, dtype=torch.float64, requires_grad=True)
    loss, _ = linear_cross_entropy(x, projection, torch.tensor([2]))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_under_autocast_products_alone_are_short(low: torch.dtype) -> None:
    torch.manual_seed(0)
    projection, target = nn.Linear(16, 50), torch.randint(0, 50, (600,))
    x = torch.randn(600, 16, requires_grad=True)
    wanted = (x, projection.weight, projection.bias)
    plain, plain_nll = linear_cross_entropy(x, projection, target, 0.1, 1e-6)
    expected = torch.autograd.grad(plain, wanted)
    with torch.autocast("cpu", low):
        loss, nll = linear_cross_entropy(x, projection, target, 0.1, 1e-6)
    assert loss.dtype == torch.float32
    assert nll.dtype == torch.float64
    found = torch.autograd.grad(loss, wanted)
    assert not torch.equal(nll, plain_nll)  # they are rounded
    torch.testing.assert_close(nll, plain_nll, rtol=1e-3, atol=0)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert ((one - other).norm() / other.norm()).item() < 0.02  # nothing vanishes
