"""Decoding with KV caches, one position of many sentences per step, on any device."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.fast.linear import (
    PlainLinear,
    float32_products,
    most_probable,
    suits_onednn,
)
from annotated_transformer.fast.model import FastModel, can_accelerate, normalize_rows
from annotated_transformer.fast.packing import VECTOR, PackedMask, Rows
from annotated_transformer.fast.quantized import (
    LINEARS,
    DecodingPrecision,
    bfloat16_is_fast,
    check_precision,
)
from annotated_transformer.fast.screen import WORTH, Screen, bytes_are_fast
from annotated_transformer.model.architecture import (
    DecoderLayer,
    EncoderDecoder,
    Generator,
    SublayerConnection,
)
from annotated_transformer.model.embeddings import Embeddings, PositionalEncoding
from annotated_transformer.model.feed_forward import PositionwiseFeedForward
from annotated_transformer.model.multi_head import MultiHeadedAttention
from annotated_transformer.translation.greedy import Steps, readable_steps

ROOM = 16  # positions by which a full cache grows
MANY = 512  # scores; so many are worth filling up for a faster softmax


def attend_once(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """Compute attention for a few queries of each sentence and head.

    Args:
        query: ``(pairs, beam, d_k)``, already divided by the square root of ``d_k``; a pair is
            one sentence and one head.
        keys: ``(pairs, m, d_k)``.
        values: ``(pairs, m, d_v)``.
        hidden: Broadcasts to ``(pairs, beam, m)``; minus infinity at masked keys, else zero. Each
            query needs at least one key that is not masked.

    Returns:
        The weighted values ``(pairs, beam, d_v)``.
    """
    keys, m = keys.transpose(1, 2), keys.size(1)
    scores = torch.bmm(query, keys) if hidden is None else torch.baddbmm(hidden, query, keys)
    if m < VECTOR and scores.is_cpu and scores.numel() >= MANY:
        scores = F.pad(scores, (0, VECTOR - m), value=-math.inf)
    return torch.bmm(scores.softmax(-1)[..., :m], values)


def fuse_linears(
    *linears: nn.Module, scale: float = 1.0, precision: DecodingPrecision = "float32"
) -> PlainLinear:
    """Fuse linear layers into one; the outputs of the first are multiplied by ``scale``."""
    layers = cast(tuple[nn.Linear, ...], linears)
    factors = [scale] + [1.0] * (len(layers) - 1)
    both = list(zip(layers, factors, strict=True))
    weight = torch.cat([part.weight.detach() * factor for part, factor in both])
    bias = torch.cat([part.bias.detach() * factor for part, factor in both])
    return LINEARS[precision](weight, bias)


class _LayerWeights:
    """The weights of a decoder layer, rearranged for decoding one position at a time."""

    def __init__(self, layer: DecoderLayer, precision: DecodingPrecision) -> None:
        fused = partial(fuse_linears, precision=precision)
        own = cast(MultiHeadedAttention, layer.self_attn)
        source = cast(MultiHeadedAttention, layer.src_attn)
        network = cast(PositionwiseFeedForward, layer.feed_forward)
        self.own, self.source = own, source
        self.sublayers = list(cast(Iterable[SublayerConnection], layer.sublayer))
        w_q, w_k, w_v, w_o = own.linears
        self.project, self.mix = fused(w_q, w_k, w_v, scale=own.d_k**-0.5), fused(w_o)
        w_q, w_k, w_v, w_o = source.linears
        self.ask, self.mix_source = fused(w_q, scale=source.d_k**-0.5), fused(w_o)
        self.remember = fused(w_k, w_v)
        self.widen, self.narrow = fused(network.w_1), fused(network.w_2)

    def pre_norm(self, i: int, x: Tensor) -> Tensor:
        """Normalise the input of sub-layer ``i`` if it is pre-norm."""
        return normalize_rows(c.norm, x) if (c := self.sublayers[i]).order == "pre" else x

    def post_norm(self, i: int, x: Tensor) -> Tensor:
        """Normalise the residual sum after sub-layer ``i`` if it is post-norm."""
        return x if (c := self.sublayers[i]).order == "pre" else normalize_rows(c.norm, x)


class _LayerCache:
    """The KV cache of one decoder layer, and its decoding step."""

    def __init__(self, weights: _LayerWeights, memory: Tensor, rows: Rows, beam: int) -> None:
        self.weights, self.beam, own, h = weights, beam, weights.own, weights.source.h
        own.attn = weights.source.attn = None  # those of an earlier call are not these
        # (sentences, m, h * (d_k + d_v)), 0 at padding
        both = rows.unpack(weights.remember(memory))
        sizes = [h * weights.source.d_k, h * weights.source.d_v]
        # each (sentences, h, m, d)
        k, v = (x.unflatten(2, (h, -1)).transpose(1, 2) for x in both.split(sizes, dim=-1))
        self.source_keys, self.source_values = k.contiguous(), v.contiguous()
        shape = (len(k), own.h, 0, beam)  # of the target: (sentences, h, positions, beam, d)
        self.keys, self.values = k.new_empty(*shape, own.d_k), v.new_empty(*shape, own.d_v)

    def step(self, x: Tensor, position: int, past: Tensor | None, source: Tensor | None) -> Tensor:
        """Run the layer on ``x (rows, d_model)`` at one position; same shape."""
        w = self.weights
        x = w.post_norm(0, w.mix.add(self.to_target(w.pre_norm(0, x), position, past), x))
        x = w.post_norm(1, w.mix_source.add(self.to_source(w.pre_norm(1, x), source), x))
        return w.post_norm(2, w.narrow.add(w.widen.relu(w.pre_norm(2, x)), x))

    def to_target(self, x: Tensor, position: int, hidden: Tensor | None) -> Tensor:
        """Attend to this and all earlier positions: ``(rows, h * d_v)``."""
        own, end = self.weights.own, position + 1
        sizes = [own.h * own.d_k, own.h * own.d_k, own.h * own.d_v]
        q, k, v = (self.heads(part, own.h) for part in self.weights.project(x).split(sizes, dim=1))
        if self.keys.size(2) < end:
            self.keys, self.values = _longer(self.keys), _longer(self.values)
        self.keys[:, :, position], self.values[:, :, position] = k, v
        kept = (self.keys[:, :, :end], self.values[:, :, :end])
        keys, values = (block.flatten(2, 3).flatten(0, 1) for block in kept)
        return self.rows(attend_once(q.flatten(0, 1), keys, values, hidden), own.h)

    def to_source(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        """Attend to the source: ``(rows, h * d_v)``."""
        h = self.weights.source.h
        q = self.heads(self.weights.ask(x), h).flatten(0, 1)
        keys, values = self.source_keys.flatten(0, 1), self.source_values.flatten(0, 1)
        return self.rows(attend_once(q, keys, values, hidden), h)

    def heads(self, x: Tensor, h: int) -> Tensor:
        """Reshape ``(rows, h * d)`` to ``(sentences, h, beam, d)``."""
        return x.view(-1, self.beam, h, x.size(1) // h).transpose(1, 2)

    def rows(self, x: Tensor, h: int) -> Tensor:
        """Reshape ``(sentences * h, beam, d)`` to ``(rows, h * d)``."""
        return x.view(-1, h, self.beam, x.size(2)).transpose(1, 2).reshape(-1, h * x.size(2))

    def select(self, sentences: Tensor, length: int) -> None:
        """Keep only the given sentences and the first ``length`` positions."""
        self.source_keys = self.source_keys.index_select(0, sentences)
        self.source_values = self.source_values.index_select(0, sentences)
        self.keys = _longer(self.keys[:, :, :length].index_select(0, sentences))
        self.values = _longer(self.values[:, :, :length].index_select(0, sentences))


def _longer(block: Tensor) -> Tensor:
    """Copy ``block (sentences, h, positions, beam, d)`` into one with room for more positions."""
    sentences, h, length, beam, d = block.shape
    new = block.new_empty(sentences, h, length + ROOM, beam, d)
    new[:, :, :length] = block
    return new


class DecoderWeights:
    """The decoder's weights of a model that ``can_accelerate`` accepts, for steps of a few rows."""

    def __init__(self, model: EncoderDecoder, precision: DecodingPrecision = "float32") -> None:
        self.versions, self.precision = _versions(model), precision
        layers = cast(Iterable[DecoderLayer], cast(Any, model.decoder).layers)
        self.layers = [_LayerWeights(layer, precision) for layer in layers]
        self.norm = cast(nn.Module, model.decoder.norm)
        self.proj = cast(Generator, model.generator).proj
        words, places = cast(nn.Sequential, model.tgt_embed)
        self.embed, self.positions = cast(Embeddings, words), cast(PositionalEncoding, places).pe[0]

    @cached_property
    def generator(self) -> PlainLinear:
        """The projection to logits."""
        return LINEARS[self.precision](self.proj.weight, self.proj.bias)

    @cached_property
    def screen(self) -> Screen:
        """The int8 search for the most probable token."""
        return Screen(self.proj.weight, self.proj.bias)

    def most_probable(self, x: Tensor) -> Tensor:
        """Return the most probable tokens ``(rows,)`` after ``x (rows, d_model)``."""
        large = suits_onednn(self.proj.weight) and self.proj.weight.numel() >= WORTH
        exact = self.precision == "float32" and large and bytes_are_fast()
        found = self.screen(x) if exact else None
        return most_probable(self.generator(x)) if found is None else found


