# Written from book/training/optimizer.md: edit the chapter instead.
"""Adam and the learning rate (§5.3)."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def rate(step: int, model_size: int, factor: float, warmup: int) -> float:
    """Return the learning rate of an update (§5.3).

    It grows linearly for ``warmup`` updates, then falls with the inverse square root.

    Args:
        step: Number of the update, from 1; 0 counts as 1.
        model_size: ``d_model``.
        factor: Multiplies the rate; the paper's is 1.
        warmup: Updates until the peak.
    """
    step = max(1, step)
    return float(factor * model_size**-0.5 * min(step**-0.5, step * warmup**-1.5))


def make_adam(model: nn.Module, lr: float = 1.0) -> torch.optim.Adam:
    """Return Adam with β₁ 0.9, β₂ 0.98, ε 1e-9 (§5.3), in its fused form.

    Args:
        model: Its parameters are optimized; shared ones once.
        lr: Base rate, which a schedule multiplies.
    """
    return torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98), eps=1e-9, fused=True)


def noam_schedule(
    optimizer: torch.optim.Optimizer, model_size: int, factor: float = 1.0, warmup: int = 4000
) -> LambdaLR:
    """Return a scheduler that sets ``rate`` before each update; call its ``step`` after each."""
    return LambdaLR(optimizer, lambda done: rate(done + 1, model_size, factor, warmup))


class NoamOpt:
    """The Annotated Transformer's first optimizer, which sets its own rate.

    Args:
        model_size: ``d_model``.
        factor: Multiplies the rate.
        warmup: Updates until the peak.
        optimizer: Makes the updates.
    """

    def __init__(
        self, model_size: int, factor: float, warmup: int, optimizer: torch.optim.Optimizer
    ) -> None:
        self.optimizer, self.model_size = optimizer, model_size
        self.factor, self.warmup = factor, warmup
        self._step, self._rate = 0, 0.0  # number and rate of the latest update

    def step(self) -> None:
        """Set the rate of this update and make it."""
        self._step += 1
        self._rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate
        self.optimizer.step()

    def rate(self, step: int | None = None) -> float:
        """Return the rate of an update, by default of the latest."""
        step = self._step if step is None else step
        return rate(step, self.model_size, self.factor, self.warmup)
