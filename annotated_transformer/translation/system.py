"""Train, translate, score.

Defined in the chapter *A translation system* (book/translation/system.md).
"""

# Written from book/translation/system.md: edit the chapter instead.

from __future__ import annotations

import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from tqdm import tqdm

from annotated_transformer import __version__
from annotated_transformer.model.transformer import (
    PRESETS,
    ModelConfig,
    build_model,
    count_parameters,
)
from annotated_transformer.training.batches import Batch, make_batch, token_batches
from annotated_transformer.training.loop import Progress, evaluate, update
from annotated_transformer.training.optimizer import make_adam, noam_schedule
from annotated_transformer.translation.checkpoints import (
    System,
    load_system,
    load_training,
    save_description,
    save_system,
    save_training,
)
from annotated_transformer.translation.corpora import CorpusError, ParallelText
from annotated_transformer.translation.decoding import greedy_search
from annotated_transformer.translation.tokenizers import BPETokenizer, Tokenizer, WordTokenizer

Ids = list[list[int]]


class UsageError(ValueError):
    """Options that do not go together; the message says what to change.

    Defined in: book/translation/system.md
    """


@dataclass(frozen=True)
class Training:
    """How a system is trained. Everything that is not given follows the recipe of the corpus.

    Defined in: book/translation/system.md
    """

    corpus: str = "grammar"
    """Corpus: grammar (embedded, needs no network), multi30k, or files."""
    pair: str = "de-en"
    """Source and target language."""
    preset: Literal["tiny", "base", "big"] = "tiny"
    """Size of the model."""
    layers: int | None = None
    """Layers in each stack, if not the preset's."""
    dropout: float | None = None
    """Probability of dropping an element, if not the preset's."""
    tokenizer: Literal["bpe", "words"] = "bpe"
    """Sub-words shared by both languages, or spaCy's words."""
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
    """Leave sentences out that are longer, instead of stopping with an error."""
    seed: int = 0
    """Decides first weights, order and dropout."""
    size: int | None = None
    """Take only so many training pairs."""


RECIPES: dict[str, Training] = {
    "multi30k": Training(corpus="multi30k"),
    "grammar": Training(
        corpus="grammar",
        layers=2,
        dropout=0.1,
        vocabulary=1500,
        max_tokens=2048,
        updates=1200,
        warmup=300,
    ),
    "files": Training(corpus="files"),
}


