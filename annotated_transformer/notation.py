# Written from book/notation.md: edit the chapter instead.
"""The special tokens and their ids."""

from typing import Final, NamedTuple

PAD: Final = 0  # pads short sentences to the length of the batch
BOS: Final = 1  # begins every target sentence
EOS: Final = 2  # ends every sentence, including the generated ones
UNK: Final = 3  # replaces anything that is not in the vocabulary
SPECIAL_TOKENS: Final = ("<pad>", "<s>", "</s>", "<unk>")  # in the order of their ids


class SpecialIds(NamedTuple):
    """Ids of the special tokens, for vocabularies with different ones."""

    pad: int = PAD
    bos: int = BOS
    eos: int = EOS


SPECIAL_IDS: Final = SpecialIds()
