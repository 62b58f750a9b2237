"""Fused projection and cross-entropy that never holds all logits; the loss of a batch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from annotated_transformer.fast.model import FastModel, can_accelerate, is_untouched
from annotated_transformer.fast.packing import IndexedBatch
from annotated_transformer.model.architecture import EncoderDecoder, Generator
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.loop import batch_loss, check_smoothing, sum_type

ROWS = 512  #: Rows of logits in memory at a time.


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
        size, plain = weight.size(0), low == x.dtype
        inner = scale if plain else 1.0  # scaled gradients could underflow in float16
        matrix = weight.to(low)
        grad_x, grad_w = torch.empty_like(x), torch.zeros_like(weight)
        grad_b = torch.zeros_like(bias)
        wide = sum_type(x.device)
        loss, nll = x.new_zeros((), dtype=wide), x.new_zeros((), dtype=wide)
        step = ROWS if plain else 2 * ROWS  # each step adds its 16-bit gradient of the matrix
        for start in range(0, x.size(0), step):
            gold = target[start : start + step].unsqueeze(1)
            rows = x[start : start + step].to(low)
            z = torch.addmm(bias.to(low), rows, matrix.t()).to(x.dtype)
            z -= z.amax(dim=1, keepdim=True)
            right = z.gather(1, gold).to(wide).sum()
            if smoothing:  # without it a token may be excluded, its logit minus infinity
                loss -= smoothing / size * z.sum(dim=1).to(wide).sum()
            norm = z.exp_().sum(dim=1, keepdim=True)
            log_norm = norm.to(wide).log().sum()
            nll += log_norm - right
            loss += log_norm - (1 - smoothing) * right
            if not learn:
                continue
            # gradient of the logits: (softmax - smoothed target) * inner
            z.mul_(inner / norm)
            if smoothing:
                z.sub_(inner * smoothing / size)
            z.scatter_add_(1, gold, z.new_full(gold.shape, inner * (smoothing - 1)))
            grad_b += z.sum(dim=0)
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
        if grad.device.type != "cpu" or factor != 1:  # to look would be to wait for a GPU
            grads = tuple(g * factor for g in grads)
        return (*grads, None, None, None, None, None)


def linear_cross_entropy(
    x: Tensor, projection: nn.Linear, target: Tensor, smoothing: float = 0.0, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Project to the vocabulary and return the smoothed cross-entropy, summed and scaled.

    Equal to ``scale * F.cross_entropy(projection(x), target, label_smoothing=smoothing,
    reduction="sum")``, but only ``ROWS`` rows of logits are in memory at a time, and the
    gradient is computed in the forward pass.

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
    check_smoothing(smoothing)
    kind, learn = x.device.type, torch.is_grad_enabled()
    if torch.is_autocast_enabled(kind):
        x = x.to(projection.weight.dtype)  # a recurrent network's output has 16 bits there
    lowered = x.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    low = torch.get_autocast_dtype(kind) if lowered else x.dtype
    with torch.autocast(kind, enabled=False):  # the function chooses its dtypes itself
        loss, nll = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            x, projection.weight, projection.bias, target, smoothing, scale, learn, low
        )
    return loss, nll.detach()


class FastLoss(nn.Module):
    """The loss of a batch, through the fast layer where it supports the model and the masks.

    Equal to ``training.loop.batch_loss`` in value and gradient. Support is checked on every call,
    so a hook added later still runs, and a part that was replaced is used.

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
        batch, keep = IndexedBatch(batch), batch.tgt_y != batch.pad
        src_index, index = batch.src_index, batch.tgt_index
        if batch.usual and isinstance(self.model, FastModel) and self.model.computes(model):
            seen = batch.src_mask[:, 0] != 0
            x = self.model(batch.src, batch.tgt, seen, keep, src_index, index)
        else:
            x = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask).flatten(0, 1)[index]
        gold = batch.tgt_y.flatten()[index]  # (rows,)
        scale = 1 / max(1, batch.ntokens if tokens is None else tokens)
        return linear_cross_entropy(x, generator.proj, gold, smoothing, scale)


def fast_batch_loss(
    model: nn.Module, batch: Batch, smoothing: float = 0.0, tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``training.loop.batch_loss``, through the fast layer where it is supported."""
    found: tuple[Tensor, Tensor] = FastLoss(cast(EncoderDecoder, model))(batch, smoothing, tokens)
    return found
