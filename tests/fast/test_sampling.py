"""Sampling draws with the probabilities that the options say, from the tokens that they leave."""

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from annotated_transformer.fast.sampling import Sampler, Sampling, sample
from annotated_transformer.fast.search import greedy_search
from annotated_transformer.notation import BOS, PAD
from annotated_transformer.training.batches import make_batch
from annotated_transformer.translation.greedy import Steps
from tests.translation.small import opinionated

numbers = st.lists(st.floats(-9, 9), min_size=1, max_size=9)


def by_hand(values: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The oracle: go down from the most probable token, and stop where the options say."""
    powers = [math.exp((value - max(values)) / temperature) for value in values]
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    order = order[: top_k or len(order)]
    total = sum(powers[token] for token in order)
    kept: dict[int, float] = {}
    for token in order:
        if kept and sum(kept.values()) >= top_p:
            break
        kept[token] = powers[token] / total
    return {token: share / sum(kept.values()) for token, share in kept.items()}


@given(numbers, st.floats(0.1, 3), st.integers(0, 10), st.floats(0.05, 0.99))
def test_probabilities_are_those_by_hand(
    values: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    shares, tokens = sampling.probabilities(torch.tensor(values, dtype=torch.float64))
    pairs = zip(tokens.tolist(), shares.tolist(), strict=True)
    found = {token: share for token, share in pairs if share > 0}
    wanted = {t: share for t, share in by_hand(values, temperature, top_k, top_p).items() if share}
    if sum(by_hand(values, temperature, top_k, 1).values()) and found.keys() != wanted.keys():
        edges = torch.tensor(list(by_hand(values, temperature, top_k, 2).values())).cumsum(0)
        assert (edges - top_p).abs().min() < 1e-9  # on the edge, rounding decides
    else:
        assert found == pytest.approx(wanted)


class Fixed(Steps):
    """Steps that always give the same logits."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.logits.expand(len(tokens), -1)

    def select(self, sentences: Tensor) -> None:
        """Nothing depends on the sentence."""

    def follow(self, parents: Tensor) -> None:
        """Nothing depends on the hypothesis."""


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.5), Sampling(2.0, top_k=4), Sampling(top_p=0.8)]
)
def test_frequencies_are_those_of_the_softmax(sampling: Sampling) -> None:
    """Chi-square with a fixed seed; its 0.999 quantiles for up to six degrees of freedom."""
    logits, count = torch.tensor([[0.3, -1.0, 1.2, 0.0, 2.0, -0.4, 0.9]]), 20_000
    sampler = Sampler(Fixed(logits), [random.Random(f"1 {i}") for i in range(count)], sampling)
    batch = logits.expand(count, 1, -1)
    gained, parents, tokens = sampler.choose(batch, torch.zeros(count, 1).double())
    assert not parents.any()
    wanted = by_hand(logits[0].tolist(), sampling.temperature, sampling.top_k, sampling.top_p)
    drawn = Counter(tokens.flatten().tolist())
    assert set(drawn) == set(wanted)
    statistic = sum((drawn[t] - count * p) ** 2 / (count * p) for t, p in wanted.items())
    assert statistic < [0.0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46][len(wanted) - 1]
    own = logits[0].double().softmax(-1).log()[tokens.flatten()]  # before the options
    assert torch.allclose(gained.flatten(), own)


def test_outputs_that_are_nan_are_told() -> None:
    net, (src, _) = opinionated(0), ([[4, 5]], None)
    with torch.no_grad():
        net.generator.get_parameter("proj.bias")[5] = math.nan
    with pytest.raises(FloatingPointError, match="outputs are NaN"):
        sample(net, src, Sampling(), max_len=5)


def test_a_small_temperature_is_greedy() -> None:
    sources = [[4, 5, 6], [7], [8, 8, 4, 5], [10]]
    for seed in range(4):
        net = opinionated(seed)
        with torch.no_grad():  # sampling never begins anew
            net.generator.get_parameter("proj.bias")[BOS] = -99.0
        wanted = greedy_search(net, sources, 20)
        for sampling in (Sampling(1e-6), Sampling(top_k=1), Sampling(top_p=1e-9)):
            found = sample(net, sources, sampling, max_len=20)
            assert [each.tokens for each in found] == wanted
        assert [each.tokens for each in sample(net, sources, Sampling(5.0), max_len=20)] != wanted


def test_what_is_drawn_has_its_own_probability() -> None:
    """Padding and the begin symbol would be left out of the text, and count all the same."""
    net, sources = opinionated(3), [[4, 5, 6], [7], [8, 8, 4, 5], [10]] * 25
    found = sample(net, sources, Sampling(9.0), max_len=6)
    assert all({PAD, BOS}.isdisjoint(each.tokens) for each in found)
    targets = [each.tokens for each in found]
    for source, tokens, each in zip(sources, targets, found, strict=True):
        batch = make_batch([source], [tokens])
        with torch.no_grad():
            read = net(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
            log_probs = net.generator(read)[0].gather(1, batch.tgt_y[0, :, None])
        length = len(tokens) + (len(tokens) < 6)  # the end symbol, where there was room for it
        assert abs(float(log_probs[:length].sum()) - each.log_probability) < 1e-4


@pytest.mark.parametrize("top_k", [5, 6, 2**63, 10**20])
def test_more_than_all_tokens_are_all(top_k: int) -> None:
    logits = torch.tensor([1.0, 5.0, 2.0, 4.0, 3.0])
    found, wanted = (each.probabilities(logits) for each in (Sampling(top_k=top_k), Sampling()))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_range_draw_what_may_be_drawn(number: float) -> None:
    """Sums are rounded, so the last may be below 1 or above."""

    class Same(random.Random):
        def random(self) -> float:
            return number

    logits = torch.tensor([[[1.0, 5.0, 4.0, 3.0, 2.0]]])
    for sampling, ends in ((Sampling(), (0, 4)), (Sampling(top_k=3), (1, 3))):
        sampler = Sampler(Fixed(logits[0]), [Same()], sampling)
        assert int(sampler.choose(logits, torch.zeros(1, 1).double())[2]) == ends[number == 0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(2.0), Sampling(0.5, top_p=0.9)])
def test_rounding_changes_no_draw(sampling: Sampling) -> None:
    """Label smoothing leaves many tokens equally probable, but for what a batch's shape rounds."""
    generator, draws = torch.Generator().manual_seed(0), []
    logits = torch.cat([torch.tensor([4.0, 3.0, 3.5]), torch.zeros(400)])
    for _ in range(2):
        noise = 1e-6 * torch.randn(500, 1, len(logits), generator=generator)
        rngs = [random.Random(f"1 {i}") for i in range(len(noise))]
        sampler = Sampler(Fixed(logits[None]), rngs, sampling)
        draws.append(sampler.choose(logits + noise, torch.zeros(len(noise), 1).double())[2])
    assert torch.equal(*draws)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": 0.0}, "temperature 0.0: must be above 0 and finite"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"top_k": -1}, "top_k -1: must be at least 1, or 0 for all"),
        ({"top_p": 0.0}, "top_p 0.0: must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"top_p": math.nan}, "top_p nan"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampling(**values)  # type: ignore[arg-type]
