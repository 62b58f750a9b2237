"""Signals that end a run between two updates."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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

    found = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    signals = [s for s in found if s is not None and signal.getsignal(s) != signal.SIG_IGN]
    try:
        before = [signal.signal(s, note) for s in signals]
    except ValueError:  # not the main thread: a notebook's server, for instance
        yield caught
        return
    try:
        yield caught
    finally:
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)
