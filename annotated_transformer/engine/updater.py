"""The updates of a run; those that become NaN or infinite are saved, so they can be replayed."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from annotated_transformer.data.shards import TokenPairs
from annotated_transformer.data.tensors import save_tensors
from annotated_transformer.engine import checkpoints
from annotated_transformer.engine.config import Options
from annotated_transformer.engine.devices import peak_flops
from annotated_transformer.engine.precision import DynamicLossScale, PreciseLoss, Precision
from annotated_transformer.engine.records import processor_name
from annotated_transformer.engine.state import Checkpoint, TrainState
from annotated_transformer.engine.system import System
from annotated_transformer.engine.texts import lines_of
from annotated_transformer.fast.adam import lean_adam
from annotated_transformer.fast.linear import matmul_precision
from annotated_transformer.fast.packing import IndexedBatch
from annotated_transformer.model.complexity import training_flops
from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.distributed import (
    DistributedWorld,
    local_batches,
    replica_loss,
    replicate,
    shard,
)
from annotated_transformer.training.loop import NonFiniteError, Progress, grad_norm, update
from annotated_transformer.training.optimizer import noam_schedule

Given = TypeVar("Given")
Made = TypeVar("Made")
MOST_SKIPPED = 10  # consecutive failed updates, after which the weights must be at fault


def prefetch_items(
    items: Iterable[Given], make: Callable[[Given], Made], ahead: bool
) -> Iterator[tuple[Given, Made]]:
    """Yield each item with ``make(item)``, computed on demand or one ahead in a thread."""
    if not ahead:
        yield from ((item, make(item)) for item in items)
        return
    with ThreadPoolExecutor(1) as pool:
        waiting = ((item, pool.submit(make, item)) for item in items)
        coming = next(waiting, None)
        while coming is not None:
            (item, future), coming = coming, next(waiting, None)
            yield item, future.result()


def all_peaks(precision: Precision, world: DistributedWorld) -> float | None:
    """Return the peak operations per second of all devices, if known."""
    if precision.device.type != "cuda":
        return None
    one = peak_flops(torch.cuda.get_device_name(precision.device), precision.name)
    return None if one is None else one * world.size


class Updater:
    """A system's model with its optimizer and schedule, on the device of the precision.

    Failed updates are saved in the run's folder. If the options ask for ``torch.compile``, the
    compiler is its backend.

    Attributes:
        replica: The model's loss, replicated or sharded over the processes.
        peak: Peak operations per second of all devices; None if unknown.
    """

    def __init__(
        self, system: System, pairs: TokenPairs, options: Options, world: DistributedWorld,
        precision: Precision, folder: Path, compiler: str | Callable[..., Any],
    ) -> None:  # fmt: skip
        self.system, self.pairs, self.options, self.world = system, pairs, options, world
        self.precision, self.folder, self.factor = precision, folder, 1.0
        self.peak = all_peaks(precision, world)
        model, run, optim = system.model.to(precision.device), options.run, options.optim
        if world.rank:  # each process draws its own dropout masks
            torch.manual_seed(optim.seed + 1_000_003 * world.rank)
        loss = PreciseLoss(model, precision, compiler if run.compile else None)
        self.replica = shard(loss, loss.layers, world) if run.sharded else replicate(loss, world)
        self.optimizer = lean_adam(model)
        width = system.config.width
        factor = 1.0 if optim.peak is None else optim.peak * (width * optim.warmup) ** 0.5
        self.schedule = noam_schedule(self.optimizer, width, factor, optim.warmup)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # the first step may be skipped
        if precision.device.type == "cpu":  # all multiply as the main process has chosen to
            levels = ("highest", "high", "medium")
            own = levels.index(matmul_precision() or "highest")
            torch.set_float32_matmul_precision(levels[int(world.sum(own * world.main)[0])])

    def batches(self, groups: Sequence[Tensor]) -> list[Batch]:
        """Make this process's batches of an update, and copy them to the device asynchronously."""
        own = local_batches(groups, self.pairs.batch, self.world)
        return [IndexedBatch(batch).to(self.precision.device, non_blocking=True) for batch in own]

    def make_update(
        self, state: TrainState, groups: Sequence[Tensor], batches: Sequence[Batch]
    ) -> None:
        """Make the next update from ``batches(groups)``, and count it.

        Raises:
            NonFiniteError: The loss or gradient is NaN or infinite and should not be skipped.
        """
        optim, scale, failed = self.options.optim, self.precision.scale, None
        rate, random = float(self.schedule.get_last_lr()[0]), torch.get_rng_state()
        self.factor = 1.0 if scale is None else scale.value
        if not self.system.model.training:  # to ask costs less than to set every module's mode
            self.replica.train()
        try:
            made = update(
                self.replica, batches, self.optimizer, self.schedule, optim.smoothing,
                clip=optim.clip, loss=replica_loss, world=self.world, scale=scale,
            )  # fmt: skip
            if math.isfinite(made.grad_norm):
                state.skipped = 0
            elif self.factor <= DynamicLossScale.least:
                state.skipped += 1  # overflow at the smallest scale: lowering it will not help
                if state.skipped == MOST_SKIPPED:
                    failed = NonFiniteError(made.loss, made.grad_norm, made.tokens)
        except NonFiniteError as error:
            failed, made = error, Progress(grad_norm=math.nan)
            state.skipped += 1
            self.schedule.step()
        if failed is not None:
            torch.set_rng_state(random)
            self._failed(failed, state, groups)
        config, vocab, flops = self.system.config, len(self.system.tokenizers[1]), 0
        if isinstance(config, ModelConfig) and made.tokens:  # of another model they are unknown
            lengths = self.pairs.lengths()[torch.cat(list(groups)).long()]
            flops = training_flops(config, vocab, *lengths.T.tolist())
        state.add(made, flops, rate)

    def _failed(self, error: NonFiniteError, state: TrainState, groups: Sequence[Tensor]) -> None:
        """Save what :func:`replay_update` needs; raise the error, or warn and skip the update."""
        path = self.folder / "non_finite" / f"{state.updates + 1:08d}.safetensors"
        lines = lines_of(self.pairs, groups)
        tensors = checkpoints.run_tensors(self.system.model, self.optimizer, self.world)
        if self.world.main:
            for k, batch in enumerate(map(self.pairs.batch, groups)):
                tensors |= {f"batch.{k}.src": batch.src, f"batch.{k}.tgt": batch.target}
            data = {"lines": lines, "tokens": error.tokens, "scale": self.factor}
            data |= {"products": torch.get_float32_matmul_precision()}
            save_tensors(path, tensors, data | {"options": self.options.described()})
        some = ", ".join(map(str, lines[:8])) + (", ..." if len(lines) > 8 else "")
        place = f"update {state.updates + 1}, epoch {state.epoch + 1}, lines {some}"
        message = f"{place}: {error}; saved in {path}"
        if self.options.run.non_finite == "stop" or state.skipped >= MOST_SKIPPED:
            raise NonFiniteError(error.loss, error.grad_norm, error.tokens, message) from None
        if self.world.main:
            warnings.warn(f"skipped: {message}", stacklevel=3)

    def checkpoint(self, state: TrainState) -> Checkpoint:
        """Return the part of a checkpoint besides tensors."""
        scale = None if self.precision.scale is None else self.precision.scale.state_dict()
        schedule = {k: v for k, v in self.schedule.state_dict().items() if k != "lr_lambdas"}
        groups, own = self.optimizer.state_dict()["param_groups"], self.system.fingerprint
        products = processor_name(), matmul_precision() or "highest"
        return Checkpoint(state, self.world.size, groups, schedule, own, scale, products)

    def restore(self, found: Checkpoint) -> None:
        """Resume from a checkpoint whose tensors have been restored."""
        self.schedule.load_state_dict({"lr_lambdas": [None], **found.schedule})
        if self.precision.scale is not None and found.scale is not None:
            self.precision.scale.load_state_dict(found.scale)
        machine, products = found.products
        if machine == processor_name() and self.precision.device.type == "cpu":
            torch.set_float32_matmul_precision(products)  # elsewhere it is measured again


