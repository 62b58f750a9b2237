# Written from book/training/precision.md: edit the chapter instead.
"""Sixteen bits where they are enough, clipping, compilation, and losses that are no number."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from annotated_transformer.background.seq2seq import Translator
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.loop import batch_loss
from annotated_transformer.training.regularization import linear_cross_entropy

Name = Literal["float32", "tf32", "bfloat16", "float16"]
SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Arithmetic:
    """In which numbers a training computes; on a GPU it also sets how float32 is multiplied.

    Args:
        name: ``float32``; ``tf32``, where the products of float32 are rounded inside;
            ``bfloat16`` or ``float16``, in which products are computed.
        device: Where it is computed.

    Raises:
        ValueError: There is no such arithmetic on the device.
    """

    def __init__(self, name: Name = "float32", device: torch.device | None = None) -> None:
        self.name: Name = name
        self.device = torch.device("cpu") if device is None else device
        if name not in get_args(Name):
            raise ValueError(f"precision {name}: choose among {', '.join(get_args(Name))}")
        gpu = self.device.type == "cuda"
        if name == "tf32" and not (gpu and torch.cuda.get_device_capability(self.device) >= (8, 0)):
            raise ValueError("precision tf32: needs an NVIDIA GPU of 2020 or later")
        if gpu:
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        self.scale = LossScale() if name == "float16" else None

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a forward pass is computed."""
        if self.name not in SHORT:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, SHORT[self.name])

    @property
    def factor(self) -> float:
        """What the loss is multiplied with before the backward pass."""
        return 1.0 if self.scale is None else self.scale.value


class LossScale:
    """The number by which a loss is multiplied, so that float16 gradients do not vanish.

    Args:
        value: The first one.
        patience: Updates without overflow, after which it is doubled.
    """

    def __init__(self, value: float = 2.0**15, patience: int = 2000) -> None:
        self.value, self.patience = value, patience
        self.good = 0  # updates since the last change

    def adapt(self, finite: bool) -> None:
        """Change the scale by how an update went."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good == self.patience:
            self.value, self.good = min(self.value * 2, 2.0**24), 0

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint needs to keep."""
        return {"value": self.value, "good": self.good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on as kept."""
        self.value, self.good = float(state["value"]), int(state["good"])


class LossOf(nn.Module):
    """A model with its loss, so that the whole of it runs as one forward pass.

    Args:
        model: Shares its parameters with this module.
        arithmetic: In which numbers; float32 unless given.
        compiler: Backend of ``torch.compile``, as ``"inductor"``; not compiled unless given.
    """

    def __init__(
        self,
        model: Translator,
        arithmetic: Arithmetic | None = None,
        compiler: str | Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.arithmetic = Arithmetic() if arithmetic is None else arithmetic
        self.compiled: Callable[..., Tensor] | None = None
        if compiler is not None:
            self.compiled = torch.compile(
                model.forward, backend=compiler, dynamic=False, fullgraph=True
            )

    def forward(self, batch: Batch, smoothing: float, tokens: int) -> tuple[Tensor, Tensor]:
        """Return what ``batch_loss`` returns."""
        with self.arithmetic.autocast():
            if self.compiled is None:
                return batch_loss(self.model, batch, smoothing, tokens)
            batch = bucketed(batch)
            inputs = batch.src, batch.tgt.contiguous(), batch.src_mask, batch.tgt_mask
            for tensor in inputs:
                torch._dynamo.mark_dynamic(tensor, 0)  # any number of sentences
            x = self.compiled(*inputs)[batch.tgt_keep]  # (rows, d_model)
            gold, scale = batch.tgt_y[batch.tgt_keep], 1 / max(1, tokens)
            return linear_cross_entropy(x, self.model.projection, gold, smoothing, scale)


class NonFiniteError(FloatingPointError):
    """A loss or a gradient that is not a finite number; the weights are as before.

    Args:
        loss: Of the update, per target token.
        norm: Length of its gradient.
        tokens: Its target tokens.
        told: The whole message, where more is known.
    """

    def __init__(self, loss: float, norm: float, tokens: int, told: str = "") -> None:
        self.loss, self.norm, self.tokens = loss, norm, tokens
        what = f"loss of an update of {tokens} tokens is {loss}"
        if math.isfinite(loss):
            what = f"gradient of an update of {tokens} tokens has the length {norm}"
        super().__init__(told or f"the {what}: lower the learning rate")


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the length of all gradients as one vector."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def step(
    optimizer: torch.optim.Optimizer, arithmetic: Arithmetic, clip: float | None = None
) -> float:
    """Undo the scale of the loss, clip, and make the step, if the gradient is finite.

    Args:
        optimizer: Its parameters have gradients.
        arithmetic: In which they were computed; its scale is adapted.
        clip: Greatest length of the gradient; any unless given.

    Returns:
        The length of the gradient before clipping. If it is not finite, no weight has changed.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = gradient_norm(parameters) / arithmetic.factor
    factor = 1 / arithmetic.factor
    if clip is not None and norm > clip:
        factor *= clip / norm
    if math.isfinite(norm):
        if factor != 1:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
        optimizer.step()
    if arithmetic.scale is not None:
        arithmetic.scale.adapt(math.isfinite(norm))
    optimizer.zero_grad()
    return norm


BUCKETS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def bucketed(batch: Batch, buckets: Iterable[int] = BUCKETS) -> Batch:
    """Pad both sides of a batch to the same length, one of a few; and to two sentences at least.

    Args:
        batch: Its padding counts for nothing, however much there is.
        buckets: Lengths, ascending; a longer sentence keeps its length.
    """
    tgt = torch.cat([batch.tgt, batch.tgt_y[:, -1:]], dim=1)
    longest = max(batch.src.size(1), batch.tgt.size(1))
    length = next((size for size in buckets if size >= longest), longest)
    rows = max(0, 2 - len(tgt))  # a single one would be a shape of its own
    sides = ((batch.src, length), (tgt, length + 1))
    src, tgt = (F.pad(x, (0, n - x.size(1), 0, rows), value=batch.pad) for x, n in sides)
    return Batch(src, tgt, batch.pad)
