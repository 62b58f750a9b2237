"""Multi-head attention against PyTorch's layer and the formula, and the masks of its uses."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from annotated_transformer.model.attention import attention
from annotated_transformer.model.multi_head import (
    MultiHeadedAttention,
    head_widths,
    padding_mask,
    split_heads,
    subsequent_mask,
)
from tests.parts import part_of

seeds = st.integers(0, 2**31)


def make(h: int = 2, d_model: int = 8, seed: int = 0, **options: int) -> MultiHeadedAttention:
    torch.manual_seed(seed)
    layer = MultiHeadedAttention(h, d_model, 0.0, **options).double()
    for i in range(4):
        nn.init.normal_(layer.get_parameter(f"linears.{i}.bias"))
    return layer


def weights_of(layer: MultiHeadedAttention) -> Tensor | None:
    return layer.attn  # which a call changes


def joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Join what belongs to W^Q, W^K, W^V, and to their biases, as PyTorch's layer has it."""
    weights, biases = list(tensors[0::2]), list(tensors[1::2])
    return [torch.cat(weights[:3]), torch.cat(biases[:3]), weights[3], biases[3]]


def twin(layer: MultiHeadedAttention) -> nn.MultiheadAttention:
    out = part_of(layer, "linears.3", nn.Linear)
    other = nn.MultiheadAttention(out.out_features, layer.h, batch_first=True).double()
    with torch.no_grad():
        ours = joined(list(layer.parameters()))
        for theirs, parameter in zip(other.parameters(), ours, strict=True):
            theirs.copy_(parameter)
    return other


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def slopes(y: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    steering = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
    return torch.autograd.grad(y, inputs, steering)


def assert_equal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@settings(max_examples=30)
@given(seeds, st.sampled_from([1, 2, 4]), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
def test_equals_pytorchs_layer(seed: int, h: int, n: int, m: int, distinct: int) -> None:
    layer = make(h, seed=seed)
    other = twin(layer)
    x, y, z = normal(2, n, 8), normal(2, m, 8), normal(2, m, 8)
    inputs = ([x, x, x], [x, y, y], [x, y, z])[distinct - 1]
    mask = torch.rand(2, n, inputs[1].size(1)) < 0.6
    mask[..., 0] = True
    ours = layer(*inputs, mask)
    theirs, weights = other(
        *inputs, attn_mask=~mask.repeat_interleave(h, 0), average_attn_weights=False
    )
    unique = list(dict.fromkeys(inputs))
    assert_equal([ours], [theirs])
    assert layer.attn is not None
    assert_equal([layer.attn], [weights])
    assert not layer.attn.requires_grad
    mine = slopes(ours, [*unique, *layer.parameters()])
    others = slopes(theirs, [*unique, *other.parameters()])
    assert_equal(mine[: len(unique)], others[: len(unique)])
    assert_equal(joined(mine[len(unique) :]), others[len(unique) :])


def test_separate_widths_follow_the_formula() -> None:
    layer = make(3, 8, d_k=5, d_v=2)
    x, y = normal(1, 4, 8), normal(1, 6, 8)
    *projections, out = (part_of(layer, f"linears.{i}", nn.Linear) for i in range(4))
    w_q, w_k, w_v = (linear.weight.chunk(3) for linear in projections)
    b_q, b_k, b_v = (linear.bias.chunk(3) for linear in projections)
    heads = []
    for i in range(3):
        q, k, v = x @ w_q[i].T + b_q[i], y @ w_k[i].T + b_k[i], y @ w_v[i].T + b_v[i]
        assert q.shape == (1, 4, 5)
        assert v.shape == (1, 6, 2)
        heads.append(attention(q, k, v)[0])
    printed = torch.cat(heads, -1) @ out.weight.T + out.bias
    assert_equal([layer(x, y, y)], [printed])


def test_width_must_fit_the_heads() -> None:
    with pytest.raises(ValueError, match="not a multiple of h=3"):
        MultiHeadedAttention(3, 8)
    with pytest.raises(ValueError, match="give d_k and d_v"):
        MultiHeadedAttention(3, 8, d_k=2)
    assert MultiHeadedAttention(3, 8, d_k=2, d_v=2)(*[torch.randn(1, 2, 8)] * 3).shape == (1, 2, 8)
    assert head_widths(2, 8, None, None) == (4, 4)
    assert head_widths(2, 8, 3, None) == (3, 4)
    assert head_widths(2, 8, None, 5) == (4, 5)


def test_parameters_have_the_articles_names() -> None:
    shapes = {name: tuple(p.shape) for name, p in make(2, 8, d_k=3, d_v=5).state_dict().items()}
    widths = {"linears.0": (6, 8), "linears.1": (6, 8), "linears.2": (10, 8), "linears.3": (8, 10)}
    assert shapes == {
        f"{name}.{part}": shape if part == "weight" else shape[:1]
        for name, shape in widths.items()
        for part in ("weight", "bias")
    }


@settings(max_examples=20)
@given(st.integers(0, 2), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3))
def test_heads_are_neighbouring_parts_of_each_row(batch: int, length: int, h: int, d: int) -> None:
    x = torch.arange(batch * length * h * d).view(batch, length, h * d)
    heads = split_heads(x, h)
    assert heads.shape == (batch, h, length, d)
    for i in range(h):
        assert torch.equal(heads[:, i], x[..., i * d : (i + 1) * d])


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 4, dtype=torch.bool),  # (batch, m), as other libraries have it: not by head
        torch.ones(4, 4, dtype=torch.bool),
        torch.zeros(1, 4, 4).masked_fill(~subsequent_mask(4), -torch.inf),  # to be added to scores
    ],
)
def test_masks_of_another_convention_are_refused(mask: Tensor) -> None:
    x = torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match=r"mask: give true or false, shaped \(batch or 1, n or 1"):
        MultiHeadedAttention(2, 8)(x, x, x, mask)


