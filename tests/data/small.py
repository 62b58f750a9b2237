"""What several tests of data need: an error's message, and the pairs in a shard."""

from collections.abc import Callable

import pytest

from annotated_transformer.data.files import CorpusError, FileError
from annotated_transformer.data.shards import Shard, TokenPairs

Pairs = list[tuple[list[int], list[int]]]


def message(action: Callable[[], object], kind: type[FileError] = CorpusError) -> str:
    """Return the text of the error that an action ends with, which must be one line."""
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text


def plain(pairs: TokenPairs | Shard) -> Pairs:
    """Return all pairs as lists."""
    if isinstance(pairs, Shard):
        pairs = TokenPairs([(pairs.tokens, pairs.offsets)])
    found = pairs.pairs(range(len(pairs)))
    return [(source.tolist(), target.tolist()) for source, target in found]
