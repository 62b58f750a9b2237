"""What makes the updates of a run: loss, optimizer, schedule, in one process or in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from annotated_transformer.engine.config import Options, UsageError
from annotated_transformer.engine.devices import peak_flops
from annotated_transformer.engine.precision import PreciseLoss, Precision
from annotated_transformer.engine.records import processor
from annotated_transformer.engine.state import Checkpoint, TrainState
from annotated_transformer.engine.system import System
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.distributed import (
    DistributedWorld,
    replica_loss,
    replicate,
    shard,
)
from annotated_transformer.training.loop import Progress, update
from annotated_transformer.training.optimizer import make_adam, noam_schedule


class Learner:
    """A model with all that changes its weights, on the device of the precision.

    Attributes:
        replica: The loss of the model, connected with those of other processes.
        factor: What the loss of the latest update was multiplied by, in float16.

    Raises:
        UsageError: The options do not go together.
    """

    def __init__(
        self,
        system: System,
        options: Options,
        world: DistributedWorld,
        precision: Precision,
        compiler: str | Callable[..., Any] = "inductor",
    ) -> None:
        self.system, self.optim = system, options.optim
        self.world, self.precision, self.factor = world, precision, 1.0
        model, run = system.model.to(precision.device), options.run
        if world.rank:  # each process drops out elements of its own
            torch.manual_seed(self.optim.seed + 1_000_003 * world.rank)
        loss = PreciseLoss(model, precision, compiler if run.compile else None)
        if run.sharded and (world.size == 1 or run.compile):
            raise UsageError("--sharded: for several processes (start with torchrun), not compiled")
        self.replica = shard(loss, loss.layers, world) if run.sharded else replicate(loss, world)
        self.optimizer = make_adam(model)
        width, warmup = system.config.width, self.optim.warmup
        factor = 1.0 if self.optim.peak is None else self.optim.peak * (width * warmup) ** 0.5
        self.schedule = noam_schedule(self.optimizer, width, factor, warmup)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a first one may be skipped
        if precision.device.type == "cpu":  # the main process has measured what is fast
            levels = ("highest", "high", "medium")
            own = levels.index(torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision(levels[int(world.sum(own * world.main)[0])])

    @property
    def peak(self) -> float | None:
        """What all devices together can do, in operations a second, where that is known."""
        if self.precision.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.precision.device)
        one = peak_flops(name, self.precision.name)
        return None if one is None else one * self.world.size

    @property
    def rate(self) -> float:
        """The learning rate of the next update."""
        return float(self.schedule.get_last_lr()[0])

    def update(self, batches: Sequence[Batch]) -> Progress:
        """Make an update; see ``training.loop.update``.

        Raises:
            NonFiniteError: The loss is NaN or infinite, or the gradient is, without a loss scale.
        """
        self.replica.train()
        scale = self.precision.scale
        self.factor = 1.0 if scale is None else scale.value
        return update(
            self.replica, batches, self.optimizer, self.schedule, self.optim.smoothing,
            clip=self.optim.clip, loss=replica_loss, world=self.world, scale=scale,
        )  # fmt: skip

    def checkpoint(self, state: TrainState) -> Checkpoint:
        """Return what a checkpoint holds beside tensors."""
        scale, schedule = self.precision.scale, self.schedule.state_dict()
        return Checkpoint(
            state,
            self.world.size,
            self.optimizer.state_dict()["param_groups"],
            {name: value for name, value in schedule.items() if name != "lr_lambdas"},
            self.system.fingerprint,
            None if scale is None else scale.state_dict(),
            (processor(), torch.get_float32_matmul_precision()),
        )

    def go_on(self, found: Checkpoint) -> None:
        """Go on from a checkpoint, whose tensors were put back."""
        self.schedule.load_state_dict({"lr_lambdas": [None], **found.schedule})
        if self.precision.scale is not None and found.scale is not None:
            self.precision.scale.load_state_dict(found.scale)
        machine, products = found.products
        if machine == processor() and self.precision.device.type == "cpu":
            torch.set_float32_matmul_precision(products)  # elsewhere, it is measured again
