"""Float32 matrix products and memory allocation on this machine."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from timeit import timeit
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["highest", "high", "medium"]
Problems = Sequence[tuple[Tensor, Tensor, Tensor]]  # two factors and their product in float64


@dataclass(frozen=True)
class Products:
    """How float32 matrices are multiplied on this machine, and why."""

    precision: Precision  #: The argument of ``torch.set_float32_matmul_precision``.
    error: float  #: Relative error of a product, against float64.
    reference: float  #: The same under "highest".
    gain: float  #: Time under "highest" over time under ``precision``.
    refused: float | None = None  #: Relative error of "medium", where that was too large.

    def __str__(self) -> str:
        """Describe the choice."""
        text = (
            f"float32 matrix products: {self.gain:.2f} x PyTorch's speed with {self.precision!r}, "
            f"relative error {self.error:.1e} (by default: {self.reference:.1e})"
        )
        if self.refused is not None:
            text += f"; 'medium' was refused for its error of {self.refused:.1e}"
        return text


SIZES = ((32, 512, 2048), (1024, 256, 1024))  # rows, inputs, outputs
TOLERANCE = 4.0  # times the reference's error: float32 in another order; bfloat16 has 10,000 times


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply under the current precision setting."""
    return a @ b


def _problems() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield factors and products: of a layer's output and its two gradients, at each size."""
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in SIZES:
        shapes = (rows, inputs), (outputs, inputs), (rows, outputs)
        x, w, y = (torch.randn(shape, generator=generator) for shape in shapes)
        yield from ((a, b, a.double() @ b.double()) for a, b in ((x, w.T), (y, w), (y.T, x)))


def _error(precision: Precision, problems: Problems) -> float:
    """Return the largest relative error of the products, against float64."""
    torch.set_float32_matmul_precision(precision)
    errors = [(matmul(a, b) - exact).norm() / exact.norm() for a, b, exact in problems]
    return float(torch.stack(errors).max())  # NaN if any is


def _seconds(problems: Problems, repeats: int = 5) -> tuple[float, float]:
    """Return the summed best times under "highest" and "medium", measured alternately."""
    total = {"highest": 0.0, "medium": 0.0}
    for a, b, _ in problems:
        times: dict[str, list[float]] = {p: [] for p in total}
        for _ in range(repeats):
            for precision, found in times.items():
                torch.set_float32_matmul_precision(precision)
                found.append(timeit(partial(matmul, a, b), number=1))
        total = {p: total[p] + min(found) for p, found in times.items()}
    return total["highest"], total["medium"]


def choose_products() -> Products:
    """Set the fastest matmul precision that is as accurate as float32, and return it.

    ``"medium"`` lets PyTorch use oneDNN. On some processors that is faster at full accuracy, but
    on others it computes in bfloat16, so the accuracy is measured first. If measuring fails, the
    setting is ``"highest"``.
    """
    chosen: Precision = "highest"
    try:
        problems = list(_problems())
        reference, error = _error("highest", problems), _error("medium", problems)
        if not error <= TOLERANCE * reference:  # written so that NaN is refused, too
            return Products("highest", reference, reference, 1.0, refused=error)
        slow, fast = _seconds(problems)
        if fast >= slow:
            return Products("highest", reference, reference, 1.0)
        chosen = "medium"
        return Products("medium", error, reference, slow / fast)
    finally:
        torch.set_float32_matmul_precision(chosen)


def keep_large_blocks() -> bool:
    """Tell the C library to keep freed memory; return whether it agreed.

    By default glibc returns a freed block of several megabytes to the system, and the next use
    costs a page fault for every 4 KiB. Linux with glibc only.
    """
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt, mmap_max, trim_threshold = ctypes.CDLL(None).mallopt, -4, -1
        return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))
    return False


def return_memory() -> None:
    """Return freed memory to the system, where ``keep_large_blocks`` has kept it.

    A process that computes for hours with sizes that keep changing would otherwise keep growing.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


KERNELS = 96  #: Compiled kernels that oneDNN may keep.


def limit_kernels() -> None:
    """Limit oneDNN's cache to ``KERNELS`` compiled kernels, unless the user has set a limit.

    PyTorch has a second cache before oneDNN's, which holds 1,024. Both limits are read once, so
    this has an effect only before the first product.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNELS))


_measured = cache(lambda _threads: choose_products())


def prepare_cpu() -> Products:
    """Configure memory, oneDNN's kernels and float32 products, which a process measures once."""
    limit_kernels()
    keep_large_blocks()
    torch.set_float32_matmul_precision((found := _measured(torch.get_num_threads())).precision)
    return found
