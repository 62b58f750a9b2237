"""One update by several processes, equal to the update by one (section 5.2).

Defined in the chapter *Several processes* (book/training/distributed.md).
"""

# Written from book/training/distributed.md: edit the chapter instead.

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from annotated_transformer.model.transformer import EncoderDecoder
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.loop import Progress, batch_loss


@dataclass(frozen=True)
class World:
    """The processes that train together.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
        local: Number of this process on its machine, and of its GPU.

    Defined in: book/training/distributed.md
    """

    rank: int = 0
    size: int = 1
    local: int = 0

    @property
    def main(self) -> bool:
        """Whether this process is the one that writes files and speaks."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device of this process, its own GPU where there are any."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local)
        return torch.device("cpu")

    def total(self, *values: float) -> list[float]:
        """Return the sums of numbers over all processes, in float64, the same in each."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers)
        return [float(number) for number in numbers.tolist()]


@contextlib.contextmanager
def together() -> Iterator[World]:
    """Join the processes that torchrun started; without it, a world of one.

    Yields:
        The world; the processes part at the end.

    Defined in: book/training/distributed.md
    """
    if "RANK" not in os.environ:
        yield World()
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), local)
    finally:
        dist.destroy_process_group()


def share(batch: Batch, world: World) -> Batch:
    """Return this process's share of a batch; its sentences are dealt out, the longest first.

    A share may be empty, where a batch has fewer sentences than there are processes. It then
    holds one sentence without anything to predict, so that the process can take part.

    Args:
        batch: The whole batch.
        world: Who shares it.

    Defined in: book/training/distributed.md
    """
    if world.size == 1:
        return batch
    tgt = torch.cat([batch.tgt, batch.tgt_y[:, -1:]], dim=1)
    lengths = batch.src_keep.sum(dim=1) + batch.tgt_keep.sum(dim=1)
    rows = lengths.argsort(descending=True, stable=True)[world.rank :: world.size]
    if not len(rows):
        idle = tgt[:1].clone()
        idle[:, 1:] = batch.pad
        return Batch(batch.src[:1], idle, batch.pad)
    src, tgt = batch.src[rows], tgt[rows]
    m, n = ((side != batch.pad).sum(dim=1).max() for side in (src, tgt))
    return Batch(src[:, :m], tgt[:, :n], batch.pad)


class LossOf(nn.Module):
    """A model with its loss, so that the whole of it runs as one forward pass.

    Args:
        model: Shares its parameters with this module.

    Defined in: book/training/distributed.md
    """

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, smoothing: float, tokens: int) -> tuple[Tensor, Tensor]:
        """Return what ``batch_loss`` returns."""
        return batch_loss(self.model, batch, smoothing, tokens)


def replicate(model: EncoderDecoder, world: World) -> nn.Module:
    """Return the loss of a model, connected with those of the other processes.

    All begin with the weights of rank 0. The model itself stays the one to save and to use.

    Args:
        model: On the device of the world.
        world: Who trains.

    Defined in: book/training/distributed.md
    """
    loss = LossOf(model)
    return loss if world.size == 1 else DistributedDataParallel(loss)


def update_together(
    replica: nn.Module,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    world: World,
    schedule: LRScheduler | None = None,
    smoothing: float = 0.0,
) -> Progress:
    """Make one update from the shares of all processes, as if they were one batch.

    Args:
        replica: Of ``replicate``.
        batches: This process's shares, one of each micro-batch of the update.
        optimizer: Of this process; all make the same step.
        world: Who takes part.
        schedule: Sets the rate; it counts updates.
        smoothing: ε of label smoothing.

    Returns:
        What the update came to, over all processes.

    Raises:
        FloatingPointError: The loss is not a finite number, in any process; the weights are as
            before.
        ValueError: There is no target token to learn from.

    Defined in: book/training/distributed.md
    """
    start, nll, total = time.perf_counter(), 0.0, 0.0
    (tokens,) = world.total(sum(batch.ntokens for batch in batches))
    if not tokens:
        raise ValueError("an update needs at least one target token")
    for number, batch in enumerate(batches, 1):
        waits = world.size > 1 and number < len(batches)
        with replica.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            loss, batch_nll = replica(batch, smoothing, int(tokens))
            (loss * world.size).backward()
        nll += batch_nll.item()
        total += loss.item()
    nll, total = world.total(nll, total)
    if not (math.isfinite(nll) and math.isfinite(total)):
        optimizer.zero_grad()
        raise FloatingPointError(
            f"the loss of an update of {tokens:.0f} tokens is {total}: lower the learning rate"
        )
    optimizer.step()
    optimizer.zero_grad()
    if schedule is not None:
        schedule.step()
    return Progress(nll, int(tokens), time.perf_counter() - start)
