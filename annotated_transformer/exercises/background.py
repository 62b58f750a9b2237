"""Exercises on the background: recurrence, additive attention, convolution, paired intervals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from annotated_transformer.background.recurrent import gru_step
from annotated_transformer.exercises.declare import Case, Draw, Exercise, draw_examples

Map = Callable[[Tensor], Tensor]


def lstm_step(
    x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor, *,
    order: str = "ifgo", candidate: Map = torch.tanh, out: Map = torch.tanh, forget: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Take one step: gates i, f, candidate g and o are quarters of ``x W + h U + b``."""
    parts = dict(zip(order, (x @ w + h @ u + b).chunk(4, dim=-1), strict=True))
    kept = parts["f"].sigmoid() * c if forget else c
    c = kept + parts["i"].sigmoid() * candidate(parts["g"])
    return parts["o"].sigmoid() * out(c), c


def _lstm_case(draw: Draw) -> Case:
    b, d, hidden = draw.integer(1, 3), draw.integer(1, 3), draw.integer(1, 3)
    state = draw.normal(b, hidden), draw.normal(b, hidden)
    given = draw.normal(d, 4 * hidden), draw.normal(hidden, 4 * hidden), draw.normal(4 * hidden)
    return draw.normal(b, d), *state, *given


def _old_output(*case: Any) -> tuple[Tensor, Tensor]:
    h, c = lstm_step(*case)
    return h / c.tanh() * case[2].tanh(), c


LSTM_STEP: Final = Exercise(
    lstm_step,
    *draw_examples(_lstm_case),
    {
        "input and forget gate swapped: the order is i, f, g, o": partial(lstm_step, order="figo"),
        "candidate and output gate swapped: it is i, f, g, o": partial(lstm_step, order="ifog"),
        "sigmoid of the candidate: it takes tanh": partial(lstm_step, candidate=torch.sigmoid),
        "tanh of the new cell missing": partial(lstm_step, out=lambda c: c),
        "forget gate missing": partial(lstm_step, forget=False),
        "the output uses the old cell, not the new one": _old_output,
        "h and c returned in the wrong order": lambda *a: lstm_step(*a)[::-1],
        "bias missing": lambda x, h, c, w, u, b: lstm_step(x, h, c, w, u, 0 * b),
    },
    tolerance=1e-8,
)  # fmt: skip


def gru(
    from_input: Tensor, from_state: Tensor, h: Tensor, *,
    order: str = "rzn", turned: bool = False, reset: bool = True, candidate: Map = torch.tanh,
) -> Tensor:  # fmt: skip
    """Take one step of a GRU; the options make the known mistakes."""
    products = from_input, from_state
    a, b = (dict(zip(order, t.chunk(3, dim=-1), strict=True)) for t in products)
    r, z = (a["r"] + b["r"]).sigmoid(), (a["z"] + b["z"]).sigmoid()
    n = candidate(a["n"] + (r * b["n"] if reset else b["n"]))
    z = 1 - z if turned else z
    return (1 - z) * n + z * h


def _gru_case(draw: Draw) -> Case:
    b, hidden = draw.integer(1, 3), draw.integer(1, 4)
    return draw.normal(b, 3 * hidden), draw.normal(b, 3 * hidden), draw.normal(b, hidden)


GRU_STEP: Final = Exercise(
    gru_step,
    *draw_examples(_gru_case),
    {
        "update gate inverted: z keeps the old state": partial(gru, turned=True),
        "reset gate missing": partial(gru, reset=False),
        "reset and update gate swapped: the order is r, z, n": partial(gru, order="zrn"),
        "tanh of the candidate missing": partial(gru, candidate=lambda x: x),
        "sigmoid of the candidate: it takes tanh": partial(gru, candidate=torch.sigmoid),
        "the old state is not kept": lambda a, b, h: gru(a, b, 0 * h),
    },
)


def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, w_q: Tensor, w_k: Tensor, w: Tensor, *,
    act: Map = torch.tanh, axis: int = -1, scale: bool = False, softmax: bool = True,
) -> Tensor:  # fmt: skip
    """Attend with ``w · tanh(q W_q + k W_k)``; the options make the known mistakes."""
    hidden = act((query @ w_q).unsqueeze(-2) + (key @ w_k).unsqueeze(-3))  # (..., n, m, hidden)
    scores = (hidden @ w).squeeze(-1) / (w.numel() ** 0.5 if scale else 1)
    return (scores.softmax(axis) if softmax else scores) @ value