@dataclass(frozen=True)
class Encoded:
    """Sentence pairs as token numbers, without special symbols.

    Defined in: book/translation/system.md
    """

    source: Ids
    target: Ids

    def lengths(self) -> list[tuple[int, int]]:
        """Source and target length of each pair, special symbols included."""
        return [(len(s) + 1, len(t) + 1) for s, t in zip(self.source, self.target, strict=True)]

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Make a batch of the pairs with these numbers."""
        return make_batch([self.source[i] for i in numbers], [self.target[i] for i in numbers])


def encode(
    text: ParallelText, tokenizers: tuple[Tokenizer, Tokenizer], options: Training
) -> Encoded:
    """Turn sentence pairs into token numbers.

    Raises:
        CorpusError: A sentence is longer than ``max_len``, and is not to be skipped.

    Defined in: book/translation/system.md
    """
    source = [tokenizers[0].encode(line) for line in text.source]
    target = [tokenizers[1].encode(line) for line in text.target]
    limit = options.max_len - 1
    long = [
        i for i, pair in enumerate(zip(source, target, strict=True)) if max(map(len, pair)) > limit
    ]
    if long and not options.skip_long:
        tokens = max(len(source[long[0]]), len(target[long[0]]))
        raise CorpusError(
            f"{text.name} {text.split}, pair {long[0] + 1}: {tokens} tokens, more than the {limit} "
            "that fit; raise --max-len, or leave such pairs out with --skip-long"
        )
    drop = set(long)
    return Encoded(
        [s for i, s in enumerate(source) if i not in drop],
        [t for i, t in enumerate(target) if i not in drop],
    )


def learn_tokenizers(text: ParallelText, options: Training) -> tuple[Tokenizer, Tokenizer]:
    """Learn the tokenizers of source and target from a training text.

    Defined in: book/translation/system.md
    """
    if options.tokenizer == "bpe":
        shared = BPETokenizer.train(itertools.chain(text.source, text.target), options.vocabulary)
        return shared, shared
    first, second = text.languages
    return WordTokenizer.train(text.source, first), WordTokenizer.train(text.target, second)


def model_config(options: Training, shared: bool) -> ModelConfig:
    """Return the sizes of the model that the options ask for.

    Defined in: book/translation/system.md
    """
    config = replace(
        PRESETS[options.preset], max_len=options.max_len, tie="all" if shared else "target"
    )
    if options.layers is not None:
        config = replace(config, N=options.layers)
    return config if options.dropout is None else replace(config, dropout=options.dropout)


class Run:
    """A training in a folder: begins, or goes on where it stopped.

    Args:
        options: What to train.
        folder: Where checkpoints go.
        texts: Training and validation text.

    Raises:
        UsageError: The folder holds a training with other options.
        CheckpointError: Its files are damaged.

    Defined in: book/translation/system.md
    """

    def __init__(
        self, options: Training, folder: Path, texts: tuple[ParallelText, ParallelText]
    ) -> None:
        self.options, self.folder = options, folder
        self.state: dict[str, Any] = {"updates": 0, "seconds": 0.0, "curve": [], "best": None}
        self.state["commit"] = commit()
        torch.manual_seed(options.seed)
        resuming = (folder / "config.json").exists()
        self.system = self._load(texts[0]) if resuming else self._begin(texts[0])
        self.train, self.valid = (encode(t, self.system.tokenizers, options) for t in texts)
        model = self.system.model
        self.optimizer = make_adam(model)
        factor = options.peak * (self.system.config.d_model * options.warmup) ** 0.5
        self.schedule = noam_schedule(
            self.optimizer, self.system.config.d_model, factor, options.warmup
        )
        if self.resume_file.exists():
            self.state = load_training(self.resume_file, model, self.optimizer)
            self.schedule.load_state_dict(self.state.pop("schedule"))

    @property
    def resume_file(self) -> Path:
        """The file from which the training goes on."""
        return self.folder / "training.safetensors"

    def _begin(self, text: ParallelText) -> System:
        tokenizers = learn_tokenizers(text, self.options)
        config = model_config(self.options, tokenizers[0] is tokenizers[1])
        model = build_model(len(tokenizers[0]), len(tokenizers[1]), config)
        described = {"options": asdict(self.options), "checksums": dict(text.checksums)}
        system = System(model, config, text.languages, tokenizers, described)
        save_description(system, self.folder)
        return system

    def _load(self, text: ParallelText) -> System:
        system = load_system(self.folder, with_weights=False)
        torch.manual_seed(self.options.seed)
        fresh = build_model(len(system.tokenizers[0]), len(system.tokenizers[1]), system.config)
        system.model.load_state_dict(fresh.state_dict())
        now = {"options": asdict(self.options), "checksums": dict(text.checksums)}
        if system.training != json.loads(json.dumps(now)):
            raise UsageError(
                f"{self.folder}: holds a training with other options or another text; "
                "give the same ones to go on, or another folder with --out"
            )
        return system

    def save(self) -> None:
        """Write all that is needed to go on."""
        data = {**self.state, "schedule": self.schedule.state_dict()}
        data["schedule"] = {k: v for k, v in data["schedule"].items() if k != "lr_lambdas"}
        save_training(self.resume_file, self.system.model, self.optimizer, data)

    def batches(self) -> Iterator[tuple[int, int, list[Batch]]]:
        """Yield epoch, updates left in it, and the batches of each update that is still to come."""
        done = 0
        for epoch in itertools.count():
            order = token_batches(
                self.train.lengths(), self.options.max_tokens, seed=self.options.seed, epoch=epoch
            )
            groups = [
                order[i : i + self.options.accumulate]
                for i in range(0, len(order), self.options.accumulate)
            ]
            for number, group in enumerate(groups, 1):
                if done >= self.options.updates:
                    return
                done += 1
                if done > self.state["updates"]:
                    yield epoch, len(groups) - number, [self.train.batch(b) for b in group]

    def go(self, *, save_every: float = 60.0, progress: bool = True) -> bool:
        """Train until the last update; return false if interrupted before, with all saved."""
        bar = tqdm(
            total=self.options.updates,
            initial=self.state["updates"],
            unit="update",
            disable=not progress,
            file=sys.stderr,
        )
        recent, saved = Progress(), time.monotonic()
        with bar, interruption() as stop:
            for epoch, left, batches in self.batches():
                self.system.model.train()
                result = update(
                    self.system.model,
                    batches,
                    self.optimizer,
                    self.schedule,
                    self.options.smoothing,
                )
                recent += result
                self.state["updates"] += 1
                self.state["seconds"] += result.seconds
                bar.update()
                bar.set_postfix(
                    epoch=epoch + 1, loss=f"{recent.loss:.3f}", tokens_s=f"{recent.speed:.0f}"
                )
                if not left or self.state["updates"] == self.options.updates:
                    self.validate(epoch + 1, recent)
                    recent = Progress()
                if stop or time.monotonic() - saved > save_every or not left:
                    self.save()
                    saved = time.monotonic()
                if stop:
                    return False
        self.save()
        return True

    def validate(self, epoch: int, recent: Progress) -> None:
        """Measure the validation loss, add it to the curve, keep the best weights."""
        lengths = self.valid.lengths()
        order = token_batches(
            lengths, max(self.options.max_tokens, *map(max, lengths)), shuffle=False
        )
        result = evaluate(self.system.model, (self.valid.batch(b) for b in order))
        self.state["seconds"] += result.seconds
        self.state["curve"].append(
            {
                "update": self.state["updates"],
                "epoch": epoch,
                "seconds": round(self.state["seconds"], 1),
                "train_loss": round(recent.loss, 4),
                "valid_loss": round(result.loss, 4),
                "tokens_per_second": round(recent.speed),
            }
        )
        if self.state["best"] is None or result.loss < self.state["best"]:
            self.state["best"] = result.loss
            save_system(
                self.system, self.folder, valid_loss=result.loss, update=self.state["updates"]
            )


@contextmanager
def interruption() -> Iterator[list[int]]:
    """Collect Ctrl-C and termination in a list, so that an update is never cut in two.

    Defined in: book/translation/system.md
    """
    caught: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
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


def translate_lines(
    system: System,
    lines: Sequence[str],
    *,
    max_tokens: int = 4096,
    name: str = "input",
    progress: bool = False,
) -> list[str]:
    """Translate lines, one by one what each says; blank lines stay blank.

    Args:
        system: A trained system.
        lines: Sentences.
        max_tokens: Most source tokens of a batch.
        name: What to call the input in an error.
        progress: Show a progress bar.

    Raises:
        CorpusError: A line is longer than the model's limit.

    Defined in: book/translation/system.md
    """
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
    order = token_batches(lengths, max(max_tokens, limit + 1), shuffle=False)
    with tqdm(total=len(full), unit="line", disable=not progress, file=sys.stderr) as bar:
        for batch in order:
            found = greedy_search(system.model, [ids[full[i]] for i in batch], limit)
            for i, tokens in zip(batch, found, strict=True):
                out[full[i]] = " ".join(system.tokenizers[1].decode(tokens).split())
            bar.update(len(batch))
    return out


def score(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Return BLEU and chrF by sacreBLEU, with their signatures.

    Raises:
        CorpusError: There is nothing to score, or the numbers of lines differ.

    Defined in: book/translation/system.md
    """
    if len(hypotheses) != len(references) or not references:
        raise CorpusError(
            f"{len(hypotheses)} translations for {len(references)} references: "
            "there must be one for each"
        )
    bleu, chrf = BLEU(), CHRF()
    found = bleu.corpus_score(list(hypotheses), [list(references)])
    characters = chrf.corpus_score(list(hypotheses), [list(references)])
    return {
        "bleu": round(found.score, 2),
        "bleu_signature": str(bleu.get_signature()),
        "bleu_detail": found.format(score_only=False),
        "chrf": round(characters.score, 2),
        "chrf_signature": str(chrf.get_signature()),
        "sentences": len(references),
    }


