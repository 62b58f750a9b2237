# Written from book/training/distributed.md: edit the chapter instead.
"""One update by several processes, equal to the update by one (section 5.2)."""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from annotated_transformer.background.seq2seq import Translator
from annotated_transformer.model.transformer import EncoderDecoder
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.loop import Progress
from annotated_transformer.training.precision import Arithmetic, LossOf, NonFiniteError, step

Group = TypeVar("Group")


@dataclass(frozen=True)
class World:
    """The processes that train together.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
        local: Number of this process on its machine, and of its GPU.
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

    def main_first(self, work: Callable[[], Group]) -> Group:
        """Do some work in the main process, then in the others; return its result in each.

        Raises:
            SystemExit: The work failed in the main process, which says why.
        """
        if self.main:
            failed = True
            try:
                result = work()
                failed = False
            finally:
                self.total(failed)
            return result
        if self.total(0.0)[0]:
            raise SystemExit(2)
        return work()

    def gather(self, state: Tensor) -> list[Tensor]:
        """Return a tensor of each process, all of one shape, in the order of ranks."""
        if self.size == 1:
            return [state]
        found = [torch.empty_like(state, device=self.device) for _ in range(self.size)]
        dist.all_gather(found, state.to(self.device))
        return [tensor.to(state.device) for tensor in found]


def meet(patience: timedelta) -> tuple[Store, int, int]:
    """Return the place where the processes leave their addresses, this one's rank, and the size.

    torchrun keeps one store while it starts the processes again, and the addresses of the dead
    stay in it (issue 135712 of PyTorch): each start gets names of its own. Over several machines
    the counts may differ; there torchrun has to be told to make new stores.
    """
    store, rank, size = next(rendezvous("env://", timeout=patience))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"start {count}", store)
    elif rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        warnings.warn(
            "several machines: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on each, or "
            "processes that it starts again may look for those that died",
            stacklevel=2,
        )
    return store, rank, size


_COPIES: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # connected, and alive


@contextlib.contextmanager
def together() -> Iterator[World]:
    """Join the processes that torchrun started; without it, a world of one.

    Yields:
        The world; the processes part at the end.
    """
    if "RANK" not in os.environ:
        yield World()
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    patience = timedelta(hours=2)  # the others may have to wait for a download
    store, rank, size = meet(patience)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), local)
    finally:
        # A reducer that outlives the group ends it while it holds Python's lock, for which a
        # thread of the group may be waiting.
        for connected in list(_COPIES):
            del connected.reducer, connected.logger
        dist.destroy_process_group()


def share(batch: Batch, world: World) -> Batch:
    """Return this process's share of a batch; its sentences are dealt out, the longest first.

    A share may be empty, where a batch has fewer sentences than there are processes. It then
    holds one sentence without anything to predict, so that the process can take part.

    Args:
        batch: The whole batch.
        world: Who shares it.
    """
    if world.size == 1:
        return batch
    tgt = torch.cat([batch.tgt, batch.tgt_y[:, -1:]], dim=1)
    lengths = batch.src_keep.sum(dim=1) + batch.tgt_keep.sum(dim=1)
    rows = lengths.argsort(descending=True, stable=True)[world.rank :: world.size]
    if not len(rows):
        return idle(batch)
    src, tgt = batch.src[rows], tgt[rows]
    m, n = ((side != batch.pad).sum(dim=1).max() for side in (src, tgt))
    return Batch(src[:, :m], tgt[:, :n], batch.pad)


def idle(batch: Batch) -> Batch:
    """Return the first sentence of a batch, with nothing to predict."""
    tgt = torch.cat([batch.tgt, batch.tgt_y[:, -1:]], dim=1)[:1].clone()
    tgt[:, 1:] = batch.pad
    return Batch(batch.src[:1], tgt, batch.pad)


def own_shares(
    groups: Sequence[Group], make: Callable[[Group], Batch], world: World
) -> list[Batch]:
    """Return this process's part of an update; each process gets equally many batches.

    Args:
        groups: What the micro-batches of the update are made from.
        make: Makes one.
        world: Who shares them.
    """
    even = len(groups) // world.size * world.size
    whole = [make(group) for group in groups[world.rank : even : world.size]]
    return whole + [share(make(group), world) for group in groups[even:]]


def replicate(
    model: Translator,
    world: World,
    arithmetic: Arithmetic | None = None,
    *,
    compiler: str | Callable[..., Any] | None = None,
    pieces: bool = False,
) -> nn.Module:
    """Return the loss of a model, connected with those of the other processes.

    All begin with the weights of rank 0. The model itself stays the one to save and to use.
    Make the optimizer afterwards.

    Args:
        model: On the device of the world.
        world: Who trains.
        arithmetic: In which numbers; float32 unless given.
        compiler: Backend of ``torch.compile``; not compiled unless given.
        pieces: Let each process hold only its piece of the weights (FSDP2), of a Transformer by
            layers.

    Raises:
        ValueError: One process alone cannot hold pieces, nor are pieces compiled.
    """
    loss = LossOf(model, arithmetic, compiler)
    if not pieces:
        if world.size == 1:
            return loss
        connected = DistributedDataParallel(loss)
        _COPIES.add(connected)
        return connected
    if world.size == 1 or compiler is not None:
        raise ValueError("pieces of a model: for several processes, not compiled")
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    if isinstance(model, EncoderDecoder):  # a layer at a time; other models as a whole
        for layer in (*model.encoder.layers, *model.decoder.layers):
            fully_shard(layer)
    fully_shard(loss)
    return loss


def whole(tensor: Tensor) -> Tensor:
    """Put the pieces of a tensor together; all processes must take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parted(tensor: Tensor, like: Tensor) -> Tensor:
    """Cut a whole tensor, the same in each process, as another one is cut."""
    if not isinstance(like, DTensor):
        return tensor
    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def loss_of(replica: nn.Module) -> LossOf:
    """Return the module that ``replicate`` connected."""
    found = replica.module if isinstance(replica, DistributedDataParallel) else replica
    assert isinstance(found, LossOf)
    return found


