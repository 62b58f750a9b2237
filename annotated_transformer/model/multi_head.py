# Written from book/model/multi_head.md: edit the chapter instead.
"""Multi-head attention, packed batches and caches (section 3.2.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from annotated_transformer.model.attention import SHORT, attention, fused_attention


class _Gather(torch.autograd.Function):
    """Take rows; each is taken at most once, so the gradient is a plain scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.length = x.size(0)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.length, *grad.shape[1:]).index_copy_(0, index, grad), None


class _Scatter(torch.autograd.Function):
    """Put rows at their places among zeros; the gradient takes them back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(index)
        return x.new_zeros(length, *x.shape[1:]).index_copy_(0, index, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


class Rows:
    """Where the real tokens of a padded batch lie.

    Args:
        keep: Boolean ``(batch, length)``, true at real tokens.
    """

    def __init__(self, keep: Tensor) -> None:
        self.shape = (keep.size(0), keep.size(1))
        self.index = keep.flatten().nonzero().squeeze(1)  # (rows,)
        self._pieces: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def positions(self) -> Tensor:
        """Position of each row in its sentence, ``(rows,)``."""
        return self.index % self.shape[1]

    def pack(self, x: Tensor) -> Tensor:
        """Take the real rows of ``x (batch, length, ...)``: ``(rows, ...)``."""
        packed: Tensor = _Gather.apply(x.flatten(0, 1), self.index)  # type: ignore[no-untyped-call]
        return packed

    def unpack(self, x: Tensor) -> Tensor:
        """Put ``x (rows, ...)`` back into ``(batch, length, ...)``, zeros elsewhere."""
        batch, length = self.shape
        padded: Tensor = _Scatter.apply(x, self.index, batch * length)  # type: ignore[no-untyped-call]
        return padded.view(batch, length, *x.shape[1:])

    def pieces(self, parts: int, h: int) -> tuple[Tensor, Tensor]:
        """Number the pieces of rows that are cut into ``parts`` of ``h`` heads each.

        Returns:
            For ``(parts, batch, h, length)``, the piece that belongs there, padding taking those
            of the first row; and for ``(rows, parts, h)``, where each piece went. Both flat.
        """
        if (parts, h) not in self._pieces:
            (batch, length), device = self.shape, self.index.device
            row = torch.zeros(batch * length, dtype=torch.long, device=device)
            row[self.index] = torch.arange(len(self.index), device=device)
            piece = torch.arange(parts * h, device=device).view(parts, 1, h, 1)
            taken = row.view(batch, 1, length) * (parts * h) + piece  # (parts, batch, h, length)
            place = torch.arange(taken.numel(), device=device).view_as(taken)
            place = place.permute(1, 3, 0, 2).flatten(0, 1)[self.index]  # (rows, parts, h)
            self._pieces[parts, h] = taken.flatten(), place.flatten()
        return self._pieces[parts, h]

    def split(self, x: Tensor, parts: int, h: int) -> Tensor:
        """Cut ``x (rows, parts * h * d)`` into ``(parts, batch * h, length, d)``."""
        batch, length = self.shape
        d = x.size(1) // (parts * h)
        y = x.reshape(-1, d).index_select(0, self.pieces(parts, h)[0])
        return y.view(parts, batch * h, length, d)

    def join(self, y: Tensor, h: int) -> Tensor:
        """Undo ``split``: ``(parts, batch * h, length, d)`` to ``(rows, parts * h * d)``."""
        parts, d = y.size(0), y.size(3)
        pieces = y.reshape(-1, d).index_select(0, self.pieces(parts, h)[1])
        return pieces.view(-1, parts * h * d)


@dataclass(frozen=True)
class PackedMask:
    """A mask that also says how packed queries and keys are laid out in their batch."""

    mask: Tensor  # (batch, 1 or n, m), true = may attend
    queries: Rows
    keys: Rows
    _biases: dict[tuple[int, torch.dtype], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def all_see(self) -> bool:
        """Whether there are queries, and each may attend to something."""
        return len(self.queries.index) > 0 and bool(self.mask.any(dim=-1).all())

    def bias(self, h: int, dtype: torch.dtype) -> Tensor:
        """Return what to add to the scores ``(batch * h, n, m)``, kept for the next layer."""
        if (h, dtype) not in self._biases:
            bias = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            bias = bias.masked_fill_(~self.mask, torch.finfo(dtype).min).unsqueeze(1)
            n, m = self.queries.shape[1], self.keys.shape[1]
            self._biases[h, dtype] = bias.expand(-1, h, n, m).reshape(-1, n, m)
        return self._biases[h, dtype]


class _PackedAttention(torch.autograd.Function):
    """Attention of packed rows ``(rows, 3 * h * d)``, or of rows to a memory's ``2 * h * d``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Tensor | None, mask: PackedMask, h: int) -> Tensor:
        if memory is None:
            q, k, v = mask.queries.split(x, 3, h)  # each (batch * h, length, d)
        else:
            (q,), (k, v) = mask.queries.split(x, 1, h), mask.keys.split(memory, 2, h)
        bias = mask.bias(h, q.dtype)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=q.size(-1) ** -0.5)
        weights = scores.softmax(dim=-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.mask, ctx.h, ctx.own = mask, h, memory is None
        return mask.queries.join(torch.bmm(weights, v).unsqueeze(0), h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        mask, h, scale = ctx.mask, ctx.h, q.size(-1) ** -0.5
        places = mask.queries.pieces(1, h)[1]
        g = grad.new_zeros(q.shape)
        g.view(-1, q.size(-1)).index_copy_(0, places, grad.reshape(-1, q.size(-1)))
        scores = torch.bmm(g, v.transpose(1, 2))  # the gradient of the weights, then of the scores
        scores.sub_((scores * weights).sum(dim=-1, keepdim=True)).mul_(weights).mul_(scale)
        keys_values = k.new_empty(2, *k.shape)
        torch.bmm(scores.transpose(1, 2), q, out=keys_values[0])
        torch.bmm(weights.transpose(1, 2), g, out=keys_values[1])
        queries = torch.bmm(scores, k).unsqueeze(0)
        if ctx.own:
            return mask.queries.join(torch.cat([queries, keys_values]), h), None, None, None
        return mask.queries.join(queries, h), mask.keys.join(keys_values, h), None, None


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``F.linear(x, weight, bias)``; packed rows are multiplied before the bias is added."""
    if x.dim() == 2 and x.device.type == "cpu":
        return torch.mm(x, weight.t()).add_(bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """``torch.nn.Linear`` by :func:`affine`."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x (..., in_features)`` and add the bias: ``(..., out_features)``."""
        return affine(x, self.weight, self.bias)


class KeyValueCache:
    """Keys and values of the positions decoded so far, in blocks allocated once.

    Args:
        capacity: Most positions that will be kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None  # (batch, h, capacity, d_k)
        self.values: Tensor | None = None  # (batch, h, capacity, d_v)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``(batch, h, n, d)`` keys and values; return all of them so far.

        Raises:
            IndexError: More positions than the capacity.
        """
        end = self.length + key.size(2)
        if end > self.capacity:
            raise IndexError(f"position {end} is beyond the cache's capacity of {self.capacity}")
        if self.keys is None or self.values is None:
            self.keys = key.new_empty(*key.shape[:2], self.capacity, key.size(3))
            self.values = value.new_empty(*value.shape[:2], self.capacity, value.size(3))
        self.keys[:, :, self.length : end] = key
        self.values[:, :, self.length : end] = value
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def select(self, rows: Tensor) -> None:
        """Keep the given sentences ``(rows,)``, in that order."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class MemoryCache(KeyValueCache):
    """Keys and values of the encoder's output: computed at the first step, then kept."""

    def __init__(self) -> None:
        super().__init__(capacity=0)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep ``(batch, h, m, d)`` keys and values."""
        self.keys, self.values, self.length = key, value, key.size(2)
        return key, value


class MultiHeadedAttention(nn.Module):
    """Multi-head attention, section 3.2.2.

    The projections of all heads, and of queries, keys and values, are one matrix.

    Args:
        h: Number of heads.
        d_model: Width of inputs and output.
        dropout: Probability of dropping an attention weight in training.
        d_k: Width of a head's queries and keys; ``d_model / h`` unless given.
        d_v: Width of a head's values; ``d_model / h`` unless given.

    Raises:
        ValueError: ``d_model`` is no multiple of ``h`` and a width is not given.
    """

    def __init__(
        self,
        h: int,
        d_model: int,
        dropout: float = 0.1,
        *,
        d_k: int | None = None,
        d_v: int | None = None,
    ) -> None:
        super().__init__()
        if d_model % h and (d_k is None or d_v is None):
            raise ValueError(f"d_model={d_model} is not a multiple of h={h}: give d_k and d_v")
        self.h = h
        self.d_k = d_model // h if d_k is None else d_k
        self.d_v = d_model // h if d_v is None else d_v
        self.sizes = (h * self.d_k, h * self.d_k, h * self.d_v)
        self.in_proj = Linear(d_model, sum(self.sizes))  # W^Q, W^K, W^V of every head
        self.out_proj = Linear(h * self.d_v, d_model)  # W^O
        self.dropout = nn.Dropout(dropout)
        self.keep_weights = False
        self.attn: Tensor | None = None  # (batch, h, n, m), if keep_weights

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | PackedMask | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attend with every head, and mix what they found.

        Args:
            query: Shape ``(batch, n, d_model)``, or ``(rows, d_model)`` with a packed mask.
            key: Shape ``(batch, m, d_model)``, or packed likewise.
            value: As ``key``.
            mask: Boolean ``(batch, 1 or n, m)``, true = may attend, the same for all heads.
            cache: Keys and values kept from earlier calls; the new ones are added.

        Returns:
            Shape of ``query``.
        """
        if isinstance(mask, PackedMask) and key is value and cache is None and self.at_once(mask):
            rows: Tensor = self.out_proj(self.attend_packed(query, key, mask))
            return rows
        q, k, v = self.project(query, key, value, mask, cache)
        heads = mask.mask if isinstance(mask, PackedMask) else mask
        if heads is not None:
            heads = (heads if heads.dtype == torch.bool else heads != 0).unsqueeze(1)
        x = self.attend(q, k, v, heads)  # (batch, h, n, d_v)
        x = x.transpose(1, 2).flatten(2)  # (batch, n, h * d_v)
        if isinstance(mask, PackedMask):
            x = mask.queries.pack(x)
        y: Tensor = self.out_proj(x)
        return y

    def at_once(self, mask: PackedMask) -> bool:
        """Whether packed rows are attended to without the detour over padded batches."""
        plain = not self.keep_weights and not (self.training and self.dropout.p > 0)
        short = mask.keys.shape[1] <= SHORT and mask.mask.device.type == "cpu"
        return plain and short and self.d_k == self.d_v and mask.all_see

    def attend_packed(self, query: Tensor, key: Tensor, mask: PackedMask) -> Tensor:
        """Attend from rows to rows, ``(rows, d_model)`` to ``(rows, h * d_v)``."""
        if query is key:
            x, memory = self.in_proj(query), None
        else:
            weight, bias, n = self.in_proj.weight, self.in_proj.bias, self.sizes[0]
            x = affine(query, weight[:n], bias[:n])
            memory = affine(key, weight[n:], bias[n:])
        y: Tensor = _PackedAttention.apply(x, memory, mask, self.h)  # type: ignore[no-untyped-call]
        return y

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with every head; keep the weights where asked for, or where they drop out."""
        if self.keep_weights or (self.training and self.dropout.p > 0):
            x, weights = attention(q, k, v, mask, self.dropout)
            self.attn = weights.detach() if self.keep_weights else None
            return x
        return fused_attention(q, k, v, mask)

    def project(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | PackedMask | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project to the heads' queries, keys and values, each ``(batch, h, length, d)``."""
        weight, bias = self.in_proj.weight, self.in_proj.bias
        if query is key and key is value:  # self-attention: one product
            x = self.in_proj(query)
            if isinstance(mask, PackedMask):
                x = mask.queries.unpack(x)
            q, k, v = x.split(self.sizes, dim=-1)
        else:
            wq, wk, wv = weight.split(self.sizes)
            bq, bk, bv = bias.split(self.sizes)
            q = F.linear(query, wq, bq)
            if isinstance(mask, PackedMask):
                q = mask.queries.unpack(q)
            if (
                isinstance(cache, MemoryCache)
                and cache.keys is not None
                and cache.values is not None
            ):
                return self.heads(q, self.d_k), cache.keys, cache.values
            if key is value:
                x = F.linear(key, weight[self.sizes[0] :], bias[self.sizes[0] :])
            else:
                x = torch.cat([F.linear(key, wk, bk), F.linear(value, wv, bv)], dim=-1)
            if isinstance(mask, PackedMask):
                x = mask.keys.unpack(x)
            k, v = x.split(self.sizes[1:], dim=-1)
        q, k, v = self.heads(q, self.d_k), self.heads(k, self.d_k), self.heads(v, self.d_v)
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v

    def heads(self, x: Tensor, width: int) -> Tensor:
        """Split ``(batch, length, h * width)`` into ``(batch, h, length, width)``."""
        return x.view(*x.shape[:-1], self.h, width).transpose(1, 2)
