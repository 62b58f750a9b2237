"""Multi-head attention on packed rows, with the readable module's parameters."""

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from annotated_transformer.fast.dropout import dropout_factors, is_active
from annotated_transformer.fast.linear import matmul_precision
from annotated_transformer.fast.packing import PackedMask
from annotated_transformer.model.attention import attention
from annotated_transformer.model.multi_head import MultiHeadedAttention

SHORT = 128  # keys; up to this many, plain oneDNN products beat the fused kernel


def plain_is_faster(query: Tensor, key: Tensor) -> bool:
    """Whether ``attention`` is faster than the fused kernel for these shapes on this device.

    Under ``torch.set_float32_matmul_precision("medium")`` a CPU uses oneDNN. That is fast for the
    few large products of ``attention``, but each of the fused kernel's many small products pays
    its start-up cost. A single query, as in decoding, always uses the fused kernel.
    """
    if torch.compiler.is_compiling():
        return False
    through_onednn = matmul_precision() not in (None, "highest")
    short = query.size(-2) > 1 and key.size(-2) <= SHORT
    return query.device.type == "cpu" and through_onednn and short


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Compute ``attention(query, key, value, mask)[0]`` with the faster kernel for this size.

    Each is ``(batch, heads, positions, d)``, and the mask is boolean.
    """
    if plain_is_faster(query, key):
        return attention(query, key, value, mask)[0]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def fused_linear(x: Tensor, *layers: nn.Module) -> Tensor:
    """Apply several linear layers in one product: ``(..., in)`` to ``(..., sum of out)``.

    On a CPU, packed rows are multiplied first and the bias is added in place, which is faster.
    """
    parts = cast(tuple[nn.Linear, ...], layers)
    weight = parts[0].weight if len(parts) == 1 else torch.cat([part.weight for part in parts])
    bias = parts[0].bias if len(parts) == 1 else torch.cat([part.bias for part in parts])
    if x.dim() == 2 and x.device.type == "cpu":
        y = torch.mm(x, weight.t())
        return y.add_(bias.to(y.dtype))
    return F.linear(x, weight, bias)


def _wide(x: Tensor) -> torch.dtype:
    """At least float32, in which a CPU computes a softmax of 16 bits three times as fast."""
    return torch.promote_types(x.dtype, torch.float32)


class _PackedAttention(torch.autograd.Function):
    """Self-attention on packed ``(rows, 3 * h * d)``, or attention to a memory's ``2 * h * d``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, memory: Tensor | None, mask: PackedMask, h: int, p: float
    ) -> Tensor:
        if memory is None:
            q, k, v = mask.queries.split(x, 3, h)  # each (batch * h, length, d)
        else:
            (q,), (k, v) = mask.queries.split(x, 1, h), mask.keys.split(memory, 2, h)
        bias = mask.bias(h, q.dtype)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=q.size(-1) ** -0.5)
        weights = scores.to(_wide(scores)).softmax(dim=-1).to(scores.dtype)
        factors = dropout_factors(weights, p) if p else None
        ctx.save_for_backward(q, k, v, weights, factors)
        ctx.mask, ctx.h, ctx.own = mask, h, memory is None
        kept = weights if factors is None else weights * factors
        return mask.queries.join(torch.bmm(kept, v).unsqueeze(0), h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, factors = ctx.saved_tensors
        mask, h, scale = ctx.mask, ctx.h, q.size(-1) ** -0.5
        places = mask.queries.slices(1, h)[1]
        g = grad.new_zeros(q.shape)
        g.view(-1, q.size(-1)).index_copy_(0, places, grad.reshape(-1, q.size(-1)))
        scores = torch.bmm(g, v.transpose(1, 2))  # gradient of the weights, then of the scores
        if factors is not None:
            scores.mul_(factors)
        wide = _wide(scores)
        grads = scores.to(wide), weights.to(wide)
        scores = torch._softmax_backward_data(*grads, -1, wide).mul_(scale).to(scores.dtype)
        keys_values = k.new_empty(2, *k.shape)
        torch.bmm(scores.transpose(1, 2), q, out=keys_values[0])
        kept = weights if factors is None else weights * factors
        torch.bmm(kept.transpose(1, 2), g, out=keys_values[1])
        queries = torch.bmm(scores, k).unsqueeze(0)
        if ctx.own:
            return mask.queries.join(torch.cat([queries, keys_values]), h), *[None] * 4
        return mask.queries.join(queries, h), mask.keys.join(keys_values, h), *[None] * 3


def _packs(attn: MultiHeadedAttention, mask: PackedMask) -> bool:
    """Whether packed rows can be used directly, without unpacking them into a padded batch."""
    short = mask.keys.shape[1] <= SHORT and mask.mask.device.type == "cpu"
    return short and attn.d_k == attn.d_v and mask.full


def attend_rows(attn: MultiHeadedAttention, x: Tensor, memory: Tensor, mask: PackedMask) -> Tensor:
    """Compute ``attn(x, memory, memory)`` on packed rows, with the same parameters.

    Args:
        attn: The readable module.
        x: Queries ``(rows, d_model)``.
        memory: Keys and values ``(other rows, d_model)``; ``x`` itself for self-attention.
        mask: Which keys each query may attend to, and the layout of both.

    Returns:
        ``(rows, d_model)``.
    """
    attn.attn = None  # these weights are not kept, and those of an earlier call are not these
    w_q, w_k, w_v, w_o = cast(Iterable[nn.Linear], attn.linears)
    if x is memory:
        queries, others = fused_linear(x, w_q, w_k, w_v), None
    else:
        queries, others = fused_linear(x, w_q), fused_linear(memory, w_k, w_v)
    if _packs(attn, mask):
        p = attn.dropout.p if is_active(attn.dropout) else 0.0
        y = _PackedAttention.apply(queries, others, mask, attn.h, p)  # type: ignore[no-untyped-call]
        return fused_linear(y, w_o)
    sizes = [attn.h * attn.d_k, attn.h * attn.d_k, attn.h * attn.d_v]
    if others is None:
        q, k, v = mask.queries.unpack(queries).split(sizes, dim=-1)
    else:
        q = mask.queries.unpack(queries)
        k, v = mask.keys.unpack(others).split(sizes[1:], dim=-1)
    q, k, v = (part.unflatten(-1, (attn.h, -1)).transpose(1, 2) for part in (q, k, v))
    each = mask.mask.unsqueeze(1)  # (batch, 1, 1 or n, m), shared by all heads
    if is_active(attn.dropout):
        y = attention(q, k, v, each, attn.dropout)[0]
    else:
        y = fused_attention(q, k, v, each)
    return fused_linear(mask.queries.pack(y.transpose(1, 2).flatten(2)), w_o)
