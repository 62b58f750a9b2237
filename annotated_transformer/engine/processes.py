"""How the processes that torchrun started find each other, and part (§5.2)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.interruption import handling
from annotated_transformer.training.distributed import REPLICAS, DistributedWorld


def rendezvous_store(timeout: timedelta) -> Store:
    """Return the store where the processes leave their addresses.

    torchrun keeps one store while it starts the processes again, and the addresses of the dead
    stay in it (issue 135712 of PyTorch): each start gets names of its own. Over several machines
    the counts may differ; there torchrun has to be told to make new stores.
    """
    store: Store
    store, rank, _ = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"start {count}", store)
    elif rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        warnings.warn(
            "several machines: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on each, or "
            "processes that it starts again may look for those that died",
            stacklevel=2,
        )
    return store


def launched() -> tuple[int, int, int]:
    """Return rank, number of processes and local rank, from torchrun's variables.

    Raises:
        UsageError: One is missing, or cannot be.
    """
    given, hint = {"LOCAL_RANK": "0", **os.environ}, "start with torchrun, or unset RANK"
    needed = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := ", ".join(name for name in needed if name not in given):
        raise UsageError(f"RANK is set and {missing} is not: {hint}")
    numbers = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not re.fullmatch("[0-9]{1,9}", given[name]):
            raise UsageError(f"{name} is {given[name]!r:.40}, not a whole number: {hint}")
        numbers.append(int(given[name]))
    rank, size, local, port = numbers
    if rank >= size or port >= 2**16:
        raise UsageError(f"RANK is {rank} of WORLD_SIZE {size}, MASTER_PORT {port}: {hint}")
    return rank, size, local


PATIENCE = 15.0  # seconds without a word


@contextlib.contextmanager
def told_to_wait(message: str) -> Iterator[None]:
    """Warn if the block takes long; it waits in C++, so signals end the process at once."""
    timer = threading.Timer(PATIENCE, warnings.warn, [message])
    timer.daemon = True
    with handling(signal.SIG_DFL):
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@contextlib.contextmanager
def process_group() -> Iterator[DistributedWorld]:
    """Join the processes that torchrun started; without torchrun, yield a world of one.

    Raises:
        UsageError: torchrun's variables are incomplete, or cannot be.
    """
    if "RANK" not in os.environ:
        yield DistributedWorld()
        return
    (rank, size, local), cuda = launched(), torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    timeout = timedelta(hours=2)  # the others may have to wait for a download
    with told_to_wait(f"process {rank} waits at {place} until all {size} processes are there"):
        store = rendezvous_store(timeout)
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield DistributedWorld(rank, size, local)
    finally:
        # A reducer that outlives the group ends it while it holds Python's lock, for which a
        # thread of the group may be waiting.
        for replica in list(REPLICAS):
            del replica.reducer, replica.logger
        dist.destroy_process_group()
