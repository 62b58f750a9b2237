"""BLEU and its protocols are those of the libraries; differences are resampled as by sacreBLEU."""

import random
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest, Result
from sacremoses import MosesTokenizer

from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.translation.evaluation import (
    ScoreError,
    bleu_counts,
    bleu_of_counts,
    by_length,
    moses_tokenize,
    paired_bootstrap,
    score,
    score_protocols,
    split_compounds,
)


@cache
def references() -> list[str]:
    """Return 200 English sentences."""
    return [pair.text("en") for pair in grammar_pairs("test", 200)]


def spoiled(seed: int, errors: float) -> list[str]:
    """Drop words from the references."""
    chance = random.Random(seed)
    return [" ".join(w for w in r.split() if chance.random() > errors) for r in references()]


SENTENCES = st.lists(st.sampled_from("abc"), max_size=8).map(" ".join)


@settings(max_examples=200)
@given(pairs=st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1, max_size=4))
def test_bleu_is_that_of_sacrebleu(pairs: list[tuple[str, str]]) -> None:
    counts = np.array([bleu_counts(h.split(), r.split()) for h, r in pairs]).sum(axis=0)
    hypotheses, references = map(list, zip(*pairs, strict=True))
    library = BLEU(tokenize="none").corpus_score(hypotheses, [references])
    assert [*library.counts, *library.totals] == counts[2:].tolist()
    assert bleu_of_counts(counts) == pytest.approx(library.score, abs=1e-9)


def test_counts_are_clipped_and_arrays_have_any_shape() -> None:
    assert bleu_counts(["a"] * 5, ["a", "b"])[2:6] == [1, 0, 0, 0]
    counts = np.array([bleu_counts(list("abcde"), list("abcdf"))] * 6).reshape(2, 3, 10)
    assert bleu_of_counts(counts).shape == (2, 3)
    assert bleu_of_counts(counts * 7) == pytest.approx(bleu_of_counts(counts))


def test_text_that_looks_tokenised_is_told_of() -> None:
    lines = [f"dog {i} sleeps ." for i in range(100)]
    with pytest.warns(UserWarning, match="as if tokenised"):
        score(lines, lines)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert score(lines[1:], lines[1:])["bleu"] == 100


def test_each_protocol_does_what_its_name_says() -> None:
    output = spoiled(0, 0.05)
    before = score_protocols(output, references(), "en")
    capitals = score_protocols([line.upper() for line in output], references(), "en")
    for name in ("lower-case", "tokenised lower-case"):
        assert capitals[name]["bleu"] == before[name]["bleu"]
    for name in ("sacreBLEU", "tokenised, compounds split"):
        assert capitals[name]["bleu"] < before[name]["bleu"] / 2
    assert before["sacreBLEU"]["bleu"] == score(output, references())["bleu"]
    assert "tok:13a" in before["sacreBLEU"]["signature"]
    assert "tok:none" in before["tokenised lower-case"]["signature"]
    cut = MosesTokenizer("en")
    sides = [
        [cut.tokenize(line, escape=True, return_str=True).lower() for line in side]
        for side in (output, references())
    ]
    found = BLEU(tokenize="none", force=True).corpus_score(sides[0], [sides[1]]).score
    assert before["tokenised lower-case"]["bleu"] == pytest.approx(found, abs=0.005)


def test_compounds_help_the_half_right() -> None:
    wrong, right = "here sleep the old dogs of twenty-two", "here sleep the old dogs of twenty-one"
    found = score_protocols([wrong], [right], "en")
    assert found["tokenised, compounds split"]["bleu"] > found["tokenised lower-case"]["bleu"]
    assert split_compounds("a-b - c- d") == "a ##AT##-##AT## b - c- d"


def test_quotes_are_made_plain_for_one_protocol_alone() -> None:
    curly, plain = ["er sagt “ja” und geht fort"], ['er sagt "ja" und geht fort']
    found = score_protocols(curly, plain, "de")
    assert found["tokenised, compounds split"]["bleu"] == 100
    assert found["tokenised lower-case"]["bleu"] < 100


def test_scores_are_those_of_sacrebleu() -> None:
    is_ = ["the dog sleeps in a garden .", "yes ."]
    should = ["the dog sleeps in the garden .", "no ."]
    found = score(is_, should)
    assert found["bleu"] == round(sacrebleu.corpus_bleu(is_, [should]).score, 2)
    assert found["chrf"] == round(sacrebleu.corpus_chrf(is_, [should]).score, 2)
    assert found["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|")
    assert found["sentences"] == 2
    for wrong in ([], ["one"]):
        with pytest.raises(ScoreError):
            score(wrong, [] if not wrong else should)


