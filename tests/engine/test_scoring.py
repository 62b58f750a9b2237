"""Scores of given pairs: token by token those of the readable layer, and those of the search."""

from dataclasses import replace

import pytest
import torch

from annotated_transformer.background.convolutional import ConvolutionConfig
from annotated_transformer.background.seq2seq import RecurrentConfig
from annotated_transformer.data.files import CorpusError
from annotated_transformer.engine.scoring import score_pairs, score_tokens
from annotated_transformer.engine.system import join_systems
from annotated_transformer.fast.search import beam_search
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.notation import BOS, EOS
from annotated_transformer.translation.beam_search import length_penalty
from tests.engine.opinions import system_of

SOURCES, TARGETS = ["a b", "c", "e d e a"], ["b", "a c d", "e"]


def one_by_one(net: EncoderDecoder, source: list[int], target: list[int]) -> list[float]:
    """The oracle: log_softmax after each prefix, in the readable layer, without a batch."""
    src, found = torch.tensor([[*source, EOS]]), []
    mask = torch.ones(1, 1, src.size(1)).bool()
    for i, token in enumerate([*target, EOS]):
        ys = torch.tensor([[BOS, *target[:i]]])
        see = torch.ones(1, i + 1, i + 1).tril().bool()
        with torch.no_grad():
            out = net.generator(net(src, ys, mask, see))
        found.append(float(out[0, -1, token]))
    return found


def test_scores_are_those_of_the_readable_layer() -> None:
    system = system_of(2, N=2)
    encode = system.tokenizers[0].encode
    for max_tokens in (1, 4096):
        found = score_pairs(system, SOURCES, TARGETS, max_tokens=max_tokens)
        for each, source, target in zip(found, SOURCES, TARGETS, strict=True):
            oracle = one_by_one(system.model, encode(source), encode(target))
            assert each.log_probabilities == pytest.approx(oracle)
            assert each.total == pytest.approx(sum(oracle))
            assert each.per_token == pytest.approx(sum(oracle) / len(oracle))
            assert each.tokens == [*target.split(), "</s>"]


@pytest.mark.parametrize(
    "config",
    [
        RecurrentConfig("additive", width=6, hidden=6, dropout=0, max_len=40),
        ConvolutionConfig(width=8, max_len=40),
    ],
)
def test_older_architectures_are_scored_too(config: RecurrentConfig | ConvolutionConfig) -> None:
    torch.manual_seed(1)
    model = config.build(9, 9).double().eval()
    system = replace(system_of(), model=model, config=config)
    encode = system.tokenizers[0].encode
    for each, source, target in zip(
        score_pairs(system, SOURCES, TARGETS), SOURCES, TARGETS, strict=True
    ):
        oracle = one_by_one(model, encode(source), encode(target))
        assert each.log_probabilities == pytest.approx(oracle)


def test_the_search_reports_the_same() -> None:
    system, both = system_of(4, ends=1.0), join_systems([system_of(4, ends=1.0), system_of(6)])
    sources = [system.tokenizers[0].encode(line) for line in SOURCES]
    for model in (system.model, both.model):
        found = beam_search(model, sources, beam=4, n_best=4, max_len=9)
        for source, hypotheses in zip(sources, found, strict=True):
            whole = [each for each in hypotheses if len(each.tokens) < 9]  # not cut
            scores = score_tokens(model, [source] * len(whole), [each.tokens for each in whole])
            for each, values in zip(whole, scores, strict=True):
                assert sum(values) == pytest.approx(each.log_probability)
                penalty = length_penalty(len(each.tokens) + 1, 0.6)
                assert sum(values) / penalty == pytest.approx(each.score)


def test_the_scores_of_an_ensemble_are_the_mean_by_hand() -> None:
    systems = [system_of(seed) for seed in (1, 2)]
    encode = systems[0].tokenizers[0].encode
    for each, source, target in zip(
        score_pairs(join_systems(systems), SOURCES, TARGETS), SOURCES, TARGETS, strict=True
    ):
        alone = [one_by_one(one.model, encode(source), encode(target)) for one in systems]
        mean = torch.tensor(alone).double().exp().mean(0).log()
        assert each.log_probabilities == pytest.approx(mean.tolist())


def test_a_model_that_is_being_trained_is_scored_without_dropout() -> None:
    system = system_of(2)
    wanted = score_pairs(system, SOURCES, TARGETS)
    system.model.train()
    assert score_pairs(system, SOURCES, TARGETS) == wanted
    assert all(module.training for module in system.model.modules())


def test_what_cannot_be_scored_is_named() -> None:
    system = system_of()
    for source, target, words in (
        ("", "a", "text, line 2: the source is blank"),
        ("a", " ", "text, line 2: the target is blank"),
        ("a", "b\n", "text, line 2: the target holds a line break; strip or split it"),
        ("a", "b " * 12, "text, line 2: the target has 12 tokens, but 11 fit the model"),
    ):
        with pytest.raises(CorpusError, match=words):
            score_pairs(system, ["a", source], ["b", target], name="text")
    with pytest.raises(ValueError, match="input: 1 sources, but 0 targets"):
        score_pairs(system, ["a"], [])
    for sides in (("a", ["b"]), (["a"], "b")):
        with pytest.raises(TypeError, match="two lists of strings, not a string"):
            score_pairs(system, *sides)
    assert score_pairs(system, [], []) == []
