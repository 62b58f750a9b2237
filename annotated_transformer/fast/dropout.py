"""Dropout with masks that are cheap to generate on a CPU."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEVELS = 2**16  # levels to which the dropout probability is rounded


def scale_of(p: float) -> float:
    """Return the factor for kept elements that preserves the expected value."""
    kept = 1 - round(p * LEVELS) / LEVELS
    return 1 / kept if kept else 0.0


def dropout_factors(x: Tensor, p: float) -> Tensor:
    """Return random factors shaped like ``x``: 0 with probability ``p``, else ``scale_of(p)``.

    Each takes 16 random bits of the global generator, so ``p`` is rounded to 1/65536.
    """
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
    bits = words.random_(-(2**63), None).view(torch.int16)[: x.numel()].view(x.shape)
    least = round(p * LEVELS) - LEVELS // 2
    if least > torch.iinfo(bits.dtype).max:  # all are dropped: 2^15 does not fit int16
        return torch.zeros_like(x)
    # Compare straight into floats: converting a boolean mask would double the cost.
    return torch.ge(bits, least, out=torch.empty_like(x)).mul_(scale_of(p))


def is_cheap(x: Tensor) -> bool:
    """Whether to generate the factors for ``x`` here rather than in PyTorch's dropout."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def is_active(module: nn.Module) -> bool:
    """Whether an ``nn.Dropout`` currently drops anything."""
    return module.training and cast(nn.Dropout, module).p > 0


def cheap_dropout(module: nn.Module, x: Tensor) -> Tensor:
    """Apply an ``nn.Dropout``, with the cheap mask on a CPU."""
    p = cast(nn.Dropout, module).p
    if not is_active(module):
        return x
    if not is_cheap(x):
        return F.dropout(x, p)
    return x * dropout_factors(x, p)


class _DroppedReLU(torch.autograd.Function):
    """In-place ReLU and dropout; the backward pass recovers the mask from the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.mark_dirty(x)
        x.relu_().mul_(dropout_factors(x, p))
        ctx.save_for_backward(x)
        ctx.scale = scale_of(p)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, y, 0).mul_(ctx.scale), None


def dropped_relu(module: nn.Module, x: Tensor) -> Tensor:
    """Apply ReLU in place, then an ``nn.Dropout``."""
    if is_active(module) and is_cheap(x):
        y: Tensor = _DroppedReLU.apply(x, cast(nn.Dropout, module).p)  # type: ignore[no-untyped-call]
        return y
    return cheap_dropout(module, F.relu_(x))
