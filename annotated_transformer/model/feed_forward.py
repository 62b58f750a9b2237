# Written from book/model/feed_forward.md: edit the chapter instead.
"""The position-wise feed-forward network (§3.3)."""

from torch import Tensor, nn


class PositionwiseFeedForward(nn.Module):
    """The network max(0, x W1 + b1) W2 + b2, applied to each position alone (§3.3).

    Args:
        d_model: Width of input and output.
        d_ff: Width of the hidden layer.
        dropout: Probability of dropping a hidden unit; the paper has none here.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x (..., d_model)`` to the same shape."""
        y: Tensor = self.w_2(self.dropout(self.w_1(x).relu()))
        return y
