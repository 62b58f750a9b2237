# Written from book/translation/system.md: edit the chapter instead.
"""Train, translate, score."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import platform
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from annotated_transformer import __version__
from annotated_transformer.background.convolutional import ConvolutionConfig
from annotated_transformer.background.seq2seq import RecurrentConfig, Translator
from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.data.files import CorpusError
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.data.shards import TokenPairs
from annotated_transformer.engine.devices import mfu, peak_flops
from annotated_transformer.engine.journal import Journal
from annotated_transformer.model.complexity import training_flops
from annotated_transformer.model.transformer import PRESETS, ModelConfig, count_parameters
from annotated_transformer.training.batches import Batch, token_batches
from annotated_transformer.training.distributed import (
    World,
    evaluate_together,
    own_shares,
    replicate,
    update_together,
)
from annotated_transformer.training.loop import Progress, evaluate
from annotated_transformer.training.optimizer import make_adam, noam_schedule
from annotated_transformer.training.precision import (
    Arithmetic,
    LossOf,
    Name,
    NonFiniteError,
    gradient_norm,
)
from annotated_transformer.translation.beam_search import beam_search, check_search
from annotated_transformer.translation.checkpoints import (
    WEIGHTS,
    Architecture,
    CheckpointError,
    System,
    architecture,
    average_system,
    check_fingerprint,
    keep_last,
    load_newest,
    load_system,
    load_tensors,
    load_weights,
    remove_leftovers,
    restore,
    save_description,
    save_tensors,
    save_training,
    snapshots,
    training_tensors,
    trainings,
    weights,
)
from annotated_transformer.translation.decoding import greedy_search
from annotated_transformer.translation.steps import packed
from annotated_transformer.translation.tokenizers import (
    BPETokenizer,
    Tokenizer,
    TokenizerError,
    WordTokenizer,
)

Ids = list[list[int]]


class UsageError(ValueError):
    """Options that do not go together; the message says what to change."""


@dataclass(frozen=True)
class Training:
    """How a system is trained."""

    corpus: str = "grammar"
    """What to learn from, grammar (embedded, needs no network), multi30k, iwslt2014, iwslt2016,
    iwslt2017, files, or prepared."""
    pair: str = "de-en"
    """Source and target language."""
    model: Literal["transformer", "rnn", "rnn-attention", "rnn-dot", "convolution"] = "transformer"
    """What translates, the Transformer, recurrent networks with one vector for the whole sentence
    (rnn), with additive attention (rnn-attention) or dot products (rnn-dot), or convolutions."""
    preset: Literal["tiny", "base", "big"] = "tiny"
    """Size of the model; base and big are the paper's. The other models have a tiny one only."""
    layers: int | None = None
    """Layers in each stack, if not the preset's."""
    dropout: float | None = None
    """Probability of dropping an element, if not the preset's."""
    norm: Literal["post", "pre"] | None = None
    """Normalise after each residual sum, or before each sub-layer; if not as the preset. For the
    Transformer only."""
    tokenizer: Literal["bpe", "bpe-lower", "words"] = "bpe"
    """Sub-words shared by both languages, as they are or in lower case, or the words of each."""
    vocabulary: int = 10_000
    """Number of sub-words."""
    max_tokens: int = 4096
    """Most source tokens, and most target tokens, of a batch, padding included."""
    accumulate: int = 1
    """Batches that make one update."""
    updates: int = 3000
    """Updates in all."""
    warmup: int = 1000
    """Updates until the learning rate is at its peak."""
    peak: float = 5e-3
    """Highest learning rate."""
    smoothing: float = 0.1
    """Label smoothing."""
    max_len: int = 256
    """Most tokens of a sentence, special ones included."""
    skip_long: bool = False
    """Leave longer sentences out, instead of stopping with an error."""
    seed: int = 0
    """Decides first weights, order and dropout."""
    size: int | None = None
    """Take only so many training pairs."""
    average: int = 0
    """Keep the weights of so many last checkpoints, and average them at the end."""
    average_every: int | None = None
    """Updates between those checkpoints; an epoch unless given."""
    precision: Name = "float32"
    """In which numbers products are computed; tf32 and float16 are for GPUs."""
    clip: float | None = None
    """Greatest length of a gradient; any unless given."""


@dataclass(frozen=True)
class Running:
    """How a training runs, without a change of what is learned from what."""

    save_every: float = 60.0
    """Seconds between checkpoints; more where saving takes long."""
    keep: int = 2
    """How many checkpoints to keep to go on from."""
    log_every: int = 50
    """Updates between the lines of the log."""
    steps: int | None = None
    """Make only so many updates now, and say how long the whole training takes."""
    tensorboard: Path | None = None
    """Folder for TensorBoard, which is to be installed for that."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What to do where a loss is no finite number."""
    compile: bool = False
    """Compile the Transformer, with lengths in buckets; pays on a GPU."""
    pieces: bool = False
    """Let each process hold only a piece of the model (FSDP2), where there are several."""


