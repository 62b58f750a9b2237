"""Tests of search by the fast layer: the same outputs, and the best of many logits in chunks."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotated_transformer.fast import linear
from annotated_transformer.fast.decoding import CachedSteps, start_steps
from annotated_transformer.fast.linear import CHUNK, OnednnLinear, chunk_maxima
from annotated_transformer.fast.search import beam_search, best_continuations, log_total
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.notation import BOS, EOS, PAD
from annotated_transformer.translation import beam_search as readable
from annotated_transformer.translation.beam_search import Hypothesis
from annotated_transformer.translation.greedy import Steps
from tests.translation.test_beam_search import VOCAB, alphas, assert_same, model, score

sentences = st.lists(st.lists(st.integers(4, VOCAB - 1), max_size=5), min_size=1, max_size=5)
seeds = st.integers(0, 10**6)
needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this PyTorch has no oneDNN",
)


@needs_onednn
def test_float32_finds_what_float64_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SMALL", 0)
    sources, kinds = [[4, 5, 6], [7], [], [8, 8, 4, 5, 6]], []

    def start(*arguments: Any) -> Steps:
        kinds.append(start_steps(*arguments))
        return kinds[-1]

    for seed in range(8):
        net = model(seed, 1.0, size=200, N=2)
        slow = readable.beam_search(net, sources, beam=3, extra=20, n_best=3)
        fast = beam_search(net.float(), sources, beam=3, extra=20, n_best=3, start=start)
        assert isinstance(kinds[-1], CachedSteps)
        assert isinstance(kinds[-1].decoder.generator, OnednnLinear)
        for a, b in zip(fast, slow, strict=True):
            assert_same(a, b, tolerance=1e-4)


def log_probability(net: EncoderDecoder, source: list[int], tokens: list[int]) -> float:
    """The log-probability of an output, its end symbol included, in one pass."""
    src, ys = torch.tensor([[*source, EOS]]), torch.tensor([[BOS, *tokens[:-1]]])
    see = torch.ones(1, len(tokens), len(tokens)).tril().bool()
    with torch.no_grad():
        out = net.generator(net(src, ys, torch.ones(1, 1, src.size(1)).bool(), see))
    return float(out[0].gather(1, torch.tensor(tokens).unsqueeze(1)).sum())


def narrowest(
    net: EncoderDecoder, source: list[int], beam: int, alpha: float, limit: int, n_best: int
) -> float:
    """How near a search came to another result, by whole prefixes, without an early stop.

    That is the smallest difference between a candidate that was kept and the best that was not, at
    any step, and between neighbours among the best scores at the end: if no sum is wrong by half
    of it, each of these decisions is the same.
    """
    src, gaps = torch.tensor([[*source, EOS]]), [math.inf]
    done: list[float] = []
    hypotheses: list[tuple[list[int], float]] = [([], 0.0)]
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
def searches(draw: st.DrawFn) -> tuple[EncoderDecoder, list[list[int]], dict[str, Any]]:
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
    net.get_parameter("generator.proj.bias").detach()[
        PAD
    ] = -1e4  # would be stripped from the outputs
    beam = draw(st.integers(1, 5))
    options = {"beam": beam, "alpha": draw(alphas), "extra": draw(st.integers(1, 12))}
    return net.float(), draw(sentences), {**options, "n_best": draw(st.integers(1, beam))}


@settings(max_examples=40)
@given(searches())
def test_float32_alone_and_in_a_batch_finds_what_float64_does(
    search: tuple[EncoderDecoder, list[list[int]], dict[str, Any]],
) -> None:
    """Where float32 cannot turn a decision round; and always, what is found has its true score."""
    net, sources, options = search
    double = copy.deepcopy(net).double()
    together = beam_search(net, sources, **options)
    for source, found in zip(sources, together, strict=True):
        beam, alpha, n_best = options["beam"], options["alpha"], options["n_best"]
        limit = len(source) + options["extra"]
        gap = narrowest(double, source, beam, alpha, limit, n_best)
        (expected,) = readable.beam_search(double, [source], **options)
        (alone,) = beam_search(net, [source], **options)
        for hypotheses in (found, alone):
            for h in hypotheses:
                tokens = h.tokens if len(h.tokens) == limit else [*h.tokens, EOS]
                truth = log_probability(double, source, tokens)
                true = Hypothesis(h.tokens, score(tokens, truth, alpha), truth)
                assert_same([h], [true], TOLERANCE)
            if gap > DECIDED:
                assert_same(hypotheses, expected, TOLERANCE)


def test_most_of_these_searches_are_decided() -> None:
    """So that the test above compares outputs, and not only scores."""
    decided = [
        narrowest(model(seed, 1.0, size), source, 4, 0.6, 10, 2) > DECIDED
        for seed in range(12)
        for size in (VOCAB, 150)
        for source in ([4, 5, 6], [7])
    ]
    assert sum(decided) > 0.75 * len(decided)


@pytest.mark.parametrize("find", [best_continuations, readable.best_continuations])
@settings(max_examples=60)
@given(
    seeds,
    st.integers(1, 3),
    st.integers(1, 6),
    st.one_of(st.integers(1, 9), st.integers(CHUNK - 2, 5 * CHUNK)),
    st.sampled_from(["draws", "distinct"]),
    st.booleans(),
)
@example(930_327, 1, 2, 5, "draws", False)  # rounding decides between the two hypotheses
@example(519, 1, 2, 5, "draws", False)
def test_best_continuations_are_those_of_a_full_sort(
    find: Callable[..., tuple[Tensor, Tensor, Tensor]],
    seed: int,
    rows: int,
    beam: int,
    size: int,
    kind: str,
    start: bool,
) -> None:
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
    # Draws between hypotheses are decided by how float32 rounds the totals, so they are taken here
    # as each of the two functions takes them; that they are right is what ``expected`` is for.
    if find is best_continuations:
        base = before - log_total(logits, logits.amax(-1))
        exact = base.unsqueeze(2) + logits.double()
    else:
        exact = before.unsqueeze(2) + logits.log_softmax(-1)
    exact = exact.flatten(1)
    values, hypotheses, tokens = find(logits, before)
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
def test_chunk_maxima(seed: int, size: int) -> None:
    logits = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed))
    expected = torch.stack([chunk.amax(-1) for chunk in logits.split(CHUNK, -1)], -1)
    assert torch.equal(chunk_maxima(logits), expected)


@settings(max_examples=30)
@given(seeds, st.integers(1, 300), st.sampled_from([0.01, 1.0, 30.0]))
def test_log_total_is_logsumexp(seed: int, size: int, scale: float) -> None:
    logits = scale * torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed))
    found = log_total(logits, logits.amax(-1))
    assert torch.allclose(found.double(), logits.double().logsumexp(-1), rtol=1e-6, atol=1e-5)
    assert (found >= logits.amax(-1)).all()  # so that no log-probability is above zero
