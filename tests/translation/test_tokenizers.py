"""Tests of words and sub-words: reversible, of the promised size, safe to load."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import pytest
import spacy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from spacy.language import Language

from annotated_transformer.data.corpora import load_corpus
from annotated_transformer.notation import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from annotated_transformer.translation.tokenizers import (
    BPETokenizer,
    Tokenizer,
    TokenizerError,
    WordTokenizer,
    load_tokenizer,
    normal_blanks,
    split_words,
    tokenizer_from_json,
)

SPECIAL = {PAD, BOS, EOS, UNK}


@lru_cache
def text(split: str = "train", size: int = 600) -> tuple[tuple[str, ...], tuple[str, ...]]:
    corpus = load_corpus("grammar", "de-en", split, size=size)
    return corpus.source, corpus.target


@lru_cache
def lines() -> tuple[str, ...]:
    return text()[0] + text()[1]


@lru_cache
def bpe() -> BPETokenizer:
    return BPETokenizer.train(lines(), 700)


@lru_cache
def lower() -> BPETokenizer:
    return BPETokenizer.train(lines(), 700, lowercase=True)


@lru_cache
def words(min_freq: int = 1) -> WordTokenizer:
    return WordTokenizer.train(text()[0], "de", min_freq)


# Text that no tokenizer expects, among it the names of the special tokens.
anything = st.one_of(
    st.text(),
    st.lists(
        st.sampled_from(
            [*SPECIAL_TOKENS, " ", "  ", "▁", "Ġ", "ä", "a\u0308", "\n", "\t", "\u2028", "der"]
        )
    ).map("".join),
)


# ---------------------------------------------------------------------- sub-words


@settings(max_examples=300)
@given(anything)
def test_any_text_comes_back_unchanged(sentence: str) -> None:
    ids = bpe().encode(sentence)
    assert bpe().decode(ids) == sentence
    assert not SPECIAL & set(ids)
    assert all(0 <= number < len(bpe()) for number in ids)
    assert len(bpe().tokens(ids)) == len(ids)


@given(anything)
def test_lower_case_is_the_tokenizer_of_the_text_in_lower_case(sentence: str) -> None:
    other = bpe_of_lower_case()
    assert lower().merges == other.merges
    assert lower().encode(sentence) == other.encode(sentence.lower())
    assert lower().decode(lower().encode(sentence)) == sentence.lower()


@lru_cache
def bpe_of_lower_case() -> BPETokenizer:
    return BPETokenizer.train([line.lower() for line in lines()], 700)


@given(anything, st.lists(st.sampled_from([PAD, BOS, EOS]), max_size=3))
def test_special_tokens_are_left_out_of_the_text(sentence: str, after: list[int]) -> None:
    ids = bpe().encode(sentence)
    assert bpe().decode([BOS, *ids, EOS, *after]) == sentence


@settings(max_examples=50)
@given(st.lists(st.integers(0, 699)))
def test_any_numbers_can_be_decoded(ids: list[int]) -> None:
    assert isinstance(bpe().decode(ids), str)
    assert len(bpe().tokens(ids)) == len(ids)


def test_unknown_is_shown() -> None:
    assert bpe().decode([*bpe().encode("der"), UNK, *bpe().encode("Mann")]) == "der <unk> Mann"
    assert bpe().tokens([PAD, BOS, EOS, UNK]) == list(SPECIAL_TOKENS)


@given(anything | st.sampled_from(lines()) | st.text("a\u00df\ufffd\U0001f600 ", max_size=6))
@example("a\ufffdb")  # a letter, though it stands for broken ones, too
@example("\ufffd")
def test_labels_show_blanks_and_spell_the_text(line: str) -> None:
    shown = "▁" * bool(line) + line.replace(" ", "▁")
    assert "".join(bpe().tokens(bpe().encode(line))) == shown


@pytest.mark.parametrize("size", [260, 261, 300, 512, 900])
def test_the_size_is_exact(size: int) -> None:
    tokenizer = BPETokenizer.train(lines(), size)
    assert len(tokenizer) == size
    assert len(set(tokenizer.entries)) == size - len(SPECIAL_TOKENS)
    highest = max(number for line in lines() for number in tokenizer.encode(line))
    assert highest < size


def test_sizes_that_cannot_be_had() -> None:
    with pytest.raises(TokenizerError, match="260"):
        BPETokenizer.train(lines(), 259)
    with pytest.raises(TokenizerError, match="at most") as caught:
        BPETokenizer.train(lines(), 50_000)
    largest = int(str(caught.value).split("vocabulary of ")[1].split()[0])
    assert len(BPETokenizer.train(lines(), largest)) == largest
    with pytest.raises(TokenizerError, match="at most"):
        BPETokenizer.train([], 300)
    assert len(BPETokenizer.train([], 260)) == 260


def learned_by_hand(corpus: list[str], count: int) -> list[tuple[str, str]]:
    """Learn merges of the bytes of words that are cut at blanks, the slow way."""
    frequency = Counter(f" {word}" for line in corpus for word in line.split(" ") if word)
    # A letter stands for each byte; the library writes a printable one as itself.
    spell = {" ": "Ġ"}
    parts = {word: [spell.get(letter, letter) for letter in word] for word in frequency}
    born = {letter: n for n, letter in enumerate(sorted({p for ps in parts.values() for p in ps}))}
    merges = []
    for _ in range(count):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, pieces in parts.items():
            for pair in itertools.pairwise(pieces):
                pairs[pair] += frequency[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], born[pair[0]], born[pair[1]]))
        merges.append(best)
        born["".join(best)] = len(born)
        for word, pieces in parts.items():
            index = 0
            while index < len(pieces) - 1:
                if (pieces[index], pieces[index + 1]) == best:
                    pieces[index : index + 2] = ["".join(best)]
                index += 1
            parts[word] = pieces
    return merges


@settings(max_examples=40)
@given(st.lists(st.text("abc ", min_size=1, max_size=12), min_size=5, max_size=15))
def test_the_merges_are_the_most_frequent_pairs(corpus: list[str]) -> None:
    corpus = [" ".join(line.split()) for line in corpus]
    count = 3
    try:
        got = BPETokenizer.train(corpus, 260 + count).merges
    except TokenizerError:
        return  # not enough pairs in this text
    if len(got) == count:
        assert list(got) == learned_by_hand(corpus, count)


def learned_pieces(tokenizer: BPETokenizer) -> list[str]:
    ids = range(len(SPECIAL_TOKENS) + 256, len(tokenizer))
    return [tokenizer.tokens([number])[0].replace("▁", " ") for number in ids]


def comes_from(tokenizer: BPETokenizer, training: tuple[str, ...]) -> bool:
    joined = " ".join(["", *training])
    return all(piece in joined for piece in learned_pieces(tokenizer))


def test_the_vocabulary_comes_from_the_training_text_alone() -> None:
    assert comes_from(bpe(), lines())
    # The broken variant: learned from something else too.
    leaky = BPETokenizer.train([*lines(), *["Quarzkristall im Xylophon"] * 500], 700)
    assert not comes_from(leaky, lines())


def test_both_languages_share_the_vocabulary() -> None:
    german, english = ({n for line in side for n in bpe().encode(line)} for side in text())
    assert german & english
    assert german - english
    assert english - german
    # The broken variant: a vocabulary of one language cuts the other into letters.
    alone = BPETokenizer.train(text()[0], 700)

    def mean(tokenizer: BPETokenizer) -> float:
        return sum(len(tokenizer.encode(line)) for line in text()[1]) / len(text()[1])

    assert mean(bpe()) < 0.8 * mean(alone)


def test_learning_is_deterministic_over_processes_and_threads() -> None:
    code = (
        "from annotated_transformer.data.corpora import load_corpus;"
        "from annotated_transformer.translation.tokenizers import BPETokenizer;"
        "t = load_corpus('grammar', 'de-en', 'train', size=600);"
        "print(BPETokenizer.train([*t.source, *t.target], 700).to_json())"
    )
    for threads in ("1", "3"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        got = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert got.stdout.strip() == bpe().to_json()


def test_a_generator_will_do() -> None:
    assert BPETokenizer.train((line for line in lines()), 700).merges == bpe().merges


# --------------------------------------------------------------------------- words


@settings(max_examples=150)
@given(anything)
def test_words_are_those_of_spacy(sentence: str) -> None:
    for language in ("de", "en"):
        document = theirs(language)(" ".join(sentence.split()))
        assert [word for word, _ in split_words(sentence, language)] == [
            token.text for token in document
        ]


@cache
def theirs(language: str) -> Language:
    return spacy.blank(language)


@settings(max_examples=150)
@given(anything)
def test_blanks_are_put_back(sentence: str) -> None:
    tokenizer = WordTokenizer("de", list(dict.fromkeys(split_words(sentence, "de"))))
    ids = tokenizer.encode(sentence)
    assert UNK not in ids
    assert tokenizer.decode(ids) == normal_blanks(sentence)
    assert not SPECIAL & set(ids)


def test_words_of_the_corpus_come_back() -> None:
    for line in text()[0]:
        ids = words().encode(line)
        assert words().decode([BOS, *ids, EOS, PAD]) == line
        assert "".join(words().tokens(ids)) == line.replace(" ", "")


def test_unknown_words() -> None:
    assert words().encode("Quarzkristall") == [UNK]
    assert words().decode([UNK, UNK]) == "<unk> <unk>"
    assert words().tokens([BOS, UNK]) == ["<s>", "<unk>"]


def test_rare_words_are_left_out_and_frequent_ones_come_first() -> None:
    counts = Counter(entry for line in text()[0] for entry in split_words(line, "de"))
    for min_freq in (1, 2, 5):
        tokenizer = words(min_freq)
        expected = {entry for entry, count in counts.items() if count >= min_freq}
        assert set(tokenizer.entries) == expected
        assert len(tokenizer) == len(expected) + len(SPECIAL_TOKENS)
        frequencies = [counts[entry] for entry in tokenizer.entries]
        assert frequencies == sorted(frequencies, reverse=True)


def test_the_order_of_lines_does_not_matter() -> None:
    assert WordTokenizer.train(text()[0][::-1], "de", 1).entries == words().entries


def test_a_language_that_spacy_lacks() -> None:
    with pytest.raises(TokenizerError, match="'qq'"):
        WordTokenizer.train(["a"], "qq")


def test_an_empty_text() -> None:
    tokenizer = WordTokenizer.train([], "en")
    assert len(tokenizer) == len(SPECIAL_TOKENS)
    assert tokenizer.encode("") == []
    assert tokenizer.encode("a") == [UNK]


# ------------------------------------------------------------------ both, and files


@pytest.mark.parametrize("make", [bpe, words])
def test_numbers_outside_the_vocabulary(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for number in (-1, len(tokenizer)):
        with pytest.raises(IndexError, match=str(number)):
            tokenizer.decode([number])
        with pytest.raises(IndexError, match=str(number)):
            tokenizer.tokens([number])


@pytest.mark.parametrize("make", [bpe, lower, words])
def test_saved_and_loaded(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    tokenizer: Tokenizer = make()
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json() + "\n", encoding="utf-8")
    again = load_tokenizer(path)
    assert type(again) is type(tokenizer)
    assert again.to_json() == tokenizer.to_json()
    assert len(again) == len(tokenizer)
    for line in (*lines()[:100], "Quarz 😀 <s>"):
        assert again.encode(line) == tokenizer.encode(line)
        assert again.decode(again.encode(line)) == tokenizer.decode(tokenizer.encode(line))
    assert list(tmp_path.iterdir()) == [path]
    json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("make", [bpe, words])
def test_any_truncated_file_is_refused(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    whole = make().to_json()
    path = tmp_path / "t.json"
    for part in (0, 1, 10, len(whole) // 2, len(whole) - 1):
        path.write_text(whole[:part], encoding="utf-8")
        with pytest.raises(TokenizerError) as caught:
            load_tokenizer(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damaged",
    [
        "[]",
        "null",
        '{"kind": "bpe", "merges": []}',
        '{"format": 99, "kind": "bpe", "merges": []}',
        '{"format": 1, "kind": "pickle"}',
        '{"format": 1, "kind": "bpe"}',
        '{"format": 1, "kind": "bpe", "merges": [["a"]]}',
        '{"format": 1, "kind": "bpe", "merges": [["ab", "c"]]}',
        '{"format": 1, "kind": "words", "language": "de", "entries": [1]}',
        '{"format": 1, "kind": "words", "language": "../x", "entries": []}',
    ],
)
def test_damaged_content_is_refused(damaged: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        tokenizer_from_json(damaged)
    assert "\n" not in str(caught.value)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot be read"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "latin1.json").write_bytes(b'{"\xfc')
    with pytest.raises(TokenizerError, match=r"latin1\.json"):
        load_tokenizer(tmp_path / "latin1.json")
