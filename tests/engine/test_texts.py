"""Texts become token numbers, and the order of updates can be taken up anywhere."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotated_transformer.data.corpora import ParallelText, read_parallel
from annotated_transformer.data.files import CorpusError
from annotated_transformer.data.shards import TokenPairs
from annotated_transformer.engine import texts as module
from annotated_transformer.engine.config import OptimOptions, UsageError
from annotated_transformer.engine.texts import encode_pairs, learn_tokenizers, updates_to_come
from annotated_transformer.training.batches import token_batches
from tests.engine.small import OPTIONS, TEXTS

DATA = OPTIONS.data


def files(folder: Path, source: list[str], target: list[str]) -> ParallelText:
    """Write two files and read them."""
    for name, lines in (("a.de", source), ("a.en", target)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return read_parallel(folder / "a.de", folder / "a.en")


def test_tokenizers() -> None:
    first, second = learn_tokenizers(TEXTS[0], DATA)
    assert first is second
    assert len(first) == 300
    first, second = learn_tokenizers(TEXTS[0], replace(DATA, tokenizer="words"))
    assert first is not second
    first, second = learn_tokenizers(TEXTS[0], replace(DATA, tokenizer="bpe-lower"))
    assert first is second
    assert first.encode("DER Mann") == first.encode("der mann")
    with pytest.raises(UsageError, match="--vocabulary 10: "):
        learn_tokenizers(TEXTS[0], replace(DATA, vocabulary=10))
    with pytest.raises(UsageError, match="--vocabulary 99999: "):
        learn_tokenizers(TEXTS[0], replace(DATA, vocabulary=99999))


@pytest.mark.parametrize("side", [0, 1])
def test_a_long_sentence_is_named_by_file_and_line(side: int, tmp_path: Path) -> None:
    lines = [["kurz", "", "kurz", "kurz", "lang"], ["short", "x", "short", " ", "short"]]
    lines[0][4] = lines[1][4] = "short"
    lines[side][4] = "very long " * 30
    text = files(tmp_path, *lines)
    assert len(text) == 3  # two pairs have a blank side
    tokenizers = learn_tokenizers(TEXTS[0], DATA)
    name = ("a.de", "a.en")[side]
    with pytest.raises(CorpusError, match=f"{name}, line 5: .*--skip-long"):
        encode_pairs(text, tokenizers, replace(DATA, max_len=20))
    short = encode_pairs(text, tokenizers, replace(DATA, max_len=20, skip_long=True))
    assert len(short) == 2
    with pytest.raises(CorpusError, match="all sentences are too long"):
        encode_pairs(text, tokenizers, replace(DATA, max_len=1, skip_long=True))


def test_tabs_and_quotes_are_text(tmp_path: Path) -> None:
    lines = ['Er sagt "ja"\tund geht.', '"', "\tein Wort"]
    text = files(tmp_path, lines, lines)
    tokenizers = learn_tokenizers(TEXTS[0], DATA)
    encoded = encode_pairs(text, tokenizers, DATA)
    sources = [source.tolist() for source, _ in encoded.pairs(range(len(encoded)))]
    assert [tokenizers[0].decode(ids) for ids in sources] == lines


def numbers(groups: Sequence[Tensor]) -> list[list[int]]:
    """Return the micro-batches of an update as lists."""
    return [group.tolist() for group in groups]


@settings(max_examples=20)
@given(done=st.integers(0, 12), accumulate=st.integers(1, 4), seed=st.integers(0, 3))
def test_updates_to_come_are_those_after_the_ones_done(
    done: int, accumulate: int, seed: int
) -> None:
    encoded = TokenPairs.from_lists(
        [[4] * (n % 5 + 1) for n in range(20)], [[n + 4] for n in range(20)]
    )
    options = OptimOptions(updates=12, max_tokens=12, accumulate=accumulate, seed=seed)
    every = list(updates_to_come(encoded, options, 0))
    rest = list(updates_to_come(encoded, options, done))
    assert len(every) == 12
    assert len(rest) == 12 - done
    for (epoch, left, batches), other in zip(every[done:], rest, strict=True):
        assert (epoch, left) == other[:2]
        assert numbers(batches) == numbers(other[2])
    first = [update for update in every if update[0] == 0]
    if every[-1][0] > 0:  # a whole epoch: each sentence once
        assert [left for _, left, _ in first] == list(range(len(first)))[::-1]
        seen = [i for *_, groups in first for group in numbers(groups) for i in group]
        assert sorted(seen) == list(range(20))


@settings(max_examples=20)
@given(done=st.integers(0, 12), accumulate=st.integers(1, 4))
def test_earlier_epochs_need_not_be_put_in_order_again(done: int, accumulate: int) -> None:
    encoded = TokenPairs.from_lists(
        [[4] * (n % 5 + 1) for n in range(20)], [[n + 4] for n in range(20)]
    )
    options = OptimOptions(updates=12, max_tokens=24, accumulate=accumulate)
    every = list(updates_to_come(encoded, options, 0))
    epoch = every[done][0] if done < 12 else every[-1][0]
    before = sum(update[0] < epoch for update in every)
    asked: list[int] = []

    def watched(*arguments: Any, **named: Any) -> list[Tensor]:
        asked.append(named["epoch"])
        return token_batches(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "token_batches", watched)
        rest = list(updates_to_come(encoded, options, done, (epoch, before)))
    assert len(rest) == 12 - done
    for (number, left, batches), other in zip(every[done:], rest, strict=True):
        assert (number, left) == other[:2]
        assert numbers(batches) == numbers(other[2])
    assert min(asked) == epoch