def make_record(
    system: System, state: dict[str, Any], scores: dict[str, Any], command: str
) -> dict[str, Any]:
    """Return a record of a training: how it was run, on what, its curve and its scores.

    Defined in: book/translation/system.md
    """
    return {
        "command": command,
        "commit": state["commit"],
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seed": system.training["options"]["seed"],
        "corpus": {"checksums": system.training["checksums"]},
        "options": system.training["options"],
        "model": asdict(system.config),
        "parameters": count_parameters(system.model),
        "versions": versions(),
        "hardware": {"processor": processor(), "threads": torch.get_num_threads(), "gpu": None},
        "updates": state["updates"],
        "seconds": round(state["seconds"], 1),
        "curve": state["curve"],
        "scores": scores,
    }


def versions() -> dict[str, str]:
    """Return the versions of what takes part.

    Defined in: book/translation/system.md
    """
    import sacrebleu

    return {
        "annotated_transformer": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "sacrebleu": str(sacrebleu.__version__),
    }


def commit() -> str:
    """Return the commit of the package's sources, or ``unknown``.

    Defined in: book/translation/system.md
    """
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def processor() -> str:
    """Return the name of the processor and how many cores this process may use.

    Defined in: book/translation/system.md
    """
    name = platform.processor() or platform.machine()
    with_name = [
        line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")
    ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{with_name[0] if with_name else name}, {cores} cores"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
