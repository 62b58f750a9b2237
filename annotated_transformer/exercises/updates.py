"""Exercises on training: schedule, Adam, label smoothing, dropout, checkpoint averaging."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from annotated_transformer.exercises.declare import Case, Draw, Exercise, draw_examples
from annotated_transformer.training.optimizer import rate
from annotated_transformer.training.regularization import Variant, smoothed_target

State = Mapping[str, Tensor]
Mix = Callable[[float], tuple[float, float]]  # the shares of the old mean and of the gradient


def learning_rate(step: int, d_model: int, warmup: int) -> float:
    """Return the learning rate of an update, counted from 1 (§5.3)."""
    return rate(step, d_model, 1.0, warmup)


def _rate(step: int, d_model: int, warmup: int, *, wide: float = -0.5, late: bool = True) -> float:
    rise = step * warmup**-1.5
    return float(d_model**wide * (min(step**-0.5, rise) if late else rise))


LEARNING_RATE: Final = Exercise(
    learning_rate,
    [(1, 512, 4000), (4000, 512, 4000), (100_000, 512, 4000)],
    lambda draw: (draw.integer(1, 4000), draw.integer(8, 1024), draw.integer(2, 2000)),
    {
        "max instead of min": lambda s, d, w: d**-0.5 * max(s**-0.5, s * w**-1.5),
        "off by one: updates are counted from 1": lambda s, d, w: learning_rate(s + 1, d, w),
        "the rate of the update before":
            lambda s, d, w: learning_rate(s - 1, d, w) if s > 1 else 0.0,
        "the factor 1/√d_model is missing": partial(_rate, wide=0),
        "multiplied by √d_model, not divided": partial(_rate, wide=0.5),
        "divided by d_model, not by its root": partial(_rate, wide=-1),
        "the rate never falls after the warm-up": partial(_rate, late=False),
        "warm-up to the power −0.5, not −1.5": lambda s, d, w: d**-0.5 * min(s**-0.5, s * w**-0.5),
        "the rate stays at its peak: after the warm-up it falls with 1/√step":
            lambda s, d, w: d**-0.5 * min(w**-0.5, s * w**-1.5),
        "the rate falls with 1/step, not with its root":
            lambda s, d, w: d**-0.5 * min(w**0.5 / s, s * w**-1.5),
    },
)  # fmt: skip


@torch.no_grad()
def adam_step(
    weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, lr: float, *,
    beta1: float = 0.9, beta2: float = 0.98, eps: float = 1e-9, correct: tuple[int, int] = (1, 1),
    late: int = 0, power: int = 2, inside: bool = False, root: bool = True, sign: int = -1,
    mix: Mix = lambda beta: (beta, 1 - beta),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Take Adam's ``step``-th step; the options make the known mistakes."""
    m = mix(beta1)[0] * m + mix(beta1)[1] * grad
    v = mix(beta2)[0] * v + mix(beta2)[1] * grad**power
    t = step + late
    mean = m / (1 - beta1**t) if correct[0] else m
    square = v / (1 - beta2**t) if correct[1] else v
    below = (square + eps).sqrt() if inside else square.sqrt() + eps
    return weight + sign * lr * mean / (below if root else square + eps), m, v


def _adam_case(draw: Draw) -> Case:
    shape = draw.integer(1, 2), draw.integer(1, 3)
    w, g, m = (draw.normal(*shape) for _ in range(3))
    return w, g, 0.1 * m, draw.normal(*shape) ** 2, draw.integer(1, 30), 0.01


def _first_step(*grads: float) -> Case:
    grad = torch.tensor([grads], dtype=torch.float64)
    zero = torch.zeros_like(grad)
    return zero, grad, zero, zero, 1, 0.1


def _returned(*case: Any, swap: bool) -> tuple[Tensor, ...]:
    (w, m, v), t = adam_step(*case), case[4]
    return (w, v, m) if swap else (w, m / (1 - 0.9**t), v / (1 - 0.98**t))


