"""Symbols are never split, and their tokenizer comes back from its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from annotated_transformer.data.symbols import SymbolTokenizer, load_any_tokenizer, word_shape
from annotated_transformer.notation import BOS, EOS, PAD, UNK
from annotated_transformer.translation.tokenizers import BPETokenizer, TokenizerError

LINES = ["(S (NP PRP )NP . )S", "(S (NP DT NN )NP )S", "(X NN NN )X"]
ENTRIES = sorted(set(" ".join(LINES).split()))


def test_symbols_are_whole() -> None:
    tokenizer = SymbolTokenizer(ENTRIES)
    for line in LINES:
        ids = tokenizer.encode(line)
        assert len(ids) == len(line.split())
        assert tokenizer.decode([BOS, *ids, EOS, PAD]) == line
        assert tokenizer.tokens(ids) == line.split()
    assert tokenizer.encode("(S (QP") == [tokenizer.encode("(S")[0], UNK]
    assert tokenizer.decode([UNK]) == "<unk>"
    assert tokenizer.encode("") == []
    with pytest.raises(IndexError, match="no token has number"):
        tokenizer.decode([len(tokenizer)])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("dog", "<_>"), ("dogs", "<_s>"), ("walking", "<_ing>"), ("ing", "<_>"), ("Paris", "<C_s>"),
        ("IBM", "<CA_>"), ("A", "<C_>"), ("3.5", "<number>"), ("1,000-2", "<number>"),
        ("80s", "<d_s>"), ("well-known", "<-_>"), ("--", "<-_>"), ("Mid-1980", "<Cd-_>"),
    ],
)  # fmt: skip
def test_a_word_that_is_not_known_has_a_shape(word: str, expected: str) -> None:
    assert word_shape(word) == expected
    tokenizer = SymbolTokenizer([*ENTRIES, expected])
    assert tokenizer.tokens(tokenizer.encode(word)) == [expected]
    assert SymbolTokenizer(ENTRIES).encode(word) == [UNK]
    assert SymbolTokenizer([word, expected]).encode(word) == [4]


def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    tokenizer, path = SymbolTokenizer(ENTRIES), tmp_path / "target.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    loaded = load_any_tokenizer(path)
    assert isinstance(loaded, SymbolTokenizer)
    assert loaded.entries == tokenizer.entries
    assert loaded.to_json() == tokenizer.to_json()
    path.write_text(BPETokenizer([]).to_json(), encoding="utf-8")
    assert isinstance(load_any_tokenizer(path), BPETokenizer)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"format": 1, "kind": "symbols"}',
        '{"format": 1, "kind": "symbols", "entries": ["a", "a"]}',
        '{"format": 1, "kind": "symbols", "entries": ["a b"]}',
        '{"format": 1, "kind": "symbols", "entries": 3}',
        '{"format": 9, "kind": "symbols", "entries": ["a"]}',
    ],
)  # fmt: skip
def test_a_damaged_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "target.json"
    path.write_text(text)
    with pytest.raises(TokenizerError, match=r"target\.json: .*train again"):
        load_any_tokenizer(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot be read"):
        load_any_tokenizer(tmp_path / "none")
    assert json.loads(SymbolTokenizer([]).to_json())["entries"] == []
