"""The command for a GPU is rehearsed on the processor; a graph's step decodes as others do."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from annotated_transformer.engine.config import list_recipes
from annotated_transformer.engine.precision import Precision
from annotated_transformer.fast.decoding import start_steps
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.notation import EOS
from annotated_transformer.training.loop import World
from annotated_transformer.translation.beam_search import beam_search
from annotated_transformer.translation.greedy import greedy_search
from benchmarks import gpu, graphs
from benchmarks.rungs import batch_of, draw_pairs

CPU = torch.device("cpu")
SMALL = replace(gpu.REHEARSAL, batches=(2,), updates=1)


def model(seed: int = 0, ends: float = 0.0) -> EncoderDecoder:
    """Return a model in float64 that ends its outputs sooner, the larger ``ends`` is."""
    made = gpu.model_of(replace(gpu.REHEARSAL.smoke, seed=seed), CPU).double().eval()
    made.generator.get_parameter("proj.bias").detach()[EOS] = ends
    return made


SOURCES = [[5, 6, 7, 8], [9], [10, 11, 5, 6, 7, 12], [4, 4]]


@pytest.mark.parametrize("ends", [-9.0, 0.5, 2.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_graphs_step_finds_what_cached_steps_find(seed: int, ends: float) -> None:
    """Also after sentences have ended, and other hypotheses are gone on from."""
    net, start = model(seed, ends), graphs.graphed(9)
    assert greedy_search(net, SOURCES, 9, start=start) == greedy_search(
        net, SOURCES, 9, start=start_steps
    )
    for ours, theirs in zip(
        beam_search(net, SOURCES, max_len=9, n_best=4, start=start),
        beam_search(net, SOURCES, max_len=9, n_best=4, start=start_steps),
        strict=True,
    ):
        assert [one.tokens for one in ours] == [one.tokens for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert abs(one.score - other.score) < 1e-9


def test_a_graph_has_no_more_positions_than_it_was_made_for() -> None:
    net, start = model(), graphs.graphed(2)
    steps = start(net, torch.tensor([[5, 6]]), torch.ones(1, 1, 2, dtype=torch.bool), 1)
    for _ in range(2):
        steps(torch.tensor([4]))
    with pytest.raises(IndexError, match="2 positions"):
        steps(torch.tensor([4]))


def test_the_parts_are_kept_and_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "REHEARSAL", SMALL)
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--out", str(tmp_path)])
    gpu.main()
    records = {part: tmp_path / f"{part}-rehearsal.json" for part in gpu.MEASURED}
    found = {part: json.loads(path.read_text()) for part, path in records.items()}
    assert all(record["rehearsal"] for record in found.values())
    assert gpu.failed(found["smoke"]) == []
    assert len(found["smoke"]["paths"]) == 6
    assert len(found["step"]["steps"]) == 3
    assert len(found["decode"]["searches"]) == 12
    filled = found["profile"]["steps"]["base"]
    assert filled["kernels"][0]["seconds"] == max(one["seconds"] for one in filled["kernels"])
    assert 0 < sum(one["seconds"] for one in filled["kernels"]) <= filled["seconds"]
    before = {path: path.read_bytes() for path in records.values()}
    monkeypatch.setattr(gpu, "MEASURED", {part: None for part in records})
    gpu.main()
    assert {path: path.read_bytes() for path in records.values()} == before
    assert capsys.readouterr().out.count("remove it to do this part again") == 4


def test_a_wrong_path_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose hypotheses are not followed finds other outputs."""
    monkeypatch.setattr(graphs.GraphedSteps, "follow", lambda self, parents: None)
    monkeypatch.setattr(gpu, "REHEARSAL", SMALL)
    monkeypatch.setattr(gpu, "paths", lambda device: [("fast layer", "float32", "fast")])
    monkeypatch.setattr(gpu, "TOLERANCES", {"float32": -1.0})
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="wrong on this device: fast layer, beam, graph"):
        gpu.main()


def test_overflow_at_every_scale_is_no_success() -> None:
    work = gpu.REHEARSAL.smoke
    batch = batch_of(draw_pairs(work))
    precision = Precision("float16", CPU)
    assert precision.scale is not None
    precision.scale.value = 2.0**126
    precision.scale.least = 2.0**126
    with pytest.raises(FloatingPointError, match="every update overflows"):
        gpu.losses(work, batch, 1, precision, "fast", World(), "eager")


@pytest.mark.parametrize("part", sorted(gpu.COMMANDS))
def test_the_commands_exist(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from annotated_transformer.cli.arguments import parse_command_line

    said: list[tuple[str, ...]] = []
    monkeypatch.setattr(gpu, "run", lambda *words: said.append(words))
    gpu.COMMANDS[part](tmp_path / "record.json", CPU)
    module, *words = said[0]
    if module == "annotated_transformer":
        command = parse_command_line(words)
        assert getattr(command, "recipe", None) in (None, *list_recipes())
    else:
        assert module == "benchmarks.ladder"


def test_without_a_gpu_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "--rehearse" in capsys.readouterr().err
