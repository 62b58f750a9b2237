# Written from book/training/loop.md: edit the chapter instead.
"""One update of the weights, from one batch or several; and evaluation (§5)."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.training.batches import Batch


def batch_loss(
    model: EncoderDecoder, batch: Batch, smoothing: float = 0.0, tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch per target token, and its negative log-likelihood.

    Args:
        model: Any encoder and decoder.
        batch: Sentence pairs.
        smoothing: ε of label smoothing (§5.4).
        tokens: Target tokens of the update that the batch is a part of; its own unless given.

    Returns:
        The loss, to call ``backward`` on; and the summed negative log-likelihood in nats, without
        smoothing and without gradient.
    """
    check_smoothing(smoothing)
    out = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)  # (batch, n, d_model)
    log_probs = model.generator(out).flatten(0, 1)  # (batch * n, vocab)
    gold = batch.tgt_y.flatten()  # (batch * n,)
    loss = F.cross_entropy(  # its log-softmax leaves log-probabilities as they are
        log_probs, gold, ignore_index=batch.pad, label_smoothing=smoothing, reduction="sum"
    )
    nll = F.nll_loss(log_probs.detach(), gold, ignore_index=batch.pad, reduction="sum")
    nll = nll.to(sum_type(nll.device))
    return loss / max(1, batch.ntokens if tokens is None else tokens), nll


LossFunction = Callable[..., tuple[Tensor, Tensor]]  # batch_loss, and the faster forms of it


def check_smoothing(smoothing: float) -> None:
    """Raise ValueError for an ε of label smoothing that is no probability."""
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing={smoothing!r}: must be from 0 to 1")


def sum_type(device: torch.device) -> torch.dtype:
    """Return the dtype for long sums, float64; on Apple's GPUs, which lack it, float32."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Progress:
    """The totals of one update, or of several."""

    nll: float = 0.0  #: Summed negative log-likelihood, nats.
    tokens: int = 0  #: Target tokens.
    seconds: float = 0.0  #: Wall time.
    grad_norm: float = 0.0  #: Norm of the latest gradient, before clipping.

    def __add__(self, later: Progress) -> Progress:
        """Add up two stretches."""
        nll, tokens = self.nll + later.nll, self.tokens + later.tokens
        return Progress(nll, tokens, self.seconds + later.seconds, later.grad_norm)

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


class World:
    """The processes that train together: here, this one alone."""

    rank = 0
    size = 1

    def __repr__(self) -> str:
        """Show the kind."""
        return f"{type(self).__name__}()"

    def sum(self, *values: float) -> list[float]:
        """Return the sums of numbers over all processes."""
        return list(values)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients are not yet exchanged between processes."""
        return contextlib.nullcontext()


ALONE = World()


class LossScale:
    """A factor that keeps small gradients from vanishing in float16; here always 1."""

    value = 1.0

    def adapt(self, finite: bool) -> None:
        """Adjust the factor after an update, by whether its gradient was finite."""


class NonFiniteError(FloatingPointError):
    """A loss or a gradient is NaN or infinite; the weights are as before.

    Attributes:
        loss: Loss of the update, per target token.
        grad_norm: Norm of its gradient.
        tokens: Target tokens of the update.
    """

    def __init__(self, loss: float, grad_norm: float, tokens: int, message: str = "") -> None:
        self.loss, self.grad_norm, self.tokens = loss, grad_norm, tokens
        what = f"the loss of an update of {tokens} tokens is {loss}"
        if math.isfinite(loss):
            what = f"the gradient norm of an update of {tokens} tokens is {grad_norm}"
        super().__init__(message or f"{what}: lower the learning rate, or clip the gradient")


def accumulate_gradients(
    model: nn.Module,
    batches: Sequence[Batch],
    smoothing: float,
    tokens: int,
    *,
    loss: LossFunction = batch_loss,
    world: World = ALONE,
    factor: float = 1.0,
) -> tuple[float, float]:
    """Add up the gradients of several batches; return their loss and negative log-likelihood.

    Each loss is divided by the target tokens of the whole update, so that the sum of the gradients
    is the gradient of all batches in one. ``factor`` multiplies the gradients.

    Raises:
        NonFiniteError: The loss is NaN or infinite; the gradients are cleared.
    """
    model.zero_grad()  # of what was there before
    sums = torch.zeros(())
    for number, batch in enumerate(batches, 1):
        last = number == len(batches)
        with contextlib.nullcontext() if last else world.no_sync(model):
            value, nll = loss(model, batch, smoothing, tokens)
            (value * factor).backward()
        sums = sums + torch.stack([value.detach().to(nll.dtype), nll])
    total, nll_sum = world.sum(*sums.tolist())  # waits for the device
    if not (math.isfinite(total) and math.isfinite(nll_sum)):
        model.zero_grad()
        raise NonFiniteError(total, math.nan, tokens)
    return total, nll_sum