def test_masks_of_numbers_are_understood() -> None:
    layer, x = make(), normal(2, 4, 8)
    assert_equal([layer(x, x, x, subsequent_mask(4))], [layer(x, x, x, subsequent_mask(4).long())])


def test_attention_dropout_acts_in_training_only() -> None:
    layer, x = make(), normal(1, 6, 8)
    assert weights_of(layer) is None
    layer.dropout.p = 0.5
    assert not torch.equal(layer(x, x, x), layer(x, x, x))
    dropped = weights_of(layer)
    assert dropped is not None
    assert (dropped == 0).any()
    layer.eval()
    assert torch.equal(layer(x, x, x), layer(x, x, x))
    whole = weights_of(layer)
    assert whole is not None
    assert (whole > 0).all()


def test_weights_are_those_of_the_latest_call() -> None:
    layer, x, y = make(), normal(1, 4, 8), normal(3, 5, 8)
    layer(x, x, x, subsequent_mask(4))
    assert layer.attn is not None
    assert layer.attn.shape == (1, 2, 4, 4)
    assert (layer.attn[0].triu(1) == 0).all()
    layer(y, y, y)
    assert layer.attn.shape == (3, 2, 5, 5)


def test_a_sentence_without_keys_gets_the_bias_alone() -> None:
    layer, x, memory = make(), normal(2, 3, 8), normal(2, 4, 8)
    mask = torch.tensor([[True] * 4, [False] * 4]).unsqueeze(1)
    y = layer(x, memory, memory, mask)
    assert_equal([y[1]], [layer.get_parameter("linears.3.bias").expand(3, 8)])
    assert not torch.allclose(y[0], layer.get_parameter("linears.3.bias"))
    assert all(slope.isfinite().all() for slope in slopes(y, [x, *layer.parameters()]))


@settings(max_examples=20)
@given(seeds, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_padded_batch_equals_its_sentences_one_by_one(seed: int, lengths: list[int]) -> None:
    layer = make(seed=seed)
    keep = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    x = normal(*keep.shape, 8)
    y = layer(x, x, x, padding_mask(keep.long(), 0))
    alone = [layer(*[x[i : i + 1, :n]] * 3)[0] for i, n in enumerate(lengths)]
    assert_equal([y[keep]], [torch.cat(alone)])


@given(st.integers(1, 12))
def test_subsequent_mask_counts(size: int) -> None:
    mask = subsequent_mask(size)
    assert mask.shape == (1, size, size)
    assert mask.dtype == torch.bool
    assert mask[0].sum(-1).tolist() == list(range(1, size + 1))
    assert all(mask[0, i, j] == (j <= i) for i in range(size) for j in range(size))


def test_padding_mask_is_true_at_real_tokens() -> None:
    tokens = torch.tensor([[7, 3, 0], [0, 0, 0]])
    assert padding_mask(tokens, 0).tolist() == [[[True, True, False]], [[False] * 3]]
    assert padding_mask(tokens, 3).tolist() == [[[True, False, True]], [[True] * 3]]


def test_conversion_to_the_masks_of_pytorchs_layer() -> None:
    layer, x = make(), normal(2, 4, 8)
    real = padding_mask(torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]), 0)
    past = subsequent_mask(4)
    theirs, _ = twin(layer)(x, x, x, attn_mask=~past[0], key_padding_mask=~real.squeeze(1))
    assert_equal([layer(x, x, x, real & past)], [theirs])
