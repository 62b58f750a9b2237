"""The Transformer on packed rows: which models it supports, and its forward pass."""

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.fast.attention import attend_rows, fused_linear
from annotated_transformer.fast.dropout import cheap_dropout, dropped_relu
from annotated_transformer.fast.packing import PackedMask, Rows
from annotated_transformer.model import multi_head
from annotated_transformer.model.architecture import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderDecoder,
    EncoderLayer,
    Generator,
    LayerNorm,
    SublayerConnection,
)
from annotated_transformer.model.attention import attention
from annotated_transformer.model.embeddings import Embeddings, LearnedPositions, PositionalEncoding
from annotated_transformer.model.feed_forward import PositionwiseFeedForward
from annotated_transformer.model.multi_head import MultiHeadedAttention, split_heads

KNOWN = {
    *(EncoderDecoder, Encoder, Decoder, EncoderLayer, DecoderLayer, SublayerConnection, LayerNorm),
    *(MultiHeadedAttention, PositionwiseFeedForward, Generator),
    *(Embeddings, PositionalEncoding, LearnedPositions),
    *(nn.Linear, nn.Dropout, nn.Embedding, nn.Identity, nn.ModuleList, nn.Sequential),
}
OWN = {"forward", "encode", "decode"}
METHODS = {(kind, name): vars(kind)[name] for kind in KNOWN for name in OWN & vars(kind).keys()}


def can_accelerate(model: nn.Module) -> bool:
    """Whether the fast layer computes what the model's own modules would.

    It does not if a module is of another class, has hooks or its own ``forward`` (as after
    ``torch.compile``), lacks its bias or has unusual options, or if a method of a class,
    ``attention`` or ``split_heads`` was replaced.
    """
    return isinstance(model, EncoderDecoder) and is_untouched(model) and _is_standard(model)


def is_untouched(part: nn.Module) -> bool:
    """Whether all modules in ``part`` are of known classes and behave as these define."""
    if any(vars(_GLOBAL)[name] for name in GLOBAL_HOOKS):
        return False
    if any(vars(multi_head)[own.__name__] is not own for own in (attention, split_heads)):
        return False
    if any(vars(kind)[name] is not method for (kind, name), method in METHODS.items()):
        return False
    waiting = [part]  # a walk of its own takes a tenth of the time of modules()
    for module in waiting:
        own = vars(module)
        changed = not OWN.isdisjoint(own) or own.get("_compiled_call_impl") is not None
        hooked = own["_forward_hooks"] or own["_forward_pre_hooks"]
        hooked = hooked or own["_backward_hooks"] or own["_backward_pre_hooks"]
        if type(module) not in KNOWN or changed or hooked or not _has_usual_parts(module):
            return False
        waiting.extend(each for each in own["_modules"].values() if each is not None)
    return True


_GLOBAL = torch.nn.modules.module
WHEN = "forward forward_pre backward backward_pre".split()
GLOBAL_HOOKS = [f"_global_{when}_hooks" for when in WHEN]
ROLES = ("self_attn", "src_attn", "feed_forward")  # None in a layer without one
PARTS: dict[str, tuple[type[nn.Module], ...]] = {  # by their names in the readable layer
    **dict.fromkeys(("self_attn", "src_attn"), (MultiHeadedAttention,)),
    **{"feed_forward": (PositionwiseFeedForward,), "linears": (nn.ModuleList,)},
    **dict.fromkeys(("w_1", "w_2", "proj"), (nn.Linear,)),
    **{"lut": (nn.Embedding,), "dropout": (nn.Dropout,), "norm": (LayerNorm, nn.Identity)},
}


def _has_usual_parts(module: nn.Module) -> bool:
    """Whether a known module is made of what the fast layer computes, with the usual options."""
    if any(type(part) not in PARTS.get(name, KNOWN) for name, part in module._modules.items()):
        return False
    if type(module) is MultiHeadedAttention:
        return [type(part) for part in module.linears] == [nn.Linear] * 4
    if type(module) is nn.Linear:
        return module.bias is not None
    if type(module) is nn.Embedding:
        plain = module.padding_idx is None and module.max_norm is None
        return plain and not module.scale_grad_by_freq and not module.sparse
    return True


def _is_standard(model: EncoderDecoder) -> bool:
    """Whether the modules are assembled as in ``build_model``."""
    embeds = (model.src_embed, model.tgt_embed)
    if not all(isinstance(x, nn.Sequential) and len(x) == 2 for x in embeds):
        return False
    pairs: list[tuple[Any, Any]] = [(model.encoder, Encoder), (model.decoder, Decoder)]
    for words, places in cast(Iterable[Iterable[nn.Module]], embeds):
        pairs += [(words, Embeddings), (places, PositionalEncoding)]
    for stack, kind in ((model.encoder, EncoderLayer), (model.decoder, DecoderLayer)):
        for layer in cast(Iterable[nn.Module], getattr(stack, "layers", ())):
            own = {**vars(layer), **layer._modules}  # as hasattr, in a tenth of the time
            pairs += [(layer, kind), *((own[name], PARTS[name]) for name in ROLES if name in own)]
    pairs.append((model.generator, Generator))
    return all(isinstance(part, kind) for part, kind in pairs)  # None is not standard


