"""The special tokens come first in every vocabulary; the page's table of masks is right."""

import inspect
import re
from pathlib import Path

import torch
from torch import nn

from annotated_transformer import __version__, notation


def test_special_tokens_are_numbered_from_zero() -> None:
    numbers = (notation.PAD, notation.BOS, notation.EOS, notation.UNK)
    assert numbers == tuple(range(len(notation.SPECIAL_TOKENS)))


def test_special_tokens_are_distinct_and_marked() -> None:
    assert len(set(notation.SPECIAL_TOKENS)) == len(notation.SPECIAL_TOKENS)
    for token in notation.SPECIAL_TOKENS:
        assert token.startswith("<")
        assert token.endswith(">")


def test_names_fit_tokens() -> None:
    names = {
        "PAD": "<pad>",
        "BOS": "<s>",
        "EOS": "</s>",
        "UNK": "<unk>",
    }
    for name, token in names.items():
        assert notation.SPECIAL_TOKENS[getattr(notation, name)] == token


def test_version_is_three_numbers() -> None:
    assert all(part.isdigit() for part in __version__.split("."))
    assert __version__.count(".") == 2


PAGE = Path(__file__).parents[1] / "book/notation.md"


def table_of_masks() -> dict[str, set[str]]:
    """Return the arguments that the page lists for each class of PyTorch."""
    rows = re.findall(r"^\| `nn\.(\w+)` \| ([^|]+) \|", PAGE.read_text("utf-8"), re.M)
    found: dict[str, set[str]] = {}
    for kind, names in rows:
        found.setdefault(kind, set()).update(re.findall(r"`(\w+)`", names))
    return found


def test_the_table_of_masks_names_pytorchs_arguments() -> None:
    table = table_of_masks()
    assert set(table) == {"MultiheadAttention", "TransformerEncoder", "Transformer"}
    for kind, names in table.items():
        parameters = inspect.signature(getattr(nn, kind).forward).parameters
        assert names == {name for name in parameters if name.endswith("mask")}, kind


def test_true_hides_in_every_mask_of_the_table() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8)
    kinds = {
        "MultiheadAttention": (nn.MultiheadAttention(8, 2, batch_first=True), (x, x, x)),
        "TransformerEncoder": (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1),
            (x,),
        ),
        "Transformer": (nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True), (x, x)),
    }
    for kind, names in table_of_masks().items():
        layer, inputs = kinds[kind]
        for name in names:
            shape = (1, 3) if "padding" in name else (3, 3)
            nothing, last = torch.zeros(shape, dtype=torch.bool), torch.arange(shape[1]) == 2
            plain, same, other = (
                y[0] if isinstance(y := layer(*inputs, **masks), tuple) else y
                for masks in ({}, {name: nothing}, {name: last.expand(shape)})
            )
            torch.testing.assert_close(same, plain)
            assert other.isfinite().all()
            assert not torch.allclose(other, plain), (kind, name)
