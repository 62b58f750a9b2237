# Written from book/translation/steps.md: edit the chapter instead.
"""One decoding step for many sentences, readable and fast (section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from timeit import repeat
from typing import Literal, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.background.seq2seq import Steps, Translator, rows_of, rows_of_parents
from annotated_transformer.model.embeddings import (
    Embeddings,
    LearnedPositions,
    PositionalEncoding,
)
from annotated_transformer.model.layers import (
    Dropout,
    PositionwiseFeedForward,
    SublayerConnection,
)
from annotated_transformer.model.multi_head import Linear, MultiHeadedAttention, PackedMask, Rows
from annotated_transformer.model.transformer import (
    Decoder,
    DecoderLayer,
    EncoderDecoder,
    Generator,
)


class CachedSteps:
    """Steps by the model's own modules and caches: any Transformer, any device.

    Args:
        model: In evaluation mode.
        memory: The encoder's output ``(sentences, m, d_model)``.
        src_mask: Boolean ``(sentences, 1, m)``, true at real tokens.
        capacity: Most target positions.
        beam: Hypotheses of each sentence.
    """

    def __init__(
        self, model: EncoderDecoder, memory: Tensor, src_mask: Tensor, capacity: int, beam: int = 1
    ) -> None:
        self.model, self.beam, self.cache = model, beam, model.cache(capacity)
        self.memory = memory.repeat_interleave(beam, 0)  # (rows, m, d_model)
        self.src_mask = src_mask.repeat_interleave(beam, 0)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Decode one position: tokens ``(rows,)`` to logits ``(rows, vocab)``."""
        x = self.model.decode(self.memory, self.src_mask, tokens.unsqueeze(1), None, self.cache)
        logits: Tensor = self.model.generator.proj(x[:, -1])
        return logits

    def select(self, sentences: Tensor) -> None:
        """Keep the given sentences, in that order."""
        rows = rows_of(sentences, self.beam)
        self.memory, self.src_mask = self.memory[rows], self.src_mask[rows]
        self.cache.select(rows)

    def follow(self, parents: Tensor) -> None:
        """Go on from the hypotheses ``parents (sentences, beam)``; their source is the same."""
        rows = rows_of_parents(parents)
        for layer in self.cache.layers:
            layer.target.select(rows)


class PackedLinear:
    """``x W^T + b`` in one call to oneDNN, with the matrix rearranged once.

    Args:
        weight: ``(outputs, inputs)``, float32 on a CPU.
        bias: ``(outputs,)``.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW)
        self.bias = bias.detach()

    def __call__(self, x: Tensor, then: Literal["none", "relu"] = "none") -> Tensor:
        """Multiply ``x (rows, inputs)``, then apply ReLU if wanted: ``(rows, outputs)``."""
        multiply = torch.ops.mkldnn._linear_pointwise.default
        y: Tensor = multiply(x, self.weight, self.bias, then, [], "")
        return y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Multiply, and add a residual ``(rows, outputs)``."""
        multiply = torch.ops.mkldnn._linear_pointwise.binary
        y: Tensor = multiply(x, residual, self.weight, self.bias, "add")
        return y


FEW = 32  # rows to be expected; any number works


def attend_once(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None = None
) -> Tensor:
    """Attention of few queries, for each sentence and head.

    Args:
        query: ``(pairs, beam, d_k)``, divided by the square root of ``d_k``; a pair is a
            sentence and a head.
        keys: ``(pairs, m, d_k)``.
        values: ``(pairs, m, d_v)``.
        hidden: Broadcasts to ``(pairs, beam, m)``: minus infinity at what must not be seen,
            else zero; something must be seen.

    Returns:
        The weighted values ``(pairs, beam, d_v)``.
    """
    keys = keys.transpose(1, 2)
    scores = torch.bmm(query, keys) if hidden is None else torch.baddbmm(hidden, query, keys)
    return torch.bmm(scores.softmax(-1), values)


CHUNK = 64


