"""The command line, train, translate and evaluate.

Defined in the chapter *The command line* (book/translation/command.md).
"""

# Written from book/translation/command.md: edit the chapter instead.

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from annotated_transformer.training.speed import prepare_cpu
from annotated_transformer.translation.checkpoints import (
    CheckpointError,
    System,
    load_system,
    write_atomically,
)
from annotated_transformer.translation.corpora import (
    CORPORA,
    CorpusError,
    ParallelText,
    load_corpus,
    read_lines,
    read_parallel,
)
from annotated_transformer.translation.system import (
    RECIPES,
    Run,
    Training,
    UsageError,
    make_record,
    score,
    translate_lines,
)
from annotated_transformer.translation.tokenizers import TokenizerError

ERRORS = (CheckpointError, CorpusError, TokenizerError, UsageError, FloatingPointError)
TEST = {"grammar": "test", "multi30k": "test_2016_flickr"}  # the split that is scored by default


@dataclass(frozen=True)
class Train:
    """Train a translation system, or go on with one that was interrupted.

    Defined in: book/translation/command.md
    """

    training: OmitArgPrefixes[Training] = RECIPES["grammar"]
    out: Path | None = None
    """Folder for checkpoints; runs/CORPUS-PAIR-PRESET unless given."""
    mirror: Path | None = None
    """Folder that holds the corpora's files, instead of a download."""
    train_files: tuple[Path, Path] | None = None
    """Source and target text for training, for the corpus "files"."""
    valid_files: tuple[Path, Path] | None = None
    """Source and target text for validation, for the corpus "files"."""
    save_every: float = 60.0
    """Seconds between checkpoints."""
    record: Path | None = None
    """Write a record of the run into this file."""
    quiet: bool = False
    """Show no progress bar."""

    def texts(self) -> tuple[ParallelText, ParallelText]:
        """Load training and validation text."""
        options = self.training
        if options.corpus != "files":
            return tuple(  # type: ignore[return-value]
                load_corpus(
                    options.corpus,
                    options.pair,
                    split,
                    mirror=self.mirror,
                    size=options.size if split == "train" else None,
                    progress=not self.quiet,
                )
                for split in ("train", "val")
            )
        if self.train_files is None or self.valid_files is None:
            raise UsageError("corpus 'files' needs --train-files and --valid-files, two files each")
        first, second = languages(options.pair)
        train = read_parallel(*self.train_files, languages=(first, second))
        valid = read_parallel(*self.valid_files, languages=(first, second), split="val")
        return (train if options.size is None else train.head(options.size)), valid

    def __call__(self) -> int:
        """Train, score, and write the record."""
        options = self.training
        check(options)
        out = self.out or Path("runs") / f"{options.corpus}-{options.pair}-{options.preset}"
        texts = self.texts()
        for text in texts:
            if report := text.report():
                say(report)
        say(str(prepare_cpu()))
        run = Run(options, out, texts)
        say(f"{len(run.train.source)} sentence pairs, checkpoints in {out}")
        if not run.go(save_every=self.save_every, progress=not self.quiet):
            done = run.state["updates"]
            say(f"interrupted after update {done}; the same command goes on from there")
            return 130
        system = load_system(out)
        split = TEST.get(options.corpus, "val")
        test = texts[1] if split == "val" else self.split(split)
        scores = {split: evaluate_system(system, test, progress=not self.quiet)}
        show(scores[split], f"{options.corpus} {split}, greedy")
        record = make_record(system, run.state, scores, command_line())
        data = (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()
        write_atomically(self.record or out / "record.json", data)
        return 0

    def split(self, name: str) -> ParallelText:
        """Load another split of the same corpus."""
        options = self.training
        return load_corpus(
            options.corpus, options.pair, name, mirror=self.mirror, progress=not self.quiet
        )


def languages(pair: str) -> tuple[str, str]:
    """Split ``de-en``.

    Defined in: book/translation/command.md
    """
    first, _, second = pair.partition("-")
    if not first or not second:
        raise UsageError(f"--pair {pair}: give two languages, as de-en")
    return first, second


def check(options: Training) -> None:
    """Raise UsageError for a value that cannot work.

    Defined in: book/translation/command.md
    """
    if options.corpus not in RECIPES:
        raise UsageError(f"--corpus {options.corpus}: choose among {', '.join(RECIPES)}")
    positive = ("vocabulary", "max_tokens", "accumulate", "updates", "warmup", "peak", "max_len")
    for name in positive:
        if getattr(options, name) <= 0:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {getattr(options, name)}: must be greater than 0")
    if not 0 <= options.smoothing < 1:
        raise UsageError(f"--smoothing {options.smoothing}: must be at least 0 and below 1")
    if options.dropout is not None and not 0 <= options.dropout < 1:
        raise UsageError(f"--dropout {options.dropout}: must be at least 0 and below 1")


@dataclass(frozen=True)
class Translate:
    """Translate a file, or what comes in; order and blank lines are kept.

    Defined in: book/translation/command.md
    """

    model: Positional[Path]
    """Folder of a trained system."""
    input: Positional[Path] = Path("-")
    """Text, one sentence a line; - is the standard input."""
    output: Path | None = None
    """Where the translation goes; the standard output unless given."""
    quiet: bool = False
    """Show no progress bar."""

    def __call__(self) -> int:
        """Translate."""
        system = load_system(self.model)
        prepare_cpu()
        lines, name = read_text(self.input)
        show_bar = not self.quiet and (self.output is not None or sys.stderr.isatty())
        out = translate_lines(system, lines, name=name, progress=show_bar)
        text = "".join(f"{line}\n" for line in out)
        if self.output is None:
            sys.stdout.write(text)
        else:
            write_atomically(self.output, text.encode())
        return 0


def read_text(path: Path) -> tuple[list[str], str]:
    """Read lines from a file or the standard input, strictly UTF-8; also say its name.

    Defined in: book/translation/command.md
    """
    if str(path) != "-":
        return read_lines(path), str(path)
    raw = sys.stdin.buffer.read()
    lines = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        try:
            lines.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"standard input, line {number}: not UTF-8 at byte {error.start + 1}; "
                "convert the text"
            ) from None
    return (lines[:-1] if lines[-1] == "" else lines), "standard input"


