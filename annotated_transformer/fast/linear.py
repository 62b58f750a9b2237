"""Matrix products with few rows, using prepacked weights; and the argmax over many logits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # logits per chunk
FEW = 32  # rows that oneDNN prepacks for; any number works
SMALL = 100_000  # elements of a weight, below which a call of oneDNN costs more than it saves


def matmul_precision() -> str | None:
    """Return PyTorch's setting; None in a program that uses the newer ``fp32_precision``."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # PyTorch refuses to mix the two
        return None


@contextmanager
def float32_products() -> Iterator[None]:
    """Compute products in full float32, whatever ``set_float32_matmul_precision`` says."""
    setting = matmul_precision()
    if setting is not None:
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if setting is not None:
            torch.set_float32_matmul_precision(setting)


class PlainLinear:
    """``x W^T + b``, on any device and in any precision, with a weight ``(outputs, inputs)``."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight.detach(), bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply ``x (rows, inputs)``: ``(rows, outputs)``."""
        return F.linear(x, self.weight, self.bias)

    def relu(self, x: Tensor) -> Tensor:
        """Multiply, then apply ReLU."""
        return self(x).relu_()

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Multiply, then add a residual ``(rows, outputs)``."""
        return self(x).add_(residual)


class OnednnLinear(PlainLinear):
    """:class:`PlainLinear` by oneDNN, with a prepacked matrix; float32 on a CPU only."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, FEW)

    def _multiply(self, x: Tensor, then: str) -> Tensor:
        multiply = torch.ops.mkldnn._linear_pointwise.default
        y: Tensor = multiply(x, self.weight, self.bias, then, [], "")
        return y

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply ``x (rows, inputs)``: ``(rows, outputs)``."""
        return self._multiply(x, "none")

    def relu(self, x: Tensor) -> Tensor:
        """Multiply, then apply ReLU."""
        return self._multiply(x, "relu")

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Multiply, then add a residual ``(rows, outputs)``."""
        multiply = torch.ops.mkldnn._linear_pointwise.binary
        y: Tensor = multiply(x, residual, self.weight, self.bias, "add")
        return y


def suits_onednn(weight: Tensor) -> bool:
    """Whether ``OnednnLinear`` supports this matrix."""
    cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return cpu and known


def prepared_linear(weight: Tensor, bias: Tensor) -> PlainLinear:
    """Return an ``OnednnLinear`` where it is supported and faster, else a ``PlainLinear``."""
    packed = weight.numel() >= SMALL and suits_onednn(weight)
    return (OnednnLinear if packed else PlainLinear)(weight, bias)


def chunk_maxima(logits: Tensor) -> Tensor:
    """Return the maximum of each chunk: ``(..., vocab)`` to ``(..., chunks)``."""
    whole = logits.size(-1) // CHUNK
    tops: Tensor = logits[..., : whole * CHUNK].unflatten(-1, (whole, CHUNK)).amax(-1)
    if whole * CHUNK == logits.size(-1):
        return tops
    return torch.cat([tops, logits[..., whole * CHUNK :].amax(-1, keepdim=True)], -1)


def most_probable(logits: Tensor) -> Tensor:
    """Return ``logits.argmax(-1)`` of ``logits (rows, vocab)``, computed in chunks: ``(rows,)``."""
    if logits.device.type != "cpu" or logits.size(1) < 4 * CHUNK:
        return logits.argmax(-1)
    start = chunk_maxima(logits).argmax(-1, keepdim=True) * CHUNK
    token = (start + torch.arange(CHUNK)).clamp_(max=logits.size(1) - 1)  # the last may be shorter
    return token.gather(1, logits.gather(1, token).argmax(-1, keepdim=True)).squeeze(1)
