"""A run: it begins, or goes on where it stopped, to the last update."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from annotated_transformer.data.prepared import Prepared
from annotated_transformer.data.shards import TokenPairs
from annotated_transformer.engine.checkpointer import Checkpointer, SaveClock, checkpoint_paths
from annotated_transformer.engine.checkpoints import (
    WEIGHTS,
    load_system,
    save_description,
    save_weights,
)
from annotated_transformer.engine.config import Options, UsageError, check, flag
from annotated_transformer.engine.interruption import interruption
from annotated_transformer.engine.precision import Precision, find_device
from annotated_transformer.engine.records import commit
from annotated_transformer.engine.runlog import RunLog, log_line, open_log
from annotated_transformer.engine.state import TrainState, Window
from annotated_transformer.engine.system import System, fresh_model, model_config
from annotated_transformer.engine.texts import (
    Texts,
    encoded,
    learn_tokenizers,
    longest,
    updates_to_come,
)
from annotated_transformer.engine.updater import Updater, prefetched
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
        check_world(options, world)
        self.options, self.folder = options, Path(folder)
        self.world = world = DistributedWorld() if world is None else world
        self.state = TrainState(commit())
        self.stopped: int | None = None
        precision = choose_precision(options, world)
        self.files = Checkpointer(self.folder, world, options.run.keep)
        try:
            opened = world.main_first(lambda: open_run(options, texts, self.files))
            self.system, self.pairs, valid = opened
            self.updater = Updater(
                self.system, self.pairs, options, world, precision, self.folder, compiler
            )
            self.validator = Validator(valid, options.optim.max_tokens, world, precision)
            optimizer = self.updater.optimizer
            found = world.main_first(lambda: self.files.restore(self.system, optimizer))
        except BaseException:
            self.files.release()
            raise
        if found is not None:
            self.updater.go_on(found)
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
                self.validator.average(self.folder)
        finally:
            self.files.release()
        return finished

    def _updates(self, log: RunLog, stop: list[int]) -> bool:
        """Make the updates that are left, and what comes between them."""
        optim, run, state = self.options.optim, self.options.run, self.state
        clock, goal = SaveClock(run.save_every), state.updates + (run.steps or optim.updates)
        begun, gpu = (state.epoch, state.epoch_start), self.updater.precision.device.type != "cpu"
        coming = updates_to_come(self.pairs, optim, state.updates, begun)
        make = self.updater.batches
        for (epoch, left, groups), batches in prefetched(coming, lambda x: make(x[2]), gpu):
            if epoch != state.epoch:
                state.epoch, state.epoch_start = epoch, state.updates
            self.updater.make(state, groups, batches)
            log.show(state)
            last, every = state.updates == optim.updates, optim.average_every
            if last or state.updates % run.log_every == 0:
                log.write(state, **log_line(state.window, self.updater.peak))
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
        checkpoint = self.updater.checkpoint(self.state)
        self.files.save(self.system, self.updater.optimizer, checkpoint)

    def validate(self, log: RunLog) -> None:
        """Measure the validation loss, add it to curve and log, keep the best weights."""
        found = self.validator.measure(self.updater.replica)
        if self.state.validated(found):
            data = {"valid_loss": found.loss, "update": self.state.updates}
            save_weights(self.system, self.folder / WEIGHTS, write=self.world.main, **data)
        log.write(self.state, valid_loss=found.loss)


def check_world(options: Options, world: DistributedWorld | None) -> None:
    """Refuse shards of the weights where there is one process, or a compiled model."""
    size = 1 if world is None else world.size
    if options.run.sharded and (size == 1 or options.run.compile):
        raise UsageError("--sharded: needs several processes (start with torchrun), no --compile")


def choose_precision(options: Options, world: DistributedWorld) -> Precision:
    """Return in which precision to compute, and where; raise UsageError where it cannot be."""
    name, device = options.run.device, world.device
    if name not in ("auto", device.type):
        device = torch.device(find_device(name))
        if world.size > 1:
            raise UsageError(f"--device {name}: not for several processes on {world.device.type}")
    try:
        return Precision(options.optim.precision, device)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def open_run(
    options: Options, texts: Texts, files: Checkpointer
) -> tuple[System, TokenPairs, TokenPairs]:
    """Find the system of a run in its folder, or put a new one there.

    The main process comes first; the others find what it has left.

    Returns:
        The system with the weights that the run begins with, training text, validation text.

    Raises:
        UsageError: The options cannot work, or the folder holds a run with others.
        FileError: A file is damaged or cannot be written, or a sentence is too long.
    """
    folder, main = files.folder, files.world.main
    if folder.exists():
        files.hold()
    begun = not main or files.has_begun()
    system = find_system(options, texts, folder if begun else None)
    train, valid = encoded(texts, system.tokenizers, options.data)
    most = longest(train)
    limits = {"max_tokens": options.optim.max_tokens, "max_len": options.data.max_len}
    for name, limit in limits.items():
        if most > limit:
            raise UsageError(f"{flag(name)} {limit}: a sentence has {most}; raise the number")
    files.hold()
    if main:
        if not begun and files.has_begun():  # while nobody held the folder
            raise UsageError(f"{folder}: another process has begun a run there; try again")
        save_description(system, folder)
    return system, train, valid


def find_system(options: Options, texts: Texts, folder: Path | None) -> System:
    """Return a system with first weights: a new one, or that of the run in a folder."""
    text = texts if isinstance(texts, Prepared) else texts[0]
    described = {"options": options.described(), "checksums": dict(text.checksums)}
    if folder is None:
        tokenizers = learn_tokenizers(text, options.data)
        config = model_config(options, tokenizers[0] is tokenizers[1])
        model = fresh_model(tokenizers, config, options.optim.seed)
        return System(model, config, text.languages, tokenizers, described)
    system = load_system(folder, weights=None)
    done = max((int(path.stem) for path in checkpoint_paths(folder)), default=0)
    check_same(system.training, described, folder, done)
    system.training = described
    system.model = fresh_model(system.tokenizers, system.config, options.optim.seed)
    return system


def check_same(before: dict[str, Any], now: dict[str, Any], folder: Path, done: int) -> None:
    """Raise UsageError if a folder's run was begun with other options or another text.

    The number of updates may be any from those that were ``done``: no update depends on how
    many follow.
    """
    # An older version knew fewer options: it did what is now their default.
    old, new = {**Options().described(), **before.get("options", {})}, now["options"]
    first = ("architecture", "corpus", "preset")  # they change the defaults of others
    for name in (*first, *sorted((old.keys() | new.keys()).difference(first))):
        if name == "updates" and new[name] >= done:
            continue
        if old.get(name) != new.get(name):
            was, now_is = ("unset" if o.get(name) is None else o[name] for o in (old, new))
            raise UsageError(
                f"{folder}: its run has {flag(name)} {was}, not {now_is}; give the same options "
                "to go on, or another folder with --out"
            )
    if before.get("checksums") != now["checksums"]:
        words = "give the same one to go on, or another folder with --out"
        raise UsageError(f"{folder}: its run has another text; {words}")
