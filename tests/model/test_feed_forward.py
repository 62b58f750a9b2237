"""The feed-forward network against convolutions and plain arithmetic."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotated_transformer.model.feed_forward import PositionwiseFeedForward

seeds = st.integers(0, 2**31)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@settings(max_examples=30)
@given(seeds, st.lists(st.integers(1, 4), max_size=3))
def test_feed_forward_is_two_convolutions(seed: int, shape: list[int]) -> None:
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


def test_feed_forward_drops_hidden_units_in_training_only() -> None:
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
