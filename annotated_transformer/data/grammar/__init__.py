"""A grammar that generates German and English sentences with their alignment."""

from annotated_transformer.data.grammar.clauses import (
    Clause,
    Writer,
    choose_verb,
    english_order,
    german_order,
    noun_phrase,
    write_clause,
)
from annotated_transformer.data.grammar.lexicon import NOUNS, Noun, english_number, german_number
from annotated_transformer.data.grammar.pairs import (
    GRAMMAR_SIZES,
    Coreference,
    Pair,
    grammar_pairs,
    make_pair,
    split_of,
)

__all__ = [
    "GRAMMAR_SIZES", "NOUNS", "Clause", "Coreference", "Noun", "Pair", "Writer", "choose_verb",
    "english_number", "english_order", "german_number", "german_order", "grammar_pairs",
    "make_pair", "noun_phrase", "split_of", "write_clause",
]  # fmt: skip
