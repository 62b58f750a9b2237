"""Batches, their masks, and the budget of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from annotated_transformer.notation import BOS, EOS, PAD, SpecialIds
from annotated_transformer.training.batches import (
    Batch,
    _fill,
    make_batch,
    pad_sequences,
    token_batches,
)

SENTENCE = st.lists(st.integers(4, 30), max_size=8)
PAIRS = st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=6)
LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=80)


@given(st.lists(st.lists(st.integers(0, 9), max_size=7), max_size=5), st.integers(0, 99))
def test_padding_keeps_every_sequence(sequences: list[list[int]], pad: int) -> None:
    block = pad_sequences(sequences, pad)
    assert block.dtype == torch.long
    for row, sequence in zip(block.tolist(), sequences, strict=True):
        assert row[: len(sequence)] == sequence
        assert set(row[len(sequence) :]) <= {pad}
        assert len(row) == max(map(len, sequences))


@given(PAIRS)
def test_batch_asks_for_every_token_and_the_end(pairs: list[tuple[list[int], list[int]]]) -> None:
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
def test_masks_by_the_definition(pairs: list[tuple[list[int], list[int]]]) -> None:
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


def test_a_batch_needs_as_many_sources_as_targets() -> None:
    with pytest.raises(ValueError, match="1 sources and 2 targets: they go in pairs"):
        make_batch([[5]], [[6], [7]])


def test_article_style_arguments() -> None:
    data = torch.randint(1, 11, (3, 10))
    batch = Batch(data, data, 0)
    assert batch.tgt.shape == batch.tgt_y.shape == (3, 9)
    assert batch.ntokens == 27
    only_source = Batch(data)
    assert not hasattr(only_source, "tgt")


def test_another_number_for_padding() -> None:
    tokens = torch.tensor([[0, 5, 2, 2], [0, 7, 8, 1]])
    batch = Batch(tokens, tokens, pad=2)
    assert batch.ntokens == 1 + 3
    assert batch.src_mask[:, 0].tolist() == [[True, True, False, False], [True] * 4]


TENSORS = ("src", "src_mask", "target", "tgt", "tgt_y", "tgt_mask")


@pytest.mark.parametrize("non_blocking", [False, True])
def test_to_a_device(non_blocking: bool) -> None:
    batch = make_batch([[5, 6], [7]], [[5], [6, 7]])
    moved = batch.to(torch.device("cpu"), non_blocking=non_blocking)
    for name in TENSORS:
        assert torch.equal(getattr(moved, name), getattr(batch, name))
    assert (moved.ntokens, moved.pad) == (batch.ntokens, batch.pad)


def test_what_goes_to_a_gpu_without_waiting_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, bool]] = []
    gpu = torch.device("cuda", 0)

    def pin(tensor: Tensor) -> Tensor:
        done.append(("pin", True))
        return tensor

    def to(tensor: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        assert device == gpu
        done.append(("to", non_blocking))
        return tensor

    batch = make_batch([[5, 6], [7]], [[5], [6, 7]])
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    batch.to(gpu, non_blocking=True)
    assert done == [("pin", True), ("to", True)] * len(TENSORS)
    done.clear()
    batch.to(gpu)
    assert done == [("to", False)] * len(TENSORS)


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_every_tensor_is_moved_and_nothing_is_counted_again(device: str | torch.device) -> None:
    batch = make_batch([[5, 6], [7]], [[5], [6, 7]])
    moved = batch.to(device, non_blocking=True)  # "meta", where nothing can be counted
    for name in TENSORS:
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == getattr(batch, name).shape
        assert getattr(batch, name).device.type == "cpu"  # the batch itself stays
    assert moved.ntokens == 2 + 3


def test_a_batch_of_sources_alone() -> None:
    batch = Batch(torch.tensor([[5, 4]]), pad=4)
    moved = batch.to(torch.device("cpu"))
    assert not hasattr(moved, "tgt")
    assert (moved.pad, moved.ntokens) == (4, 0)
    assert moved.src_mask.tolist() == [[[True, False]]]


def listed(batches: list[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def cut(order: Iterable[int], lengths: list[tuple[int, int]], budget: int) -> list[list[int]]:
    """The rule, sentence by sentence: a batch ends where the next one would not fit."""
    batches: list[list[int]] = []
    batch: list[int] = []
    width = 0
    for i in order:
        width = max(width, *lengths[i])
        if batch and width * (len(batch) + 1) > budget:
            batches.append(batch)
            batch, width = [], max(lengths[i])
        batch.append(i)
    return [*batches, batch] if batch else batches


@given(LENGTHS, st.integers(60, 400), st.integers(1, 5), st.integers(0, 5), st.booleans())
def test_the_budget_is_never_broken(
    lengths: list[tuple[int, int]], budget: int, pool: int, seed: int, shuffle: bool
) -> None:
    batches = listed(token_batches(lengths, budget, pool=pool, seed=seed, shuffle=shuffle))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch
        for side in (0, 1):
            assert len(batch) * max(lengths[i][side] for i in batch) <= budget


@given(LENGTHS, st.integers(60, 200))
def test_without_shuffling_from_short_to_long(lengths: list[tuple[int, int]], budget: int) -> None:
    batches = listed(token_batches(lengths, budget, shuffle=False))
    order = [max(lengths[i]) for batch in batches for i in batch]
    assert order == sorted(order)
    for batch, following in pairwise(batches):  # no batch ends too early
        width = max(lengths[following[0]])
        assert width * (len(batch) + 1) > budget


@given(LENGTHS, st.integers(60, 400))
def test_batches_are_those_of_the_rule(lengths: list[tuple[int, int]], budget: int) -> None:
    order = sorted(
        range(len(lengths)), key=lambda i: (max(lengths[i]), lengths[i][0] - lengths[i][1])
    )
    assert listed(token_batches(lengths, budget, shuffle=False)) == cut(order, lengths, budget)
    longer = torch.tensor([max(pair) for pair in lengths], dtype=torch.int32)
    sizes = [len(batch) for batch in cut(range(len(lengths)), lengths, budget)]
    assert _fill(longer, budget) == sizes  # in any order


@given(LENGTHS, st.integers(60, 100), st.integers(1, 3), st.integers(0, 5))
def test_a_batch_is_a_part_of_a_sorted_pool(
    lengths: list[tuple[int, int]], budget: int, pool: int, seed: int
) -> None:
    """A batch is sorted, and not larger than a pool."""
    batches = listed(token_batches(lengths, budget, pool=pool, seed=seed))
    for batch in batches:
        widths = [max(lengths[i]) for i in batch]
        assert widths == sorted(widths)
    if lengths:
        mean = sum(map(max, lengths)) / len(lengths)
        size = max(1, round(pool * budget / mean))
        whole = [batch for batch in batches if len(batch) > size]
        assert not whole


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_lengths_may_be_a_tensor_of_any_integers(dtype: torch.dtype) -> None:
    lengths = torch.randint(2, 60, (500, 2), generator=torch.Generator().manual_seed(0))
    expected = listed(token_batches([tuple(pair) for pair in lengths.tolist()], 400))
    assert listed(token_batches(lengths.to(dtype), 400)) == expected


def test_long_sentences_do_not_overflow() -> None:
    lengths = torch.tensor(
        [[65_535, 3], [3, 65_000], [65_535, 65_535], [65_534, 9]], dtype=torch.int32
    )
    batches = token_batches(lengths, 65_535, shuffle=False)
    assert listed(batches) == [[1], [3], [2], [0]]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    lengths = [(i % 17 + 1, i % 13 + 1) for i in range(300)]
    first = listed(token_batches(lengths, 100, seed=1))
    torch.manual_seed(5)  # whatever else is drawn
    assert listed(token_batches(lengths, 100, seed=1)) == first
    others = [(2, 0), (1, 1), (2**62, 0), (-1, 0)]
    orders = [listed(token_batches(lengths, 100, seed=s, epoch=e)) for s, e in others]
    assert first not in orders
    assert all(one != other for one, other in pairwise(orders))


def test_a_sentence_goes_anywhere() -> None:
    lengths = torch.randint(1, 40, (3000, 2), generator=torch.Generator().manual_seed(0))
    place = torch.cat(token_batches(lengths, 400)).argsort()
    both = torch.stack([place.double(), torch.arange(3000.0).double()])
    assert abs(torch.corrcoef(both)[0, 1]) < 0.1


def test_padding_is_small() -> None:
    lengths = torch.randint(1, 40, (5000, 2), generator=torch.Generator().manual_seed(0))

    def cells(batches: Iterable[Sequence[int] | Tensor]) -> int:
        return sum(len(batch) * int(lengths[batch].amax(dim=0).sum()) for batch in batches)

    pairs = [tuple(pair) for pair in lengths.tolist()]
    order = random.Random(0).sample(range(5000), 5000)
    size = round(20 * 500 / (sum(map(max, pairs)) / 5000))
    pools = [order[start : start + size] for start in range(0, 5000, size)]
    for pool in pools:  # sorted by the longer side, then as Python sorts pairs
        pool.sort(key=lambda i: (max(pairs[i]), pairs[i]))
    plain = cells([batch for pool in pools for batch in cut(pool, pairs, 500)])
    at_random = cells(cut(order, pairs, 500))
    assert 200_000 < cells(token_batches(lengths, 500, pool=20)) < 1.01 * plain < 0.8 * at_random


def test_a_sentence_longer_than_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="sentence 2 has 9 tokens, more than the 8"):
        token_batches([(3, 3), (2, 9)], 8)


def test_nothing_to_batch() -> None:
    assert token_batches([], 10) == []
    assert token_batches(torch.zeros(0, 2, dtype=torch.int32), 10) == []
    assert pad_sequences([]).numel() == 0


def test_special_tokens_may_have_other_numbers() -> None:
    batch = make_batch([[4, 5], [6]], [[7], [8, 9]], special=SpecialIds(pad=1, bos=2, eos=0))
    assert batch.src.tolist() == [[4, 5, 0], [6, 0, 1]]
    assert batch.target.tolist() == [[2, 7, 0, 1], [2, 8, 9, 0]]
    assert batch.src_mask.tolist() == [[[True, True, True]], [[True, True, False]]]
    assert batch.ntokens == 5
