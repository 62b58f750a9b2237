"""The peak operations per second and the memory bandwidth of a machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from annotated_transformer.fast.dropout import cheap_dropout


def seconds_of(
    run: Callable[[], object],
    device: str | torch.device = "cpu",
    clock: Callable[[], float] | None = None,
) -> float:
    """Return how long a call takes, with all the work that it gives to a GPU."""
    cuda = torch.device(device).type == "cuda"
    clock = time.perf_counter if clock is None else clock
    if cuda:
        torch.cuda.synchronize()  # what was asked for before is not counted
    start = clock()
    run()
    if cuda:
        torch.cuda.synchronize()
    return clock() - start


def best_seconds(run: Callable[[], object], device: str = "cpu", least: float = 0.1) -> float:
    """Return the shortest time of a call, among at least three that take ``least`` seconds.

    With one thread it is processor time, which other programs do not affect.
    """
    one = device == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if one else time.perf_counter
    run()
    found: list[float] = []
    while len(found) < 3 or sum(found) < least:
        found.append(seconds_of(run, device, clock))
    return min(found)


def matmul_peak(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[int] = (256, 512, 1024, 2048),
) -> float:
    """Return the highest rate of operations per second in products of square matrices.

    A multiplication and an addition are two. Under the settings of the process, such as
    ``torch.set_float32_matmul_precision``.
    """
    rates = []
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        rates.append(2 * size**3 / best_seconds(partial(torch.mm, a, b, out=out), device))
    return max(rates)


def memory_bandwidth(device: str = "cpu", megabytes: int = 128) -> float:
    """Return the memory bandwidth in bytes per second, on blocks larger than the caches.

    They are a copy, which moves two blocks, a scaling in place, likewise, and a triad
    ``a = b + 2 c``, which moves three.
    """
    a, b, c = (torch.ones(megabytes * 2**18, device=device) for _ in range(3))
    passes: list[tuple[int, Callable[[], object]]] = [
        (2, lambda: a.copy_(b)),
        (2, lambda: a.mul_(0.5)),
        (3, lambda: torch.add(b, c, alpha=2, out=a)),
    ]
    return max(n * 4 * a.numel() / best_seconds(run, device, 0.4) for n, run in passes)


@dataclass(frozen=True)
class Operation:
    """An operation of a training step, with its number of FLOPs and bytes.

    Attributes:
        name: Its name.
        flops: Floating-point operations.
        bytes: Bytes that must be read and written.
        run: Runs the operation once.
    """

    name: str
    flops: float
    bytes: float
    run: Callable[[], object]


def operations(width: int = 512, rows: int = 65_536, device: str = "cpu") -> list[Operation]:
    """Return the main operations of a training step, in float32, on blocks beyond the caches."""
    x = torch.randn(rows, width, device=device)
    few, size = x[:2048], rows * width  # a product of them all would take seconds
    layer, norm = nn.Linear(width, 4 * width, device=device), nn.LayerNorm(width, device=device)
    weight = nn.Parameter(torch.randn(size // 2, device=device))
    weight.grad = torch.randn_like(weight)
    adam = torch.optim.Adam([weight], lr=1e-6, fused=True)
    product = 2.0 * len(few) * width * 4 * width
    moved = 4.0 * (len(few) * 5 * width + 4 * width * width)

    @torch.no_grad()
    def without(run: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        return run(y)

    return [
        Operation("product", product, moved, partial(without, layer, few)),
        Operation("layer norm", 8.0 * size, 8.0 * size, partial(without, norm, x)),
        Operation("softmax", 5.0 * size, 8.0 * size, partial(torch.softmax, x, -1)),
        Operation("dropout", 2.0 * size, 8.0 * size, partial(cheap_dropout, nn.Dropout(0.1), x)),
        Operation("Adam", 12.0 * len(weight), 28.0 * len(weight), adam.step),
    ]


def roofline(device: str = "cpu") -> list[dict[str, Any]]:
    """Measure ``operations``; return name, intensity and operations per second of each."""
    return [
        {
            "name": one.name,
            "intensity": one.flops / one.bytes,
            "flops_per_s": one.flops / best_seconds(one.run, device),
        }
        for one in operations(device=device)
    ]


Shape = Sequence[int]


def _added_flops(_: Shape, a: Shape, b: Shape, *__: Any, **___: Any) -> int:
    """Count ``addmm_``."""
    return 2 * a[0] * a[1] * b[1]


def _fused_flops(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Count fused attention on a CPU: scores and weighted values."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


def _fused_flops_backward(_: Shape, q: Shape, k: Shape, v: Shape, *__: Any, **___: Any) -> int:
    """Count its backward pass: the scores again, and four products for the gradients."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (3 * q[3] + 2 * v[3])


def counting() -> FlopCounterMode:
    """Return a FLOP counter for products, including those that PyTorch's counter misses."""
    aten = torch.ops.aten
    kinds = {
        aten.addmm_: _added_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: _fused_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_flops_backward,
    }
    return FlopCounterMode(display=False, custom_mapping=kinds)
