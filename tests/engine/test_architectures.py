"""Every kind of model is trained, stopped, saved, searched and loaded in the same way."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.background.convolutional import ConvolutionConfig
from annotated_transformer.background.seq2seq import RecurrentConfig, Translator
from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.training.batches import make_batch
from annotated_transformer.training.loop import evaluate, update
from annotated_transformer.training.optimizer import make_adam
from annotated_transformer.translation.beam_search import beam_search, beam_search_uncached
from annotated_transformer.translation.checkpoints import (
    ARCHITECTURES,
    CheckpointError,
    load_system,
    load_tensors,
)
from annotated_transformer.translation.corpora import load_corpus
from annotated_transformer.translation.decoding import greedy_search
from annotated_transformer.translation.system import (
    RECIPES,
    Running,
    Training,
    UsageError,
    check_options,
    find_recipe,
    make_record,
    model_config,
    translate_lines,
)
from tests.processes import torchrun

TEXTS = (load_corpus("grammar", size=60), load_corpus("grammar", split="val").head(12))
OPTIONS = Training(
    layers=1, vocabulary=300, updates=8, warmup=4, max_tokens=256, dropout=0.2, max_len=128
)
OTHERS = ("rnn", "rnn-attention", "rnn-dot", "convolution")
SMALL = {
    "rnn": RecurrentConfig("none", width=6, hidden=5, dropout=0.0),
    "rnn-attention": RecurrentConfig("additive", width=6, hidden=5, dropout=0.0),
    "rnn-dot": RecurrentConfig("dot", width=6, hidden=5, dropout=0.0),
    "convolution": ConvolutionConfig(width=6, kernel=3, layers=2, dropout=0.0, max_len=32),
    "transformer": ModelConfig(N=2, d_model=8, d_ff=8, h=2, dropout=0.0, max_len=32),
}


def built(name: str, seed: int, ends: float = 0.0) -> Translator:
    """A small model with sharp opinions, in float64."""
    torch.manual_seed(seed)
    model = SMALL[name].build(11, 11).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    model.projection.bias.data[2] += ends  # the end symbol
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_a_stop_changes_nothing(name: str, tmp_path: Path) -> None:
    options = OPTIONS.replace(model=name)
    straight = Trainer(options, tmp_path / "straight", TEXTS)
    assert straight.train(progress=False)
    stopped = Trainer(options, tmp_path / "stopped", TEXTS, running=Running(steps=3))
    assert not stopped.train(progress=False)
    again = Trainer(options, tmp_path / "stopped", TEXTS)
    assert again.train(progress=False)
    one, two = (load_tensors(checkpoint_paths(run.folder)[-1])[0] for run in (straight, again))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)

    system = load_system(tmp_path / "straight")
    assert system.config == model_config(options, shared=True)
    assert type(system.config) is type(SMALL[name])
    lines = TEXTS[1].source
    found = translate_lines(system, lines, progress=False)
    assert found == [translate_lines(system, [line], progress=False)[0] for line in lines]
    assert len(translate_lines(system, lines, beam=3, progress=False)) == len(lines)
    record = make_record(straight.system, straight.state, {}, "a command", pairs=1)
    assert (record["architecture"], record["flops"]) == (
        "convolution" if name == "convolution" else "recurrent",
        None,
    )


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(SMALL)),
    seed=st.integers(0, 10_000),
    beam=st.integers(1, 4),
    alpha=st.sampled_from([0.0, 0.6, 2.0]),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_one_search_for_all(
    name: str, seed: int, beam: int, alpha: float, lengths: list[int]
) -> None:
    """Beside the search that computes everything again, one sentence at a time."""
    model = built(name, seed, ends=1.0)
    chance = torch.Generator().manual_seed(seed)
    sources = [torch.randint(4, 11, (n,), generator=chance).tolist() for n in lengths]
    together = beam_search(model, sources, beam=beam, alpha=alpha, max_len=6, n_best=beam)
    for source, found in zip(sources, together, strict=True):
        expected = beam_search_uncached(model, source, beam=beam, alpha=alpha, limit=6)
        assert [h.tokens for h in found] == [h.tokens for h in expected[: len(found)]]
        scores = [h.score for h in expected[: len(found)]]
        assert [h.score for h in found] == pytest.approx(scores, abs=1e-9)
    best = beam_search(model, sources, beam=1, max_len=6)
    assert [found[0].tokens for found in best] == greedy_search(model, sources, 6)


PROGRAM = """
import json, sys, torch
from annotated_transformer.background.convolutional import ConvolutionConfig
from annotated_transformer.background.seq2seq import RecurrentConfig
from annotated_transformer.training.batches import make_batch
from annotated_transformer.training.distributed import (
    evaluate_together, own_shares, replicate, together, update_together, whole)
from annotated_transformer.training.optimizer import make_adam

