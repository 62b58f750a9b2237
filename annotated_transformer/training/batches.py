# Written from book/training/batches.md: edit the chapter instead.
"""Batches, masks and token budgets (Section 5.1)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from annotated_transformer.model.multi_head import padding_mask, subsequent_mask
from annotated_transformer.notation import PAD, SPECIAL_IDS, SpecialIds


def pad_sequences(sequences: Sequence[Sequence[int]], pad: int = PAD) -> Tensor:
    """Return a block ``(batch, longest)`` of token ids, padded at the right."""
    lengths = torch.tensor([len(s) for s in sequences], dtype=torch.long)
    tokens = torch.tensor([token for s in sequences for token in s], dtype=torch.long)
    width = int(lengths.max()) if len(lengths) else 0
    block = torch.full((len(lengths), width), pad)
    return block.masked_scatter_(torch.arange(width) < lengths.unsqueeze(1), tokens)


def make_batch(
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    special: SpecialIds = SPECIAL_IDS,
) -> Batch:
    """Make a batch: sources end with EOS, targets stand between BOS and EOS.

    Args:
        sources: Token ids of each source sentence, without special symbols.
        targets: The same for each target sentence.
        special: Ids of the special symbols.

    Raises:
        ValueError: There are not as many sources as targets.
    """
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources and {len(targets)} targets: they go in pairs")
    pad, bos, eos = special
    src = pad_sequences([[*s, eos] for s in sources], pad)
    batch = Batch(src, pad_sequences([[bos, *t, eos] for t in targets], pad), pad)
    if bos == pad:  # as in Marian's models: this one is no padding
        batch.tgt_mask[..., 0] = True
    return batch


class Batch:
    """Sentence pairs with their masks, as the model takes them (§3.2.3, §5.1).

    Args:
        src: Source tokens ``(batch, m)``; their mask is ``src_mask (batch, 1, m)``.
        tgt: Target tokens ``(batch, n + 1)`` with begin and end symbols, or None.
        pad: The padding token.
    """

    tgt: Tensor  #: The decoder's input (batch, n), the target without its last column.
    tgt_y: Tensor  #: What to predict (batch, n), the target without its first column.
    tgt_mask: Tensor  #: True at real tokens that are not in the future, (batch, n, n).
    ntokens: int = 0  #: Target tokens to be predicted, counted once; adapt it to your own tgt_y.

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

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on a device."""
        return _moved(self, device, non_blocking)


def _moved(batch: Batch, device: torch.device | str, non_blocking: bool) -> Batch:
    """Return a copy of a batch whose tensors are on a device; nothing is counted again."""
    moved = copy.copy(batch)
    for name, value in vars(batch).items():
        if isinstance(value, Tensor):
            if non_blocking and torch.device(device).type == "cuda" and value.device.type == "cpu":
                value = value.pin_memory()
            setattr(moved, name, value.to(device, non_blocking=non_blocking))
    return moved


def _fill(widths: Tensor, max_tokens: int) -> list[int]:
    """Cut sentences into batches, in their order, each batch as large as fits.

    Args:
        widths: Tokens of the longer side of each sentence, at most ``max_tokens``.
        max_tokens: Most tokens of a batch, padding included.

    Returns:
        The number of sentences of each batch.
    """
    sizes: list[int] = []
    start = 0
    while start < len(widths):
        candidates = widths[start : start + max_tokens // int(widths[start])]  # no more can fit
        longest = candidates.cummax(dim=0).values
        cost = longest * torch.arange(1, len(candidates) + 1)  # of the first 1, 2, ... of them
        sizes.append(int((cost <= max_tokens).sum()))
        start += sizes[-1]
    return sizes


def token_batches(
    lengths: Tensor | Sequence[Sequence[int]],
    max_tokens: int,
    *,
    pool: int = 100,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
) -> list[Tensor]:
    """Group sentences of similar length into batches of at most ``max_tokens`` (§5.1).

    ``lengths (sentences, 2)`` are those of source and target, special symbols included; a batch
    costs its longest sentence times their number. Sentences are sorted within pools of ``pool``
    batches, in an order of ``seed`` and ``epoch``; without ``shuffle`` all are one pool, from
    short to long. Returns the indices of the sentences in each batch; all occur once.
    """
    lengths = torch.as_tensor(lengths)
    if not len(lengths):
        return []
    most = check_longest(longer := lengths.amax(dim=1), max_tokens)  # the side that is paid for
    rng = torch.Generator().manual_seed((1_000_003 * seed + epoch) % 2**63)
    order, size = torch.arange(len(lengths), dtype=torch.int32), len(lengths)
    if shuffle:
        order = torch.randperm(len(lengths), generator=rng, dtype=torch.int32)
        size = max(1, round(pool * max_tokens * len(lengths) / int(longer.sum())))
    batches: list[Tensor] = []
    for part in order.split(size):
        source, target = lengths[part].long().unbind(dim=1)
        width = source.maximum(target)
        by = (width * (2 * most) + source - target).argsort(stable=True)  # then source minus target
        batches += part[by].split(_fill(width[by], max_tokens))
    if shuffle:
        return [batches[i] for i in torch.randperm(len(batches), generator=rng).tolist()]
    return batches


def check_longest(longer: Tensor, max_tokens: int) -> int:
    """Return the longest sentence; raise ValueError if it is longer than a batch may be."""
    if (most := int(longer.max())) > max_tokens:
        raise ValueError(
            f"sentence {int(longer.argmax()) + 1} has {most} tokens, more than the {max_tokens} "
            "of a batch: raise the number, or drop the sentence"
        )
    return most
