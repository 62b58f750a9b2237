"""Tests of the grammar: agreement, word order, alignment, and the splits."""

import hashlib
import itertools
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annotated_transformer.data.grammar import (
    GRAMMAR_SIZES,
    NOUNS,
    Pair,
    english_number,
    german_number,
    grammar_pairs,
    lexicon,
    split_of,
)
from annotated_transformer.data.grammar.pairs import LONGEST, SHORTEST, detokenize


@lru_cache
def sample(size: int = 4_000, seed: int = 0) -> list[Pair]:
    return grammar_pairs("train", size, seed)


# ----------------------------------------------------------------------- numbers


def test_numbers_follow_the_rules_of_each_language() -> None:
    assert german_number(21) == "einundzwanzig"
    assert english_number(21) == "twenty-one"
    assert [german_number(n) for n in (2, 6, 7, 11, 12, 16, 17, 30, 60, 70)] == (
        "zwei sechs sieben elf zwölf sechzehn siebzehn dreißig sechzig siebzig".split()
    )
    assert [english_number(n) for n in (2, 11, 12, 13, 15, 18, 40, 50, 80, 99)] == (
        "two eleven twelve thirteen fifteen eighteen forty fifty eighty ninety-nine".split()
    )
    for tens, unit in itertools.product(range(2, 10), range(1, 10)):
        number = 10 * tens + unit
        stem = "ein" if unit == 1 else german_number(unit)
        assert german_number(number) == f"{stem}und{german_number(10 * tens)}"
        tens_word, unit_word = english_number(number).split("-")
        assert tens_word == english_number(10 * tens)
        assert unit == 1 or unit_word == english_number(unit)


def test_number_words_are_distinct() -> None:
    for spell in (german_number, english_number):
        assert len({spell(n) for n in range(2, 100)}) == 98


@pytest.mark.parametrize("number", [-3, 0, 1, 100])
def test_numbers_out_of_range(number: int) -> None:
    for spell in (german_number, english_number):
        with pytest.raises(ValueError, match="2 to 99"):
            spell(number)


# ---------------------------------------------------------------------- agreement

ARTICLES = {  # written out again, by the grammar books and not by the package's tables
    "der": "mn fd fg pg",
    "die": "fn fa pn pa",
    "das": "nn na",
    "den": "ma pd",
    "dem": "md nd",
    "des": "mg ng",
}
# Endings of an adjective by (kind of word before it, gender and case).
WEAK_E = {"mn", "fn", "fa", "nn", "na"}
MIXED_OTHER = {"mn": "er", "nn": "es", "na": "es", "fn": "e", "fa": "e"}
STRONG = {
    "mn": "er", "ma": "en", "md": "em", "fn": "e", "fa": "e", "fd": "er", "nn": "es",
    "na": "es", "nd": "em", "pn": "e", "pa": "e", "pd": "en",
}  # fmt: skip
EIN_ENDINGS = {
    "mn": "", "ma": "en", "md": "em", "mg": "es", "fn": "e", "fa": "e", "fd": "er",
    "fg": "er", "nn": "", "na": "", "nd": "em", "ng": "es", "pn": "e", "pa": "e",
    "pd": "en", "pg": "er",
}  # fmt: skip
STEMS = {"teur": "teuer", "dunkl": "dunkel", "müd": "müde"}


@lru_cache
def noun_readings(word: str) -> frozenset[str]:
    """Return the genders and cases in which a noun may have this form."""
    found = set()
    for noun in NOUNS:
        singular = {"n": noun.singular, "a": noun.singular, "d": noun.singular}
        singular["g"] = noun.singular if noun.gender == "f" else noun.genitive
        found |= {noun.gender + case for case, form in singular.items() if form == word}
        if not noun.plural:
            continue
        dative = noun.plural if noun.plural[-1] in "ns" else noun.plural + "n"
        plural = {"n": noun.plural, "a": noun.plural, "d": dative, "g": noun.plural}
        found |= {"p" + case for case, form in plural.items() if form == word}
    return frozenset(found)


ADJECTIVES = {row["german"] for row in lexicon.ADJECTIVES}
POSSESSIVES = ("ein", "kein", "mein", "unser")


def adjective_ending(word: str) -> str | None:
    """Return the ending of an inflected adjective, None where the word is none."""
    for ending in ("em", "en", "er", "es", "e"):
        stem = word.lower().removesuffix(ending)
        if word.endswith(ending) and STEMS.get(stem, stem) in ADJECTIVES:
            return ending
    return None


