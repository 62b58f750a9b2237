# Written from book/model/architecture.md: edit the chapter instead.
"""Figure 1, from the outside in: encoder, decoder, layers, residuals, normalization (§3, §3.1)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Mask: TypeAlias = Tensor | None  # boolean, true = may attend; None: no mask
Memory: TypeAlias = Tensor | None  # the encoder's output; None for layers that do not attend to it
Norm = Literal["post", "pre"]


def check_choice(name: str, value: object, kind: Any) -> None:
    """Raise ValueError for a value that is none of a ``Literal``; the message names it."""
    if value not in get_args(kind):
        raise ValueError(f"{name}={value!r}: choose among {', '.join(get_args(kind))}")


class EncoderDecoder(nn.Module):
    """An encoder and a decoder, the embeddings before them, and the generator after (§3)."""

    config: Any = None  #: A ModelConfig, if ``build_model`` has built it.

    def __init__(
        self,
        encoder: nn.Module,  # (embedded source, mask) -> memory
        decoder: nn.Module,  # (embedded target, memory, both masks) -> vectors
        src_embed: nn.Module,  # tokens (batch, m) to vectors (batch, m, d_model)
        tgt_embed: nn.Module,  # tokens (batch, n) to vectors (batch, n, d_model)
        generator: nn.Module,  # decoder's output -> next token's log-probabilities
    ) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.src_embed, self.tgt_embed, self.generator = src_embed, tgt_embed, generator

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Mask, tgt_mask: Mask) -> Tensor:
        """Encode ``src (batch, m)``, decode ``tgt (batch, n)``: ``(batch, n, d_model)``."""
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)

    def encode(self, src: Tensor, src_mask: Mask) -> Tensor:
        """Encode ``src (batch, m)``, ``src_mask (batch, 1, m)``: ``(batch, m, d_model)``."""
        memory: Tensor = self.encoder(self.src_embed(src), src_mask)
        return memory

    def decode(self, memory: Tensor, src_mask: Mask, tgt: Tensor, tgt_mask: Mask) -> Tensor:
        """Decode ``tgt (batch, n)``, ``tgt_mask (batch or 1, n, n)``: ``(batch, n, d_model)``."""
        x: Tensor = self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)
        return x


class Generator(nn.Module):
    """A linear projection to the vocabulary, and the logarithm of its softmax (§3.4)."""

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, vocab)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x (..., d_model)`` to log-probabilities ``(..., vocab)``."""
        return F.log_softmax(self.proj(x), dim=-1)


def clones(module: nn.Module, N: int) -> nn.ModuleList:
    """Return ``N`` copies of a layer, each with parameters of its own."""
    return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])


class Encoder(nn.Module):
    """A stack of ``N`` encoder layers (§3.1)."""

    def __init__(self, layer: EncoderLayer, N: int) -> None:
        super().__init__()
        self.layers = clones(layer, N)
        # With the norm inside the residual branch, nothing has normalized the last sum.
        self.norm = LayerNorm(layer.size) if layer.order == "pre" else nn.Identity()

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        """Pass ``x (batch, m, d_model)`` through all layers; same shape."""
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        return x


class Decoder(nn.Module):
    """A stack of ``N`` decoder layers (§3.1)."""

    def __init__(self, layer: DecoderLayer, N: int) -> None:
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(layer.size) if layer.order == "pre" else nn.Identity()

    def forward(self, x: Tensor, memory: Memory, src_mask: Mask, tgt_mask: Mask) -> Tensor:
        """Pass ``x (batch, n, d_model)`` through all layers; ``memory (batch, m, d_model)``."""
        for layer in self.layers:
            x = layer(x, memory, src_mask, tgt_mask)
        x = self.norm(x)
        return x


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network, each in a residual connection (§3.1)."""

    def __init__(
        self,
        size: int,  # d_model
        self_attn: nn.Module,  # called with query, key, value and mask
        feed_forward: nn.Module,  # called with one tensor
        dropout: float,  # probability of dropping an element of a sub-layer's output
        *,
        norm: Norm = "post",  # as printed; "pre": see SublayerConnection
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout, norm=norm), 2)
        self.size, self.order = size, norm

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        """Apply both sub-layers to ``x (batch, m, size)``; same shape."""
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        x = self.sublayer[1](x, self.feed_forward)
        return x


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the memory, a feed-forward network (§3.1)."""

    def __init__(
        self,
        size: int,  # d_model
        self_attn: nn.Module,  # called with query, key, value and mask
        src_attn: nn.Module | None,  # likewise, with keys and values from the memory; None: without
        feed_forward: nn.Module,  # called with one tensor
        dropout: float,  # probability of dropping an element of a sub-layer's output
        *,
        norm: Norm = "post",  # as printed; "pre": see SublayerConnection
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout, norm=norm), 3 if src_attn else 2)
        self.size, self.order = size, norm

    def forward(self, x: Tensor, memory: Memory, src_mask: Mask, tgt_mask: Mask) -> Tensor:
        """Apply the sub-layers to ``x (batch, n, size)``; same shape."""
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        if (attend := self.src_attn) is not None:
            x = self.sublayer[1](x, lambda x: attend(x, memory, memory, src_mask))
        x = self.sublayer[-1](x, self.feed_forward)
        return x


class LayerNorm(nn.Module):
    """Layer normalization (Ba et al., 2016): mean 0 and variance 1 at each position, rescaled.

    Args:
        features: Width of what is normalized.
        eps: Added to the variance, so that a constant vector does not divide by zero.
    """

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x (..., features)`` over its last axis; same shape."""
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return self.weight * centred / (variance + self.eps).sqrt() + self.bias


class SublayerConnection(nn.Module):
    """A residual connection around a sub-layer, with dropout and layer normalization (§3.1, §5.4).

    Args:
        size: Width ``d_model``.
        dropout: Probability of dropping an element of the sub-layer's output.
        norm: ``"post"`` gives LayerNorm(x + Dropout(Sublayer(x))), as the paper prints it;
            ``"pre"`` gives x + Dropout(Sublayer(LayerNorm(x))), as its later code computes it.
    """

    def __init__(self, size: int, dropout: float, *, norm: Norm = "post") -> None:
        super().__init__()
        check_choice("norm", norm, Norm)
        self.norm = LayerNorm(size)
        self.dropout = nn.Dropout(dropout)
        self.order: Norm = norm

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``sublayer`` to ``x (batch, length, size)``, and add the result to ``x``."""
        if self.order == "pre":
            y: Tensor = x + self.dropout(sublayer(self.norm(x)))
        else:
            y = self.norm(x + self.dropout(sublayer(x)))
        return y
