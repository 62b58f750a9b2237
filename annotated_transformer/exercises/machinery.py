"""The steps of ``check``: examples, random cases, and naming the likely mistake."""

from __future__ import annotations

import sys
import time
import zlib
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from annotated_transformer.exercises.calls import (
    Outcome,
    OutOfTimeError,
    call_answer,
    outcome_difference,
    time_limit,
)
from annotated_transformer.exercises.declare import (
    Answer,
    Case,
    Difference,
    Draw,
    Exercise,
    brief_value,
    case_size,
)
from annotated_transformer.exercises.show import draw_examples, print_examples

CASES: Final = 30  # random cases
SECONDS = 0.8  # of CPU time, after which no new random case is tried
LIMIT = 3.0  # for all cases; stops infinite loops
NAMING = 0.5  # of CPU time, for finding the mistake's name


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a check.

    Attributes:
        name: Name of the exercise.
        passed: Whether the answer is right.
        message: One line for the reader.
        tried: Number of cases tried.
        case: The smallest failing case, as arguments for the function.
        mistake: The name of the likely mistake, if it is a known one.
    """

    name: str
    passed: bool
    message: str
    tried: int = 0
    case: Case | None = None
    mistake: str | None = None

    def __repr__(self) -> str:
        """Return the line for the reader."""
        return self.message

    def _ipython_display_(self) -> None:
        """Show nothing, because ``check`` has already printed the result."""


@dataclass
class Trial:
    """The outcomes of all cases tried."""

    tried: list[tuple[Case, Outcome, Outcome, int]]  #: Case, expected, yours and seed.
    failed: list[tuple[Case, Difference]]


def _try_cases(name: str, exercise: Exercise, answer: Answer) -> Trial:
    """Call the answer on all examples and on random cases, until time runs out."""
    trial = Trial([], [])
    end = time.process_time() + SECONDS
    for number in range(len(exercise.examples) + CASES):
        seed = zlib.crc32(f"{name} {number}".encode())  # the same in every run, for any order
        late = time.process_time() > end
        random_number = number - len(exercise.examples)
        if random_number < 0:
            case = exercise.examples[number]
        elif late or len(trial.failed) >= 15:
            break
        else:
            case = exercise.draw(Draw(seed))
        wanted = call_answer(exercise.reference, case, exercise, seed=seed)
        yours = call_answer(answer, case, exercise, seed=seed)
        trial.tried.append((case, wanted, yours, seed))
        if found := outcome_difference(wanted, yours, exercise):
            trial.failed.append((case, found))
        if repr(yours.raised) == "NotImplementedError()":  # PyTorch's own have a text
            break
    return trial


def name_mistake(exercise: Exercise, trial: Trial) -> str | None:
    """Return the known mistake that explains all answers of a trial, or else most wrong ones."""
    end = time.process_time() + NAMING
    best, most = None, len(trial.failed) / 2
    for whole, (message, variant) in product((True, False), exercise.mistakes.items()):
        if time.process_time() > end:
            break
        same = told = 0  # answers that the variant gives too, and those of them that are wrong
        for case, wanted, yours, seed in trial.tried:
            theirs = call_answer(variant, case, exercise, seed=seed)
            if outcome_difference(theirs, yours, exercise) is None:
                same += 1
                told += outcome_difference(wanted, theirs, exercise) is not None
            elif whole:  # one other answer is enough to leave it, which saves time
                break
        if told and same == len(trial.tried):
            return message
        if told > most and not whole:
            best, most = message, told
    return best


def _judge(name: str, exercise: Exercise, trial: Trial) -> Result:
    """Make the result from a trial."""
    tried, examples = len(trial.tried), len(exercise.examples)
    if any(repr(yours.raised) == "NotImplementedError()" for _, _, yours, _ in trial.tried):
        return Result(name, False, f"{name}: not written yet", tried)
    if not trial.failed:
        grads = any(wanted.grads is not None for _, wanted, _, _ in trial.tried)
        what = "shapes, values and gradients" if grads else "inputs"
        text = f"passed: {examples} examples and {tried - examples} cases with random {what}"
        return Result(name, True, f"{name}: {text}", tried)
    case, found = min(trial.failed, key=lambda failure: case_size(failure[0]))
    mistake = None if found.kind == "inputs" else name_mistake(exercise, trial)
    likely = f"likely mistake: {mistake}. " if mistake else ""
    shown = brief_value(case, 160)
    text = f"{likely}{len(trial.failed)} of {tried} cases are wrong; in {shown}, {found.text}"
    return Result(name, False, f"{name}: not yet. {text}", tried, case, mistake)


def run_check(name: str, exercise: Exercise, yours: Any) -> tuple[Result, Trial]:
    """Check an answer without printing anything."""
    trial = Trial([], [])
    if not callable(yours):
        kind = type(yours).__name__
        text = f"{name}: not yet. Give the function itself, not what it returns ({kind})"
        return Result(name, False, text), trial
    try:
        with time_limit(LIMIT):
            answer = exercise.adapt(yours)
            trial = _try_cases(name, exercise, answer)
    except OutOfTimeError:
        text = f"{name}: not yet. No answer within {LIMIT:g} seconds: is there an infinite loop?"
        return Result(name, False, text), trial
    return _judge(name, exercise, trial), trial


def in_notebook() -> bool:
    """Whether the code runs in a Jupyter kernel."""
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


def show_report(exercise: Exercise, result: Result, trial: Trial) -> None:
    """Show the examples, and print the result's message."""
    if trial.tried and "not written yet" not in result.message:
        examples = [one[:3] for one in trial.tried[: len(exercise.examples)]]
        picture = draw_examples(result.name, examples) if in_notebook() else None
        if picture is None:
            print_examples(examples)
        else:
            sys.modules["IPython"].display.display(picture)
    print(result.message)
