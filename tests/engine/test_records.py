"""A record says where a result comes from."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from annotated_transformer.engine import records
from annotated_transformer.engine.records import make_record, processor
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
    assert record["hardware"]["processor"] == processor()
    assert record["curve"] == [asdict(point) for point in straight.state.curve]
    assert set(record["versions"]) >= {"torch", "python", "sacrebleu"}


def test_without_git_or_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert records.commit() == "unknown"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: exec("raise OSError"))
    for cores in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert processor().endswith(f", {cores} core{'s' * (cores > 1)}")
