# Written from book/model/embeddings.md: edit the chapter instead.
"""Token embeddings and positional encodings (sections 3.4, 3.5)."""

import math

import torch
from torch import Tensor, nn

from annotated_transformer.model.layers import Dropout


class Embeddings(nn.Module):
    """Token embeddings multiplied by the square root of ``d_model``, section 3.4.

    Args:
        d_model: Width of an embedding.
        vocab: Number of tokens in the vocabulary.
    """

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.d_model = d_model

    def forward(self, x: Tensor) -> Tensor:
        """Look up token numbers ``x (...)``: ``(..., d_model)``."""
        y: Tensor = self.lut(x) * math.sqrt(self.d_model)
        return y


def sinusoid(length: int, d_model: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sinusoids of section 3.5, ``(length, d_model)``, computed in float64.

    Sines stand at even columns, cosines at odd ones; ``d_model`` may be odd.
    """
    positions = torch.arange(length, dtype=torch.float64).unsqueeze(1)
    even = torch.arange(0, d_model, 2, dtype=torch.float64)
    angles = positions / 10000 ** (even / d_model)  # (length, ceil(d_model / 2))
    table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    return table[:, :d_model].to(dtype)


class PositionalEncoding(nn.Module):
    """Add sinusoids to embeddings, then drop out, sections 3.5 and 5.4.

    Args:
        d_model: Width of an embedding.
        dropout: Probability of dropping an element of the sum.
        max_len: Number of positions in the table.
    """

    pe: Tensor

    def __init__(self, d_model: int, dropout: float, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.register_buffer("pe", sinusoid(max_len, d_model).unsqueeze(0), persistent=False)

    @property
    def max_len(self) -> int:
        """Number of positions that have an encoding."""
        return self.pe.size(1)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Add the encodings.

        Args:
            x: Embeddings ``(batch, length, d_model)``, or ``(rows, d_model)``.
            positions: Position of each row, broadcasting to ``x`` without its last axis;
                0 to length - 1 unless given.

        Returns:
            Shape of ``x``.

        Raises:
            IndexError: A sequence is longer than the table.
        """
        if positions is None:
            check_length(x.size(1), self.max_len)
            table = self.pe[:, : x.size(1)]
        else:
            table = self.pe[0, positions]
        y: Tensor = self.dropout(x + table.to(x.dtype))
        return y


def check_length(length: int, max_len: int) -> None:
    """Raise IndexError when a sequence of ``length`` needs more than ``max_len`` positions."""
    if length > max_len:
        raise IndexError(
            f"a sequence of {length} tokens is longer than the model's {max_len} positions"
        )


class LearnedPositions(PositionalEncoding):
    """Add learned vectors to embeddings: Table 3, row E.

    Arguments as for :class:`PositionalEncoding`; the table is a parameter that starts small.
    """

    def __init__(self, d_model: int, dropout: float, max_len: int = 5000) -> None:
        super().__init__(d_model, dropout, max_len=1)
        del self.pe
        self.pe = nn.Parameter(torch.randn(1, max_len, d_model) * d_model**-0.5)
