# Written from book/model/multi_head.md: edit the chapter instead.
"""Multi-head attention and the masks of its three uses (§3.2.2, §3.2.3)."""

import torch
from torch import Tensor, nn

from annotated_transformer.model.attention import attention


def split_heads(x: Tensor, h: int) -> Tensor:
    """Cut ``x (batch, length, h * d)`` into ``(batch, h, length, d)``."""
    y: Tensor = x.unflatten(-1, (h, -1)).transpose(1, 2)
    return y


Width = int | None  # of a head; None: d_model / h


def head_widths(h: int, d_model: int, d_k: Width, d_v: Width) -> tuple[int, int]:
    """Return the width of a head's queries and keys, and that of its values.

    Raises:
        ValueError: ``h`` does not divide ``d_model``, and a width is missing.
    """
    if d_model % h and (d_k is None or d_v is None):
        raise ValueError(f"d_model={d_model} is not a multiple of h={h}: give d_k and d_v")
    return d_k or d_model // h, d_v or d_model // h


class MultiHeadedAttention(nn.Module):
    """Attention by ``h`` heads, each with projections (§3.2.2); dropout of weights (§6.3)."""

    def __init__(
        self, h: int, d_model: int, dropout: float = 0.1, *, d_k: Width = None, d_v: Width = None
    ) -> None:
        super().__init__()
        d_k, d_v = head_widths(h, d_model, d_k, d_v)
        self.h, self.d_k, self.d_v = h, d_k, d_v
        w_qkv = [nn.Linear(d_model, h * d) for d in (d_k, d_k, d_v)]
        self.linears = nn.ModuleList([*w_qkv, nn.Linear(h * d_v, d_model)])
        self.dropout = nn.Dropout(dropout)  # of the weights: in §6.3, not §5.4
        self.attn: Tensor | None = None  # weights of the latest call

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,  # (batch or 1, n or 1, m)
    ) -> Tensor:
        """Attend; inputs and result are ``(batch, length, d_model)``."""
        w_q, w_k, w_v, w_o = self.linears
        q, k, v = (split_heads(x, self.h) for x in (w_q(query), w_k(key), w_v(value)))
        if mask is not None:
            if mask.dim() != 3 or (mask.is_floating_point() and mask.min() < 0):  # additive
                raise ValueError("mask: give true or false, shaped (batch or 1, n or 1, m)")
            mask = mask.unsqueeze(1)  # the same for all heads
        x, weights = attention(q, k, v, mask, self.dropout)
        self.attn = weights.detach()
        y: Tensor = w_o(x.transpose(1, 2).flatten(2))  # heads side by side
        return y


def subsequent_mask(size: int, device: torch.device | None = None) -> Tensor:
    """Return the causal mask ``(1, size, size)``, true up to the diagonal."""
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


def padding_mask(tokens: Tensor, pad: int) -> Tensor:
    """Return the mask ``(batch, 1, length)``, true at real tokens."""
    return (tokens != pad).unsqueeze(-2)
