"""From the words of the command line to a command and its options, before PyTorch is loaded."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import operator
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import tyro

from annotated_transformer.cli.options import COMMANDS, Command, Prepare, Train
from annotated_transformer.cli.output import NAME
from annotated_transformer.data.corpora import CORPORA
from annotated_transformer.data.preparation import Preparation
from annotated_transformer.engine.config import (
    ModelOptions,
    Options,
    UsageError,
    check,
    check_sources,
    defaults,
    flag,
    load_recipe,
    recipe_name,
)

ALIASES = {  # other names of options of train
    alias: flag(option.name)
    for group in fields(Options())
    for option in fields(getattr(Options(), group.name))
    for alias in option.metadata.get("aliases", ())
}
HINTS = get_type_hints(ModelOptions)
CHOICES = {name: get_args(HINTS[name]) for name in ("preset", "architecture")}
DECIDING = "recipe corpus pair preset architecture prepared train_files valid_files".split()


def parse(words: Sequence[str]) -> Command:
    """Make a command of the words on the command line.

    Raises:
        UsageError: They are no command, or its options cannot work.
        SystemExit: Help was asked for, and given.
    """
    for word in words:
        if not word or word.endswith("="):
            raise UsageError(f"{word or 'an argument'}: is empty")
        if any("\ud800" <= sign <= "\udfff" for sign in word):
            raise UsageError(f"{word!a}: is not valid UTF-8; take another name")
    words = [canonical(word) for word in words] if words[:1] == ["train"] else list(words)
    said = given(words)
    kinds = [_command(kind, *_default(kind, said, words)) for kind in COMMANDS]
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(sys.stdout or box):
            command: Command = tyro.cli(
                functools.reduce(operator.or_, kinds),
                args=words,
                prog=NAME,
                description="Train and use translation systems, as in 'Attention Is All You Need'.",
                config=(
                    tyro.conf.OmitSubcommandPrefixes,
                    tyro.conf.DisallowNone,
                    tyro.conf.FlagCreatePairsOff,
                ),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        names = [kind.__name__.lower() for kind in COMMANDS]
        raise UsageError(unboxed(box.getvalue(), *(w for w in words[:1] if w in names))) from None
    if isinstance(command, Train):
        check(command.options)
        check_sources(command.data)
    return command


def canonical(word: str) -> str:
    """Return an option of train under its own name."""
    name, equals, value = word.partition("=")
    return ALIASES.get(name, name) + equals + value


def given(words: Sequence[str]) -> dict[str, str]:
    """Return the options that decide about the defaults of others."""
    found = {}
    for word, following in itertools.pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        name, value = option[2:].replace("-", "_"), value if equals else following
        known = option.startswith("--") and name in DECIDING and not value.startswith("--")
        if known and value and value in CHOICES.get(name, (value,)):
            found[name] = value
    if "prepared" in found and "pair" not in found:  # its recipe depends on the languages, too
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            plan = json.loads((Path(found["prepared"]) / "prepared.json").read_bytes())["plan"]
            found["pair"] = str(plan["options"]["pair"])
    return found


def _default(kind: type, said: dict[str, str], words: Sequence[str]) -> tuple[Any, ...]:
    """Return a command with the defaults that follow from what was said, if it has such."""
    if words[:1] != [kind.__name__.lower()]:
        return ()
    if kind is Train:
        options = defaults(said)
        return (Train(options.data, options.model, options.optim, options.run),)
    if kind is Prepare:
        corpus = said.get("corpus", "files")
        small = corpus in CORPORA and corpus != "wmt14"
        name = recipe_name(corpus if small else "prepared", said.get("pair", ""))
        vocabulary = load_recipe(name).data.vocabulary
        return (Prepare(tyro.MISSING, Preparation(vocabulary=vocabulary)),)
    return ()


def _command(kind: type, *default: Any) -> Any:
    """Configure a command: its help is the first line of its docstring."""
    description = (kind.__doc__ or "").strip().split("\n")[0]
    options = {"default": default[0]} if default else {}
    name = kind.__name__.lower()
    return Annotated[kind, tyro.conf.subcommand(name, description=description, **options)]


def unboxed(box: str, command: str = "") -> str:
    """Return what tyro's error box says as one line: its first section, and a suggestion."""
    words: list[str] = []
    for line in box.splitlines()[1:]:
        text = line.strip("│ ")
        rule = len(text) > 2 and not text.strip("─╰╯-")  # of hyphens where a terminal has no more
        if text.startswith("Got errors") or (rule and words):
            break
        words.extend([] if rule else text.split())
    message = " ".join(words).rstrip(".") or "these options are not understood"
    meant = re.search(r"(?:Perhaps you meant|Similar).*?(--[\w-]+)", box, re.DOTALL)
    hint = f"did you mean {meant[1]}? " if meant else ""
    return f"{message}; {hint}see {' '.join(filter(None, (NAME, command)))} --help"
