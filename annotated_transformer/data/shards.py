"""Sentence pairs as token ids, in memory or in memory-mapped files larger than memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from annotated_transformer.data.files import CorpusError, not_read
from annotated_transformer.data.tensors import read_tensors, save_tensors
from annotated_transformer.training.batches import Batch, make_batch

PREPARE_AGAIN = "delete the folder and prepare the corpus again"

Array: TypeAlias = NDArray[Any]
Row: TypeAlias = Sequence[int] | Array  # the token ids of a sentence


def token_type(vocabulary: int) -> type[np.unsignedinteger[Any]]:
    """Return the dtype of token ids: 2 bytes up to a vocabulary of 65,536, else 4."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def _flatten(rows: Sequence[Row], dtype: type) -> tuple[Array, Array]:
    """Concatenate rows; also return the offset of each, and the end of the last."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    arrays: list[Array] = [np.asarray(row, dtype=dtype) for row in rows]
    return np.concatenate([np.zeros(0, dtype=dtype), *arrays]), offsets


def write_shard(
    path: str | Path, pairs: Sequence[tuple[Row, Row]], vocabulary: int, **header: Any
) -> None:
    """Write pairs of token ids to a file, atomically.

    Args:
        path: The file, in safetensors format.
        pairs: Source and target of each pair, without special symbols.
        vocabulary: Upper bound of the token ids, see :func:`token_type`.
        header: Further entries of the header, besides the number of pairs.

    Raises:
        OverflowError: A token id does not fit its dtype, or there are too many of them.
    """
    rows = [row for pair in pairs for row in pair]
    tokens, places = _flatten(rows, token_type(vocabulary))
    if places[-1] > np.iinfo(np.uint32).max:
        raise OverflowError(f"{path}: {places[-1]} tokens are too many for one shard")
    arrays = {"offsets": places.astype(np.uint32), "tokens": tokens}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    save_tensors(path, tensors, {**header, "pairs": len(pairs)})


def _damaged(path: str | Path, error: Exception) -> CorpusError:
    return CorpusError(f"{path}: damaged ({' '.join(str(error).split())}); {PREPARE_AGAIN}")


def _read(path: str | Path, *, verify: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        return read_tensors(path, verify=verify)
    except OSError as error:
        raise CorpusError(not_read(error, path, "prepare the corpus again")) from None
    except ValueError as error:
        raise _damaged(path, error) from None


@dataclass(frozen=True, eq=False)
class Shard:
    """A memory-mapped file of pairs, whose pages are read when they are used."""

    path: Path  #: The file.
    #: The header given to ``write_shard``, and the number of ``pairs``.
    header: dict[str, Any]
    tokens: Array  #: All token ids, alternating source and target.
    offsets: Array  #: Start of each sentence in ``tokens``, and the end, ``(2 * pairs + 1,)``.

    @classmethod
    def open(cls, path: str | Path) -> "Shard":
        """Map a file, without keeping it open.

        Raises:
            CorpusError: The file is missing, truncated, or not a shard.
        """
        tensors, header = _read(path, verify=False)
        try:
            tokens, offsets = (tensors[name].numpy() for name in ("tokens", "offsets"))
            kinds = str(offsets.dtype), offsets.ndim, tokens.dtype.kind, tokens.ndim
            rising = not offsets[0] and bool((offsets[1:] >= offsets[:-1]).all())
            if kinds != ("uint32", 1, "u", 1) or not rising:
                raise ValueError("it is not a shard")
            if len(offsets) != 2 * header["pairs"] + 1 or offsets[-1] != len(tokens):
                raise ValueError("its header does not match its arrays")
        except (ValueError, LookupError, TypeError) as error:
            raise _damaged(path, error) from None
        tokens.flags.writeable = offsets.flags.writeable = False
        return cls(Path(path), header, tokens, offsets)

    def verify(self) -> None:
        """Raise CorpusError if the contents do not match the checksum in the header."""
        _read(self.path, verify=True)


class TokenPairs:
    """Sentence pairs as token ids without special symbols, in memory or on disk.

    The tokens stay where they are. The lengths are held in memory, 8 bytes per pair, because
    batching needs all of them.

    Args:
        parts: Tokens and offsets of each part, as in :class:`Shard`.
        lines: The line number of each pair in its files, from 1, if known.
    """

    def __init__(self, parts: Sequence[tuple[Array, Array]], lines: Sequence[int] = ()) -> None:
        self.parts, self.lines = list(parts), lines
        self._starts = np.cumsum([0, *(len(offsets) // 2 for _, offsets in self.parts)])
        self._lengths = torch.empty((len(self), 2), dtype=torch.int32)
        for start, (_, offsets) in zip(self._starts[:-1], self.parts, strict=True):
            lengths = self._lengths.numpy()[start : start + len(offsets) // 2]
            lengths[:] = np.diff(offsets).reshape(-1, 2) + 1

    @classmethod
    def from_lists(
        cls, sources: Sequence[Row], targets: Sequence[Row], lines: Sequence[int] = ()
    ) -> "TokenPairs":
        """Hold pairs in memory, with 4 bytes per token."""
        rows = [row for pair in zip(sources, targets, strict=True) for row in pair]
        return cls([_flatten(rows, np.int32)], lines)

    @classmethod
    def from_shards(cls, shards: Sequence[Shard], *, verify: bool = False) -> "TokenPairs":
        """Read pairs from disk.

        Args:
            shards: The files, in order.
            verify: Verify all checksums, which reads every file once.

        Raises:
            CorpusError: A shard is damaged, or they contain no pairs.
        """
        for shard in shards if verify else ():
            shard.verify()
        found = cls([(shard.tokens, shard.offsets) for shard in shards])
        if not len(found):
            raise CorpusError(f"{shards[0].path.parent if shards else 'shards'}: no pairs found")
        return found

    def __len__(self) -> int:
        """Return the number of pairs."""
        return int(self._starts[-1])

    def lengths(self) -> Tensor:
        """Return source and target lengths, ``(pairs, 2)``, each with one special symbol."""
        return self._lengths

    def pairs(self, numbers: Tensor | Sequence[int]) -> Iterator[tuple[Array, Array]]:
        """Yield the source and target of the pairs with these indices."""
        index = np.asarray(numbers, dtype=np.int64)
        homes = np.searchsorted(self._starts, index, side="right") - 1
        inside = index - self._starts[homes]
        for home, i in zip(homes.tolist(), inside.tolist(), strict=True):
            tokens, offsets = self.parts[home]
            first, second, third = offsets[2 * i : 2 * i + 3].tolist()
            yield tokens[first:second], tokens[second:third]

    def batch(self, numbers: Tensor | Sequence[int]) -> Batch:
        """Make a batch of the pairs with these indices."""
        lists = ((source.tolist(), target.tolist()) for source, target in self.pairs(numbers))
        return make_batch(*zip(*lists, strict=True))
