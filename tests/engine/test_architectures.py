"""Every kind of model is trained, stopped, saved, searched and loaded in the same way."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.background.convolutional import ConvolutionConfig
from annotated_transformer.background.seq2seq import RecurrentConfig
from annotated_transformer.engine.checkpointer import checkpoint_paths
from annotated_transformer.engine.checkpoints import (
    CheckpointError,
    json_with_digest,
    load_system,
    load_tensors,
)
from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.precision import PreciseLoss, Precision
from annotated_transformer.engine.records import make_record
from annotated_transformer.engine.system import (
    ARCHITECTURES,
    Architecture,
    model_config,
    translate_lines,
)
from annotated_transformer.engine.trainer import Trainer
from annotated_transformer.fast.search import beam_search, greedy_search
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.training.batches import make_batch
from annotated_transformer.training.loop import evaluate, update
from annotated_transformer.training.optimizer import make_adam
from benchmarks.chapters import definitions
from tests.engine.small import OPTIONS, TEXTS
from tests.processes import together

beam_search_uncached = definitions("translation/beam_search")["beam_search_uncached"]
UNSIZED = OPTIONS.replace(d_model=None, d_ff=None)  # which are for a Transformer
OTHERS = ("rnn", "rnn-attention", "rnn-dot", "convolution")
SMALL: dict[str, Architecture] = {
    "rnn": RecurrentConfig("none", width=6, hidden=5, dropout=0.0),
    "rnn-attention": RecurrentConfig("additive", width=6, hidden=5, dropout=0.0),
    "rnn-dot": RecurrentConfig("dot", width=6, hidden=5, dropout=0.0),
    "convolution": ConvolutionConfig(width=6, kernel=3, layers=2, dropout=0.0, max_len=32),
    "transformer": ModelConfig(N=2, d_model=8, d_ff=8, h=2, dropout=0.0, max_len=32),
}


def built(name: str, seed: int, ends: float = 0.0) -> EncoderDecoder:
    """A small model with sharp opinions, in float64."""
    torch.manual_seed(seed)
    model = SMALL[name].build(11, 11).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    model.get_parameter("generator.proj.bias").data[2] += ends  # the end symbol
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_a_stop_changes_nothing(name: str, tmp_path: Path) -> None:
    options = UNSIZED.replace(architecture=name)
    straight = Trainer(options, tmp_path / "straight", TEXTS)
    assert straight.train(progress=False)
    stopped = Trainer(options.replace(steps=3), tmp_path / "stopped", TEXTS)
    assert not stopped.train(progress=False)
    again = Trainer(options, tmp_path / "stopped", TEXTS)
    assert again.train(progress=False)
    one, two = (load_tensors(checkpoint_paths(run.folder)[-1])[0] for run in (straight, again))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)

    system = load_system(tmp_path / "straight")
    assert system.config == model_config(options, True)
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
    rng = torch.Generator().manual_seed(seed)
    sources = [torch.randint(4, 11, (n,), generator=rng).tolist() for n in lengths]
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
from annotated_transformer.engine.precision import PreciseLoss
from annotated_transformer.engine.processes import process_group
from annotated_transformer.training.batches import make_batch
from annotated_transformer.training.distributed import (
    full_tensor, local_batches, local_validation, replica_loss, replicate, shard)
from annotated_transformer.training.loop import evaluate, update
from annotated_transformer.training.optimizer import make_adam

torch.set_num_threads(1)
with process_group() as world:
    found = []
    kinds = [*(RecurrentConfig(form, 6, 5, dropout=0.0) for form in ("additive", "dot")),
             ConvolutionConfig(6, 3, 2, 0.0, 32)]
    for kind, sharded in [(kind, sharded) for kind in kinds for sharded in (False, True)]:
        torch.manual_seed(world.rank)
        model = kind.build(30, 30).double()
        loss = PreciseLoss(model)
        replica = shard(loss, loss.layers, world) if sharded else replicate(loss, world)
        optimizer = make_adam(model, 1e-2)
        make = lambda sides: make_batch(*sides)
        for group in json.load(open(sys.argv[1])):
            shares = local_batches(group, make, world)
            update(replica, shares, optimizer, loss=replica_loss, world=world)
        batches = local_validation(group, make, world)
        measured = evaluate(replica, batches, loss=replica_loss, world=world)
        weights = [full_tensor(p.detach()).flatten().tolist() for p in model.parameters()]
        found.append([measured.nll, *weights])
    if world.main:
        json.dump(found, open(sys.argv[2], "w"))
"""


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SMALL)
def test_sixteen_bits_give_the_loss_but_for_rounding(name: str, precision: Any) -> None:
    torch.manual_seed(0)
    model, batch = SMALL[name].build(11, 11), make_batch([[4, 5, 6], [7]], [[8, 9], [4, 5, 10]])
    exact, found = (
        PreciseLoss(model, Precision(each))(batch, 0.1, batch.ntokens)[0]
        for each in ("float32", precision)
    )
    assert found.item() == pytest.approx(exact.item(), rel=0.02)
    found.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_two_processes_make_the_weights_of_one(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(5)

    def drawn() -> list[list[list[int]]]:
        return [
            [torch.randint(4, 30, (n,), generator=rng).tolist() for n in (2, 7, 4)]
            for _ in range(2)
        ]

    groups = [[drawn(), drawn()] for _ in range(4)]  # four updates of two micro-batches
    (tmp_path / "groups.json").write_text(json.dumps(groups))
    (tmp_path / "program.py").write_text(PROGRAM)
    together(
        2, tmp_path / "program.py", *(str(tmp_path / n) for n in ("groups.json", "state.json"))
    )
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
        for state in states[2 * number : 2 * number + 2]:  # copies, shards
            assert state[0] == pytest.approx(nll, abs=1e-8)
            for ours, weights in zip(state[1:], model.parameters(), strict=True):
                assert ours == pytest.approx(weights.flatten().tolist(), abs=1e-9)


def test_a_folder_goes_on_with_its_own_model_alone(tmp_path: Path) -> None:
    rnn = UNSIZED.replace(architecture="rnn")
    assert not Trainer(rnn.replace(steps=1), tmp_path, TEXTS).train(progress=False)
    for name in ("rnn-attention", "convolution", "transformer"):
        told = f"its run was started with --architecture rnn, not {name}; give"
        with pytest.raises(UsageError, match=told):
            Trainer(UNSIZED.replace(architecture=name), tmp_path, TEXTS)
    # What --architecture changes is named before what its recipe changes with it.
    with pytest.raises(UsageError, match="--architecture rnn, not transformer; give"):
        Trainer(UNSIZED.replace(layers=2, dropout=None), tmp_path, TEXTS)
    with pytest.raises(UsageError, match=r"--dropout 0\.2, not unset; give"):
        Trainer(rnn.replace(dropout=None), tmp_path, TEXTS)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    assert Trainer(OPTIONS.replace(updates=1), tmp_path, TEXTS).train(progress=False)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    assert data.pop("sha256")
    assert data["architecture"] == "transformer"
    path.write_bytes(json_with_digest({**data, "architecture": "perceptron"}))
    told = re.escape(f"{path}: damaged (ValueError: this version has no architecture 'perceptron'")
    with pytest.raises(CheckpointError, match=told):
        load_system(tmp_path)
    assert set(ARCHITECTURES) == {"transformer", "recurrent", "convolution"}
