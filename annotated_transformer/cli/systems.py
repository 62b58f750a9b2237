"""Trained systems, and the text that they are scored on, as several commands need them."""

from __future__ import annotations

from pathlib import Path

import torch

from annotated_transformer.cli.options import Search
from annotated_transformer.data.corpora import CORPORA, ParallelText, load_corpus
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.engine.checkpoints import AVERAGED, BEST, WEIGHTS, load_system
from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.system import System
from annotated_transformer.fast.products import prepare_cpu
from annotated_transformer.translation.beam_search import check_search

TEST = {  # the split that is scored by default
    name: "test_2016_flickr" if name == "multi30k" else "test" for name in CORPORA
}


def test_split(corpus: Prepared) -> str:
    """Return the split of a prepared corpus that is scored by default."""
    return next((name for name in corpus.reports if name not in ("train", "val")), "val")


def load_split(
    corpus: str, pair: str, split: str, *, mirror: Path | None, size: int | None = None, bar: bool
) -> ParallelText:
    """Load a split of a corpus, downloading it where that is needed.

    Raises:
        UsageError: There is no such corpus, or it needs no mirror.
        CorpusError: It has no such split, or cannot be had.
    """
    if corpus not in CORPORA:
        raise UsageError(f"--corpus {corpus}: choose among {', '.join(CORPORA)}")
    check_mirror(corpus, mirror)
    return load_corpus(corpus, pair, split, mirror=mirror, size=size, progress=bar)


def check_mirror(corpus: str, mirror: Path | None) -> None:
    """Refuse a mirror of what needs no download."""
    if mirror is not None and corpus in ("grammar", "files"):
        raise UsageError(f"--mirror: --corpus {corpus} needs no download")


def open_system(folder: Path, search: Search) -> System:
    """Load a system for a search, on the GPU where there is one.

    Raises:
        UsageError: The search cannot be meant.
        CheckpointError: Something is missing or damaged.
    """
    beam = search.beam
    if search.averaged and search.best:
        raise UsageError("--averaged or --best, not both")
    try:
        check_search(beam, search.alpha)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    weights = AVERAGED if search.averaged else WEIGHTS if search.best else BEST
    system = load_system(folder, weights=weights)
    if beam > (size := len(system.tokenizers[1])):
        raise UsageError(f"--beam {beam}: must be at most {size}, the size of the vocabulary")
    prepare_device(system)
    return system


def prepare_device(system: System) -> None:
    """Move a system to the GPU, where there is one; else choose what is fast on the processor."""
    if torch.cuda.is_available():
        system.model.to("cuda")
    else:
        prepare_cpu()


def corpus_of(system: System) -> str:
    """Return the name of the corpus that a system was trained on."""
    return str(system.training.get("options", {}).get("corpus", "none"))
