"""The state of a run: everything in a checkpoint except tensors, with checked types."""

import math
from dataclasses import dataclass, field
from typing import Any

from annotated_transformer.training.loop import Progress


@dataclass(frozen=True)
class Point:
    """A validation's point on the learning curve; losses in nats per target token."""

    update: int  #: Updates so far.
    epoch: int  #: Current epoch, from 1.
    seconds: float  #: Time so far, including validation.
    train_loss: float  #: Mean loss since the previous point, with dropout active.
    valid_loss: float  #: Loss on the validation text.
    tokens_per_second: int  #: Target tokens, since the previous point.
    valid_bleu: float | None = None  #: BLEU of the greedy translation, if asked for.


@dataclass
class Window:
    """Totals since the last log line; rate and norm are of the latest update."""

    nll: float = 0.0  #: Summed negative log-likelihood, nats.
    tokens: int = 0  #: Target tokens.
    seconds: float = 0.0  #: Time of the updates.
    flops: int = 0  #: Operations; 0 if they cannot be counted.
    skipped: int = 0  #: Updates that changed nothing.
    norm: float = 0.0  #: Gradient norm.
    rate: float = 0.0  #: Learning rate.

    def add(self, made: Progress, flops: int, rate: float) -> None:
        """Add an update; it was skipped if its gradient norm is not finite."""
        self.nll, self.tokens = self.nll + made.nll, self.tokens + made.tokens
        self.seconds, self.flops = self.seconds + made.seconds, self.flops + flops
        self.skipped += not math.isfinite(made.grad_norm)
        self.norm, self.rate = made.grad_norm, rate


@dataclass
class TrainState:
    """The progress of a run."""

    commit: str = "unknown"  #: Commit of the package, at the start of the run.
    updates: int = 0  #: Updates made, skipped ones included.
    learned: int = 0  #: Updates that changed the weights.
    skipped: int = 0  #: The latest failed updates in a row, with no loss scale left to lower.
    epoch: int = 0  #: Current pass over the data, from 0.
    epoch_start: int = 0  #: Updates before that pass.
    seconds: float = 0.0  #: Time of updates and validations.
    update_seconds: float = 0.0
    tokens: int = 0  #: Target tokens.
    flops: int = 0  #: Operations; 0 if they cannot be counted.
    best: float | None = None  #: The lowest validation loss.
    best_bleu: float | None = None  #: The highest BLEU on the validation text.
    stale: int = 0  #: Validations since the best weights.
    curve: list[Point] = field(default_factory=list)
    recent: Progress = field(default_factory=Progress)  #: Totals since the last validation.
    window: Window = field(default_factory=Window)

    def add(self, made: Progress, flops: int, rate: float) -> None:
        """Count an update."""
        self.updates, self.tokens = self.updates + 1, self.tokens + made.tokens
        self.learned += math.isfinite(made.grad_norm)
        self.seconds += made.seconds
        self.update_seconds += made.seconds
        self.flops += flops
        self.recent += made
        self.window.add(made, flops, rate)

    def validated(self, made: Progress, bleu: float | None = None, metric: str = "loss") -> bool:
        """Add a point to the curve; return whether it is the best so far by the metric."""
        self.seconds += made.seconds
        place = self.updates, self.epoch + 1, round(self.seconds, 1)
        losses = round(self.recent.loss, 4), round(made.loss, 4)
        self.curve.append(Point(*place, *losses, round(self.recent.speed), bleu))
        self.recent = Progress()
        lower = self.best is None or math.isnan(self.best) or made.loss < self.best
        higher = bleu is not None and (self.best_bleu is None or bleu > self.best_bleu)
        self.best = made.loss if lower else self.best
        self.best_bleu = bleu if higher else self.best_bleu
        better = higher if metric == "bleu" else lower
        self.stale = 0 if better else self.stale + 1
        return better

    def is_due(self, every: int | None, *, ended: bool) -> bool:
        """Whether it is time for what is done every so many updates, or as an epoch has ended."""
        return ended if every is None else not self.updates % every

    def out_of_patience(self, patience: int | None) -> bool:
        """Whether ``patience`` validations in a row have brought no better weights."""
        return patience is not None and self.stale >= patience


@dataclass(frozen=True)
class Checkpoint:
    """The part of a checkpoint besides weights, optimizer moments and random states."""

    state: TrainState
    processes: int  #: Number of processes, each with a random state.
    groups: list[dict[str, Any]]  #: The optimizer's parameter groups.
    schedule: dict[str, Any]  #: State of the learning-rate schedule.
    tokenizers: str  #: Fingerprint of the tokenizers that the weights belong to.
    scale: dict[str, float] | None  #: Loss scale, in float16.
    products: tuple[str, str]  #: Processor, and its matmul precision, reused on the same processor.
