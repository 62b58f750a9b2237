"""The sweep's cases and its judge: what a command must do with bad input."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from annotated_transformer.data.corpora import load_corpus
from tests.cli.forks import Forks, Job

NAME = "annotated-transformer"
SHARED = ("run", "other", "parser", "text")
SIZES = (
    "--layers 1 --d-model 8 --d-ff 8 --heads 2 --vocabulary 300 --max-len 32 --updates 4 "
    "--warmup 2 --max-tokens 512 --average 2 --average-every 1 --log-every 1 --save-every 0 --quiet"
)
FILES = "--train-files @text/train.de @text/train.en --valid-files @text/valid.de @text/valid.en"
TRAIN = f"train {FILES} {SIZES} --out run"
PREPARE = f"prepare p {FILES} --vocabulary 300 --workers 1 --quiet"
TREES = (
    "train --pair en-trees --train-files @text/dogs.en @text/dogs.trees --valid-files "
    f"@text/dogs.en @text/dogs.trees {SIZES.replace('300', '270')} --out parser"
)
TEXT = "Der Hund schläft .\n" * 8
REMEDY = re.compile(  # words that tell what to do, or what is possible
    r"\b(?:must|download|redirect|reduce|remove|write|read|give|take|choose|check|see|mean|lower|raise|free|delete|move|mend|train|fetch|use|"
    r"convert|split|name|needs?|not for|is for|together|brings|try|start|unset|wait|drop|install|"
    r"run|send|correct|leave|prepare|goes on|missing value|missing from|expected)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Place:
    """Where a case runs.

    Attributes:
        here: Its own folder, empty at first.
        root: What all cases share, and none may change: ``run``, ``other``, ``text``.
    """

    here: Path
    root: Path

    def fill(self, word: str) -> str:
        """Return a word with ``@`` as the shared folder."""
        return re.sub(r"^@", f"{self.root}/", word)


Make = Callable[[Place], object]


def nothing(_: Place) -> None:
    """Put nothing into the folder."""


def put(data: bytes, name: str = "bad") -> Make:
    """Return what writes a file."""
    return lambda place: (place.here / name).write_bytes(data)


@dataclass(frozen=True)
class Case:
    """A command that cannot work, or must just survive.

    Attributes:
        name: For a reader.
        words: What is typed, in one line or word by word, see :meth:`Place.fill`.
        make: Puts files into the folder.
        status: What the exit may be.
        names: What the line must name, among other things.
        logs: Whether messages may come before the line.
        writes: What may be there, or changed, afterwards: a pattern of names.
        same: Whether the output must be that of the sound run, where the exit is 0.
        partial: Whether results may have been written before the error.
        job: More about the process, see :class:`tests.cli.forks.Job`.
    """

    name: str
    words: str | tuple[str, ...]
    make: Make = nothing
    status: tuple[int, ...] = (2,)
    names: str = ""
    logs: bool = False
    writes: str = ""
    same: bool = False
    partial: bool = False
    streams: tuple[str, str, str] = ("/dev/null", "", "")
    job: dict[str, Any] = field(default_factory=dict)

    @property
    def typed(self) -> tuple[str, ...]:
        """The words, one by one."""
        return tuple(self.words.split()) if isinstance(self.words, str) else self.words


@dataclass(frozen=True)
class Outcome:
    """What a case did."""

    status: int | None
    out: bytes
    err: str
    changed: list[str]


def tree(folder: Path) -> dict[str, str]:
    """Return what is in a folder, with digests."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place) / name
            key = os.fsencode(path.relative_to(folder)).decode("utf-8", "backslashreplace")
            if path.is_symlink():
                found[key] = os.readlink(path)
            elif path.is_file():
                found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[key] = "folder" if path.is_dir() else "special"
    return found


def short_pairs(split: str) -> tuple[list[str], list[str]]:
    """Return eight short sentences and their translations, both of five words or more."""
    text = load_corpus("grammar", split=split, size=100)
    pairs = [pair for pair in text if min(side.count(" ") for side in pair) > 3]
    pairs = sorted(pairs, key=lambda pair: len("".join(pair)))[:8]
    return [source for source, _ in pairs], [target for _, target in pairs]