def paper_recipe(preset: Literal["base", "big"], updates: int, average: int) -> Training:
    """Return the training of the paper: sections 5.1 to 5.4 and 6.1, and Table 3."""
    hours = {"base": 12, "big": 84}[preset]
    return Training(
        corpus="prepared",
        preset=preset,
        vocabulary=37_000,
        max_tokens=3125,  # of each language, on each of eight GPUs
        accumulate=8,
        updates=updates,
        warmup=4000,
        peak=(PRESETS[preset].d_model * 4000) ** -0.5,
        average=average,
        average_every=updates // (6 * hours),  # ten minutes
    )


PAPER = {"base": paper_recipe("base", 100_000, 5), "big": paper_recipe("big", 300_000, 20)}
RECIPES: dict[str, Training] = {
    "grammar": Training(
        corpus="grammar",
        layers=2,
        dropout=0.0,
        vocabulary=1500,
        max_tokens=1024,
        updates=1400,
        warmup=250,
        peak=4e-3,
        average=8,
        average_every=50,
    ),
    "multi30k": Training(
        corpus="multi30k",
        dropout=0.2,
        norm="pre",
        max_tokens=1536,
        updates=8000,
        warmup=300,
        peak=4e-3,
        average=10,
    ),
    **{
        f"iwslt{year}": Training(
            corpus=f"iwslt{year}",
            preset="base",
            dropout=0.3,
            vocabulary=10_000,
            max_tokens=4096,
            updates=50_000,
            warmup=4000,
            peak=7e-4,
            average=10,
        )
        for year in (2014, 2016, 2017)
    },
    "files": Training(corpus="files"),
    "prepared": PAPER["base"],
}


def find_recipe(corpus: str, preset: str = "", model: str = "") -> Training:
    """Return what is chosen where nothing else is said.

    Args:
        corpus: A name; that of the grammar counts for unknown ones.
        preset: Size of the model, if it was given.
        model: Kind of model, if it was given.
    """
    recipe = RECIPES.get(corpus, replace(RECIPES["grammar"], corpus=corpus))
    if corpus == "prepared" and preset == "big":
        recipe = PAPER["big"]
    if model in ("", "transformer"):
        return recipe
    return replace(recipe, preset="tiny", layers=None, norm=None)


