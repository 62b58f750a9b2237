# Written from book/model/layers.md: edit the chapter instead.
"""Feed-forward network, dropout, residual, layer normalisation (sections 3.1, 3.3, 5.4)."""

import copy
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.model.multi_head import Linear

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Norm = Literal["post", "pre"]

LEVELS = 2**16  # steps of the dropping probability


def keep_mask(x: Tensor, p: float) -> Tensor:
    """Return a random boolean mask of the shape of ``x``, false with probability ``p``.

    The probability is rounded to 1/65536. Uses the global random generator.
    """
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
    bits = words.random_(-(2**63), None).view(torch.int16)[: x.numel()].view(x.shape)
    keep: Tensor = bits >= round(p * LEVELS) - LEVELS // 2
    return keep


class Dropout(nn.Module):
    """Dropout as in section 5.4, with a cheap mask on a CPU.

    Args:
        p: Probability of dropping an element in training, at least 0 and below 1.

    Raises:
        ValueError: ``p`` is out of range.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"a dropout probability is at least 0 and below 1, not {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of ``x`` and scale the others up, in training; same shape."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.p)
        kept = 1 - round(self.p * LEVELS) / LEVELS
        return x * keep_mask(x, self.p).to(x.dtype).mul_(1 / kept)

    def extra_repr(self) -> str:
        """Show the probability."""
        return f"p={self.p}"


class PositionwiseFeedForward(nn.Module):
    """The feed-forward network of section 3.3: ``max(0, x W1 + b1) W2 + b2``.

    Args:
        d_model: Width of input and output.
        d_ff: Width of the hidden layer.
        dropout: Probability of dropping a hidden unit in training; the paper has none here.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.w_1 = Linear(d_model, d_ff)
        self.w_2 = Linear(d_ff, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to each position of ``x (..., d_model)`` on its own; same shape."""
        y: Tensor = self.w_2(self.dropout(F.relu_(self.w_1(x))))  # in place: one block less
        return y


def clones(module: ModuleT, n: int) -> nn.ModuleList:
    """Return ``n`` deep copies of a module."""
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


class SublayerConnection(nn.Module):
    """Residual connection, dropout and layer normalisation around a sub-layer, section 3.1.

    Args:
        size: Width ``d_model``.
        dropout: Probability of dropping an element of the sub-layer's output.
        norm: ``"post"``: ``LayerNorm(x + Dropout(Sublayer(x)))``, as printed;
            ``"pre"``: ``x + Dropout(Sublayer(LayerNorm(x)))``, as in later official code.
    """

    def __init__(self, size: int, dropout: float, *, norm: Norm = "post") -> None:
        super().__init__()
        self.order: Norm = norm
        self.norm = nn.LayerNorm(size)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``sublayer`` to ``x (..., size)`` in the residual connection; same shape."""
        if self.order == "pre":
            x = x + self.dropout(sublayer(self.norm(x)))
            return x
        y: Tensor = self.norm(x + self.dropout(sublayer(x)))
        return y
