"""Several processes make the update that one makes: with real processes, in float64."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from annotated_transformer.fast.loss import FastLoss
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.transformer import make_model
from annotated_transformer.notation import PAD, SpecialIds
from annotated_transformer.training.batches import Batch, make_batch
from annotated_transformer.training.distributed import (
    DistributedWorld,
    LossModule,
    full_tensor,
    local_batches,
    local_validation,
    replica_loss,
    replicate,
    reshard,
    shard,
    shard_like,
    split_batch,
)
from annotated_transformer.training.loop import ALONE, evaluate, update
from annotated_transformer.training.optimizer import make_adam, noam_schedule
from tests.processes import together

Sentences = list[list[list[int]]]  # sources and targets
SIDES = st.lists(
    st.tuples(*[st.lists(st.integers(4, 29), max_size=9)] * 2), min_size=1, max_size=12
)


def a_model(seed: int = 0) -> EncoderDecoder:
    torch.manual_seed(seed)
    return make_model(30, 30, N=2, d_model=16, d_ff=32, h=2, dropout=0.0).double()


def drawn(count: int, rng: torch.Generator) -> Sentences:
    sizes = torch.randint(1, 12, (2, count), generator=rng).tolist()
    return [[torch.randint(4, 30, (n,), generator=rng).tolist() for n in side] for side in sizes]


def lengths(batch: Batch) -> torch.Tensor:
    """Return the tokens of each sentence, of both sides, that have to be computed."""
    return batch.src_mask.sum((1, 2)) + (batch.tgt_y != PAD).sum(1)


def rows(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return what a batch has to learn, without padding."""
    both = zip(batch.src.tolist(), batch.tgt_y.tolist(), strict=True)
    return sorted(([i for i in s if i != PAD], [i for i in t if i != PAD]) for s, t in both)


Kind = Callable[[EncoderDecoder], nn.Module]
LAYERS = pytest.mark.parametrize("kind", [LossModule, FastLoss])


# --- shares ----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(pairs=SIDES, size=st.integers(1, 5))
def test_shares_are_all_of_the_batch_and_even(pairs: Any, size: int) -> None:
    batch = make_batch([s for s, _ in pairs], [t for _, t in pairs])
    shares = [split_batch(batch, DistributedWorld(rank, size)) for rank in range(size)]
    counted = [part for part in shares if part.ntokens]
    assert sorted(itertools.chain(*map(rows, counted))) == rows(batch)
    assert max(len(part.src) for part in counted) - min(len(p.src) for p in counted) <= 1
    heavy = [int(lengths(part).sum()) for part in counted]
    assert max(heavy) - min(heavy) <= int(lengths(batch).max())
    for part in counted:  # no column that is padding alone
        assert part.src_mask.any(0).all()
        assert (part.tgt_y != PAD).any(0).all()


def test_a_begin_symbol_that_is_padding_stays() -> None:
    special = SpecialIds(bos=PAD)  # as in Marian's models
    batch = make_batch([[5, 6], [7]], [[8, 9], [10]], special=special)
    shares = [split_batch(batch, DistributedWorld(rank, 2)) for rank in range(2)]
    for i, (share, n) in enumerate(zip(shares, (3, 2), strict=True)):
        assert share.tgt_y.tolist() == batch.tgt_y[i : i + 1, :n].tolist()  # the end is there
        assert torch.equal(share.tgt_mask, batch.tgt_mask[i : i + 1, :n, :n])
    assert sum(share.ntokens for share in shares) == batch.ntokens == 5


@settings(max_examples=60)
@given(count=st.integers(1, 9), size=st.integers(1, 4))
def test_micro_batches_are_dealt_out_and_all_have_equally_many(count: int, size: int) -> None:
    rng = torch.Generator().manual_seed(count)
    batches = [make_batch(*drawn(3, rng)) for _ in range(count)]
    worlds = [DistributedWorld(rank, size) for rank in range(size)]
    for share in (local_batches, local_validation):
        parts = [list(share(batches, lambda batch: batch, world)) for world in worlds]
        assert len({len(part) for part in parts}) == 1
        dealt = itertools.chain(*(rows(batch) for part in parts for batch in part if batch.ntokens))
        assert sorted(dealt) == sorted(itertools.chain(*map(rows, batches)))


@LAYERS
def test_measuring_leaves_the_mode_and_counts_empty_batches_as_nothing(kind: Kind) -> None:
    model, rng = a_model(), torch.Generator().manual_seed(3)
    batches = [make_batch(*drawn(n, rng)) for n in (3, 5, 2)]
    replica, exact = replicate(kind(model.train()), ALONE), evaluate(model, batches)
    parts = [local_validation(batches, lambda b: b, DistributedWorld(k, 2)) for k in range(2)]
    found = evaluate(replica, itertools.chain(*parts), loss=replica_loss)
    assert found.nll == pytest.approx(exact.nll)
    assert found.tokens == exact.tokens
    assert model.training
    assert replica.training


def test_shards_need_several_processes() -> None:
    with pytest.raises(ValueError, match="several processes"):
        shard(LossModule(a_model()), [], ALONE)


