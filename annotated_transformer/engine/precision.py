"""The precision of a run, and the loss computed in it, optionally compiled."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.engine.config import UsageError
from annotated_transformer.fast.loss import FastLoss, linear_cross_entropy
from annotated_transformer.fast.model import FastModel, can_accelerate, embed_rows
from annotated_transformer.fast.packing import IndexedBatch, PackedMask, Rows
from annotated_transformer.model.architecture import EncoderDecoder, Generator
from annotated_transformer.model.multi_head import subsequent_mask
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.loop import LossScale

Name = Literal["float32", "tf32", "bfloat16", "float16"]
SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class DynamicLossScale(LossScale):
    """Keeps small float16 gradients from underflowing.

    It is halved when gradients overflow, and doubled after ``patience`` updates without overflow.
    """

    least, most = 1.0, 2.0**24

    def __init__(self, value: float = 2.0**15, patience: int = 2000) -> None:
        self.value, self.patience = value, patience
        self.good = 0  # updates since the last change

    def adapt(self, finite: bool) -> None:
        """Change the scale depending on whether an update was finite."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value = max(self.least, self.value / 2)
        elif self.good == self.patience:
            self.value, self.good = min(self.value * 2, self.most), 0

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "good": self.good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state from a checkpoint."""
        self.value, self.good = float(state["value"]), int(state["good"])


class Precision:
    """The precision of matrix products; on a GPU this also sets how float32 is multiplied.

    Args:
        name: ``float32``; ``tf32``, where the inputs of float32 products are rounded;
            ``bfloat16`` or ``float16``, by autocast.
        device: The device to compute on.

    Attributes:
        scale: The loss scale; None if none is needed.

    Raises:
        ValueError: The device does not support the precision.
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
        self.scale = DynamicLossScale() if name == "float16" else None

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context for a forward pass."""
        if self.name not in SHORT:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, SHORT[self.name])


def find_device(name: str = "auto") -> str:
    """Return the device to compute on; ``auto`` is an NVIDIA GPU if there is one.

    Raises:
        UsageError: PyTorch finds no such device.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(name, True):
        raise UsageError(f"--device {name}: PyTorch finds no such device here; try --device cpu")
    return ("cuda" if there["cuda"] else "cpu") if name == "auto" else name


class PreciseLoss(nn.Module):
    """The loss of a batch in a given precision: the module to replicate or shard, and train.

    Args:
        model: Its parameters become this module's.
        precision: Precision of the forward pass.
        compiler: Backend of ``torch.compile``, such as ``"inductor"``; None does not compile.
    """

    def __init__(
        self,
        model: EncoderDecoder,
        precision: Precision | None = None,
        compiler: str | Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.precision = Precision() if precision is None else precision
        self.loss = FastLoss(model) if compiler is None else CompiledLoss(model, compiler)

    @property
    def layers(self) -> Iterable[nn.Module]:
        """The sub-modules that FSDP gathers one at a time."""
        own = self.loss.model
        return (*own.encoder.layers, *own.decoder.layers) if isinstance(own, FastModel) else ()

    def forward(self, batch: Batch, smoothing: float, tokens: int | None) -> tuple[Tensor, Tensor]:
        """Return what ``training.loop.batch_loss`` returns."""
        with self.precision.autocast():
            found: tuple[Tensor, Tensor] = self.loss(batch, smoothing, tokens)
        return found


# --- compiled --------------------------------------------------------------------------------

UNCHANGED = "compile: supports only the unmodified Transformer, without hooks"
BUCKETS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def pad_to_bucket(batch: Batch, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Pad both sides of a batch to the same bucket length, and to at least two sentences.

    Args:
        batch: Any batch; extra padding does not change its loss.
        most: Positions of the model; a sentence longer than all buckets is padded to these.

    Returns:
        The source ``(sentences, bucket)`` and the decoder's input, of the same shape.
    """
    longest = max(batch.src.size(1), batch.tgt.size(1))
    last = max(longest, BUCKETS[-1]) if most is None else most
    length = min(last, next((size for size in BUCKETS if size >= longest), last))
    rows = max(0, 2 - len(batch.src))  # a batch of one would be compiled separately
    sides = batch.src, batch.tgt
    src, tgt = (F.pad(x, (0, length - x.size(1), 0, rows), value=batch.pad) for x in sides)
    return src, tgt


class _Padded(Rows):
    """All rows of a padded batch including padding, so that no shape depends on the tokens."""

    def __init__(self, tokens: Tensor) -> None:
        self.shape = (tokens.size(0), tokens.size(1))
        self.index = torch.arange(tokens.numel(), device=tokens.device)

    def pack(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    def unpack(self, x: Tensor) -> Tensor:
        return x.view(*self.shape, *x.shape[1:])


class _PaddedMask(PackedMask):
    full = False  # a constant, because the compiler cannot look at the tokens


class CompiledLoss(nn.Module):
    """The loss of a batch, compiled once per bucket of lengths, by a backend of ``torch.compile``.

    Raises:
        ValueError: ``fast.model.can_accelerate`` does not accept the model.
    """

    def __init__(self, model: EncoderDecoder, compiler: str | Callable[..., Any]) -> None:
        super().__init__()
        self._readable = (model,)  # in a tuple, so that it is not registered twice
        if not can_accelerate(model):
            raise ValueError(UNCHANGED)
        self.model, self.most = FastModel(model), model.config and model.config.max_len
        # For each bucket: training and evaluation, with and without gradients.
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 4 * (len(BUCKETS) + 1))
        self.compiled = torch.compile(self._packed, backend=compiler, dynamic=False, fullgraph=True)

    def _packed(self, src: Tensor, tgt: Tensor, pad: int) -> Tensor:
        """Return the decoder's outputs ``(batch * n, d_model)``, undefined at padding."""
        source, target = _Padded(src), _Padded(tgt)
        real = (src != pad).unsqueeze(1)
        real = real | ~real.any(-1, keepdim=True)  # some kernels give NaN for a fully masked row
        past = subsequent_mask(tgt.size(1), tgt.device)
        own = torch.eye(tgt.size(1), dtype=torch.bool, device=tgt.device)
        past = past & (tgt != pad).unsqueeze(1) | own
        m = self.model
        memory = m.encoder(embed_rows(m.src_embed, src, source), _PaddedMask(real, source, source))
        x = embed_rows(m.tgt_embed, tgt, target)
        cross = _PaddedMask(real, target, source)
        y: Tensor = m.decoder(x, _PaddedMask(past, target, target), memory, cross)
        return y

    def forward(
        self, batch: Batch, smoothing: float = 0.0, tokens: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what ``training.loop.batch_loss`` returns.

        Raises:
            ValueError: The model was changed, or the masks hide more than padding and future.
        """
        if not self.model.computes(*self._readable):
            raise ValueError(UNCHANGED)
        if not (batch := IndexedBatch(batch)).usual:
            raise ValueError("compile: masks may hide padding and the future alone")
        scale = 1 / max(1, batch.ntokens if tokens is None else tokens)
        inputs = pad_to_bucket(batch, self.most)
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)  # any number of sentences
        index, n, m = batch.tgt_index, batch.tgt.size(1), inputs[1].size(1)
        x = self.compiled(*inputs, batch.pad)[index // n * m + index % n]  # (rows, d_model)
        projection = cast(Generator, self.model.generator).proj
        return linear_cross_entropy(x, projection, batch.tgt_y.flatten()[index], smoothing, scale)
