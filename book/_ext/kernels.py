"""Kernels for the tests of the notebooks, forked from a process that has loaded PyTorch.

A kernel takes a second and a half of a processor to start and to load PyTorch, a fork takes a
hundredth. The kernel itself is ipykernel's own: only its start is another.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from jupyter_client import launcher
from jupyter_client.provisioning import local_provisioner

LAUNCHED = ["-m", "ipykernel_launcher"]  # what is asked for: Python with these words
LOADED = [
    "ipykernel.kernelapp",
    "matplotlib.pyplot",
    "matplotlib_inline.backend_inline",
    "torch._dynamo",  # by the first optimizer
    "altair",  # by the book's figures
    "sacrebleu",
]


class Forks:
    """A process that forks kernels."""

    def __init__(self) -> None:
        """Start it; the first kernel waits until everything is loaded."""
        ours, theirs = socket.socketpair()
        program = "import sys, kernels; kernels.serve(int(sys.argv[1]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.channel = ours.makefile("rw", encoding="utf-8")
        ours.close()
        atexit.register(self.end)

    def end(self) -> None:
        """Let it end."""
        self.channel.close()
        self.process.wait()

    def ask(self, **what: Any) -> Any:
        """Send a request and return the answer."""
        self.channel.write(json.dumps(what) + "\n")
        self.channel.flush()
        return json.loads(self.channel.readline())


class Forked:
    """What jupyter_client wants of a process, as of :class:`subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, forks: Forks, words: list[str], folder: str, variables: dict[str, str]):
        """Fork a kernel that runs in a folder."""
        self.forks, self.returncode = forks, None
        self.pid: int = forks.ask(words=words, folder=folder, variables=variables)

    def poll(self) -> int | None:
        """Return the status of a kernel that has ended."""
        if self.returncode is None:
            self.returncode = self.forks.ask(ended=self.pid)
        return self.returncode

    def wait(self) -> int:
        """Wait until it ends; return its status."""
        if self.returncode is None:
            self.returncode = self.forks.ask(wait=self.pid)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def serve(number: int) -> None:
    """Load what every notebook needs, then fork until the socket is closed."""
    for name in LOADED:
        import_module(name)
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # a tenth of the time, see tests/conftest.py
    channel = socket.socket(fileno=number).makefile("rw", encoding="utf-8")
    for line in channel:
        asked = json.loads(line)
        answer: int | None
        if "words" in asked:
            if not (answer := os.fork()):
                become(asked["words"], asked["folder"], asked["variables"])
            with contextlib.suppress(OSError):  # as the child does: whoever comes first
                os.setpgid(answer, answer)
        else:
            flags = os.WNOHANG if "ended" in asked else 0
            done, status = os.waitpid(asked.get("ended") or asked["wait"], flags)
            answer = os.waitstatus_to_exitcode(status) if done else None
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


def become(words: list[str], folder: str, variables: dict[str, str]) -> NoReturn:
    """Be a kernel in this child, as if it had been started anew."""
    import random

    import numpy as np
    from ipykernel.kernelapp import launch_new_instance

    status = 1
    try:
        os.setpgid(0, 0)  # signals are sent to its group
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        os.environ["JPY_PARENT_PID"] = str(os.getppid())  # a kernel ends with its parent
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        random.seed()
        np.random.seed()
        sys.argv = ["ipykernel_launcher", *words]
        sys.path[0] = ""
        launch_new_instance()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        os._exit(status)


@functools.cache
def forks() -> Forks:
    """Return the process that forks, and start it where it is first needed."""
    return Forks()


def launch(words: list[str], **options: Any) -> Any:
    """Start a kernel, as :func:`jupyter_client.launcher.launch_kernel` does."""
    if words[:3] != [sys.executable, *LAUNCHED] or options.get("env") is None:
        return launcher.launch_kernel(words, **options)
    return Forked(forks(), words[3:], options.get("cwd") or os.getcwd(), options["env"])


def use() -> None:
    """Let jupyter_client fork the kernels of this process, where forks are at hand."""
    if sys.platform == "linux":
        vars(local_provisioner)["launch_kernel"] = launch