def phrases(words: tuple[str, ...]) -> Iterator[tuple[str, str | None, str]]:
    """Yield determiner, ending of the adjective and noun of each noun phrase."""
    for index, noun in enumerate(words):
        if not noun_readings(noun):
            continue
        start = index
        ending = adjective_ending(words[index - 1]) if index else None
        if ending is not None:
            start -= 1
        relative = start > 1 and words[start - 2] == ","  # der Ball, den Kinder suchen
        yield (words[start - 1].lower() if start and not relative else ""), ending, noun


def readings(determiner: str, ending: str | None, noun: str) -> set[str]:
    """Return in which genders and cases all words of a phrase agree; empty if never."""
    found = set(noun_readings(noun))
    if determiner in ("im", "ins"):
        determiner = {"im": "dem", "ins": "das"}[determiner]
    if determiner in ARTICLES:
        found &= set(ARTICLES[determiner].split())
        endings = {r: "e" if r in WEAK_E else "en" for r in found}
    elif stem := next((p for p in POSSESSIVES if _is_form_of(determiner, p)), None):
        found = {r for r in found if determiner == stem + EIN_ENDINGS[r]}
        if stem == "ein":
            found = {r for r in found if r[0] != "p"}
        endings = {r: MIXED_OTHER.get(r, "en") for r in found}
    else:
        found = {r for r in found if r in STRONG}
        endings = STRONG
    return {r for r in found if ending is None or endings[r] == ending}


def _is_form_of(word: str, stem: str) -> bool:
    return word.startswith(stem) and word[len(stem) :] in EIN_ENDINGS.values()


def test_every_german_noun_phrase_agrees() -> None:
    count = 0
    for pair in sample():
        for phrase in phrases(pair.german):
            assert readings(*phrase), f"{phrase} in {pair.text('de')}"
            count += 1
    assert count > len(sample())


@pytest.mark.parametrize(
    "phrase",
    [
        ("der", "er", "Tisch"),
        ("ein", "e", "Tisch"),
        ("den", "en", "Lampe"),
        ("dem", "en", "Bücher"),
        ("unsere", None, "Tisch"),
        ("", "en", "Wasser"),
        ("eine", "e", "Lampen"),
    ],
)
def test_the_check_of_agreement_can_fail(phrase: tuple[str, str | None, str]) -> None:
    assert not readings(*phrase)


def test_cases_follow_the_verb_and_the_preposition() -> None:
    for pair in sample():
        words = pair.german
        for index, word in enumerate(words[:-1]):
            if word in ("auf", "unter", "neben", "hinter") and index + 1 < len(words):
                phrase = next(iter(phrases(words[index:])), None)
                if phrase and words[index + 1] != "," and words[index + 1] != ".":
                    assert any(r[1] == "d" for r in readings(*phrase)), pair.text("de")
            if word in ("in", "im", "ins"):
                phrase = next(iter(phrases(words[index:])))
                english = "into" if "into" in pair.english else "in"
                if not {"in", "into"} <= set(pair.english):
                    case = "a" if english == "into" else "d"
                    assert any(r[1] == case for r in readings(*phrase)), pair.text("de")


def test_contractions_are_made_wherever_they_can_be() -> None:
    for pair in sample():
        assert not re.search(r"\bin (dem|das)\b", pair.text("de"))


# --------------------------------------------------------------------- word order


def test_conjunctions_send_the_verb_to_the_end() -> None:
    single = {
        verb.prefix + verb.finite(person) for verb in lexicon.VERBS for person in ("ich", "3", "p")
    }
    ends = single | {
        "bin", "ist", "sind", "war", "waren", "habe", "hat", "haben",
        *(row[person] for row in lexicon.AUXILIARIES.values() for person in ("ich", "3", "p")
          if row["language"] == "de"),
    }  # fmt: skip
    seen = 0
    for pair in sample():
        words = [word.lower() if i == 0 else word for i, word in enumerate(pair.german)]
        for index, word in enumerate(words):
            if word in ("weil", "obwohl", "dass", "ob", "wenn", "falls"):
                rest = words[index + 1 :]
                stop = next(i for i, w in enumerate(rest) if w in {",", ".", "?"})
                assert rest[stop - 1] in ends, pair.text("de")
                seen += 1
    assert seen > 1000


