"""A grammar that generates German and English sentences with their alignment."""

from annotated_transformer.data.grammar.clauses import Writer
from annotated_transformer.data.grammar.lexicon import NOUNS, english_number, german_number
from annotated_transformer.data.grammar.pairs import (
    GRAMMAR_SIZES,
    Coreference,
    Pair,
    grammar_pairs,
    make_pair,
    split_of,
)

__all__ = [
    "GRAMMAR_SIZES", "NOUNS", "Coreference", "Pair", "Writer", "english_number", "german_number",
    "grammar_pairs", "make_pair", "split_of",
]  # fmt: skip
