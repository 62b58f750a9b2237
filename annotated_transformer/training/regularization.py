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


ROWS = 512  # rows of logits that are held at a time


def product_type(x: Tensor) -> torch.dtype:
    """Return the type in which products with ``x`` are computed: autocast may lower it."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype == torch.float32:
        return torch.get_autocast_dtype(kind)
    return x.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass: logits of a chunk live only until the next one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        target: Tensor,
        smoothing: float,
        scale: float,
        learn: bool,
        low: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        size = weight.size(0)
        plain = low == x.dtype
        inner = scale if plain else 1.0  # small numbers would vanish in float16
        matrix = weight.to(low)
        grad_x, grad_w = torch.empty_like(x), torch.zeros_like(weight)
        grad_b = torch.zeros_like(bias)
        loss = x.new_zeros((), dtype=torch.float64)
        nll = x.new_zeros((), dtype=torch.float64)
        for start in range(0, x.size(0), ROWS):
            gold = target[start : start + ROWS].unsqueeze(1)
            rows = x[start : start + ROWS].to(low)
            z = torch.addmm(bias, rows, matrix.t()) if plain else (rows @ matrix.t()) + bias
            z -= z.amax(dim=1, keepdim=True)
            right, total = z.gather(1, gold).double().sum(), z.sum(dim=1).double().sum()
            z.exp_()
            norm = z.sum(dim=1, keepdim=True)
            log_norm = norm.double().log().sum()
            nll += log_norm - right
            loss += log_norm - (1 - smoothing) * right - smoothing / size * total
            if not learn:
                continue
            # gradient of the logits: (softmax - smoothed target) * inner
            z.mul_(inner / norm)
            if smoothing:
                z.sub_(inner * smoothing / size)
            z.scatter_add_(1, gold, z.new_full(gold.shape, inner * (smoothing - 1)))
            grad_b += z.sum(dim=0)
            if plain:
                torch.mm(z, weight, out=grad_x[start : start + ROWS])
                grad_w.addmm_(z.t(), rows)
            else:
                z = z.to(low)
                grad_x[start : start + ROWS] = z @ matrix
                grad_w += z.t() @ rows  # added up in full precision
        ctx.save_for_backward(grad_x, grad_w, grad_b)
        ctx.outer = scale / inner
        return (loss * scale).to(x.dtype), nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads, factor = ctx.saved_tensors, grad * ctx.outer
        if factor != 1:
            grads = tuple(g * factor for g in grads)
        return (*grads, None, None, None, None, None)


def linear_cross_entropy(
    x: Tensor, projection: nn.Linear, target: Tensor, smoothing: float = 0.0, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Project to the vocabulary and return the smoothed cross-entropy, summed and scaled.

    Equal to ``scale * F.cross_entropy(projection(x), target, label_smoothing=smoothing,
    reduction="sum")``; no more than ``ROWS`` rows of logits exist at a time, and the
    gradient is computed on the way.

    Args:
        x: Decoder output ``(rows, d_model)``, without padding.
        projection: From ``d_model`` to the vocabulary.
        target: Token numbers ``(rows,)``.
        smoothing: ε of label smoothing, spread over the whole vocabulary.
        scale: Multiplies the loss, e.g. one over the tokens of the update.

    Returns:
        The loss, a scalar to call ``backward`` on; and the summed negative log-likelihood
        in nats, float64, without smoothing or scale and without gradient.
    """
    low, learn = product_type(x), torch.is_grad_enabled()
    with torch.autocast(x.device.type, enabled=False):  # it chooses its types itself
        loss, nll = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            x, projection.weight, projection.bias, target, smoothing, scale, learn, low
        )
    return loss, nll.detach()
