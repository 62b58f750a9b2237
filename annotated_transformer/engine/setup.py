"""What a run begins with, or goes on with: its texts, and its system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from annotated_transformer.data.prepared import Prepared
from annotated_transformer.data.shards import TokenPairs
from annotated_transformer.engine.checkpointer import Checkpointer, checkpoint_paths
from annotated_transformer.engine.checkpoints import load_system, save_description
from annotated_transformer.engine.config import Options, UsageError, flag
from annotated_transformer.engine.precision import Precision
from annotated_transformer.engine.system import System, fresh_model, model_config
from annotated_transformer.engine.texts import Texts, encoded, learn_tokenizers, longest
from annotated_transformer.training.distributed import DistributedWorld


def check_same(before: dict[str, Any], now: dict[str, Any], folder: Path, done: int = 0) -> None:
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


def begin_system(options: Options, texts: Texts) -> System:
    """Return a system with first weights, for a run that begins."""
    text = texts if isinstance(texts, Prepared) else texts[0]
    tokenizers = learn_tokenizers(text, options.data)
    config = model_config(options, tokenizers[0] is tokenizers[1])
    model = fresh_model(tokenizers, config, options.optim.seed)
    described = {"options": options.described(), "checksums": dict(text.checksums)}
    return System(model, config, text.languages, tokenizers, described)


def reopen_system(options: Options, texts: Texts, folder: Path) -> System:
    """Return the system of a run that goes on, with the weights that it began with."""
    text = texts if isinstance(texts, Prepared) else texts[0]
    system = load_system(folder, weights=None)
    described = {"options": options.described(), "checksums": dict(text.checksums)}
    done = max((int(path.stem) for path in checkpoint_paths(folder)), default=0)
    check_same(system.training, described, folder, done)
    system.training = described
    system.model = fresh_model(system.tokenizers, system.config, options.optim.seed)
    return system


def choose_precision(options: Options, world: DistributedWorld) -> Precision:
    """Return in which precision to compute, and where; raise UsageError where it cannot be."""
    name, device = options.run.device, world.device
    if name not in ("auto", device.type):
        if name == "cuda":
            raise UsageError("--device cuda: PyTorch finds no GPU here")
        if world.size > 1:
            raise UsageError(f"--device {name}: not for several processes where there are GPUs")
        device = torch.device(name)
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
    system = reopen_system(options, texts, folder) if begun else begin_system(options, texts)
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
