"""How far a run is: all that a checkpoint holds beside tensors, with types that are checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from annotated_transformer.training.loop import Progress


@dataclass(frozen=True)
class Point:
    """A point of the learning curve, made by a validation; losses in nats per target token."""

    update: int
    epoch: int  # that it ends, or is in, from 1
    seconds: float  # so far, validation included
    train_loss: float  # mean since the point before, with dropout at work
    valid_loss: float
    tokens_per_second: int  # target tokens, since the point before


@dataclass
class Window:
    """Sums since the last line of the log; rate and norm are of the latest update."""

    nll: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    flops: int = 0
    skipped: int = 0
    norm: float = 0.0
    rate: float = 0.0

    def add(self, made: Progress, flops: int, rate: float) -> None:
        """Add an update; it was skipped if its gradient norm is not finite."""
        self.nll, self.tokens = self.nll + made.nll, self.tokens + made.tokens
        self.seconds, self.flops = self.seconds + made.seconds, self.flops + flops
        self.skipped += not math.isfinite(made.grad_norm)
        self.norm, self.rate = made.grad_norm, rate


@dataclass
class TrainState:
    """How far a run is."""

    commit: str = "unknown"  # of the package, when it began
    updates: int = 0
    learned: int = 0  # updates that changed the weights
    skipped: int = 0  # the latest ones that did not, in a row, with nothing left to try
    epoch: int = 0  # the pass over the data that it is in
    epoch_start: int = 0  # updates before that pass
    seconds: float = 0.0  # of updates and validations
    update_seconds: float = 0.0
    tokens: int = 0  # target tokens
    flops: int = 0  # operations; 0 where they cannot be counted
    best: float | None = None  # the lowest validation loss
    curve: list[Point] = field(default_factory=list)
    recent: Progress = field(default_factory=Progress)  # since the last validation
    window: Window = field(default_factory=Window)

    def add(self, made: Progress, flops: int, rate: float) -> None:
        """Count an update."""
        self.updates, self.tokens = self.updates + 1, self.tokens + made.tokens
        self.learned += math.isfinite(made.grad_norm)
        self.seconds, self.update_seconds = (
            total + made.seconds for total in (self.seconds, self.update_seconds)
        )
        self.flops += flops
        self.recent += made
        self.window.add(made, flops, rate)

    def validated(self, made: Progress) -> bool:
        """Add a point to the curve; return whether it is the best so far."""
        self.seconds += made.seconds
        self.curve.append(
            Point(
                self.updates,
                self.epoch + 1,
                round(self.seconds, 1),
                round(self.recent.loss, 4),
                round(made.loss, 4),
                round(self.recent.speed),
            )
        )
        self.recent = Progress()
        better = self.best is None or math.isnan(self.best) or made.loss < self.best
        self.best = made.loss if better else self.best
        return better


@dataclass(frozen=True)
class Checkpoint:
    """What a file to go on from holds beside weights, the optimizer's moments and random states."""

    state: TrainState
    processes: int  # each with a random state
    groups: list[dict[str, Any]]  # of the optimizer's parameters
    schedule: dict[str, Any]  # of the learning rate
    tokenizers: str  # fingerprint of those that the weights belong to
    scale: dict[str, float] | None  # of the loss, in float16
    products: tuple[str, str]  # the processor, and how it multiplied: there it goes on like this
