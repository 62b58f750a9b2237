"""A tokenizer whose tokens are whole symbols: words, and the brackets and tags of their trees."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from annotated_transformer.data.files import load_object
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
ENDINGS = "ing ed ly ion er est ity al able ous s y".split()


def word_shape(word: str) -> str:
    """Return what stands for a rare word: its capitals, digits and hyphen, and its ending."""
    if re.fullmatch(r"[\d.,:/\\-]*\d[\d.,:/\\-]*", word):
        return "<number>"
    marks = {
        "C": word[:1].isupper(),
        "A": word.isupper() and len(word) > 1,
        "d": any(map(str.isdigit, word)),
        "-": "-" in word,
    }
    known = (end for end in ENDINGS if word.lower().endswith(end) and len(word) > len(end) + 1)
    return f"<{''.join(mark for mark, holds in marks.items() if holds)}_{next(known, '')}>"


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

    def encode(self, text: str) -> list[int]:
        """Return a number for each symbol: if it is not known that of its shape, or UNK."""
        return [
            self._ids.get(each) or self._ids.get(word_shape(each), UNK) for each in text.split()
        ]

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
        data = load_object(path)
        ours = data["kind"] == KIND and data["format"] == FORMAT
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (LookupError, TypeError, ValueError):
        ours = False
    if not ours:
        return load_tokenizer(path)  # or it says what is wrong
    try:
        return SymbolTokenizer([str(entry) for entry in data["entries"]])
    except (LookupError, TypeError, TokenizerError) as error:
        message = f"{path}: damaged ({type(error).__name__}: {error})"
        raise TokenizerError(f"{message}; train again, or restore a copy") from None
