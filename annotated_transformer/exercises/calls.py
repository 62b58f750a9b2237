"""One call of a reader's function: its result, or what went wrong."""

from __future__ import annotations

import contextlib
import copy
import random
import signal
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from annotated_transformer.exercises.declare import (
    Answer,
    Case,
    Difference,
    Exercise,
    compare_tensors,
    compare_values,
)

OURS: Final = str(Path(__file__).parent)
LIBRARIES: Final = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


class OutOfTimeError(BaseException):
    """A check has timed out; a BaseException, so that readers' code does not catch it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``OutOfTimeError`` after this many seconds of CPU time, if signals are available."""
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer") or signal.getitimer(signal.ITIMER_PROF)[0]:
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, and restore their states afterwards."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 3 ms for other devices
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call.

    Attributes:
        value: The result, unless the call failed.
        grads: Gradients of a weighted sum of the result, for each floating-point input.
        error: What went wrong.
        raised: The exception, if there was one.
    """

    value: Any = None
    grads: tuple[Tensor, ...] | None = None
    error: Difference | None = None
    raised: Exception | None = None


def _inputs(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a case."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _inputs(one)


def where_raised(error: BaseException) -> str:
    """Return the line of the reader's code that raised, as a traceback shows it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((OURS, *LIBRARIES))]
    if not own:
        return ""
    return f" (line {own[-1].lineno}: {own[-1].line})" if own[-1].line else ""


def describe_error(error: Exception) -> Difference:
    """Describe an exception to the reader."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where_raised(error)}"
    return Difference("error", text)


def _grads(value: Any, inputs: list[Tensor]) -> tuple[Tensor, ...] | None:
    """Return gradients, or None if the result is not differentiable in any input."""
    outs = [one for one in _inputs(value) if one.requires_grad]
    if not outs:
        return None
    weights = [torch.linspace(0.5, 1.5, out.numel()).to(out).view_as(out) for out in outs]
    return torch.autograd.grad(outs, inputs, weights, materialize_grads=True)


def call_answer(answer: Answer, case: Case, exercise: Exercise, *, seed: int = 0) -> Outcome:
    """Call a function on copies of a case, without and with gradients."""
    given = copy.deepcopy(case)
    try:
        with seeded(seed):
            value = answer(*given)
            if not isinstance(value, str | Tensor | dict | list | tuple) and hasattr(
                value, "__next__"
            ):
                value = list(value)
    except Exception as error:
        return Outcome(error=describe_error(error), raised=error)
    if compare_values(list(case), list(given), exercise):
        return Outcome(error=Difference("inputs", "the function changes its inputs in place"))
    given = copy.deepcopy(case)
    inputs = [x.requires_grad_() for x in _inputs(given)]
    if not inputs:
        return Outcome(value)
    try:
        with seeded(seed):
            result = answer(*given)
            grads = _grads(_first(result) if exercise.first else result, inputs)
    except Exception as error:
        return Outcome(error=describe_error(error), raised=error)
    return Outcome(value, grads)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and value else value


def outcome_difference(wanted: Outcome, yours: Outcome, exercise: Exercise) -> Difference | None:
    """Return how the outcome of a call differs from the expected one."""
    if yours.error or wanted.error:
        both = wanted.error and yours.error and wanted.error.kind == yours.error.kind
        same = both and type(wanted.raised) is type(yours.raised)
        return None if same else yours.error or Difference("error", "an error was expected")
    values = wanted.value, yours.value
    if exercise.first:
        values = _first(values[0]), _first(values[1])
    if found := compare_values(*values, exercise):
        return found
    if wanted.grads is None:
        return None
    if yours.grads is None:
        text = "the values are right, but no gradient reaches the inputs: was .detach(), .item(), "
        return Difference("grad", text + "torch.tensor or no_grad used?")
    for a, b in zip(wanted.grads, yours.grads, strict=True):
        if found := compare_tensors(a, b, exercise):
            return Difference("grad", f"the values are right, but a gradient is not: {found.text}")
    return None
