"""A record says where a result comes from."""

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from annotated_transformer.engine import records
from annotated_transformer.engine.records import make_record, processor_name
from annotated_transformer.engine.system import System
from annotated_transformer.engine.trainer import Trainer


def test_the_record_can_be_read_back(straight: Trainer, system: System) -> None:
    record = make_record(
        system, straight.state, {"val": {"bleu": 1.0}}, "the command", pairs=len(straight.pairs)
    )
    assert json.loads(json.dumps(record)) == record
    assert record["command"] == "the command"
    assert record["corpus"]["pairs"] == len(straight.pairs) > 0
    assert record["seed"] == 0
    assert record["parameters"] == sum(p.numel() for p in system.model.parameters())
    assert record["hardware"]["processor"] == processor_name()
    assert record["curve"] == [asdict(point) for point in straight.state.curve]
    assert set(record["versions"]) >= {"torch", "python", "sacrebleu"}


def test_the_commit_is_that_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package may lie in a repository of its user, whose commit is another."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    home = tmp_path / "venv" / "annotated_transformer" / "engine"
    home.mkdir(parents=True)
    monkeypatch.setattr(records, "__file__", str(home / "records.py"))
    assert records.source_commit() == "unknown"
    monkeypatch.setattr(records, "__file__", str(tmp_path / "package" / "engine" / "records.py"))
    (tmp_path / "package" / "engine").mkdir(parents=True)
    assert len(records.source_commit()) == 40


def test_without_git_or_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert records.source_commit() == "unknown"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: exec("raise OSError"))
    for cores in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert processor_name().endswith(f", {cores} core{'s' * (cores > 1)}")
