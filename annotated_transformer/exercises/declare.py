"""The declaration of an exercise, and the comparison of two answers."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

Answer: TypeAlias = Callable[..., Any]
Case: TypeAlias = tuple[Any, ...]  # the arguments of one call


class Draw:
    """A source of random cases; the same seed gives the same case."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.random = random.Random(seed)

    def normal(self, *shape: int) -> Tensor:
        """Draw normal numbers in float64."""
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def integer(self, low: int, high: int) -> int:
        """Draw an integer from ``low`` to ``high``, both included."""
        return self.random.randint(low, high)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Draw a tensor of integers from ``low`` to ``high``, both included."""
        return torch.randint(low, high + 1, shape, generator=self.rng)

    def mask(self, *shape: int, share: float = 0.6) -> Tensor:
        """Draw a boolean mask, true with probability ``share``."""
        return torch.rand(*shape, generator=self.rng) < share


def draw_examples(
    draw: Callable[[Draw], Case], *seeds: int
) -> tuple[list[Case], Callable[[Draw], Case]]:
    """Return three examples, drawn with these seeds or else with 0, 1 and 2, and what draws."""
    return [draw(Draw(seed)) for seed in seeds or range(3)], draw


@dataclass(frozen=True)
class Exercise:
    """One function for the reader to write.

    Attributes:
        reference: The correct function.
        examples: Three small cases, shown with the expected results.
        draw: Makes a random case.
        mistakes: Wrong variants, by the message that names them.
        adapt: Turns a reader's answer into a function with the reference's arguments.
        first: If the reader returns a tuple, compare only its first part.
        tolerance: Largest error, relative and absolute.
        any_float: Accept float32 where float64 is expected.
    """

    reference: Answer
    examples: Sequence[Case]
    draw: Callable[[Draw], Case]
    mistakes: Mapping[str, Answer]
    adapt: Callable[[Answer], Answer] = lambda answer: answer
    first: bool = False
    tolerance: float = 1e-9
    any_float: bool = False


@dataclass(frozen=True)
class Difference:
    """How an answer differs from the expected one."""

    kind: str  #: One of none, type, shape, dtype, nan, value, grad, inputs, error.
    text: str


NUMBERS: Final = (int, float)


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _compare_types(wanted: Tensor, yours: Tensor, any_float: bool) -> Difference | None:
    """Compare the shapes and types of two tensors."""
    if wanted.shape != yours.shape:
        return Difference("shape", f"the shape is {_shape(yours)}, but should be {_shape(wanted)}")
    name, other = (str(t.dtype).removeprefix("torch.") for t in (wanted, yours))
    floats = wanted.is_floating_point(), yours.is_floating_point()
    whole = not any(floats) and torch.bool not in (wanted.dtype, yours.dtype)
    if wanted.dtype != yours.dtype and not whole and not (any_float and all(floats)):
        hint = "; keep the dtype of the inputs" if all(floats) else ""
        return Difference("dtype", f"the dtype is {other}, but should be {name}{hint}")
    return None


def compare_tensors(wanted: Tensor, yours: Tensor, exercise: Exercise) -> Difference | None:
    """Return how a tensor differs from the expected one, None if it does not."""
    if found := _compare_types(wanted, yours, exercise.any_float):
        return found
    a, b = wanted.detach().double(), yours.detach().double()
    if torch.equal(a, b):  # the usual case, and the fastest to see
        return None
    same = torch.isclose(a, b, rtol=exercise.tolerance, atol=exercise.tolerance, equal_nan=True)
    if bool(same.all()):
        return None
    if bool((b.isnan() & ~a.isnan()).any()):
        return Difference("nan", "the result contains NaN")
    place = tuple(int(i) for i in (~same).nonzero()[0])
    digits = 4 if f"{a[place].item():.4g}" != f"{b[place].item():.4g}" else 12
    value = f"{b[place].item():.{digits}g}, but should be {a[place].item():.{digits}g}"
    where, wrong = f"at {place}: " if place else "", int((~same).sum())
    return Difference("value", f"{wrong} of {a.numel()} values are wrong; {where}{value}")


def compare_values(wanted: Any, yours: Any, exercise: Exercise) -> Difference | None:
    """Return how an answer differs from the expected one, None if it does not."""
    if yours is None and wanted is not None:
        return Difference("none", "the result is None: is a return missing?")
    if isinstance(wanted, Tensor):
        if not isinstance(yours, Tensor):
            text = f"the result is of type {type(yours).__name__}, but should be a tensor"
            return Difference("type", text)
        return compare_tensors(wanted, yours, exercise)
    if isinstance(yours, Tensor) and yours.dim() == 0:
        yours = yours.item()
    if isinstance(wanted, NUMBERS) and isinstance(yours, NUMBERS):
        close = math.isclose(wanted, yours, rel_tol=exercise.tolerance, abs_tol=1e-12)
        text = f"the result is {yours:.6g}, but should be {wanted:.6g}"
        return None if close else Difference("value", text)
    if isinstance(wanted, Mapping) and isinstance(yours, Mapping):
        if wanted.keys() != yours.keys():
            text = f"the keys are {list(yours)}, but should be {list(wanted)}"
            return Difference("value", text)
        return _compare_parts(wanted.items(), yours, exercise)
    if isinstance(wanted, list | tuple) and isinstance(yours, list | tuple):
        if len(wanted) != len(yours):
            text = f"the result has {len(yours)} parts, but should have {len(wanted)}"
            return Difference("shape", f"{text}: {brief_value(yours)}, not {brief_value(wanted)}")
        return _compare_parts(enumerate(wanted), yours, exercise)
    if type(wanted) is not type(yours):
        names = type(yours).__name__, type(wanted).__name__
        return Difference("type", f"the result is of type {names[0]}, but should be {names[1]}")
    text = f"the result is {yours!r}, but should be {wanted!r}"
    return None if wanted == yours else Difference("value", text)


def _compare_parts(wanted: Any, yours: Any, exercise: Exercise) -> Difference | None:
    for key, value in wanted:
        if found := compare_values(value, yours[key], exercise):
            return Difference(found.kind, f"part {key!r}: {found.text}")
    return None


def brief_value(value: Any, most: int = 60) -> str:
    """Describe a value in a few words."""
    if isinstance(value, Tensor):
        if value.numel() <= 6:
            return brief_value(value.detach().tolist(), most)
        return f"{str(value.dtype).removeprefix('torch.')} {_shape(value)}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        inner = ", ".join(brief_value(one, most) for one in value)
        text = f"[{inner}]" if isinstance(value, list) else f"({inner})"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{k!r}: {brief_value(v, most)}" for k, v in value.items()) + "}"
    elif callable(value):
        text = str(getattr(value, "__name__", type(value).__name__))
    else:
        text = repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def case_size(value: Any) -> int:
    """Return the size of a case, to find the smallest one that fails."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Mapping | list | tuple):
        return sum(map(case_size, value.values() if isinstance(value, Mapping) else value))
    return len(value) if isinstance(value, str) else abs(value) if isinstance(value, int) else 1
