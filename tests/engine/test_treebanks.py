"""Treebanks as parallel text: from an archive, from the grammar, and from one's own files."""

from __future__ import annotations

import itertools
import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from annotated_transformer.cli.systems import load_split
from annotated_transformer.data.archives import locate_file
from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.data.downloads import DATA_VARIABLE
from annotated_transformer.data.files import CorpusError
from annotated_transformer.data.symbols import word_shape
from annotated_transformer.engine import treebanks
from annotated_transformer.engine.config import CORPORA as CHOICES
from annotated_transformer.engine.config import (
    UsageError,
    build_options,
    default_options,
    load_recipe,
)
from annotated_transformer.engine.texts import learn_tokenizers
from annotated_transformer.engine.treebanks import (
    FILES,
    LANGUAGES,
    MARKS,
    TREEBANKS,
    check_trees,
    is_parser,
    load_treebank,
    safe_words,
    tree_vocabulary,
    with_phrases,
    with_words,
    without_words,
)
from annotated_transformer.notation import SPECIAL_TOKENS
from annotated_transformer.results.parsing import delinearize, well_formed
from tests.engine.parsers import expect, write_sample

MIRROR = Path(os.environ.get(DATA_VARIABLE, "nowhere"))  # the tests below unset it


@pytest.fixture(autouse=True)
def _no_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a mirror with an archive of the sample's shape."""
    return write_sample(tmp_path / "mirror", monkeypatch)


def test_the_splits_are_those_of_the_files(mirror: Path) -> None:
    seen: list[int] = []
    for split, (first, last) in FILES.items():
        text = load_treebank("treebank", split=split, mirror=mirror)
        numbers = [n for n in range(first, last + 1) for _ in range(n % 3 + 1)]
        assert text.source == tuple(f"A dog{n} sleeps ." for n in numbers)
        assert set(text.target) == {"(S (NP DT NN )NP (VP VBZ )VP . )S"}
        assert (text.name, text.split, text.languages) == ("treebank", split, LANGUAGES)
        seen += numbers
    assert sorted(set(seen)) == list(range(1, 200))
    short = load_split("treebank", "en-trees", "train", mirror=mirror, size=3, bar=False)
    assert len(short) == 3


def test_phrases_are_the_constituents_of_two_words_or_more() -> None:
    """Each once, after all sentences, with the words and the brackets that it has inside."""
    lines = ("(S (NP DT NN )NP (VP VBZ (NP DT NN )NP )VP )S", "(S (NP NN )NP (VP VBZ )VP )S")
    words = ("a dog sees a dog", "it rains")
    text = ParallelText("own", "train", LANGUAGES, words, lines, "", ())
    found = with_phrases(text)
    assert found.source == (*words, "a dog", "sees a dog")
    assert found.target == (*lines, "(NP DT NN )NP", "(VP VBZ (NP DT NN )NP )VP")
    check_trees(replace(found, checksums=(("", ""), ("lines", ""))))  # all are trees
    assert found.line_numbers() == (1, 2, 1, 1)
    assert with_phrases(replace(text, blank=(1,))).line_numbers() == (2, 3, 2, 2)
    assert found.head(3).line_numbers() == (1, 2, 1)
    many = load_treebank("grammar-trees", size=50)
    more = with_phrases(many)
    assert list(more)[:50] == list(many)
    rest = list(more)[50:]
    assert len(rest) == len(set(rest))
    ends = list(itertools.combinations(range(21), 2))
    spans = {" ".join(line.split()[i:j]) for line in many.source for i, j in ends}
    assert {source for source, _ in rest} <= spans
    brackets = sum(line.count("(") for line in many.target)
    assert 50 < len(rest) < brackets


def test_phrases_are_for_parsers() -> None:
    with pytest.raises(UsageError, match="--tokenizer: not for a parser"):
        build_options({"corpus": "grammar-trees", "tokenizer": "words"})
    with pytest.raises(UsageError, match="--phrases: is for a parser"):
        build_options({"corpus": "grammar", "phrases": True})
    assert build_options(
        {"corpus": "grammar-trees", "pair": "en-trees", "phrases": True}
    ).data.phrases


