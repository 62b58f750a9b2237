"""Greedy decoding with caches (sections 3.1, 6.1).

Defined in the chapter *Decoding* (book/translation/decoding.md).
"""

# Written from book/translation/decoding.md: edit the chapter instead.

from __future__ import annotations

import torch
from torch import Tensor

from annotated_transformer.model.attention import padding_mask, subsequent_mask
from annotated_transformer.model.transformer import EncoderDecoder
from annotated_transformer.notation import BOS, EOS, PAD


@torch.no_grad()
def greedy_decode_uncached(
    model: EncoderDecoder, src: Tensor, src_mask: Tensor, max_len: int, start_symbol: int
) -> Tensor:
    """As ``greedy_decode``, computing every position again at every step.

    Defined in: book/translation/decoding.md
    """
    memory = model.encode(src, src_mask)
    ys = torch.full((src.size(0), 1), start_symbol, dtype=src.dtype, device=src.device)
    for _ in range(max_len - 1):
        out = model.decode(memory, src_mask, ys, subsequent_mask(ys.size(1), ys.device))
        ys = torch.cat([ys, model.generator(out[:, -1]).argmax(dim=-1, keepdim=True)], dim=1)
    return ys


@torch.no_grad()
def greedy_decode(
    model: EncoderDecoder,
    src: Tensor,
    src_mask: Tensor,
    max_len: int,
    start_symbol: int,
    *,
    end_symbol: int | None = None,
    pad: int = PAD,
) -> Tensor:
    """Decode by taking the most probable token at each step, with caches.

    Args:
        model: Call ``eval`` on it before, else dropout is at work.
        src: Source tokens ``(batch, m)``.
        src_mask: ``(batch, 1, m)``, true at real tokens.
        max_len: Most tokens of an output, the start symbol included.
        start_symbol: First token of every output.
        end_symbol: A sentence stops after this token; unless given, all run to ``max_len``.
        pad: Fills outputs that stopped before the longest one.

    Returns:
        Token numbers ``(batch, n)``, the start symbol first; ``n`` is ``max_len``, or less
        where all sentences stopped earlier.

    Defined in: book/translation/decoding.md
    """
    batch = src.size(0)
    ys = torch.full((batch, max_len), pad, dtype=torch.long, device=src.device)
    ys[:, 0] = start_symbol
    if not batch or max_len < 2:
        return ys
    memory, cache = model.encode(src, src_mask), model.cache(max_len)
    open_ = torch.arange(batch, device=src.device)  # sentences that have not stopped
    token = ys[:, :1]
    for step in range(1, max_len):
        out = model.decode(memory, src_mask, token, None, cache)
        token = model.generator.proj(out[:, -1]).argmax(dim=-1, keepdim=True)
        ys[open_, step] = token[:, 0]
        if end_symbol is None:
            continue
        going = (token[:, 0] != end_symbol).nonzero()[:, 0]
        if not len(going):
            return ys[:, : step + 1]
        if len(going) < len(open_):  # finished sentences leave the batch
            open_, token, memory, src_mask = (
                open_[going],
                token[going],
                memory[going],
                src_mask[going],
            )
            cache.select(going)
    return ys


def greedy_search(
    model: EncoderDecoder, sources: list[list[int]], max_len: int = 256, *, extra: int = 50
) -> list[list[int]]:
    """Translate sentences given as token numbers, batched, each up to its end symbol.

    Args:
        model: In evaluation mode.
        sources: Token numbers of each sentence, without special symbols; may be empty.
        max_len: Most tokens of an output.
        extra: An output has at most this many tokens more than the longest source (section 6.1).

    Returns:
        Token numbers of each output, without special symbols.

    Defined in: book/translation/decoding.md
    """
    device = model.generator.proj.weight.device
    width = max((len(s) for s in sources), default=0) + 1
    rows = [[*s, EOS, *[PAD] * (width - len(s) - 1)] for s in sources]
    src = torch.tensor(rows, dtype=torch.long, device=device).view(len(rows), width)
    limit = min(max_len, width - 1 + extra)
    out = greedy_decode(model, src, padding_mask(src, PAD), limit + 1, BOS, end_symbol=EOS)
    return [strip(row) for row in out[:, 1:].tolist()]


def strip(tokens: list[int]) -> list[int]:
    """Return the tokens before the end symbol, without padding.

    Defined in: book/translation/decoding.md
    """
    end = tokens.index(EOS) if EOS in tokens else len(tokens)
    return [t for t in tokens[:end] if t != PAD]
