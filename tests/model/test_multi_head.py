"""Multi-head attention against PyTorch's layer; packed and cached against neither."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from annotated_transformer.model.attention import attention, subsequent_mask
from annotated_transformer.model.multi_head import (
    KeyValueCache,
    MemoryCache,
    MultiHeadedAttention,
    PackedMask,
    Rows,
    affine,
)

seeds = st.integers(0, 2**31)
batches = st.lists(st.integers(1, 6), min_size=1, max_size=4)  # lengths of sentences


def make(h=2, d_model=8, seed=0, **options):
    torch.manual_seed(seed)
    layer = MultiHeadedAttention(h, d_model, 0.0, **options).double()
    nn.init.normal_(layer.in_proj.bias)
    nn.init.normal_(layer.out_proj.bias)
    return layer


def twin(layer):
    other = nn.MultiheadAttention(layer.out_proj.out_features, layer.h, batch_first=True).double()
    with torch.no_grad():
        other.in_proj_weight.copy_(layer.in_proj.weight)
        other.in_proj_bias.copy_(layer.in_proj.bias)
    other.out_proj.load_state_dict(layer.out_proj.state_dict())
    return other


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def slopes(y, inputs):
    steering = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
    return torch.autograd.grad(y, inputs, steering)


def assert_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def keep_of(lengths):
    return torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


@settings(max_examples=30)
@given(seeds, st.sampled_from([1, 2, 4]), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
def test_equals_pytorchs_layer(seed, h, n, m, distinct):
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
    parameters = [layer.in_proj.weight, layer.in_proj.bias, *layer.out_proj.parameters()]
    others = [other.in_proj_weight, other.in_proj_bias, *other.out_proj.parameters()]
    assert_equal([ours], [theirs])
    assert_equal(slopes(ours, unique + parameters), slopes(theirs, unique + others))
    layer.keep_weights = True
    assert_equal([layer(*inputs, mask)], [theirs])
    assert_equal([layer.attn], [weights])


def test_separate_widths_follow_the_formula():
    layer = make(3, 8, d_k=5, d_v=2)
    x, y = normal(1, 4, 8), normal(1, 6, 8)
    w_q, w_k, w_v = (w.chunk(3) for w in layer.in_proj.weight.split(layer.sizes))
    b_q, b_k, b_v = (b.chunk(3) for b in layer.in_proj.bias.split(layer.sizes))
    heads = []
    for i in range(3):
        q, k, v = x @ w_q[i].T + b_q[i], y @ w_k[i].T + b_k[i], y @ w_v[i].T + b_v[i]
        assert q.shape == (1, 4, 5)
        assert v.shape == (1, 6, 2)
        heads.append(attention(q, k, v)[0])
    printed = torch.cat(heads, -1) @ layer.out_proj.weight.T + layer.out_proj.bias
    assert_equal([layer(x, y, y)], [printed])


def test_width_must_fit_the_heads():
    with pytest.raises(ValueError, match="not a multiple of h=3"):
        MultiHeadedAttention(3, 8)
    with pytest.raises(ValueError, match="give d_k and d_v"):
        MultiHeadedAttention(3, 8, d_k=2)
    assert MultiHeadedAttention(3, 8, d_k=2, d_v=2)(*[torch.randn(1, 2, 8)] * 3).shape == (1, 2, 8)


def test_masks_of_numbers_are_understood():
    layer, x = make(), normal(2, 4, 8)
    assert_equal([layer(x, x, x, subsequent_mask(4))], [layer(x, x, x, subsequent_mask(4).long())])


def test_attention_dropout_acts_in_training_only():
    layer, x = make(), normal(1, 6, 8)
    layer.dropout.p = 0.5
    assert not torch.equal(layer(x, x, x), layer(x, x, x))
    layer.eval()
    assert torch.equal(layer(x, x, x), layer(x, x, x))
    assert layer.attn is None


@settings(max_examples=30)
@given(batches, seeds)
def test_pack_and_unpack_are_inverse_and_adjoint(lengths, seed):
    torch.manual_seed(seed)
    keep = keep_of(lengths)
    rows = Rows(keep)
    x = normal(*keep.shape, 3)
    packed = rows.pack(x)
    assert torch.equal(packed, x[keep])
    assert torch.equal(rows.unpack(packed), x * keep.unsqueeze(-1))
    assert rows.positions.tolist() == [i for n in lengths for i in range(n)]
    assert torch.autograd.gradcheck(rows.pack, x)
    assert torch.autograd.gradcheck(rows.unpack, normal(sum(lengths), 3))


@settings(max_examples=30)
@given(batches, seeds, st.integers(1, 3), st.integers(1, 3))
def test_split_takes_each_piece_to_its_place_and_join_brings_it_back(lengths, seed, parts, h):
    torch.manual_seed(seed)
    keep = keep_of(lengths)
    rows, x = Rows(keep), torch.randn(sum(lengths), parts * h * 2)
    cut = rows.split(x, parts, h)
    assert cut.shape == (parts, len(lengths) * h, keep.size(1), 2)
    padded = rows.unpack(x.view(-1, parts, h, 2))  # (batch, length, parts, h, 2)
    expected = padded.permute(2, 0, 3, 1, 4).flatten(1, 2)
    real = keep.repeat_interleave(h, dim=0)
    assert torch.equal(cut[:, real], expected[:, real])
    assert torch.equal(rows.join(cut, h), x)


def test_a_sentence_without_keys_takes_the_detour_and_gets_zeros():
    layer = make()
    queries, keys = keep_of([2, 3]), keep_of([4, 0])
    x, memory, mask = normal(2, 3, 8), normal(2, 4, 8), keys.unsqueeze(1)
    found = packed_run(layer, x, memory, mask, Rows(queries), Rows(keys))
    assert_equal([found], [layer(x, memory, memory, mask)[queries]])
    assert_equal([found[2:]], [layer.out_proj.bias.expand(3, 8)])


@settings(max_examples=20)
@given(seeds, st.integers(1, 9), st.booleans())
def test_affine_is_linear(seed, rows, packed):
    torch.manual_seed(seed)
    shape = (rows, 5) if packed else (2, rows, 5)
    x, weight, bias = normal(*shape), normal(4, 5), normal(4)
    found, expected = affine(x, weight, bias), torch.nn.functional.linear(x, weight, bias)
    inputs = [x, weight, bias]
    assert_equal([found], [expected])
    assert_equal(slopes(found, inputs), slopes(expected, inputs))


def packed_run(layer, x, memory, mask, queries, keys):
    """Self-attention without a memory, attention to the memory otherwise."""
    q = queries.pack(x)
    k = q if memory is None else keys.pack(memory)
    return layer(q, k, k, PackedMask(mask, queries, keys))


@settings(max_examples=30)
@given(batches, seeds, st.booleans())
def test_packed_equals_padded_in_self_attention(lengths, seed, causal):
    layer, keep = make(seed=seed), keep_of(lengths)
    rows, x = Rows(keep), normal(*keep.shape, 8)
    mask = keep.unsqueeze(1)
    if causal:
        mask = mask & subsequent_mask(keep.size(1))
    packed, padded = packed_run(layer, x, None, mask, rows, rows), layer(x, x, x, mask)[keep]
    inputs = [x, *layer.parameters()]
    assert_equal([packed], [padded])
    assert_equal(slopes(packed, inputs), slopes(padded, inputs))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4), seeds)
def test_packed_equals_padded_between_two_sentences(pairs, seed):
    layer = make(seed=seed)
    tgt, src = (keep_of(list(lengths)) for lengths in zip(*pairs, strict=True))
    x, memory, mask = normal(*tgt.shape, 8), normal(*src.shape, 8), src.unsqueeze(1)
    packed = packed_run(layer, x, memory, mask, Rows(tgt), Rows(src))
    padded = layer(x, memory, memory, mask)[tgt]
    inputs = [x, memory, *layer.parameters()]
    assert_equal([packed], [padded])
    assert_equal(slopes(packed, inputs), slopes(padded, inputs))


def test_a_packed_batch_equals_its_sentences_one_by_one():
    layer, lengths = make(), [3, 1, 5]
    keep = keep_of(lengths)
    rows, x = Rows(keep), normal(3, 5, 8)
    packed = packed_run(layer, x, None, keep.unsqueeze(1), rows, rows)
    alone = [layer(*[x[i : i + 1, :n]] * 3)[0] for i, n in enumerate(lengths)]
    assert_equal([packed], [torch.cat(alone)])


@settings(max_examples=20)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), seeds)
def test_cached_equals_uncached_in_any_pieces(pieces, seed):
    layer, n = make(seed=seed), sum(pieces)
    x, memory = normal(2, n, 8), normal(2, 4, 8)
    mask = subsequent_mask(n)
    whole, across = layer(x, x, x, mask), layer(x, memory, memory)
    past, source, start = KeyValueCache(n), MemoryCache(), 0
    with torch.no_grad():
        for size in pieces:
            end = start + size
            new = x[:, start:end]
            part = layer(new, new, new, mask[:, start:end, :end], past)
            assert_equal([part], [whole[:, start:end]])
            assert_equal([layer(new, memory, memory, None, source)], [across[:, start:end]])
            start = end
    assert past.length == n


def test_memory_is_projected_once():
    layer, source = make(), MemoryCache()
    x, memory = normal(1, 1, 8), normal(1, 3, 8)
    first = layer(x, memory, memory, None, source)
    assert_equal([layer(x, 7 * memory, 7 * memory, None, source)], [first])


def test_select_reorders_the_sentences():
    layer, past = make(), KeyValueCache(2)
    x = normal(3, 2, 8)
    past.select(torch.tensor([0]))  # nothing kept yet: nothing to do
    with torch.no_grad():
        layer(x[:, :1], x[:, :1], x[:, :1], None, past)
        order = torch.tensor([2, 0, 0, 1])
        past.select(order)
        new = x[order, 1:]
        got = layer(new, new, new, None, past)
    y = x[order]
    assert_equal([got], [layer(y, y, y, subsequent_mask(2))[:, 1:]])


def test_a_full_cache_says_so():
    past, key = KeyValueCache(2), torch.zeros(1, 1, 2, 4)
    past.append(key, key)
    with pytest.raises(IndexError, match="position 3 is beyond the cache's capacity of 2"):
        past.append(key[:, :, :1], key[:, :, :1])
