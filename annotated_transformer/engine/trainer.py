"""A training run, from its start or from where it stopped, to the last update."""

import math
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from annotated_transformer.data.prepared import Prepared
from annotated_transformer.data.shards import TokenPairs
from annotated_transformer.engine import checkpoints
from annotated_transformer.engine.checkpointer import Checkpointer, SaveClock, checkpoint_paths
from annotated_transformer.engine.config import Options, UsageError, check_options, option_flag
from annotated_transformer.engine.interruption import collect_signals
from annotated_transformer.engine.precision import Precision, find_device
from annotated_transformer.engine.records import source_commit
from annotated_transformer.engine.runlog import RunLog, log_line, open_log
from annotated_transformer.engine.state import TrainState, Window
from annotated_transformer.engine.system import System, fresh_model, model_config
from annotated_transformer.engine.texts import (
    Texts,
    encode_corpus,
    learn_tokenizers,
    updates_to_come,
)
from annotated_transformer.engine.tuning import load_start
from annotated_transformer.engine.updater import Updater, prefetch_items
from annotated_transformer.engine.validator import Validator
from annotated_transformer.training.distributed import DistributedWorld
from annotated_transformer.training.loop import NonFiniteError

NEVER = "all {} updates failed: the weights are still the initial ones"
SELDOM = "{} of {} updates changed nothing, because gradients overflowed; try --precision bfloat16"
KEPT = {"checksums": "another text", "valid": "other validation text", "finetuned": "other weights"}


