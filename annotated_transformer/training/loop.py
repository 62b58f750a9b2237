# Written from book/training/loop.md: edit the chapter instead.
"""Updates, accumulation and evaluation (section 5)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from annotated_transformer.background.seq2seq import Translator
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.regularization import linear_cross_entropy


def batch_loss(
    model: Translator, batch: Batch, smoothing: float = 0.0, tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch per target token, and its negative log-likelihood.

    Args:
        model: Its rows of padding are not computed.
        batch: Sentence pairs.
        smoothing: ε of label smoothing.
        tokens: Target tokens of the update that the batch is a part of; the batch's own
            unless given.

    Returns:
        The loss, to call ``backward`` on, and the summed negative log-likelihood in nats.
    """
    x = model.forward_packed(batch.src, batch.tgt, batch.src_keep, batch.tgt_keep)
    gold = batch.tgt_y[batch.tgt_keep]  # (rows,)
    scale = 1 / max(1, batch.ntokens if tokens is None else tokens)
    return linear_cross_entropy(x, model.projection, gold, smoothing, scale)


@dataclass(frozen=True)
class Progress:
    """What an update, or several, came to."""

    nll: float = 0.0  # summed negative log-likelihood, nats
    tokens: int = 0  # target tokens
    seconds: float = 0.0

    def __add__(self, other: Progress) -> Progress:
        """Add up two stretches."""
        return Progress(
            self.nll + other.nll, self.tokens + other.tokens, self.seconds + other.seconds
        )

    @property
    def loss(self) -> float:
        """Negative log-likelihood per target token, nats."""
        return self.nll / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        """Perplexity per target token."""
        return math.exp(min(self.loss, 700.0))

    @property
    def speed(self) -> float:
        """Target tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def update(
    model: Translator,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler | None = None,
    smoothing: float = 0.0,
) -> Progress:
    """Make one update from ``batches``, as if they were one batch.

    Raises:
        FloatingPointError: The loss is not a finite number; the weights are as before.
        ValueError: There is no target token to learn from.
    """
    tokens = sum(batch.ntokens for batch in batches)
    if not tokens:
        raise ValueError("an update needs at least one target token")
    start, total, nll = time.perf_counter(), 0.0, 0.0
    for batch in batches:
        loss, batch_nll = batch_loss(model, batch, smoothing, tokens)
        loss.backward()
        total += loss.item()
        nll += batch_nll.item()
    if not (math.isfinite(total) and math.isfinite(nll)):
        optimizer.zero_grad()
        raise FloatingPointError(
            f"the loss of an update of {tokens} tokens is {total}: lower the learning rate"
        )
    optimizer.step()
    optimizer.zero_grad()
    if schedule is not None:
        schedule.step()
    return Progress(nll, tokens, time.perf_counter() - start)


def fit(
    model: Translator,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler | None = None,
    *,
    smoothing: float = 0.1,
    accumulate: int = 1,
) -> Iterator[Progress]:
    """Train on ``batches``, yielding after each update.

    Args:
        model: Is set to training mode before each update.
        batches: Sentence pairs.
        optimizer: Makes the updates.
        schedule: Sets the rate; it counts updates.
        smoothing: ε of label smoothing.
        accumulate: Batches that make one update; the last update takes what is left.
    """
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == accumulate:
            model.train()
            yield update(model, group, optimizer, schedule, smoothing)
            group = []
    if group:
        model.train()
        yield update(model, group, optimizer, schedule, smoothing)


@torch.no_grad()
def evaluate(model: Translator, batches: Iterable[Batch]) -> Progress:
    """Return the negative log-likelihood of ``batches`` in evaluation mode."""
    training = model.training
    model.eval()
    start, nll, tokens = time.perf_counter(), 0.0, 0
    try:
        for batch in batches:
            nll += batch_loss(model, batch)[1].item()
            tokens += batch.ntokens
    finally:
        model.train(training)
    return Progress(nll, tokens, time.perf_counter() - start)
