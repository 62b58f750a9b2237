"""Exercises on caches, rooflines, bfloat16, utilization and the duration of a run."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from annotated_transformer.exercises.declare import Case, Draw, Exercise
from annotated_transformer.model.attention import attention


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, *,
    last: int = 1, after: int = 0, scale: float = 1.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Attend from new tokens to ``m`` cached ones and to each other; return the cache, too."""
    m, keys, values = keys.size(1), torch.cat([keys, k], 1), torch.cat([values, v], 1)
    mask = torch.ones(q.size(1), keys.size(1)).tril(last * m + after)
    return attention(scale * q, keys, values, mask)[0], keys, values


def _cache_case(draw: Draw, h: int, n: int, m: int) -> Case:
    return tuple(draw.normal(h, *rest) for rest in ((n, 4), (n, 4), (n, 3), (m, 4), (m, 3)))


CACHED_ATTENTION: Final = Exercise(
    cached_attention,
    [_cache_case(Draw(m), 1, n, m) for n, m in ((1, 2), (3, 0), (2, 3))],
    lambda draw: _cache_case(draw, draw.integer(1, 2), draw.integer(1, 3), draw.integer(0, 3)),
    {
        "mask aligned with the first key, as by is_causal": partial(cached_attention, last=0),
        "a new token sees those after it": partial(cached_attention, after=9),
        "a new token does not see itself": partial(cached_attention, after=-1),
        "the new tokens see only the cache":
            lambda q, k, v, *old: (attention(q, *old)[0], *cached_attention(q, k, v, *old)[1:]),
        "the cache is not extended": lambda *case: (cached_attention(*case)[0], *case[3:]),
        "scale missing: divide the scores by √d_k": partial(cached_attention, scale=2.0),
    },
)  # fmt: skip


def roofline(
    products: Sequence[tuple[int, int, int]], size: int, peak: float, bandwidth: float, *,
    each: int = 2, read: int = 1, written: int = 1, both: Callable[..., float] = max,
) -> float:  # fmt: skip
    """Return the least seconds of products ``(m, k)`` by ``(k, n)``, one after another."""
    return sum(
        both(each * m * k * n / peak, size * (m * k + read * k * n + written * m * n) / bandwidth)
        for m, k, n in products
    )


ROOFLINE: Final = Exercise(
    roofline,
    [([(m, 512, 2048) for m in rows], 4, 1e11, 1e10) for rows in ([1], [512], [1, 512])],
    lambda draw: (
        [(4 ** draw.integer(0, 5), 64 * draw.integer(1, 32), 32) for _ in "abc"],
        draw.random.choice([2, 4]), draw.integer(1, 9) * 1e11, draw.integer(1, 9) * 1e10),
    {
        "a multiplication and an addition are two operations": partial(roofline, each=1),
        "the second factor, often the weights, is read, too": partial(roofline, read=0),
        "the result is written, too": partial(roofline, written=0),
        "added, not the longer of both times": partial(roofline, both=lambda a, b: a + b),
        "arithmetic alone: memory may take longer": partial(roofline, both=lambda a, b: a),
        "the longer of two sums: each product has a limit of its own": lambda *case: max(
            roofline(*case, both=lambda a, b: a), roofline(*case, both=lambda a, b: b)),
        "numbers moved, not bytes": lambda products, size, *rates: roofline(products, 1, *rates),
    },
)  # fmt: skip


