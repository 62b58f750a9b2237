"""Several processes make the update that one makes: with real processes, in float64."""

import itertools
import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from annotated_transformer.model.transformer import EncoderDecoder, make_model
from annotated_transformer.notation import PAD
from annotated_transformer.training.batches import Batch, make_batch
from annotated_transformer.training.distributed import (
    World,
    evaluate_together,
    meet,
    own_shares,
    replicate,
    share,
    together,
    update_together,
)
from annotated_transformer.training.loop import evaluate, update
from annotated_transformer.training.optimizer import make_adam, noam_schedule
from tests.processes import torchrun

Sentences = list[list[list[int]]]  # sources and targets
SIDES = st.lists(
    st.tuples(*[st.lists(st.integers(4, 29), max_size=9)] * 2), min_size=1, max_size=12
)


def a_model(seed: int = 0) -> EncoderDecoder:
    torch.manual_seed(seed)
    return make_model(30, 30, N=2, d_model=16, d_ff=32, h=2, dropout=0.0).double()


def drawn(count: int, chance: torch.Generator) -> Sentences:
    sizes = torch.randint(1, 12, (2, count), generator=chance).tolist()
    return [[torch.randint(4, 30, (n,), generator=chance).tolist() for n in side] for side in sizes]


def rows(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return what a batch has to learn, without padding."""
    both = zip(batch.src.tolist(), batch.tgt_y.tolist(), strict=True)
    return sorted(([i for i in s if i != PAD], [i for i in t if i != PAD]) for s, t in both)


# --- shares ----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(pairs=SIDES, size=st.integers(1, 5))
def test_shares_are_all_of_the_batch_and_even(pairs: Any, size: int) -> None:
    batch = make_batch([s for s, _ in pairs], [t for _, t in pairs])
    shares = [share(batch, World(rank, size)) for rank in range(size)]
    counted = [part for part in shares if part.ntokens]
    assert sorted(itertools.chain(*map(rows, counted))) == rows(batch)
    assert max(len(part.src) for part in counted) - min(len(p.src) for p in counted) <= 1
    heavy = [int(part.src_keep.sum() + part.tgt_keep.sum()) for part in counted]
    longest = int((batch.src_keep.sum(1) + batch.tgt_keep.sum(1)).max())
    assert max(heavy) - min(heavy) <= longest
    for part in counted:  # no column that is padding alone
        assert part.src_keep.any(0).all()
        assert part.tgt_keep.any(0).all()


@settings(max_examples=60)
@given(count=st.integers(1, 9), size=st.integers(1, 4))
def test_micro_batches_are_dealt_out_and_all_have_equally_many(count: int, size: int) -> None:
    chance = torch.Generator().manual_seed(count)
    batches = [make_batch(*drawn(3, chance)) for _ in range(count)]
    parts = [own_shares(batches, lambda batch: batch, World(rank, size)) for rank in range(size)]
    assert len({len(part) for part in parts}) == 1
    dealt = itertools.chain(*(rows(batch) for part in parts for batch in part if batch.ntokens))
    assert sorted(dealt) == sorted(itertools.chain(*map(rows, batches)))


def test_measuring_leaves_the_mode_and_counts_idle_batches_as_nothing() -> None:
    model, chance = a_model(), torch.Generator().manual_seed(3)
    batches = [make_batch(*drawn(n, chance)) for n in (3, 5, 2)]
    replica, exact = replicate(model.train(), World()), evaluate(model, batches)
    found = evaluate_together(replica, batches, lambda batch: batch, World())
    assert (found.nll, found.tokens) == (pytest.approx(exact.nll), exact.tokens)
    assert model.training


def test_pieces_need_several_processes() -> None:
    with pytest.raises(ValueError, match="several processes"):
        replicate(a_model(), World(), pieces=True)


def test_an_idle_share_changes_nothing() -> None:
    model = a_model()
    idle = share(make_batch([[5]], [[6]]), World(1, 2))
    assert idle.ntokens == 0
    loss, nll = replicate(model, World())(idle, 0.1, 7)
    loss.backward()
    assert loss.item() == nll.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# --- a world of one --------------------------------------------------------------------------


def test_alone_it_is_the_update_of_the_loop() -> None:
    chance = torch.Generator().manual_seed(1)
    models = a_model(), a_model()
    optimizers = [make_adam(model) for model in models]
    schedules = [noam_schedule(optimizer, 16, 0.1, 5) for optimizer in optimizers]
    replica = replicate(models[1], World())
    for _ in range(4):
        group = [make_batch(*drawn(n, chance)) for n in (3, 5)]
        one = update(models[0], group, optimizers[0], schedules[0], 0.1)
        other, _ = update_together(replica, group, optimizers[1], World(), schedules[1], 0.1)
        assert (one.nll, one.tokens) == (other.nll, other.tokens)
    assert schedules[0].last_epoch == schedules[1].last_epoch == 4
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with together() as world:
        assert (world.rank, world.size, world.main) == (0, 1, True)
        assert world.total(1.5, 2.0) == [1.5, 2.0]
    assert not torch.distributed.is_initialized()


def test_nothing_to_learn_and_no_number() -> None:
    model = a_model()
    optimizer = make_adam(model)
    replica = replicate(model, World())
    idle = share(make_batch([[5]], [[6]]), World(1, 2))
    with pytest.raises(ValueError, match="at least one target token"):
        update_together(replica, [idle], optimizer, World())
    nn.init.constant_(model.generator.proj.bias, float("nan"))
    before = model.src_embed[0].lut.weight.clone()
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        update_together(replica, [make_batch([[5]], [[6]])], optimizer, World())
    assert torch.equal(model.src_embed[0].lut.weight, before)
    assert all(p.grad is None for p in model.parameters())


# --- several ---------------------------------------------------------------------------------

PROGRAM = """
import json, sys, torch
import torch.distributed as dist
from torch import nn
from annotated_transformer.model.transformer import make_model
from annotated_transformer.training.batches import make_batch
from annotated_transformer.training.distributed import (
    evaluate_together, own_shares, replicate, together, update_together, whole)
from annotated_transformer.training.optimizer import make_adam, noam_schedule

torch.set_num_threads(1)
groups, where, pieces = json.load(open(sys.argv[1])), sys.argv[2], sys.argv[3] == "pieces"
sums = [0]
with together() as world:
    torch.manual_seed(world.rank)  # the weights of rank 0 count
    model = make_model(30, 30, N=2, d_model=16, d_ff=32, h=2, dropout=0.0).double()
    replica = replicate(model, world, pieces=pieces)
    optimizer = make_adam(model)
    schedule = noam_schedule(optimizer, 16, 0.1, 5)
    local = sum(getattr(p, 'to_local', lambda: p)().numel() for p in model.parameters())
    if world.size > 1 and not pieces:
        def count(_, bucket):
            sums[0] += 1
            work = dist.all_reduce(bucket.buffer().div_(world.size), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        replica.register_comm_hook(None, count)
    losses = []
    for group in groups:
        shares = own_shares(group, lambda sides: make_batch(*sides), world)
        made, _ = update_together(replica, shares, optimizer, world, schedule, 0.1)
        losses.append(made.loss)
        if len(losses) == 10:  # in between: measured, and saved
            evaluate_together(replica, groups[0], lambda sides: make_batch(*sides), world)
            saved = [whole(p.detach()).numpy().sum() for p in model.parameters()]
    tied = model.generator.proj.weight is model.src_embed[0].lut.weight
    measured = evaluate_together(replica, groups[0], lambda sides: make_batch(*sides), world)
    kept = [whole(p.detach()).clone() for p in model.parameters()]
    first = []
    try:
        world.main_first(lambda: first.append(world.rank))
        world.main_first(lambda: [] if world.rank else 1 / 0)
    except (SystemExit, ZeroDivisionError) as error:
        first.append(type(error).__name__)
    if world.main:  # one process alone meets no number
        bias = model.generator.proj.bias
        getattr(bias, 'to_local', lambda: bias)().detach().fill_(float("nan"))
    told = ""
    try:
        update_together(replica, shares, optimizer, world)
    except FloatingPointError as error:
        told = str(error)
    state = {"losses": losses, "sums": sums[0], "told": told, "updates": schedule.last_epoch,
             "tied": tied, "local": local, "measured": [measured.nll, measured.tokens],
             "first": first, "weights": [w.flatten().tolist() for w in kept]}
    with open(f"{where}.{world.rank}", "w") as file:
        json.dump(state, file)
"""


AGAIN = """
import os, pathlib, signal, sys, time, torch
import torch.distributed as dist
from annotated_transformer.training.distributed import together
mark = pathlib.Path(sys.argv[1])
again = mark.exists()
time.sleep(2 * again * int(os.environ["RANK"]))  # the other one looks for an address that is gone
with together() as world:
    total = torch.ones(())
    dist.all_reduce(total)
    if not again and world.rank == 1:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
"""


def test_processes_that_are_started_again_do_not_look_for_the_dead(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(AGAIN)
    torchrun(2, "--max-restarts=1", str(tmp_path / "again.py"), str(tmp_path / "mark"))


def test_two_machines_start_again_where_torchrun_is_told_how(tmp_path: Path) -> None:
    """Two agents on this machine, which count their starts differently."""
    (tmp_path / "again.py").write_text(AGAIN)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    words = f"-m torch.distributed.run --nnodes=2 --nproc-per-node=1 --max-restarts=3 --rdzv-id=a \
        --rdzv-backend=c10d --rdzv-endpoint={place}"
    environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [
        subprocess.Popen(
            [sys.executable, *words.split(), str(tmp_path / "again.py"), str(tmp_path / "mark")],
            stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        said = [agent.communicate(timeout=120)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert (tmp_path / "mark").exists()
    assert "TORCH_DISABLE" not in "".join(said)


def test_several_machines_are_told_how_to_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port), "GROUP_WORLD_SIZE": "2"}
    agent = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**given, **agent}.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        assert meet(timedelta(seconds=20))[1:] == (0, 2)


def run(
    folder: Path, groups: list[list[Sentences]], size: int, form: str = "copies"
) -> list[dict[str, Any]]:
    """Run the program in several processes; return what each of them saw."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "groups.json").write_text(json.dumps(groups))
    torchrun(size, *[str(folder / n) for n in ("program.py", "groups.json", "state")], form)
    return [json.loads((folder / f"state.{rank}").read_text()) for rank in range(size)]


@pytest.mark.parametrize(
    ("size", "parts", "form"), [(2, 3, "copies"), (4, 1, "copies"), (2, 3, "pieces")]
)
def test_processes_and_splits_give_the_same_weights(
    tmp_path: Path, size: int, parts: int, form: str
) -> None:
    chance = torch.Generator().manual_seed(size)
    wholes = [drawn(int(torch.randint(3, 11, (), generator=chance)), chance) for _ in range(20)]
    split = [[[side[k::parts] for side in whole] for k in range(parts)] for whole in wholes]
    states = run(tmp_path, split, size, form)

    model = a_model()
    optimizer = make_adam(model)
    schedule = noam_schedule(optimizer, 16, 0.1, 5)
    losses = [
        update(model, [make_batch(*whole)], optimizer, schedule, 0.1).loss for whole in wholes
    ]
    measured = evaluate(model, [make_batch(*wholes[0])])
    for state in states:
        assert state["losses"] == pytest.approx(losses, abs=1e-9)
        assert state["measured"] == pytest.approx([measured.nll, measured.tokens], abs=1e-7)
        assert state["updates"] == 20
        assert "lower the learning rate" in state["told"]  # in the processes without nan as well
        for ours, whole in zip(state["weights"], model.parameters(), strict=True):
            assert ours == pytest.approx(whole.flatten().tolist(), abs=1e-9)
    assert states[0]["weights"] == states[-1]["weights"]
    failed = ["ZeroDivisionError", *["SystemExit"] * (size - 1)]  # where the main one has failed
    assert [state["first"] for state in states] == [[k, name] for k, name in enumerate(failed)]
    assert states[0]["tied"]
    held = sum(p.numel() for p in model.parameters())
    if form == "pieces":  # each holds about half
        assert all(state["local"] < 0.6 * held for state in states)
        assert sum(state["local"] for state in states) == held
    else:  # once an update and bucket, not once a micro-batch; here are one or two buckets
        assert states[0]["local"] == held
        assert states[0]["sums"] <= 2 * (20 + 1)
