"""Fused projection and cross-entropy that never holds all logits; the loss of a batch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from annotated_transformer.fast.model import FastModel, can_accelerate, is_untouched
from annotated_transformer.model.architecture import EncoderDecoder, Generator
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.loop import batch_loss, sum_type

ROWS = 512  #: Rows of logits in memory at a time.
GPU_LOGITS = 2**26  #: Logits in memory at a time on an NVIDIA GPU, which wants few large kernels.


def _on_cpu(
    z: Tensor, gold: Tensor, smoothing: float, scale: float, low: torch.dtype, learn: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of a chunk and its gradient.

    Args:
        z: Logits ``(rows, vocabulary)``, overwritten.
        gold: Target tokens ``(rows, 1)``.
        smoothing: ε of label smoothing.
        scale: Multiplies the gradient.
        low: Dtype in which products are made of the gradient.
        learn: Whether there is to be a gradient.

    Returns:
        Summed over the rows, the loss of the targets and that of the whole vocabulary, evenly;
        and the gradient of the logits, (softmax - smoothed target) * scale, to be made ``low``.
    """
    wide, size = sum_type(z.device), z.size(1)
    z -= z.amax(dim=1, keepdim=True)
    right, total = z.gather(1, gold).to(wide).sum(), z.sum(dim=1).to(wide).sum()
    z.exp_()
    norm = z.sum(dim=1, keepdim=True)
    log_norm = norm.to(wide).log().sum()
    if learn:
        z.mul_(scale / norm)
        if smoothing:
            z.sub_(scale * smoothing / size)
        z.scatter_add_(1, gold, z.new_full(gold.shape, scale * (smoothing - 1)))
    return log_norm - right, log_norm - total / size, z


def _on_gpu(
    z: Tensor, gold: Tensor, smoothing: float, scale: float, low: torch.dtype, learn: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``_on_cpu`` does, with fewer passes over memory and more exponentials."""
    full = torch.promote_types(z.dtype, torch.float32)
    wide, size = sum_type(z.device), z.size(1)
    z = z.log_softmax(dim=1, dtype=full)
    right, total = z.gather(1, gold).to(wide).sum(), z.sum(dim=1).to(wide).sum()
    if learn:
        z.exp_().scatter_add_(1, gold, z.new_full(gold.shape, smoothing - 1))
        even = z.new_full((), -scale * smoothing / size)
        out = z if low == full else torch.empty_like(z, dtype=low)
        z = torch.add(even, z, alpha=scale, out=out)  # which also rounds
    return -right, -total / size, z


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass, with the logits of one chunk in memory at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        target: Tensor,
        smoothing: float,
        scale: float,
        learn: bool,
        low: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        cuda, chunk = x.is_cuda, _on_gpu if x.is_cuda else _on_cpu
        plain = low == x.dtype
        inner = scale if plain else 1.0  # scaled gradients could underflow in float16
        matrix, offset = weight.to(low), bias.to(low)
        grad_x, grad_w = torch.empty_like(x), torch.zeros_like(weight)
        grad_b = torch.zeros_like(bias)
        wide = sum_type(x.device)
        loss, nll = x.new_zeros((), dtype=wide), x.new_zeros((), dtype=wide)
        step = max(ROWS, GPU_LOGITS // len(weight)) if cuda else ROWS
        for start in range(0, x.size(0), step):
            gold = target[start : start + step].unsqueeze(1)
            rows = x[start : start + step].to(low)
            fused = plain or cuda  # the bias is added within the product
            z = torch.addmm(offset, rows, matrix.t()) if fused else rows @ matrix.t() + bias
            right, even, z = chunk(z, gold, smoothing, inner, low, learn)
            nll += right
            loss += (1 - smoothing) * right + smoothing * even
            if not learn:
                continue
            grad_b += z.sum(dim=0, dtype=bias.dtype)
            if plain:
                torch.mm(z, weight, out=grad_x[start : start + step])
                grad_w.addmm_(z.t(), rows)
            else:
                z = z.to(low)
                grad_x[start : start + step] = z @ matrix
                grad_w += z.t() @ rows  # accumulated in full precision
        ctx.save_for_backward(grad_x, grad_w, grad_b)
        ctx.outer = scale / inner
        return (loss * scale).to(x.dtype), nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads, factor = ctx.saved_tensors, grad * ctx.outer
        if factor.is_cuda or factor != 1:  # to look would be to wait for the GPU
            grads = tuple(g * factor for g in grads)
        return (*grads, None, None, None, None, None)


def linear_cross_entropy(
    x: Tensor, projection: nn.Linear, target: Tensor, smoothing: float = 0.0, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Project to the vocabulary and return the smoothed cross-entropy, summed and scaled.

    Equal to ``scale * F.cross_entropy(projection(x), target, label_smoothing=smoothing,
    reduction="sum")``, but only ``ROWS`` rows of logits (``GPU_LOGITS`` logits on an NVIDIA
    GPU) are in memory at a time, and the gradient is computed in the forward pass.

    Args:
        x: Decoder output ``(rows, d_model)``, without padding.
        projection: From ``d_model`` to the vocabulary.
        target: Token ids ``(rows,)``.
        smoothing: ε of label smoothing, spread over the whole vocabulary.
        scale: Multiplies the loss, e.g. one over the number of tokens in the update.

    Returns:
        The loss, a scalar to call ``backward`` on; and the summed negative log-likelihood
        in nats, float64, without smoothing or scale and without gradient.
    """
    kind, learn = x.device.type, torch.is_grad_enabled()
    lowered = x.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    low = torch.get_autocast_dtype(kind) if lowered else x.dtype
    with torch.autocast(kind, enabled=False):  # the function chooses its dtypes itself
        loss, nll = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            x, projection.weight, projection.bias, target, smoothing, scale, learn, low
        )
    return loss, nll.detach()


class FastLoss(nn.Module):
    """The loss of a batch, through the fast layer where it supports the model.

    Equal to ``training.loop.batch_loss`` in value and gradient. Support is checked on every call,
    so a hook added later still runs.

    Args:
        model: Any encoder and decoder; its parameters become this module's.
    """

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self._readable = (model,)  # in a tuple, so that it is not registered twice
        self.model: nn.Module = FastModel(model) if can_accelerate(model) else model

    def train(self, mode: bool = True) -> FastLoss:
        """Set the mode of the model."""
        self._readable[0].train(mode)
        return super().train(mode)

    def forward(
        self, batch: Batch, smoothing: float = 0.0, tokens: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what ``training.loop.batch_loss`` returns."""
        (model,) = self._readable
        generator = model.generator
        if type(generator) is not Generator or not is_untouched(generator):
            return batch_loss(model, batch, smoothing, tokens)
        keep = batch.tgt_y != batch.pad
        if isinstance(self.model, FastModel) and can_accelerate(model):
            x = self.model(batch.src, batch.tgt, batch.src_mask[:, 0], keep)
        else:
            x = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)[keep]
        gold = batch.tgt_y[keep]  # (rows,)
        scale = 1 / max(1, batch.ntokens if tokens is None else tokens)
        return linear_cross_entropy(x, generator.proj, gold, smoothing, scale)


def fast_batch_loss(
    model: nn.Module, batch: Batch, smoothing: float = 0.0, tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``training.loop.batch_loss``, through the fast layer where it is supported."""
    found: tuple[Tensor, Tensor] = FastLoss(cast(EncoderDecoder, model))(batch, smoothing, tokens)
    return found
