"""Processes find each other, say that they wait, and are refused what cannot be."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from annotated_transformer.engine.processes import (
    ProcessError,
    process_group,
    rendezvous_store,
    torchrun_ranks,
)
from tests.processes import ONE_THREAD, Command, together, torchrun


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with process_group() as world:
        assert (world.rank, world.size, world.main) == (0, 1, True)
        assert world.sum(1.5, 2.0) == [1.5, 2.0]
        assert world.main_first(lambda: "done") == "done"
        state = torch.tensor([1, 2], dtype=torch.uint8)
        assert [one.tolist() for one in world.gather(state)] == [[1, 2]]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_without_the_rest_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=f"RANK is set, but not {missing}: .*torchrun"):  # noqa: SIM117
        with process_group():
            pass
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("RANK", "x", "RANK is 'x', not a whole number"),
        ("RANK", "2", "RANK is 2 of WORLD_SIZE 2"),
        ("RANK", "-1", "RANK is '-1', not"),
        ("WORLD_SIZE", "0", "RANK is 0 of WORLD_SIZE 0"),
        ("WORLD_SIZE", "9" * 5000, "WORLD_SIZE is '9999"),
        ("LOCAL_RANK", "", "LOCAL_RANK is '', not"),
        ("MASTER_PORT", "65536", "MASTER_PORT 65536"),
        ("MASTER_ADDR", "no.such.host.", "MASTER_ADDR 'no.such.host.': "),
    ],
)
def test_numbers_of_torchrun_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for key, word in {**given, name: value}.items():
        monkeypatch.setenv(key, word)
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        torchrun_ranks()
    assert len(str(error.value)) < 120


def test_more_processes_than_gpus_are_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for key, word in {**given, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(key, word)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    told = "2 processes for 1 GPUs: start torchrun with --nproc-per-node 1"
    with pytest.raises(ProcessError, match=told), process_group():
        pass
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit), process_group():
        pass


LONELY = """
import signal, sys
from annotated_transformer.engine import processes
processes.PATIENCE = 0.1
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
with processes.process_group():
    pass
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_alone_says_that_it_waits_and_can_be_ended(rank: int) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    given = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    with subprocess.Popen(
        [sys.executable, "-c", LONELY],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **given},
    ) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "waiting" in line)
        assert f"process {rank} is waiting at localhost:{port} for all 2 processes to join" in said
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == -signal.SIGINT


AGAIN = """
import os, pathlib, signal, sys, time, torch
import torch.distributed as dist
from annotated_transformer.engine.processes import process_group
mark = pathlib.Path(sys.argv[1])
again = mark.exists()
time.sleep(2 * again * int(os.environ["RANK"]))  # the other one looks for an address that is gone
with process_group() as world:
    total = torch.ones(())
    dist.all_reduce(total)
    if not again and world.rank == 1:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
"""


LATE = """
import sys, time
from pathlib import Path
from annotated_transformer.engine.processes import process_group

with process_group() as world:
    if world.rank:
        time.sleep(1)
        Path(sys.argv[1]).touch()
assert Path(sys.argv[1]).exists()
"""


def test_nobody_leaves_while_others_are_at_work(tmp_path: Path) -> None:
    """A process that ends resets its connections, from which another may still have to read."""
    (program := tmp_path / "program.py").write_text(LATE)
    together(2, program, str(tmp_path / "late"))


def test_processes_that_are_started_again_do_not_look_for_the_dead(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(AGAIN)
    words = ["--max-restarts=1", str(tmp_path / "again.py"), str(tmp_path / "mark")]
    torchrun(2, *words, said=tmp_path / "said")


def test_two_machines_start_again_where_torchrun_is_told_how(tmp_path: Path) -> None:
    """Two agents on this machine, which count their starts differently."""
    (tmp_path / "again.py").write_text(AGAIN)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    words = f"--nnodes=2 --nproc-per-node=1 --max-restarts=3 --rdzv-id=a --rdzv-backend=c10d \
        --rdzv-endpoint={place} {tmp_path / 'again.py'} {tmp_path / 'mark'}"
    environment = {**ONE_THREAD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [Command(words.split(), tmp_path / f"said{n}", **environment) for n in range(2)]
    status, said = zip(*(agent.end() for agent in agents), strict=True)
    assert status == (0, 0), said
    assert (tmp_path / "mark").exists()
    assert "TORCH_DISABLE" not in "".join(said)


def test_several_machines_are_told_how_to_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port), "GROUP_WORLD_SIZE": "2"}
    agent = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**given, **agent}.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        rendezvous_store(timedelta(seconds=20)).set("here", "yes")
