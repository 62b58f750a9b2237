"""The pipeline of The Annotated Transformer: its names on torchtext 0.6."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.article import batch_size_fn, rebatch, tokenize_de, tokenize_en
from annotated_transformer.data.corpora import load_corpus
from annotated_transformer.notation import PAD

data = pytest.importorskip("torchtext.data", reason="of the extra torchtext")


def dataset(lengths: list[tuple[int, int]]) -> Any:
    named = [("src", data.Field()), ("trg", data.Field())]
    examples = [data.Example.fromlist(["a " * n, "b " * m], named) for n, m in lengths]
    return data.Dataset(examples, named)


def iterator(of: Any, max_tokens: int, train: bool = True) -> Any:
    from annotated_transformer.article import MyIterator

    return MyIterator(
        of, batch_size=max_tokens, device=torch.device("cpu"), repeat=False, train=train,
        sort_key=lambda x: (len(x.src), len(x.trg)), batch_size_fn=batch_size_fn,
    )  # fmt: skip


def cut(it: Any) -> Iterator[list[tuple[int, int]]]:
    it.init_epoch()
    return ([(len(p.src), len(p.trg)) for p in batch] for batch in it.batches)


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=60)


@settings(max_examples=60)
@given(lengths=LENGTHS, budget=st.integers(22, 200), train=st.booleans())
def test_no_batch_is_over_its_budget_and_every_sentence_is_in_one(
    lengths: list[tuple[int, int]], budget: int, train: bool
) -> None:
    sentences = dataset(lengths)
    it = iterator(sentences, budget, train)
    it.init_epoch()
    batches = list(it.batches)
    assert Counter(map(id, (pair for batch in batches for pair in batch))) == Counter(
        map(id, sentences.examples)
    )
    for batch in batches:
        for side, extra in (("src", 0), ("trg", 2)):
            longest = max(len(getattr(pair, side)) for pair in batch) + extra
            assert len(batch) * longest <= budget


def test_a_pool_is_sorted_by_length_and_its_batches_are_shuffled() -> None:
    it = iterator(dataset([(n % 7 + 1, n % 5 + 1) for n in range(100)]), 60)
    first, second = list(cut(it)), list(cut(it))
    assert first != sorted(first)
    keys = sorted(second)
    assert [key for batch in keys for key in batch] == sorted(key for b in second for key in b)


def test_a_pool_has_a_hundred_times_as_many_sentences_as_a_batch_may_have_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = iterator(dataset([(n % 4 + 1, 1) for n in range(1000)]), 6)
    in_order = lambda _, items: list(items)  # noqa: E731
    monkeypatch.setattr(type(it.random_shuffler), "__call__", in_order)
    keys = [key for batch in cut(it) for key in batch]
    assert [i for i in range(1, 1000) if keys[i] < keys[i - 1]] == [600]


def test_the_size_is_that_of_the_larger_side() -> None:
    sentences = dataset([(3, 1), (2, 9), (1, 1)])
    assert [batch_size_fn(pair, n, 0) for n, pair in enumerate(sentences, 1)] == [3, 22, 33]
    assert batch_size_fn(sentences[2], 1, 0) == 3  # a new batch forgets the longest ones


def test_fields_as_the_article_has_them() -> None:
    text = load_corpus("grammar", "de-en", "val", size=50)
    fields = (
        data.Field(tokenize=tokenize_de, pad_token="<blank>"),
        data.Field(tokenize=tokenize_en, init_token="<s>", eos_token="</s>", pad_token="<blank>"),
    )
    named = list(zip(("src", "trg"), fields, strict=True))
    sentences = data.Dataset([data.Example.fromlist(pair, named) for pair in text], named)
    for field, side in zip(fields, ("src", "trg"), strict=True):
        field.build_vocab((getattr(pair, side) for pair in sentences), min_freq=1)
    seen = []
    for batch in iterator(sentences, 400, train=False):
        ours = rebatch(fields[0].vocab.stoi["<blank>"], batch)
        assert ours.src_mask.shape == (len(ours.src), 1, ours.src.size(1))
        for src, tgt in zip(ours.src.tolist(), ours.trg.tolist(), strict=True):
            words = [
                [f.vocab.itos[i] for i in ids] for f, ids in zip(fields, (src, tgt), strict=True)
            ]
            assert words[1][0] == "<s>"
            seen.append(tuple(word for word in words[0] if word != "<blank>"))
    assert sorted(seen) == sorted(tuple(pair.src) for pair in sentences)


def test_rebatch_turns_time_around() -> None:
    pair = type("Pair", (), {"src": torch.ones(5, 2), "trg": torch.full((4, 2), 7)})
    batch = rebatch(PAD, pair)
    assert batch.src.shape == (2, 5)
    assert batch.trg.shape == batch.trg_y.shape == (2, 3)


@pytest.mark.parametrize("train", [True, False])
def test_a_sentence_over_the_budget_makes_an_empty_batch(train: bool) -> None:
    batches = cut(iterator(dataset([(30, 30)]), 10, train))
    assert sorted(map(len, batches)) == [0, 1]  # as the page says