def take_step(
    optimizer: torch.optim.Optimizer, clip: float | None = None, factor: float = 1.0
) -> float:
    """Undo ``factor``, clip, and make the optimizer's step, if the gradient is finite.

    Returns:
        The norm of the gradient before clipping. If it is not finite, no weight has changed.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = grad_norm(parameters) / factor
    if clip is not None and not clip > 0:
        raise ValueError(f"clip {clip}: must be above 0")
    shrink = 1.0 if clip is None else min(1.0, clip / max(norm, 1e-12))
    if math.isfinite(norm):
        if shrink != factor:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], shrink / factor)
        optimizer.step()
    optimizer.zero_grad()
    return norm


def grad_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the norm of all gradients as one vector."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def update(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler | None = None,
    smoothing: float = 0.0,
    *,
    clip: float | None = None,
    loss: LossFunction = batch_loss,
    world: World = ALONE,
    scale: LossScale | None = None,
) -> Progress:
    """Make one update from ``batches``, as if they and those of other processes were one batch.

    ``schedule`` makes one step, after the update. With a ``scale``, an infinite gradient is no
    error: the weights are as before, and the result's ``grad_norm`` is not finite.

    Raises:
        NonFiniteError: Loss or gradient are NaN or infinite; the weights are as before.
        ValueError: There is no target token to learn from.
    """
    start, factor = time.perf_counter(), 1.0 if scale is None else scale.value
    batches = list(batches)  # they are counted before they are used
    tokens = int(world.sum(sum(batch.ntokens for batch in batches))[0])
    if not tokens:
        raise ValueError("an update needs at least one target token")
    total, nll = accumulate_gradients(
        model, batches, smoothing, tokens, loss=loss, world=world, factor=factor * world.size
    )  # processes take the mean of their gradients, and a sum is wanted
    norm = take_step(optimizer, clip, factor)
    if scale is not None:
        scale.adapt(math.isfinite(norm))
    elif not math.isfinite(norm):
        raise NonFiniteError(total, norm, tokens)
    if schedule is not None:
        schedule.step()
    return Progress(nll, tokens, time.perf_counter() - start, norm)


def fit(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler | None = None,
    *,
    smoothing: float = 0.1,
    accumulate: int = 1,
    clip: float | None = None,
    loss: LossFunction = batch_loss,
) -> Iterator[Progress]:
    """Train on ``batches``; make an update for each item asked for, and yield its result.

    Args:
        model: Is set to training mode, and set to it again if the caller has left it.
        batches: Sentence pairs.
        optimizer: Makes the steps.
        schedule: Sets the rate; it counts updates.
        smoothing: ε of label smoothing.
        accumulate: Batches that make one update; the last update takes what is left.
        clip: Maximum norm of the gradient.
        loss: Computes the loss of a batch as :func:`batch_loss` does, such as
            :func:`~annotated_transformer.fast.loss.fast_batch_loss`, in less time.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate {accumulate}: must be at least 1")
    stream = iter(batches)
    model.train()
    while group := list(itertools.islice(stream, accumulate)):
        if not model.training:
            model.train()
        yield update(model, group, optimizer, schedule, smoothing, clip=clip, loss=loss)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its parts back into its own afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])
        for module, training in modes:
            module.training = training


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    loss: LossFunction = batch_loss,
    world: World = ALONE,
) -> Progress:
    """Return the negative log-likelihood of ``batches`` in evaluation mode.

    Args:
        model: Passed to ``loss``; its mode is restored afterwards.
        batches: The batches of this process.
        loss: Computes the loss of a batch.
        world: The processes whose sums are added.

    Raises:
        ValueError: There are no tokens.
    """
    nll, tokens, start = torch.zeros(()), 0, time.perf_counter()
    with evaluation_mode(model):
        for batch in batches:
            found = loss(model, batch, 0.0, 1)[1]
            nll, tokens = nll + found, tokens + batch.ntokens
    nll_sum, total = world.sum(float(nll), tokens)
    if not total:
        raise ValueError("batches: none came (used up?), or they are padding alone")
    return Progress(nll_sum, int(total), time.perf_counter() - start)