def test_separable_prefixes_stand_at_the_end_of_main_clauses_and_else_are_joined() -> None:
    separable = {verb.prefix: verb for verb in lexicon.VERBS if verb.prefix}
    alone = joined = 0
    for pair in sample():
        for index, word in enumerate(pair.german):
            if word in {"an", "mit", "aus", "weg"}:  # auf and ein are other words too
                assert pair.german[index + 1] in {".", "?", ",", "und"}, pair.text("de")
                alone += 1
            joined += any(word == verb.prefix + verb.finite("3") for verb in separable.values())
    assert alone > 50
    assert joined > 20


def test_german_commas_come_before_every_subordinate_clause() -> None:
    for pair in sample():
        for before, word in itertools.pairwise(pair.german):
            if word in ("weil", "obwohl", "dass", "ob", "aber"):
                assert before == ","
        assert not re.search(r",\s*[,.?]", pair.text("de"))
        assert not re.search(r",\s*[,.?]", pair.text("en"))


def test_english_articles_fit_the_next_sound() -> None:
    for pair in sample():
        for article, word in itertools.pairwise(w.lower() for w in pair.english):
            if article in ("a", "an"):
                assert (article == "an") == (word[0] in "aeiou"), pair.text("en")


# -------------------------------------------------------------------- the promises


def test_each_sentence_has_one_translation_in_either_direction() -> None:
    everything = [pair for split in GRAMMAR_SIZES for pair in grammar_pairs(split, 300, seed=1)]
    everything += sample()
    for source, target in (("de", "en"), ("en", "de")):
        translations = defaultdict(set)
        for pair in everything:
            translations[pair.text(source)].add(pair.text(target))
        assert max(map(len, translations.values())) == 1


def test_it_becomes_the_pronoun_of_its_antecedents_gender() -> None:
    gender = {noun.singular: noun.gender for noun in NOUNS}
    gender |= {noun.genitive: noun.gender for noun in NOUNS if noun.genitive}
    allowed = {"m": {"er", "ihn"}, "f": {"sie"}, "n": {"es"}}
    seen = set()
    for pair in sample():
        for reference in pair.coreferences:
            english = pair.english[reference.english[0]]
            german, name = (pair.german[i] for i in reference.german)
            if english == "it":
                assert german in allowed[gender[name]], pair.text("de")
                seen.add((gender[name], german))
            if english in ("they", "them"):
                assert german == "sie"
            if english == "he":
                assert gender[name] == "m"
            if english == "she":
                assert gender[name] == "f"
            assert (noun_index := reference.english[1]) < reference.english[0]
            assert (noun_index, reference.german[1]) in pair.alignment
    assert len(seen) == 4


def test_every_it_has_an_antecedent() -> None:
    for pair in sample():
        marked = {reference.english[0] for reference in pair.coreferences}
        for index, word in enumerate(pair.english):
            assert word.lower() != "it" or index in marked, pair.text("en")


def test_alignment_is_right_where_a_dictionary_can_tell() -> None:
    dictionary: dict[str, set[str]] = defaultdict(set)
    for noun in NOUNS:
        dictionary[noun.english] |= {noun.singular, noun.genitive}
        dictionary[noun.english_plural] |= {noun.plural, noun.plural + "n"}
    for pair in sample(2_000):
        aligned = defaultdict(set)
        for i, j in pair.alignment:
            assert 0 <= i < len(pair.english)
            assert 0 <= j < len(pair.german)
            aligned[i].add(pair.german[j])
        for i, word in enumerate(pair.english):
            assert aligned[i], f"{word!r} is not aligned: {pair.text('en')}"
            if word in dictionary and word not in {v.english for v in lexicon.VERBS}:
                assert len(aligned[i]) == 1
                assert aligned[i] <= dictionary[word], pair.text("de")
        covered = {j for _, j in pair.alignment}
        unaligned = {pair.german[j] for j in range(len(pair.german)) if j not in covered}
        assert unaligned <= {","}, pair.text("de")


def test_splits_are_disjoint_for_any_seeds() -> None:
    parts = {
        split: {
            text
            for seed in (0, 7)
            for pair in grammar_pairs(split, 200, seed)
            for text in (pair.text("de"), pair.text("en"))
        }
        for split in GRAMMAR_SIZES
    }
    for first, second in itertools.combinations(parts.values(), 2):
        assert not first & second
    for split in GRAMMAR_SIZES:
        assert all(split_of(pair) == split for pair in grammar_pairs(split, 50, 3))


