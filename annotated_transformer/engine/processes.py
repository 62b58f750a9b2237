"""Setting up and tearing down the process group that torchrun started (§5.2)."""

import contextlib
import os
import re
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.interruption import handle_signals
from annotated_transformer.training.distributed import REPLICAS, DistributedWorld


def rendezvous_store(timeout: timedelta) -> Store:
    """Return the store in which the processes publish their addresses.

    torchrun reuses one store when it restarts the processes, and the addresses of dead processes
    stay in it (PyTorch issue 135712), so each start gets its own prefix. On several machines the
    restart counts may differ, so there torchrun has to be told to create new stores.
    """
    store: Store
    store, rank, _ = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"start {count}", store)
    elif rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        warnings.warn(
            "several machines: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on each, or "
            "restarted processes may try to connect to dead ones",
            stacklevel=2,
        )
    return store


def torchrun_ranks() -> tuple[int, int, int]:
    """Return the rank, world size and local rank from torchrun's environment variables.

    Raises:
        UsageError: One is missing or invalid.
    """
    given, hint = {"LOCAL_RANK": "0", **os.environ}, "start with torchrun, or unset RANK"
    needed = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := ", ".join(name for name in needed if name not in given):
        raise UsageError(f"RANK is set, but not {missing}: {hint}")
    numbers = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not re.fullmatch("[0-9]{1,9}", given[name]):
            raise UsageError(f"{name} is {given[name]!r:.40}, not a whole number: {hint}")
        numbers.append(int(given[name]))
    rank, size, local, port = numbers
    if rank >= size or port >= 2**16:
        raise UsageError(f"RANK is {rank} of WORLD_SIZE {size}, MASTER_PORT {port}: {hint}")
    try:
        socket.getaddrinfo(given["MASTER_ADDR"], port)
    except OSError as error:
        raise UsageError(
            f"MASTER_ADDR {given['MASTER_ADDR']!r:.80}: {error.strerror}: {hint}"
        ) from None
    return rank, size, local


PATIENCE = 15.0  # seconds before the warning


@contextlib.contextmanager
def warn_if_slow(message: str) -> Iterator[None]:
    """Warn if the block takes long; it waits in C++, so signals must end the process at once."""
    timer = threading.Timer(PATIENCE, warnings.warn, [message])
    timer.daemon = True
    with handle_signals(signal.SIG_DFL):
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class ProcessError(ValueError):
    """The processes of this machine cannot work; its first one says why in one line."""


@contextlib.contextmanager
def process_group() -> Iterator[DistributedWorld]:
    """Join the processes that torchrun started; without torchrun, yield a world of one.

    Raises:
        UsageError: torchrun's variables are incomplete or invalid.
        ProcessError: There are more processes than GPUs.
    """
    if "RANK" not in os.environ:
        yield DistributedWorld()
        return
    (rank, size, local), cuda = torchrun_ranks(), torch.cuda.is_available()
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if cuda and here.isdigit() and int(here) > (count := torch.cuda.device_count()):
        if local:  # the first process of this machine tells
            raise SystemExit(2)
        remedy = f"start torchrun with --nproc-per-node {count}"
        raise ProcessError(f"{here} processes for {count} GPUs: {remedy}")
    if cuda:
        torch.cuda.set_device(local)
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    timeout = timedelta(hours=2)  # the others may have to wait for a download
    with warn_if_slow(f"process {rank} is waiting at {place} for all {size} processes to join"):
        store = rendezvous_store(timeout)
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield DistributedWorld(rank, size, local)
        with contextlib.suppress(RuntimeError):  # who leaves cuts off those who still read
            if store.add("ended", 1) >= size:
                store.set("all ended", "")
            store.wait(["all ended"], timedelta(seconds=60))
    finally:
        # A reducer that outlives the group would destroy it while holding the GIL, for which a
        # thread of the group may be waiting.
        for replica in list(REPLICAS):
            del replica.reducer, replica.logger
        dist.destroy_process_group()
