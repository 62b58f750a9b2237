"""Cases of the sweep: damaged folders, wrong configurations, bad recipes, stray files."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from annotated_transformer.engine.checkpoints import json_with_digest
from tests.cli.sweep import FILES, TRAIN, Case, Make, Place, put

Damage = Callable[[Path], object]


def nested(depth: int) -> bytes:
    """Return JSON that is nested deeply."""
    return b'{"a":' * depth + b"1" + b"}" * depth


def copied(damage: Damage, name: str = "", kind: str = "run") -> Make:
    """Return what copies the run, or another one of those shared, and damages one file of it."""

    def make(place: Place) -> None:
        shutil.copytree(place.root / kind, place.here / "run")
        damage(place.here / "run" / name)

    return make


def flipped(number: int) -> Damage:
    """Return what changes one bit, drawn by chance."""

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        rng = random.Random(f"{path.name} {number}")
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)

    return flip


def emptied(path: Path) -> None:
    """Leave nothing in a file."""
    path.write_bytes(b"")


def cut(path: Path) -> None:
    """Leave half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def folder_instead(path: Path) -> None:
    """Put a folder where a file should be."""
    path.unlink()
    path.mkdir()


def loop_instead(path: Path) -> None:
    """Put a link to itself where a file should be."""
    path.unlink()
    path.symlink_to(path.name)


def fifo_instead(path: Path) -> None:
    """Put a pipe that nobody writes to where a file should be."""
    path.unlink()
    os.mkfifo(path)


def device_instead(path: Path) -> None:
    """Put a link to a device that never ends where a file should be."""
    path.unlink()
    path.symlink_to("/dev/zero")


def overwritten(data: bytes) -> Damage:
    """Return what puts other bytes into a file."""
    return lambda path: path.write_bytes(data)


def alone(change: Damage) -> Damage:
    """Return what damages a file in a run without averaged weights, which may be the better."""

    def damage(path: Path) -> None:
        path.with_name("averaged.safetensors").unlink()
        change(path)

    return damage


def swapped(path: Path) -> None:
    """Take the file of another run."""
    here = next(parent for parent in path.parents if parent.name == "here")
    shutil.copy(here.parent / "other" / path.relative_to(here / "run"), path)