class Trainer:
    """A run in a folder, which is started or resumed.

    Args:
        options: The options of the run.
        folder: The folder of the run, with its checkpoints.
        texts: Training and validation text, or a prepared corpus with both.
        world: The processes of distributed training.
        compiler: Backend of ``torch.compile``, if the options ask for compilation.

    Attributes:
        system: The model with its tokenizers.
        state: The progress of the run.
        stopped: The signal that ended the run early, if any.

    Raises:
        UsageError: The options are invalid, or the folder has a run with different ones.
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
        check_options(options)
        check_world(options, world)
        self.options, self.folder = options, Path(folder)
        self.texts = texts if options.optim.eval_bleu else None
        self.world = world = DistributedWorld() if world is None else world
        self.state = TrainState(source_commit())
        self.stopped: int | None = None
        precision = choose_precision(options, world)
        self.files = files = Checkpointer(self.folder, world, options.run.keep)
        try:
            opened = world.main_first(lambda: open_run(options, texts, files))
            self.system, self.pairs, valid = opened
            self.updater = Updater(
                self.system, self.pairs, options, world, precision, self.folder, compiler
            )
            self.validator = Validator(valid, options.optim.max_tokens, world, precision)
            found = world.main_first(lambda: files.restore(self.system, self.updater.optimizer))
        except BaseException:
            self.files.release()
            raise
        if found is not None:
            self.updater.restore(found)
            self.state = found.state

    def train(self, *, progress: bool = True) -> bool:
        """Train to the last update; return false if interrupted earlier, after saving.

        Raises:
            NonFiniteError: A loss or gradient is NaN or infinite and should not be skipped.
        """
        self.files.lock()
        optim, state, main, self.stopped = self.options.optim, self.state, self.world.main, None
        try:
            self.files.begin(state.updates)
            opened = open_log(self.folder, self.options, state, main=main, progress=progress)
            with opened as log, collect_signals() as stop:
                finished = state.out_of_patience(optim.patience) or self._updates(log, stop)
            if finished and stop:  # it came at the end; the same command averages
                self.stopped, finished = stop[0], False
            if finished and optim.average and main:
                by_bleu = optim.best_metric == "bleu"
                self.validator.average(self.folder, texts=self.texts if by_bleu else None)
        finally:
            self.files.release()
        return finished

    def _updates(self, log: RunLog, stop: list[int]) -> bool:
        """Make the remaining updates, with logging, validation and saving between them."""
        optim, run, state = self.options.optim, self.options.run, self.state
        clock, goal = SaveClock(run.save_every), state.updates + (run.steps or optim.updates)
        begun, gpu = (state.epoch, state.epoch_start), self.updater.precision.device.type != "cpu"
        coming = updates_to_come(self.pairs, optim, state.updates, begun)
        make = self.updater.batches
        for (epoch, left, groups), batches in prefetch_items(coming, lambda x: make(x[2]), gpu):
            if epoch != state.epoch:
                state.epoch, state.epoch_start = epoch, state.updates
            self.updater.make_update(state, groups, batches)
            log.show(state)
            last = state.updates == optim.updates
            if last or state.is_due(optim.validate_every, ended=not left):
                self.validate(log)
                last = last or state.out_of_patience(optim.patience)
            if last or state.updates % run.log_every == 0:
                log.write(state, **log_line(state.window, self.updater.peak))
                state.window = Window()
            if optim.average and (last or state.is_due(optim.average_every, ended=not left)):
                self.files.snapshot(self.system, state.updates, optim.average)
            pauses = state.updates == goal
            stops, due = self.world.sum(len(stop[:1]), self.world.main and clock.due())
            if last or not left or stops or due or pauses:
                clock.measure(self.save)
            if (stops or pauses) and not last:
                self.stopped = (stop[0] if stop else signal.SIGTERM) if stops else None
                return False
            if last:
                break
        check_learned(state, warn=self.world.main)
        return True

    def save(self) -> None:
        """Write everything needed to resume; all processes must call this."""
        self.files.save(self.system, self.updater.optimizer, self.updater.checkpoint(self.state))

    def validate(self, log: RunLog) -> None:
        """Measure and log the validation loss, and BLEU; save the weights if they are the best."""
        found, bleu = self.validator.measure_all(self.updater.replica, self.system, self.texts)
        if self.state.validated(found, bleu, self.options.optim.best_metric):
            data = {"valid_loss": found.loss, "valid_bleu": bleu, "update": self.state.updates}
            path, main = self.folder / checkpoints.WEIGHTS, self.world.main
            checkpoints.save_weights(self.system, path, write=main, **data)
        log.write(self.state, valid_loss=found.loss, valid_bleu=bleu)


def check_learned(state: TrainState, *, warn: bool) -> None:
    """Raise NonFiniteError if no update changed the weights; warn if less than half of them did."""
    if not state.learned:
        raise NonFiniteError(math.nan, math.nan, state.tokens, NEVER.format(state.updates))
    if warn and 2 * state.learned < state.updates:
        warnings.warn(SELDOM.format(state.updates - state.learned, state.updates), stacklevel=2)


def check_world(options: Options, world: DistributedWorld | None) -> None:
    """Raise UsageError for sharding with a single process or a compiled model."""
    size = 1 if world is None else world.size
    if options.run.sharded and (size == 1 or options.run.compile):
        raise UsageError("--sharded: needs several processes (use torchrun) and no --compile")


def choose_precision(options: Options, world: DistributedWorld) -> Precision:
    """Return the precision and device to compute in; raise UsageError if not available."""
    name, device = options.run.device, world.device
    if name not in ("auto", device.type):
        device = torch.device(find_device(name))
        if world.size > 1:
            raise UsageError(f"--device {name}: several processes must run on {world.device.type}")
    try:
        return Precision(options.optim.precision, device)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def open_run(
    options: Options, texts: Texts, files: Checkpointer
) -> tuple[System, TokenPairs, TokenPairs]:
    """Load the system of a run from its folder, or create a new one there.

    The main process goes first; the others load what it has written.

    Returns:
        The system with its initial weights, the training text and the validation text.

    Raises:
        UsageError: The options are invalid, or the folder has a run with different ones.
        FileError: A file is damaged or cannot be written, or a sentence is too long.
    """
    folder, main = files.folder, files.world.main
    if folder.exists():
        files.lock()
    begun = not main or files.has_begun()
    system = find_system(options, texts, folder if begun else None)
    train, valid = encode_corpus(texts, system.tokenizers, options.data)
    most = int(train.lengths().max())  # special symbols included
    limits = {"max_tokens": options.optim.max_tokens, "max_len": options.data.max_len}
    for name, limit in limits.items():
        if most > limit:
            raise UsageError(
                f"{option_flag(name)} {limit}: a sentence has {most} tokens; raise the limit"
            )
    files.lock()
    if main:
        if not begun and files.has_begun():  # while the folder was not locked
            raise UsageError(f"{folder}: another process has started a run there; try again")
        checkpoints.save_description(system, folder)
    return system, train, valid


def find_system(options: Options, texts: Texts, folder: Path | None) -> System:
    """Return a system with initial weights: a new one, or that of the run in ``folder``."""
    text = texts if isinstance(texts, Prepared) else texts[0]

    def digests(text: Any) -> dict[str, str]:  # files of one name have theirs together
        return {x: " ".join(d for n, d in text.checksums if n == x) for x, _ in text.checksums}

    described = {"options": options.described(), "checksums": digests(text)}
    if not isinstance(texts, Prepared):
        described["valid"] = digests(texts[1])
    before = None if options.optim.finetune_from is None else load_start(options, text)
    if before is not None:
        described["finetuned"] = before.training["finetuned"]
    if folder is None:
        tokenizers = learn_tokenizers(text, options.data) if before is None else before.tokenizers
        config = model_config(options, tokenizers[0] is tokenizers[1])
        languages = text.languages
    else:
        begun = checkpoints.load_system(folder, weights=None)
        tokenizers, config, languages = begun.tokenizers, begun.config, begun.languages
        done = max((int(path.stem) for path in checkpoint_paths(folder)), default=0)
        check_same(begun.training, described, folder, done)
        if config.max_len < options.data.max_len:  # the texts are made for the latter
            raise checkpoints.damaged_error(folder / "config.json", f"max_len is {config.max_len}")
    model = fresh_model(tokenizers, config, options.optim.seed)
    if before is not None:
        weights, place = checkpoints.weights_of(before.model), str(options.optim.finetune_from)
        checkpoints.load_weights(model, weights, place)
    return System(model, config, languages, tokenizers, described)


def check_same(before: dict[str, Any], now: dict[str, Any], folder: Path, done: int) -> None:
    """Raise UsageError if a folder's run was started with other options or another text.

    The number of updates may change to any number above ``done``, because no update depends on how
    many follow; but what was measured and stored at an earlier end stays.
    """
    # An older version had fewer options and behaved like their present defaults.
    old, new = {**Options().described(), **before.get("options", {})}, now["options"]
    first = ("architecture", "corpus", "preset")  # these change the defaults of others
    for name in (*first, *sorted((old.keys() | new.keys()).difference(first))):
        if name == "updates" and new[name] > done:  # with as many, its end would be missing
            continue
        if old.get(name) != new.get(name):
            was, now_is = ("unset" if o.get(name) is None else o[name] for o in (old, new))
            how = f"with {option_flag(name)} {was}, not {now_is}"
            if isinstance(now_is, bool):
                how = f"{'without' if now_is else 'with'} {option_flag(name)}"
            words = "give the same options to resume it, or choose another folder with --out"
            raise UsageError(f"{folder}: its run was started {how}; {words}")
    known = {"valid": now.get("valid"), **before}  # an older version did not note it
    for name, what in KEPT.items():
        if repr(known.get(name)) != repr(now.get(name)):  # the order of files counts
            option = "--finetune-from " * (name == "finetuned")
            words = f"give the same {option}to resume it, or choose another folder with --out"
            raise UsageError(f"{folder}: its run was started with {what}; {words}")
