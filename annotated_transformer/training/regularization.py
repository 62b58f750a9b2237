# Written from book/training/regularization.md: edit the chapter instead.
"""Dropout and label smoothing (§5.4)."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from annotated_transformer.model.architecture import check_choice
from annotated_transformer.notation import PAD
from annotated_transformer.training.loop import check_smoothing

Variant = Literal["paper", "others", "article"]


def smoothed_target(
    target: Tensor, size: int, smoothing: float, *, variant: Variant = "paper",
    padding_idx: int = PAD, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return the smoothed distributions ``(tokens, size)`` of ``target (tokens,)`` (§5.4).

    Args:
        target: Token ids.
        size: Size of the vocabulary.
        smoothing: Probability taken from the right token, ε.
        variant: Which tokens share it: ``"paper"`` all, the right one and padding among them
            (as the work that the paper cites); ``"others"`` all but the right one;
            ``"article"`` all but the right one and padding.
        padding_idx: Id of the padding token; its rows are zero.
        dtype: Type of the result; PyTorch's default unless given.

    Raises:
        ValueError: ``smoothing`` is no probability, or there is no such variant.
    """
    check_smoothing(smoothing)
    check_choice("variant", variant, Variant)
    share = {"paper": size, "others": size - 1, "article": size - 2}[variant]
    gold = 1 - smoothing + (smoothing / share if variant == "paper" else 0.0)
    dist = torch.full((target.size(0), size), smoothing / share, dtype=dtype, device=target.device)
    dist.scatter_(1, target.unsqueeze(1), gold)
    if variant == "article":
        dist[:, padding_idx] = 0.0
    dist[target == padding_idx] = 0.0
    return dist


class LabelSmoothing(nn.Module):
    """Kullback-Leibler divergence from the smoothed target, summed over tokens (§5.4).

    Args:
        size: Size of the vocabulary.
        padding_idx: Id of the padding token; it counts for nothing.
        smoothing: Probability taken from the right token, ε.
        variant: As for ``smoothed_target``.
    """

    def __init__(
        self, size: int, padding_idx: int, smoothing: float = 0.0, *, variant: Variant = "article"
    ) -> None:
        super().__init__()
        check_smoothing(smoothing)
        check_choice("variant", variant, Variant)
        self.criterion = nn.KLDivLoss(reduction="sum")
        self.size, self.padding_idx, self.smoothing = size, padding_idx, smoothing
        self.confidence = 1.0 - smoothing
        self.variant: Variant = variant
        self.true_dist: Tensor | None = None  # target of the latest call (tokens, size)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the divergence of log-probabilities ``x (tokens, size)`` from ``target``."""
        how: dict[str, Any] = {"variant": self.variant, "padding_idx": self.padding_idx}
        self.true_dist = smoothed_target(target, self.size, self.smoothing, dtype=x.dtype, **how)
        x = x.clamp(min=-1e4)  # the logarithm of zero would make the loss infinite, or NaN
        loss: Tensor = self.criterion(x, self.true_dist)
        return loss
