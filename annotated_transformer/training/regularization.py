# Written from book/training/regularization.md: edit the chapter instead.
"""Dropout and label smoothing (section 5.4)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from annotated_transformer.notation import PAD

Variant = Literal["paper", "others", "article"]


def smoothed_target(
    target: Tensor,
    size: int,
    smoothing: float,
    *,
    variant: Variant = "paper",
    padding_idx: int = PAD,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the smoothed distributions ``(tokens, size)`` of ``target (tokens,)`` (section 5.4).

    Args:
        target: Token numbers.
        size: Size of the vocabulary.
        smoothing: Probability taken from the right token, ε.
        variant: Who gets it: ``"paper"`` all tokens, the right one and padding among them
            (as the work that the paper cites); ``"others"`` all but the right one;
            ``"article"`` all but the right one and padding.
        padding_idx: Number of the padding token; its rows are zero.
        dtype: Type of the result; PyTorch's default unless given.
    """
    share = {"paper": size, "others": size - 1, "article": size - 2}[variant]
    gold = 1 - smoothing + (smoothing / share if variant == "paper" else 0.0)
    dist = torch.full((target.size(0), size), smoothing / share, dtype=dtype, device=target.device)
    dist.scatter_(1, target.unsqueeze(1), gold)
    if variant == "article":
        dist[:, padding_idx] = 0.0
    dist[target == padding_idx] = 0.0
    return dist


FLOOR = -1e4  # stands for the logarithm of zero, so that the loss stays a finite number


class LabelSmoothing(nn.Module):
    """Kullback-Leibler divergence from the smoothed target, summed, without a dense target.

    Takes log-probabilities, and gives the article's values; training uses
    :func:`linear_cross_entropy`.

    Args:
        size: Size of the vocabulary.
        padding_idx: Number of the padding token; it counts for nothing.
        smoothing: Probability taken from the right token, ε.
        variant: As for :func:`smoothed_target`.
    """

    def __init__(
        self, size: int, padding_idx: int, smoothing: float = 0.0, *, variant: Variant = "article"
    ) -> None:
        super().__init__()
        self.size, self.padding_idx, self.smoothing = size, padding_idx, smoothing
        self.variant: Variant = variant

    @property
    def true_dist(self) -> Tensor:
        """The dense target of the latest call ``(tokens, size)``, for looking at."""
        return smoothed_target(
            self.target,
            self.size,
            self.smoothing,
            variant=self.variant,
            padding_idx=self.padding_idx,
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the summed divergence of ``x (tokens, size)`` from ``target (tokens,)``."""
        self.target = target
        keep = target != self.padding_idx
        x, target = x[keep].clamp(min=FLOOR), target[keep]
        gold = x.gather(1, target.unsqueeze(1)).sum()
        share = self.size - {"paper": 0, "others": 1, "article": 2}[self.variant]
        loss = -(1 - self.smoothing) * gold - len(target) * self._entropy(share)
        if not self.smoothing:
            return loss
        rest = x.sum() if self.variant != "article" else self._sum_without_padding(x)
        if self.variant != "paper":
            rest = rest - gold
        return loss - self.smoothing / share * rest

    def _sum_without_padding(self, x: Tensor) -> Tensor:
        """Sum ``x (tokens, size)`` but for the column of padding."""
        return x[:, : self.padding_idx].sum() + x[:, self.padding_idx + 1 :].sum()

    def _entropy(self, share: int) -> float:
        """Entropy of one smoothed target, in nats."""
        e, paper = self.smoothing, self.variant == "paper"
        gold = 1 - e + (e / share if paper else 0.0)
        rest = (share - 1 if paper else share, e / share)
        terms = [(1, gold), rest]
        return -sum(n * p * math.log(p) for n, p in terms if n and p > 0)
