"""The special tokens come first in every vocabulary, in this order."""

from annotated_transformer import __version__, notation


def test_special_tokens_are_numbered_from_zero():
    numbers = (notation.PAD, notation.BOS, notation.EOS, notation.UNK)
    assert numbers == tuple(range(len(notation.SPECIAL_TOKENS)))


def test_special_tokens_are_distinct_and_marked():
    assert len(set(notation.SPECIAL_TOKENS)) == len(notation.SPECIAL_TOKENS)
    for token in notation.SPECIAL_TOKENS:
        assert token.startswith("<")
        assert token.endswith(">")


def test_names_fit_tokens():
    names = {
        "PAD": "<pad>",
        "BOS": "<s>",
        "EOS": "</s>",
        "UNK": "<unk>",
    }
    for name, token in names.items():
        assert notation.SPECIAL_TOKENS[getattr(notation, name)] == token


def test_version_is_three_numbers():
    assert all(part.isdigit() for part in __version__.split("."))
    assert __version__.count(".") == 2