def update_together(
    replica: nn.Module,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    world: World,
    schedule: LRScheduler | None = None,
    smoothing: float = 0.0,
    *,
    clip: float | None = None,
) -> tuple[Progress, float]:
    """Make one update from the shares of all processes, as if they were one batch.

    Args:
        replica: Of ``replicate``.
        batches: This process's shares, equally many in each process.
        optimizer: Of this process; all make the same step.
        world: Who takes part.
        schedule: Sets the rate; it counts updates.
        smoothing: ε of label smoothing.
        clip: Greatest length of the gradient; any unless given.

    Returns:
        What the update came to, over all processes, and the length of its gradient before
        clipping. With loss scaling that may be infinite: then the weights are as before.

    Raises:
        NonFiniteError: Loss or gradient are not finite, in any process; the weights are as
            before.
        ValueError: There is no target token to learn from.
    """
    start = time.perf_counter()
    arithmetic, sums = loss_of(replica).arithmetic, torch.zeros(2, dtype=torch.float64)
    (tokens,) = world.total(sum(batch.ntokens for batch in batches))
    if not tokens:
        raise ValueError("an update needs at least one target token")
    for number, batch in enumerate(batches, 1):
        waits = isinstance(replica, DistributedDataParallel) and number < len(batches)
        with replica.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            loss, nll = replica(batch, smoothing, int(tokens))
            (loss * (world.size * arithmetic.factor)).backward()
        sums = sums.to(loss.device) + torch.stack([nll, loss.detach().double()])
    nll_sum, total = world.total(*sums.tolist())
    if not (math.isfinite(nll_sum) and math.isfinite(total)):
        optimizer.zero_grad()
        raise NonFiniteError(total, math.nan, int(tokens))
    norm = step(optimizer, arithmetic, clip)
    if not math.isfinite(norm) and arithmetic.scale is None:
        raise NonFiniteError(total, norm, int(tokens))
    if schedule is not None:
        schedule.step()
    return Progress(nll_sum, int(tokens), time.perf_counter() - start), norm


@torch.no_grad()
def evaluate_together(
    replica: nn.Module, groups: Sequence[Group], make: Callable[[Group], Batch], world: World
) -> Progress:
    """Return the negative log-likelihood of batches in evaluation mode, over all processes.

    Args:
        replica: Of ``replicate``.
        groups: What the batches are made from, the same in each process.
        make: Makes one.
        world: Who takes part.
    """
    loss, start = loss_of(replica), time.perf_counter()
    training = loss.training
    loss.eval()
    nll, tokens = 0.0, 0
    for first in range(0, len(groups), world.size):
        own = groups[first + world.rank :][:1]
        batch = make(own[0]) if own else idle(make(groups[0]))
        nll += loss(batch, 0.0, 1)[1].item()
        tokens += batch.ntokens
    loss.train(training)
    if isinstance(loss, FSDPModule):
        loss.reshard()  # the outermost piece waits for a backward pass, which does not come
    nll, total = world.total(nll, tokens)
    return Progress(nll, int(total), time.perf_counter() - start)