def check_options(options: Training) -> None:
    """Raise UsageError for a value that cannot work."""
    if options.corpus == "wmt14":
        raise UsageError("--corpus wmt14: too large for memory; prepare it, then --prepared FOLDER")
    if options.corpus not in RECIPES:
        raise UsageError(f"--corpus {options.corpus}: choose among {', '.join(RECIPES)}")
    positive = (
        "layers vocabulary max_tokens accumulate updates warmup peak max_len size average_every "
        "clip"
    )
    for name in positive.split():
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be greater than 0")
    if options.average < 0:
        raise UsageError(f"--average {options.average}: must be 0 or more")
    for name in ("smoothing", "dropout"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < 1:
            raise UsageError(f"--{name} {value}: must be at least 0 and below 1")
    if options.model != "transformer":
        if options.model not in (*ATTENTION, "convolution"):
            names = ", ".join(("transformer", *ATTENTION, "convolution"))
            raise UsageError(f"--model {options.model}: choose among {names}")
        other_config(options)


def check_running(running: Running) -> None:
    """Raise UsageError for a value that cannot work."""
    for name in ("keep", "log_every", "steps"):
        value = getattr(running, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    if not 0 <= running.save_every < math.inf:
        raise UsageError(f"--save-every {running.save_every}: must be 0 or more")


ATTENTION: Mapping[str, Literal["none", "additive", "dot"]] = {
    "rnn": "none",
    "rnn-attention": "additive",
    "rnn-dot": "dot",
}


def model_config(options: Training, shared: bool) -> Architecture:
    """Return the sizes of the model that the options ask for.

    Args:
        options: What was chosen.
        shared: Whether both languages have one vocabulary, and so one embedding.
    """
    if options.model != "transformer":
        return other_config(options)
    config = PRESETS[options.preset]
    config = replace(config, max_len=options.max_len, tie="all" if shared else "target")
    if options.layers is not None:
        config = replace(config, N=options.layers)
    if options.norm is not None:
        config = replace(config, norm=options.norm)
    return config if options.dropout is None else replace(config, dropout=options.dropout)


def other_config(options: Training) -> Architecture:
    """Return the sizes of a model that is no Transformer."""
    if options.preset != "tiny" or options.norm is not None:
        raise UsageError(f"--model {options.model}: has no --preset but tiny, and no --norm")
    chosen = {"layers": options.layers, "dropout": options.dropout, "max_len": options.max_len}
    sizes: dict[str, Any] = {k: v for k, v in chosen.items() if v is not None}
    if options.model == "convolution":
        return ConvolutionConfig(**sizes)
    return RecurrentConfig(ATTENTION[options.model], **sizes)


def learn_tokenizers(
    text: ParallelText | Prepared, options: Training
) -> tuple[Tokenizer, Tokenizer]:
    """Learn the tokenizers of source and target from a training text, or take what was learned."""
    if isinstance(text, Prepared):
        return text.tokenizer, text.tokenizer
    if options.tokenizer == "words":
        first, second = text.languages
        return WordTokenizer.train(text.source, first), WordTokenizer.train(text.target, second)
    try:
        lines = itertools.chain(text.source, text.target)
        lowercase = options.tokenizer == "bpe-lower"
        shared = BPETokenizer.train(lines, options.vocabulary, lowercase=lowercase)
    except TokenizerError as error:
        raise UsageError(f"--vocabulary {options.vocabulary}: {error}") from None
    return shared, shared


def encode(
    text: ParallelText, tokenizers: tuple[Tokenizer, Tokenizer], options: Training
) -> TokenPairs:
    """Turn sentence pairs into token numbers.

    Raises:
        CorpusError: A sentence is longer than ``max_len``, and is not to be skipped.
    """
    source = [tokenizers[0].encode(line) for line in text.source]
    target = [tokenizers[1].encode(line) for line in text.target]
    limit = options.max_len - 1  # the end symbol needs a place
    keep = []
    for i, pair in enumerate(zip(source, target, strict=True)):
        if max(map(len, pair)) <= limit:
            keep.append(i)
        elif not options.skip_long:
            side = 0 if len(pair[0]) > limit else 1
            raise CorpusError(
                f"{place(text, i, side)}: {len(pair[side])} tokens, more than the {limit} that "
                "fit; raise --max-len, or leave such sentences out with --skip-long"
            )
    if not keep:
        raise CorpusError(f"{text.name} {text.split}: no sentence is left; raise --max-len")
    lines = line_numbers(text)
    return TokenPairs.from_lists(
        [source[i] for i in keep], [target[i] for i in keep], [lines[i] for i in keep]
    )


def longest(text: TokenPairs) -> int:
    """Return the most tokens that a sentence has, special symbols included."""
    return int(text.lengths().max())


def line_numbers(text: ParallelText) -> list[int]:
    """Return the line of each pair in its files, counting the blank ones that were dropped."""
    blank = set(text.blank)
    return [n for n in range(1, len(text) + len(blank) + 1) if n not in blank]


def place(text: ParallelText, index: int, side: int) -> str:
    """Name the file and line of a sentence; of several files, the first."""
    return f"{text.checksums[side][0]}{text.among(side)}, line {line_numbers(text)[index]}"


def updates_to_come(
    text: TokenPairs, options: Training, done: int, begun: Sequence[int] = (0, 0)
) -> Iterator[tuple[int, int, Sequence[Tensor]]]:
    """Yield, for each update after ``done``, its epoch, how many it leaves, its micro-batches.

    Args:
        text: What to learn from.
        options: Seed, size of the batches, number of updates.
        done: How many updates were done.
        begun: An epoch, and how many updates were done before it: what came before need not
            be put in order again.

    Yields:
        A micro-batch is given by the numbers of its pairs.
    """
    first, number = begun
    for epoch in itertools.count(first):
        order = token_batches(text.lengths(), options.max_tokens, seed=options.seed, epoch=epoch)
        starts = range(0, len(order), options.accumulate)
        for start in starts:
            if number >= options.updates:
                return
            number += 1
            if number > done:
                left = (len(order) - 1 - start) // options.accumulate
                yield epoch, left, order[start : start + options.accumulate]


@contextmanager
def interruption() -> Iterator[list[int]]:
    """Collect Ctrl-C and termination in a list, so that an update is never cut in two.

    A signal within a second of the first is the same one, that came by another way: torchrun
    passes on what the terminal has sent to all.

    Raises:
        KeyboardInterrupt: At a later signal.
    """
    caught: list[int] = []
    first = 0.0

    def note(number: int, _: FrameType | None) -> None:
        nonlocal first
        if not caught:
            first = time.monotonic()
        elif time.monotonic() - first > 1:
            raise KeyboardInterrupt
        caught.append(number)

    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(s, note) for s in signals]
    except ValueError:  # not the main thread: a notebook's server, for instance
        yield caught
        return
    try:
        yield caught
    finally:
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)


