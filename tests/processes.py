"""Start programs in several processes."""

import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path

import pytest
import torch

needs_proc = pytest.mark.skipif(
    not Path("/proc").exists(), reason="finds processes as Linux shows them"
)
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")

# What every process would load for itself: a fork has it.
LOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run", "torch.nn.parallel",
          "annotated_transformer.cli.train", __name__]  # fmt: skip


def together(size: int, program: Path, *words: str) -> None:
    """Run a program in processes that know each other, and see that all end well.

    They have the variables that torchrun sets, and are forked from one that has loaded PyTorch.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = program.with_suffix(".err")
    processes = [
        context.Process(target=_one, args=(rank, size, port, str(said), str(program), *words))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
        process.kill()  # nothing, where it has ended
    status = [process.exitcode for process in processes]
    assert status == [0] * size, f"{status}: {said.read_text(encoding='utf-8')[-3000:]}"


def _one(rank: int, size: int, port: int, said: str, *words: str) -> None:
    """Be one of the processes."""
    with open(said, "ab") as errors:
        os.dup2(errors.fileno(), 2)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


class Command:
    """The command line, or torchrun's, in a process of its own: forked, on one thread."""

    def __init__(self, words: list[str], said: Path, **torchrun: str) -> None:
        """Start it; what it says as errors goes into a file, variables are for torchrun."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LOADED)
        self.said, target = said, _torchrun if torchrun else _command
        self.process = context.Process(target=target, args=(words, str(said)), kwargs=torchrun)
        self.process.start()

    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.exitcode is None

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.process.ident or 0, number)

    def end(self) -> tuple[int | None, str]:
        """Wait for its end; return its status, negative after a signal, and what it said."""
        self.process.join(timeout=300)
        self.process.kill()  # nothing, where it has ended
        return self.process.exitcode, self.said.read_text(encoding="utf-8")


def _silent(said: str) -> None:
    """Print nothing, and write errors into a file."""
    for stream, path in ((1, os.devnull), (2, said)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), stream)


def _command(words: list[str], said: str) -> None:
    """Be the command."""
    from annotated_transformer.cli import main, systems, train

    _silent(said)
    torch.set_num_threads(1)
    for module in (systems, train):  # measuring products takes longer than the test
        vars(module)["prepare_cpu"] = lambda: "float32 products: as they come"
    sys.argv = ["annotated-transformer", *words]
    sys.exit(main.main())


def _torchrun(words: list[str], said: str, **variables: str) -> None:
    """Be torchrun, which starts its own processes."""
    from torch.distributed.run import main

    _silent(said)
    os.environ.update(variables)
    main(words)


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def torchrun(size: int, *words: str, said: Path) -> None:
    """Run a program in several processes of one thread by torchrun, and see that it ends well."""
    words = ("--standalone", f"--nproc-per-node={size}", *words)
    status, told = Command(list(words), said, **ONE_THREAD).end()
    assert status == 0, told[-3000:]
