# Written from book/model/attention.md: edit the chapter instead.
"""Scaled dot-product attention, Equation 1 (§3.2.1)."""

import math

from torch import Tensor, nn


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Scaled dot-product attention, Equation 1 of §3.2.1.

    Args:
        query: Shape ``(..., n, d_k)``.
        key: Shape ``(..., m, d_k)``.
        value: Shape ``(..., m, d_v)``.
        mask: Broadcasts to ``(..., n, m)``; true (or nonzero) where a query may attend.
            A query that may attend to nothing gets zeros.
        dropout: Applied to the weights. The paper mentions it once, for parsing (§6.3).

    Returns:
        The outputs ``(..., n, d_v)`` and the weights ``(..., n, m)``.
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
