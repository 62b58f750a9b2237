"""Float32 products and memory of this machine.

Defined in the chapter *Speed on a CPU* (book/training/speed.md).
"""

# Written from book/training/speed.md: edit the chapter instead.

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["highest", "high", "medium"]


@dataclass(frozen=True)
class Products:
    """How float32 matrices are multiplied on this machine, and why.

    Defined in: book/training/speed.md
    """

    precision: Precision  # for torch.set_float32_matmul_precision
    error: float  # relative error of a product, against float64
    reference: float  # the same under "highest"
    gain: float  # time under "highest" over time under ``precision``

    def __str__(self) -> str:
        """Say what was chosen."""
        return (
            f"float32 products: {self.precision!r}, {self.gain:.2f} x the speed of 'highest', "
            f"relative error {self.error:.1e} (highest: {self.reference:.1e})"
        )


SIZES = (
    (32, 512, 2048),
    (1024, 256, 1024),
)  # rows, inputs, outputs: a step of decoding, of training
TOLERANCE = 4.0  # errors of float32 sums in another order; bfloat16 would be 10,000 times off


def choose_products() -> Products:
    """Choose the fastest float32 products that are as accurate as float32, and set them.

    ``"medium"`` lets PyTorch use oneDNN, which on some processors is faster at full
    accuracy, and on others computes in bfloat16: so accuracy is measured first.

    Defined in: book/training/speed.md
    """
    measured = {p: _measure(p) for p in ("highest", "medium")}
    reference, slow = measured["highest"]
    error, fast = measured["medium"]
    accurate = error <= TOLERANCE * reference
    chosen: Precision = "medium" if accurate and fast < slow else "highest"
    torch.set_float32_matmul_precision(chosen)
    if chosen == "highest":
        return Products("highest", reference, reference, 1.0)
    return Products("medium", error, reference, slow / fast)


def _measure(precision: Precision, repeats: int = 7) -> tuple[float, float]:
    """Return the worst relative error, and the summed best times in seconds.

    Defined in: book/training/speed.md
    """
    torch.set_float32_matmul_precision(precision)
    generator = torch.Generator().manual_seed(0)
    error, seconds = 0.0, 0.0
    for rows, inputs, outputs in SIZES:
        x = torch.randn(rows, inputs, generator=generator)
        w = torch.randn(outputs, inputs, generator=generator)
        exact = x.double() @ w.double().T
        error = max(error, float((x @ w.T - exact).norm() / exact.norm()))
        seconds += min(_time(lambda x=x, w=w: x @ w.T) for _ in range(repeats))  # type: ignore[misc]
    return error, seconds


def _time(work: Callable[[], Tensor]) -> float:
    """Return the seconds that ``work`` takes once.

    Defined in: book/training/speed.md
    """
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def keep_large_blocks() -> bool:
    """Ask the C library to keep freed memory; return whether it was understood.

    By default glibc returns every block of some megabytes to the system when it is freed; the
    next use then costs a page fault for every 4 KiB. Linux with glibc only.

    Defined in: book/training/speed.md
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    mmap_max, trim_threshold = -4, -1
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))


def prepare_cpu() -> Products:
    """Do both for this process: what the command line does before it trains or translates.

    Defined in: book/training/speed.md
    """
    keep_large_blocks()
    return choose_products()
