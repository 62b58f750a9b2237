"""Tests of attention by the fast layer: packed rows, the derivative by hand, the fused kernel."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from annotated_transformer.fast import attention as module
from annotated_transformer.fast.attention import (
    SHORT,
    attend_rows,
    fused_attention,
    fused_linear,
    plain_is_faster,
)
from annotated_transformer.fast.packing import PackedMask, Rows
from annotated_transformer.model.attention import attention
from annotated_transformer.model.multi_head import MultiHeadedAttention, subsequent_mask

seeds = st.integers(0, 2**31)
LENGTHS = st.integers(1, 6) | st.integers(9, 17)  # attention fills up some of them
batches = st.lists(LENGTHS, min_size=1, max_size=4)  # lengths of sentences
widths = st.sampled_from(
    [{}, {"d_k": 3, "d_v": 3}, {"d_k": 3, "d_v": 5}]
)  # the last takes a detour


@pytest.fixture(params=["highest", "medium"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def make(seed: int = 0, h: int = 2, **options: int) -> MultiHeadedAttention:
    torch.manual_seed(seed)
    layer = MultiHeadedAttention(h, 8, 0.0, **options).double()
    for i in range(4):
        nn.init.normal_(layer.get_parameter(f"linears.{i}.bias"))
    return layer


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def slopes(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    steering = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
    return list(torch.autograd.grad(y, inputs, steering))


def assert_equal(ones: Sequence[Tensor], others: Sequence[Tensor], atol: float = 1e-11) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


def keep_of(lengths: list[int]) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def packed_run(
    layer: MultiHeadedAttention,
    x: Tensor,
    memory: Tensor | None,
    mask: Tensor,
    queries: Rows,
    keys: Rows,
) -> Tensor:
    """Self-attention without a memory, attention to the memory otherwise."""
    q = queries.pack(x)
    k = q if memory is None else keys.pack(memory)
    return attend_rows(layer, q, k, PackedMask(mask, queries, keys))


@settings(max_examples=30)
@given(batches, seeds, widths, st.booleans())
def test_packed_equals_padded_in_self_attention(
    lengths: list[int], seed: int, sizes: dict[str, int], causal: bool
) -> None:
    layer, keep = make(seed, **sizes), keep_of(lengths)
    rows, x = Rows(keep), normal(*keep.shape, 8)
    mask = keep.unsqueeze(1)
    if causal:
        mask = mask & subsequent_mask(keep.size(1))
    packed, padded = packed_run(layer, x, None, mask, rows, rows), layer(x, x, x, mask)[keep]
    inputs = [x, *layer.parameters()]
    assert_equal([packed], [padded])
    assert_equal(slopes(packed, inputs), slopes(padded, inputs))


@settings(max_examples=30)
@given(
    st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=4),
    seeds,
    widths,
)
def test_packed_equals_padded_between_two_sentences(
    pairs: list[tuple[int, int]], seed: int, sizes: dict[str, int]
) -> None:
    layer = make(seed, **sizes)
    tgt, src = (keep_of(list(lengths)) for lengths in zip(*pairs, strict=True))
    x, memory, mask = normal(*tgt.shape, 8), normal(*src.shape, 8), src.unsqueeze(1)
    packed = packed_run(layer, x, memory, mask, Rows(tgt), Rows(src))
    padded = layer(x, memory, memory, mask)[tgt]
    inputs = [x, memory, *layer.parameters()]
    assert_equal([packed], [padded])
    assert_equal(slopes(packed, inputs), slopes(padded, inputs))


def test_these_rows_take_the_derivative_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a wrong one would be noticed."""
    layer, keep = make(), keep_of([3, 1, 5])
    rows, x, mask = Rows(keep), normal(3, 5, 8), keep.unsqueeze(1)
    expected = slopes(layer(x, x, x, mask)[keep], [x])
    original, calls = module._PackedAttention.backward, []

    def doubled(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        calls.append(1)
        slope = original(ctx, grad)[0]
        assert slope is not None
        return (2 * slope, None, None, None, None)

    monkeypatch.setattr(module._PackedAttention, "backward", staticmethod(doubled))
    found = slopes(packed_run(layer, x, None, mask, rows, rows), [x])
    assert calls == [1]
    assert not torch.allclose(found[0], expected[0])


def test_the_derivative_by_finite_differences() -> None:
    layer, keep = make(), keep_of([2, 3])
    rows = Rows(keep)
    mask = PackedMask(keep.unsqueeze(1) & subsequent_mask(3), rows, rows)
    assert torch.autograd.gradcheck(lambda x: attend_rows(layer, x, x, mask), normal(5, 8))
    assert torch.autograd.gradcheck(
        lambda x, memory: attend_rows(layer, x, memory, mask), (normal(5, 8), normal(5, 8))
    )


def test_a_packed_batch_equals_its_sentences_one_by_one() -> None:
    layer, lengths = make(), [3, 1, 5]
    keep = keep_of(lengths)
    rows, x = Rows(keep), normal(3, 5, 8)
    packed = packed_run(layer, x, None, keep.unsqueeze(1), rows, rows)
    alone = [layer(*[x[i : i + 1, :n]] * 3)[0] for i, n in enumerate(lengths)]
    assert_equal([packed], [torch.cat(alone)])


def test_a_sentence_without_keys_takes_the_detour_and_gets_zeros() -> None:
    layer = make()
    queries, keys = keep_of([2, 3]), keep_of([4, 0])
    x, memory, mask = normal(2, 3, 8), normal(2, 4, 8), keys.unsqueeze(1)
    found = packed_run(layer, x, memory, mask, Rows(queries), Rows(keys))
    assert_equal([found], [layer(x, memory, memory, mask)[queries]])
    assert_equal([found[2:]], [layer.get_parameter("linears.3.bias").expand(3, 8)])


def test_attention_dropout_acts_in_training_only() -> None:
    layer, keep = make(), keep_of([6])
    rows, x, mask = Rows(keep), normal(1, 6, 8), keep.unsqueeze(1)
    layer.dropout.p = 0.5
    first, second = (packed_run(layer, x, None, mask, rows, rows) for _ in range(2))
    assert not torch.equal(first, second)
    layer.eval()
    assert_equal([packed_run(layer, x, None, mask, rows, rows)], [layer(x, x, x, mask)[0]])


@settings(max_examples=20)
@given(seeds, st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_linear_layers_side_by_side(seed: int, rows: int, count: int, packed: bool) -> None:
    torch.manual_seed(seed)
    x = normal(rows, 5) if packed else normal(2, rows, 5)
    layers = [nn.Linear(5, size).double() for size in range(2, 2 + count)]
    found = fused_linear(x, *layers)
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    inputs = [x, *(p for layer in layers for p in layer.parameters())]
    assert_equal([found], [expected])
    assert_equal(slopes(found, inputs), slopes(expected, inputs))


def test_a_query_that_sees_nothing_gets_zeros(precision: str) -> None:
    x = normal(2, 3, 4, 8)
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    mask[0, 0, 1], mask[1] = False, False
    y = fused_attention(x, x, x, mask)
    assert (y[0, :, 1] == 0).all()
    assert (y[1] == 0).all()
    assert (y[0, :, 0] != 0).any()
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert slope.isfinite().all()
    assert (slope[1] == 0).all()


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("m", [1, 7, SHORT, SHORT + 1])
def test_fused_equals_plain_on_both_sides_of_the_switch(
    precision: str, n: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(m)
    q, k, v = normal(2, 2, n, 8), normal(2, 2, m, 8), normal(2, 2, m, 8)
    mask = torch.rand(2, 1, n, m) < 0.5
    calls, kernel = [], F.scaled_dot_product_attention

    def counted(*inputs: Any, **options: Any) -> Tensor:
        calls.append(1)
        return kernel(*inputs, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    for some in (None, mask):
        ours, plain = fused_attention(q, k, v, some), attention(q, k, v, some)[0]
        assert_equal([ours], [plain])
        assert_equal(slopes(ours, [q, k, v]), slopes(plain, [q, k, v]))
    plain_way = precision == "medium" and n > 1 and m <= SHORT
    assert plain_is_faster(q, k) == plain_way
    assert len(calls) == (0 if plain_way else 2)
