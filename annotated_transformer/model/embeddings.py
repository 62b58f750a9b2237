# Written from book/model/embeddings.md: edit the chapter instead.
"""Token embeddings and positional encodings (§3.4, §3.5)."""

import math

import torch
from torch import Tensor, nn


class Embeddings(nn.Module):
    """Token embeddings, multiplied by the square root of ``d_model`` (§3.4)."""

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.d_model = d_model

    def forward(self, x: Tensor) -> Tensor:
        """Look up tokens ``x (batch, length)``: ``(batch, length, d_model)``."""
        y: Tensor = self.lut(x) * math.sqrt(self.d_model)
        return y


def sinusoid(length: int, d_model: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sinusoids of §3.5, ``(length, d_model)``: sines at even columns, else cosines."""
    position = torch.arange(length, dtype=torch.float64).unsqueeze(1)  # (length, 1)
    even = torch.arange(0, d_model, 2, dtype=torch.float64)  # 2i
    angle = position / 10000 ** (even / d_model)  # (length, ceil(d_model / 2))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d_model].to(dtype)


class PositionalEncoding(nn.Module):
    """Add the sinusoids of §3.5 to embeddings of width ``d_model``, then apply dropout (§5.4).

    Args:
        dropout: Probability of dropping an element of the sum.
        max_len: Number of positions in the table.
    """

    pe: Tensor  #: (1, max_len, d_model).

    def __init__(self, d_model: int, dropout: float, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pe", sinusoid(max_len, d_model).unsqueeze(0), persistent=False)

    @property
    def max_len(self) -> int:
        """Number of positions."""
        return self.pe.size(1)

    def forward(self, x: Tensor) -> Tensor:
        """Add positions to ``x (batch, length, d_model)``; same shape.

        Raises:
            IndexError: The sequences are longer than the table.
        """
        if (length := x.size(1)) > self.max_len:
            raise IndexError(f"a sequence of {length} tokens, and only {self.max_len} positions")
        y: Tensor = self.dropout(x + self.pe[:, :length].to(x.dtype))
        return y


class LearnedPositions(PositionalEncoding):
    """Positions as parameters in place of sinusoids: Table 3, row (E). Same arguments."""

    def __init__(self, d_model: int, dropout: float, max_len: int = 5000) -> None:
        super().__init__(d_model, dropout, max_len=1)
        del self.pe
        self.pe = nn.Parameter(torch.randn(1, max_len, d_model) * 0.5**0.5)
