"""Tests of beam search: it is its definition, whatever the batch, the caches and the early stop."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.model.transformer import EncoderDecoder, make_model
from annotated_transformer.notation import BOS, EOS, PAD
from annotated_transformer.translation import beam_search as module
from annotated_transformer.translation.beam_search import (
    Hypothesis,
    beam_search,
    beam_search_uncached,
    best_continuations,
    check_search,
    chunk_maxima,
    length_penalty,
    log_total,
)
from annotated_transformer.translation.decoding import greedy_search, strip
from annotated_transformer.translation.steps import CHUNK, CachedSteps, PackedSteps, can_pack

VOCAB = 9


def model(seed: int = 0, ends: float = 0.0, size: int = VOCAB, **options: object) -> EncoderDecoder:
    """A model with opinions: its weights are large, so that outputs differ from each other."""
    torch.manual_seed(seed)
    sizes = {"N": 1, "d_model": 8, "d_ff": 16, "h": 2, "max_len": 80, "tie": "none", **options}
    made = make_model(size, size, **sizes).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2)
        made.generator.proj.bias.normal_().mul_(0.5)
        made.generator.proj.bias[EOS] += ends
    return made


def every_output(net: EncoderDecoder, source: list[int], limit: int) -> list[tuple]:
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


def score(tokens: list[int], log_probability: float, alpha: float) -> float:
    return log_probability / ((5 + len(tokens)) / 6) ** alpha


def assert_same(found: list[Hypothesis], expected: list[Hypothesis], tolerance=1e-9) -> None:
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
def test_a_wide_beam_finds_every_output(seed, size, limit, alpha, ends):
    net = model(seed, ends, size)
    outputs = every_output(net, [4], limit)
    assert math.isclose(sum(math.exp(p) for _, p in outputs), 1)
    count = len(outputs)
    (found,) = beam_search(net, [[4]], beam=count, alpha=alpha, max_len=limit, n_best=count)
    outputs.sort(key=lambda output: -score(*output, alpha))
    assert len(found) == count
    for h, (tokens, log_probability) in zip(found, outputs, strict=True):
        assert math.isclose(h.score, score(tokens, log_probability, alpha), abs_tol=1e-9)
    truth = {(tuple(strip(tokens)), round(p, 9)) for tokens, p in outputs}
    assert {(tuple(h.tokens), round(h.log_probability, 9)) for h in found} == truth


@settings(max_examples=30)
@given(seeds, st.integers(1, 6), st.integers(1, 4), alphas, st.floats(-2, 2))
def test_what_any_beam_finds_is_real_and_never_better_than_the_best(seed, beam, limit, alpha, ends):
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
def test_batched_cached_and_early_is_the_plain_search(
    seed, sources, beam, alpha, max_len, extra, ends, data
):
    net = model(seed, ends, norm=data.draw(st.sampled_from(["post", "pre"])))
    n_best = data.draw(st.integers(1, beam))
    options = {"beam": beam, "alpha": alpha, "max_len": max_len, "extra": extra, "n_best": n_best}
    together = beam_search(net, sources, **options)
    assert len(together) == len(sources)
    for source, found in zip(sources, together, strict=True):
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
def test_a_beam_of_one_is_greedy(seed, sources, max_len, extra, ends, alpha):
    net = model(seed, ends)
    found = beam_search(net, sources, beam=1, alpha=alpha, max_len=max_len, extra=extra)
    assert [h.tokens for (h,) in found] == greedy_search(net, sources, max_len, extra=extra)


def test_the_examples_above_differ_and_search_pays():
    better, stops = 0, 0
    for seed in range(20):
        net, calls = model(seed, 1.0), []
        (narrow,), (wide,) = (beam_search(net, [[4, 5]], beam=b, alpha=0.0) for b in (1, 5))
        better += wide[0].score > narrow[0].score + 1e-9
        net.decoder.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        beam_search(net, [[4, 5]], beam=5, alpha=0.6)
        stops += len(calls) < 52
    assert better > 5
    assert stops > 4


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_the_bound_stops_before_every_place_is_taken(alpha, monkeypatch):
    """The search is shorter than one that goes on while anything is open, with the same result."""
    sources = [[4, 5], [6], [7, 8, 4, 4]]
    shorter = 0
    for seed in range(12):
        runs = []
        for early in (True, False):
            net, calls = model(seed, 2.0), []
            net.decoder.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            with monkeypatch.context() as patch:
                if not early:
                    patch.setattr(
                        module._Beams, "going", lambda b: b.log_probs.amax(1) > -torch.inf
                    )
                runs.append((beam_search(net, sources, beam=4, alpha=alpha), len(calls)))
        (first, few), (second, many) = runs
        assert first == second
        assert few <= many
        shorter += few < many
    assert shorter > 1


def test_a_wrong_bound_is_noticed(monkeypatch):
    """The comparisons above can fail: with the divisor of the present length they would."""

    def too_early(beams):
        now = length_penalty(beams.outputs.size(2) + 1, beams.alpha)
        return beams.log_probs.amax(1) / now > beams.beaten

    sources, differ = [[4, 5], [6], [7, 8, 4, 4]], 0
    for seed in range(40):
        net = model(seed, 1.0)
        right = beam_search(net, sources, beam=4, alpha=2.5, extra=6)
        with monkeypatch.context() as patch:
            patch.setattr(module._Beams, "going", too_early)
            differ += beam_search(net, sources, beam=4, alpha=2.5, extra=6) != right
    assert differ > 0


def test_fast_steps_find_what_readable_ones_do(monkeypatch):
    if not can_pack(model().float()):
        pytest.skip("this PyTorch has no oneDNN")
    sources, kinds, original = [[4, 5, 6], [7], [], [8, 8, 4, 5, 6]], [], module.start_steps
    monkeypatch.setattr(module, "start_steps", lambda *a: kinds.append(original(*a)) or kinds[-1])
    for seed in range(8):
        net = model(seed, 1.0, size=200, N=2)
        slow = beam_search(net, sources, beam=3, extra=20, n_best=3)
        fast = beam_search(net.float(), sources, beam=3, extra=20, n_best=3)
        assert [type(kind) for kind in kinds[-2:]] == [CachedSteps, PackedSteps]
        for a, b in zip(fast, slow, strict=True):
            assert_same(a, b, tolerance=1e-4)


def log_probability(net: EncoderDecoder, source: list[int], tokens: list[int]) -> float:
    """The log-probability of an output, its end symbol included, in one pass."""
    src, ys = torch.tensor([[*source, EOS]]), torch.tensor([[BOS, *tokens[:-1]]])
    see = torch.ones(1, len(tokens), len(tokens)).tril().bool()
    with torch.no_grad():
        out = net.generator(net(src, ys, torch.ones(1, 1, src.size(1)).bool(), see))
    return out[0].gather(1, torch.tensor(tokens).unsqueeze(1)).sum().item()


def narrowest(
    net: EncoderDecoder, source: list[int], beam: int, alpha: float, limit: int, n_best: int
) -> float:
    """How near a search came to another result, by whole prefixes, without an early stop.

    That is the smallest difference between a candidate that was kept and the best that was not, at
    any step, and between neighbours among the best scores at the end: if no sum is wrong by half
    of it, each of these decisions is the same.
    """
    src, gaps, done = torch.tensor([[*source, EOS]]), [math.inf], []
    hypotheses = [([], 0.0)]
    for length in range(1, limit + 1):
        ys = torch.tensor([[BOS, *tokens] for tokens, _ in hypotheses])
        see = torch.ones(1, length, length).tril().bool()
        with torch.no_grad():
            out = net(src.expand(len(ys), -1), ys, torch.ones(1, 1, src.size(1)).bool(), see)
            following = net.generator(out[:, -1]).tolist()
        candidates = [
            ([*tokens, t], sum_so_far + p)
            for (tokens, sum_so_far), row in zip(hypotheses, following, strict=True)
            for t, p in enumerate(row)
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        places = beam - len(done)
        gaps += [candidates[places - 1][1] - p for _, p in candidates[places : places + 1]]
        over = [tokens[-1] == EOS or length == limit for tokens, _ in candidates[:places]]
        kept = list(zip(candidates[:places], over, strict=True))
        done += [score(*candidate, alpha) for candidate, ended in kept if ended]
        hypotheses = [candidate for candidate, ended in kept if not ended]
        if not hypotheses:
            break
    scores = sorted(done, reverse=True)[: n_best + 1]
    return min(gaps + [a - b for a, b in itertools.pairwise(scores)])


TOLERANCE = 1e-4  # of a sum of logarithms in float32
DECIDED = 1e-3  # a difference that such errors do not turn round


@st.composite
def searches(draw: st.DrawFn) -> tuple[EncoderDecoder, list[list[int]], dict[str, object]]:
    """A model in float32, sentences for it, and how to search."""
    heads = draw(st.integers(1, 3))
    net = model(
        draw(seeds),
        draw(st.floats(-1, 3)),
        draw(st.one_of(st.integers(VOCAB, 20), st.integers(CHUNK - 1, 3 * CHUNK + 1))),
        N=draw(st.integers(1, 2)),
        d_model=heads * 2 * draw(st.integers(2, 5)),
        d_ff=draw(st.integers(3, 40)),
        h=heads,
        norm=draw(st.sampled_from(["post", "pre"])),
    )
    net.generator.proj.bias.detach()[PAD] = -1e4  # would be stripped from the outputs
    beam = draw(st.integers(1, 5))
    options = {"beam": beam, "alpha": draw(alphas), "extra": draw(st.integers(1, 12))}
    return net.float(), draw(sentences), {**options, "n_best": draw(st.integers(1, beam))}


@settings(max_examples=40)
@given(searches())
def test_fast_steps_alone_and_in_a_batch_find_what_double_precision_does(search):
    """Where float32 cannot turn a decision round; and always, what is found has its true score."""
    net, sources, options = search
    if not can_pack(net):
        pytest.skip("this PyTorch has no oneDNN")
    double = copy.deepcopy(net).double()
    together = beam_search(net, sources, **options)
    for source, found in zip(sources, together, strict=True):
        beam, alpha, n_best = options["beam"], options["alpha"], options["n_best"]
        limit = len(source) + options["extra"]
        gap = narrowest(double, source, beam, alpha, limit, n_best)
        (expected,) = beam_search(double, [source], **options)
        (alone,) = beam_search(net, [source], **options)
        for hypotheses in (found, alone):
            for h in hypotheses:
                tokens = h.tokens if len(h.tokens) == limit else [*h.tokens, EOS]
                truth = log_probability(double, source, tokens)
                true = Hypothesis(h.tokens, score(tokens, truth, alpha), truth)
                assert_same([h], [true], TOLERANCE)
            if gap > DECIDED:
                assert_same(hypotheses, expected, TOLERANCE)


def test_most_of_these_searches_are_decided():
    """So that the test above compares outputs, and not only scores."""
    decided = [
        narrowest(model(seed, 1.0, size), source, 4, 0.6, 10, 2) > DECIDED
        for seed in range(12)
        for size in (VOCAB, 150)
        for source in ([4, 5, 6], [7])
    ]
    assert sum(decided) > 0.75 * len(decided)


def test_draws_are_decided_by_order():
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


@settings(max_examples=60)
@given(
    seeds,
    st.integers(1, 3),
    st.integers(1, 6),
    st.one_of(st.integers(1, 9), st.integers(CHUNK - 2, 5 * CHUNK)),
    st.sampled_from(["draws", "distinct"]),
    st.booleans(),
)
def test_best_continuations_are_those_of_a_full_sort(seed, rows, beam, size, kind, start):
    torch.manual_seed(seed)
    if kind == "draws":
        logits = torch.randint(0, 5, (rows, beam, size)).float()
    else:
        logits = 8 * torch.randn(rows, beam, size)
    before = -torch.randint(0, 4, (rows, beam)).double()
    if start:
        before[:, 1:] = -torch.inf
    totals = logits.double().logsumexp(-1) if kind == "distinct" else logits.logsumexp(-1)
    expected = (before.unsqueeze(2) + (logits - totals.unsqueeze(2)).double()).flatten(1)
    exact = (before.unsqueeze(2) - logits.logsumexp(-1).unsqueeze(2) + logits.double()).flatten(1)
    values, hypotheses, tokens = best_continuations(logits, before)
    assert values.shape == hypotheses.shape == tokens.shape == (rows, beam)
    assert tokens.ge(0).all()
    assert tokens.lt(size).all()
    order = exact.sort(dim=-1, descending=True, stable=True)
    real = order.values[:, :beam] > -torch.inf
    places = hypotheses * size + tokens
    assert torch.equal(places[real], order.indices[:, :beam][real])
    assert torch.allclose(values[real], expected.gather(1, places)[real], atol=1e-4)
    assert (values[~real] == -torch.inf).all()


@settings(max_examples=30)
@given(seeds, st.integers(1, 4 * CHUNK))
def test_chunk_maxima(seed, size):
    logits = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed))
    expected = torch.stack([chunk.amax(-1) for chunk in logits.split(CHUNK, -1)], -1)
    assert torch.equal(chunk_maxima(logits), expected)


@settings(max_examples=30)
@given(seeds, st.integers(1, 300), st.sampled_from([0.01, 1.0, 30.0]))
def test_log_total_is_logsumexp(seed, size, scale):
    logits = scale * torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed))
    found = log_total(logits, logits.amax(-1))
    assert torch.allclose(found.double(), logits.double().logsumexp(-1), rtol=1e-6, atol=1e-5)
    assert (found >= logits.amax(-1)).all()  # so that no log-probability is above zero


def test_length_penalty():
    assert length_penalty(1, 0.6) == 1
    assert length_penalty(7, 1.0) == 2
    assert length_penalty(300, 0.0) == 1
    assert math.isclose(length_penalty(19, 0.5), 2)
    lengths = [length_penalty(n, 0.3) for n in range(1, 400)]
    assert lengths == sorted(lengths)


def test_limits_follow_each_source():
    net = model(ends=-1e4, max_len=400)
    found = beam_search(net, [[], [4] * 7], beam=2)
    assert [len(h.tokens) for (h,) in found] == [50 - pads(found[0][0]), 57 - pads(found[1][0])]
    (found,) = beam_search(net, [[4] * 7], beam=8, alpha=0.3, extra=300, max_len=400)
    assert len(found[0].tokens) == 307 - pads(found[0])
    short = model(ends=-1e4, max_len=12)
    assert len(beam_search(short, [[4]], beam=2)[0][0].tokens) <= 12


def pads(h: Hypothesis) -> int:
    """How many paddings were generated, and stripped: the score tells the length."""
    ratio = h.log_probability / h.score  # ((5 + length) / 6) ** alpha
    alphas = {0.6, 0.3}
    lengths = {round(6 * ratio ** (1 / alpha) - 5, 6) for alpha in alphas}
    (length,) = {round(n) for n in lengths if n in (50, 57, 307)}
    return length - len(h.tokens)


def test_finished_sentences_leave_the_batch():
    net, rows = model(3, 1.0), []
    net.decoder.register_forward_hook(lambda _, args, out: rows.append(len(out)))
    beam_search(net, [[4] * n for n in (0, 1, 2, 3)], beam=3, extra=2)
    assert rows[0] == 12
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 12


def test_edges():
    net = model()
    assert beam_search(net, []) == []
    assert len(beam_search(net, [[], [4]])) == 2
    assert beam_search(net, [[4, 5]], max_len=0) == [[Hypothesis([], 0.0, 0.0)]]
    assert beam_search(net, [[4]], extra=-5, n_best=4) == [[Hypothesis([], 0.0, 0.0)]]
    (found,) = beam_search(net, [[4]], beam=40, n_best=40, max_len=1)
    assert len(found) == VOCAB  # a beam larger than the vocabulary: every output of one token
    with pytest.raises(IndexError, match="81 tokens is longer than the model's 80 positions"):
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
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        beam_search(model(), [[4]], **options)
    with pytest.raises(ValueError, match=message):
        beam_search(model(), [], **options)  # also where there is nothing to do
    check_search(1, 0.0)
    check_search(1, 10)


def test_a_model_that_gives_no_numbers():
    net = model()
    net.generator.proj.bias.detach().fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not numbers"):
        beam_search(net, [[4]])


def test_nothing_is_changed():
    net = model()
    weights = copy.deepcopy(net.state_dict())
    net.train()
    beam_search(net, [[4]], max_len=5)
    assert net.training
    assert all(
        torch.equal(a, b) for a, b in zip(weights.values(), net.state_dict().values(), strict=True)
    )
