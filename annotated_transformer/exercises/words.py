"""Exercises on byte-pair encoding and BLEU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

from annotated_transformer.exercises.declare import Case, Draw, Exercise
from annotated_transformer.translation.evaluation import ngrams

Pair = tuple[str, str]
Words = Sequence[str]


def merge(symbols: Words, pair: Pair, *, most: int = 10**9, either: bool = False) -> list[str]:
    """Join every occurrence of a pair, from left to right."""
    merged: list[str] = []
    i = 0
    while i < len(symbols):
        here = tuple(symbols[i : i + 2])
        if most and (here == pair or (either and here == pair[::-1])):
            merged, i, most = [*merged, "".join(here)], i + 2, most - 1
        else:
            merged, i = [*merged, symbols[i]], i + 1
    return merged


def _from_the_right(symbols: Words, pair: Pair) -> list[str]:
    turned = [symbol[::-1] for symbol in symbols[::-1]]
    found = merge(turned, (pair[1][::-1], pair[0][::-1]))
    return [symbol[::-1] for symbol in found[::-1]]


def _overlapping(symbols: Words, pair: Pair) -> list[str]:
    here = [tuple(symbols[i : i + 2]) == pair for i in range(len(symbols))]
    return ["".join(pair) if joined else s for s, joined in zip(symbols, here, strict=True)]


def _merge_case(draw: Draw) -> Case:
    symbols = draw.random.choices(["a", "b", "ab"], k=draw.integer(1, 8))
    return symbols, tuple(draw.random.choices(["a", "b", "ab"], k=2))


BPE_MERGE: Final = Exercise(
    merge,
    [(list("lower"), ("e", "r")), (list("banana"), ("a", "n")), (list("aaa"), ("a", "a"))],
    _merge_case,
    {
        "only the first occurrence is merged": partial(merge, most=1),
        "from right to left: three equal symbols show the difference": _from_the_right,
        "the second symbol of a merged pair is still there": _overlapping,
        "the reversed pair is merged, too": partial(merge, either=True),
        "nothing is merged": lambda symbols, pair: list(symbols),
        "the pair removed, not joined":
            lambda symbols, pair: [s for s in merge(symbols, pair) if s != "".join(pair)],
    },
)  # fmt: skip


def best_pair(words: dict[str, int], *, weigh: bool = True, types: bool = False) -> int:
    """Return how often the most frequent pair of neighbouring letters occurs."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        pairs = [word[i : i + 2] for i in range(len(word) - 1)]
        for pair in set(pairs) if types else pairs:
            counts[pair] += count if weigh else 1
    return max(counts.values(), default=0)


def _counts_case(draw: Draw) -> Case:
    letters = ["".join(draw.random.choices("abc", k=draw.integer(2, 6))) for _ in range(4)]
    return ({word: draw.integer(1, 9) for word in letters},)


BPE_BEST_PAIR: Final = Exercise(
    best_pair,
    [({"low": 5, "lower": 2, "newest": 6},), ({"aaaa": 1, "ab": 2},), ({"abc": 3, "cab": 4},)],
    _counts_case,
    {
        "the words' frequencies are ignored": partial(best_pair, weigh=False),
        "a pair counts once per word, not as often as it occurs": partial(best_pair, types=True),
        "the words that contain the pair are counted": partial(best_pair, weigh=False, types=True),
        "the least frequent pair": lambda words: min(
            best_pair({w[i : i + 2]: n}) for w, n in words.items() for i in range(len(w) - 1)),
    },
)  # fmt: skip


def encode(word: str, merges: Sequence[Pair], *, most: int = 10**9) -> list[str]:
    """Apply the merges to the letters of a word, in the order in which they were learned."""
    symbols = list(word)
    for pair in merges:
        symbols = merge(symbols, pair, most=most)
    return symbols


def _leftmost(word: str, merges: Sequence[Pair]) -> list[str]:
    symbols, i = list(word), 0
    while i < len(symbols) - 1:
        pair = (symbols[i], symbols[i + 1])
        if pair in merges:
            symbols, i = [*symbols[:i], "".join(pair), *symbols[i + 2 :]], 0
        else:
            i += 1
    return symbols


def _longest(word: str, merges: Sequence[Pair]) -> list[str]:
    pieces = {"".join(pair) for pair in merges}
    found: list[str] = []
    while word:
        end = next((e for e in range(len(word), 1, -1) if word[:e] in pieces), 1)
        found, word = [*found, word[:end]], word[end:]
    return found


def _encode_case(draw: Draw) -> Case:
    """Draw merges as BPE would learn them, from symbols that exist by then."""
    pieces, merges = ["a", "b", "c"], []
    for _ in range(draw.integer(0, 5)):
        pair = (draw.random.choice(pieces), draw.random.choice(pieces))
        if pair not in merges and len("".join(pair)) < 5:
            merges.append(pair)
            pieces.append("".join(pair))
    return "".join(draw.random.choices("abc", k=draw.integer(1, 10))), merges


