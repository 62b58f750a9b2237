"""An ensemble decodes with the mean of its models' probabilities, with the same searches."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch

from annotated_transformer.background.seq2seq import RecurrentConfig
from annotated_transformer.fast.decoding import CachedSteps, start_steps
from annotated_transformer.fast.ensemble import Ensemble, EnsembleSteps
from annotated_transformer.fast.search import beam_search, greedy_search
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.notation import EOS
from annotated_transformer.translation import beam_search as readable
from tests.translation.small import opinionated
from tests.translation.test_beam_search import every_output, score

SOURCES = [[4, 5, 6], [7], [8, 8, 4, 5]]


def by_mean(
    nets: Sequence[EncoderDecoder], source: list[int], tokens: Sequence[int]
) -> torch.Tensor:
    """The oracle: the mean of the readable models' probabilities after a prefix ``(vocab,)``."""
    src, ys = torch.tensor([[*source, EOS]]), torch.tensor([tokens])
    see = torch.ones(1, len(tokens), len(tokens)).tril().bool()
    mask = torch.ones(1, 1, src.size(1)).bool()
    with torch.no_grad():
        found = [net.generator(net(src, ys, mask, see)[:, -1]).exp()[0] for net in nets]
    return torch.stack(found).mean(0)


def test_greedy_takes_the_best_of_the_mean_by_hand() -> None:
    nets = [opinionated(seed) for seed in (1, 2, 3)]
    found = greedy_search(Ensemble(nets), SOURCES, 9)
    alone = [greedy_search(net, SOURCES, 9) for net in nets]
    assert found not in alone
    for source, tokens in zip(SOURCES, found, strict=True):
        prefix = [1]  # BOS
        for token in [*tokens, EOS][:9]:
            assert int(by_mean(nets, source, prefix).argmax()) == token
            prefix.append(token)


def test_the_scores_of_a_beam_are_the_logarithms_of_the_mean() -> None:
    nets = [opinionated(seed, size=40) for seed in (1, 2)]
    for source, found in zip(
        SOURCES, beam_search(Ensemble(nets), SOURCES, beam=6, n_best=6, max_len=8), strict=True
    ):
        for each in found:
            tokens = [*each.tokens, EOS][:8]  # without its end where it was cut
            total = sum(
                float(by_mean(nets, source, [1, *tokens[:i]])[token].log())
                for i, token in enumerate(tokens)
            )
            assert each.log_probability == pytest.approx(total)
            assert each.score == pytest.approx(score(tokens, total, 0.6))


def test_of_itself_it_is_the_model_to_brute_force() -> None:
    net = opinionated(4)
    both = Ensemble([net, copy.deepcopy(net)])
    (found,) = beam_search(both, [[4, 5]], beam=200, alpha=0, n_best=5, max_len=2)
    oracle = sorted((value for _, value in every_output(net, [4, 5], 2)), reverse=True)
    assert [each.score for each in found] == pytest.approx(oracle[:5])


def test_its_models_keep_their_caches_and_may_be_of_any_kind() -> None:
    torch.manual_seed(0)
    net = opinionated(1)
    recurrent = RecurrentConfig("dot", width=6, hidden=6, max_len=80).build(11, 11).double().eval()
    mixed = Ensemble([net, recurrent])
    src = torch.tensor([[4, 5, EOS]])
    steps = start_steps(mixed, src, torch.ones(1, 1, 3).bool(), 2)
    assert isinstance(steps, EnsembleSteps)
    assert isinstance(steps.parts[0], CachedSteps)
    searches: list[Callable[..., object]] = [beam_search, readable.beam_search]
    fast, slow = (search(mixed, SOURCES, beam=3, max_len=9) for search in searches)
    assert [f[0].tokens for f in fast] == [s[0].tokens for s in slow]  # type: ignore[attr-defined]
