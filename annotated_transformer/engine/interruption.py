"""Signals that end a command, or stop a run between two updates."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> Iterator[None]:
    """Handle the signals that end a process: Ctrl-C, termination, a closed terminal.

    Ignored signals stay ignored; outside the main thread nothing is changed.
    """
    found = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    signals = [s for s in found if s is not None and signal.getsignal(s) != signal.SIG_IGN]
    before = []
    with suppress(ValueError):  # not the main thread, e.g. in a notebook server
        before = [signal.signal(s, handler) for s in signals]
    try:
        yield
    finally:
        for s, handler_before in zip(signals, before, strict=False):
            signal.signal(s, handler_before)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Put off the signals that end a process until the block is done.

    Raises:
        KeyboardInterrupt: A signal came meanwhile; its argument is the number.
    """
    caught: list[int] = []
    with handle_signals(lambda number, _: caught.append(number)):
        yield
    if caught:
        raise KeyboardInterrupt(caught[0])


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and termination signals in a list, so that updates finish first.

    A signal within a second of the first counts as the same one, because torchrun forwards what
    the terminal has already sent to all processes.

    Raises:
        KeyboardInterrupt: On a later signal.
    """
    caught: list[int] = []
    first = 0.0

    def note(number: int, _: FrameType | None) -> None:
        nonlocal first
        if not caught:
            first = time.monotonic()
        elif time.monotonic() - first > 1:
            raise KeyboardInterrupt(number)
        caught.append(number)

    with handle_signals(note):
        yield caught
