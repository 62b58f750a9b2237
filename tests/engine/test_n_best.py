"""Several translations with scores, ensembles, and samples, on text."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from annotated_transformer.data.files import CorpusError
from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.system import join_systems, n_best_lines, translate_lines
from annotated_transformer.fast.ensemble import Ensemble
from annotated_transformer.fast.sampling import Sampling
from annotated_transformer.notation import BOS, EOS, PAD
from annotated_transformer.translation.tokenizers import WordTokenizer
from tests.engine.opinions import WORDS, system_of
from tests.translation.test_beam_search import every_output, score

LINES = ["a b", "", "c", "e d", "a a a"]


def test_n_best_is_what_brute_force_finds() -> None:
    """A beam as large as the number of outputs misses none: all 585 of at most three tokens."""
    system = system_of(3, max_len=4)
    for alpha in (0.0, 0.6):
        found = n_best_lines(system, LINES, n_best=7, beam=585, alpha=alpha)
        assert found[1] == []
        for line, translations in zip(LINES, found, strict=True):
            if not line:
                continue
            source = system.tokenizers[0].encode(line)
            oracle = sorted(
                ((score(tokens, value, alpha), value) for tokens, value in every_output(
                    system.model, source, 3)), reverse=True,
            )  # fmt: skip
            scores = [(each.score, each.log_probability) for each in translations]
            assert torch.tensor(scores) == pytest.approx(torch.tensor(oracle[:7]))
            texts = [" ".join(system.tokenizers[1].decode(t.tokens).split()) for t in translations]
            assert [each.text for each in translations] == texts


def test_the_first_of_n_best_is_the_translation() -> None:
    system = system_of(1)
    for beam in (1, 4):
        several = n_best_lines(system, LINES, n_best=beam, beam=beam)
        first = [some[0].text if some else "" for some in several]
        assert first == translate_lines(system, LINES, beam=beam)
        for some in several:
            scores = [each.score for each in some]
            assert scores == sorted(scores, reverse=True)


def test_n_best_refuses_what_cannot_be() -> None:
    system = system_of()
    for options, words in (
        ({"n_best": 5, "beam": 4}, "n_best 5: must be from 1 to the beam, 4"),
        ({"n_best": 0}, "n_best 0: must be from 1 to the beam"),
        ({"n_best": 0, "sampling": Sampling()}, "n_best 0: must be from 1 to the beam"),
    ):
        with pytest.raises(ValueError, match=words):
            n_best_lines(system, LINES, **options)
    with pytest.raises(CorpusError, match="input, line 9: 20 tokens, more than the 11 that fit"):
        n_best_lines(system, ["a", "b " * 20], first=8)


def test_an_ensemble_of_a_system_with_itself_is_the_system() -> None:
    system = system_of(5)
    both = join_systems([system, system])
    assert translate_lines(both, LINES) == translate_lines(system, LINES)
    for one, two in zip(
        n_best_lines(both, LINES, n_best=4), n_best_lines(system, LINES, n_best=4), strict=True
    ):
        assert [each.tokens for each in one] == [each.tokens for each in two]
        assert [each.score for each in one] == pytest.approx([each.score for each in two])


def test_an_ensemble_needs_one_vocabulary() -> None:
    system, other = system_of(0), system_of(1)
    words = WordTokenizer("en", [(word, False) for word in reversed(WORDS)])
    with pytest.raises(UsageError, match="b: has a vocabulary other than a; an ensemble needs"):
        join_systems([system, replace(other, tokenizers=(words, words))], ["a", "b"])
    with pytest.raises(UsageError, match="system 2: has languages other than system 1"):
        join_systems([system, replace(other, languages=("en", "de"))])
    with pytest.raises(UsageError, match="no systems; give at least one"):
        join_systems([])


def test_an_ensemble_is_as_short_as_its_shortest_system() -> None:
    both = join_systems([system_of(0), system_of(1, max_len=6)])
    assert both.config.max_len == 6
    assert isinstance(both.model, Ensemble)
    with pytest.raises(CorpusError, match="more than the 5 that fit"):
        translate_lines(both, ["a " * 6])


def test_samples_do_not_depend_on_the_batch() -> None:
    system, sampling = system_of(2), Sampling(seed=4)
    whole = n_best_lines(system, LINES, n_best=3, sampling=sampling)
    apart = [
        n_best_lines(system, [line], n_best=3, sampling=sampling, first=number)[0]
        for number, line in enumerate(LINES, 1)
    ]
    tiny = n_best_lines(system, LINES, n_best=3, sampling=sampling, max_tokens=1)
    for other in (apart, tiny):
        for some, same in zip(whole, other, strict=True):
            assert [each.tokens for each in some] == [each.tokens for each in same]
    again = n_best_lines(system, LINES, n_best=3, sampling=Sampling(seed=5))
    assert [[e.tokens for e in some] for some in again] != [[e.tokens for e in x] for x in whole]


def test_samples_of_whole_outputs_have_the_frequencies_of_their_probabilities() -> None:
    """Chi-square over whole outputs: 1,500 samples, the probability of each by brute force."""
    system, count = system_of(3, max_len=3), 1500
    with torch.no_grad():  # neither is ever drawn
        system.model.generator.get_parameter("proj.bias")[[PAD, BOS]] = -99.0
    (found,) = n_best_lines(system, ["a b"], n_best=count, sampling=Sampling(seed=1))
    source = system.tokenizers[0].encode("a b")
    drawn = Counter(tuple(each.tokens) for each in found)
    statistic, rest, cells = 0.0, [0.0, 0.0], 0
    shares: dict[tuple[int, ...], float] = {}
    for tokens, value in every_output(system.model, source, 2):
        plain = tuple(t for t in tokens if t not in (PAD, EOS))
        shares[plain] = shares.get(plain, 0) + math.exp(value)
    assert sum(shares.values()) == pytest.approx(1)
    assert drawn.keys() <= shares.keys()
    for output, share in shares.items():
        if share * count < 5:
            rest = [rest[0] + drawn[output], rest[1] + share * count]
        else:
            statistic += (drawn[output] - share * count) ** 2 / (share * count)
            cells += 1
    statistic += (rest[0] - rest[1]) ** 2 / rest[1]
    # With k degrees of freedom: mean k, variance 2k; four standard deviations above.
    assert statistic < cells + 4 * math.sqrt(2 * cells)
    assert cells > 8
    for each in found[:50]:
        assert each.score == each.log_probability