def test_without_capitals_scores_are_those_of_lower_case() -> None:
    output = [f"Ein Mann fährt um {i} mit dem Rad nach Hause" for i in range(30)]
    wanted = [line.replace("Rad", "Zug") if i % 2 else line for i, line in enumerate(output)]
    lower = [line.lower() for line in wanted]
    found = score([line.title() for line in output], wanted, lowercase=True)
    same = score([line.lower() for line in output], lower)
    assert (found["bleu"], found["chrf"]) == (same["bleu"], same["chrf"])
    assert found["bleu"] > score([line.title() for line in output], wanted)["bleu"]
    assert "case:lc" in found["bleu_signature"]
    groups = by_length([line.title() for line in output], wanted, wanted, lowercase=True)
    assert groups == by_length([line.lower() for line in output], lower, wanted)


def test_an_unknown_language() -> None:
    with pytest.raises(ScoreError, match="language 'xx': choose among cs, de, en, fr"):
        moses_tokenize(["x"], "xx")


def test_groups_by_length_are_whole() -> None:
    sources = [" ".join("w" * n) for n in (1, 2, 3, 4, 5, 6)]
    output = ["a b c d", "a b c x", "a b c d", "a b c d", "a b c d", "a b c d"]
    groups = by_length(output, ["a b c d"] * 6, sources, bounds=(2, 4))
    assert [(g["least"], g["most"], g["sentences"]) for g in groups] == [
        (1, 2, 2),
        (3, 4, 2),
        (5, 6, 2),
    ]
    assert groups[0]["bleu"] < groups[1]["bleu"] == pytest.approx(100)
    assert by_length(["a"], ["a"], ["w"], bounds=(5,))[0]["sentences"] == 1


@pytest.mark.parametrize("errors", [(0.05, 0.06), (0.05, 0.15), (0.1, 0.1)])
def test_the_bootstrap_is_that_of_sacrebleu(
    errors: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (spoiled(seed, e) for seed, e in enumerate(errors))
    monkeypatch.setenv("SACREBLEU_SEED", "12345")
    named: list[tuple[str, Sequence[str]]] = [("first", first), ("second", second)]
    _, results = PairedTest(
        named, {"BLEU": BLEU(references=[references()])}, references=None, test_type="bs",
        n_samples=200,
    )()  # fmt: skip
    ours = paired_bootstrap(first, second, references(), samples=200)
    theirs = [result for result in results["BLEU"] if isinstance(result, Result)]
    assert [ours.first, ours.second] == pytest.approx([result.score for result in theirs])
    assert ours.p == pytest.approx(theirs[1].p_value)
    assert ours.low <= ours.second - ours.first <= ours.high


def test_the_bootstrap_may_do_without_capitals() -> None:
    sides = spoiled(0, 0.05), spoiled(1, 0.2), references()
    lower = ([line.lower() for line in side] for side in sides)
    upper = (sides[0], [line.upper() for line in sides[1]], references())
    expected = paired_bootstrap(*lower, samples=20)
    assert paired_bootstrap(*upper, samples=20, lowercase=True) == expected
    assert paired_bootstrap(*upper, samples=20) != expected


def test_equal_outputs_are_no_evidence() -> None:
    same = paired_bootstrap(spoiled(0, 0.1), spoiled(0, 0.1), references(), samples=20)
    assert (same.low, same.high, same.p) == (0, 0, 1)


def test_the_interval_turns_with_the_order() -> None:
    first, second = spoiled(0, 0.05), spoiled(1, 0.2)
    one, other = (
        paired_bootstrap(a, b, references(), samples=100)
        for a, b in ((first, second), (second, first))
    )
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))
    assert one.high < 0


@pytest.mark.parametrize("check", [score, lambda h, r: paired_bootstrap(h, r, r)])
def test_lines_must_belong_together(check: Callable[[list[str], list[str]], Any]) -> None:
    with pytest.raises(ScoreError, match="2 translations for 1 references"):
        check(["a", "b"], ["a"])
    with pytest.raises(ScoreError, match="0 translations for 0"):
        check([], [])
