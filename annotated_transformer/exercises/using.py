"""Exercises on using a system: nucleus filtering, batches from a queue, weights in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from annotated_transformer.exercises.declare import Exercise


def nucleus(
    log_probs: Tensor, p: float, *, own: int = 0, least: int = 1, down: bool = True,
    back: bool = True, out: float = -math.inf,
) -> Tensor:  # fmt: skip
    """Keep of each row the fewest tokens whose probabilities sum to ``p``, and renormalize."""
    probs, tokens = log_probs.detach().exp().sort(-1, descending=down)
    kept = probs.cumsum(-1) - (1 - own) * probs < p
    kept[..., :least] = True
    kept = kept.scatter(-1, tokens, kept) if back else kept
    return log_probs.detach().masked_fill(~kept, out).log_softmax(-1)


NUCLEUS: Final = Exercise(
    nucleus,
    [(torch.tensor(rows).double().log(), p) for rows, p in (
        ([[0.1, 0.5, 0.15, 0.25]], 0.7), ([[0.1, 0.6, 0.3], [0.4, 0.25, 0.35]], 0.5),
        ([[0.3, 0.7]], 0.9))],
    lambda draw: ((1.5 * draw.normal(draw.integer(1, 3), draw.integer(2, 6))).log_softmax(-1),
                  draw.random.choice([0.05, 0.3, 0.5, 0.8, 0.95])),
    {
        "the token that crosses p is left out: they sum to at least p": partial(nucleus, own=1),
        "the token that crosses p is left out, even the only one": partial(nucleus, own=1, least=0),
        "not renormalized: divide by the sum of what is kept":
            lambda x, p: x.detach().masked_fill(nucleus(x, p).isinf(), -math.inf),
        "the mask is in the order of the sorted tokens": partial(nucleus, back=False),
        "the least probable tokens are kept": partial(nucleus, down=False),
        "removed tokens get the logarithm 0, not minus infinity": partial(nucleus, out=0.0),
        "each probability is compared with p: it is their sum that counts":
            lambda x, p: x.detach().masked_fill(x.exp() < p, -math.inf).log_softmax(-1),
    },
)  # fmt: skip


def next_batch(
    queue: Sequence[tuple[int, int]], most: int, *, padded: bool = True, late: bool = False,
    full: int = 0, stop: bool = False, starve: bool = False, mixed: bool = False, rows: bool = True,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Return which sentences (length, beam) of a queue are the next batch, and which stay."""
    taken: list[int] = []
    left: list[int] = []
    for i, (length, beam) in enumerate(queue):
        lengths = [*(queue[j][0] for j in taken), length]
        size = max(lengths[:-1] if late and taken else lengths) * len(lengths)
        fits = (size if padded else sum(lengths)) * (beam if rows else 1) <= most - full
        fits = fits and (mixed or not taken or queue[taken[0]][1] == beam)
        (taken if (fits and not (stop and left)) or not (taken or starve) else left).append(i)
    return taken, left


NEXT_BATCH: Final = Exercise(
    next_batch,
    [([(3, 1), (4, 1), (7, 1), (4, 1)], 12), ([(2, 4), (3, 1), (3, 4), (2, 4)], 24),
     ([(9, 1), (4, 1)], 8)],
    lambda draw: ([(draw.integer(1, 9), draw.random.choice([1, 1, 4]))
                   for _ in range(draw.integer(2, 8))], draw.integer(6, 40)),
    {
        "padding not counted": partial(next_batch, padded=False),
        "the new sentence may be the longest, and pads the others": partial(next_batch, late=True),
        "off by one: a batch may be exactly full": partial(next_batch, full=1),
        "what does not fit ends the batch: those behind may fit": partial(next_batch, stop=True),
        "what is too long by itself never leaves the queue": partial(next_batch, starve=True),
        "different beams in one batch": partial(next_batch, mixed=True),
        "one row for each sentence: it has as many as its beam": partial(next_batch, rows=False),
    },
)  # fmt: skip


def quantize_rows(
    weight: Tensor, *, dim: tuple[int, ...] = (1,), most: int = 127, zero: int = 1, power: int = 1,
    size: Callable[[Tensor], Tensor] = torch.abs, whole: Callable[[Tensor], Tensor] = torch.round,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``weight (rows, columns)`` in int8, and the scale of each row."""
    largest = size(weight.detach()).amax(dim, keepdim=True)
    scale = (largest / most).masked_fill(largest == 0, zero)
    return whole(weight.detach() / scale).to(torch.int8), scale.flatten() ** power


QUANTIZE_ROWS: Final = Exercise(
    quantize_rows,
    [(torch.tensor(rows).double(),) for rows in (
        [[1.0, -2.54, 0.5], [12.7, 6.0, -3.06]], [[0.0, 0.0], [1.0, 3.0]], [[-5.0, 0.7, 1.0]])],
    lambda draw: (draw.normal(3, draw.integer(1, 5)) * draw.integers(0, 4, 3, 1),),
    {
        "cut off, not rounded": partial(quantize_rows, whole=torch.trunc),
        "a scale for each column": partial(quantize_rows, dim=(0,)),
        "one scale for the whole matrix": lambda weight: (
            quantize_rows(weight, dim=(0, 1))[0],
            quantize_rows(weight, dim=(0, 1))[1].expand(len(weight))),
        "the largest value, not the largest magnitude": partial(quantize_rows, size=torch.positive),
        "128 does not fit into int8: use 127": partial(quantize_rows, most=128),
        "the scale is inverted: multiply by it to get back": partial(quantize_rows, power=-1),
        "the scale of a row of zeros is 0, and 0 / 0 is NaN": partial(quantize_rows, zero=0),
    },
)  # fmt: skip