LEARNED: Final = [("e", "r"), ("l", "o"), ("lo", "w"), ("low", "er")]
BPE_ENCODE: Final = Exercise(
    encode,
    [("lowlower", LEARNED), ("aaabcab", [("b", "c"), ("a", "b"), ("a", "a")]),
     ("abc", [("a", "b"), ("b", "c"), ("a", "bc")])],
    _encode_case,
    {
        "the leftmost pair first: merges go in the order in which they were learned": _leftmost,
        "the longest piece first: merges go in the order in which they were learned": _longest,
        "merges in reverse order": lambda word, merges: encode(word, merges[::-1]),
        "each merge only once in a word": partial(encode, most=1),
        "only the first merge": lambda word, merges: encode(word, merges[:1]),
        "off by one: the last merge is left out": lambda word, merges: encode(word, merges[:-1]),
        "letters alone: no merge is applied": lambda word, merges: list(word),
    },
)  # fmt: skip


def precision(hypothesis: Words, reference: Words, n: int, *, clip: bool = True) -> tuple[int, int]:
    """Return the clipped n-gram matches and the n-grams of the hypothesis."""
    found, there = ngrams(hypothesis, n), ngrams(reference, n)
    matches = {gram: min(count, there[gram]) if clip else count for gram, count in found.items()}
    return sum(c for gram, c in matches.items() if gram in there), sum(found.values())


def _sentence(draw: Draw, low: int, high: int) -> list[str]:
    return draw.random.choices(["the", "cat", "sat", "on"], k=draw.integer(low, high))


def _types(hypothesis: Words, reference: Words, n: int) -> tuple[int, int]:
    found = set(ngrams(hypothesis, n))
    return len(found & set(ngrams(reference, n))), len(found)


NGRAM_PRECISION: Final = Exercise(
    precision,
    [("the the the the".split(), "the cat sat on the mat".split(), 1),
     ("sat cat on the".split(), "the cat sat on the mat".split(), 2),
     ("a cat".split(), "the cat sat".split(), 3)],
    lambda draw: (_sentence(draw, 1, 7), _sentence(draw, 1, 7), draw.integer(1, 4)),
    {
        "not clipped: at most as many match as the reference has": partial(precision, clip=False),
        "recall: divided by the n-grams of the reference": lambda h, r, n: precision(r, h, n),
        "each n-gram counted once: repetitions count": _types,
        "off by one: n-grams of n + 1 words": lambda h, r, n: precision(h, r, n + 1),
        "words, not n-grams": lambda h, r, n: precision(h, r, 1),
        "off by one: the last n-gram is missing": lambda h, r, n: precision(h[:-1], r, n),
    },
)  # fmt: skip


def bleu(
    hypotheses: Sequence[Words], references: Sequence[Words], *, clip: bool = True,
    penalty: bool = True, turned: bool = False, arithmetic: bool = False, most: int = 4,
) -> float:  # fmt: skip
    """Return BLEU of a corpus, from 0 to 100; the options make the known mistakes."""
    pairs = list(zip(hypotheses, references, strict=True))
    shares = []
    for n in range(1, most + 1):
        matches, total = map(
            sum, zip(*(precision(h, r, n, clip=clip) for h, r in pairs), strict=True)
        )
        shares.append(matches / total if total else 0.0)
    words, wanted = (sum(map(len, side)) for side in (hypotheses, references))
    if not words or (not arithmetic and min(shares) == 0):
        return 0.0
    mean = sum(shares) / most if arithmetic else math.exp(sum(map(math.log, shares)) / most)
    ratio = words / wanted if turned else wanted / words
    return 100 * mean * (math.exp(min(0.0, 1 - ratio)) if penalty else 1.0)


def _bleu_case(draw: Draw) -> Case:
    references = [_sentence(draw, 4, 9) for _ in range(draw.integer(1, 3))]
    hypotheses: list[list[str]] = []
    for reference in references:
        hypothesis = reference[: draw.integer(4, 9)] + reference[:1] * draw.integer(0, 3)
        if hypotheses:  # the first keeps four words in a row, so that no precision is zero
            hypothesis[draw.integer(0, len(hypothesis) - 1)] = "mat"
        else:
            hypothesis += ["mat"] * draw.integer(0, 2)
        hypotheses.append(hypothesis)
    return hypotheses, references


_LONG = "the cat sat on the mat and slept".split()
BLEU: Final = Exercise(
    bleu,
    [([["so"] * 4], [_LONG]), ([_LONG[:5]], [_LONG]), ([[*_LONG[:6], "the", "the"]], [_LONG])],
    _bleu_case,
    {
        "not clipped: at most as many match as the reference has": partial(bleu, clip=False),
        "brevity penalty missing": partial(bleu, penalty=False),
        "brevity penalty inverted: short outputs are penalized": partial(bleu, turned=True),
        "arithmetic mean of the precisions, not geometric": partial(bleu, arithmetic=True),
        "mean of the sentences' BLEU: counts of all sentences are added first":
            lambda h, r: sum(bleu([a], [b]) for a, b in zip(h, r, strict=True)) / len(h),
        "from 0 to 1: a score from 0 to 100 is wanted": lambda h, r: bleu(h, r) / 100,
        "n-grams up to 3, not 4": partial(bleu, most=3),
        "hypotheses and references swapped": lambda h, r: bleu(r, h),
    },
)  # fmt: skip
