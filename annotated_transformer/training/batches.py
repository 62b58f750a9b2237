# Written from book/training/batches.md: edit the chapter instead.
"""Batches, masks and token budgets (section 5.1)."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from annotated_transformer.model.multi_head import padding_mask, subsequent_mask
from annotated_transformer.notation import BOS, EOS, PAD


def pad_sequences(sequences: Sequence[Sequence[int]], pad: int = PAD) -> Tensor:
    """Return a block ``(batch, longest)`` of token numbers, padded at the right."""
    width = max((len(s) for s in sequences), default=0)
    return torch.tensor([[*s, *[pad] * (width - len(s))] for s in sequences], dtype=torch.long)


def make_batch(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Batch:
    """Make a batch: sources end with EOS, targets stand between BOS and EOS.

    Args:
        sources: Token numbers of each source sentence, without special symbols.
        targets: Likewise for the target.
    """
    src = pad_sequences([[*s, EOS] for s in sources])
    return Batch(src, pad_sequences([[BOS, *t, EOS] for t in targets]))


class Batch:
    """Sentence pairs with their masks, as the model takes them (§3.2.3, §5.1).

    Args:
        src: Source tokens ``(batch, m)``; their mask is ``src_mask (batch, 1, m)``.
        tgt: Target tokens ``(batch, n + 1)`` with begin and end symbols, or None.
        pad: The padding token.
    """

    tgt: Tensor  # (batch, n), what the decoder reads: the target without its last column
    tgt_y: Tensor  # (batch, n), what is to be predicted: the target without its first column
    tgt_mask: Tensor  # (batch, n, n), true at real tokens that are not in the future
    ntokens: int = 0  # target tokens to be predicted

    def __init__(self, src: Tensor, tgt: Tensor | None = None, pad: int = PAD) -> None:
        self.src, self.src_mask, self.pad = src, padding_mask(src, pad), pad
        if tgt is not None:
            self.target, self.tgt, self.tgt_y = tgt, tgt[:, :-1], tgt[:, 1:]
            self.tgt_mask = self.make_std_mask(self.tgt, pad)
            self.ntokens = int((self.tgt_y != pad).sum())

    @staticmethod
    def make_std_mask(tgt: Tensor, pad: int) -> Tensor:
        """Hide padding and the future: ``(batch, n)`` tokens give ``(batch, n, n)``."""
        return padding_mask(tgt, pad) & subsequent_mask(tgt.size(-1), tgt.device)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        """Return the batch on a device."""
        return _moved(self, device, non_blocking)


def _moved(batch: Batch, device: torch.device, non_blocking: bool) -> Batch:
    """Return a copy of a batch whose tensors are on a device; nothing is counted again."""
    moved = copy.copy(batch)
    for name, value in vars(batch).items():
        if isinstance(value, Tensor):
            setattr(moved, name, value.to(device, non_blocking=non_blocking))
    return moved


def _fill(
    order: Sequence[int], lengths: Sequence[tuple[int, int]], max_tokens: int
) -> Iterator[list[int]]:
    """Cut an order into batches, each as large as fits."""
    batch: list[int] = []
    width = 0  # longest sentence so far
    for i in order:
        width = max(width, *lengths[i])
        if batch and width * (len(batch) + 1) > max_tokens:
            yield batch
            batch, width = [], max(lengths[i])
        batch.append(i)
    if batch:
        yield batch


def token_batches(
    lengths: Sequence[tuple[int, int]],
    max_tokens: int,
    *,
    pool: int = 100,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
) -> list[list[int]]:
    """Group sentences of similar length into batches of at most ``max_tokens`` (section 5.1).

    Sentences are shuffled, cut into pools of about ``pool`` batches, sorted by length within
    a pool and cut into batches; then the batches are shuffled. A batch counts as its number
    of sentences times its longest one, padding included, on either side.

    Args:
        lengths: Source and target length of each sentence, special symbols included.
        max_tokens: Most source tokens, and most target tokens, of a batch.
        pool: Batches that a pool is good for.
        seed: Chooses the order, together with ``epoch``.
        epoch: Number of the pass over the data.
        shuffle: Keep one pool, and batches from short to long, when false.

    Returns:
        Sentence numbers, batch by batch; each sentence stands in exactly one.

    Raises:
        ValueError: A sentence alone is longer than ``max_tokens``.
    """

    def by_longer(i: int) -> tuple[int, tuple[int, int]]:
        return max(lengths[i]), lengths[i]  # the longer side is the one that a batch pays for

    longest = max(range(len(lengths)), key=lambda i: max(lengths[i]), default=None)
    if longest is not None and max(lengths[longest]) > max_tokens:
        raise ValueError(
            f"sentence {longest + 1} has {max(lengths[longest])} tokens, more than the "
            f"{max_tokens} of a batch: raise the number, or drop the sentence"
        )
    order = list(range(len(lengths)))
    if not shuffle:
        return list(_fill(sorted(order, key=by_longer), lengths, max_tokens))
    chance = random.Random(f"{seed} {epoch}")
    chance.shuffle(order)
    mean = sum(max(pair) for pair in lengths) / max(1, len(lengths))
    size = max(1, round(pool * max_tokens / max(1.0, mean)))  # sentences in a pool
    batches: list[list[int]] = []
    for start in range(0, len(order), size):
        in_order = sorted(order[start : start + size], key=by_longer)
        batches.extend(_fill(in_order, lengths, max_tokens))
    chance.shuffle(batches)
    return batches
