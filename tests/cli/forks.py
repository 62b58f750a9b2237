"""A process with everything loaded, which runs the command in forked children.

A fork takes milliseconds where a start takes seconds, and its streams, signals and limits are real.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIMEOUT = 100.0  # seconds; a case takes a fraction of one, and a machine may be busy
NOBODY = 65534


@dataclass(frozen=True)
class Job:
    """One run of the command.

    Attributes:
        words: What follows its name.
        folder: Where it runs.
        streams: Standard input, output and error: a path, or one of ``closed``, ``full`` (a disk
            without space), ``broken`` (a pipe that nobody reads), ``silent`` (one that nobody
            writes).
        environment: Variables that differ from this process's; the empty text unsets one.
        limits: By the names of the module ``resource``; ``AS`` is on top of what is taken.
        signal: Sent after ``delay`` seconds.
        fault: What to break before, see ``tests.cli.faults``.
        user: Whether to run as nobody, where that is possible.
    """

    words: tuple[str, ...]
    folder: str
    streams: tuple[str, str, str]
    environment: dict[str, str] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    signal: int = 0
    delay: float = 0.0
    fault: str = ""
    user: bool = False


class Forks:
    """Starts the process, and gives it jobs."""

    def __enter__(self) -> Forks:
        """Start; this takes seconds."""
        self.socket, other = socket.socketpair()
        program = "import sys; from tests.cli.forks import serve; serve(int(sys.argv[1]))"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        # Large pages: a fork has fewer of them to note.
        environment |= {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(other.fileno())],
            pass_fds=[other.fileno()],
            env=environment,
            start_new_session=True,
        )
        other.close()
        self.channel = self.socket.makefile("rw", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        """Let it end."""
        self.channel.close()
        self.socket.close()
        self.process.wait()

    def run(self, job: Job) -> int | None:
        """Return the status, negative after a signal; None where it had to be killed."""
        self.channel.write(json.dumps(asdict(job)) + "\n")
        self.channel.flush()
        status: int | None = json.loads(self.channel.readline())
        return status


def serve(number: int) -> None:
    """Load everything, then run jobs until the socket is closed."""
    import altair  # noqa: F401
    import ctranslate2  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import numpy.ctypeslib  # noqa: F401
    import sacrebleu.tokenizers.tokenizer_13a  # noqa: F401
    import torch
    from tyro import _docstrings, _parsers, _unsafe_cache

    from annotated_transformer.cli import arguments, sweep, systems, train
    from annotated_transformer.data import corpora
    from annotated_transformer.data.grammar import grammar_pairs
    from annotated_transformer.engine.config import UsageError
    from tests.cli import faults  # noqa: F401
    from tests.cli.sweep import TRAIN

    # Each child would read the commands' source anew, and write the same sentences.
    vars(_docstrings)["get_field_docstring"] = cache(_docstrings.get_field_docstring)
    vars(inspect)["getsourcelines"] = cache(inspect.getsourcelines)
    vars(_unsafe_cache)["clear_cache"] = lambda: None  # nor their types
    vars(corpora)["grammar_pairs"] = cache(grammar_pairs)
    for split, size in (("val", None), ("train", 9), ("train", 50)):
        corpora.load_corpus("grammar", split=split, size=size)
    parsers = vars(_parsers)["ParserSpecification"]
    parsers.from_callable_or_type = staticmethod(_kept(parsers.from_callable_or_type))
    for kind in arguments.KINDS:  # what reads the words is loaded by the first command
        import_module(f"annotated_transformer.cli.{kind}")
        for words in ([kind, "nowhere", "--device", "x"], TRAIN.split()):
            with contextlib.suppress(UsageError):
                arguments.parse_command_line(words)
    torch.set_num_threads(1)
    for module in (sweep, systems, train):
        vars(module)["prepare_cpu"] = _no_measurement
    channel = socket.socket(fileno=number).makefile("rw", encoding="utf-8")
    gc.set_threshold(50_000, 20, 100)  # as in the tests
    gc.freeze()
    for line in channel:
        job = Job(**json.loads(line))
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if not (child := os.fork()):
            _become(job)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        status = _wait(child, job)
        channel.write(json.dumps(status) + "\n")
        channel.flush()


def _kept(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes a parser for the same type and defaults once: a child uses it once."""
    made: dict[str, Any] = {}

    def kept(*types: object, **options: object) -> Any:
        key = repr((types, sorted(options.items())))
        if key not in made:
            made[key] = make(*types, **options)
        return made[key]

    return kept


