# Written from book/training/distributed.md: edit the chapter instead.
"""One update by several processes, equal to the update by one (§5.2)."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from annotated_transformer.training.batches import Batch
from annotated_transformer.training.loop import LossFunction, World, batch_loss

Group = TypeVar("Group")


class Collectives(World):
    """Sums and gathers over processes, by ``torch.distributed``."""

    device: torch.device

    def sum(self, *values: float) -> list[float]:
        """Return the sums of numbers over all processes, in float64, the same in each."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers)
        return [float(number) for number in numbers.tolist()]

    def gather(self, state: Tensor) -> list[Tensor]:
        """Return a tensor of each process, all of one shape, in the order of ranks."""
        if self.size == 1:
            return [state]
        found = [torch.empty_like(state, device=self.device) for _ in range(self.size)]
        dist.all_gather(found, state.to(self.device))
        return [tensor.to(state.device) for tensor in found]

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a replica's gradients are not exchanged."""
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return contextlib.nullcontext()


class DistributedWorld(Collectives):
    """The processes that train together.

    Args:
        rank: Number of this process, from 0; the first one writes files and messages.
        size: Number of processes.
        local_rank: Number of this process on its machine, and of its GPU where there are any.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0) -> None:
        self.rank, self.size, self.local_rank, self.main = rank, size, local_rank, rank == 0
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")

    def main_first(self, work: Callable[[], Group]) -> Group:
        """Call ``work`` in the main process, then in the others; return its result in each.

        Raises:
            SystemExit: It failed in the main process, which has raised the error itself.
        """
        if not self.main and self.sum(0.0)[0]:
            raise SystemExit(2)
        failed = True
        try:
            result, failed = work(), False
        finally:
            if self.main:
                self.sum(failed)
        return result


def split_batch(batch: Batch, world: World) -> Batch:
    """Return this process's part of a batch; its sentences are dealt out, the longest first.

    If a batch has fewer sentences than there are processes, some get one with nothing to predict,
    because all of them must take part in an all-reduce.
    """
    if world.size == 1:
        return batch
    lengths = batch.src_mask.sum((1, 2)) + (batch.tgt_y != batch.pad).sum(dim=1)
    rows = lengths.argsort(descending=True, stable=True)[world.rank :: world.size]
    if not len(rows):
        return empty_batch(batch)
    m, n = ((side[rows] != batch.pad).sum(dim=1).max() for side in (batch.src, batch.tgt_y))
    part = Batch(batch.src[rows, :m], batch.target[rows, : n + 1], batch.pad)
    part.tgt_mask = batch.tgt_mask[rows, :n, :n]  # opens the first column even if BOS is PAD
    return part


def empty_batch(batch: Batch) -> Batch:
    """Return the first sentence of a batch, with nothing to predict."""
    tgt = batch.target[:1].clone()
    tgt[:, 1:] = batch.pad
    return Batch(batch.src[:1], tgt, batch.pad)


def local_batches(
    groups: Sequence[Group], make: Callable[[Group], Batch], world: World
) -> list[Batch]:
    """Return this process's part of an update; each process gets equally many batches.

    Args:
        groups: The update's micro-batches, not yet made into tensors.
        make: Makes a batch from one of them.
        world: The processes that share them.
    """
    even = len(groups) // world.size * world.size
    whole = [make(group) for group in groups[world.rank : even : world.size]]
    return whole + [split_batch(make(group), world) for group in groups[even:]]


def local_validation(
    groups: Sequence[Group], make: Callable[[Group], Batch], world: World
) -> Iterator[Batch]:
    """Yield this process's batches of a validation; each process gets equally many."""
    for first in range(0, len(groups), world.size):
        own = groups[first + world.rank :][:1]
        yield make(own[0]) if own else empty_batch(make(groups[0]))


class LossModule(nn.Module):
    """A model with its loss, so that the whole of it runs as one forward pass.

    Args:
        model: Shares its parameters with this module.
        loss: Computes the loss of a batch.
    """

    def __init__(self, model: nn.Module, loss: LossFunction = batch_loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Batch, smoothing: float, tokens: int | None) -> tuple[Tensor, Tensor]:
        """Return what ``loss`` returns."""
        return self.loss(self.model, batch, smoothing, tokens)


def replica_loss(
    model: nn.Module, batch: Batch, smoothing: float, tokens: int | None
) -> tuple[Tensor, Tensor]:
    """Call what :func:`replicate` returned: the loss for ``update`` and ``evaluate``."""
    found: tuple[Tensor, Tensor] = model(batch, smoothing, tokens)
    return found


REPLICAS: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # process_group ends them


def replicate(module: nn.Module, world: World) -> nn.Module:
    """Connect a :class:`LossModule` with its copies in the other processes (DDP).

    All begin with the weights of rank 0. Make the optimizer afterwards.
    """
    if world.size == 1:
        return module
    replica = DistributedDataParallel(module)
    REPLICAS.add(replica)  # at the end, process_group frees it
    return replica


def shard(module: nn.Module, layers: Iterable[nn.Module], world: World) -> nn.Module:
    """Let each process hold only a shard of the weights, gathered a layer at a time (FSDP2).

    Args:
        module: A :class:`LossModule`. Make the optimizer afterwards.
        layers: Parts of it that are gathered on their own.
        world: The processes.

    Raises:
        ValueError: One process alone has nothing to shard with.
    """
    if world.size == 1:
        raise ValueError("sharded weights are for several processes: start with torchrun")
    from torch.distributed.fsdp import fully_shard  # takes half a second to load

    for parameter in module.parameters():
        dist.broadcast(parameter.detach(), 0)
    for part in (*layers, module):
        fully_shard(part)
    return module


def reshard(module: nn.Module) -> None:
    """Free the weights that an evaluation gathered; FSDP keeps some for a backward pass."""
    if callable(free := getattr(module, "reshard", None)):
        free()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor whole, gathered from its shards; all processes must call this."""
    return getattr(tensor, "full_tensor", lambda: tensor)()


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Shard a whole tensor as :func:`shard` has sharded ``like``; others' rows are not read."""
    if (mesh := getattr(like, "device_mesh", None)) is None:
        return tensor
    from torch.distributed.tensor import DTensor

    rows = -(-len(tensor) // mesh.size())  # of each process; the last ones may have fewer
    own = tensor[rows * mesh.get_local_rank() :][:rows].to(like.device)
    shape = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(own, mesh, like.placements, run_check=False, **shape)
