"""Tests of greedy decoding: caches, batches, ends and limits change nothing but the time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.model.attention import padding_mask, subsequent_mask
from annotated_transformer.model.transformer import EncoderDecoder, make_model
from annotated_transformer.notation import BOS, EOS, PAD
from annotated_transformer.training.batches import pad_sequences
from annotated_transformer.translation.beam_search import beam_search
from annotated_transformer.translation.decoding import (
    greedy_decode,
    greedy_decode_uncached,
    greedy_search,
    strip,
)

VOCAB = 11


def model(seed: int = 0, ends: float = 0.0, **options: object) -> EncoderDecoder:
    """A model with opinions: its weights are large, so that outputs differ from each other."""
    torch.manual_seed(seed)
    sizes = {"N": 1, "d_model": 8, "d_ff": 16, "h": 2, "max_len": 80, "tie": "none", **options}
    made = make_model(VOCAB, VOCAB, **sizes).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2)
        made.generator.proj.bias.normal_().mul_(0.5)
        made.generator.proj.bias[EOS] += ends
    return made


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
@given(
    seeds,
    sentences,
    st.integers(1, 9),
    st.sampled_from([(1, 8, 1), (2, 8, 2), (2, 12, 4)]),
    st.sampled_from(["post", "pre"]),
    st.sampled_from(["sinusoid", "learned"]),
)
def test_cached_is_uncached(seed, sources, max_len, size, norm, kind):
    layers, width, heads = size
    net = model(seed, N=layers, d_model=width, h=heads, norm=norm, positions=kind)
    src, mask = block(sources)
    plain = greedy_decode_uncached(net, src, mask, max_len, BOS)
    assert plain.shape == (len(sources), max_len)
    assert torch.equal(greedy_decode(net, src, mask, max_len, BOS), plain)


@settings(max_examples=40)
@given(seeds, sentences, st.integers(0, 7), st.integers(-3, 3), st.floats(0, 3))
def test_search_is_the_definition_sentence_by_sentence(seed, sources, max_len, extra, ends):
    net = model(seed, ends)
    together = greedy_search(net, sources, max_len, extra=extra)
    for source, output in zip(sources, together, strict=True):
        limit = max(0, min(max_len, len(source) + extra))
        assert output == prefix_by_prefix(net, source, limit)
        assert [output] == greedy_search(net, [source], max_len, extra=extra)
    assert greedy_search(net, sources[::-1], max_len, extra=extra) == together[::-1]


def test_the_examples_above_have_many_outputs_and_ends():
    sources = [[4, 5, 6], [7], [8, 9, 10, 4, 5], [], [6, 6]]
    found = [greedy_search(model(seed, 1.0), sources, 30) for seed in range(12)]
    lengths = {len(output) for outputs in found for output in outputs}
    assert len(lengths) > 5
    assert len({tuple(output) for outputs in found for output in outputs}) > 12
    assert any(len({len(output) for output in outputs}) > 2 for outputs in found)


@settings(max_examples=10)
@given(seeds, sentences, st.integers(2, 9))
def test_ends_and_padding(seed, sources, max_len):
    net = model(seed, ends=1.0)
    src, mask = block(sources)
    plain = greedy_decode_uncached(net, src, mask, max_len, BOS).tolist()
    found = greedy_decode(net, src, mask, max_len, BOS, end_symbol=EOS, pad=-1).tolist()
    ends = [row.index(EOS) + 1 if EOS in row else max_len for row in plain]
    for row, full, end in zip(found, plain, ends, strict=True):
        assert len(row) == max(ends)
        assert row == full[:end] + [-1] * (max(ends) - end)


def test_finished_sentences_leave_the_batch(monkeypatch):
    net = model(3)
    src, mask = block([[4], [5, 6], [7, 8, 9]])
    seen = []
    decode = net.decode

    def spy(memory, src_mask, tgt, tgt_mask, cache=None):
        assert tgt.size(1) == 1
        assert tgt_mask is None
        assert len(memory) == len(src_mask) == len(tgt)
        seen.append(len(tgt))
        return decode(memory, src_mask, tgt, tgt_mask, cache)

    monkeypatch.setattr(net, "decode", spy)
    limits = torch.tensor([4, 1, 6])
    out = greedy_decode(net, src, mask, 9, BOS, limits=limits)
    assert seen == [2, 2, 2, 1, 1]
    assert (out != PAD).sum(dim=1).le(limits).all()
    assert out.size(1) == 6
    assert out[1].tolist() == [BOS, *[PAD] * 5]


@settings(max_examples=8)
@given(seeds, sentences, st.integers(1, 6))
def test_padding_of_the_source_does_not_matter(seed, sources, more):
    net = model(seed)
    src, mask = block(sources)
    wider = torch.cat([src, torch.full((len(src), more), 5)], dim=1)  # any token, if it is masked
    hidden = torch.cat([mask, torch.zeros(len(src), 1, more).bool()], dim=2)
    first = greedy_decode(net, src, mask, 10, BOS)
    assert torch.equal(greedy_decode(net, wider, hidden, 10, BOS), first)


def test_one_mask_for_all_and_numbers_as_mask():
    net = model(5)
    src = torch.tensor([[4, 5, 6], [7, 8, 9]])
    expected = greedy_decode(net, src, torch.ones(2, 1, 3).bool(), 8, BOS)
    numbers = torch.ones(1, 1, 3)  # as the article's code has it
    assert torch.equal(greedy_decode(net, src, numbers, max_len=8, start_symbol=BOS), expected)
    limits = torch.tensor([3, 8])
    cut = greedy_decode(net, src, numbers, 8, BOS, limits=limits)
    assert torch.equal(cut[1], expected[1])
    assert torch.equal(cut[0, :3], expected[0, :3])


def test_edges():
    net = model()
    src, mask = block([[4, 5], [6]])
    assert greedy_decode(net, src, mask, 1, BOS).tolist() == [[BOS], [BOS]]
    assert greedy_decode_uncached(net, src, mask, 1, BOS).tolist() == [[BOS], [BOS]]
    empty = greedy_decode(net, src[:0], mask[:0], 7, BOS, end_symbol=EOS)
    assert empty.shape == (0, 1)
    assert greedy_search(net, []) == []
    assert len(greedy_search(net, [[], []])) == 2
    assert greedy_search(net, [[4, 5, 6]], 0) == [[]]
    with pytest.raises(ValueError, match="max_len=0"):
        greedy_decode(net, src, mask, 0, BOS)


def test_positions_are_limited():
    net = model(max_len=12)
    assert net.max_len == 12
    src, mask = block([[4] * 11])
    assert greedy_decode(net, src, mask, 13, BOS).shape == (1, 13)  # the last is never an input
    with pytest.raises(IndexError, match="13 tokens is longer than the model's 12 positions"):
        greedy_decode(net, src, mask, 14, BOS)
    with pytest.raises(IndexError, match="13 tokens is longer than the model's 12 positions"):
        greedy_search(net, [[4] * 12])
    for seed in range(5):  # without an end, outputs stop where the model does
        endless = model(seed, ends=-1e3, max_len=12)
        tokens = greedy_decode(endless, *block([[4] * 11]), 13, BOS)[0, 1:].tolist()
        assert greedy_search(endless, [[4] * 11]) == [[t for t in tokens if t != PAD]]


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
def test_an_output_without_end_is_as_long_as_allowed(positions, max_len, extra, written):
    net = model(ends=-1e4, max_len=positions)
    net.generator.proj.bias.detach()[PAD] = -1e4  # which would be stripped
    short = min(written, 1 + extra)
    found = greedy_search(net, [LONG, [4]], max_len, extra=extra)
    assert [len(output) for output in found] == [written, short]
    for beam in (1, 2):
        every = beam_search(net, [LONG, [4]], beam=beam, max_len=max_len, extra=extra)
        assert [len(best.tokens) for (best,) in every] == [written, short]


def test_no_gradient_is_kept_and_the_mode_stays():
    net = model()
    assert not greedy_decode(net, *block([[4]]), 5, BOS).requires_grad
    net.train()
    greedy_search(net, [[4]], 5)
    assert net.training


def test_an_early_token_decides_about_later_ones():
    """A cache that forgot, or a position that stood still, would not show this."""
    net = model(1)
    src, mask = block([[4, 5, 6]])
    with torch.no_grad():
        memory = net.encode(src, mask)
        for other in range(4, VOCAB):
            tokens = torch.tensor([[BOS, other, 4, 4, 4]])
            cache = net.cache(5)
            steps = [net.decode(memory, mask, tokens[:, i : i + 1], None, cache) for i in range(5)]
            at_once = net.decode(memory, mask, tokens, subsequent_mask(5))
            torch.testing.assert_close(torch.cat(steps, dim=1), at_once, rtol=0, atol=1e-12)


def test_strip():
    assert strip([5, 6, EOS, 7]) == [5, 6]
    assert strip([5, PAD, 6]) == [5, 6]
    assert strip([EOS]) == strip([]) == []