def _additive_case(draw: Draw) -> Case:
    n, m, d, hidden = (draw.integer(2, 4) for _ in range(4))
    x = draw.normal(2, n, d), draw.normal(2, m, d), draw.normal(2, m, 3)
    return *x, draw.normal(d, hidden), draw.normal(d, hidden), 2 * draw.normal(hidden, 1)


ADDITIVE_ATTENTION: Final = Exercise(
    additive_attention,
    *draw_examples(_additive_case),
    {
        "tanh missing": partial(additive_attention, act=lambda x: x),
        "sigmoid instead of tanh": partial(additive_attention, act=torch.sigmoid),
        "softmax along the wrong axis: each query spreads its weight over the keys":
            partial(additive_attention, axis=-2),
        "softmax missing": partial(additive_attention, softmax=False),
        "divided by the root of the width: additive scores have no such factor":
            partial(additive_attention, scale=True),
        "the two matrices swapped": lambda q, k, v, a, b, w: additive_attention(q, k, v, b, a, w),
    },
    first=True,
)  # fmt: skip


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, *,
    ahead: int = 0, flip: bool = False, add: bool = True,
) -> Tensor:  # fmt: skip
    """Convolve ``x (batch, n, d)`` with ``weight (k, d, d_out)``, whose last matrix is for t."""
    k, n = len(weight), x.size(1)
    before, after = x.new_zeros(len(x), k, x.size(2)), x.new_zeros(len(x), k, x.size(2))
    padded = torch.cat([before, x, after], dim=1)
    matrices = weight.flip(0) if flip else weight
    first = 1 + ahead  # of the window of position 0, in the padded sequence
    terms = [padded[:, first + j : first + j + n] @ matrix for j, matrix in enumerate(matrices)]
    y = torch.stack(terms).sum(0)
    return y + bias if add else y


def _convolution_case(draw: Draw) -> Case:
    k, d, out = draw.integer(2, 4), draw.integer(1, 3), draw.integer(1, 3)
    x = draw.normal(draw.integer(1, 2), draw.integer(1, 6), d)
    return x, draw.normal(k, d, out), draw.normal(out)


CAUSAL_CONVOLUTION: Final = Exercise(
    causal_convolution,
    *draw_examples(_convolution_case, 1, 2, 4),
    {
        "not causal: the window is centred, and sees later positions":
            lambda x, w, b: causal_convolution(x, w, b, ahead=(len(w) - 1) // 2),
        "not causal: padded on the right, the window sees later positions only":
            lambda x, w, b: causal_convolution(x, w, b, ahead=len(w) - 1),
        "off by one: a window ends with its position": partial(causal_convolution, ahead=-1),
        "off by one: the window sees the next position": partial(causal_convolution, ahead=1),
        "kernel reversed: its last matrix is the newest": partial(causal_convolution, flip=True),
        "bias missing": partial(causal_convolution, add=False),
        "padding missing: the output is shorter than the input":
            lambda x, w, b: causal_convolution(x, w, b)[:, len(w) - 1 :],
    },
)  # fmt: skip


def paired_interval(
    ours: Tensor, theirs: Tensor, t: float, *,
    log: Map = torch.log2, turned: bool = False, less: int = 1, root: bool = True,
) -> Tensor:  # fmt: skip
    """Return the interval of the mean of ``log2(theirs / ours)``, seed by seed."""
    d = log(ours / theirs if turned else theirs / ours)
    reach = t * d.std(correction=less) / (len(d) ** 0.5 if root else 1.0)
    return torch.stack([d.mean() - reach, d.mean() + reach])


def _prices_case(draw: Draw) -> Case:
    n = draw.integer(3, 6)
    common = draw.normal(n)  # what a seed does to both models
    return (common + draw.normal(n)).exp(), (common + draw.normal(n)).exp(), 4.3


def _not_paired(ours: Tensor, theirs: Tensor, t: float) -> Tensor:
    a, b = ours.log2(), theirs.log2()
    mean, reach = b.mean() - a.mean(), t * ((a.var() + b.var()) / len(a)).sqrt()
    return torch.stack([mean - reach, mean + reach])


PAIRED_INTERVAL: Final = Exercise(
    paired_interval,
    *draw_examples(_prices_case),
    {
        "ratio turned round: theirs is divided by ours": partial(paired_interval, turned=True),
        "natural logarithm: powers of two are asked for": partial(paired_interval, log=torch.log),
        "logarithm missing": partial(paired_interval, log=lambda x: x),
        "divided by n: the mean was estimated, so it is n - 1": partial(paired_interval, less=0),
        "the spread of single runs: divide by the root of n": partial(paired_interval, root=False),
        "not paired: the differences come first, then their spread": _not_paired,
    }, tolerance=1e-6,  # a root may be taken in float32
)  # fmt: skip
