# Written from book/translation/evaluation.md: edit the chapter instead.
"""BLEU from its formula, the ways in which published scores are computed, and significance."""

import functools
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

ORDERS = 4


def ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    """Count the runs of ``n`` words."""
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def bleu_counts(hypothesis: Sequence[str], reference: Sequence[str]) -> list[int]:
    """Return what BLEU must know of a sentence, given as words.

    Returns:
        Words of the hypothesis and of the reference, then for each n from 1 to 4 the runs that
        count, then for each n the runs of the hypothesis: 10 numbers.
    """
    matches, totals = [], []
    for n in range(1, ORDERS + 1):
        found = ngrams(hypothesis, n)
        matches.append((found & ngrams(reference, n)).total())  # the smaller count of each
        totals.append(found.total())
    return [len(hypothesis), len(reference), *matches, *totals]


def bleu_of_counts(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Return BLEU, from 0 to 100, of summed counts ``(..., 10)``: ``(...)``."""
    counts = np.asarray(counts, dtype=np.float64)
    words, wanted = counts[..., 0], counts[..., 1]
    matches, totals = counts[..., 2 : 2 + ORDERS], counts[..., 2 + ORDERS :]
    zeros = np.cumsum(matches == 0, axis=-1)
    smoothed = np.where(matches > 0, matches, 0.5**zeros)  # no factor of zero
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(smoothed / totals).mean(axis=-1)
        brevity = np.minimum(0.0, 1 - wanted / words)
        score = 100 * np.exp(logs + brevity)
    empty = (matches[..., 0] == 0) | (totals[..., -1] == 0)  # no word right, or no run of four
    return np.where(empty, 0.0, score)


def all_counts(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> NDArray[np.int64]:
    """Return ``bleu_counts`` of each sentence, cut as sacreBLEU does: ``(sentences, 10)``."""
    cut = BLEU().tokenizer
    sides = [
        [cut((line.lower() if lowercase else line).rstrip()).split() for line in lines]
        for lines in (hypotheses, references)
    ]
    return np.array([bleu_counts(*pair) for pair in zip(*sides, strict=True)])


class ScoreError(ValueError):
    """Texts that cannot be scored; the message says why, in one line."""


def check_lines(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Raise ScoreError unless there is one translation for each reference, and at least one."""
    if len(hypotheses) != len(references) or not references:
        raise ScoreError(
            f"{len(hypotheses)} translations for {len(references)} references: "
            "there must be one for each"
        )


def score(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> dict[str, Any]:
    """Return BLEU and chrF of translations by sacreBLEU, with their signatures.

    With ``lowercase`` capitals do not count, as for a system that writes none.

    Raises:
        ScoreError: There is nothing to score, or the numbers of lines differ.
    """
    check_lines(hypotheses, references)
    if sum(line.endswith(" .") for line in hypotheses) >= 100:
        told = "many translations end in ' .', as if tokenised, but BLEU here expects plain text"
        warnings.warn(told, stacklevel=2)
    bleu, chrf = BLEU(lowercase=lowercase, force=True), CHRF(lowercase=lowercase)
    found, characters = (
        metric.corpus_score(list(hypotheses), [list(references)]) for metric in (bleu, chrf)
    )
    return {
        "bleu": round(found.score, 2),
        "bleu_signature": str(bleu.get_signature()),
        "bleu_detail": found.format(score_only=False),
        "chrf": round(characters.score, 2),
        "chrf_signature": str(chrf.get_signature()),
        "sentences": len(references),
    }


def by_length(
    hypotheses: Sequence[str],
    references: Sequence[str],
    sources: Sequence[str],
    bounds: Sequence[int] = (10, 15, 20, 30),
    *,
    lowercase: bool = False,
) -> list[dict[str, Any]]:
    """Score groups of sentences by the length of their source, in words between spaces.

    ``bounds`` are the maximum words of all groups but the last. For each group with sentences
    it returns the smallest and largest length, the number of sentences, and their BLEU (``score``).

    Raises:
        ScoreError: The numbers of lines differ.
    """
    check_lines(hypotheses, references)
    check_lines(sources, references)
    lengths = np.array([len(line.split()) for line in sources])
    groups = []
    for group in range(len(bounds) + 1):
        chosen = np.flatnonzero(np.searchsorted(bounds, lengths) == group).tolist()
        if chosen:
            sides = [[side[i] for i in chosen] for side in (hypotheses, references)]
            group_of = {"least": int(lengths[chosen].min()), "most": int(lengths[chosen].max())}
            bleu = score(*sides, lowercase=lowercase)["bleu"]
            groups.append({**group_of, "sentences": len(chosen), "bleu": bleu})
    return groups


LANGUAGES = ("cs", "de", "en", "fr")  # that Moses has rules for, and we have text of


def moses_tokenize(lines: Sequence[str], language: str, *, plain: bool = False) -> list[str]:
    """Cut words by the rules of Moses, and join them by spaces.

    Args:
        lines: Sentences.
        language: As ``de``; sets the abbreviations that keep their full stop.
        plain: Replace “, ” and the like, but not „, by their plain forms first.

    Raises:
        ScoreError: There are no rules for the language here.
    """
    if language not in LANGUAGES:
        raise ScoreError(f"language {language!r}: choose among {', '.join(LANGUAGES)}")
    tokenizer, normalizer = _moses(language)
    if plain:
        lines = [normalizer.replace_unicode_punct(line) for line in lines]
    return [tokenizer.tokenize(line, escape=False, return_str=True) for line in lines]


@functools.cache
def _moses(language: str) -> tuple[Any, Any]:
    from sacremoses import MosesPunctNormalizer, MosesTokenizer  # takes a while to load

    return MosesTokenizer(language), MosesPunctNormalizer(language)


def split_compounds(line: str) -> str:
    """Set hyphens between two characters apart, as marks of their own.

    Of two hyphens around a single character only the first is split, because the published
    script does the same.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def score_protocols(
    hypotheses: Sequence[str], references: Sequence[str], language: str
) -> dict[str, dict[str, Any]]:
    """Score one output in the ways in which published numbers were counted.

    All lines are plain text of one language, such as ``de``. For each way it returns BLEU and
    sacreBLEU's signature.

    Raises:
        ScoreError: The numbers of lines differ, or the language is unknown.
    """
    check_lines(hypotheses, references)
    sides = [list(hypotheses), list(references)]
    cut = [[line.lower() for line in moses_tokenize(side, language)] for side in sides]
    plain = [moses_tokenize(side, language, plain=True) for side in sides]
    split = [[split_compounds(line) for line in side] for side in plain]
    as_cut = BLEU(tokenize="none", smooth_method="none", force=True)
    ways: dict[str, tuple[BLEU, list[list[str]]]] = {
        "sacreBLEU": (BLEU(force=True), sides),
        "lower-case": (BLEU(lowercase=True, force=True), sides),
        "tokenised lower-case": (as_cut, cut),
        "tokenised, compounds split": (as_cut, split),
    }
    scores = {}
    for name, (metric, (output, wanted)) in ways.items():
        found = metric.corpus_score(output, [wanted]).score
        scores[name] = {"bleu": round(found, 2), "signature": str(metric.get_signature())}
    return scores


@dataclass(frozen=True)
class Comparison:
    """Two outputs compared by BLEU.

    Attributes:
        first: BLEU of the first.
        second: BLEU of the second.
        low: Lower end of the interval that holds 95 % of the resampled differences.
        high: Upper end of that interval.
        p: Share of draws whose absolute difference exceeds the mean of these by more than the
            outputs' own absolute difference; 1 if the outputs score the same.
    """

    first: float
    second: float
    low: float
    high: float
    p: float


def paired_bootstrap(
    first: Sequence[str],
    second: Sequence[str],
    references: Sequence[str],
    *,
    samples: int = 1000,
    seed: int = 12345,
    lowercase: bool = False,
) -> Comparison:
    """Compare translations of the same sentences by two systems, by resampling.

    ``seed`` decides the ``samples`` draws; with ``lowercase`` capitals do not count.

    Raises:
        ScoreError: The numbers of lines differ.
    """
    for output in (first, second):
        check_lines(output, references)
    counts = [all_counts(output, references, lowercase=lowercase) for output in (first, second)]
    n, rng = len(references), np.random.default_rng(seed)
    draws = (rng.choice(n, size=n, replace=True) for _ in range(samples))
    sums = np.array([[c[draw].sum(axis=0) for c in counts] for draw in draws])
    scores = bleu_of_counts(sums).T  # (2, samples)
    one, other = (float(bleu_of_counts(c.sum(axis=0))) for c in counts)
    differences = scores[1] - scores[0]
    low, high = map(float, np.percentile(differences, (2.5, 97.5)))
    beyond = np.abs(differences) - np.abs(differences).mean() > abs(other - one)
    p = 1.0 if one == other else (int(beyond.sum()) + 1) / (samples + 1)
    return Comparison(one, other, low, high, p)
