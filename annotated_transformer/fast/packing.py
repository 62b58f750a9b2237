"""Padded batches packed into rows of real tokens, and the layout that maps them back."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from annotated_transformer.model.multi_head import padding_mask
from annotated_transformer.training.batches import Batch

# Elements in a vector of the CPU. Softmax takes ten times as long for those of a shorter row.
VECTOR = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 1)


class _Gather(torch.autograd.Function):
    """Select rows, each at most once, so that the gradient is a plain scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.length = x.size(0)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.length, *grad.shape[1:]).index_copy_(0, index, grad), None


class Rows:
    """The positions of the real tokens in a padded batch.

    Args:
        keep: Boolean ``(batch, length)``, true at real tokens.
        index: Their places in ``keep.flatten()``, ``(rows,)``; looked for unless given.

    Attributes:
        width: Length of the blocks of ``split``, filled up where that makes softmax faster.
    """

    def __init__(self, keep: Tensor, index: Tensor | None = None) -> None:
        self.shape = (keep.size(0), keep.size(1))
        self.width = VECTOR if VECTOR // 2 < keep.size(1) < VECTOR else keep.size(1)
        self.index = keep.flatten().nonzero().squeeze(1) if index is None else index
        self._slices: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def positions(self) -> Tensor:
        """Position of each row in its sentence, ``(rows,)``."""
        return self.index % self.shape[1]

    def pack(self, x: Tensor) -> Tensor:
        """Select the real rows of ``x (batch, length, ...)``: ``(rows, ...)``."""
        packed: Tensor = _Gather.apply(x.flatten(0, 1), self.index)  # type: ignore[no-untyped-call]
        return packed

    def unpack(self, x: Tensor) -> Tensor:
        """Put ``x (rows, ...)`` back into ``(batch, length, ...)``, zeros elsewhere."""
        batch, length = self.shape
        padded = x.new_zeros(batch * length, *x.shape[1:]).index_copy_(0, self.index, x)
        return padded.view(batch, length, *x.shape[1:])

    def slices(self, parts: int, h: int) -> tuple[Tensor, Tensor]:
        """Return index maps for rows cut into ``parts`` of ``h`` heads each.

        Returns:
            For each place in ``(parts, batch, h, width)`` its slice of the rows, with the first
            row's at padding; and for each slice in ``(rows, parts, h)`` its place. Both flat.
        """
        if (parts, h) not in self._slices:
            (batch, length), device = self.shape, self.index.device
            where = self.index // length * self.width + self.positions
            row = torch.zeros(batch * self.width, dtype=torch.long, device=device)
            row[where] = torch.arange(len(where), device=device)
            part = torch.arange(parts * h, device=device).view(parts, 1, h, 1)
            taken = row.view(batch, 1, self.width) * (parts * h) + part  # (parts, batch, h, width)
            place = torch.arange(taken.numel(), device=device).view_as(taken)
            place = place.permute(1, 3, 0, 2).flatten(0, 1)[where]  # (rows, parts, h)
            self._slices[parts, h] = taken.flatten(), place.flatten()
        return self._slices[parts, h]

    def split(self, x: Tensor, parts: int, h: int) -> Tensor:
        """Cut ``x (rows, parts * h * d)`` into ``(parts, batch * h, width, d)``."""
        d = x.size(1) // (parts * h)
        y = x.reshape(-1, d).index_select(0, self.slices(parts, h)[0])
        return y.view(parts, self.shape[0] * h, self.width, d)

    def join(self, y: Tensor, h: int) -> Tensor:
        """Undo ``split``: ``(parts, batch * h, width, d)`` to ``(rows, parts * h * d)``."""
        parts, d = y.size(0), y.size(3)
        slices = y.reshape(-1, d).index_select(0, self.slices(parts, h)[1])
        return slices.view(-1, parts * h * d)


class IndexedBatch(Batch):
    """A batch with the indices of its :class:`Rows`, unless it has them already.

    It is ``usual`` if it hides the padding and the future alone, and its targets end in padding.
    Make it before the batch goes to a GPU: to look there is to wait for the GPU.
    """

    def __init__(self, batch: Batch) -> None:
        vars(self).update(vars(batch))
        if not isinstance(batch, IndexedBatch):
            real = self.tgt_y != self.pad
            gaps = (real[:, 1:] & ~real[:, :-1]).any() or (real & (self.tgt == self.pad)).any()
            source = torch.equal(self.src_mask, padding_mask(self.src, self.pad))
            target = torch.equal(self.tgt_mask, Batch.make_std_mask(self.tgt, self.pad))
            self.usual = source and target and not gaps
            self.src_index, self.tgt_index = Rows(self.src_mask[:, 0]).index, Rows(real).index


@dataclass(frozen=True)
class PackedMask:
    """A mask with the layouts of the packed queries and keys."""

    mask: Tensor  #: ``(batch, 1 or n, m)``, true = may attend.
    queries: Rows  #: Layout of the queries.
    keys: Rows  #: Layout of the keys.
    _biases: dict[tuple[int, torch.dtype], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def full(self) -> bool:
        """Whether there is a query, and every query may attend to at least one key."""
        return len(self.queries.index) > 0 and bool(self.mask.any(dim=-1).all())

    def bias(self, h: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of the scores ``(batch * h, n, m)``, cached for all layers."""
        if (h, dtype) not in self._biases:
            n, m, (batch, _, length) = self.queries.width, self.keys.width, self.mask.shape
            bias = self.mask.new_full((batch, n, m), torch.finfo(dtype).min / 2, dtype=dtype)
            bias[:, : self.queries.shape[1], :length].masked_fill_(self.mask, 0)
            self._biases[h, dtype] = bias.repeat_interleave(h, 0)
        return self._biases[h, dtype]