def test_without_shards_a_tensor_is_whole() -> None:
    tensor = torch.ones(2)
    assert full_tensor(tensor) is tensor
    assert shard_like(tensor, torch.zeros(2)) is tensor
    reshard(LossModule(a_model()))  # nothing was gathered


@pytest.mark.parametrize(
    ("rank", "rows"), list(enumerate([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0], []]))
)
def test_a_process_reads_its_own_rows_alone(
    rank: int, rows: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DTensor, "from_local", staticmethod(lambda own, *_, **__: own))
    mesh = SimpleNamespace(size=lambda: 5, get_local_rank=lambda: rank)
    tensor, like = torch.arange(7.0), torch.empty(7)
    for name, value in {"device_mesh": mesh, "placements": ()}.items():
        setattr(like, name, value)
    own = shard_like(tensor, like)
    assert own.tolist() == rows
    assert own._base is tensor  # a view, so nothing else of a mapped file was copied


@LAYERS
def test_an_empty_share_changes_nothing(kind: Kind) -> None:
    model = a_model()
    empty = split_batch(make_batch([[5]], [[6]]), DistributedWorld(1, 2))
    assert empty.ntokens == 0
    loss, nll = replicate(kind(model), ALONE)(empty, 0.1, 7)
    loss.backward()
    assert loss.item() == nll.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# --- a world of one --------------------------------------------------------------------------


def test_alone_it_is_the_update_of_the_loop() -> None:
    rng = torch.Generator().manual_seed(1)
    models = a_model(), a_model()
    optimizers = [make_adam(model) for model in models]
    schedules = [noam_schedule(optimizer, 16, 0.1, 5) for optimizer in optimizers]
    world = DistributedWorld()
    replica = replicate(LossModule(models[1]), world)
    for _ in range(4):
        group = [make_batch(*drawn(n, rng)) for n in (3, 5)]
        own = local_batches(group, lambda batch: batch, world)
        one = update(models[0], group, optimizers[0], schedules[0], 0.1)
        other = update(
            replica, own, optimizers[1], schedules[1], 0.1, loss=replica_loss, world=world
        )
        assert (one.nll, one.tokens, one.grad_norm) == (other.nll, other.tokens, other.grad_norm)
    assert schedules[0].last_epoch == schedules[1].last_epoch == 4
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


@LAYERS
def test_nothing_to_learn_and_nan(kind: Kind) -> None:
    model = a_model()
    optimizer = make_adam(model)
    replica = replicate(kind(model), ALONE)
    empty = split_batch(make_batch([[5]], [[6]]), DistributedWorld(1, 2))
    with pytest.raises(ValueError, match="at least one target token"):
        update(replica, [empty], optimizer, loss=replica_loss)
    nn.init.constant_(model.get_parameter("generator.proj.bias"), float("nan"))
    before = model.get_parameter("src_embed.0.lut.weight").clone()
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        update(replica, [make_batch([[5]], [[6]])], optimizer, loss=replica_loss)
    assert torch.equal(model.get_parameter("src_embed.0.lut.weight"), before)
    assert all(p.grad is None for p in model.parameters())


# --- several ---------------------------------------------------------------------------------

