# Written from book/notation.md: edit the chapter instead.
"""The special tokens, and with them the conventions of the book."""

from typing import Final, NamedTuple

PAD: Final = 0  # fills short sentences up to the length of the batch
BOS: Final = 1  # begins every target sentence
EOS: Final = 2  # ends every sentence, also the one that the model writes
UNK: Final = 3  # stands for what the vocabulary does not have
SPECIAL_TOKENS: Final = ("<pad>", "<s>", "</s>", "<unk>")  # by their number


class SpecialIds(NamedTuple):
    """Numbers of the special tokens, for a vocabulary that has others."""

    pad: int = PAD
    bos: int = BOS
    eos: int = EOS


SPECIAL_IDS: Final = SpecialIds()