def normalize_rows(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a ``LayerNorm`` in one kernel; a post-norm stack ends with an ``nn.Identity``."""
    if isinstance(norm, LayerNorm):
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)
    return x


def apply_sublayer(
    connection: nn.Module, x: Tensor, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply a ``SublayerConnection``."""
    c = cast(SublayerConnection, connection)
    if c.order == "pre":
        return x + cheap_dropout(c.dropout, sublayer(normalize_rows(c.norm, x)))
    return normalize_rows(c.norm, x + cheap_dropout(c.dropout, sublayer(x)))


def feed_forward(network: nn.Module, x: Tensor) -> Tensor:
    """Apply a ``PositionwiseFeedForward`` with an in-place ReLU, which saves memory."""
    n = cast(PositionwiseFeedForward, network)
    return fused_linear(dropped_relu(n.dropout, fused_linear(x, n.w_1)), n.w_2)


def embed_rows(stack: nn.Module, tokens: Tensor, rows: Rows) -> Tensor:
    """Embed the real tokens of ``tokens (batch, length)``: ``(rows, d_model)``.

    Raises:
        IndexError: The sequences are longer than the positional table.
    """
    table, encoding = cast(nn.Sequential, stack)
    words, places = cast(Embeddings, table), cast(PositionalEncoding, encoding)
    if (length := tokens.size(1)) > places.max_len:
        raise IndexError(f"a sequence of {length} tokens, and only {places.max_len} positions")
    x = F.embedding(tokens.flatten()[rows.index], words.lut.weight) * math.sqrt(words.d_model)
    return cheap_dropout(places.dropout, x + places.pe[0, rows.positions].to(x.dtype))


class FastLayer(nn.Module):
    """An encoder or decoder layer on packed rows that shares the readable layer's sub-modules."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        own = cast(DecoderLayer, layer)
        self.self_attn = cast(MultiHeadedAttention, own.self_attn)
        self.src_attn = cast(MultiHeadedAttention, getattr(own, "src_attn", None))
        self.feed_forward, self.sublayer = own.feed_forward, own.sublayer

    def forward(self, x: Tensor, mask: PackedMask, *source: Any) -> Tensor:
        """Apply the layer to ``x (rows, d_model)``; same shape. A decoder has memory and mask."""
        x = apply_sublayer(self.sublayer[0], x, lambda x: attend_rows(self.self_attn, x, x, mask))
        if source:
            x = apply_sublayer(
                self.sublayer[1], x, lambda x: attend_rows(self.src_attn, x, *source)
            )
        return apply_sublayer(self.sublayer[-1], x, lambda x: feed_forward(self.feed_forward, x))


class FastStack(nn.Module):
    """A stack of fast layers and its final norm."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        own = cast(Encoder, stack)
        self.layers = nn.ModuleList(FastLayer(layer) for layer in own.layers)
        self.norm = own.norm

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        """Pass ``x (rows, d_model)`` through all layers; same shape."""
        for layer in self.layers:
            x = layer(x, *others)
        return normalize_rows(self.norm, x)


def parts_of(model: EncoderDecoder) -> tuple[nn.Module | None, ...]:
    """Return what a :class:`FastModel` takes from a model; another part would make it stale."""
    stacks = cast(tuple[Encoder, Decoder], (model.encoder, model.decoder))
    layers = (layer for stack in stacks for layer in stack.layers)
    parts = (part for layer in layers for part in layer._modules.values())
    return (model.src_embed, model.tgt_embed, *(stack.norm for stack in stacks), *parts)


class FastModel(nn.Module):
    """A model that :func:`can_accelerate` accepts, computed on packed rows.

    It shares the model's parameters and their names in the state dict.
    """

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.src_embed, self.tgt_embed = model.src_embed, model.tgt_embed
        self.encoder = FastStack(model.encoder)
        self.decoder = FastStack(model.decoder)
        self.generator = model.generator
        self._parts = parts_of(model)  # in a tuple, so that they are not registered twice

    def computes(self, model: EncoderDecoder) -> bool:
        """Whether it still computes what the model does, whose parts may have been replaced."""
        return can_accelerate(model) and parts_of(model) == self._parts

    def encode(self, src: Tensor, mask: PackedMask) -> Tensor:
        """Encode the rows of ``src (batch, m)`` that the mask selects: ``(rows, d_model)``."""
        memory: Tensor = self.encoder(embed_rows(self.src_embed, src, mask.queries), mask)
        return memory

    def forward(
        self, src: Tensor, tgt: Tensor, src_keep: Tensor, tgt_keep: Tensor, *index: Tensor
    ) -> Tensor:
        """Encode and decode, computing only the positions to keep.

        Args:
            src: Tokens ``(batch, m)``.
            tgt: Tokens ``(batch, n)``.
            src_keep: Boolean ``(batch, m)``, true at the source tokens to keep.
            tgt_keep: Boolean ``(batch, n)``, the same for the target.
            index: What the ``Rows`` of both would look for, if known.

        Returns:
            ``(rows, d_model)``, in the order of ``tgt[tgt_keep]``.
        """
        source, target = Rows(src_keep, *index[:1]), Rows(tgt_keep, *index[1:])
        see_source = src_keep.unsqueeze(1)  # (batch, 1, m)
        see_past = multi_head.subsequent_mask(tgt.size(1), tgt.device) & tgt_keep.unsqueeze(1)
        memory = self.encode(src, PackedMask(see_source, source, source))
        x = embed_rows(self.tgt_embed, tgt, target)
        cross = PackedMask(see_source, target, source)
        y: Tensor = self.decoder(x, PackedMask(see_past, target, target), memory, cross)
        return y
