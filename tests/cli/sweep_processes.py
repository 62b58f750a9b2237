"""Cases of the sweep: places to write to, streams, signals, limits, environment."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from threading import Thread
from typing import Any

from annotated_transformer.cli.arguments import KINDS
from tests.cli.command import full_device
from tests.cli.sweep import PREPARE, TEXT, TRAIN, Case, Make, Place, nothing, put
from tests.cli.sweep_folders import changed_configuration, copied


def closed(place: Place) -> None:
    """Make a folder in which nothing may be written, with a file."""
    folder = place.here / "closed"
    folder.mkdir()
    (folder / "mine.svg").write_bytes(b"mine")
    (folder / "mine.svg").chmod(0o444)
    folder.chmod(0o555)


def loop_svg(place: Place) -> None:
    """Make a link to itself."""
    (place.here / "bad.svg").symlink_to("bad.svg")


BAD_TARGETS: dict[str, tuple[str, Make]] = {
    "a folder": ("bad.svg", lambda place: (place.here / "bad.svg").mkdir()),
    "below a file": ("bad/x.svg", put(b"mine")),
    "a link to itself": ("bad.svg", loop_svg),
    "no right": ("closed/bad.svg", closed),
    "a file of others": ("closed/mine.svg", closed),
    "a name that is too long": (f"{'x' * 300}.svg", nothing),
    "a path that is too long": ("x/" * 3000 + "x.svg", nothing),
    "no UTF-8": ("\udcff.svg", nothing),
    "an empty name": ("", nothing),
    "a kernel's folder": ("/proc/bad.svg", nothing),
    "a full disk": ("full", lambda place: full_device(place.here / "full")),
}
TARGETS = {
    "translate": "translate @run @text/is --beam 1 --quiet -o",
    "score": "score @run @text/valid.de @text/valid.en --quiet -o",
    "parse": "parse @parser @text/dogs.en --beam 1 --quiet -o",
    "export, folder": "export @run - --to ctranslate2",
    "plot": "plot @run -o",
    "train, record": f"{TRAIN} --record",
    "ablation, record": "ablation @run --record",
    "train, folder": TRAIN.removesuffix(" run"),
    "prepare, folder": PREPARE.replace("prepare p", "prepare -"),
}


def outputs() -> Iterator[Case]:
    """Every bad place for every file or folder that is written."""
    for where, line in TARGETS.items():
        for kind, (path, make) in BAD_TARGETS.items():
            if "folder" in where and kind == "a folder":
                continue  # is where it belongs
            if (where, kind) == ("ablation, record", "a full disk"):
                continue  # found at the end, after minutes
            words = line.split()
            words = [path if w == "-" else w for w in words] if "-" in words else [*words, path]
            full = (where, kind) == ("train, record", "a full disk")  # found at the end
            yield Case(
                f"{where}, to {kind}",
                tuple(words),
                make,
                names={"no UTF-8": "not valid UTF-8", "an empty name": "empty"}.get(kind, path[:3]),
                writes="run(/.*)?" if full else "",
                logs=full,
                partial=full,
                job={"user": kind in ("no right", "a file of others", "a kernel's folder")},
            )
    for line in ("translate @run in", "parse @parser in", "score @run in @text/is",
                 "score @run @text/is in"):  # fmt: skip
        for option in ("in", "link", "./in"):
            name = f"{line.replace('@run ', '').replace('@parser ', '')} -o {option}"
            yield Case(name, f"{line} -o {option}", make_input, names="in")
    for line in ("translate @run", "parse @parser", "score @run @text/should"):
        command, folder = line.split()[:2]
        for option in (f"{folder}/config.json", f"{folder}/model.safetensors", "@text/is"):
            yield Case(f"{command} -o {option}", f"{line} @text/is -o {option}", names=option[1:])
    for out in ("in", "link", "link/x", "@run", "@run/config.json", "@text"):
        name = f"export @run {out}, bad"
        line = f"export @run {out} --to ctranslate2"
        yield Case(name, line, make_input, names=out.removeprefix("link").strip("@"))


def make_input(place: Place) -> None:
    """Make a text, and a link to it."""
    (place.here / "in").write_text(TEXT)
    (place.here / "link").symlink_to("in")


PRINTING = {
    "translate": "translate @run @text/is --beam 1 --quiet",
    "evaluate": "evaluate --hypotheses @text/is --references @text/should",
    "compare": "compare @text/is @text/should --references @text/should --samples 9",
    "help": "--help",
    "help of train": "train --help",
}


WORKS = {
    **PRINTING,
    "score": "score @run @text/valid.de @text/valid.en --quiet",
    "parse": "parse @parser @text/dogs.en --beam 1 --quiet",
    "diagnose": "diagnose @text/valid.de @text/valid.en",
    "train": TRAIN,
    "plot": "plot @run -o a.svg",
    "average": "average run",
    "export": "export @run out --to ctranslate2",
}
MADE = "run(/.*)?|a.svg|out(/.*)?"  # what these leave
WRITING = ("train", "plot", "average", "export")
UNBUFFERED = {"environment": {"PYTHONUNBUFFERED": "1"}}


def streams() -> Iterator[Case]:
    """Standard streams that are closed, full, broken, or hold no text."""
    for name, line in PRINTING.items():
        for kind in ("closed", "full"):
            told = Case(f"{name}, output {kind}", line, names="standard output",
                        streams=("/dev/null", kind, ""))  # fmt: skip
            yield told
            yield replace(told, name=f"{told.name}, unbuffered", job=UNBUFFERED)
        good = Case(name, line, status=(0,), logs=True)
        yield replace(good, name=f"{name}, output broken", streams=("/dev/null", "broken", ""))
        yield replace(good, name=f"{name}, input closed", streams=("closed", "", ""))
        for kind in ("closed", "full", "broken"):
            yield replace(good, name=f"{name}, errors {kind}", streams=("/dev/null", "", kind))
        ascii_only = {"environment": {"PYTHONIOENCODING": "ascii"}}
        yield replace(good, name=f"{name}, ascii", job=ascii_only, same=name == "translate")
        yield Case(f"{name}, all closed", line, streams=("closed", "closed", "closed"))
    yield Case("translate, a disk with 300 bytes", PRINTING["translate"], names="standard output",
               partial=True, job={**UNBUFFERED, "limits": {"FSIZE": 300}})  # fmt: skip
    for target in ("ctranslate2", "huggingface"):
        yield Case(f"export, {target}, a disk with 300 bytes", f"export @run out --to {target}",
                   names="out: cannot be written", job={"limits": {"FSIZE": 300}})  # fmt: skip
    for name in ("trian", "translate nowhere", "train --updates 0"):
        for kind in ("closed", "full", "broken"):
            yield Case(f"{name}, errors {kind}", name, streams=("/dev/null", "", kind))
    for kind in ("closed", "full"):
        yield Case(f"serve, output {kind}", "serve @run --port 0", names="standard output",
                   streams=("/dev/null", kind, ""))  # fmt: skip
    for stream in ("closed", "/dev/zero", "@text/latin", "/proc/self/mem",
                   "@run/model.safetensors"):  # fmt: skip
        yield Case(f"translate < {stream}", "translate @run", names="standard input",
                   streams=(stream, "", ""))  # fmt: skip


def piped(place: Place) -> None:
    """Make a pipe into which the text is written as soon as somebody reads."""
    os.mkfifo(place.here / "in")
    text = (place.root / "text" / "is").read_bytes()
    Thread(target=(place.here / "in").write_bytes, args=(text,), daemon=True).start()


def pipes() -> Iterator[Case]:
    """Texts may come from pipes, as the shell's ``<(...)`` has it."""
    yield Case("translate, a FIFO with a writer", "translate @run in --beam 1 --quiet", piped,
               status=(0,), same=True)  # fmt: skip
    yield Case("parse, a FIFO with a writer", "parse @parser in --beam 1 --quiet", piped,
               status=(0,))  # fmt: skip
    yield Case("score, a FIFO with a writer", "score @run in @text/should --quiet", piped,
               status=(0,))  # fmt: skip


