"""Decoding in 16 or 8 bits: a step reads every weight, and reads half or a quarter as much."""

from collections.abc import Callable, Mapping
from functools import cache
from timeit import repeat
from typing import Literal

import torch
from torch import Tensor

from annotated_transformer.fast.linear import (
    FEW,
    OnednnLinear,
    PlainLinear,
    prepared_linear,
    suits_onednn,
)
from annotated_transformer.fast.screen import ZERO, byte_scale, multiplies_bytes
from annotated_transformer.model.architecture import check_choice

TINY = 1e-30  # a row of zeros is divided by this
HALF_UP = ZERO + 0.5  # rounds to the nearest byte, because the conversion cuts off
DecodingPrecision = Literal["float32", "bfloat16", "int8"]


class Bfloat16Linear(PlainLinear):
    """``x W^T + b`` with operands in bfloat16; input, output and residual are float32."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__(weight.bfloat16(), bias.bfloat16())
        packed = suits_onednn(weight) and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.product = (OnednnLinear if packed else PlainLinear)(self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply ``x (rows, inputs)``: ``(rows, outputs)``."""
        return self.product(x.bfloat16()).float()


class Int8Linear(PlainLinear):
    """``x W^T + b`` with operands in int8, on a CPU for which ``multiplies_bytes()`` is true.

    Each row of ``W`` and each row of ``x`` has a scale of its own (127 for its largest magnitude);
    the sums are exact.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        scale = byte_scale(weight.detach(), 1)  # (outputs, 1)
        whole = (weight.detach() / scale).round_().to(torch.int8)
        super().__init__(torch.ops.onednn.qlinear_prepack(whole, [FEW, weight.size(1)]), bias)
        self.scales = scale.squeeze(1) / 127
        self.zeros = torch.zeros_like(self.scales, dtype=torch.long)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply ``x (rows, inputs)``: ``(rows, outputs)``."""
        # Few operations, and those that are fast: vector_norm and addcmul take four times as long.
        largest = x.abs().amax(1, keepdim=True).clamp_min_(TINY)
        whole = (x * largest.reciprocal().mul_(127)).add_(HALF_UP).to(torch.uint8)
        if len(x) == 1:
            whole = whole.expand(2, -1)  # oneDNN 3.12 has only a slow loop for one row of 256
        y: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            *(whole, 1.0, ZERO, self.weight, self.scales, self.zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return y[: len(x)].mul_(largest).add_(self.bias)


LINEARS: Mapping[DecodingPrecision, Callable[[Tensor, Tensor], PlainLinear]] = {
    "float32": prepared_linear,
    "bfloat16": Bfloat16Linear,
    "int8": Int8Linear,
}


def check_precision(precision: DecodingPrecision, device: str) -> None:
    """Raise ValueError if a device cannot decode in this precision."""
    check_choice("precision", precision, DecodingPrecision)
    if precision == "int8" and (device != "cpu" or not multiplies_bytes()):
        where = "this processor multiplies no bytes" if device == "cpu" else "it is for the CPU"
        raise ValueError(f"precision int8: {where}; use bfloat16 or float32")


@cache
def bfloat16_is_fast() -> bool:
    """Whether a product in bfloat16 takes at most 2/3 of float32's time here; measured once."""
    x, weight, bias = torch.ones(256, 512), torch.ones(2048, 512), torch.ones(2048)
    with torch.inference_mode():
        half, whole = Bfloat16Linear(weight, bias), PlainLinear(weight, bias)
        fast = min(repeat(lambda: half(x), number=1, repeat=5))
        slow = min(repeat(lambda: whole(x), number=1, repeat=5))
    return fast <= slow * 2 / 3
