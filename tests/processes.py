"""Start programs in several processes."""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

# What every process would load for itself: a fork has it.
LOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel", __name__]


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


def torchrun(size: int, *words: str) -> None:
    """Run a program in several processes of one thread by torchrun, and see that it ends well."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={size}", *words),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
