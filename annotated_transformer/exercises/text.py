"""Exercises on lines, pairs, vocabularies, the place in an epoch, and misspelt options."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

from annotated_transformer.exercises.declare import Exercise

Words = Sequence[str]
Part = Callable[..., Any]  # of a function; other parts make the known mistakes
SPLIT: Final = partial(re.split, "\r?\n")
ROWS: Final = [("a", " b "), ("", "c"), ("d", " "), ("e\x85f", "g\x85h"), ("i\rj", "k\rl")]


def paired(
    source: str, target: str, *, cut: Part = SPLIT, kept: Part = all, strip: Part = str.strip
) -> list[tuple[int, str, str]]:
    """Return the number and both sides of each pair of lines without a blank side."""
    pairs = enumerate(zip(cut(source), cut(target), strict=False), 1)
    return [(number, a, b) for number, (a, b) in pairs if kept((strip(a), strip(b)))]


PARALLEL_LINES: Final = Exercise(
    paired, [("eins\n\ndrei\n", "one\ntwo\nthree\n"), ("Ja.\r\nNa\r\n", "Yes.\r\n \r\n"),
     ("gut\x85so\nbald", "so\x85good\nsoon")],
    lambda draw: tuple("".join(line + draw.random.choice(["\n", "\r\n"]) for line in side) for side
                       in zip(*draw.random.choices(ROWS, k=draw.integer(1, 5)), strict=True)),
    {
        "str.splitlines cuts at other characters, too": partial(paired, cut=str.splitlines),
        "a \\r without \\n ends no line": partial(paired, cut=partial(re.split, "\r?\n|\r")),
        "the \\r before \\n left in the line": partial(paired, cut=partial(re.split, "\n")),
        "each side filtered by itself": partial(paired, cut=lambda x: filter(str.strip, SPLIT(x))),
        "numbered after dropping: the number is that of the line in the file":
            lambda s, t: [(n, *x[1:]) for n, x in enumerate(paired(s, t), 1)],
        "counted from 0, not from 1": lambda s, t: [(n - 1, *x) for n, *x in paired(s, t)],
        "dropped only if both sides are blank": partial(paired, kept=any),
        "a line of spaces not taken for blank": partial(paired, strip=str),
    },
)  # fmt: skip


def cleaned(
    pairs: Sequence[Words], most: int, r: float, cut: Part = str.split, up: int = 1, down: int = 1
) -> list[Words]:
    """Return the pairs fit for training, once each and without whitespace at the ends."""
    found = dict.fromkeys((a.strip(), b.strip()) for a, b in pairs)
    sizes = [(x, len(cut(x[0])), len(cut(x[1]))) for x in found]
    return [x for x, a, b in sizes if max(a, b) <= most and 0 < a / r / down <= b <= a * r * up]


CLEAN_PAIRS: Final = Exercise(
    cleaned, [([("Nun ja", "Well"), ("Ja", "Yes"), (" Ja", "Yes"), ("Ja", "Oh, oh yes")], 9, 2.0),
     ([("Ja", "Yes"), ("", ""), (" ", "So"), ("Ja", "Oh yes")], 9, 2.0),
     ([("Nein, nein, nein", "No, no"), ("Na gut", "All right"), ("Ei", "My")], 2, 2.0)],
    lambda draw: ([tuple(draw.random.choices(["", "ja", " ja", "na", "a b", "a b c"], k=2))
                   for _ in range(draw.integer(4, 9))], draw.integer(2, 3), draw.integer(2, 3) / 2),
    {
        "a source too long for its target kept": partial(cleaned, down=99),
        "a target too long for its source kept": partial(cleaned, up=99),
        "a pair exactly at a limit dropped": lambda p, m, r: cleaned(p, m - 1, r - 1e-6),
        "characters counted, not words": partial(cleaned, cut=list),
        "duplicates sought before stripping: whitespace at the ends makes no other pair":
            lambda p, m, r: [x for one in dict.fromkeys(p) for x in cleaned([one], m, r)],
    },
)  # fmt: skip


def numbered(
    sentences: Sequence[Words], specials: Words, least: int, rank: Part = lambda x: (-x[1], x[0])
) -> dict[str, int]:
    """Number the words: specials first, then by frequency, then by alphabet."""
    counts = Counter(x for sentence in sentences for x in sentence if x not in specials)
    words = [word for word, n in sorted(counts.items(), key=rank) if n >= least]
    return {word: number for number, word in enumerate([*specials, *words])}


VOCABULARY: Final = Exercise(
    numbered, [([["so", "ja"], ["na", "so"]], ["<unk>", "<pad>"], 1),
     ([["ja", "na", "na"]], ["<unk>"], 2), ([["<unk>", "so"], ["<unk>", "na"]], ["<unk>"], 1)],
    lambda draw: ([draw.random.choices(["ein", "der", "er", "<unk>"], k=4) for _ in range(3)],
                  ["<unk>", "<pad>"][: draw.integer(1, 2)], draw.integer(1, 4)),
    {
        "ties as they occurred, not by alphabet": partial(numbered, rank=lambda x: -x[1]),
        "the rarest words first": partial(numbered, rank=lambda x: x[::-1]),
        "a special that occurs in the text numbered again":
            lambda s, first, n: {w: i for i, w in enumerate([*first, *numbered(s, [], n)])},
        "off by one: min_freq occurrences are enough": lambda s, *x: numbered(s, x[0], x[1] + 1),
        "a word counted once per sentence": lambda s, *x: numbered([list(set(a)) for a in s], *x),
    },
)  # fmt: skip


def place(
    batches: Sequence[int], accumulate: int, updates: int, *, show: Part = lambda e, b, k: (e, b)
) -> Any:
    """Return the epoch after this many updates, and how many of its batches are used."""
    starts = [(epoch, b) for epoch, n in enumerate(batches) for b in range(0, n, accumulate)]
    return show(*starts[updates], accumulate)


RESUME_POINT: Final = Exercise(
    place, [([4, 4], 2, 1), ([3, 4], 2, 2), ([5, 3, 4], 2, 4)],
    lambda draw: ([draw.integer(1, 5) for _ in range(6)], draw.integer(1, 3), draw.integer(1, 4)),
    {
        "batches of the next epoch in one update": lambda n, k, done: place(n, 1, done * k),
        "an epoch at its end, not the next one at its beginning":
            lambda n, k, done: place(n, k, done - 1, show=lambda epoch, b, k: (epoch, b + k)),
        "updates counted, not batches": partial(place, show=lambda e, b, k: (e, b // k)),
        "one batch an update, not several": lambda n, k, done: place(n, 1, done),
        "the last update made again": lambda n, k, done: place(n, k, done - 1),
        "the epoch begun anew": partial(place, show=lambda epoch, *_: (epoch, 0)),
    },
)  # fmt: skip


@cache
def edits(a: str, b: str, swap: int = 1, replace: int = 1) -> int:
    """Return the edit distance of two words, with swaps of neighbouring letters."""
    if not a or not b:
        return len(a) + len(b)
    one = 1 + min(edits(a[1:], b, swap, replace), edits(a, b[1:], swap, replace))
    two = swap + edits(a[2:], b[2:], swap, replace) if a[:2] == b[:2][::-1] else one
    return min(one, two, replace * (a[0] != b[0]) + edits(a[1:], b[1:], swap, replace))


def nearest(word: str, known: Words, limit: int, *, far: Part = edits) -> str:
    """Return the first of the nearest known words, or nothing if it is beyond the limit."""
    best = min(known, key=lambda other: far(word, other))
    return best if far(word, best) <= limit else ""


SUGGESTION: Final = Exercise(
    nearest, [("--udpates", ["--dates", "--updates"], 1),
     ("--headss", ["--help", "--heads"], 1), ("--colour", ["--corpus", "--layers"], 2)],
    lambda draw: ("".join(draw.random.choices("abc", k=4)), [
        "".join(draw.random.choices("abc", k=k)) for k in (5, 4, 3, 3)], draw.integer(1, 2)),
    {
        "a swap counted as two edits": partial(nearest, far=partial(edits, swap=2)),
        "a replaced letter counted as two edits": partial(nearest, far=partial(edits, replace=2)),
        "the first within the limit, not the nearest":
            lambda word, known, n: next((x for x in known if edits(word, x) <= n), ""),
        "the last of those equally near": lambda word, known, n: nearest(word, known[::-1], n),
        "off by one: the limit is allowed": lambda word, known, n: nearest(word, known, n - 1),
        "a word beyond the limit returned": lambda word, known, n: nearest(word, known, 99),
    },
)  # fmt: skip
