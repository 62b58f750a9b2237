"""Seeds are measured once, whatever is interrupted; a chapter's definitions run nothing else."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import chapters, heads


def test_a_seed_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def findings(seed: int) -> dict[str, Any]:
        if seed == 2 and len(measured) < 3:
            measured.append(-1)
            raise KeyboardInterrupt
        measured.append(seed)
        return {"two heads": 0.1 * seed}

    optim = types.SimpleNamespace(updates=600)
    names = {"findings": findings, "options": types.SimpleNamespace(optim=optim)}
    monkeypatch.setattr(heads, "definitions", lambda *_: names)
    for job in ("limit_kernels", "keep_large_blocks"):
        monkeypatch.setattr(heads, job, lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    path = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["heads", "--seeds", "4", "--record", str(path)])
    with pytest.raises(KeyboardInterrupt):
        heads.main()
    assert set(json.loads(path.read_text(encoding="utf-8"))["runs"]) == {"0", "1"}
    heads.main()
    record = json.loads(path.read_text(encoding="utf-8"))
    assert measured == [0, 1, -1, 2, 3]
    assert list(record["runs"]) == ["0", "1", "2", "3"]
    assert record["updates"] == 600
    assert "commit" in record


def test_definitions_run_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "SIZE = 3\nOTHER = open('/nowhere')\nprint(OTHER)\n\ndef area():\n    return SIZE**2"
    (tmp_path / "page.md").write_text(
        "---\njupytext:\n  text_representation:\n    extension: .md\n    format_name: myst\n"
        "kernelspec:\n  display_name: Python 3\n  name: python3\n---\n\n"
        f"```{{code-cell}}\n{source}\n```\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(chapters, "BOOK", tmp_path)
    names = chapters.definitions("page", {"SIZE"})
    assert names["area"]() == 9
    assert "OTHER" not in names
    assert "SIZE" not in chapters.definitions("page")
