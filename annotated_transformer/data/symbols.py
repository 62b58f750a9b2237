"""A tokenizer whose tokens are whole symbols, such as the brackets and tags of a tree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from annotated_transformer.data.files import parse_json
from annotated_transformer.notation import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from annotated_transformer.translation.tokenizers import (
    FIRST,
    FORMAT,
    Numbered,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
)

KIND = "symbols"


class SymbolTokenizer(Numbered):
    """Symbols between blanks, never split; ``entries`` begin with number 4.

    Args:
        entries: The symbols, all different, none with a blank.

    Raises:
        TokenizerError: A symbol is empty, has a blank, or occurs twice.
    """

    entries: tuple[str, ...]

    def __init__(self, entries: Sequence[str]) -> None:
        self.entries = tuple(entries)
        self._ids = {entry: number for number, entry in enumerate(entries, FIRST)}
        if len(self._ids) < len(entries) or any(entry.split() != [entry] for entry in entries):
            raise TokenizerError("a symbol is empty, has a blank, or occurs twice")
        self._all = (*SPECIAL_TOKENS, *entries)

    @classmethod
    def train(cls, lines: Iterable[str]) -> SymbolTokenizer:
        """Take every symbol of the training split, the most frequent first."""
        counts = Counter(symbol for line in lines for symbol in line.split())
        return cls(sorted(counts, key=lambda symbol: (-counts[symbol], symbol)))

    def encode(self, text: str) -> list[int]:
        """Return a number for each symbol; what is not in the vocabulary becomes UNK."""
        return [self._ids.get(symbol, UNK) for symbol in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the symbols with blanks between; padding, beginning and end are left out."""
        return " ".join(self.tokens(n for n in self.checked(ids) if n not in (PAD, BOS, EOS)))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the symbols."""
        return [self._all[number] for number in self.checked(ids)]

    def to_json(self) -> str:
        """Return the tokenizer as JSON text."""
        data = {"format": FORMAT, "kind": KIND, "entries": self.entries}
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def load_any_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer of any kind from a file with its JSON text.

    Raises:
        TokenizerError: If the file is missing or damaged.
    """
    try:
        data = parse_json(Path(path).read_text(encoding="utf-8"))
        ours = data["kind"] == KIND and data["format"] == FORMAT
    except (OSError, LookupError, TypeError, ValueError):
        ours = False
    if not ours:
        return load_tokenizer(path)  # or it says what is wrong
    try:
        return SymbolTokenizer([str(entry) for entry in data["entries"]])
    except (LookupError, TypeError, TokenizerError) as error:
        reason = f"damaged ({type(error).__name__}: {error})"
        raise TokenizerError(
            f"{path}: {reason}; train again, or take the file from a copy"
        ) from None