PROGRAM = """
import json, sys, torch
import torch.distributed as dist
from annotated_transformer.engine.processes import process_group
from annotated_transformer.fast.loss import FastLoss
from annotated_transformer.fast.model import FastModel, can_accelerate
from annotated_transformer.model.transformer import make_model
from annotated_transformer.training.batches import make_batch
from annotated_transformer.training.distributed import (
    LossModule, full_tensor, local_batches, local_validation, replica_loss,
    replicate, reshard, shard, shard_like)
from annotated_transformer.training.loop import evaluate, update
from annotated_transformer.training.optimizer import make_adam, noam_schedule

torch.set_num_threads(1)
groups, where, (form, layer) = json.load(open(sys.argv[1])), sys.argv[2], sys.argv[3].split()
sums, shards = [0], form == "shards"
with process_group() as world:
    torch.manual_seed(world.rank)  # the weights of rank 0 count
    model = make_model(30, 30, N=2, d_model=16, d_ff=32, h=2, dropout=0.0).double()
    if layer == "fast":
        module = FastLoss(model)
        layers = [*module.model.encoder.layers, *module.model.decoder.layers]
    else:
        module = LossModule(model)
        layers = [*model.encoder.layers, *model.decoder.layers]
    replica = shard(module, layers, world) if shards else replicate(module, world)
    optimizer = make_adam(model)
    schedule = noam_schedule(optimizer, 16, 0.1, 5)
    local = sum(getattr(p, 'to_local', lambda: p)().numel() for p in model.parameters())
    if world.size > 1 and not shards:
        def count(_, bucket):
            sums[0] += bucket.is_last()
            work = dist.all_reduce(bucket.buffer().div_(world.size), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        replica.register_comm_hook(None, count)

    def learn(batches, schedule=None, smoothing=0.0):
        return update(
            replica, batches, optimizer, schedule, smoothing, loss=replica_loss, world=world)

    def measure():
        batches = local_validation(groups[0], lambda sides: make_batch(*sides), world)
        found = evaluate(replica, batches, loss=replica_loss, world=world)
        reshard(replica)
        return found

    losses, norms = [], []
    for group in groups:
        batches = local_batches(group, lambda sides: make_batch(*sides), world)
        made = learn(batches, schedule, 0.1)
        losses.append(made.loss)
        norms.append(made.grad_norm)
        if len(losses) == 10:  # in between: measured, saved, and loaded
            measure()
            for p in model.parameters():
                saved = full_tensor(p.detach()).clone()
                with torch.no_grad():
                    p.zero_()
                    p.copy_(shard_like(saved, p))
    table = model.get_parameter("src_embed.0.lut.weight")
    tied = model.get_parameter("generator.proj.weight") is table
    fast = isinstance(module.model, FastModel) and can_accelerate(model)
    measured = measure()
    kept = [full_tensor(p.detach()).clone() for p in model.parameters()]
    named = {name: full_tensor(p).sum().item() for name, p in model.state_dict().items()}
    first = []
    try:
        world.main_first(lambda: first.append(world.rank))
        world.main_first(lambda: [] if world.rank else 1 / 0)
    except (SystemExit, ZeroDivisionError) as error:
        first.append(type(error).__name__)
    ranks = [int(one) for one in world.gather(torch.tensor([world.rank]))]
    if world.main:  # one process alone meets a NaN
        bias = model.get_parameter("generator.proj.bias")
        getattr(bias, 'to_local', lambda: bias)().detach().fill_(float("nan"))
    told = ""
    try:
        learn(batches)
    except FloatingPointError as error:
        told = str(error)
    state = {"losses": losses, "norms": norms, "sums": sums[0], "told": told, "named": named,
             "fast": fast,
             "updates": schedule.last_epoch, "tied": tied, "local": local, "ranks": ranks,
             "measured": [measured.nll, measured.tokens], "first": first,
             "weights": [w.flatten().tolist() for w in kept]}
    with open(f"{where}.{world.rank}", "w") as file:
        json.dump(state, file)
"""


def run(folder: Path, groups: list[list[Sentences]], size: int, form: str) -> list[dict[str, Any]]:
    """Run the program in several processes; return what each of them saw."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "groups.json").write_text(json.dumps(groups))
    together(
        size, folder / "program.py", *(str(folder / n) for n in ("groups.json", "state")), form
    )
    return [json.loads((folder / f"state.{rank}").read_text()) for rank in range(size)]


@pytest.mark.parametrize(
    ("size", "parts", "form"),
    [
        (2, 3, "replicas readable"),
        (2, 3, "replicas fast"),
        (4, 1, "replicas fast"),
        (2, 3, "shards readable"),
        (2, 3, "shards fast"),
    ],
)
def test_processes_and_splits_give_the_same_weights(
    tmp_path: Path, size: int, parts: int, form: str
) -> None:
    rng = torch.Generator().manual_seed(size)
    wholes = [drawn(int(torch.randint(3, 11, (), generator=rng)), rng) for _ in range(20)]
    split = [[[side[k::parts] for side in whole] for k in range(parts)] for whole in wholes]
    states = run(tmp_path, split, size, form)

    model = a_model()
    optimizer = make_adam(model)
    schedule = noam_schedule(optimizer, 16, 0.1, 5)
    made = [update(model, [make_batch(*whole)], optimizer, schedule, 0.1) for whole in wholes]
    measured = evaluate(model, [make_batch(*wholes[0])])
    named = {name: p.sum().item() for name, p in model.state_dict().items()}
    for state in states:
        assert state["losses"] == pytest.approx([one.loss for one in made], abs=1e-9)
        assert state["norms"] == pytest.approx([one.grad_norm for one in made], abs=1e-9)
        assert state["measured"] == pytest.approx([measured.nll, measured.tokens], abs=1e-7)
        assert state["named"] == pytest.approx(named, abs=1e-7)  # under the readable names
        assert state["updates"] == 20
        assert state["fast"] == form.endswith("fast")  # that layer still computes
        assert state["ranks"] == list(range(size))
        assert "lower the learning rate" in state["told"]  # in the processes without nan as well
        for ours, whole in zip(state["weights"], model.parameters(), strict=True):
            assert ours == pytest.approx(whole.flatten().tolist(), abs=1e-9)
    assert states[0]["weights"] == states[-1]["weights"]
    failed = ["ZeroDivisionError", *["SystemExit"] * (size - 1)]  # where the main one has failed
    assert [state["first"] for state in states] == [[k, name] for k, name in enumerate(failed)]
    assert states[0]["tied"]
    held = sum(p.numel() for p in model.parameters())
    if form.startswith("shards"):  # each holds about half
        assert all(state["local"] < 0.6 * held for state in states)
        assert sum(state["local"] for state in states) == held
    else:  # once an update (the last one is NaN), not once a micro-batch
        assert states[0]["local"] == held
        assert states[0]["sums"] == 20 + 1
