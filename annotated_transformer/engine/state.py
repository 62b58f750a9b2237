"""How far a run is: all that a checkpoint holds beside tensors, with types that are checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from annotated_transformer.training.loop import Progress


@dataclass(frozen=True)
class Point:
    """A point of the learning curve, made by a validation.

    Attributes:
        update: Updates so far.
        epoch: The pass over the data that it is in, or ends, from 1.
        seconds: Time so far, validation included.
        train_loss: Mean since the point before, in nats per target token, with dropout at work.
        valid_loss: Of the validation text, in nats per target token.
        tokens_per_second: Target tokens, since the point before.
    """

    update: int
    epoch: int
    seconds: float
    train_loss: float
    valid_loss: float
    tokens_per_second: int


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
    """How far a run is.

    Attributes:
        commit: Of the package, when it began.
        updates: Made so far.
        learned: Those of them that changed the weights.
        skipped: The latest ones that did not, in a row, while nothing more could be tried.
        epoch: The pass over the data that it is in, from 0.
        epoch_start: Updates before that pass.
        seconds: Time of all updates and validations.
        update_seconds: Time of all updates.
        tokens: Target tokens of all updates.
        flops: Operations of all updates; 0 where they cannot be counted.
        best: The lowest validation loss.
        curve: What validations have measured.
        recent: What the updates since the last validation came to.
        window: Sums since the last line of the log.
    """

    commit: str = "unknown"
    updates: int = 0
    learned: int = 0
    skipped: int = 0
    epoch: int = 0
    epoch_start: int = 0
    seconds: float = 0.0
    update_seconds: float = 0.0
    tokens: int = 0
    flops: int = 0
    best: float | None = None
    curve: list[Point] = field(default_factory=list)
    recent: Progress = field(default_factory=Progress)
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
    """What a file to go on from holds beside weights, the optimizer's moments and random states.

    Attributes:
        state: How far the run is.
        processes: How many there were, each with a random state.
        groups: The optimizer's parameter groups.
        schedule: State of the learning rate's schedule.
        tokenizers: Fingerprint of those that the weights belong to.
        scale: State of the loss scale, in float16.
        products: The processor, and how it multiplied: the same one goes on in the same way.
    """

    state: TrainState
    processes: int
    groups: list[dict[str, Any]]
    schedule: dict[str, Any]
    tokenizers: str
    scale: dict[str, float] | None
    products: tuple[str, str]
