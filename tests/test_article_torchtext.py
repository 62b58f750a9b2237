"""Tests of the article's pipeline on torchtext 0.6."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtext.data import Dataset, Example, Field

from annotated_transformer.data.corpora import ParallelText, load_corpus
from annotated_transformer.notation import PAD
from annotated_transformer.translation.article import (
    BLANK_WORD,
    BatchSize,
    MyIterator,
    make_dataset,
    make_fields,
    rebatch,
)


def dataset(lengths: list[tuple[int, int]]) -> Dataset:
    named = [("src", Field()), ("trg", Field())]
    examples = [Example.fromlist(["a " * n, "b " * m], named) for n, m in lengths]
    return Dataset(examples, named)


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=60)


@settings(max_examples=60)
@given(lengths=LENGTHS, budget=st.integers(22, 200), train=st.booleans())
def test_no_batch_is_over_its_budget_and_every_sentence_is_in_one(
    lengths: list[tuple[int, int]], budget: int, train: bool
) -> None:
    data = dataset(lengths)
    iterator = MyIterator(data, budget, train=train, pool=10 / budget)
    iterator.init_epoch()
    batches = list(iterator.batches)
    assert Counter(map(id, (pair for batch in batches for pair in batch))) == Counter(
        map(id, data.examples)
    )
    for batch in batches:
        for side, extra in (("src", 0), ("trg", 2)):
            longest = max(len(getattr(pair, side)) for pair in batch) + extra
            assert len(batch) * longest <= budget


def test_a_pool_is_sorted_by_length() -> None:
    data = dataset([(n % 7 + 1, n % 5 + 1) for n in range(100)])
    iterator = MyIterator(data, 60, train=True)
    iterator.init_epoch()
    cut = [[(len(p.src), len(p.trg)) for p in batch] for batch in iterator.batches]
    assert cut != sorted(cut)  # the batches are shuffled
    iterator.init_epoch()
    keys = sorted([(len(p.src), len(p.trg)) for p in batch] for batch in iterator.batches)
    assert [key for batch in keys for key in batch] == sorted(key for b in keys for key in b)


def test_the_size_is_that_of_the_larger_side() -> None:
    size, data = BatchSize(), dataset([(3, 1), (2, 9), (1, 1)])
    assert [size(pair, n, 0) for n, pair in enumerate(data, 1)] == [3, 22, 33]
    assert size(data[2], 1, 0) == 3  # a new batch forgets the longest ones


def test_fields_as_the_article_has_them() -> None:
    text = load_corpus("grammar", "de-en", "val", size=50)
    fields = make_fields("de", "en")
    data = make_dataset(text, fields)
    for field, side in zip(fields, ("src", "trg"), strict=True):
        field.build_vocab((getattr(pair, side) for pair in data), min_freq=1)
    iterator = MyIterator(data, 400, train=False)
    batches = [rebatch(fields[0].vocab.stoi[BLANK_WORD], batch) for batch in iterator]
    seen = []
    for batch in batches:
        assert batch.src_mask.shape == (len(batch.src), 1, batch.src.size(1))
        for src, tgt in zip(batch.src.tolist(), batch.tgt.tolist(), strict=True):
            words = [
                [f.vocab.itos[i] for i in ids] for f, ids in zip(fields, (src, tgt), strict=True)
            ]
            assert words[1][0] == "<s>"
            seen.append(tuple(word for word in words[0] if word != BLANK_WORD))
    assert sorted(seen) == sorted(tuple(pair.src) for pair in data)


def test_long_pairs_are_left_out() -> None:
    long = "word " * 101
    text = ParallelText("x", "train", ("de", "en"), ("a", long, "b"), ("A", "B", long), "", ())
    assert len(make_dataset(text, make_fields("de", "en"))) == 1


def test_rebatch_turns_time_around() -> None:
    pair = type("Pair", (), {"src": torch.ones(5, 2), "trg": torch.full((4, 2), 7)})
    batch = rebatch(PAD, pair)
    assert batch.src.shape == (2, 5)
    assert batch.tgt.shape == batch.tgt_y.shape == (2, 3)


@pytest.mark.parametrize("train", [True, False])
def test_a_sentence_over_the_budget_makes_an_empty_batch(train: bool) -> None:
    iterator = MyIterator(dataset([(30, 30)]), 10, train=train)
    iterator.init_epoch()
    assert sorted(len(batch) for batch in iterator.batches) == [0, 1]  # as the chapter says