def keep_update(
    path: Path, tensors: Mapping[str, Tensor], batches: Sequence[Batch], **data: Any
) -> None:
    """Write an update into a file, so that ``replay`` can compute it again.

    Args:
        path: A file in the folder ``non_finite`` of a training.
        tensors: Of ``training_tensors``, before the update.
        batches: Its micro-batches, of all processes.
        data: The options, and the target tokens as ``tokens``; whatever else helps.
    """
    parts = {}
    for k, batch in enumerate(batches):
        parts[f"batch.{k}.src"] = batch.src
        parts[f"batch.{k}.tgt"] = torch.cat([batch.tgt, batch.tgt_y[:, -1:]], dim=1)
    save_tensors(path, {**tensors, **parts}, data)


def replay(path: Path) -> tuple[float, float]:
    """Compute a kept update again, in this process; return its loss and its gradient's length.

    On a processor and for a training of one process, to the bit: the random state of a GPU
    is that after the update.

    Args:
        path: A file in the folder ``non_finite`` of a training.

    Raises:
        CheckpointError: It is damaged, or there is no training around it.
    """
    tensors, data = load_tensors(path)
    system = load_system(path.parent.parent, weights=None)
    own = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    load_weights(system.model, own, path)
    torch.set_rng_state(tensors["random.0"])
    options = Training(**data["options"])
    loss_of, total = LossOf(system.model.train(), Arithmetic(options.precision)), 0.0
    for k in itertools.count():
        if f"batch.{k}.src" not in tensors:
            break
        batch = Batch(tensors[f"batch.{k}.src"], tensors[f"batch.{k}.tgt"])
        loss, _ = loss_of(batch, options.smoothing, data["tokens"])
        loss.backward()
        total += loss.item()
    return total, gradient_norm(system.model.parameters())


def add_up(
    window: dict[str, float], made: Progress, *, flops: int, norm: float, rate: float
) -> None:
    """Add an update to the sums for the next line of the log.

    Args:
        window: The sums; is changed.
        made: What the update came to.
        flops: Its operations.
        norm: Length of its gradient; not finite where the update was left out.
        rate: Its learning rate.
    """
    skipped = int(not math.isfinite(norm))
    for name, value in {**asdict(made), "flops": flops, "skipped": skipped}.items():
        window[name] = window.get(name, 0) + value
    window.update(norm=norm, rate=rate)  # of the latest


def log_line(window: Mapping[str, float], peak: float | None) -> dict[str, float | None]:
    """Return the line that sums come to.

    Args:
        window: Of ``add_up``.
        peak: What all devices together can do, in operations per second, if it is known.
    """
    made = Progress(window["nll"], int(window["tokens"]), window["seconds"])
    flops, seconds = window["flops"], window["seconds"]
    return {
        "loss": made.loss,
        "rate": window["rate"],
        "norm": window["norm"],
        "tokens": made.tokens,
        "seconds": seconds,
        "tokens_per_second": made.speed,
        "flops_per_second": flops / seconds if flops and seconds else None,
        "share_of_peak": mfu(flops, seconds, peak) if flops else None,
        "skipped": window["skipped"],
    }


def fresh_model(
    tokenizers: tuple[Tokenizer, Tokenizer], config: Architecture, seed: int
) -> Translator:
    """Build a model; a seed gives the same weights, and the same random numbers after them."""
    torch.manual_seed(seed)
    return config.build(len(tokenizers[0]), len(tokenizers[1]))


def check_same(before: dict[str, Any], now: dict[str, Any], folder: Path, done: int = 0) -> None:
    """Raise UsageError if a folder's training was begun with other options or another text.

    The number of updates may be any from those that were ``done``: no update depends on how
    many follow.
    """
    # An older version knew fewer options: it did what is now their default.
    old, new = {**asdict(Training()), **before.get("options", {})}, now["options"]
    first = ("model", "corpus", "preset")  # they change the defaults of others
    for name in (*first, *sorted((old.keys() | new.keys()).difference(first))):
        if name == "updates" and new[name] >= done:
            continue
        if old.get(name) != new.get(name):
            was, now_is = ("unset" if o.get(name) is None else o[name] for o in (old, new))
            raise UsageError(
                f"{folder}: its training has --{name.replace('_', '-')} {was}, not "
                f"{now_is}; give the same options to go on, or another folder with --out"
            )
    if before.get("checksums") != now["checksums"]:
        raise UsageError(
            f"{folder}: its training has another text; "
            "give the same one to go on, or another folder with --out"
        )


