"""A run: it begins, or goes on where it stopped, to the last update."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from annotated_transformer.engine.checkpointer import Checkpointer, SaveClock
from annotated_transformer.engine.checkpoints import WEIGHTS
from annotated_transformer.engine.config import Options, check
from annotated_transformer.engine.interruption import interruption
from annotated_transformer.engine.learner import Learner
from annotated_transformer.engine.records import commit
from annotated_transformer.engine.runlog import RunLog, log_line, open_log
from annotated_transformer.engine.setup import choose_precision, open_run
from annotated_transformer.engine.state import TrainState, Window
from annotated_transformer.engine.texts import Texts, updates_to_come
from annotated_transformer.engine.updater import Updater
from annotated_transformer.engine.validator import Validator
from annotated_transformer.training.distributed import DistributedWorld
from annotated_transformer.training.loop import NonFiniteError


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
        FileError: A file is damaged or cannot be written, or a sentence is too long.
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
        precision = choose_precision(options, world)
        self.files = Checkpointer(self.folder, world, options.run.keep)
        try:
            opened = world.main_first(lambda: open_run(options, texts, self.files))
            self.system, self.pairs, valid = opened
            self.learner = Learner(self.system, options, world, precision, compiler)
            self.updater = Updater(self.learner, self.pairs, options, self.folder)
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

        Raises:
            NonFiniteError: A loss or gradient is NaN or infinite, and is not to be skipped.
        """
        self.files.hold()
        options, main = self.options, self.world.main
        try:
            self.files.begin(self.state.updates)
            with (
                open_log(self.folder, options, self.state, main=main, progress=progress) as log,
                interruption() as stop,
            ):
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
            self.updater.make(state, groups)
            log.show(state)
            last, every = state.updates == optim.updates, optim.average_every
            if last or state.updates % run.log_every == 0:
                log.write(state, **log_line(state.window, self.learner.peak))
                state.window = Window()
            if last or not left:
                self.validate(log)
            ended = not left if every is None else not state.updates % every
            if optim.average and (last or ended):
                self.files.snapshot(self.system, state.updates, optim.average)
            pauses = state.updates == goal
            stops, due = self.world.sum(len(stop[:1]), self.world.main and clock.due())
            if last or not left or stops or due or pauses:
                clock.measure(self.save)
            if (stops or pauses) and not last:
                self.stopped = (stop[0] if stop else signal.SIGTERM) if stops else None
                return False
        if not state.learned:
            words = f"none of {state.updates} updates could be made: the weights are the first ones"
            raise NonFiniteError(math.nan, math.nan, state.tokens, words)
        return True

    def save(self) -> None:
        """Write all that is needed to go on; all processes take part."""
        checkpoint = self.learner.checkpoint(self.state)
        self.files.save(self.system, self.learner.optimizer, checkpoint)

    def validate(self, log: RunLog) -> None:
        """Measure the validation loss, add it to curve and log, keep the best weights."""
        found = self.validator.measure(self.learner.replica)
        if self.state.validated(found):
            path, update = self.folder / WEIGHTS, self.state.updates
            self.files.save_weights(path, self.system, valid_loss=found.loss, update=update)
        log.write(self.state, valid_loss=found.loss)

    def average(self, last: int | None = None) -> float:
        """Write the mean of the last snapshots, all unless given; return its validation loss."""
        return self.validator.average(self.folder, last)