def build(forks: Forks, root: Path) -> str:
    """Make what all cases share; return what ``translate`` gives with the sound run."""
    root.chmod(0o755)
    text = root / "text"
    text.mkdir()
    train, valid = short_pairs("train"), short_pairs("val")
    odd = ["Der Hund schläft .", "Übung macht den Meister .", *valid[1][2:]]
    for name, lines in (
        ("train.de", train[0]),
        ("train.en", train[1]),
        ("valid.de", valid[0]),
        ("valid.en", valid[1]),
        ("is", odd),
        ("should", valid[1]),
    ):
        (text / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (text / "dogs.en").write_text("a dog sleeps .\nthe dog sleeps .\n" * 4)
    (text / "dogs.trees").write_text("(S (NP DT NN )NP (VP VBZ )VP . )S\n" * 8)
    (text / "latin").write_bytes("für\n".encode("latin-1"))
    found = b""
    for line in (
        TRAIN,
        f"train {FILES} {SIZES} --out other --seed 1 --tokenizer bpe-lower",
        TREES,
        "translate @run @text/is --beam 1 --quiet",
    ):
        case = Case(line, line, status=(0,), logs=True, writes=".*")
        outcome = execute(case, forks, root, keep=True)
        assert judge(case, outcome) == [], outcome.err
        found = outcome.out
    for name in SHARED:
        shutil.copytree(root / name, root / "sound" / name)
    return found.decode()


def execute(
    case: Case, forks: Forks, root: Path, *, fault: str = "", keep: bool = False
) -> Outcome:
    """Run a case in a folder of its own, which goes afterwards.

    Args:
        case: What to run.
        forks: Where.
        root: What all cases share.
        fault: What to break before, see ``tests.cli.faults``.
        keep: Share what it leaves with all other cases.
    """
    here = root / "here"
    here.mkdir()
    here.chmod(0o777)
    place = Place(here, root)
    shared, touched = stamps(root), True
    try:
        case.make(place)
        said = [root / "out", root / "err"]
        for path in said:
            path.write_bytes(b"")
        stdin, stdout, stderr = case.streams
        before = tree(here)
        job = Job(
            words=tuple(place.fill(word) for word in case.typed),
            folder=str(here),
            streams=(place.fill(stdin), stdout or str(said[0]), stderr or str(said[1])),
            fault=fault,
            **case.job,
        )
        status = forks.run(job)
        after = tree(here)
        changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        changed = [key for key in changed if not re.fullmatch(case.writes or "-", key)]
        touched = stamps(root) != shared
        changed += ["what all share"] if touched else []
        out, err = (path.read_bytes() for path in said)
        return Outcome(status, out, err.decode("utf-8", "backslashreplace"), sorted(changed))
    finally:
        if keep:
            for name in ("run", "other", "parser"):
                if (here / name).is_dir():
                    shutil.copytree(here / name, root / name)
        if (here / "closed").is_dir():
            (here / "closed").chmod(0o755)
        shutil.rmtree(here)
        if touched and not keep:  # what one case has done is no other's fault
            for name in SHARED:
                shutil.rmtree(root / name, ignore_errors=True)
                shutil.copytree(root / "sound" / name, root / name)


def stamps(root: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of what all cases share."""
    found = {}
    for name in SHARED:
        for folder, folders, files in os.walk(root / name):
            for path in (f"{folder}/{each}" for each in folders + files):
                state = os.stat(path)
                found[path] = (state.st_size, state.st_mtime_ns)
    return found


def judge(case: Case, outcome: Outcome, sound: str = "") -> list[str]:
    """Return what is wrong with an outcome; nothing where all is well.

    Args:
        case: What was run.
        outcome: What it did.
        sound: What ``translate`` gives with the sound run.
    """
    found = []
    status, lines = outcome.status, outcome.err.splitlines()
    told = [line for line in lines if line.startswith(f"{NAME}: ")]
    if status is None:
        return ["it hangs"]
    if status not in case.status:
        found.append(f"the status is {status}")
    if "Traceback" in outcome.err:
        found.append("there is a traceback")
    if outcome.changed:
        found.append(f"it leaves or changes {', '.join(outcome.changed)}")
    if status and outcome.out and not case.partial:
        found.append("there are results, too")
    if case.streams[2]:
        return found
    if status == 2 and (len(told) != 1 or lines[-1] != told[0]):
        found.append("the error is not one line, the last one")
    elif status == 2:
        if case.names not in told[0]:
            found.append(f"the line does not name {case.names}")
        if not REMEDY.search(told[0]):
            found.append("the line names no remedy")
        if not told[0].isprintable() or len(told[0]) > 600:
            found.append("the line cannot be read")
    if len(told) < len(lines) and not case.logs:
        found.append("there are other lines")
    if status in (130, 143, 129) and len(told) > 1:
        found.append("there is more than a line")
    if not status and case.same and outcome.out.decode() != sound:
        found.append("the result is another one")
    return found