def signals() -> Iterator[Case]:
    """Signals while the command waits, or works."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        ends = (128 + number,)
        for delay in (0.0, 0.02, 0.2):
            yield Case(f"translate, {number.name} after {delay} s", "translate @run", status=ends,
                       streams=("silent", "", ""),
                       job={"signal": number, "delay": delay})  # fmt: skip
            yield Case(f"serve, {number.name} after {delay} s", "serve @run --port 0", status=ends,
                       logs=True, partial=True, job={"signal": number, "delay": delay})  # fmt: skip
        for name, line in WORKS.items():
            make = copied(lambda _: None) if name == "average" else nothing
            delay = 0.001 if name.startswith("help") else 0.03
            yield Case(f"{name}, {number.name} at once", line, make, status=(0, *ends), logs=True,
                       partial=True, writes=MADE,
                       job={"signal": number, "delay": delay})  # fmt: skip
        for delay in (0.03, 0.2):  # it takes minutes, for a run of the grammar
            yield Case(f"ablation, {number.name} after {delay} s", "ablation run --quiet",
                       changed_configuration("training.options.corpus", "grammar"), status=ends,
                       partial=True, job={"signal": number, "delay": delay})  # fmt: skip


def limits() -> Iterator[Case]:
    """Too little memory, too small files, too few descriptors."""
    yield Case("train, too large for memory", f"{TRAIN} --d-model 8192 --d-ff 65536 --heads 8",
               names="out of memory", logs=True, job={"limits": {"AS": 300_000_000}})  # fmt: skip
    for name, line in WORKS.items():
        make = copied(lambda _: None) if name == "average" else nothing
        for limit in ({"NOFILE": 4}, {"NOFILE": 8}):
            yield Case(f"{name}, {limit}", line, make, status=(0, 2), logs=True, writes=MADE,
                       job={"limits": limit})  # fmt: skip
        if name in WRITING:
            yield Case(f"{name}, files of 2,000 bytes", line, make, logs=True, writes=MADE,
                       names="cannot be written", job={"limits": {"FSIZE": 2000}})  # fmt: skip


TORCHRUN = """
RANK=0                                                        | WORLD_SIZE
RANK=x WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29555   | RANK
RANK=0 WORLD_SIZE=x MASTER_ADDR=localhost MASTER_PORT=29555   | WORLD_SIZE
RANK=0 WORLD_SIZE=0 MASTER_ADDR=localhost MASTER_PORT=29555   | WORLD_SIZE
RANK=3 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29555   | RANK
RANK=-1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29555  | RANK
RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=x       | MASTER_PORT
RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=99999   | MASTER_PORT
RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29555 LOCAL_RANK=x | LOCAL_RANK
RANK=1 WORLD_SIZE=2 MASTER_ADDR=no.such.host. MASTER_PORT=29555 | MASTER_ADDR
"""
NOWHERE = {"XDG_CACHE_HOME": "", "TMPDIR": "/nowhere", "TERM": "dumb"}


def environments() -> Iterator[Case]:
    """Variables that are missing, or hold nonsense."""
    for row in TORCHRUN.strip().splitlines():
        settings, names = (part.strip() for part in row.split("|"))
        job: dict[str, Any] = {"environment": dict(pair.split("=") for pair in settings.split())}
        yield Case(f"train, {settings}", TRAIN, names=names, job=job)
    for command in ("", *KINDS):
        job = {"environment": {"COLUMNS": "5"}}
        yield Case(f"{command} --help, 5 columns", f"{command} --help", status=(0,), job=job)
        yield Case(f"{command} --updtaes, 5 columns", f"{command} --updtaes 3", job=job)
    for home in ("", "/dev/null"):
        job = {"environment": {**NOWHERE, "HOME": home}}
        for name, line in WORKS.items():
            make = copied(lambda _: None) if name == "average" else nothing
            yield Case(f"{name}, HOME={home}", line, make, status=(0,), logs=True, writes=MADE,
                       job=job)  # fmt: skip