def replay_update(path: Path) -> tuple[float, float]:
    """Recompute an update from a run's folder ``non_finite``; return its loss and gradient norm.

    The result is bit-exact for a single-process run on a CPU with as many threads, unless it was
    compiled; a GPU's random state is that after the update. The precision of products is set to the
    run's. A ``--precision`` that this machine does not support becomes float32, with a warning.

    Raises:
        CheckpointError: It is damaged, or not in the folder of a run.
    """
    tensors, data = checkpoints.load_tensors(path)
    system = checkpoints.load_system(path.parent.parent, weights=None)
    checkpoints.load_model(system.model, tensors, path)
    try:
        optim, scale = Options().replace(**data["options"]).optim, float(data["scale"])
        torch.set_rng_state(tensors["random.0"])
        torch.set_float32_matmul_precision(data.get("products", "highest"))
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise checkpoints.damaged_error(path, error) from None
    try:
        precision = Precision(optim.precision)
    except ValueError as error:
        warnings.warn(f"{error}; using float32 instead", stacklevel=2)
        precision = Precision()
    loss_of, total = PreciseLoss(system.model.train(), precision), 0.0
    for k in range(sum(name.endswith(".src") for name in tensors)):
        batch = Batch(tensors[f"batch.{k}.src"], tensors[f"batch.{k}.tgt"])
        loss, _ = loss_of(batch, optim.smoothing, data["tokens"])
        (loss * scale).backward()
        total += loss.item()
    return total, grad_norm(system.model.parameters()) / scale
