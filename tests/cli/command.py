"""Small texts, runs and errors of the command line, for its tests."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from annotated_transformer.cli.main import main
from annotated_transformer.engine.checkpoints import json_with_digest

SIZES = (
    "--corpus files --layers 1 --vocabulary 400 --updates 6 --warmup 3 --max-len 128 --quiet "
    "--average 2 --average-every 2"
)
Capture = pytest.CaptureFixture[str]


def write(path: Path, lines: list[str] | tuple[str, ...]) -> str:
    """Write lines and return the path as text."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def full_device(path: Path) -> Path:
    """Make a device that is always full; as root our own, for a fault could move the machine's."""
    if os.geteuid():
        path.symlink_to("/dev/full")
    else:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 7))
    return path


def of_grammar(trained: Path, folder: Path) -> Path:
    """Copy a training, as one of a corpus that the package knows."""
    shutil.copytree(trained, folder)
    config = json.loads((folder / "config.json").read_text())
    config["training"]["options"]["corpus"] = "grammar"
    del config["sha256"]
    (folder / "config.json").write_bytes(json_with_digest(config))
    return folder


def fails(capsys: Capture, *words: str | Path, status: int = 2) -> str:
    """Run a command that must fail in one line; return the line."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("annotated-transformer: ")
    return line