def most_probable(logits: Tensor) -> Tensor:
    """Return ``logits.argmax(-1)`` of ``logits (rows, vocab)``, found in chunks: ``(rows,)``."""
    size = logits.size(1)
    chunks = size // CHUNK
    if logits.device.type != "cpu" or chunks < 4:
        return logits.argmax(-1)
    tops = logits[:, : chunks * CHUNK].unflatten(1, (chunks, CHUNK)).amax(-1)  # (rows, chunks)
    start: Tensor = tops.argmax(-1, keepdim=True) * CHUNK
    found = start + logits.gather(1, start + torch.arange(CHUNK)).argmax(-1, keepdim=True)
    if chunks * CHUNK < size:  # what the last chunk leaves
        rest, place = logits[:, chunks * CHUNK :].max(-1, keepdim=True)
        found = torch.where(rest > logits.gather(1, found), place + chunks * CHUNK, found)
    return found.squeeze(1)


class Screen:
    """The most probable token, with exact logits of those tokens only that it could be.

    A product of 8-bit integers, whose error has a bound, rules the others out. The result is that
    of the product in float32, up to float32's own rounding.

    Args:
        weight: ``(vocab, d_model)``, float32 on a CPU.
        bias: ``(vocab,)``; minus infinity forbids a token.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight.detach(), bias.detach()
        missing = -len(weight) % CHUNK  # whole chunks, filled with tokens that cannot be
        self.floor = F.pad(self.bias, (0, missing), value=-math.inf)
        whole = torch.zeros(len(self.floor), weight.size(1), dtype=torch.int8)
        self.scales, lost = torch.ones(len(self.floor)), torch.empty(len(weight))
        for start in range(0, len(weight), 512):  # so many rows stay in the cache
            part = slice(start, min(start + 512, len(weight)))
            scale = byte_scale(self.weight[part], 1)
            self.scales[part] = scale.squeeze(1)
            whole[part], lost[part] = to_bytes(self.weight[part], scale)
        self.bytes = torch.ops.onednn.qlinear_prepack(whole, [FEW, weight.size(1)])
        self.zeros = torch.zeros_like(self.scales, dtype=torch.long)
        self.lost = float(lost.max())
        self.size = float(self.weight.norm(dim=1).max()) + self.lost

    def rough(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply ``x (rows, d_model)`` in bytes.

        Returns:
            Logits ``(rows, CHUNK, chunks)``, and how far they are off at most ``(rows,)``.
        """
        scale = byte_scale(x)
        whole, lost = to_bytes(x, scale)
        if len(x) == 1:
            whole = whole.expand(2, -1)  # oneDNN 3.12 multiplies one row of 256 in a slow loop
        y: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            *(whole, float(scale), 0),
            *(self.bytes, self.scales, self.zeros, self.floor),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        sums = x.size(1) * 2.0**-22  # of what float32 itself rounds
        error = x.norm(dim=1) * (self.lost + sums * self.size) + lost * self.size
        return y[: len(x)].view(len(x), CHUNK, -1), error

    def exact(self, x: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """Compute logits of some tokens after some rows of ``x``: ``(n,)``."""
        products = self.weight.index_select(0, tokens).mul_(x.index_select(0, rows)).sum(1)
        return products.add_(self.bias.index_select(0, tokens))

    def left(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Say which tokens are not ruled out after ``x (rows, d_model)``.

        Returns:
            The row and the number of each token, ``(n,)`` and ``(n,)``; or None where there are
            too many, or numbers are not finite.
        """
        (rough, error), every = self.rough(x), torch.arange(len(x))
        tops = rough.amax(1)  # (rows, chunks)
        best = tops.argmax(1)
        good = rough[every, :, best].argmax(1) * tops.size(1) + best  # not always the best one
        least = self.exact(x, every, good.clamp_(max=len(self.bias) - 1)) - error
        rows, chunks = (tops >= least.unsqueeze(1)).nonzero().unbind(1)
        if len(chunks) > MOST * len(x) or not math.isfinite(least.sum()):
            return None
        near = rough[rows, :, chunks] >= least[rows].unsqueeze(1)  # (n, CHUNK)
        which, places = near.nonzero().unbind(1)
        return rows[which], places * tops.size(1) + chunks[which]

    def __call__(self, x: Tensor) -> Tensor | None:
        """Find the best token for each of ``x (rows, d_model)``: ``(rows,)``.

        Returns:
            None where the whole product has to be computed.
        """
        if (left := self.left(x)) is None:
            return None
        return first_largest(self.exact(x, *left), *left)


MOST = 16  # chunks for each sentence; with more, the whole product is as fast


def byte_scale(x: Tensor, dim: int | None = None) -> Tensor:
    """Return what 1 stands for, so that 127 stands for the largest of ``x`` (along ``dim``)."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return largest.div_(127).clamp_min_(torch.finfo(x.dtype).tiny)


def to_bytes(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Round to integers, times a scale.

    Args:
        x: ``(rows, d)``.
        scale: ``(rows, 1)``, or one for all.

    Returns:
        The integers ``(rows, d)``, in a byte each, and the norms of what they lose ``(rows,)``.
    """
    whole = (x / scale).round_()
    return whole.to(torch.int8), (x - whole * scale).norm(dim=1)


def first_largest(values: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Return, for each row, the token of the largest value, and of several the first.

    Args:
        values: ``(n,)``, a few for each row.
        rows: ``(n,)``, from 0 to the last row, each at least once.
        tokens: ``(n,)``.
    """
    count, last = int(rows.max()) + 1, torch.iinfo(tokens.dtype).max
    best = values.new_full((count,), -math.inf).scatter_reduce_(0, rows, values, "amax")
    tied = tokens.where(values == best[rows], last)
    return tokens.new_full((count,), last).scatter_reduce_(0, rows, tied, "amin")


@cache
def multiplies_bytes() -> bool:
    """Whether oneDNN multiplies bytes on this processor, and sums do not overflow."""
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    try:
        rough, _ = Screen(torch.ones(CHUNK, 512), torch.zeros(CHUNK)).rough(torch.ones(FEW, 512))
    except RuntimeError:
        return False
    return bool(((rough - 512).abs() < 0.01).all())


@contextmanager
def _float32() -> Iterator[None]:
    """Let products be float32's own, whatever the setting."""
    setting = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(setting)


@cache
def bytes_are_fast() -> bool:
    """Whether a product in bytes takes at most two thirds of the time here; measured once."""
    if not multiplies_bytes():
        return False
    x, weight, bias = torch.ones(FEW, 512), torch.ones(4096, 512), torch.zeros(4096)
    with _float32(), torch.inference_mode():
        whole, screen = PackedLinear(weight, bias), Screen(weight, bias)
        slow, fast = (
            min(repeat(product, number=1, repeat=7))
            for product in (lambda: whole(x), lambda: screen.rough(x))
        )
    return fast <= slow * 2 / 3


def _scaled(attention: MultiHeadedAttention, parameter: Tensor) -> Tensor:
    """Divide the part of the input projection that makes queries by the square root of d_k."""
    q, *others = parameter.detach().split(attention.sizes)
    return torch.cat([q * attention.d_k**-0.5, *others])


class _PackedLayer:
    """The weights of a decoder layer, as single positions want them."""

    def __init__(self, layer: DecoderLayer) -> None:
        own, source, network = layer.self_attn, layer.src_attn, layer.feed_forward
        self.h, self.d_k, self.d_v = own.h, own.d_k, own.d_v
        self.sizes, queries = own.sizes, source.sizes[0]
        self.pre = layer.norm == "pre"
        self.norms = [c.norm for c in cast(Iterable[SublayerConnection], layer.sublayer)]
        weight, bias = (_scaled(own, p) for p in (own.in_proj.weight, own.in_proj.bias))
        self.project = PackedLinear(weight, bias)
        self.mix = PackedLinear(own.out_proj.weight, own.out_proj.bias)
        weight, bias = (_scaled(source, p) for p in (source.in_proj.weight, source.in_proj.bias))
        self.ask = PackedLinear(weight[:queries], bias[:queries])
        self.keep = PackedLinear(weight[queries:], bias[queries:])
        self.mix_source = PackedLinear(source.out_proj.weight, source.out_proj.bias)
        self.widen = PackedLinear(network.w_1.weight, network.w_1.bias)
        self.narrow = PackedLinear(network.w_2.weight, network.w_2.bias)

    def before(self, i: int, x: Tensor) -> Tensor:
        """Normalise the input of the sub-layer ``i``, with norms before the sub-layers."""
        return self.normalise(i, x) if self.pre else x

    def after(self, i: int, x: Tensor) -> Tensor:
        """Normalise the sum after the sub-layer ``i``, with norms after the sub-layers."""
        return x if self.pre else self.normalise(i, x)

    def normalise(self, i: int, x: Tensor) -> Tensor:
        """Apply the norm of the sub-layer ``i``."""
        n = self.norms[i]
        return torch.layer_norm(x, n.normalized_shape, n.weight, n.bias, n.eps)


class _KeptLayer:
    """Keys and values of one layer, and its step."""

    def __init__(self, weights: _PackedLayer, memory: Tensor, rows: Rows, beam: int) -> None:
        self.weights, self.beam, h, sizes = weights, beam, weights.h, weights.sizes
        k, v = rows.unpack(weights.keep(memory)).split(sizes[1:], dim=-1)  # (sentences, m, h * d)
        k, v = (x.unflatten(2, (h, -1)).transpose(1, 2).contiguous() for x in (k, v))
        self.source_keys, self.source_values = k, v  # (sentences, h, m, d)
        shape = (len(k), h, 0, beam)  # of the target, with room for more positions
        self.keys, self.values = k.new_empty(*shape, weights.d_k), v.new_empty(*shape, weights.d_v)

    def step(self, x: Tensor, position: int, past: Tensor | None, source: Tensor | None) -> Tensor:
        """Decode ``x (rows, d_model)`` at a position; same shape."""
        w = self.weights
        x = w.after(0, w.mix.add(self.to_target(w.before(0, x), position, past), x))
        x = w.after(1, w.mix_source.add(self.to_source(w.before(1, x), source), x))
        return w.after(2, w.narrow.add(w.widen(w.before(2, x), "relu"), x))

    def to_target(self, x: Tensor, position: int, hidden: Tensor | None) -> Tensor:
        """Attend to this position and those before it: ``(rows, h * d_v)``."""
        w, end = self.weights, position + 1
        q, k, v = (self.heads(part) for part in w.project(x).split(w.sizes, dim=1))
        if self.keys.size(2) < end:
            self.keys, self.values = _longer(self.keys), _longer(self.values)
        self.keys[:, :, position], self.values[:, :, position] = k, v
        keys, values = (
            block[:, :, :end].flatten(2, 3).flatten(0, 1) for block in (self.keys, self.values)
        )
        return self.rows(attend_once(q.flatten(0, 1), keys, values, hidden))

    def to_source(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        """Attend to the source: ``(rows, h * d_v)``."""
        q = self.heads(self.weights.ask(x)).flatten(0, 1)
        keys, values = self.source_keys.flatten(0, 1), self.source_values.flatten(0, 1)
        return self.rows(attend_once(q, keys, values, hidden))

    def heads(self, x: Tensor) -> Tensor:
        """Turn ``(rows, h * d)`` into ``(sentences, h, beam, d)``."""
        h = self.weights.h
        return x.view(-1, self.beam, h, x.size(1) // h).transpose(1, 2)

    def rows(self, x: Tensor) -> Tensor:
        """Turn ``(sentences * h, beam, d)`` into ``(rows, h * d)``."""
        h, beam = self.weights.h, self.beam
        return x.view(-1, h, beam, x.size(2)).transpose(1, 2).reshape(-1, h * x.size(2))

    def select(self, sentences: Tensor, length: int) -> None:
        """Keep the given sentences; ``length`` positions are in use."""
        self.source_keys = self.source_keys.index_select(0, sentences)
        self.source_values = self.source_values.index_select(0, sentences)
        self.keys = _longer(self.keys[:, :, :length].index_select(0, sentences))
        self.values = _longer(self.values[:, :, :length].index_select(0, sentences))


ROOM = 16  # positions


def _longer(block: Tensor) -> Tensor:
    """Copy ``block (sentences, h, positions, beam, d)`` into one with room for more positions."""
    sentences, h, length, beam, d = block.shape
    new = block.new_empty(sentences, h, length + ROOM, beam, d)
    new[:, :, :length] = block
    return new


class PackedDecoder:
    """The weights of a model's decoder, rearranged for steps of few rows.

    Args:
        model: One for which :func:`can_pack` holds.
    """

    def __init__(self, model: EncoderDecoder) -> None:
        self.versions = _versions(model)
        layers = cast(Iterable[DecoderLayer], model.decoder.layers)
        self.layers = [_PackedLayer(layer) for layer in layers]
        self.norm = model.decoder.norm
        self.proj = model.generator.proj
        encoding = model.tgt_embed[1]
        assert isinstance(encoding, PositionalEncoding)
        self.embed, self.positions = model.tgt_embed[0], encoding.pe[0]  # (max_len, d_model)

    @cached_property
    def generator(self) -> PackedLinear:
        """What makes logits."""
        return PackedLinear(self.proj.weight, self.proj.bias)

    @cached_property
    def screen(self) -> Screen:
        """What finds the most probable token."""
        return Screen(self.proj.weight, self.proj.bias)

    def most_probable(self, x: Tensor) -> Tensor:
        """Return the most probable tokens ``(rows,)`` after ``x (rows, d_model)``."""
        pays = self.proj.weight.numel() >= WORTH and bytes_are_fast()
        found = self.screen(x) if pays else None
        return most_probable(self.generator(x)) if found is None else found


WORTH = 4_000_000  # elements of the matrix; a smaller one is multiplied as fast as screened


def _versions(model: EncoderDecoder) -> list[tuple[int, int]]:
    """Return where the parameters lie, and PyTorch's counts of changes to them."""
    return [(p.data_ptr(), p._version) for p in model.parameters()]


class PackedSteps:
    """As ``CachedSteps``, by fewer and faster operations; float32 throughout.

    Args:
        decoder: Rearranged weights.
        memory: The encoder's output ``(sentences, m, d_model)``.
        src_mask: Boolean ``(sentences, 1, m)``, true at real tokens, and somewhere in each row.
        beam: Hypotheses of each sentence.
    """

    @torch.inference_mode()
    def __init__(
        self, decoder: PackedDecoder, memory: Tensor, src_mask: Tensor, beam: int = 1
    ) -> None:
        self.decoder, self.beam, self.length = decoder, beam, 0
        rows = Rows(src_mask[:, 0])
        packed = rows.pack(memory)
        self.layers = [_KeptLayer(w, packed, rows, beam) for w in decoder.layers]
        self.hidden = None if bool(src_mask.all()) else self._hide(src_mask)
        self.places = torch.zeros(len(memory), beam, 0, dtype=torch.long)  # of each position

    def _hide(self, seen: Tensor) -> Tensor:
        """Make zeros, and minus infinity where nothing is seen: ``(sentences * h, ...)``."""
        hidden = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)
        return hidden.repeat_interleave(self.decoder.layers[0].h, 0)

    def _past(self) -> Tensor | None:
        """Hide what other hypotheses made: ``(sentences * h, beam, positions * beam)``."""
        if self.beam == 1:
            return None
        own = torch.arange(self.beam)
        here = own.view(1, -1, 1).expand(len(self.places), -1, -1)  # now: each in its own place
        self.places = torch.cat([self.places, here], dim=2)
        return self._hide((self.places.unsqueeze(3) == own).flatten(2))

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Decode one position: tokens ``(rows,)`` to logits ``(rows, vocab)``."""
        with _float32():
            return self.decoder.generator(self._decode(tokens))

    @torch.inference_mode()
    def most_probable(self, tokens: Tensor) -> Tensor:
        """Decode one position: tokens ``(rows,)`` to the most probable next ones ``(rows,)``."""
        with _float32():
            return self.decoder.most_probable(self._decode(tokens))

    def _decode(self, tokens: Tensor) -> Tensor:
        """Decode tokens ``(rows,)``: ``(rows, d_model)``."""
        x, past = self.decoder.embed(tokens) + self.decoder.positions[self.length], self._past()
        for layer in self.layers:
            x = layer.step(x, self.length, past, self.hidden)
        self.length += 1
        y: Tensor = self.decoder.norm(x)
        return y

    @torch.inference_mode()
    def select(self, sentences: Tensor) -> None:
        """Keep the given sentences, in that order."""
        if self.hidden is not None:
            h = self.decoder.layers[0].h
            self.hidden = self.hidden.unflatten(0, (-1, h))[sentences].flatten(0, 1)
        self.places = self.places[sentences]
        for layer in self.layers:
            layer.select(sentences, self.length)

    @torch.inference_mode()
    def follow(self, parents: Tensor) -> None:
        """Go on from the hypotheses ``parents (sentences, beam)``: nothing but numbers moves."""
        self.places = self.places.take_along_dim(parents.unsqueeze(2), 1)


OURS = (
    *(Decoder, DecoderLayer, MultiHeadedAttention, PositionwiseFeedForward, SublayerConnection),
    *(Embeddings, PositionalEncoding, LearnedPositions, Generator, Dropout),
    *(Linear, nn.Linear, nn.LayerNorm, nn.Identity, nn.Dropout, nn.Embedding),
    *(nn.ModuleList, nn.Sequential),
)


def can_pack(model: EncoderDecoder) -> bool:
    """Whether ``PackedSteps`` computes what the model's own modules would."""
    stacks = (model.tgt_embed, model.decoder, model.generator)
    parts = [module for stack in stacks for module in stack.modules()]
    weights = [p for stack in stacks for p in stack.parameters()]
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and not torch.is_autocast_enabled("cpu")
        and all(p.dtype == torch.float32 and p.device.type == "cpu" for p in weights)
        and not any(p.is_inference() for p in model.parameters())  # their changes go uncounted
        and all(type(m) in OURS and not m.training for m in parts)
        and not any(m._forward_hooks or m._forward_pre_hooks for m in parts)
        and not any(isinstance(m, MultiHeadedAttention) and m.keep_weights for m in parts)
    )


_kept: WeakKeyDictionary[Translator, PackedDecoder | None] = WeakKeyDictionary()


@contextmanager
def packed(model: Translator) -> Iterator[None]:
    """Keep the rearranged weights of a model between calls, while its weights do not change."""
    if isinstance(model, EncoderDecoder):
        _kept[model] = None
    try:
        yield
    finally:
        _kept.pop(model, None)  # at the end of Python it may be gone already


def _packed_decoder(model: EncoderDecoder) -> PackedDecoder:
    """Return the rearranged weights, kept ones if there are any and nothing has changed."""
    decoder = _kept.get(model)
    if decoder is None or decoder.versions != _versions(model):
        decoder = PackedDecoder(model)
        if model in _kept:
            _kept[model] = decoder
    return decoder


@torch.no_grad()
def start_steps(
    model: Translator, src: Tensor, src_mask: Tensor, capacity: int, beam: int = 1
) -> Steps:
    """Encode sentences, without their padding, and return what decodes them.

    Args:
        model: In evaluation mode, else dropout is at work. One that is no Transformer brings
            steps of its own.
        src: Source tokens ``(sentences, m)``.
        src_mask: Broadcasts to ``(sentences, 1, m)``, true (or nonzero) at real tokens.
        capacity: Most target positions.
        beam: Hypotheses of each sentence.
    """
    mask = (src_mask != 0).expand(src.size(0), 1, -1)
    if not isinstance(model, EncoderDecoder):
        return model.start_steps(src, mask, capacity, beam)
    rows = Rows(mask[:, 0])
    memory = rows.unpack(model.encode_packed(src, PackedMask(mask, rows, rows)))
    if can_pack(model) and bool(mask.any(-1).all()):
        return PackedSteps(_packed_decoder(model), memory, mask, beam)
    return CachedSteps(model, memory, mask, capacity, beam)


def most_probable_next(steps: Steps, tokens: Tensor) -> Tensor:
    """Decode one position and return the most probable tokens, without more logits than needed.

    Args:
        steps: From :func:`start_steps`.
        tokens: The newest token of each hypothesis ``(rows,)``.
    """
    if isinstance(steps, PackedSteps):
        return steps.most_probable(tokens)
    return most_probable(steps(tokens))
