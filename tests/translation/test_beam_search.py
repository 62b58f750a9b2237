"""Tests of beam search: it is its definition, whatever the batch, the caches and the early stop."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotated_transformer.fast import search
from annotated_transformer.fast.decoding import start_steps
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.notation import BOS, EOS, SpecialIds
from annotated_transformer.translation import beam_search as module
from annotated_transformer.translation.beam_search import (
    Hypothesis,
    beam_search,
    check_search,
    length_penalty,
    stable_topk,
)
from annotated_transformer.translation.greedy import (
    greedy_search,
    readable_steps,
    strip_special_tokens,
)
from benchmarks.chapters import definitions
from tests.translation.small import opinionated

VOCAB = 9
beam_search_uncached = definitions("translation/beam_search")["beam_search_uncached"]


def model(seed: int = 0, ends: float = 0.0, size: int = VOCAB, **options: Any) -> EncoderDecoder:
    return opinionated(seed, ends, size, **options)


def every_output(
    net: EncoderDecoder, source: list[int], limit: int
) -> list[tuple[list[int], float]]:
    """The oracle: all outputs with their log-probabilities, whole prefixes, no caches."""
    src = torch.tensor([[*source, EOS]])
    outputs, prefixes, sums = [], [[BOS]], torch.zeros(1).double()
    for length in range(1, limit + 1):
        ys = torch.tensor(prefixes)
        see = torch.ones(1, length, length).tril().bool()
        with torch.no_grad():
            out = net(src.expand(len(ys), -1), ys, torch.ones(1, 1, src.size(1)).bool(), see)
            following = sums.unsqueeze(1) + net.generator(out[:, -1])
        longer = [[*p, t] for p in prefixes for t in range(following.size(1))]
        over = [p[-1] == EOS or length == limit for p in longer]
        pairs = list(zip(longer, following.flatten().tolist(), over, strict=True))
        outputs += [(p[1:], value) for p, value, ended in pairs if ended]
        prefixes = [p for p, _, ended in pairs if not ended]
        kept = [value for _, value, ended in pairs if not ended]
        sums = torch.tensor(kept, dtype=torch.double)
    return outputs


def score(tokens: Sequence[int], log_probability: float, alpha: float) -> float:
    divisor: float = ((5 + len(tokens)) / 6) ** alpha
    return log_probability / divisor


def assert_same(
    found: list[Hypothesis], expected: list[Hypothesis], tolerance: float = 1e-9
) -> None:
    assert [h.tokens for h in found] == [h.tokens for h in expected]
    for a, b in zip(found, expected, strict=True):
        assert math.isclose(a.score, b.score, rel_tol=tolerance, abs_tol=tolerance)
        assert math.isclose(
            a.log_probability, b.log_probability, rel_tol=tolerance, abs_tol=tolerance
        )


sentence = st.lists(st.integers(4, VOCAB - 1), max_size=5)
sentences = st.lists(sentence, min_size=1, max_size=5)
seeds = st.integers(0, 10**6)
alphas = st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.5])


@settings(max_examples=30)
@given(seeds, st.integers(5, 6), st.integers(1, 3), alphas, st.floats(-2, 2))
def test_a_wide_beam_finds_every_output(
    seed: int, size: int, limit: int, alpha: float, ends: float
) -> None:
    net = model(seed, ends, size)
    outputs = every_output(net, [4], limit)
    assert math.isclose(sum(math.exp(p) for _, p in outputs), 1)
    count = len(outputs)
    options: dict[str, Any] = {"beam": count, "alpha": alpha, "max_len": limit, "n_best": count}
    (found,) = beam_search(net, [[4]], **options)
    assert_same(search.beam_search(net, [[4]], **options)[0], found)
    outputs.sort(key=lambda output: -score(output[0], output[1], alpha))
    assert len(found) == count
    for h, (tokens, log_probability) in zip(found, outputs, strict=True):
        assert math.isclose(h.score, score(tokens, log_probability, alpha), abs_tol=1e-9)
    truth = {(tuple(strip_special_tokens(tokens)), round(p, 9)) for tokens, p in outputs}
    assert {(tuple(h.tokens), round(h.log_probability, 9)) for h in found} == truth


@settings(max_examples=30)
@given(seeds, st.integers(1, 6), st.integers(1, 4), alphas, st.floats(-2, 2))
def test_what_any_beam_finds_is_real_and_never_better_than_the_best(
    seed: int, beam: int, limit: int, alpha: float, ends: float
) -> None:
    net = model(seed, ends, 5)
    truth = {tuple(tokens): p for tokens, p in every_output(net, [4], limit)}
    best = max(score(tokens, p, alpha) for tokens, p in truth.items())
    (found,) = beam_search(net, [[4]], beam=beam, alpha=alpha, max_len=limit, n_best=beam)
    assert found[0].score <= best + 1e-9
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    scores = [score(tokens, p, alpha) for tokens, p in truth.items()]
    for h in found:
        assert any(math.isclose(h.score, s, abs_tol=1e-9) for s in scores)


@settings(max_examples=40)
@given(
    seeds,
    sentences,
    st.integers(1, 5),
    alphas,
    st.integers(0, 9),
    st.integers(-2, 6),
    st.floats(-1, 4),
    st.data(),
)
def test_batched_and_early_cached_or_not_is_the_plain_search(
    seed: int,
    sources: list[list[int]],
    beam: int,
    alpha: float,
    max_len: int,
    extra: int,
    ends: float,
    data: st.DataObject,
) -> None:
    net = model(seed, ends, norm=data.draw(st.sampled_from(["post", "pre"])))
    n_best = data.draw(st.integers(1, beam))
    options: dict[str, Any] = {
        "beam": beam,
        "alpha": alpha,
        "max_len": max_len,
        "extra": extra,
        "n_best": n_best,
    }
    together = beam_search(net, sources, **options)
    cached = search.beam_search(net, sources, **options)
    assert len(together) == len(cached) == len(sources)
    for source, found, other in zip(sources, together, cached, strict=True):
        assert_same(other, found)
        limit = max(0, min(max_len, len(source) + extra))
        if limit:
            plain = beam_search_uncached(net, source, beam=beam, alpha=alpha, limit=limit)
            assert_same(found, plain[:n_best])
        else:
            assert found == [Hypothesis([], 0.0, 0.0)]
        assert_same(found, beam_search(net, [source], **options)[0])
    for a, b in zip(beam_search(net, sources[::-1], **options)[::-1], together, strict=True):
        assert_same(a, b)


@settings(max_examples=30)
@given(seeds, sentences, st.integers(0, 9), st.integers(-2, 6), st.floats(-1, 4), alphas)
def test_a_beam_of_one_is_greedy(
    seed: int, sources: list[list[int]], max_len: int, extra: int, ends: float, alpha: float
) -> None:
    net = model(seed, ends)
    found = beam_search(net, sources, beam=1, alpha=alpha, max_len=max_len, extra=extra)
    assert [h.tokens for (h,) in found] == greedy_search(net, sources, max_len, extra=extra)


def test_the_examples_above_differ_and_search_pays() -> None:
    better, stops = 0, 0
    for seed in range(20):
        net = model(seed, 1.0)
        calls: list[int] = []
        (narrow,), (wide,) = (beam_search(net, [[4, 5]], beam=b, alpha=0.0) for b in (1, 5))
        better += wide[0].score > narrow[0].score + 1e-9
        net.decoder.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        beam_search(net, [[4, 5]], beam=5, alpha=0.6)
        stops += len(calls) < 52
    assert better > 5
    assert stops > 4


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_the_bound_stops_before_every_place_is_taken(
    alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is shorter than one that goes on while anything is open, with the same result."""
    sources = [[4, 5], [6], [7, 8, 4, 4]]
    shorter = 0
    for seed in range(12):
        runs = []
        for early in (True, False):
            net = model(seed, 2.0)
            calls: list[int] = []
            net.decoder.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            with monkeypatch.context() as patch:
                if not early:
                    patch.setattr(
                        module._Open, "active", lambda now: now.log_probs.amax(1) > -torch.inf
                    )
                runs.append((beam_search(net, sources, beam=4, alpha=alpha), len(calls)))
        (first, few), (second, many) = runs
        assert first == second
        assert few <= many
        shorter += few < many
    assert shorter > 1


