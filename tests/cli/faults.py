"""Faults that the package had, to be put back: the sweep must find them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from annotated_transformer.cli import arguments, output, translate
from annotated_transformer.engine import checkpointer, checkpoints


def follow_the_locale() -> None:
    """Write text as the locale has it."""

    def write(text: str) -> None:
        sys.stdout.write(text)

    output.write_output = write


def drop_short_writes() -> None:
    """Take no notice of how much was written."""

    def write(text: str) -> None:
        sys.stdout.buffer.write(text.encode()[:7])

    output.write_output = write


def ignore_own_files() -> None:
    """Train on the grammar, whatever files are given."""
    arguments.DECIDING.remove("train_files")
    arguments.DECIDING.remove("valid_files")
    vars(arguments)["check_sources"] = lambda _: None


def overwrite_the_input() -> None:
    """Write wherever ``-o`` says."""
    vars(translate)["check_target"] = lambda *_: None


def trust_the_configuration() -> None:
    """Compare no digest of ``config.json``."""
    load = checkpoints.load_run_object

    def trusting(path: Path) -> dict[str, Any]:
        data = load(path)
        data.pop("sha256", None)
        return dict(json.loads(checkpoints.json_with_digest(data)))

    checkpoints.load_run_object = trusting


def trust_the_state() -> None:
    """Compare no digest of a training state."""
    load = checkpoints.load_tensors
    checkpoints.load_tensors = lambda path, *, verify=True: load(path, verify=False)


def overwrite_the_best() -> None:
    """Begin at zero wherever the training state is missing."""
    checkpointer.Checkpointer.has_begun = lambda self: bool(  # type: ignore[method-assign]
        checkpointer.checkpoint_paths(self.folder)
    )


def delete_all_parts() -> None:
    """Take every file for our own leftover."""

    def remove(folder: str | Path) -> None:
        for path in Path(folder).glob(".*.part"):
            path.unlink()

    vars(checkpointer)["remove_leftovers"] = remove


def trust_pickles() -> None:
    """Load weights as PyTorch's own files, whose pickles run."""
    load = checkpoints.load_tensors

    def trusting(path: str | Path, *, verify: bool = True) -> Any:
        with contextlib.suppress(Exception), Path(path).open("rb") as file:
            return torch.load(file, weights_only=False), {}
        return load(path, verify=verify)

    checkpoints.load_tensors = trusting


FAULTS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        follow_the_locale,
        drop_short_writes,
        ignore_own_files,
        overwrite_the_input,
        trust_the_configuration,
        trust_the_state,
        overwrite_the_best,
        delete_all_parts,
        trust_pickles,
    )
}
