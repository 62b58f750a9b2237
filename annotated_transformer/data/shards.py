"""Sentence pairs as token numbers, in memory or in memory-mapped files larger than it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from annotated_transformer.data.files import CorpusError, parse_json, write_atomically
from annotated_transformer.notation import BOS, EOS
from annotated_transformer.training.batches import Batch, pad_flat

PREPARE_AGAIN = "delete the folder and prepare the corpus again"

Array: TypeAlias = NDArray[Any]
Row: TypeAlias = Sequence[int] | Array  # the token numbers of a sentence


def token_type(vocabulary: int) -> type[np.unsignedinteger[Any]]:
    """Return the type of token numbers: 2 bytes up to a vocabulary of 65,536, else 4."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def _flatten(rows: Sequence[Row], dtype: type) -> tuple[Array, Array]:
    """Join rows into one array; the second one says where each begins, and the last one ends."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    arrays: list[Array] = [np.asarray(row, dtype=dtype) for row in rows]
    return np.concatenate([np.zeros(0, dtype=dtype), *arrays]), offsets


def _digest(offsets: Array, tokens: Array) -> str:
    found = hashlib.sha256(offsets.tobytes())
    found.update(tokens.tobytes())
    return found.hexdigest()


def write_shard(
    path: str | Path, pairs: Sequence[tuple[Row, Row]], vocabulary: int, **header: Any
) -> None:
    """Write pairs of token numbers into a file, atomically.

    Args:
        path: The file, in the format of safetensors.
        pairs: Source and target of each pair, without special symbols.
        vocabulary: Token numbers are below it, see :func:`token_type`.
        header: What else its header holds, beside the number of pairs and a checksum.

    Raises:
        OverflowError: A token number does not fit its type, or there are too many of them.
    """
    rows = [row for pair in pairs for row in pair]
    tokens, places = _flatten(rows, token_type(vocabulary))
    if places[-1] > np.iinfo(np.uint32).max:
        raise OverflowError(f"{path}: {places[-1]} tokens are too many for one shard")
    arrays: dict[str, Array] = {"offsets": places.astype(np.uint32), "tokens": tokens}
    data = {**header, "pairs": len(pairs), "sha256": _digest(**arrays)}
    write_atomically(path, safetensors.numpy.save(arrays, {"data": json.dumps(data)}))


@dataclass(frozen=True, eq=False)
class Shard:
    """A file of pairs, mapped into memory: the system reads a page of it when it is used.

    Attributes:
        path: The file.
        header: What ``write_shard`` was given, the number of ``pairs``, and a checksum.
        tokens: All token numbers, source and target in turn.
        offsets: Where in ``tokens`` each sentence begins, and the last ends, ``(2 * pairs + 1,)``.
    """

    path: Path
    header: dict[str, Any]
    tokens: Array
    offsets: Array

    @classmethod
    def open(cls, path: str | Path) -> Shard:
        """Map a file, without keeping it open.

        Raises:
            CorpusError: The file is missing, cut off, or not a shard.
        """
        try:
            # As tensors, for these are mapped; safetensors.numpy would read the whole file.
            with safe_open(path, framework="pt") as file:
                header: dict[str, Any] = parse_json(file.metadata()["data"])
                tokens, offsets = (file.get_tensor(name).numpy() for name in ("tokens", "offsets"))
            kinds = offsets.dtype, offsets.ndim, tokens.dtype.kind, tokens.ndim
            rising = not offsets[0] and bool((offsets[1:] >= offsets[:-1]).all())
            if kinds != (np.uint32, 1, "u", 1) or not rising or "sha256" not in header:
                raise ValueError("it is no shard")
            if len(offsets) != 2 * header["pairs"] + 1 or offsets[-1] != len(tokens):
                raise ValueError("its header does not fit its arrays")
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}; prepare the corpus again"
            raise CorpusError(f"{path}: {reason}") from None
        except (SafetensorError, ValueError, LookupError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise CorpusError(f"{path}: damaged ({reason}); {PREPARE_AGAIN}") from None
        tokens.flags.writeable = offsets.flags.writeable = False
        return cls(Path(path), header, tokens, offsets)

    def verify(self) -> None:
        """Raise CorpusError if the contents do not have the checksum in the header."""
        if _digest(self.offsets, self.tokens) != self.header["sha256"]:
            raise CorpusError(
                f"{self.path}: damaged (its contents do not have the checksum in its header); "
                f"{PREPARE_AGAIN}"
            )


class TokenPairs:
    """Sentence pairs as token numbers, without special symbols: from memory or from the disk.

    The tokens stay where they are. Lengths are kept in memory, 8 bytes a pair, because making
    batches needs them all.

    Args:
        parts: Tokens and offsets, as a :class:`Shard` has them; one part after the other.
        lines: The line of each pair in its files, from 1, where that is known.
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
    ) -> TokenPairs:
        """Keep pairs in memory, 4 bytes a token."""
        rows = [row for pair in zip(sources, targets, strict=True) for row in pair]
        return cls([_flatten(rows, np.int32)], lines)

    @classmethod
    def from_shards(cls, shards: Sequence[Shard], *, verify: bool = False) -> TokenPairs:
        """Read pairs from the disk.

        Args:
            shards: The files, in order.
            verify: Compare all checksums; this reads every file once.

        Raises:
            CorpusError: A shard is damaged, or there is no pair in them.
        """
        for shard in shards if verify else ():
            shard.verify()
        found = cls([(shard.tokens, shard.offsets) for shard in shards])
        if not len(found):
            raise CorpusError(f"{shards[0].path.parent if shards else 'shards'}: no pair in them")
        return found

    def __len__(self) -> int:
        """Return the number of pairs."""
        return int(self._starts[-1])

    def lengths(self) -> Tensor:
        """Return source and target length of each pair, ``(pairs, 2)``, a special symbol each."""
        return self._lengths

    def pairs(self, numbers: Tensor | Sequence[int]) -> Iterator[tuple[Array, Array]]:
        """Go through the pairs with these numbers, source and target."""
        index = np.asarray(numbers, dtype=np.int64)
        homes = np.searchsorted(self._starts, index, side="right") - 1
        inside = index - self._starts[homes]
        for home, i in zip(homes.tolist(), inside.tolist(), strict=True):
            tokens, offsets = self.parts[home]
            first, second, third = offsets[2 * i : 2 * i + 3].tolist()
            yield tokens[first:second], tokens[second:third]

    def batch(self, numbers: Tensor | Sequence[int]) -> Batch:
        """Make a batch of the pairs with these numbers: the one of ``make_batch``, from arrays."""
        sources, targets = zip(*self.pairs(numbers), strict=True)
        return Batch(_block(sources), _block(targets, np.array([BOS], dtype=np.uint16)))


def _block(rows: Sequence[Array], *begin: Array) -> Tensor:
    """Lay rows into a padded block, each between ``begin`` and the symbol of the end."""
    end = np.array([EOS], dtype=np.uint16)
    tokens = np.concatenate([part for row in rows for part in (*begin, row, end)], dtype=np.int64)
    lengths = torch.tensor([len(begin) + len(row) + 1 for row in rows])
    return pad_flat(torch.from_numpy(tokens), lengths)
