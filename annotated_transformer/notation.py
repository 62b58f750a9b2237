# Written from book/notation.md: edit the chapter instead.
"""The special tokens and their ids."""

from typing import Final, NamedTuple

PAD: Final = 0  #: Pads short sentences to the length of the batch.
BOS: Final = 1  #: Begins every target sentence.
EOS: Final = 2  #: Ends every sentence, including the generated ones.
UNK: Final = 3  #: Replaces anything that is not in the vocabulary.
SPECIAL_TOKENS: Final = ("<pad>", "<s>", "</s>", "<unk>")  #: In the order of their ids.


class SpecialIds(NamedTuple):
    """The ids of padding, beginning and end, for a vocabulary whose ids differ from ours."""

    pad: int = PAD
    bos: int = BOS
    eos: int = EOS


SPECIAL_IDS: Final = SpecialIds()