torch.set_num_threads(1)
with together() as world:
    found = []
    kinds = [*(RecurrentConfig(form, 6, 5, dropout=0.0) for form in ("additive", "dot")),
             ConvolutionConfig(6, 3, 2, 0.0, 32)]
    for kind, pieces in [(kind, pieces) for kind in kinds for pieces in (False, True)]:
        torch.manual_seed(world.rank)
        model = kind.build(30, 30).double()
        replica = replicate(model, world, pieces=pieces)
        optimizer = make_adam(model, 1e-2)
        for group in json.load(open(sys.argv[1])):
            shares = own_shares(group, lambda sides: make_batch(*sides), world)
            update_together(replica, shares, optimizer, world)
        measured = evaluate_together(replica, group, lambda sides: make_batch(*sides), world)
        weights = [whole(p.detach()).flatten().tolist() for p in model.parameters()]
        found.append([measured.nll, *weights])
    if world.main:
        json.dump(found, open(sys.argv[2], "w"))
"""


def test_two_processes_make_the_weights_of_one(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(5)

    def drawn() -> list[list[list[int]]]:
        return [
            [torch.randint(4, 30, (n,), generator=chance).tolist() for n in (2, 7, 4)]
            for _ in range(2)
        ]

    groups = [[drawn(), drawn()] for _ in range(4)]  # four updates of two micro-batches
    (tmp_path / "groups.json").write_text(json.dumps(groups))
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun(2, *(str(tmp_path / name) for name in ("program.py", "groups.json", "state.json")))
    states = json.loads((tmp_path / "state.json").read_text())
    small = (SMALL[name] for name in ("rnn-attention", "rnn-dot", "convolution"))
    for number, kind in enumerate(small):
        torch.manual_seed(0)
        model = kind.build(30, 30).double()
        optimizer = make_adam(model, 1e-2)
        for group in groups:
            batches = [make_batch(*sides) for sides in group]
            update(model, batches, optimizer)
        nll = evaluate(model, [make_batch(*sides) for sides in groups[-1]]).nll
        for state in states[2 * number : 2 * number + 2]:  # copies, pieces
            assert state[0] == pytest.approx(nll, abs=1e-8)
            for ours, weights in zip(state[1:], model.parameters(), strict=True):
                assert ours == pytest.approx(weights.flatten().tolist(), abs=1e-9)


def test_a_folder_goes_on_with_its_own_model_alone(tmp_path: Path) -> None:
    Trainer(OPTIONS.replace(model="rnn"), tmp_path, TEXTS, running=Running(steps=1)).train(
        progress=False
    )
    for name in ("rnn-attention", "convolution", "transformer"):
        with pytest.raises(UsageError, match=f"its training has --model rnn, not {name}; give"):
            Trainer(OPTIONS.replace(model=name), tmp_path, TEXTS)
    # What --model changes is named before what its recipe changes with it.
    with pytest.raises(UsageError, match="--model rnn, not transformer; give"):
        Trainer(OPTIONS.replace(model="transformer", layers=2, dropout=None), tmp_path, TEXTS)
    with pytest.raises(UsageError, match=r"--dropout 0\.2, not unset; give"):
        Trainer(OPTIONS.replace(model="rnn", dropout=None), tmp_path, TEXTS)


def test_other_models_are_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--compile: for the Transformer only"):
        Trainer(OPTIONS.replace(model="rnn"), tmp_path, TEXTS, running=Running(compile=True))


def test_recipes_of_the_other_models() -> None:
    for corpus in RECIPES:
        for name in OTHERS:
            recipe = find_recipe(corpus, model=name)
            assert model_config(replace(recipe, model=name), shared=True).max_len
    assert find_recipe("multi30k") == RECIPES["multi30k"]
    with pytest.raises(UsageError, match="--model perceptron: choose among transformer, rnn,"):
        check_options(OPTIONS.replace(model="perceptron"))  # type: ignore[arg-type]
    for wrong in ({"preset": "base"}, {"norm": "pre"}):
        with pytest.raises(
            UsageError, match="--model rnn: has no --preset but tiny, and no --norm"
        ):
            check_options(OPTIONS.replace(model="rnn", **wrong))  # type: ignore[arg-type]


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    run = Trainer(OPTIONS.replace(updates=1), tmp_path, TEXTS)
    assert run.train(progress=False)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    assert data["architecture"] == "transformer"
    path.write_text(json.dumps({**data, "architecture": "perceptron"}))
    told = re.escape(f"{path}: damaged (ValueError: its architecture 'perceptron' is unknown")
    with pytest.raises(CheckpointError, match=told):
        load_system(tmp_path)
    del data["architecture"]  # as older versions wrote it
    path.write_text(json.dumps(data))
    assert type(load_system(tmp_path).config) is ModelConfig
    assert set(ARCHITECTURES) == {"transformer", "recurrent", "convolution"}
