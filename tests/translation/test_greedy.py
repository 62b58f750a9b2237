"""Tests of greedy decoding: batches, ends and limits change nothing but the time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotated_transformer.fast import search
from annotated_transformer.fast.sampling import Sampling, sample
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.multi_head import padding_mask
from annotated_transformer.model.transformer import make_model
from annotated_transformer.notation import BOS, EOS, PAD
from annotated_transformer.training.batches import pad_sequences
from annotated_transformer.translation.beam_search import beam_search
from annotated_transformer.translation.greedy import (
    PrefixSteps,
    greedy_decode,
    greedy_search,
    max_positions,
    strip_special_tokens,
)
from tests.translation.small import opinionated

VOCAB = 11


sentence = st.lists(st.integers(4, VOCAB - 1), max_size=5)
sentences = st.lists(sentence, min_size=1, max_size=4)
seeds = st.integers(0, 10**6)


def block(sources: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    src = pad_sequences([[*s, EOS] for s in sources])
    return src, padding_mask(src, PAD)


def prefix_by_prefix(net: EncoderDecoder, source: list[int], limit: int) -> list[int]:
    """The definition, for one sentence: no batch, no padding, no cache, whole distributions."""
    src, ys = torch.tensor([[*source, EOS]]), [BOS]
    while len(ys) <= limit:
        mask = torch.ones(len(ys), len(ys)).tril().bool()[None]
        with torch.no_grad():
            out = net(src, torch.tensor([ys]), torch.ones(1, 1, src.size(1)).bool(), mask)
            chosen = int(net.generator(out)[0, -1].argmax())
        if chosen == EOS:
            break
        ys.append(chosen)
    return [y for y in ys[1:] if y != PAD]


@settings(max_examples=40)
@given(seeds, sentences, st.integers(0, 7), st.integers(-3, 3), st.floats(0, 3))
def test_search_is_the_definition_sentence_by_sentence(
    seed: int, sources: list[list[int]], max_len: int, extra: int, ends: float
) -> None:
    net = opinionated(seed, ends)
    together = greedy_search(net, sources, max_len, extra=extra)
    assert search.greedy_search(net, sources, max_len, extra=extra) == together
    for source, output in zip(sources, together, strict=True):
        limit = max(0, min(max_len, len(source) + extra))
        assert output == prefix_by_prefix(net, source, limit)
        assert [output] == greedy_search(net, [source], max_len, extra=extra)
    assert greedy_search(net, sources[::-1], max_len, extra=extra) == together[::-1]


def test_the_examples_above_have_many_outputs_and_ends() -> None:
    sources = [[4, 5, 6], [7], [8, 9, 10, 4, 5], [], [6, 6]]
    found = [greedy_search(opinionated(seed, 1.0), sources, 30) for seed in range(12)]
    lengths = {len(output) for outputs in found for output in outputs}
    assert len(lengths) > 5
    assert len({tuple(output) for outputs in found for output in outputs}) > 12
    assert any(len({len(output) for output in outputs}) > 2 for outputs in found)


LONG = [4, 5, 6, 7] * 60  # 240 tokens


@pytest.mark.parametrize(
    ("positions", "max_len", "extra", "written"),
    [
        (600, None, 50, len(LONG) + 50),  # the paper's limit for translation
        (600, None, 300, len(LONG) + 300),  # and for parsing
        (600, 256, 50, 256),  # what the caller asks for
        (600, 700, 50, len(LONG) + 50),
        (270, None, 50, 270),  # what the model has
        (270, 280, 50, 270),
    ],
)
def test_an_output_without_end_is_as_long_as_allowed(
    positions: int, max_len: int | None, extra: int, written: int
) -> None:
    net = opinionated(ends=-1e4, max_len=positions)
    net.get_parameter("generator.proj.bias").detach()[PAD] = -1e4  # which would be stripped
    short = min(written, 1 + extra)
    found = search.greedy_search(net, [LONG, [4]], max_len, extra=extra)
    assert [len(output) for output in found] == [written, short]
    for beam in (1, 2):
        every = search.beam_search(net, [LONG, [4]], beam=beam, max_len=max_len, extra=extra)
        assert [len(best.tokens) for (best,) in every] == [written, short]


@pytest.mark.parametrize("find", [greedy_search, search.greedy_search])
def test_a_compiled_model_is_searched_as_it_is_and_says_so(find: Callable[..., object]) -> None:
    model = opinionated(0)
    compiled = torch.compile(model, backend="eager")
    with pytest.warns(UserWarning, match="does not speed up searches"):
        found = find(compiled, [[5, 6, 7]])
    assert found == find(model, [[5, 6, 7]])


@pytest.mark.parametrize("find", [greedy_search, beam_search, search.greedy_search, sample])
def test_a_model_that_is_being_trained_is_searched_without_dropout(
    find: Callable[..., object],
) -> None:
    net, sources = opinionated(dropout=0.5), [[4, 5, 6], [7]]
    more = (Sampling(top_k=1),) if find is sample else ()
    wanted = find(net, sources, *more)
    net.train()
    assert find(net, sources, *more) == wanted
    assert all(module.training for module in net.modules())


def test_tensors_are_searched_as_lists() -> None:
    model = make_model(9, 9, N=1, d_model=8, d_ff=8, h=2)
    rows: Any = torch.randint(4, 9, (3, 5))
    for find in (greedy_search, beam_search):
        assert find(model, rows) == find(model, rows.tolist())
        assert find(model, rows[:0]) == []


def test_strip() -> None:
    assert strip_special_tokens([5, 6, EOS, 7]) == [5, 6]
    assert strip_special_tokens([5, PAD, 6]) == [5, 6]
    assert strip_special_tokens([EOS]) == strip_special_tokens([]) == []


def test_finished_sentences_leave_the_batch() -> None:
    net, seen = opinionated(ends=-1e4), []

    class Counting(PrefixSteps):
        def __call__(self, tokens: Tensor) -> Tensor:
            seen.append(len(tokens))
            return super().__call__(tokens)

    def start(net: EncoderDecoder, src: Tensor, mask: Tensor, beam: int) -> Counting:
        return Counting(net, net.encode(src, mask), mask, beam)

    found = greedy_search(net, [[4], [5, 6, 7], [8, 9, 10, 4, 5]], extra=0, start=start)
    assert seen == [3, 2, 2, 1, 1]
    assert all(len(output) <= most for output, most in zip(found, (1, 3, 5), strict=True))


def test_the_plain_loop_takes_numbers_as_a_mask() -> None:
    net, src = opinionated(5), torch.tensor([[4, 5, 6], [7, 8, 9]])
    expected = greedy_decode(net, src, torch.ones(2, 1, 3).bool(), 8, BOS)
    numbers = torch.ones(1, 1, 3)  # as the article's code has it
    assert torch.equal(greedy_decode(net, src, numbers, max_len=8, start_symbol=BOS), expected)
    assert greedy_decode(net, src, numbers, 1, BOS).tolist() == [[BOS], [BOS]]


@settings(max_examples=20)
@given(seeds, sentences, st.integers(1, 9))
def test_the_plain_loop_is_the_definition(
    seed: int, sources: list[list[int]], max_len: int
) -> None:
    net = opinionated(seed)
    src, mask = block(sources)
    for source, row in zip(sources, greedy_decode(net, src, mask, max_len + 1, BOS), strict=True):
        assert strip_special_tokens(row[1:].tolist()) == prefix_by_prefix(net, source, max_len)


def test_edges() -> None:
    net = opinionated()
    assert greedy_search(net, []) == []
    assert len(greedy_search(net, [[], []])) == 2
    assert greedy_search(net, [[4, 5, 6]], 0) == [[]]
    assert not greedy_decode(net, *block([[4]]), 5, BOS).requires_grad
    net.train()
    greedy_search(net, [[4]], 5)
    assert net.training


@pytest.mark.parametrize("run", [greedy_search, search.greedy_search])
def test_positions_are_limited(
    run: Callable[[EncoderDecoder, list[list[int]]], list[list[int]]],
) -> None:
    net = opinionated(max_len=12)
    assert max_positions(net) == 12
    with pytest.raises(IndexError, match="12 positions"):
        run(net, [[4] * 12])
    for seed in range(5):  # without an end, outputs stop where the model does
        endless = opinionated(seed, ends=-1e3, max_len=12)
        tokens = greedy_decode(endless, *block([[4] * 11]), 13, BOS)[0, 1:].tolist()
        assert run(endless, [[4] * 11]) == [[t for t in tokens if t != PAD]]