def test_the_seed_decides_and_longer_lists_begin_alike() -> None:
    assert grammar_pairs("val", 50, 5) == grammar_pairs("val", 80, 5)[:50]
    assert grammar_pairs("val", 50, 5) != grammar_pairs("val", 50, 6)
    assert grammar_pairs("val", 0) == []


def test_the_same_in_another_process() -> None:
    code = (
        "from annotated_transformer.data.grammar import grammar_pairs;"
        "print(repr([pair.text('de') + pair.text('en') for pair in grammar_pairs('test', 200)]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    got = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    texts = [pair.text("de") + pair.text("en") for pair in grammar_pairs("test", 200)]
    assert got.stdout.strip() == repr(texts)


# The records in results/ were made with these sentences: a change here makes them obsolete.
DIGESTS = {
    "train": "5908e0e57c67eeac",
    "val": "e5a44fa443a81933",
    "test": "edb16e10915e9af9",
}
TREES = {"train": "c155a3a48d3a301d", "val": "c1a34c20ba5d4859", "test": "8b364f75dd578bc7"}


@pytest.mark.parametrize("split", GRAMMAR_SIZES)
def test_the_corpus_never_changes(split: str) -> None:
    digest, trees = hashlib.sha256(), hashlib.sha256()
    for pair in grammar_pairs(split):
        trees.update(pair.tree.encode())
        references = [(one.english, one.german) for one in pair.coreferences]
        digest.update(
            repr((pair.english, pair.german, sorted(pair.alignment), references)).encode()
        )
    assert (digest.hexdigest()[:16], trees.hexdigest()[:16]) == (DIGESTS[split], TREES[split])


def test_sizes_and_lengths() -> None:
    assert len(grammar_pairs("val")) == GRAMMAR_SIZES["val"]
    for pair in sample():
        for side in (pair.english, pair.german):
            assert SHORTEST <= len(side) <= LONGEST
    assert len(set(pair.english for pair in sample())) == len(sample())


def test_text_looks_like_text_and_spans_find_the_words() -> None:
    for pair in sample(1_000):
        for language in ("de", "en"):
            text = pair.text(language)
            assert text[0].isupper()
            assert text[-1] in ".?"
            assert "  " not in text
            assert " ," not in text
            words = [text[start:end] for start, end in pair.spans(language)]
            assert tuple(words) == pair.words(language)


def test_every_word_of_the_lexicon_is_used() -> None:
    words = {word.lower() for pair in sample() for word in pair.english}
    for noun in NOUNS:
        assert noun.english in words
    for row in lexicon.ADJECTIVES:
        assert row["english"] in words
    for verb in lexicon.VERBS:
        assert set(verb.english.split()) & words
    kinds = {noun.kind for noun in NOUNS}
    assert kinds == {"person", "animal", "standing", "lying", "place", "drink", "food"}


def test_tables_are_complete() -> None:
    tables = sorted(Path(lexicon.__file__).parent.glob("*.tsv"))
    assert len(tables) == 9
    for path in tables:
        head, *rows = [line.split("\t") for line in path.read_text("utf-8").splitlines()]
        assert len(set(map(tuple, rows))) == len(rows), path.name
        for row in rows:
            assert len(row) == len(head), f"{path.name}: {row}"
            assert all(word and word == word.strip() for word in row), f"{path.name}: {row}"
    assert {noun.gender for noun in NOUNS} == set("mfn")
    for noun in NOUNS:
        assert bool(noun.genitive) == (noun.gender != "f" and bool(noun.plural)), noun
    named = {"definite", "relative", "ein", "weak", "mixed", "strong"}
    assert set(lexicon.ENDINGS) == set(itertools.product(named, lexicon.CASES))


def test_tables_travel_with_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    project = Path(__file__).parents[2] / "pyproject.toml"
    data = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "**/*.tsv" in data["package-data"]["annotated_transformer"]


def test_grammar_refuses_what_it_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"'dev'.*train, val, test"):
        grammar_pairs("dev")
    with pytest.raises(ValueError, match="at least 0, not -1"):
        grammar_pairs("train", -1)


@given(st.lists(st.sampled_from(["der", "Mann", ",", ".", "?", "geht"])))
def test_detokenize_keeps_the_words(words: list[str]) -> None:
    text = detokenize(words)
    assert text.replace(" ", "") == "".join(words)
    assert not re.search(r" [,.?]", text)