def _no_measurement() -> str:
    return "float32 products: as they come"


def _wait(child: int, job: Job) -> int | None:
    """Wait for a child, send it its signal, and kill what it leaves."""
    ended, status = os.pidfd_open(child), None
    waits = [job.delay, TIMEOUT - job.delay] if job.signal else [TIMEOUT]
    for number, seconds in enumerate(waits):
        if number:
            os.kill(child, job.signal)
        if select.select([ended], [], [], seconds)[0]:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            break
    os.close(ended)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def _become(job: Job) -> NoReturn:
    """Run the command in this child, and end it as Python does."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for name, value in job.environment.items():
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value
    _redirect(job.streams)
    os.chdir(job.folder)
    for name, limit in job.limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(kind, (limit + (taken if name == "AS" else 0),) * 2)
    if job.user and not os.geteuid():
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    sys.argv = ["annotated-transformer", *map(os.fsdecode, job.words)]
    os._exit(_run(job))


def _run(job: Job) -> int:
    from annotated_transformer.cli import main
    from annotated_transformer.engine.interruption import handle_signals
    from tests.cli.faults import FAULTS

    try:
        with handle_signals(main.raise_interrupt):  # as they are once the command has begun
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            if job.fault:
                FAULTS[job.fault]()
            status = main.main(sys.argv[1:])
    except KeyboardInterrupt as stop:
        status = 128 + int(stop.args[0])
    except SystemExit as stop:
        status = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            status = 120  # as Python does
    return status


def _redirect(streams: tuple[str, str, str]) -> None:
    """Replace the standard streams, and make Python's objects for them."""
    opened = [open_stream(number, name) for number, name in enumerate(streams)]
    for number, descriptor in enumerate(opened):
        if descriptor is not None:
            os.dup2(descriptor, number)
            os.close(descriptor)
    for number, descriptor in enumerate(opened):
        if descriptor is None:
            os.close(number)
    sys.stdin = vars(sys)["__stdin__"] = _stream(0, "r")
    sys.stdout = vars(sys)["__stdout__"] = _stream(1, "w")
    sys.stderr = vars(sys)["__stderr__"] = _stream(2, "w")


def open_stream(number: int, name: str) -> int | None:
    """Open what a standard stream should be; None for one that should be closed."""
    if name == "closed":
        return None
    if name in ("broken", "silent"):
        ends = os.pipe()
        if name == "broken":
            os.close(ends[number == 0])
        return ends[number > 0]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
    return os.open("/dev/full" if name == "full" else name, flags)


def _stream(number: int, mode: str) -> io.TextIOWrapper | None:
    """Return a standard stream as Python opens it at its start."""
    try:
        os.fstat(number)
    except OSError:
        return None
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) and mode == "w"
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    try:
        raw = io.FileIO(number, mode, closefd=False)
    except IsADirectoryError:  # Python itself does not start
        os._exit(2)
    buffer: Any = (
        raw if unbuffered else io.BufferedWriter(raw) if number else io.BufferedReader(raw)
    )
    errors = "backslashreplace" if number == 2 else "strict"
    return io.TextIOWrapper(
        buffer,
        encoding=encoding,
        errors=errors,
        write_through=unbuffered,
        line_buffering=number == 2,
    )
