# Written from book/model/attention.md: edit the chapter instead.
"""Scaled dot-product attention and its masks (section 3.2.1)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.background.seq2seq import subsequent_mask as subsequent_mask


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Scaled dot-product attention, Eq. 1 of section 3.2.1, as it is printed.

    Args:
        query: Shape ``(..., n, d_k)``.
        key: Shape ``(..., m, d_k)``.
        value: Shape ``(..., m, d_v)``.
        mask: Broadcasts to ``(..., n, m)``; true (or nonzero) where a query may
            attend to a key. A query with nothing to attend to gets zeros.
        dropout: Applied to the weights, as later code does; the paper has none here.

    Returns:
        The weighted values ``(..., n, d_v)``, and the weights
        :math:`\mathrm{softmax}(QK^T/\sqrt{d_k})` of shape ``(..., n, m)``.
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -math.inf)
    weights = scores.softmax(dim=-1)
    if mask is not None:  # a row of minus infinities has no softmax
        weights = weights.masked_fill(mask == 0, 0.0)
    if dropout is not None:
        weights = dropout(weights)
    return weights @ value, weights


def padding_mask(tokens: Tensor, pad: int) -> Tensor:
    """Return the mask ``(batch, 1, length)`` of ``tokens (batch, length)``, true at real tokens."""
    return (tokens != pad).unsqueeze(-2)


SHORT = 128  # keys; up to here, plain products through oneDNN beat the fused kernel


def plain_is_faster(query: Tensor, key: Tensor) -> bool:
    """Whether ``attention`` beats the fused kernel for these shapes, on this processor.

    Under ``torch.set_float32_matmul_precision("medium")`` a CPU multiplies through oneDNN:
    fast for the few large products of ``attention``, slow to start for the many small ones
    inside the fused kernel. A single query, as in decoding, does not take that way.
    """
    if torch.compiler.is_compiling():  # it has a way of its own
        return False
    through_onednn = torch.get_float32_matmul_precision() != "highest"
    short = query.size(-2) > 1 and key.size(-2) <= SHORT
    return query.device.type == "cpu" and through_onednn and short


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Equal to ``attention(query, key, value, mask)[0]``, by the faster way at this size.

    Args:
        query: Shape ``(batch, heads, n, d_k)``.
        key: Shape ``(batch, heads, m, d_k)``.
        value: Shape ``(batch, heads, m, d_v)``.
        mask: Boolean, broadcasts to ``(batch, heads, n, m)``; true = may attend.

    Returns:
        The weighted values ``(batch, heads, n, d_v)``.
    """
    if plain_is_faster(query, key):
        return attention(query, key, value, mask)[0]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
