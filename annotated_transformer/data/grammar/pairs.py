"""Sentence pairs with their alignment and antecedents, and the splits of the corpus."""

import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from annotated_transformer.data.grammar.clauses import (
    Word,
    Words,
    Writer,
    add_inside,
    constituent,
    link_words,
)
from annotated_transformer.data.grammar.lexicon import ADJECTIVES
from annotated_transformer.data.grammar.sentences import Sentence, write_sentence

GRAMMAR_SIZES: Final[Mapping[str, int]] = {"train": 16_000, "val": 500, "test": 1_000}  #: Pairs.
SHORTEST: Final = 4  # words and punctuation marks of a sentence, in either language
LONGEST: Final = 20
MARKS: Final = frozenset(".,?!:;")
QUALITIES: Final = frozenset(row["english"] for row in ADJECTIVES)


@dataclass(frozen=True)
class Coreference:
    """The positions of a pronoun and its antecedent in both sentences, (pronoun, noun)."""

    english: tuple[int, int]
    german: tuple[int, int]


def detokenize(words: Iterable[str]) -> str:
    """Join words with spaces; punctuation marks are attached to the preceding word."""
    return "".join(word if word in MARKS else f" {word}" for word in words).lstrip(" ")


@dataclass(frozen=True)
class Pair:
    """A sentence in both languages, with annotations that a real corpus lacks."""

    english: tuple[str, ...]  #: The words and punctuation marks, in order.
    german: tuple[str, ...]  #: The same in German.
    #: Pairs (English index, German index) of words that mean the same.
    alignment: frozenset[tuple[int, int]]
    coreferences: tuple[Coreference, ...] = ()  #: The pronouns with an antecedent in the sentence.
    #: The constituents of the English sentence, in the brackets and with the labels of the Penn
    #: Treebank.
    tree: str = ""

    def words(self, language: str) -> tuple[str, ...]:
        """Return the words in ``en`` or ``de``."""
        return {"en": self.english, "de": self.german}[language]

    def text(self, language: str) -> str:
        """Return the sentence in ``en`` or ``de``, as it is usually written."""
        return detokenize(self.words(language))

    def spans(self, language: str) -> tuple[tuple[int, int], ...]:
        """Return where each word starts and ends in the text, in characters."""
        spans, end = [], 0
        for word in self.words(language):
            start = end + (0 if end == 0 or word in MARKS else 1)
            end = start + len(word)
            spans.append((start, end))
        return tuple(spans)


def _finish(words: Words, mark: Words) -> Words:
    """Add the final mark, and capitalise the first word."""
    first, *others = words + mark
    return (first._replace(text=first.text[0].upper() + first.text[1:]), *others)


def _tree(words: Words) -> str:
    """Return the tree of a sentence's words, the last of which is its final mark."""
    *inside, mark = words
    depth = 0
    for place, word in enumerate(inside):
        depth += len(word.opens) - word.closes
        if depth == 0 and place < len(inside) - 1:  # several clauses: a bracket around them
            inside = list(constituent("S", tuple(inside)))
            break
    parts = []
    for word in add_inside(tuple(inside), (mark,), depth=1):
        opened = "".join(f"({label} " for label in word.opens)
        parts.append(f"{opened}({word.tag} {word.text})" + ")" * word.closes)
    return " ".join(parts)


def make_pair(sentence: Sentence, mark_link: int) -> Pair:
    """Turn linked words into a pair, aligned by equal links; the final mark gets its own."""
    mark = link_words(sentence[2], mark_link, tags=".")
    sides = _finish(sentence[0], mark), _finish(sentence[1], mark)
    alignment = frozenset(
        (i, j)
        for i, word in enumerate(sides[0])
        for j, other in enumerate(sides[1])
        if not word.links.isdisjoint(other.links)
    )
    where = [{link: i for i, word in enumerate(side) for link in word.links} for side in sides]
    coreferences = tuple(
        Coreference(*((place[min(word.links)], place[word.antecedent]) for place in where))
        for word in sides[0]
        if word.antecedent is not None
    )
    english, german = (tuple(word.text for word in side) for side in sides)
    return Pair(english, german, alignment, coreferences, _tree(sides[0]))


def split_of(pair: Pair) -> str:
    """Return the split of a sentence, which does not depend on the seed."""
    return _split(pair.english)


def _split(english: Iterable[str]) -> str:
    """Return the split of an English sentence."""
    first = hashlib.sha256(" ".join(english).encode()).digest()[0]
    return "test" if first < 26 else "val" if first < 52 else "train"


def _acceptable(pair: Pair) -> bool:
    """Whether a pair has an allowed length and no repeated adjective."""
    used = [word for word in pair.english if word in QUALITIES]
    lengths = len(pair.english), len(pair.german)
    return SHORTEST <= min(lengths) <= max(lengths) <= LONGEST and len(used) == len(set(used))


def grammar_pairs(split: str = "train", size: int | None = None, seed: int = 0) -> list[Pair]:
    """Generate sentence pairs of the grammar.

    Args:
        split: ``train``, ``val`` or ``test``. No sentence is in two of them, even for
            different seeds, because a hash of the sentence determines its split.
        size: Number of distinct pairs; the default is in ``GRAMMAR_SIZES``.
        seed: The same seed gives the same pairs, and a longer list starts with them.

    Raises:
        ValueError: If there is no such split, or the size is negative.
    """
    if split not in GRAMMAR_SIZES:
        raise ValueError(f"grammar: no split {split!r}; choose among {', '.join(GRAMMAR_SIZES)}")
    wanted = GRAMMAR_SIZES[split] if size is None else size
    if wanted < 0:
        raise ValueError(f"grammar: the size must be at least 0, not {wanted}")
    rng = random.Random(f"{split} {seed}")
    pairs: dict[tuple[str, ...], Pair] = {}
    while len(pairs) < wanted:
        sentence = write_sentence(writer := Writer(rng))  # small links: `link_words` knows them
        if _split(word.text for word in _finish(sentence[0], (Word(sentence[2]),))) == split:
            pair = make_pair(sentence, next(writer.links))
            if _acceptable(pair):
                pairs.setdefault(pair.english, pair)
    return list(pairs.values())
