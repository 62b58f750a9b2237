"""How a corpus is prepared. Needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from annotated_transformer.data.corpora import language_codes


@dataclass(frozen=True)
class Preparation:
    """How a corpus is prepared."""

    pair: str = "de-en"
    """Source and target language."""
    tokenizer: Literal["bpe", "bpe-lower"] = "bpe"
    """Sub-words of the text as it is, or in lower case."""
    vocabulary: int = 37_000
    """Number of sub-words, shared by both languages."""
    max_len: int = 256
    """Most tokens of a sentence, special ones included; pairs with longer ones are dropped."""
    max_words: int = 200
    """Most words of a training sentence."""
    max_ratio: float = 4.0
    """Most words on one side of a training pair for each on the other."""
    keep_duplicates: bool = False
    """Keep training pairs that occurred before."""
    allow_drift: bool = False
    """Go on where the two sides seem to drift against each other."""

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language, one by one."""
        return language_codes(self.pair)
