"""The updates of a run, one by one; those that cannot be made are kept, to be seen again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from annotated_transformer.data.shards import TokenPairs
from annotated_transformer.engine.checkpoints import run_tensors, save_tensors
from annotated_transformer.engine.config import Options
from annotated_transformer.engine.learner import Learner
from annotated_transformer.engine.precision import DynamicLossScale
from annotated_transformer.engine.runlog import update_flops
from annotated_transformer.engine.state import TrainState
from annotated_transformer.engine.texts import lengths_of, lines_of
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.distributed import local_batches
from annotated_transformer.training.loop import NonFiniteError, Progress

MOST_SKIPPED = 10  # updates in a row that could not be made: then it is the weights


def keep_update(
    path: Path, tensors: Mapping[str, Tensor], batches: Sequence[Batch], **data: Any
) -> None:
    """Write an update into a file, so that ``replay`` can compute it again.

    Args:
        path: A file in the folder ``non_finite`` of a run.
        tensors: Of ``run_tensors``, before the update.
        batches: Its micro-batches, of all processes.
        data: Described ``options``, target ``tokens``, loss ``scale``; and what else helps.
    """
    sources = {f"batch.{k}.src": batch.src for k, batch in enumerate(batches)}
    targets = {f"batch.{k}.tgt": batch.target for k, batch in enumerate(batches)}
    save_tensors(path, {**tensors, **sources, **targets}, data)


class Updater:
    """Makes updates from sentence pairs; those that fail are kept below the run's folder."""

    def __init__(self, learner: Learner, pairs: TokenPairs, options: Options, folder: Path) -> None:
        self.learner, self.pairs, self.options, self.folder = learner, pairs, options, folder

    def batch(self, numbers: Tensor) -> Batch:
        """Make a batch of training pairs, on the device of this process."""
        return self.pairs.batch(numbers).to(self.learner.precision.device)

    def make(self, state: TrainState, groups: Sequence[Tensor]) -> None:
        """Make the next update from the pairs with these numbers, and count it.

        Raises:
            NonFiniteError: Loss or gradient are NaN or infinite, and it is not to be skipped.
        """
        learner = self.learner
        rate, random = learner.rate, torch.get_rng_state()
        failed = None
        try:
            made = learner.update(local_batches(groups, self.batch, learner.world))
            if learner.factor <= DynamicLossScale.least and not math.isfinite(made.grad_norm):
                state.skipped += 1  # an overflow without any scale: the next one will not help
                if state.skipped == MOST_SKIPPED:
                    failed = NonFiniteError(made.loss, made.grad_norm, made.tokens)
            elif math.isfinite(made.grad_norm):
                state.skipped = 0
        except NonFiniteError as error:
            failed, made = error, Progress(grad_norm=math.nan)
            state.skipped += 1
            learner.schedule.step()
        if failed is not None:
            torch.set_rng_state(random)
            self._failed(failed, state, groups)
        system, lengths = learner.system, lengths_of(self.pairs, groups)
        flops = update_flops(system.config, len(system.tokenizers[1]), lengths)
        state.add(made, flops, rate)

    def _failed(self, error: NonFiniteError, state: TrainState, groups: Sequence[Tensor]) -> None:
        """Keep what is needed to see it again; raise the error, or say that it was skipped."""
        learner = self.learner
        path = self.folder / "non_finite" / f"{state.updates + 1:08d}.safetensors"
        lines = lines_of(self.pairs, groups)
        tensors = run_tensors(learner.system.model, learner.optimizer, learner.world)
        if learner.world.main:
            keep_update(
                path,
                tensors,
                [self.pairs.batch(group) for group in groups],
                lines=lines,
                options=self.options.described(),
                tokens=error.tokens,
                scale=learner.factor,
            )
        some = ", ".join(map(str, lines[:8])) + (", ..." if len(lines) > 8 else "")
        place = f"update {state.updates + 1}, epoch {state.epoch + 1}, lines {some}"
        message = f"{place}: {error}; kept in {path}"
        if self.options.run.non_finite == "stop" or state.skipped >= MOST_SKIPPED:
            raise NonFiniteError(error.loss, error.grad_norm, error.tokens, message) from None
        if learner.world.main:
            warnings.warn(f"left out: {message}", stacklevel=3)
