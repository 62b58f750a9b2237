"""The check of the chapter on tokenizers notices a vocabulary that is not what claim 5.1a says."""

import pytest

from tests.claims import assert_claim_can_fail

LEARNED_FROM = "itertools.chain(corpus.source, corpus.target), 1500"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # one language alone
        (LEARNED_FROM, "[*corpus.source, *corpus.source], 1500"),
        # text that is not training text
        (LEARNED_FROM, "[*sentences, *['Quarzkristall im Xylophon'] * 500], 1500"),
        # another size
        ("corpus.target), 1500", "corpus.target), 1499"),
        # long tokens are not joined, though they are frequent
        ("min_frequency=1", "min_frequency=1, max_token_length=8"),
        # a word at the beginning of a line is not the word inside it
        ('(" " + line for line in lines)', "(line for line in lines)"),
        # numbers of the special tokens are given to text
        ("number + FIRST for number in ids", "number + 3 for number in ids"),
        # only the first merges are applied
        ("BPE(ids, list(merges))", "BPE(ids, list(merges)[:500])"),
    ],
)
def test_another_vocabulary_is_noticed(old: str, new: str) -> None:
    assert_claim_can_fail("translation/tokenizers", "5.1a", old, new)
