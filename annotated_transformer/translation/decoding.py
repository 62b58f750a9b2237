# Written from book/translation/decoding.md: edit the chapter instead.
"""Greedy decoding with caches (sections 3.1, 6.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from annotated_transformer.background.seq2seq import Translator
from annotated_transformer.model.attention import padding_mask, subsequent_mask
from annotated_transformer.model.embeddings import check_length
from annotated_transformer.model.transformer import EncoderDecoder
from annotated_transformer.notation import BOS, EOS, PAD
from annotated_transformer.translation.steps import most_probable_next, start_steps


@torch.no_grad()
def greedy_decode_uncached(
    model: EncoderDecoder, src: Tensor, src_mask: Tensor, max_len: int, start_symbol: int
) -> Tensor:
    """As ``greedy_decode``, computing every position again at every step."""
    memory = model.encode(src, src_mask)
    ys = torch.full((src.size(0), 1), start_symbol, dtype=src.dtype, device=src.device)
    for _ in range(max_len - 1):
        out = model.decode(memory, src_mask, ys, subsequent_mask(ys.size(1), ys.device))
        ys = torch.cat([ys, model.generator(out[:, -1]).argmax(dim=-1, keepdim=True)], dim=1)
    return ys


@torch.no_grad()
def greedy_decode(
    model: Translator,
    src: Tensor,
    src_mask: Tensor,
    max_len: int,
    start_symbol: int,
    *,
    end_symbol: int | None = None,
    pad: int = PAD,
    limits: Tensor | None = None,
) -> Tensor:
    """Decode by taking the most probable token at each step, with caches.

    Args:
        model: Call ``eval`` on it before, else dropout is at work.
        src: Source tokens ``(batch, m)``.
        src_mask: ``(batch, 1, m)``, true at real tokens.
        max_len: Most tokens of an output, the start symbol included.
        start_symbol: First token of every output.
        end_symbol: A sentence stops after this token; unless given, all run to their limits.
        pad: Fills outputs that stopped before the longest one.
        limits: Most tokens of each output ``(batch,)``, where they differ.

    Returns:
        Token numbers ``(batch, n)``, the start symbol first; ``n`` is ``max_len``, or less
        where all sentences stopped earlier.

    Raises:
        IndexError: The source, or an output of ``max_len``, is longer than the model's positions.
        ValueError: ``max_len`` leaves no room for the start symbol.
    """
    batch = src.size(0)
    if max_len < 1:
        raise ValueError(f"an output has at least the start symbol: max_len={max_len} is too small")
    check_length(max_len - 1, model.max_len)  # the last token is never an input
    ys = torch.full((batch, max_len), pad, dtype=torch.long, device=src.device)
    ys[:, 0] = start_symbol
    if not batch or max_len == 1:
        return ys[:, :1]
    steps = start_steps(model, src, src_mask, max_len - 1)
    limits = torch.full_like(ys[:, 0], max_len) if limits is None else limits
    rows = torch.arange(batch, device=src.device)  # sentences that are not finished
    token, going = ys[:, 0], limits > 1
    for step in range(1, max_len):
        left = going.nonzero()[:, 0]
        if not len(left):
            return ys[:, :step]
        if (size := round_up(len(left))) < len(rows):  # finished sentences leave the batch
            left = torch.cat([left, (~going).nonzero()[: size - len(left), 0]])
            rows, token, going = rows[left], token[left], going[left]
            steps.select(left)
        token = most_probable_next(steps, token)
        ys[rows, step] = token.where(going, pad)
        going &= limits[rows] > step + 1
        if end_symbol is not None:
            going &= token != end_symbol
    return ys


def round_up(count: int) -> int:
    """Return the next number of the form 2^k or 3 * 2^k, at least ``count``."""
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def greedy_search(
    model: Translator, sources: list[list[int]], max_len: int | None = None, *, extra: int = 50
) -> list[list[int]]:
    """Translate sentences given as token numbers, batched, each up to its end symbol.

    Args:
        model: In evaluation mode.
        sources: Token numbers of each sentence, without special symbols; may be empty.
        max_len: Most tokens of an output, where it shall be fewer than ``extra`` allows.
        extra: An output has at most this many tokens more than its source (section 6.1), and
            never more than the model has positions.

    Returns:
        Token numbers of each output, without special symbols; the same whether sentences
        come together or alone.

    Raises:
        IndexError: A source, with its end symbol, is longer than the model's positions.
    """
    if not sources:
        return []
    src, mask = source_block(sources, model.projection.weight.device)
    limits = torch.tensor(output_limits(model, sources, max_len, extra), device=src.device) + 1
    longest = int(limits.max())
    out = greedy_decode(model, src, mask, longest, BOS, end_symbol=EOS, limits=limits)
    return [strip(row) for row in out[:, 1:].tolist()]


def source_block(sources: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Give sentences their end symbol and pad them; return tokens and mask ``(batch, 1, m)``."""
    width = max(len(s) for s in sources) + 1
    src = torch.tensor([[*s, EOS, *[PAD] * (width - len(s) - 1)] for s in sources], device=device)
    return src, padding_mask(src, PAD)


def output_limits(
    model: Translator, sources: list[list[int]], max_len: int | None, extra: int
) -> list[int]:
    """Return how many tokens the output of each source may have.

    Args:
        model: Its positions are a limit for all outputs.
        sources: Token numbers of each sentence, without special symbols.
        max_len: Another limit for all outputs; None if there is none.
        extra: How many tokens an output may have more than its source.
    """
    most = model.max_len if max_len is None else min(max_len, model.max_len)
    return [max(0, min(most, len(s) + extra)) for s in sources]


def strip(tokens: list[int]) -> list[int]:
    """Return the tokens before the end symbol, without padding."""
    end = tokens.index(EOS) if EOS in tokens else len(tokens)
    return [t for t in tokens[:end] if t != PAD]
