"""Multi-head attention and the masks of its three uses (§3.2.2, §3.2.3)."""

import torch
from torch import Tensor, nn

from annotated_transformer.model.attention import attention


class MultiHeadedAttention(nn.Module):
    """Attention by ``h`` heads, each with projections of its own (§3.2.2).

    Args:
        h: Number of heads.
        d_model: Width of inputs and output.
        dropout: Probability of dropping an attention weight; the paper has none here.
        d_k: Width of a head's queries and keys; ``d_model / h`` unless given.
        d_v: Width of a head's values; ``d_model / h`` unless given.

    Attributes:
        linears: The projections W^Q, W^K, W^V of all heads, and W^O.
        attn: The weights of the latest call ``(batch, h, n, m)``, without gradient.

    Raises:
        ValueError: ``d_model`` is not a multiple of ``h``, and a width is not given.
    """

    def __init__(
        self,
        h: int,
        d_model: int,
        dropout: float = 0.1,
        *,
        d_k: int | None = None,
        d_v: int | None = None,
    ) -> None:
        super().__init__()
        if d_model % h and (d_k is None or d_v is None):
            raise ValueError(f"d_model={d_model} is not a multiple of h={h}: give d_k and d_v")
        self.h = h
        self.d_k, self.d_v = d_k or d_model // h, d_v or d_model // h
        widths = (h * self.d_k, h * self.d_k, h * self.d_v)
        projections = [nn.Linear(d_model, width) for width in widths]  # W^Q, W^K, W^V
        self.linears = nn.ModuleList([*projections, nn.Linear(h * self.d_v, d_model)])  # W^O
        self.attn: Tensor | None = None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attend with every head, and mix what they found.

        Args:
            query: Shape ``(batch, n, d_model)``.
            key: Shape ``(batch, m, d_model)``.
            value: Shape ``(batch, m, d_model)``.
            mask: ``(batch or 1, n or 1, m)``, true = may attend; the same for all heads.

        Returns:
            Shape ``(batch, n, d_model)``.
        """
        if mask is not None:
            mask = mask.unsqueeze(1)  # (batch, 1, n, m): the same for all heads
        q, k, v = (  # (batch, length, h * d) -> (batch, h, length, d)
            linear(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value), strict=False)
        )
        x, weights = attention(q, k, v, mask, self.dropout)
        self.attn = weights.detach()
        y: Tensor = self.linears[-1](x.transpose(1, 2).flatten(2))  # concatenated heads
        return y


def subsequent_mask(size: int, device: torch.device | None = None) -> Tensor:
    """Return the causal mask of §3.2.3, ``(1, size, size)``, true up to the diagonal."""
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


def padding_mask(tokens: Tensor, pad: int) -> Tensor:
    """Return the mask ``(batch, 1, length)`` of ``tokens (batch, length)``, true at real tokens."""
    return (tokens != pad).unsqueeze(-2)