ADAM_STEP: Final = Exercise(
    adam_step,
    [_first_step(1.0, -2.0), _first_step(1e-9, 1e-3, 4.0), _adam_case(Draw(7))],
    _adam_case,
    {
        "bias correction missing: divide by 1 − βᵗ": partial(adam_step, correct=(0, 0)),
        "bias correction of the mean missing": partial(adam_step, correct=(0, 1)),
        "bias correction of the squares missing": partial(adam_step, correct=(1, 0)),
        "1 − β in the bias correction: divide by 1 − βᵗ, which grows with the step":
            lambda w, g, m, v, t, lr: adam_step(w, g, m, v, 1, lr),
        "off by one: the first step is number 1": partial(adam_step, late=1),
        "the step counted from 0, where the correction divides by zero: the first has number 1":
            partial(adam_step, late=-1),
        "β₂ 0.999 and ε 1e-8 as in PyTorch; in the paper they are 0.98 and 1e-9":
            partial(adam_step, beta2=0.999, eps=1e-8),
        "β₂ is 0.98 in the paper, not 0.999": partial(adam_step, beta2=0.999),
        "β₁ and β₂ swapped": partial(adam_step, beta1=0.98, beta2=0.9),
        "β and 1 − β swapped": partial(adam_step, mix=lambda beta: (1 - beta, beta)),
        "1 − β missing before the gradient": partial(adam_step, mix=lambda beta: (beta, 1)),
        **{f"ε is 1e-9 in the paper, not {eps:g}": partial(adam_step, eps=eps)
           for eps in (1e-8, 1e-6, 0)},
        "ε inside the root": partial(adam_step, inside=True),
        "ε inside the root, and 1e-8": partial(adam_step, inside=True, eps=1e-8),
        "ε added before the bias correction of the squares":
            lambda *a: adam_step(*a, eps=1e-9 / (1 - 0.98 ** a[4]) ** 0.5),
        "root missing: divide by the root of the squares": partial(adam_step, root=False),
        "the gradient is not squared": partial(adam_step, power=1),
        "sign: a step goes against the gradient": partial(adam_step, sign=1),
        "m and v returned in the wrong order": partial(_returned, swap=True),
        "m and v returned corrected, but this step alone is": partial(_returned, swap=False),
    },
    tolerance=1e-8,
)  # fmt: skip


def smoothed(
    gold: Tensor, vocab: int, epsilon: float, pad: int, *, variant: Variant = "paper"
) -> Tensor:
    """Return the smoothed distributions of ``gold (tokens,)``; zero for padding."""
    dtype = torch.float64
    return smoothed_target(gold, vocab, epsilon, variant=variant, padding_idx=pad, dtype=dtype)


def _wrong_sum(gold: Tensor, vocab: int, epsilon: float, pad: int, *, divide: bool) -> Tensor:
    share = epsilon / vocab if divide else epsilon
    dist = torch.full((len(gold), vocab), share, dtype=torch.float64)
    dist[torch.arange(len(gold)), gold] = 1 - epsilon
    return dist.masked_fill((gold == pad).unsqueeze(1), 0.0)


def _smoothing_case(draw: Draw) -> Case:
    vocab = draw.integer(4, 7)
    gold, pad = draw.integers(0, vocab - 1, draw.integer(1, 5)), draw.integer(0, 3)
    return gold, vocab, 0.05 * draw.integer(1, 8), pad


LABEL_SMOOTHING: Final = Exercise(
    smoothed,
    [(torch.tensor([2]), 5, 0.1, 0), (torch.tensor([3, 1, 0]), 4, 0.4, 0),
     (torch.tensor([1, 2, 3]), 6, 0.0, 0)],
    _smoothing_case,
    {
        "ε spread over the other tokens alone; the paper's source spreads it over all":
            partial(smoothed, variant="others"),
        "ε spread over all but the right token and padding, as in The Annotated Transformer":
            partial(smoothed, variant="article"),
        "the right token gets no share of ε: the sum is below 1": partial(_wrong_sum, divide=True),
        "padding rows not zero: a padding token counts for nothing":
            lambda gold, vocab, eps, pad: smoothed(gold, vocab, eps, -1),
        "ε is not divided among the tokens": partial(_wrong_sum, divide=False),
        "no smoothing at all": lambda gold, vocab, eps, pad: smoothed(gold, vocab, 0.0, pad),
        "ε and 1 − ε swapped": lambda gold, vocab, eps, pad: smoothed(gold, vocab, 1 - eps, pad),
    },
    tolerance=1e-6,
    any_float=True,
)  # fmt: skip