def _versions(model: EncoderDecoder) -> list[tuple[int, int]] | None:
    """Return the address and PyTorch's version counter of each parameter.

    None if there are parameters made in inference mode, which have no version counter.
    """
    parameters = list(model.parameters())
    if any(p.is_inference() for p in parameters):
        return None
    return [(p.data_ptr(), p._version) for p in parameters]


class CachedSteps(Steps):
    """Decoding steps with KV caches, equal to those of the readable layer.

    Args:
        decoder: Rearranged weights.
        memory: The encoder's output, packed ``(rows, d_model)``.
        src_mask: Boolean ``(sentences, 1, m)``, true at real tokens.
        beam: Hypotheses per sentence.
    """

    @torch.inference_mode()
    def __init__(
        self, decoder: DecoderWeights, memory: Tensor, src_mask: Tensor, beam: int = 1
    ) -> None:
        self.decoder, self.beam, self.length = decoder, beam, 0
        rows = Rows(src_mask[:, 0])
        self.layers = [_LayerCache(w, memory, rows, beam) for w in decoder.layers]
        self.hidden = None if bool(src_mask.all()) else self._hide(src_mask, memory.dtype)
        self.places = torch.zeros(  # cache slot of each hypothesis, by position
            len(src_mask), beam, 0, dtype=torch.long, device=src_mask.device
        )

    def _hide(self, seen: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an additive mask, minus infinity where not ``seen``: ``(sentences * h, ...)``.

        A sentence without tokens is not masked: its values are zeros, and so is their mean.
        """
        unseen = ~seen & seen.any(-1, keepdim=True)
        hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        hidden.masked_fill_(unseen, -math.inf)
        return hidden.repeat_interleave(self.decoder.layers[0].own.h, 0)

    def _past(self, dtype: torch.dtype) -> Tensor | None:
        """Mask the keys of other hypotheses: ``(sentences * h, beam, positions * beam)``."""
        if self.beam == 1:
            return None
        own = torch.arange(self.beam, device=self.places.device)
        here = own.view(1, -1, 1).expand(len(self.places), -1, -1)  # now each has its own slot
        self.places = torch.cat([self.places, here], dim=2)
        return self._hide((self.places.unsqueeze(3) == own).flatten(2), dtype)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Decode one position: tokens ``(rows,)`` to logits ``(rows, vocab)``."""
        with float32_products():
            return self.decoder.generator(self._decode(tokens))

    @torch.inference_mode()
    def most_probable(self, tokens: Tensor) -> Tensor:
        """Decode one position: tokens ``(rows,)`` to the most probable next ones ``(rows,)``."""
        with float32_products():
            return self.decoder.most_probable(self._decode(tokens))

    def _decode(self, tokens: Tensor) -> Tensor:
        """Decode tokens ``(rows,)``: ``(rows, d_model)``."""
        x = self.decoder.embed(tokens) + self.decoder.positions[self.length]
        x = x.to(self.layers[0].keys.dtype)
        past = self._past(x.dtype)
        for layer in self.layers:
            x = layer.step(x, self.length, past, self.hidden)
        self.length += 1
        return normalize_rows(self.decoder.norm, x)

    @torch.inference_mode()
    def select(self, sentences: Tensor) -> None:
        """Keep the given sentences, in that order."""
        if self.hidden is not None:
            h = self.decoder.layers[0].own.h
            self.hidden = self.hidden.unflatten(0, (-1, h))[sentences].flatten(0, 1)
        self.places = self.places[sentences]
        for layer in self.layers:
            layer.select(sentences, self.length)

    @torch.inference_mode()
    def follow(self, parents: Tensor) -> None:
        """Continue the hypotheses ``parents (sentences, beam)`` without moving keys or values."""
        self.places = self.places.take_along_dim(parents.unsqueeze(2), 1)


_Kept: TypeAlias = tuple[DecodingPrecision, DecoderWeights | None]
_kept: WeakKeyDictionary[EncoderDecoder, _Kept] = WeakKeyDictionary()


@contextmanager
def keep_decoder_weights(
    model: EncoderDecoder, precision: DecodingPrecision = "float32"
) -> Iterator[None]:
    """Reuse rearranged weights between calls while the parameters are unchanged.

    Args:
        model: Whose weights; of an ensemble, those of its members.
        precision: Precision of decoding within this context. Below float32, the encoder
            computes in bfloat16 where that is faster. The readable layer ignores it.

    Raises:
        ValueError: The model's device cannot decode in this precision.
    """
    check_precision(precision, next(model.parameters()).device.type)
    models = [module for module in model.modules() if isinstance(module, EncoderDecoder)]
    before = {each: _kept[each] for each in models if each in _kept}
    _kept.update(dict.fromkeys(models, (precision, None)))
    try:
        yield
    finally:
        for each in models:
            _kept.pop(each, None)  # at interpreter exit it may already be gone
        _kept.update(before)


def _decoder_weights(model: EncoderDecoder) -> DecoderWeights:
    """Return the rearranged weights, the cached ones if the parameters have not changed."""
    precision, decoder = _kept.get(model, ("float32", None))
    versions = _versions(model)
    if decoder is None or versions is None or decoder.versions != versions:
        decoder = DecoderWeights(model, precision)
        if model in _kept:
            _kept[model] = precision, decoder
    return decoder


def _have_one_h(decoder: nn.Module) -> bool:
    """Whether there are attentions, all with as many heads: masks are made once for all."""
    own = cast(Iterable[Any], decoder.layers)
    return len({attn.h for layer in own for attn in (layer.self_attn, layer.src_attn)}) == 1


@torch.no_grad()
def start_steps(model: EncoderDecoder, src: Tensor, src_mask: Tensor, beam: int = 1) -> Steps:
    """Encode sentences without their padding, and return the steps that decode them.

    Args:
        model: In evaluation mode. A model in training mode, where dropout is active, or one that
            cannot be accelerated is decoded by the readable layer.
        src: Source tokens ``(sentences, m)``.
        src_mask: Broadcasts to ``(sentences, 1, m)``, true (or nonzero) at real tokens.
        beam: Hypotheses per sentence.
    """
    mask = (src_mask != 0).expand(src.size(0), 1, -1)
    training = any(module.training for module in model.modules())
    if training or not can_accelerate(model) or not _have_one_h(model.decoder):
        return readable_steps(model, src, mask, beam)
    rows, decoder, device = Rows(mask[:, 0]), _decoder_weights(model), src.device.type
    half = decoder.precision != "float32" and (device != "cpu" or bfloat16_is_fast())
    with torch.autocast(device, torch.bfloat16, enabled=half):
        memory = FastModel(model).encode(src, PackedMask(mask, rows, rows))
    return CachedSteps(decoder, memory.float() if half else memory, mask, beam)
