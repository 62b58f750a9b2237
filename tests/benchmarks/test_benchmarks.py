"""What the benchmarks compare is complete and the same; no library of others is needed here."""

import io
import json
import logging
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from annotated_transformer.notation import BOS, PAD
from benchmarks import __main__ as program
from benchmarks import rivals, trainers
from benchmarks.contenders import CONTENDERS, SIZES, Size, make_pairs

TASKS = (*program.TASKS, *program.RIVALS, *program.OTHERS, *program.EQUAL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the libraries would be installed, and a session that forgets what they change."""
    monkeypatch.setattr(trainers, "FOLDER", tmp_path / "trainers")
    monkeypatch.setattr(rivals, "FOLDER", tmp_path / "rivals")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "trainers"
    sys.modules.pop("x_transformers", None)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("task", TASKS)
def test_every_contender_of_a_task_is_known(task: str) -> None:
    known = {*CONTENDERS}
    if task in program.RIVALS:
        known = {*rivals.CONTENDERS}
    elif task in (*program.OTHERS, *program.EQUAL):
        known |= {*trainers.TRAINERS}
    names = program.contenders(task)
    assert names[0] == "ours"
    assert len(set(names)) == len(names) > 1
    assert set(names) <= known


def test_what_is_required_is_measured() -> None:
    for task, name in program.REQUIRED:
        assert name in program.contenders(task)
    assert set(program.LIBRARIES) == set(trainers.TRAINERS)


@pytest.mark.parametrize("name", trainers.TRAINERS)
def test_missing_library_is_named(name: str, folder: Path) -> None:
    with pytest.raises(SystemExit, match="--install"):
        trainers.TRAINERS[name](trainers.TINY)


@pytest.mark.parametrize("task", [*program.OTHERS, *program.EQUAL])
def test_worker_times_steps_of_the_library(
    task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[Size] = []
    # It would change this process.
    monkeypatch.setattr("annotated_transformer.fast.products.prepare_cpu", lambda: None)

    def library(size: Size) -> tuple[torch.nn.Module, object]:
        return torch.nn.Identity(), lambda: steps.append(size)

    monkeypatch.setitem(trainers.TRAINERS, "hugging_face", library)
    monkeypatch.setattr(sys, "stdin", io.StringIO("step\nrest\nstep\nend\n"))
    program.work("hugging_face", *task.split())
    lines = capsys.readouterr().out.splitlines()
    products, first, rested, second, memory = map(json.loads, lines)
    assert products == torch.get_float32_matmul_precision()
    assert len(steps) == 2 + 2  # two warm up
    rate = steps[0].config.dropout if task in program.EQUAL else 0.0
    assert steps[0].config.attention_dropout == steps[0].config.ff_dropout == rate
    usual = replace(steps[0].config, attention_dropout=0.0, ff_dropout=0.0)
    assert replace(steps[0], config=usual) == SIZES[task.split()[1]]
    assert len(first) == len(second) == 2
    assert rested is None
    assert isinstance(memory, float)


def test_libraries_get_the_same_sentences() -> None:
    batch = make_pairs(trainers.TINY)
    whole = batch.target
    assert torch.equal(whole[:, :-1], batch.tgt)
    assert torch.equal(whole[:, 1:], batch.tgt_y)
    assert bool((whole[:, 0] == BOS).all())
    cut = trainers.sentences(batch.tgt_y)
    assert sum(len(row) for row in cut) == batch.ntokens
    assert not any(bool((row == PAD).any()) for row in cut)


LIBRARY = """
import torch

class XTransformer(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, src, tgt, mask):
        self.seen = src, tgt, mask
        return self.weight ** 2
"""


def test_step_trains_on_the_batch(folder: Path) -> None:
    (folder / "x_transformers").mkdir(parents=True)
    (folder / "x_transformers" / "x_transformers.py").write_text(LIBRARY, encoding="utf-8")
    size = trainers.TINY
    model: Any
    model, step = trainers.x_transformers(size)
    losses = [step() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]  # the optimiser has the model's parameters
    options, (src, tgt, mask) = model.options, model.seen
    c, batch = size.config, make_pairs(size)
    for side in ("enc", "dec"):
        assert options[f"{side}_depth"] == c.N
        assert options[f"{side}_num_tokens"] == size.vocabulary
        assert options[f"{side}_ff_mult"] * c.d_model == c.d_ff
        assert options[f"{side}_attn_dim_head"] * options[f"{side}_heads"] == c.d_model
        assert options[f"{side}_attn_dropout"] == options[f"{side}_ff_dropout"] == c.dropout > 0
    assert torch.equal(src, batch.src)
    assert torch.equal(mask, batch.src != PAD)
    assert int((tgt[:, 1:] != -100).sum()) == batch.ntokens


def test_install_takes_no_second_pytorch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> None:
        ran.append(command)
        if "download" in command:
            path = Path(command[command.index("--dest") + 1]) / "fairseq-0.tar.gz"
            with tarfile.open(path, "w:gz") as archive:
                for name in ("fairseq/__init__.py", "fairseq/data/one.py", "setup.py", "x/y.py"):
                    archive.addfile(tarfile.TarInfo(f"fairseq-0/{name}"))

    monkeypatch.setattr(subprocess, "run", run)
    trainers.install()
    assert len(ran) == len(trainers.PACKAGES) + 1
    assert all("--no-deps" in command for command in ran)
    assert not any(package.startswith("torch=") for command in ran for package in command)
    found = {str(p.relative_to(folder / "fairseq")) for p in folder.rglob("*.py")}
    assert found == {"fairseq/__init__.py", "fairseq/data/one.py"}


README = Path(program.__file__).parent / "README.md"


def tasks_of(record: str) -> dict[str, Any]:
    tasks: dict[str, Any] = json.loads((README.parent / record).read_text("utf-8"))["tasks"]
    return tasks


@pytest.mark.parametrize("record", ["record.json", "searches.json", "int8.json"])
def test_the_searches_of_the_records_are_as_fast_as_required(record: str) -> None:
    found = tasks_of(record)
    whole = program.RIVALS.keys() - {"search int8"}  # which has a record of its own
    for task in whole if record == "record.json" else found:
        for name in program.contenders(task)[1:]:
            ratio = found[task][name]["median_s"] / found[task]["ours"]["median_s"]
            assert ratio >= program.REQUIRED[task, name], (task, name)