def inverted_dropout(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Apply dropout with mask ``keep``, where each element is dropped with probability p."""
    return x * keep / (1 - p)


def _dropout_case(draw: Draw) -> Case:
    shape, p = (draw.integer(1, 3), draw.integer(2, 5)), 0.1 * draw.integer(1, 8)
    return draw.normal(*shape), draw.mask(*shape, share=1 - p), p


DROPOUT: Final = Exercise(
    inverted_dropout,
    *draw_examples(_dropout_case),
    {
        "scale missing: divide what is left by 1 − p": lambda x, keep, p: x * keep,
        "divided by p, not by 1 − p": lambda x, keep, p: x * keep / p,
        "multiplied by 1 − p, not divided": lambda x, keep, p: x * keep * (1 - p),
        "mask inverted: true means kept": lambda x, keep, p: x * ~keep / (1 - p),
        "mask inverted, and scaled by its share": lambda x, keep, p: x * ~keep / p,
        "divided by the share that happened to be kept, not by 1 − p":
            lambda x, keep, p: x * keep / keep.double().mean(),
        "dropped elements left as they are: they become zero":
            lambda x, keep, p: torch.where(keep, x / (1 - p), x),
    },
)  # fmt: skip


@torch.no_grad()
def average_checkpoints(states: Sequence[State]) -> dict[str, Tensor]:
    """Return the mean of each parameter."""
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def _states_case(draw: Draw) -> Case:
    count, width = draw.integer(2, 5), draw.integer(1, 3)
    return ([{"weight": draw.normal(2, width), "bias": draw.normal(2)} for _ in range(count)],)


def _scaled(states: Sequence[State], factor: float) -> dict[str, Tensor]:
    return {name: value * factor for name, value in average_checkpoints(states).items()}


def _running(states: Sequence[State]) -> dict[str, Tensor]:
    mean = dict(states[0])
    for state in states[1:]:
        mean = {name: (value + state[name]) / 2 for name, value in mean.items()}
    return mean


AVERAGE_CHECKPOINTS: Final = Exercise(
    average_checkpoints,
    [([{"w": torch.tensor([1.0, 2.0]).double()}, {"w": torch.tensor([3.0, 6.0]).double()}],),
     _states_case(Draw(1)), _states_case(Draw(2))],
    _states_case,
    {
        "sum: divide by the number of checkpoints": lambda states: _scaled(states, len(states)),
        "the last checkpoint alone": lambda states: dict(states[-1]),
        "off by one: the first one is left out": lambda states: average_checkpoints(states[1:]),
        "off by one: the last one is left out": lambda states: average_checkpoints(states[:-1]),
        "halved repeatedly: later ones weigh more": _running,
        "divided by one less than the number of checkpoints":
            lambda states: _scaled(states, len(states) / max(1, len(states) - 1)),
    },
)  # fmt: skip


def average_last(states: Sequence[State], k: int) -> dict[str, Tensor]:
    """Return the mean of the last ``k`` checkpoints, or of all if there are fewer."""
    return average_checkpoints(states[-k:])


AVERAGE_LAST: Final = Exercise(
    average_last,
    [([{"w": torch.tensor([x]).double()} for x in (1.0, 2.0, 4.0, 12.0)], k) for k in (1, 2, 5)],
    lambda draw: (*_states_case(draw), draw.integer(1, 5)),
    {
        "the first k, not the last k": lambda states, k: average_checkpoints(states[:k]),
        "all checkpoints, not the last k": lambda states, k: average_checkpoints(states),
        "the last checkpoint alone": lambda states, k: dict(states[-1]),
        "off by one: k + 1 checkpoints": lambda states, k: average_last(states, k + 1),
        "off by one: the last one is left out": lambda states, k: average_last(states[:-1], k),
        "sum: divide by the number of checkpoints":
            lambda states, k: _scaled(states[-k:], min(k, len(states))),
        "divided by k even if there are fewer checkpoints":
            lambda states, k: _scaled(states[-k:], min(k, len(states)) / k),
        "halved repeatedly: later ones weigh more": lambda states, k: _running(states[-k:]),
    },
)  # fmt: skip