def test_checksums_tell_texts_apart(mirror: Path) -> None:
    one, other = (load_treebank("treebank", split=s, mirror=mirror) for s in ("val", "test"))
    assert {name for name, _ in one.checksums} == {"val.en", "val.trees"}
    assert one.checksums[0][1] != other.checksums[0][1]


def test_an_archive_that_is_not_there_or_altered(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = mirror / "ptb/treebank.zip"
    archive.write_bytes(archive.read_bytes() + b"x")
    with pytest.raises(CorpusError, match=r"treebank\.zip: altered or cut short"):
        load_treebank("treebank", mirror=mirror)
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("treebank/combined/wsj_0001.mrg", "(S (NN a)")
    expect(archive, monkeypatch)
    with pytest.raises(CorpusError, match=r"wsj_0001\.mrg: line 1.*never closed"):
        load_treebank("treebank", mirror=mirror)
    monkeypatch.setattr("annotated_transformer.data.downloads.ATTEMPTS", 1)
    with pytest.raises(CorpusError, match=r"download failed .*--mirror"):
        load_treebank("treebank", cache=tmp_path / "cache", progress=False)


def test_what_there_is_not() -> None:
    with pytest.raises(CorpusError, match="no language pair 'de-en'; give en-trees"):
        load_treebank("treebank", "de-en")
    for name in TREEBANKS:
        with pytest.raises(CorpusError, match=f"{name}: no split 'x'; choose among train, val, te"):
            load_treebank(name, split="x")
    with pytest.raises(UsageError, match=r"--corpus x: choose among .*treebank"):
        load_split("x", "en-trees", "train", mirror=None, bar=False)
    with pytest.raises(UsageError, match="--corpus grammar-trees needs no download"):
        load_split("grammar-trees", "en-trees", "val", mirror=Path(), bar=False)


def test_treebanks_are_corpora_with_recipes() -> None:
    assert set(TREEBANKS) < set(CHOICES)
    for name in TREEBANKS:
        options = default_options({"corpus": name})
        assert (options.data.corpus, options.data.pair) == (name, "-".join(LANGUAGES))
    assert is_parser(LANGUAGES)
    assert not is_parser(("de", "en"))


def test_trees_of_the_grammar() -> None:
    text = load_treebank("grammar-trees", split="val", size=50)
    assert len(text) == 50
    assert len(set(text.source)) == 50
    for source, target in text:
        assert well_formed(target.split(), source.split())
        assert target.startswith(("(S ", "(SQ ", "(SBARQ "))
    longer = load_treebank("grammar-trees", split="val", size=60)
    assert longer.head(50).source == text.source


def test_the_recipe_of_the_grammars_trees_fits_them() -> None:
    text, options = load_treebank("grammar-trees", progress=False), load_recipe("grammar-trees")
    source, target = learn_tokenizers(text, options.data)
    assert source is target
    lines = map(with_words, text.target, text.source)
    symbols = {symbol for line in lines for symbol in line.split()}
    assert set(target.tokens(range(len(SPECIAL_TOKENS), len(target)))) == symbols  # all are kept
    assert len(source) > options.data.vocabulary / 2


def test_words_stand_in_the_tree_before_their_tags() -> None:
    line, sentence = "(S (NP DT NN )NP (VP VBZ )VP . )S", "the dog sleeps ."
    found = with_words(line, sentence)
    assert found == "(S (NP the /DT dog /NN )NP (VP sleeps /VBZ )VP . /. )S"
    assert without_words(found.split()) == line.split()
    for source, target in load_treebank("grammar-trees", size=50):
        symbols = with_words(target, source).split()
        assert without_words(symbols) == target.split()
        assert [symbol for symbol in symbols if symbol[0] not in MARKS] == source.split()


def test_no_word_is_taken_for_a_bracket_a_tag_or_a_special_symbol() -> None:
    words, line = "(NP )S /NN <unk> a", "(S DT NN VBZ DT NN )S"
    assert safe_words(words).split() == [*map(word_shape, words.split()[:4]), "a"]
    symbols = with_words(line, words).split()
    assert without_words(symbols) == line.split()
    text = ParallelText("own", "train", LANGUAGES, (words,), (line,), "", ())
    found = tree_vocabulary(text, 9)
    assert set(found.tokens(found.encode(safe_words(words)))) <= {
        *map(word_shape, words.split()),
        "a",
    }


def test_the_frequent_words_are_kept_and_the_others_known_by_their_shape() -> None:
    words = ("a dog sees a dog", "a Dog barks", "it sees /dev it")
    lines = ("(S DT NN VBZ DT NN )S", "(S DT NN VBZ )S", "(S PRP VBZ NN PRP )S")
    text = ParallelText("own", "train", LANGUAGES, words, lines, "", ())
    found = tree_vocabulary(text, 4)
    assert found.tokens(found.encode("a dog sees it")) == ["a", "dog", "sees", "it"]
    assert (
        found.tokens(found.encode("barks Dog /dev cats Cat")) == "<_s> <C_> <_> <_s> <C_>".split()
    )
    assert found.tokens(found.encode("3")) == ["<unk>"]  # none of this shape was seen
    assert found.decode(found.encode("(S )S /DT /NN /VBZ")) == "(S )S /DT /NN /VBZ"
    assert len(found) == len(SPECIAL_TOKENS) + 2 + 4 + 3 + 4  # brackets, tags, shapes, words


def text_of(*pairs: tuple[str, str]) -> ParallelText:
    """Return a text of one's own."""
    source, target = zip(*pairs, strict=True)
    sums = (("a.en", ""), ("a.trees", ""))
    return ParallelText("files", "train", LANGUAGES, source, target, "", sums)


def test_own_trees_may_be_symbols_or_brackets() -> None:
    words, symbols = "a dog sleeps", "(S (NP DT NN )NP (VP VBZ )VP )S"
    brackets = "(TOP (S (NP-SBJ (DT a) (NN dog)) (VP (VBZ sleeps) (NP (-NONE- *T*)))))"
    found = check_trees(text_of((words, symbols), (words, brackets), (words, f" {symbols} ")))
    assert found.target == (symbols,) * 3
    assert found.source == (words,) * 3


@pytest.mark.parametrize(
    "line",
    [
        "a dog sleeps", "(S DT NN )S", "(S DT NN VBZ", "(S DT NN VBZ )NP", "( (S (DT a)",
        "(S (DT a) (NN dog) (VBZ barks))", "(S (DT a)) (S (NN dog) (VBZ sleeps))",
        "(S (-NONE- *))", "(S DT NN VBZ )S (S DT NN VBZ )S",
    ],
)  # fmt: skip
def test_a_line_that_is_no_tree_is_named(line: str) -> None:
    good = "a", "(NP DT )NP"
    with pytest.raises(CorpusError, match=r"a\.trees, line 2: is no tree .* give Penn brackets"):
        check_trees(text_of(good, ("a dog sleeps", line)))
    with pytest.raises(CorpusError, match="line 4: is no tree"):  # two blank ones before it
        check_trees(replace(text_of(good, ("a dog sleeps", line)), blank=(1, 3)))


@pytest.mark.skipif(not (MIRROR / "ptb").exists(), reason="needs the treebank sample")
def test_the_sample_itself(tmp_path: Path) -> None:
    sizes = {}
    for split in FILES:
        text = load_treebank("treebank", split=split, mirror=MIRROR, cache=tmp_path)
        sizes[split] = len(text)
        for source, target in text:
            words, symbols = source.split(), target.split()
            assert well_formed(symbols, words)
            rest = {symbol for symbol in symbols if re.search("[-=]|[0-9]", symbol)}
            assert rest <= {"-LRB-", "-RRB-"}  # no function tags, numbers or traces
            assert str(delinearize(symbols, words)).count("(") == target.count("(") + len(words)
    assert sum(sizes.values()) == 3914
    assert sizes == {"train": 3396, "val": 273, "test": 245}  # counted by hand with grep


def test_the_archive_is_unpacked_once(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[Path] = []

    def watched(path: Path, folder: Path) -> Path:
        unpacked.append(path)
        return locate_file(path, folder)

    monkeypatch.setattr(treebanks, "locate_file", watched)
    load_treebank("treebank", split="test", mirror=mirror)
    assert len(unpacked) == 1
