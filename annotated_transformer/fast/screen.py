"""Greedy decoding's output projection: int8 rules most tokens out, the others are exact."""

import math
from functools import cache
from timeit import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from annotated_transformer.fast.linear import CHUNK, FEW, float32_products, prepared_linear

ZERO = 128  # the unsigned byte that represents 0
WORTH = 2_000_000  # elements of the matrix; for smaller ones the full product is as fast


class Screen:
    """Finds the most probable token, computing exact logits for the candidates only.

    An int8 product with a bounded error rules the other tokens out. The result is that of the
    float32 product, up to float32's own rounding.

    Args:
        weight: ``(vocab, d_model)``, float32 on a CPU.
        bias: ``(vocab,)``; minus infinity excludes a token.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight.detach(), bias.detach()
        missing = -len(weight) % CHUNK  # fill the last chunk with excluded tokens
        self.floor = F.pad(self.bias, (0, missing), value=-math.inf)
        whole = torch.zeros(len(self.floor), weight.size(1), dtype=torch.int8)
        self.scales, lost = torch.ones(len(self.floor)), torch.empty(len(weight))
        for start in range(0, len(weight), 512):  # as many rows as stay in the CPU's cache
            part = slice(start, min(start + 512, len(weight)))
            scale = byte_scale(self.weight[part], 1)
            self.scales[part] = scale.squeeze(1)
            whole[part], lost[part] = to_bytes(self.weight[part], scale)
        self.bytes = torch.ops.onednn.qlinear_prepack(whole, [FEW, weight.size(1)])
        self.zeros = torch.zeros_like(self.scales, dtype=torch.long)
        self.lost = float(lost.max())
        self.size = float(self.weight.norm(dim=1).max()) + self.lost
        self.offset = float(self.bias.where(self.bias.isfinite(), 0.0).abs().max())

    def approximate_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute approximate logits of ``x (rows, d_model)`` in int8.

        Returns:
            Logits ``(rows, CHUNK, chunks)``, and a bound on their error ``(rows,)``.
        """
        scale = byte_scale(x)
        whole, lost = to_bytes(x, scale)
        if len(x) == 1:
            whole = whole.expand(2, -1)  # oneDNN 3.12 has only a slow loop for one row of 256
        # Without AMX, oneDNN's fast kernels multiply unsigned bytes by signed ones only.
        y: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            *(whole.add(ZERO).to(torch.uint8), float(scale), ZERO),
            *(self.bytes, self.scales, self.zeros, self.floor),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        sums = x.size(1) * 2.0**-22  # the rounding of float32 itself
        error = x.norm(dim=1) * (self.lost + sums * self.size) + lost * self.size
        error += 2.0**-22 * self.offset  # and of the sum with the bias
        return y[: len(x)].view(len(x), CHUNK, -1), error

    def exact_logits(self, x: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """Compute the exact logits of the pairs (row of ``x``, token): ``(n,)``."""
        products = self.weight.index_select(0, tokens).mul_(x.index_select(0, rows)).sum(1)
        return products.add_(self.bias.index_select(0, tokens))

    def candidates(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the candidate tokens for ``x (rows, d_model)``.

        Returns:
            The row and the id of each candidate, both ``(n,)``; None if there are too many, or
            if values are NaN or infinite.
        """
        (rough, error), every = self.approximate_logits(x), torch.arange(len(x))
        tops = rough.amax(1)  # (rows, chunks)
        best = tops.argmax(1)
        good = rough[every, :, best].argmax(1) * tops.size(1) + best  # not always the best token
        least = self.exact_logits(x, every, good.clamp_(max=len(self.bias) - 1)) - error
        rows, chunks = (tops >= least.unsqueeze(1)).nonzero().unbind(1)
        if len(chunks) > MOST * len(x) or not math.isfinite(least.sum()):
            return None
        near = rough[rows, :, chunks] >= least[rows].unsqueeze(1)  # (n, CHUNK)
        which, places = near.nonzero().unbind(1)
        return rows[which], places * tops.size(1) + chunks[which]

    def __call__(self, x: Tensor) -> Tensor | None:
        """Find the best tokens ``(rows,)`` for ``x (rows, d_model)``; None asks for all logits."""
        if (left := self.candidates(x)) is None:
            return None
        return first_largest(self.exact_logits(x, *left), *left)


MOST = 16  # candidate chunks per sentence; with more, the full product is as fast


def byte_scale(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the int8 scale that maps 127 to the largest magnitude in ``x`` (along ``dim``)."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return largest.div_(127).clamp_min_(torch.finfo(x.dtype).tiny)


def to_bytes(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to integers times a scale.

    Args:
        x: ``(rows, d)``.
        scale: ``(rows, 1)``, or a scalar.

    Returns:
        Integers from -127 to 127 ``(rows, d)``, and the norms of the rounding errors ``(rows,)``.
    """
    whole = (x / scale).round_()
    return whole, (x - whole * scale).norm(dim=1)


def first_largest(values: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Return the token with the largest value in each row; ties go to the smallest id.

    Args:
        values: ``(n,)``, a few for each row.
        rows: ``(n,)``, from 0 to the last row, each at least once.
        tokens: ``(n,)``.
    """
    count, last = int(rows.max()) + 1, torch.iinfo(tokens.dtype).max
    best = values.new_full((count,), -math.inf).scatter_reduce_(0, rows, values, "amax")
    tied = tokens.where(values == best[rows], last)
    return tokens.new_full((count,), last).scatter_reduce_(0, rows, tied, "amin")


@cache
def multiplies_bytes() -> bool:
    """Whether oneDNN supports int8 products on this CPU, without overflow in the sums."""
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    try:
        rough, _ = Screen(torch.ones(CHUNK, 512), torch.zeros(CHUNK)).approximate_logits(
            torch.ones(FEW, 512)
        )
    except RuntimeError:
        return False
    return bool(((rough - 512).abs() < 0.01).all())


@cache
def bytes_are_fast() -> bool:
    """Whether an int8 product takes at most 2/3 of float32's time here; measured once."""
    if not multiplies_bytes():
        return False
    x, weight, bias = torch.ones(FEW, 512), torch.ones(4096, 512), torch.zeros(4096)
    with float32_products(), torch.inference_mode():
        whole, screen = prepared_linear(weight, bias), Screen(weight, bias)
        slow = min(repeat(lambda: whole(x), number=1, repeat=7))
        fast = min(repeat(lambda: screen.approximate_logits(x), number=1, repeat=2))
        if fast <= slow * 4:  # oneDNN's reference kernel is so slow that two runs show it
            fast = min(repeat(lambda: screen.approximate_logits(x), number=1, repeat=7))
    return fast <= slow * 2 / 3