class Payload:
    """An object whose unpickling makes a folder, which the judge finds."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        """Return what unpickling calls."""
        return os.mkdir, ("it-ran",)


def pickled(path: Path) -> None:
    """Put a pickle that runs into a file."""
    path.write_bytes(pickle.dumps(Payload()))


def pickled_weights(path: Path) -> None:
    """Put weights as ``torch.save`` writes them into a file, with something that runs."""
    torch.save({"generator.proj.weight": Payload()}, path)


DAMAGES: dict[str, Damage] = {
    "missing": Path.unlink,
    "empty": emptied,
    "cut": cut,
    "a folder": folder_instead,
    "a link to itself": loop_instead,
    "a FIFO": fifo_instead,
    "a device": device_instead,
    "random bytes": overwritten(random.Random(2).randbytes(3000)),
    "a list": overwritten(b"[1, 2]"),
    "an empty object": overwritten(b"{}"),
    "nested": overwritten(nested(100_000)),
    "a huge integer": overwritten(b'{"format": ' + b"9" * 5000 + b"}"),
    "a pickle": pickled,
    "pickled weights": pickled_weights,
    "swapped": swapped,
    **{f"bit {number}": flipped(number) for number in range(3)},
}
NEWEST = "training/00000004.safetensors"
READ = {  # which commands read which files of a run
    "config.json": ("translate", "train", "evaluate", "export"),
    "tokenizer.json": ("translate", "train"),
    "model.safetensors": ("translate", "ablation"),
    "averaged.safetensors": ("translate",),
    "record.json": ("export",),
    NEWEST: ("train",),
    "snapshots/00000004.safetensors": ("average",),
    "log.jsonl": ("plot", "train"),
}
MORE = {  # the others, which load a run by the same functions: some of the damages are enough
    "config.json": ("serve", "score", "parse", "ensemble", "finetune"),
    "tokenizer.json": ("score", "parse", "finetune"),
    "model.safetensors": ("serve", "parse", "ensemble", "finetune"),
}
ENOUGH = (
    "missing", "cut", "a FIFO", "random bytes", "an empty object", "nested", "pickled weights",
    "swapped", "bit 0",
)  # fmt: skip
IN_COPY = {
    "translate": "translate run @text/is --beam 1 --quiet",
    "train": TRAIN.replace("--updates 4", "--updates 5"),
    "average": "average run",
    "evaluate": "evaluate run --corpus grammar",
    "ablation": "ablation run",
    "plot": "plot run",
    "export": "export run out --to ctranslate2",
    "serve": "serve run --best --port 0",
    "score": "score run @text/valid.de @text/valid.en --best --quiet",
    "parse": "parse run @text/dogs.en --best --beam 1 --quiet",
    "ensemble": "translate @run @text/is --ensemble run --best --beam 1 --quiet",
    "finetune": f"train {FILES} --finetune-from run --out new --updates 1 --quiet",
}


def damaged_folders() -> Iterator[Case]:
    """Every damage of every file, for the commands that read it."""
    for name, commands in READ.items():
        for damage, change in DAMAGES.items():
            for command in commands:
                yield damaged(command, name, damage, change)
    for name, commands in MORE.items():
        for damage in ENOUGH:
            for command in commands:
                change = alone(DAMAGES[damage]) if command == "finetune" else DAMAGES[damage]
                yield damaged(command, name, damage, change)


def damaged(command: str, name: str, damage: str, change: Damage) -> Case:
    """Return the case of one damage and one command."""
    line = IN_COPY[command]
    if command == "translate":
        line += {"averaged.safetensors": " --averaged", "model.safetensors": " --best"}.get(
            name, ""
        )
    status: tuple[int, ...] = (2,)
    if damage == "missing" and name[:4] in ("snap", "trai", "reco"):
        status = (0,)  # the one before it is as good, and a card goes without a record
    elif (
        name == NEWEST  # it goes back to the one before
        or (name == "tokenizer.json" and damage[:3] == "bit")  # the same in other words
        or (name in ("log.jsonl", "record.json") and damage[:3] in ("bit", "cut", "swa"))
        or (name == "log.jsonl" and command == "train")  # a broken last line is left out
    ):
        status = (0, 2)
    written = {"train": "run/.*", "plot": "run/.*", "average": "run/averaged.safetensors",
               "export": "out(/.*)?", "finetune": "new(/.*)?"}  # fmt: skip
    return Case(
        f"{command} with {name}: {damage}",
        line,
        copied(change, name, "parser" if command == "parse" else "run"),
        status=status,
        names={"config.json": "run", "tokenizer.json": "tokenizer"}.get(name, name),
        logs=command in written,
        writes=written.get(command, "") if 0 in status else "",
        same=command == "translate",
    )


def changed_configuration(path: str, value: object) -> Make:
    """Return what changes one entry of ``config.json``, digest and all."""

    def change(file: Path) -> None:
        data = json.loads(file.read_text())
        del data["sha256"]
        *parents, last = path.split(".")
        place = data
        for key in parents:
            place = place[key]
        place[last] = value
        file.write_bytes(json_with_digest(data))

    return copied(change, "config.json")


def wrong_configurations() -> Iterator[Case]:
    """A ``config.json`` whose digest is right, and whose contents are not."""
    values: tuple[object, ...] = (None, "x", -1, 1.5, 10**30, [], 1_000_000_000)
    paths = (
        "format architecture languages model tokenizers model.N model.d_model model.h "
        "model.max_len model.norm training training.options"
    )
    for path in paths.split():
        for value in values[: -1 if path == "model.max_len" else None]:  # makes nothing larger
            make = changed_configuration(path, value)
            yield Case(
                f"translate with {path} {value!r}", "translate run @text/is", make, names="run"
            )


def recipes() -> Iterator[Case]:
    """Recipes that are none."""
    line = f"{TRAIN} --recipe recipe.json"
    for text in (
        "",
        "[]",
        "null",
        "{",
        '{"optim": 3}',
        '{"optim": {"updates": "many"}}',
        '{"optim": {"updates": -1}}',
        '{"optim": {"updates": true}}',
        '{"optim": {"upadtes": 3}}',
        '{"optim": {"peak": NaN}}',
        '{"optim": {"peak": 1e999}}',
        '{"nothing": {}}',
        '{"like": "nothing"}',
        '{"like": ["grammar"]}',
        '{"like": {"a": 1}}',
        '{"like": 3}',
        '{"model": {"layers": 10000000000000000000000}}',
        '{"model": {"preset": "huge"}}',
        '{"data": {"train_files": ["a"]}}',
        '{"data": {"corpus": "nope"}}',
        '{"data": {"corpus": 3}}',
    ):
        make = put(text.encode(), "recipe.json")
        yield Case(f"train --recipe {text or 'empty'}", line, make, names="recipe.json")
    for kind, data in (("nested", nested(100_000)), ("a pickle", pickle.dumps(Payload()))):
        make = put(data, "recipe.json")
        yield Case(f"train --recipe {kind}", line, make, names="recipe.json")
    for command in (line, "sweep recipe.json --plan"):
        make = lambda place: os.mkfifo(place.here / "recipe.json")  # noqa: E731
        yield Case(f"{command.split()[0]} with a FIFO", command, make, names="recipe.json")
    for kind, change in (("a FIFO", os.mkfifo), ("nested", overwritten(nested(100_000)))):

        def record(place: Place, change: Damage = change) -> None:
            change(place.here / "record.json")

        yield Case(f"sweep --record {kind}", "sweep table3-grammar --plan --record record.json",
                   record, names="record.json")  # fmt: skip


STRAYS = (
    "training/notes.txt training/x.safetensors training/٣.safetensors training/-1.safetensors "
    "snapshots/x.safetensors .mine.part training/.x.safetensors.1.part"
)


def stray_files() -> Iterator[Case]:
    """Files that do not belong to a run, and runs that lack some."""
    resume = IN_COPY["train"]
    for name in STRAYS.split():
        make = copied(lambda path: path.write_bytes(b"mine"), name)
        keep = f"(?!run/{re.escape(name)}$)run/.*" if "safetensors.1" not in name else "run/.*"
        yield Case(f"train beside {name}", resume, make, status=(0,), logs=True, writes=keep)
    for name in ("training", "snapshots"):
        make = copied(lambda path: os.mkdir(path / "00000009.safetensors"), name)
        yield Case(f"train with a folder in {name}", resume, make, status=(0, 2), logs=True,
                   names="run", writes="run/.*")  # fmt: skip
    yield Case("train without training", resume, copied(shutil.rmtree, "training"), names="run",
               logs=True)  # fmt: skip
    yield Case("train without config.json", resume, copied(Path.unlink, "config.json"), names="run",
               logs=True)  # fmt: skip
    make = changed_configuration("model.max_len", 5)
    yield Case("train with fewer positions", resume, make, names="config.json", logs=True)
    yield Case("train with altered states", resume, copied(altered, "training"), names="training",
               logs=True, writes="run/config.json")  # fmt: skip
    for option in ("--seed 3", "--d-ff 16", "--updates 2", "--dropout 0.3", "--tokenizer bpe-lower",
                   "--norm pre", "--warmup 9"):  # fmt: skip
        line = f"{TRAIN.removesuffix(' run')} @run {option}"
        yield Case(f"train elsewise {option}", line, names=option.split()[0], logs=True)
    line = f"train {FILES} --model rnn --layers 1 --vocabulary 300 --out @run"
    yield Case("train elsewise --model rnn", line, names="run", logs=True)
    for name, before, after in (("heads", b'"h": 2', b'"h": 1'), ("languages", b'"de"', b'"fr"')):

        def other(path: Path, before: bytes = before, after: bytes = after) -> None:
            path.write_bytes(path.read_bytes().replace(before, after))

        make = copied(other, "config.json")
        yield Case(f"translate with other {name}", IN_COPY["translate"], make, names="run")


def altered(folder: Path) -> None:
    """Let all training states say that two updates were made."""
    for path in folder.iterdir():
        data = re.sub(rb'(updates\\+"): [34]', rb"\1: 2", path.read_bytes())
        assert data != path.read_bytes()
        path.write_bytes(data)