@dataclass(frozen=True)
class Evaluate:
    """Score a system on a split of a corpus, or one file against another, by sacreBLEU.

    Defined in: book/translation/command.md
    """

    model: Positional[Path | None] = None
    """Folder of a trained system."""
    corpus: str | None = None
    """Corpus; the one of the training unless given."""
    split: str | None = None
    """Split of the corpus; its test split unless given."""
    mirror: Path | None = None
    """Folder that holds the corpora's files, instead of a download."""
    hypotheses: Path | None = None
    """Score this translation, line by line, instead of a system."""
    references: Path | None = None
    """What it should say."""
    quiet: bool = False
    """Show no progress bar."""

    def __call__(self) -> int:
        """Evaluate."""
        if self.hypotheses is not None and self.references is not None and self.model is None:
            hypotheses, references = read_lines(self.hypotheses), read_lines(self.references)
            if len(hypotheses) != len(references):
                raise CorpusError(
                    f"{self.hypotheses} has {len(hypotheses)} lines, {self.references} has "
                    f"{len(references)}: there must be one for each"
                )
            show(score(hypotheses, references), str(self.hypotheses))
            return 0
        if self.model is None or self.hypotheses is not None or self.references is not None:
            raise UsageError("give a trained system's folder, or --hypotheses and --references")
        system = load_system(self.model)
        prepare_cpu()
        corpus = self.corpus or system.training["options"]["corpus"]
        if corpus not in CORPORA:
            raise UsageError(f"--corpus {corpus}: choose among {', '.join(CORPORA)}")
        split = self.split or TEST[corpus]
        text = load_corpus(corpus, "-".join(system.languages), split, mirror=self.mirror)
        show(evaluate_system(system, text, progress=not self.quiet), f"{corpus} {split}, greedy")
        return 0


def evaluate_system(system: System, text: ParallelText, *, progress: bool) -> dict[str, Any]:
    """Translate the source side and score it against the target side.

    Defined in: book/translation/command.md
    """
    name = f"{text.name} {text.split}"
    return score(translate_lines(system, text.source, name=name, progress=progress), text.target)


def show(scores: dict[str, Any], title: str) -> None:
    """Print scores with their signatures.

    Defined in: book/translation/command.md
    """
    print(f"{title}, {scores['sentences']} sentences")
    print(f"  {scores['bleu_detail']}\n    {scores['bleu_signature']}")
    print(f"  chrF2 = {scores['chrf']}\n    {scores['chrf_signature']}")


def say(text: str) -> None:
    """Print a message beside the output.

    Defined in: book/translation/command.md
    """
    print(text, file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 0, 2 for an error, 130 if interrupted.

    Defined in: book/translation/command.md
    """
    args = list(sys.argv[1:] if arguments is None else arguments)
    corpus = dict(itertools.pairwise(args)).get("--corpus", "grammar")
    recipe = Train(training=RECIPES.get(corpus, replace(RECIPES["grammar"], corpus=corpus)))
    command = tyro.cli(
        Annotated[Train, tyro.conf.subcommand("train", default=recipe)]
        | Annotated[Translate, tyro.conf.subcommand("translate")]
        | Annotated[Evaluate, tyro.conf.subcommand("evaluate")],
        args=args,
        prog="annotated-transformer",
        description="Train and use translation systems of the kind of 'Attention Is All You Need'.",
        config=(
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.OmitArgPrefixes,
            tyro.conf.FlagCreatePairsOff,
        ),
    )
    try:
        return command()
    except ERRORS as error:
        say(f"annotated-transformer: {error}")
        return 2
    except BrokenPipeError:  # nobody reads on
        return 0
    except KeyboardInterrupt:
        say("annotated-transformer: interrupted")
        return 130


def command_line() -> str:
    """Return the command that this process was started with.

    Defined in: book/translation/command.md
    """
    return shlex.join(["annotated-transformer", *sys.argv[1:]])