def test_a_wrong_bound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above can fail: with the divisor of the present length they would."""

    def too_early(now: module._Open) -> Tensor:
        divisor = length_penalty(now.outputs.size(2) + 1, 2.5)
        return now.log_probs.amax(1) / divisor > now.beaten

    sources, differ = [[4, 5], [6], [7, 8, 4, 4]], 0
    for seed in range(40):
        net = model(seed, 1.0)
        right = beam_search(net, sources, beam=4, alpha=2.5, extra=6)
        with monkeypatch.context() as patch:
            patch.setattr(module._Open, "active", too_early)
            differ += beam_search(net, sources, beam=4, alpha=2.5, extra=6) != right
    assert differ > 0


def test_draws_are_decided_by_order() -> None:
    """All tokens equally probable: the first hypotheses and the smallest tokens win."""
    net = model(size=200)
    for parameter in net.parameters():
        parameter.detach().zero_()
    plain = beam_search_uncached(net, [4], beam=3, alpha=0.6, limit=4)
    (found,) = beam_search(net, [[4]], beam=3, alpha=0.6, max_len=4, n_best=3)
    assert_same(found, plain)
    lengths = [h.log_probability / -math.log(200) for h in plain]
    assert [round(n) for n in lengths] == [1, 4, 4]  # of 0, 1 and 2, the last is the end symbol
    assert [h.tokens for h in plain] == [[], [], [1]]  # 0 0 0 0 and 0 0 0 1, without padding
    assert beam_search(net, [[4]] * 3, beam=3, max_len=4)[1][0] == found[0]
    assert_same(search.beam_search(net, [[4]], beam=3, max_len=4, n_best=3)[0], plain)


@settings(max_examples=60)
@given(seeds, st.integers(1, 3), st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_topk_is_that_of_a_stable_sort(
    seed: int, rows: int, count: int, more: int, draws: bool
) -> None:
    torch.manual_seed(seed)
    values = torch.randn(rows, count + more)
    values = values.round() if draws else values
    values[torch.rand_like(values) < 0.3] = -torch.inf
    found, places = stable_topk(values, count)
    expected = values.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(found, expected.values[:, :count])
    real = found > -torch.inf
    assert torch.equal(places[real], expected.indices[:, :count][real])


def test_length_penalty() -> None:
    assert length_penalty(1, 0.6) == 1
    assert length_penalty(7, 1.0) == 2
    assert length_penalty(300, 0.0) == 1
    assert math.isclose(length_penalty(19, 0.5), 2)
    lengths = [length_penalty(n, 0.3) for n in range(1, 400)]
    assert lengths == sorted(lengths)


def test_limits_follow_each_source() -> None:
    net = model(ends=-1e4, max_len=400)
    found = search.beam_search(net, [[], [4] * 7], beam=2)
    assert [len(h.tokens) for (h,) in found] == [50 - pads(found[0][0]), 57 - pads(found[1][0])]
    ((best, *_),) = search.beam_search(net, [[4] * 7], beam=8, alpha=0.3, extra=300, max_len=400)
    assert len(best.tokens) == 307 - pads(best)
    short = model(ends=-1e4, max_len=12)
    assert len(beam_search(short, [[4]], beam=2)[0][0].tokens) <= 12


def pads(h: Hypothesis) -> int:
    """How many paddings were generated, and stripped: the score tells the length."""
    ratio = h.log_probability / h.score  # ((5 + length) / 6) ** alpha
    alphas = {0.6, 0.3}
    lengths = {round(6 * ratio ** (1 / alpha) - 5, 6) for alpha in alphas}
    (length,) = {int(n) for n in lengths if n in (50, 57, 307)}
    return length - len(h.tokens)


def test_finished_sentences_leave_the_batch() -> None:
    net, rows = model(3, 1.0), []
    net.decoder.register_forward_hook(lambda _, args, out: rows.append(len(out)))
    beam_search(net, [[4] * n for n in (0, 1, 2, 3)], beam=3, extra=2)
    assert rows[0] == 12
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 12


def test_edges() -> None:
    net = model()
    assert beam_search(net, []) == []
    assert len(beam_search(net, [[], [4]])) == 2
    assert beam_search(net, [[4, 5]], max_len=0) == [[Hypothesis([], 0.0, 0.0)]]
    assert beam_search(net, [[4]], extra=-5, n_best=4) == [[Hypothesis([], 0.0, 0.0)]]
    (found,) = beam_search(net, [[4]], beam=40, n_best=40, max_len=1)
    assert len(found) == VOCAB  # a beam larger than the vocabulary: every output of one token
    with pytest.raises(IndexError, match="81 tokens, and only 80 positions"):
        beam_search(net, [[4] * 80])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0}, "beam 0: must be at least 1"),
        ({"beam": -3}, "beam -3"),
        ({"alpha": -0.1}, "alpha -0.1: must be from 0 to 10"),
        ({"alpha": math.inf}, "alpha inf"),
        ({"alpha": math.nan}, "alpha nan"),
        ({"n_best": 5}, "n_best 5: must be from 1 to the beam, 4"),
        ({"n_best": 0}, "n_best 0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        beam_search(model(), [[4]], **options)
    with pytest.raises(ValueError, match=message):
        beam_search(model(), [], **options)  # also where there is nothing to do
    check_search(1, 0.0)
    check_search(1, 10)


def test_a_model_that_gives_no_numbers() -> None:
    net = model()
    net.get_parameter("generator.proj.bias").detach().fill_(math.nan)
    with pytest.raises(FloatingPointError, match="are NaN"):
        beam_search(net, [[4]])


def test_nothing_is_changed() -> None:
    net = model()
    weights = copy.deepcopy(net.state_dict())
    net.train()
    beam_search(net, [[4]], max_len=5)
    assert net.training
    assert all(
        torch.equal(a, b) for a, b in zip(weights.values(), net.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("beam", [1, 3])
def test_special_tokens_may_have_other_numbers(beam: int) -> None:
    """Tokens are renamed, and so are the rows of the model's tables: outputs are renamed, too."""
    renamed, special = torch.tensor([8, 3, 5, 0, 1, 2, 4, 6, 7]), SpecialIds(pad=8, bos=3, eos=5)
    net, sources = model(3, ends=0.5), [[4, 5, 6], [7], []]
    other = copy.deepcopy(net)
    sides = ("src_embed.0.lut.weight", "tgt_embed.0.lut.weight")
    for name in (*sides, "generator.proj.weight", "generator.proj.bias"):
        other.get_parameter(name).data[renamed] = net.get_parameter(name).data
    to = renamed.tolist()
    for start in (readable_steps, start_steps):
        found = beam_search(net, sources, beam=beam, max_len=7, start=start)
        names = [[to[t] for t in source] for source in sources]
        again = beam_search(other, names, beam=beam, max_len=7, start=start, special=special)
        assert [[to[t] for t in one[0].tokens] for one in found] == [a[0].tokens for a in again]
        greedy = greedy_search(net, sources, 7, start=start)
        others = greedy_search(other, names, 7, start=start, special=special)
        assert [[to[t] for t in one] for one in greedy] == others
        assert any(greedy)


def test_without_float64_sums_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Apple's GPUs, which have none."""
    net, sources = model(0).float(), [[4, 5], [6, 7, 8]]
    exact = beam_search(net, sources, max_len=6)
    begin, kinds = module._begin, []

    def seen(*arguments: Any) -> Any:
        made = begin(*arguments)
        kinds.append(made.log_probs.dtype)
        return made

    monkeypatch.setattr(module, "_begin", seen)
    monkeypatch.setattr(module, "sum_type", lambda device: torch.float32)
    found = beam_search(net, sources, max_len=6)
    assert kinds == [torch.float32]
    for ours, theirs in zip(found, exact, strict=True):
        assert ours[0].tokens == theirs[0].tokens
        assert ours[0].score == pytest.approx(theirs[0].score, abs=1e-4)
