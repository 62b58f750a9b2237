"""What can be said on the command line: a dataclass for each command. Needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

from tyro.conf import OmitArgPrefixes, Positional, arg

from annotated_transformer.data.preparation import Preparation
from annotated_transformer.engine.config import (
    DataOptions,
    ModelOptions,
    OptimOptions,
    Options,
    RunOptions,
    recipes,
)

RECIPE = f"Where the defaults are from: a JSON file, or one of {', '.join(recipes())}."


@dataclass(frozen=True)
class Train:
    """Train a translation system, or go on with one that was interrupted."""

    data: OmitArgPrefixes[DataOptions] = field(default_factory=DataOptions)
    model: OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)
    optim: OmitArgPrefixes[OptimOptions] = field(default_factory=OptimOptions)
    run: OmitArgPrefixes[RunOptions] = field(default_factory=RunOptions)
    recipe: Annotated[str | None, arg(help=f"{RECIPE} The corpus's unless given.")] = None
    out: Path | None = None
    """Folder for checkpoints; runs/CORPUS-PAIR-PRESET (or ARCHITECTURE) unless given."""
    record: Path | None = None
    """Where to write the record of the run; record.json beside the checkpoints unless given."""
    quiet: bool = False
    """Show no progress bar."""

    @property
    def options(self) -> Options:
        """All options of the run."""
        return Options(self.data, self.model, self.optim, self.run)


@dataclass(frozen=True)
class Plot:
    """Draw the log of a run, finished or running."""

    model: Positional[Path]
    """Folder of the run."""
    output: Annotated[Path | None, arg(aliases=["-o"])] = None
    """Picture to write, .svg, .png or .pdf; training.svg in the folder unless given."""


@dataclass(frozen=True)
class Search:
    """How to decode, and with which weights."""

    beam: int = 4
    """Hypotheses of each sentence; 1 is greedy decoding."""
    alpha: float = 0.6
    """Length penalty of beam search, from 0 to 10; the higher, the longer the translations."""
    averaged: bool = False
    """Take the mean of the last checkpoints, even if its validation loss is higher."""
    best: bool = False
    """Take the best checkpoint, even if the mean of the last ones is better."""


@dataclass(frozen=True)
class Translate:
    """Translate a file, or what comes in, line by line; blank lines stay blank."""

    model: Positional[Path]
    """Folder of a trained system."""
    input: Positional[Path] = Path("-")
    """Text, one sentence a line; - is the standard input."""
    output: Annotated[Path, arg(aliases=["-o"])] = Path("-")
    """Where the translation goes; - is the standard output."""
    search: OmitArgPrefixes[Search] = field(default_factory=Search)
    quiet: bool = False
    """Show no progress bar."""


@dataclass(frozen=True)
class Evaluate:
    """Score a system on a split of a corpus, or one file against another, by sacreBLEU."""

    model: Positional[Path | None] = None
    """Folder of a trained system."""
    corpus: str | None = None
    """Corpus; the one that it was trained on unless given."""
    prepared: Path | None = None
    """Folder that the command prepare made, instead of a corpus."""
    split: str | None = None
    """Split of the corpus; its test split unless given, or val where a prepared one has none."""
    mirror: Path | None = None
    """Folder that holds the corpora's files, instead of a download."""
    hypotheses: Path | None = None
    """Score this translation, line by line, instead of a system."""
    references: Path | None = None
    """What it should say."""
    protocols: bool = False
    """Score in the other ways as well, in which published numbers were counted."""
    language: str | None = None
    """Language of the references, for --protocols of two files."""
    search: OmitArgPrefixes[Search] = field(default_factory=Search)
    quiet: bool = False
    """Show no progress bar."""


@dataclass(frozen=True)
class Compare:
    """Compare two translations of one text by BLEU, and say whether it may be chance."""

    first: Positional[Path]
    """A translation, line by line."""
    second: Positional[Path]
    """Another one."""
    references: Path
    """What they should say."""
    samples: int = 1000
    """How many times to draw sentences."""


@dataclass(frozen=True)
class Ablation:
    """Measure what beam, length penalty and averaging give, one after the other."""

    model: Positional[Path]
    """Folder of a system trained with --average."""
    split: str | None = None
    """Split of its corpus; the test split unless given."""
    mirror: Path | None = None
    """Folder that holds the corpora's files, instead of a download."""
    record: Path | None = None
    """Where to write the record; ablation.json beside the checkpoints unless given."""
    quiet: bool = False
    """Show no progress bar."""


@dataclass(frozen=True)
class Average:
    """Average the last checkpoints of a run that kept some (train --average)."""

    model: Positional[Path]
    """Folder of the run."""
    last: int | None = None
    """How many checkpoints; all that were kept unless given."""


@dataclass(frozen=True)
class Prepare:
    """Clean a corpus, learn its sub-words, write it in shards; or go on where it stopped."""

    out: Positional[Path]
    """Folder for the prepared corpus."""
    preparation: OmitArgPrefixes[Preparation] = field(default_factory=Preparation)
    corpus: str = "files"
    """files, grammar, multi30k, iwslt2014, iwslt2016, iwslt2017 or wmt14; the last five are
    downloaded."""
    train_files: tuple[Path, ...] = ()
    """Source and target text, pair by pair; a path may go on inside a tar or zip archive."""
    valid_files: tuple[Path, Path] | None = None
    """Source and target text for validation."""
    test_files: tuple[Path, Path] | None = None
    """Source and target text for the test."""
    mirror: Path | None = None
    """Folder that holds the corpora's files, instead of a download."""
    workers: int | None = None
    """Processes that encode; as many as there are processors unless given."""
    quiet: bool = False
    """Show no progress bar."""


COMMANDS = (Train, Translate, Evaluate, Compare, Ablation, Average, Plot, Prepare)
Command: TypeAlias = Train | Translate | Evaluate | Compare | Ablation | Average | Plot | Prepare
