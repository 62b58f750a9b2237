"""Worker processes that answer lines, each with memory and settings of its own."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]


class WorkerError(RuntimeError):
    """A worker ended; the message has its name and the end of its error output."""


class Worker:
    """A process that answers each line of input with a line of JSON.

    Args:
        name: What it measures.
        command: Arguments for Python.
        path: Folder to put first on Python's search path.
    """

    def __init__(self, name: str, command: Sequence[str], path: Path = ROOT) -> None:
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in ``close``)
        modules = os.pathsep.join([str(path), *(part for part in sys.path if part)])
        self.process = Popen(
            [sys.executable, *command],
            stdin=PIPE,
            stdout=PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "PYTHONPATH": modules},
        )

    def answer(self) -> Any:
        """Return the next answer.

        Raises:
            WorkerError: The process ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise WorkerError(f"{self.name!r} failed: {self.errors.read()[-2000:].strip()}")
        return json.loads(line)

    def ask(self, word: str) -> Any:
        """Send a line, and return its answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # where nobody reads it, ``answer`` says why
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()
        return self.answer()

    @property
    def peak_memory(self) -> int:
        """Peak memory so far, in bytes."""
        return resident("VmHWM", self.process.pid)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(OSError):  # a line that was never read
                if stream is not None:
                    stream.close()

    def __enter__(self) -> Worker:
        """Return the worker, which ends with the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.close()


def reply(answer: Any) -> None:
    """Answer a line; called by the process of a :class:`Worker`."""
    print(json.dumps(answer), flush=True)


def resident(key: Literal["VmRSS", "VmHWM"], pid: int | None = None) -> int:
    """Return the memory of a process in bytes, by default of this one.

    Args:
        key: Current memory (``VmRSS``) or its peak (``VmHWM``).
        pid: Number of another process; 0 is returned for it where the system does not tell.
    """
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="utf-8")
        line = next(line for line in status.splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):  # not Linux: the peak of this process stands for both
        if pid is not None:
            return 0
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