def to_bfloat16(x: float, *, add: int = 0x7FFF, odd: int = 1, carry: bool = True) -> float:
    """Round a float32 number to the nearest bfloat16, and halfway to the even one."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    new = bits + add + odd * (bits >> 16 & 1) & 0xFFFF0000
    new = new if carry else bits & 0xFF800000 | new & 0x7FFFFF
    return float(*struct.unpack("<f", struct.pack("<I", new)))


TO_BFLOAT16: Final = Exercise(
    to_bfloat16,
    [(1 + 2**-8,), (1 + 3 * 2**-8,), (2 - 2**-10,)],
    lambda draw: (draw.random.choice([-1, 1]) * draw.random.choice([
        draw.integer(256, 511) / 256 * 2.0 ** draw.integer(-9, 9),  # halfway if odd
        draw.normal(1).float().item(), 2 - 2**-10, 2.0**128 - 2**104, float("inf"), 0.0]),),
    {
        "cut off, not rounded": partial(to_bfloat16, add=0, odd=0),
        "halfway goes away from zero, not to even": partial(to_bfloat16, add=0x8000, odd=0),
        "halfway goes towards zero, not to even": partial(to_bfloat16, odd=0),
        "always away from zero, not to the nearest": partial(to_bfloat16, add=0xFFFF, odd=0),
        "the carry is lost: it raises the exponent": partial(to_bfloat16, carry=False),
        "rounded as in float16, to 10 bits": lambda x: float(torch.tensor(x).half()),
    },
)  # fmt: skip


def utilization(
    parameters: int, lengths: Sequence[int], seconds: float, teraflops: float | None,
    devices: int, *, each: float = 6,
) -> float | None:  # fmt: skip
    """Return the model FLOPs utilization of an update, by the rule of thumb."""
    return teraflops and each * parameters * sum(lengths) / (1e12 * teraflops * devices * seconds)


UTILIZATION: Final = Exercise(
    utilization,
    [(65_000_000, [9, 30, 21], 0.01, peak, n) for peak, n in ((10.6, 1), (10.6, 2), (None, 1))],
    lambda draw: (
        draw.integer(1, 200) * 10**6, draw.integers(5, 60, draw.integer(1, 6)).tolist(),
        draw.integer(1, 9) / 100, draw.random.choice([10.6, 125.0, None]), draw.integer(1, 8)),
    {
        "padding earns no credit": lambda p, n, *rest: utilization(p, [max(n)] * len(n), *rest),
        "the backward pass takes twice as much, too": partial(utilization, each=2),
        "sentences, not tokens": lambda p, n, *rest: utilization(p, [1] * len(n), *rest),
        "the peak is that of one device": lambda p, n, s, peak, _: utilization(p, n, s, peak, 1),
        "gigaflops: a teraflop is 1e12 operations": partial(utilization, each=6e3),
        "percent: a fraction is wanted": partial(utilization, each=600),
    },
)  # fmt: skip


def run_hours(
    small: tuple[int, float], large: tuple[int, float], tokens: int, updates: int, devices: int,
    *, rest: Callable[[float], float] = lambda seconds: max(0.0, seconds), hour: float = 3600,
) -> float:  # fmt: skip
    """Forecast a run from two timings: a part for each token, and one for the weights' update."""
    token = (large[1] - small[1]) / (large[0] - small[0])
    return updates * (rest(small[1] - small[0] * token) + token * tokens / devices) / hour


RUN_HOURS: Final = Exercise(
    run_hours,
    [((100, first), (300, 0.8), 1000, 36_000, n) for first, n in ((0.4, 1), (0.4, 8), (0.2, 1))],
    lambda draw: (
        (50 * draw.integer(1, 2), draw.integer(1, 9) / 10), (300, draw.integer(10, 30) / 10),
        draw.integer(1, 25) * 1000, draw.integer(1, 100) * 1000, draw.integer(1, 8)),
    {
        "the update of the weights is forgotten": partial(run_hours, rest=lambda seconds: 0.0),
        "less than nothing for an update: count zero": partial(run_hours, rest=lambda s: s),
        "each device updates all weights": lambda a, b, t, n, d: run_hours(a, b, t, n, 1) / d,
        "the tokens are shared among the devices": lambda a, b, t, n, _: run_hours(a, b, t, n, 1),
        "all in proportion to the tokens": lambda small, *case: run_hours((0, 0.0), *case),
        "days, not hours": partial(run_hours, hour=86_400),
    },
)  # fmt: skip
