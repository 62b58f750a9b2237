"""Batches, their masks, and the budget of tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from annotated_transformer.notation import BOS, EOS, PAD
from annotated_transformer.training.batches import Batch, make_batch, pad_sequences, token_batches

SENTENCE = st.lists(st.integers(4, 30), max_size=8)
PAIRS = st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=6)
LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=80)


@given(st.lists(st.lists(st.integers(0, 9), max_size=7), max_size=5), st.integers(0, 99))
def test_padding_keeps_every_sequence(sequences, pad):
    block = pad_sequences(sequences, pad)
    assert block.dtype == torch.long
    for row, sequence in zip(block.tolist(), sequences, strict=True):
        assert row[: len(sequence)] == sequence
        assert set(row[len(sequence) :]) <= {pad}
        assert len(row) == max(map(len, sequences))


@given(PAIRS)
def test_batch_asks_for_every_token_and_the_end(pairs):
    sources, targets = zip(*pairs, strict=True)
    batch = make_batch(sources, targets)
    assert batch.ntokens == sum(len(t) + 1 for t in targets)
    for i, (source, target) in enumerate(pairs):
        asked = batch.tgt_y[i] != PAD
        assert batch.src[i][batch.src_mask[i, 0]].tolist() == [*source, EOS]
        assert batch.tgt[i][asked].tolist() == [BOS, *target]
        assert batch.tgt_y[i][asked].tolist() == [*target, EOS]
        assert [t for t in batch.target[i].tolist() if t != PAD] == [BOS, *target, EOS]


@given(PAIRS)
def test_masks_by_the_definition(pairs):
    batch = make_batch(*zip(*pairs, strict=True))
    rows, n = batch.tgt.shape
    assert batch.src_mask.shape == (rows, 1, batch.src.size(1))
    assert batch.tgt_mask.shape == (rows, n, n)
    for b in range(rows):
        assert batch.src_mask[b, 0].tolist() == [t != PAD for t in batch.src[b].tolist()]
        for query in range(n):
            for key in range(n):
                allowed = key <= query and batch.tgt[b, key].item() != PAD
                assert batch.tgt_mask[b, query, key].item() == allowed


def test_article_style_arguments():
    data = torch.randint(1, 11, (3, 10))
    batch = Batch(data, data, 0)
    assert batch.tgt.shape == batch.tgt_y.shape == (3, 9)
    assert batch.ntokens == 27
    only_source = Batch(data)
    assert not hasattr(only_source, "tgt")


def test_another_number_for_padding():
    tokens = torch.tensor([[0, 5, 2, 2], [0, 7, 8, 1]])
    batch = Batch(tokens, tokens, pad=2)
    assert batch.ntokens == 1 + 3
    assert batch.src_mask[:, 0].tolist() == [[True, True, False, False], [True] * 4]


TENSORS = ("src", "src_mask", "target", "tgt", "tgt_y", "tgt_mask")


@pytest.mark.parametrize("non_blocking", [False, True])
def test_to_a_device(non_blocking):
    batch = make_batch([[5, 6], [7]], [[5], [6, 7]])
    moved = batch.to(torch.device("cpu"), non_blocking=non_blocking)
    for name in TENSORS:
        assert torch.equal(getattr(moved, name), getattr(batch, name))
    assert (moved.ntokens, moved.pad) == (batch.ntokens, batch.pad)


def test_every_tensor_is_moved_and_nothing_is_counted_again():
    batch = make_batch([[5, 6], [7]], [[5], [6, 7]])
    moved = batch.to(torch.device("meta"))  # where nothing can be counted
    for name in TENSORS:
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == getattr(batch, name).shape
        assert getattr(batch, name).device.type == "cpu"  # the batch itself stays
    assert moved.ntokens == 2 + 3


def test_a_batch_of_sources_alone():
    batch = Batch(torch.tensor([[5, 4]]), pad=4)
    moved = batch.to(torch.device("cpu"))
    assert not hasattr(moved, "tgt")
    assert (moved.pad, moved.ntokens) == (4, 0)
    assert moved.src_mask.tolist() == [[[True, False]]]


@given(LENGTHS, st.integers(60, 400), st.integers(1, 5), st.integers(0, 5), st.booleans())
def test_the_budget_is_never_broken(lengths, budget, pool, seed, shuffle):
    batches = token_batches(lengths, budget, pool=pool, seed=seed, shuffle=shuffle)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch
        for side in (0, 1):
            assert len(batch) * max(lengths[i][side] for i in batch) <= budget


@given(LENGTHS, st.integers(60, 200))
def test_without_shuffling_from_short_to_long(lengths, budget):
    batches = token_batches(lengths, budget, shuffle=False)
    order = [max(lengths[i]) for batch in batches for i in batch]
    assert order == sorted(order)
    for batch, following in pairwise(batches):  # no batch ends too early
        width = max(lengths[following[0]])
        assert width * (len(batch) + 1) > budget


def test_order_depends_on_seed_and_epoch_alone():
    lengths = [(i % 17 + 1, i % 13 + 1) for i in range(300)]
    first = token_batches(lengths, 100, seed=1)
    assert token_batches(lengths, 100, seed=1) == first
    assert token_batches(lengths, 100, seed=2) != first
    assert token_batches(lengths, 100, seed=1, epoch=1) != first


def test_a_sentence_longer_than_the_budget_is_named():
    with pytest.raises(ValueError, match="sentence 2 has 9 tokens"):
        token_batches([(3, 3), (2, 9)], 8)


def test_nothing_to_batch():
    assert token_batches([], 10) == []
    assert pad_sequences([]).numel() == 0