class SaveClock:
    """Says when the next checkpoint is due, so that saving takes a twentieth of the time at most.

    Args:
        every: Seconds between two checkpoints, where saving is quick.
    """

    def __init__(self, every: float) -> None:
        self.every, self.took = every, 0.0
        self.saved = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self.saved > max(self.every, 20 * self.took)

    def measure(self, save: Callable[[], None]) -> None:
        """Save, and remember how long it took."""
        start = time.monotonic()
        save()
        self.saved = time.monotonic()
        self.took = self.saved - start if self.every else 0.0  # 0: after each update


MOST_SKIPPED = 10  # updates in a row without a finite loss: then it is the weights


class Run:
    """A training in a folder: begins, or goes on where it stopped.

    Args:
        options: What to train.
        folder: Where checkpoints go.
        texts: Training and validation text, or a prepared corpus that has both.
        world: The processes that train together.
        running: How it runs.

    Attributes:
        system: The model with its tokenizers.
        state: Updates and seconds so far, the learning curve, the best validation loss.
        stopped: The signal that ended the training early, if one did.

    Raises:
        UsageError: The options cannot work, or the folder holds a training with others.
        CheckpointError: The folder's files are damaged.
        FileError: The folder cannot be written.
        CorpusError: A sentence is too long.
    """

    def __init__(
        self,
        options: Training,
        folder: Path,
        texts: tuple[ParallelText, ParallelText] | Prepared,
        world: World | None = None,
        running: Running | None = None,
    ) -> None:
        self.options, self.folder = options, folder
        self.world = World() if world is None else world
        self.running = Running() if running is None else running
        check_options(options)
        check_running(self.running)
        if self.running.compile and options.model != "transformer":
            raise UsageError("--compile: for the Transformer only")
        self.state: dict[str, Any] = {"updates": 0, "seconds": 0.0, "curve": [], "best": None}
        self.state["commit"] = commit()
        self.state["epoch"] = (0, 0)  # its number, and the updates before it
        self.state["window"] = {}  # sums since the last line of the log
        self.state["skipped"] = 0  # updates in a row
        self.state["tokens"] = self.state["flops"] = 0  # of all updates
        self.state["update_seconds"] = 0.0  # without validation
        self.recent = Progress()  # since the last point of the curve
        self.stopped: int | None = None
        self.world.main_first(lambda: self._set_up(texts))
        self.lengths = self.train.lengths()  # (pairs, 2)
        self._connect()
        found = self.world.main_first(lambda: load_newest(folder))
        if found is not None:
            self._resume(*found)

    def _set_up(self, texts: tuple[ParallelText, ParallelText] | Prepared) -> None:
        """Encode the texts; find the system in the folder, or put a new one there."""
        if self.world.main:
            for folder in (self.folder, self.folder / "snapshots", self.folder / "training"):
                remove_leftovers(folder)
        resuming = (self.folder / "config.json").exists()
        text = texts if isinstance(texts, Prepared) else texts[0]
        self.system = self._load(text) if resuming else self._begin(text)
        self.train, self.valid = self._encoded(texts)
        most = longest(self.train)
        for name in ("max_tokens", "max_len"):
            if most > (limit := getattr(self.options, name)):
                raise UsageError(
                    f"--{name.replace('_', '-')} {limit}: a sentence has {most}; raise the number"
                )
        if not resuming:
            save_description(self.system, self.folder)

    def _connect(self) -> None:
        """Make what trains the model: its copies or pieces, the optimizer, the schedule."""
        options, world, model = self.options, self.world, self.system.model.to(self.world.device)
        if world.rank:  # each process drops out elements of its own
            torch.manual_seed(options.seed + 1_000_003 * world.rank)
        try:
            self.arithmetic = Arithmetic(options.precision, world.device)
            compiler = "inductor" if self.running.compile else None
            self.replica = replicate(
                model, world, self.arithmetic, compiler=compiler, pieces=self.running.pieces
            )
        except ValueError as error:
            raise UsageError(f"--{error}") from None
        self.optimizer = make_adam(model)
        width = self.system.config.width
        factor = options.peak * (width * options.warmup) ** 0.5  # so that the peak is as asked
        self.schedule = noam_schedule(self.optimizer, width, factor, options.warmup)
        if world.device.type == "cpu":  # the main process has measured what is fast
            levels = ("highest", "high", "medium")
            own = levels.index(torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision(levels[int(world.total(own * world.main)[0])])

    def _encoded(
        self, texts: tuple[ParallelText, ParallelText] | Prepared
    ) -> tuple[TokenPairs, TokenPairs]:
        if isinstance(texts, Prepared):
            return texts.tokens("train", verify=True), texts.tokens("val", verify=True)
        train, valid = (encode(text, self.system.tokenizers, self.options) for text in texts)
        return train, valid

    def _described(self, text: ParallelText | Prepared) -> dict[str, Any]:
        return {"options": asdict(self.options), "checksums": dict(text.checksums)}

    def _begin(self, text: ParallelText | Prepared) -> System:
        tokenizers = learn_tokenizers(text, self.options)
        config = model_config(self.options, tokenizers[0] is tokenizers[1])
        model = fresh_model(tokenizers, config, self.options.seed)
        return System(model, config, text.languages, tokenizers, self._described(text))

    def _load(self, text: ParallelText | Prepared) -> System:
        system = load_system(self.folder, weights=None)
        described = self._described(text)
        done = max((int(path.stem) for path in trainings(self.folder)), default=0)
        check_same(system.training, described, self.folder, done)
        if system.training != described:
            system.training = described
            save_description(system, self.folder)
        system.model = fresh_model(system.tokenizers, system.config, self.options.seed)
        return system

    def _resume(self, path: Path, tensors: Mapping[str, Tensor], data: dict[str, Any]) -> None:
        state = restore(path, tensors, data, self.system.model, self.optimizer, self.world)
        check_fingerprint(self.system, state, path)
        self.schedule.load_state_dict({"lr_lambdas": [None], **state.pop("schedule")})
        self.recent = Progress(**state.pop("recent", {}))
        if self.arithmetic.scale is not None:
            self.arithmetic.scale.load_state_dict(state.pop("scale"))
        machine, precision = state.pop("products", ("", ""))
        if machine == processor() and self.world.device.type == "cpu":
            torch.set_float32_matmul_precision(precision)  # elsewhere, it is measured again
        self.state = {"update_seconds": state["seconds"], **state}  # older files lack it

    def save(self) -> None:
        """Write all that is needed to go on; all processes must take part."""
        schedule = self.schedule.state_dict()
        data = {
            **self.state,
            "schedule": {k: v for k, v in schedule.items() if k != "lr_lambdas"},
            "recent": asdict(self.recent),
            "products": [processor(), torch.get_float32_matmul_precision()],
            "tokenizers": self.system.fingerprint,
        }
        if self.arithmetic.scale is not None:
            data["scale"] = self.arithmetic.scale.state_dict()
        path = self.folder / "training" / f"{self.state['updates']:08d}.safetensors"
        save_training(path, self.system.model, self.optimizer, data, self.world)
        if self.world.main:
            keep_last(self.folder, self.running.keep)

    def go(self, *, progress: bool = True) -> bool:
        """Train until the last update; return false if interrupted before, with all saved.

        Args:
            progress: Show a progress bar.

        Raises:
            NonFiniteError: A loss is no finite number, and is not to be skipped.
        """
        options, state, world = self.options, self.state, self.world
        bar = tqdm(
            total=options.updates,
            initial=state["updates"],
            unit="update",
            disable=not (progress and world.main),
            file=sys.stderr,
        )
        clock = SaveClock(self.running.save_every)
        goal = state["updates"] + (self.running.steps or options.updates)
        with bar, self._journal() as journal, interruption() as stop:
            begun = state["epoch"]
            todo = updates_to_come(self.train, options, state["updates"], begun)
            for epoch, left, groups in todo:
                if epoch != begun[0]:
                    begun = state["epoch"] = (epoch, state["updates"])
                self._update(epoch, groups)
                bar.set_postfix_str(
                    f"epoch {epoch + 1}, loss {self.recent.loss:.3f}, "
                    f"{self.recent.speed:.0f} tokens/s",
                    refresh=False,
                )
                bar.update()
                last = state["updates"] == options.updates
                if last or state["updates"] % self.running.log_every == 0:
                    self._log(journal, epoch)
                if last or not left:
                    self.validate(epoch + 1)
                if last or self.snapshot_due(left):
                    self.snapshot()
                stops, due = world.total(sum(stop[:1]), world.main and clock.due())
                pauses = state["updates"] == goal
                if last or not left or stops or due or pauses:
                    clock.measure(self.save)
                if (stops or pauses) and not last:
                    self.stopped = (stop[0] if stop else signal.SIGTERM) if stops else None
                    return False
        return True

    def batch(self, numbers: Tensor) -> Batch:
        """Make a batch of training pairs, on the device of this process."""
        return self.train.batch(numbers).to(self.world.device)

    def _update(self, epoch: int, groups: Sequence[Tensor]) -> None:
        """Make the next update from the pairs with these numbers."""
        state = self.state
        self.system.model.train()
        rate = float(self.schedule.get_last_lr()[0])
        random = torch.get_rng_state()
        batches = own_shares(groups, self.batch, self.world)
        try:
            made, norm = update_together(
                self.replica, batches, self.optimizer, self.world, self.schedule,
                self.options.smoothing, clip=self.options.clip,
            )  # fmt: skip
            state["skipped"] = 0
        except NonFiniteError as error:
            torch.set_rng_state(random)
            self._not_finite(error, epoch, groups)
            self.schedule.step()
            made, norm = Progress(), math.nan
        self.recent += made
        state["updates"] += 1
        state["seconds"] += made.seconds
        sizes = self.lengths[torch.cat(tuple(groups))]
        vocabulary = len(self.system.tokenizers[1])
        config, flops = self.system.config, 0
        if isinstance(config, ModelConfig):  # of the others there is no count
            flops = training_flops(config, vocabulary, *sizes.T.tolist())
        state["update_seconds"] += made.seconds
        state["tokens"] += made.tokens
        state["flops"] += flops
        add_up(state["window"], made, flops=flops, norm=norm, rate=rate)

    def _not_finite(self, error: NonFiniteError, epoch: int, groups: Sequence[Tensor]) -> None:
        """Keep what is needed to see it again; raise the error, or say that it was skipped."""
        number = self.state["updates"] + 1
        path = self.folder / "non_finite" / f"{number:08d}.safetensors"
        tensors = training_tensors(self.system.model, self.optimizer, self.world)
        known, numbers = self.train.lines, torch.cat(tuple(groups)).tolist()
        lines = sorted(known[i] if known else i + 1 for i in numbers)
        if self.world.main:
            batches = [self.train.batch(group) for group in groups]
            options, tokens = asdict(self.options), error.tokens
            keep_update(path, tensors, batches, lines=lines, options=options, tokens=tokens)
        some = ", ".join(map(str, lines[:8])) + (", ..." if len(lines) > 8 else "")
        told = f"update {number}, epoch {epoch + 1}, lines {some}: {error}; kept in {path}"
        self.state["skipped"] += 1
        if self.running.non_finite == "stop" or self.state["skipped"] == MOST_SKIPPED:
            raise NonFiniteError(error.loss, error.norm, error.tokens, told) from None
        if self.world.main:
            warnings.warn(f"left out: {told}", stacklevel=2)

    def _journal(self) -> contextlib.AbstractContextManager[Journal | None]:
        """Open the log, without what came after the checkpoint; only in the main process."""
        if not self.world.main:
            return contextlib.nullcontext()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            journal = Journal(self.folder / "log.jsonl", self.running.tensorboard)
        except ImportError as error:
            raise UsageError(f"--tensorboard: {error}") from None
        journal.rewind(self.state["updates"])
        return journal

    def _log(self, journal: Journal | None, epoch: int) -> None:
        """Write a line of the log, and begin to sum up anew."""
        window, self.state["window"] = self.state["window"], {}
        if journal is None:
            return
        cuda = self.world.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated() if cuda else None
        try:
            journal.write(
                self.state["updates"],
                epoch=epoch + 1,
                **log_line(window, self.peak),
                memory=memory,
            )
        except OSError as error:
            raise CheckpointError(
                f"{journal.path}: cannot be written: {error.strerror or error}; free some space"
            ) from None

    @property
    def peak(self) -> float | None:
        """What all devices together can do, in operations per second, where that is known."""
        if self.world.device.type != "cuda":
            return None
        one = peak_flops(torch.cuda.get_device_name(), self.options.precision)
        return None if one is None else one * self.world.size

    def snapshot_due(self, left: int) -> bool:
        """Say whether weights are to be kept now; ``left`` updates remain of the epoch."""
        every = self.options.average_every
        return not left if every is None else self.state["updates"] % every == 0

    def snapshot(self) -> None:
        """Keep these weights for the average, and drop those that are too old for it."""
        if not self.options.average:
            return
        number = self.state["updates"]
        self._save_weights(self.folder / "snapshots" / f"{number:08d}.safetensors")
        for old in snapshots(self.folder)[: -self.options.average] if self.world.main else ():
            old.unlink()

    def _save_weights(self, path: Path, **data: Any) -> None:
        """Write the weights; all processes must take part."""
        tensors = weights(self.system.model)
        if self.world.main:
            header = {**data, "update": self.state["updates"]}
            save_tensors(path, tensors, {**header, "tokenizers": self.system.fingerprint})

    def average(self, last: int | None = None) -> float:
        """Write the mean of the last checkpoints; return its validation loss (section 6.1).

        The model of the training is not touched. The main process can do it alone.

        Args:
            last: How many; all that were kept unless given.
        """
        model = average_system(self.folder, last).model
        return evaluate(model, map(self.valid.batch, self._valid_order())).loss

    def _valid_order(self) -> Sequence[Tensor]:
        most = max(self.options.max_tokens, longest(self.valid))
        return token_batches(self.valid.lengths(), most, shuffle=False)

    def measure(self) -> Progress:
        """Measure the loss of the model on the validation text; all processes take part."""
        return evaluate_together(
            self.replica,
            self._valid_order(),
            lambda numbers: self.valid.batch(numbers).to(self.world.device),
            self.world,
        )

    def validate(self, epoch: int) -> None:
        """Measure the validation loss, add it to the curve, keep the best weights."""
        result = self.measure()
        self.state["seconds"] += result.seconds
        self.state["curve"].append(
            {
                "update": self.state["updates"],
                "epoch": epoch,
                "seconds": round(self.state["seconds"], 1),
                "train_loss": round(self.recent.loss, 4),
                "valid_loss": round(result.loss, 4),
                "tokens_per_second": round(self.recent.speed),
            }
        )
        self.recent = Progress()
        if self.state["best"] is None or result.loss < self.state["best"]:
            self.state["best"] = result.loss
            self._save_weights(self.folder / WEIGHTS, valid_loss=result.loss)


def translate_lines(
    system: System,
    lines: Sequence[str],
    *,
    beam: int = 1,
    alpha: float = 0.6,
    max_tokens: int = 4096,
    name: str = "input",
    progress: bool = False,
) -> list[str]:
    """Translate lines, one by one what each says; blank lines stay blank.

    Args:
        system: A trained system.
        lines: Sentences.
        beam: Hypotheses of each sentence; 1 is greedy decoding.
        alpha: Strength of the length penalty, where there is more than one.
        max_tokens: Most source tokens of a batch, over all hypotheses.
        name: What to call the input in an error.
        progress: Show a progress bar.

    Raises:
        CorpusError: A line is longer than the model's limit.
        ValueError: The beam or alpha is out of its range.
    """
    check_search(beam, alpha)
    limit = system.config.max_len - 1
    ids = [system.tokenizers[0].encode(line) if line.strip() else [] for line in lines]
    for number, tokens in enumerate(ids, 1):
        if len(tokens) > limit:
            raise CorpusError(
                f"{name}, line {number}: {len(tokens)} tokens, more than the {limit} that fit "
                "the model; split the line into sentences"
            )
    full = [i for i, tokens in enumerate(ids) if tokens]
    out = [""] * len(lines)
    lengths = [(len(ids[i]) + 1, 0) for i in full]
    order = token_batches(lengths, max(max_tokens // beam, limit + 1), shuffle=False)
    bar = tqdm(total=len(full), unit="line", disable=not progress, file=sys.stderr)
    with bar, packed(system.model):
        for batch in order:
            numbers = batch.tolist()
            found = _outputs(system.model, [ids[full[i]] for i in numbers], limit, beam, alpha)
            for i, tokens in zip(numbers, found, strict=True):
                out[full[i]] = " ".join(system.tokenizers[1].decode(tokens).split())
            bar.update(len(batch))
    return out


def _outputs(model: Translator, sources: Ids, limit: int, beam: int, alpha: float) -> Ids:
    """Return the best output of each source."""
    if beam == 1:
        return greedy_search(model, sources, limit)
    found = beam_search(model, sources, beam=beam, alpha=alpha, max_len=limit)
    return [hypotheses[0].tokens for hypotheses in found]


def make_record(
    system: System,
    state: dict[str, Any],
    scores: dict[str, Any],
    command: str,
    *,
    pairs: int,
    processes: int = 1,
) -> dict[str, Any]:
    """Return a record of a training: how it was run, on how many pairs, its curve and scores."""
    return {
        "command": command,
        "commit": state["commit"],
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seed": system.training["options"]["seed"],
        "corpus": {"checksums": system.training["checksums"], "pairs": pairs},
        "options": system.training["options"],
        "architecture": architecture(system.config),
        "model": asdict(system.config),
        "parameters": count_parameters(system.model),
        "versions": versions(),
        "hardware": {
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "processes": processes,
        },
        "updates": state["updates"],
        "tokens": state["tokens"],
        "flops": state["flops"] or None,
        "seconds": round(state["seconds"], 1),
        "curve": state["curve"],
        "scores": scores,
    }


def versions() -> dict[str, str]:
    """Return the versions of what takes part."""
    return {
        "annotated_transformer": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "sacrebleu": version("sacrebleu"),
        "sacremoses": version("sacremoses"),
    }


def commit() -> str:
    """Return the commit of the package's sources, ``-dirty`` if changed since, or ``unknown``."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, NameError, subprocess.CalledProcessError):  # a notebook has no __file__
        return "unknown"
    return found.stdout.strip()


def processor() -> str:
    """Return the name of the processor and how many cores this process may use."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} core{'s' if cores != 1 else ''}"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
