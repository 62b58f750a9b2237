"""Signals that end a command, or a run between two updates."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> Iterator[None]:
    """Give a handler the signals that end a process: Ctrl-C, termination, a closed terminal.

    Those that are ignored stay so; in another thread than the main one, all are left alone.
    """
    found = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    signals = [s for s in found if s is not None and signal.getsignal(s) != signal.SIG_IGN]
    before = []
    with suppress(ValueError):  # not the main thread: a notebook's server, for instance
        before = [signal.signal(s, handler) for s in signals]
    try:
        yield
    finally:
        for s, handler_before in zip(signals, before, strict=False):
            signal.signal(s, handler_before)


@contextmanager
def interruption() -> Iterator[list[int]]:
    """Collect Ctrl-C and termination in a list, so that an update is never cut in two.

    A signal within a second of the first is the same one, that came by another way: torchrun
    passes on what the terminal has sent to all.

    Raises:
        KeyboardInterrupt: At a later signal.
    """
    caught: list[int] = []
    first = 0.0

    def note(number: int, _: FrameType | None) -> None:
        nonlocal first
        if not caught:
            first = time.monotonic()
        elif time.monotonic() - first > 1:
            raise KeyboardInterrupt
        caught.append(number)

    with handling(note):
        yield caught
