"""Scaled dot-product attention and its masks (section 3.2.1).

Defined in the chapter *Attention* (book/model/attention.md).
"""

# Written from book/model/attention.md: edit the chapter instead.

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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

    Defined in: book/model/attention.md
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


def subsequent_mask(size: int, device: torch.device | None = None) -> Tensor:
    """Return the causal mask of section 3.2.3, ``(1, size, size)``, true up to the diagonal.

    Defined in: book/model/attention.md
    """
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


def padding_mask(tokens: Tensor, pad: int) -> Tensor:
    """Return the mask ``(batch, 1, length)`` of ``tokens (batch, length)``: true where not ``pad``.

    Defined in: book/model/attention.md
    """
    return (tokens != pad).unsqueeze(-2)


SHORT = 64  # keys; below, three plain operations beat the fused kernel's backward pass


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Equal to ``attention(query, key, value, mask)[0]``, by the faster way at this size.

    Long sequences go through PyTorch's fused kernel, which never holds the ``n × m``
    weights. On a CPU, short ones train faster through plain products.

    Args:
        query: Shape ``(batch, heads, n, d_k)``.
        key: Shape ``(batch, heads, m, d_k)``.
        value: Shape ``(batch, heads, m, d_v)``.
        mask: Boolean, broadcasts to ``(batch, heads, n, m)``; true = may attend.

    Returns:
        The weighted values ``(batch, heads, n, d_v)``.

    Defined in: book/model/attention.md
    """
    if query.device.type == "cpu" and query.requires_grad and key.size(-2) <= SHORT:
        return attention(query, key, value, mask)[0]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
