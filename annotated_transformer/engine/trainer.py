"""A run: it begins, or goes on where it stopped, to the last update."""

from __future__ import annotations

import math
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from annotated_transformer.engine.checkpointer import Checkpointer, SaveClock
from annotated_transformer.engine.checkpoints import (
    AVERAGED,
    WEIGHTS,
    average_snapshots,
    run_tensors,
    save_weights,
)
from annotated_transformer.engine.config import Options, UsageError, check
from annotated_transformer.engine.interruption import interruption
from annotated_transformer.engine.learner import Learner
from annotated_transformer.engine.precision import DynamicLossScale, Precision
from annotated_transformer.engine.records import commit
from annotated_transformer.engine.replay import keep_update
from annotated_transformer.engine.runlog import RunLog, device_peak, log_line, update_flops
from annotated_transformer.engine.setup import choose_device, open_run
from annotated_transformer.engine.state import TrainState, Window
from annotated_transformer.engine.texts import Texts, lengths_of, lines_of, updates_to_come
from annotated_transformer.engine.validator import Validator
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.distributed import DistributedWorld, local_batches
from annotated_transformer.training.loop import NonFiniteError, Progress

MOST_SKIPPED = 10  # updates in a row that could not be made: then it is the weights


class Trainer:
    """A run in a folder: begins, or goes on where it stopped.

    Args:
        options: What to train.
        folder: Where checkpoints go.
        texts: Training and validation text, or a prepared corpus that has both.
        world: The processes that train together.
        compiler: Backend of ``torch.compile``, where the options want it compiled.

    Attributes:
        system: The model with its tokenizers.
        state: How far the run is.
        stopped: The signal that ended it early, if one did.

    Raises:
        UsageError: The options cannot work, or the folder holds a run with others.
        FileError: The folder's files are damaged, or it cannot be written.
        CorpusError: A sentence is too long.
    """

    def __init__(
        self,
        options: Options,
        folder: str | Path,
        texts: Texts,
        world: DistributedWorld | None = None,
        *,
        compiler: str | Callable[..., Any] = "inductor",
    ) -> None:
        check(options)
        self.options, self.folder = options, Path(folder)
        self.world = world = DistributedWorld() if world is None else world
        self.state = TrainState(commit())
        self.stopped: int | None = None
        device = choose_device(options, world)
        try:
            precision = Precision(options.optim.precision, device)
        except ValueError as error:
            raise UsageError(f"--{error}") from None
        self.files = Checkpointer(self.folder, world, options.run.keep)
        try:
            opened = world.main_first(lambda: open_run(options, texts, self.files))
            self.system, self.pairs, valid = opened
            self.learner = Learner(self.system, options, world, precision, compiler)
            self.validator = Validator(valid, options.optim.max_tokens, world, precision)
            optimizer = self.learner.optimizer
            found = world.main_first(lambda: self.files.restore(self.system, optimizer))
        except BaseException:
            self.files.release()
            raise
        if found is not None:
            self.learner.go_on(found)
            self.state = found.state

    def train(self, *, progress: bool = True) -> bool:
        """Train until the last update; return false if interrupted before, with all saved.

        Args:
            progress: Show a progress bar.

        Raises:
            NonFiniteError: A loss or gradient is NaN or infinite, and is not to be skipped.
        """
        self.files.hold()
        self.files.begin()
        options, main = self.options, self.world.main
        log = RunLog(
            self.folder,
            options.run,
            self.state,
            options.optim.updates,
            main=main,
            progress=progress,
        )
        try:
            with log, interruption() as stop:
                finished = self._updates(log, stop)
            if finished and options.optim.average and main:
                self.average()
        finally:
            self.files.release()
        return finished

    def _updates(self, log: RunLog, stop: list[int]) -> bool:
        """Make the updates that are left, and what comes between them."""
        optim, run, state = self.options.optim, self.options.run, self.state
        clock, goal = SaveClock(run.save_every), state.updates + (run.steps or optim.updates)
        begun = (state.epoch, state.epoch_start)
        for epoch, left, groups in updates_to_come(self.pairs, optim, state.updates, begun):
            if epoch != state.epoch:
                state.epoch, state.epoch_start = epoch, state.updates
            self._update(groups)
            log.show(state)
            last, every = state.updates == optim.updates, optim.average_every
            if last or state.updates % run.log_every == 0:
                log.write(state, **log_line(state.window, self.peak))
                state.window = Window()
            if last or not left:
                self.validate(log)
            if optim.average and (last or (not left if not every else not state.updates % every)):
                self.files.snapshot(self.system, state.updates, optim.average)
            pauses = state.updates == goal
            stops, due = self.world.sum(len(stop[:1]), self.world.main and clock.due())
            if last or not left or stops or due or pauses:
                clock.measure(self.save)
            if (stops or pauses) and not last:
                self.stopped = (stop[0] if stop else signal.SIGTERM) if stops else None
                return False
        if not state.learned:
            message = (
                f"none of {state.updates} updates could be made: the weights are the first ones"
            )
            raise NonFiniteError(math.nan, math.nan, state.tokens, message)
        return True

    def batch(self, numbers: Tensor) -> Batch:
        """Make a batch of training pairs, on the device of this process."""
        return self.pairs.batch(numbers).to(self.learner.precision.device)

    def _update(self, groups: Sequence[Tensor]) -> None:
        """Make the next update from the pairs with these numbers."""
        state, learner = self.state, self.learner
        rate, random = learner.rate, torch.get_rng_state()
        failed = None
        try:
            made = learner.update(local_batches(groups, self.batch, self.world))
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
            self._not_finite(failed, groups)
        vocabulary, lengths = len(self.system.tokenizers[1]), lengths_of(self.pairs, groups)
        state.add(made, update_flops(self.system.config, vocabulary, lengths), rate)

    def _not_finite(self, error: NonFiniteError, groups: Sequence[Tensor]) -> None:
        """Keep what is needed to see it again; raise the error, or say that it was skipped."""
        state, main = self.state, self.world.main
        path = self.folder / "non_finite" / f"{state.updates + 1:08d}.safetensors"
        lines = lines_of(self.pairs, groups)
        tensors = run_tensors(self.system.model, self.learner.optimizer, self.world)
        if main:
            batches, scale = [self.pairs.batch(group) for group in groups], self.learner.factor
            described = self.options.described()
            data = {"lines": lines, "options": described, "tokens": error.tokens, "scale": scale}
            keep_update(path, tensors, batches, **data)
        some = ", ".join(map(str, lines[:8])) + (", ..." if len(lines) > 8 else "")
        place = f"update {state.updates + 1}, epoch {state.epoch + 1}, lines {some}"
        message = f"{place}: {error}; kept in {path}"
        if self.options.run.non_finite == "stop" or state.skipped >= MOST_SKIPPED:
            raise NonFiniteError(error.loss, error.grad_norm, error.tokens, message) from None
        if main:
            warnings.warn(f"left out: {message}", stacklevel=3)

    @property
    def peak(self) -> float | None:
        """What all devices together can do, in operations a second, where that is known."""
        precision = self.learner.precision
        return device_peak(precision.device, precision.name, self.world.size)

    def save(self) -> None:
        """Write all that is needed to go on; all processes take part."""
        checkpoint = self.learner.checkpoint(self.state)
        self.files.save(self.system, self.learner.optimizer, checkpoint)

    def measure(self) -> Progress:
        """Return the loss of the model on the validation text; all processes take part."""
        return self.validator.measure(self.learner.replica)

    def validate(self, log: RunLog) -> None:
        """Measure the validation loss, add it to curve and log, keep the best weights."""
        found = self.measure()
        if self.state.validated(found):
            path, update = self.folder / WEIGHTS, self.state.updates
            self.files.save_weights(path, self.system, valid_loss=found.loss, update=update)
        log.write(self.state, valid_loss=found.loss)

    def average(self, last: int | None = None) -> float:
        """Write the mean of the last snapshots; return its validation loss (§6.1).

        The model of the run is not touched. The main process can do it alone.

        Args:
            last: How many; all that were kept unless given.
        """
        system, names = average_snapshots(self.folder, last)
        loss = self.validator.measure_alone(system.model).loss
        save_weights(system, self.folder, AVERAGED, checkpoints=names, valid_loss=loss)
        return loss
