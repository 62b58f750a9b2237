# Written from book/model/transformer.md: edit the chapter instead.
"""Stacks, the whole model, presets and parameter counts (section 3)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.background.seq2seq import Translator
from annotated_transformer.model.attention import subsequent_mask
from annotated_transformer.model.embeddings import (
    Embeddings,
    LearnedPositions,
    PositionalEncoding,
    check_length,
)
from annotated_transformer.model.layers import (
    Norm,
    PositionwiseFeedForward,
    SublayerConnection,
    clones,
)
from annotated_transformer.model.multi_head import (
    KeyValueCache,
    MemoryCache,
    MultiHeadedAttention,
    PackedMask,
    Rows,
)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each in a residual connection (section 3.1).

    Args:
        size: Width ``d_model``.
        self_attn: Attention of the sentence to itself.
        feed_forward: Feed-forward network.
        dropout: Probability of dropping an element of a sub-layer's output.
        norm: Place of the layer normalisation, ``"post"`` or ``"pre"``.
    """

    def __init__(
        self,
        size: int,
        self_attn: MultiHeadedAttention,
        feed_forward: PositionwiseFeedForward,
        dropout: float,
        *,
        norm: Norm = "post",
    ) -> None:
        super().__init__()
        self.size = size
        self.norm: Norm = norm
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout, norm=norm), 2)

    def forward(self, x: Tensor, mask: Tensor | PackedMask | None) -> Tensor:
        """Apply the layer to ``x (batch, n, size)``, or ``(rows, size)`` with a packed mask."""
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        x = self.sublayer[1](x, self.feed_forward)
        return x


class LayerCache:
    """What one decoder layer keeps between steps of decoding.

    Args:
        capacity: Most target positions.
    """

    def __init__(self, capacity: int) -> None:
        self.target = KeyValueCache(capacity)
        self.memory = MemoryCache()


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the source, feed-forward network (section 3.1).

    Args:
        size: Width ``d_model``.
        self_attn: Attention of the target to itself.
        src_attn: Attention of the target to the encoder's output.
        feed_forward: Feed-forward network.
        dropout: Probability of dropping an element of a sub-layer's output.
        norm: Place of the layer normalisation, ``"post"`` or ``"pre"``.
    """

    def __init__(
        self,
        size: int,
        self_attn: MultiHeadedAttention,
        src_attn: MultiHeadedAttention,
        feed_forward: PositionwiseFeedForward,
        dropout: float,
        *,
        norm: Norm = "post",
    ) -> None:
        super().__init__()
        self.size = size
        self.norm: Norm = norm
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout, norm=norm), 3)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        src_mask: Tensor | PackedMask | None,
        tgt_mask: Tensor | PackedMask | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Apply the layer to ``x (batch, n, size)`` and ``memory (batch, m, size)``.

        With packed masks both are ``(rows, size)``. With a cache, ``x`` holds only the
        positions that are new.
        """
        target, source = (cache.target, cache.memory) if cache is not None else (None, None)
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask, target))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask, source))
        x = self.sublayer[2](x, self.feed_forward)
        return x


class Encoder(nn.Module):
    """A stack of ``N`` copies of an encoder layer (section 3.1)."""

    def __init__(self, layer: EncoderLayer, N: int) -> None:
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = nn.LayerNorm(layer.size) if layer.norm == "pre" else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | PackedMask | None) -> Tensor:
        """Pass ``x (batch, n, d_model)``, or packed rows, through all layers; same shape."""
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        return x


class Decoder(nn.Module):
    """A stack of ``N`` copies of a decoder layer (section 3.1)."""

    def __init__(self, layer: DecoderLayer, N: int) -> None:
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = nn.LayerNorm(layer.size) if layer.norm == "pre" else nn.Identity()

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        src_mask: Tensor | PackedMask | None,
        tgt_mask: Tensor | PackedMask | None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Pass ``x (batch, n, d_model)``, or packed rows, through all layers; same shape."""
        for i, layer in enumerate(self.layers):
            x = layer(x, memory, src_mask, tgt_mask, cache.layers[i] if cache else None)
        if cache is not None:
            cache.length += x.size(1)
        x = self.norm(x)
        return x


class DecoderCache:
    """What a decoder keeps between steps: the caches of its layers.

    Args:
        layers: Number of layers.
        capacity: Most target positions.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(layers)]
        self.length = 0  # positions decoded so far

    def select(self, rows: Tensor) -> None:
        """Keep the given sentences ``(rows,)``, in that order."""
        for layer in self.layers:
            layer.target.select(rows)
            layer.memory.select(rows)


class Generator(nn.Module):
    """Linear projection and log-softmax over the vocabulary (section 3.4).

    Args:
        d_model: Width of the decoder's output.
        vocab: Number of tokens in the target vocabulary.
    """

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, vocab)

    def forward(self, x: Tensor) -> Tensor:
        """Turn ``x (..., d_model)`` into log-probabilities ``(..., vocab)``."""
        return F.log_softmax(self.proj(x), dim=-1)


class EncoderDecoder(Translator):
    """An encoder and a decoder, with what leads into and out of them (section 3).

    Args:
        encoder: Stack of encoder layers.
        decoder: Stack of decoder layers.
        src_embed: ``Embeddings`` followed by ``PositionalEncoding``.
        tgt_embed: Likewise for the target.
        generator: From the decoder's output to log-probabilities.
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        src_embed: nn.Sequential,
        tgt_embed: nn.Sequential,
        generator: Generator,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.src_embed = src_embed
        self.tgt_embed = tgt_embed
        self.generator = generator

    def encode(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        """Encode ``src (batch, m)``: ``(batch, m, d_model)``."""
        memory: Tensor = self.encoder(self.src_embed(src), src_mask)
        return memory

    def decode(
        self,
        memory: Tensor,
        src_mask: Tensor | None,
        tgt: Tensor,
        tgt_mask: Tensor | None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Decode ``tgt (batch, n)``: ``(batch, n, d_model)``.

        With a cache, ``tgt`` holds only the tokens that are new, and no ``tgt_mask`` is
        needed for a single one: the future is not there yet.
        """
        if cache is None:
            x = self.tgt_embed(tgt)
        else:
            positions = torch.arange(cache.length, cache.length + tgt.size(1), device=tgt.device)
            x = self.embed(self.tgt_embed, tgt, positions)
        y: Tensor = self.decoder(x, memory, src_mask, tgt_mask, cache)
        return y

    @property
    def projection(self) -> nn.Linear:
        """The last layer, from the decoder's output to logits."""
        return self.generator.proj

    @property
    def max_len(self) -> int:
        """Most positions of a sentence."""
        encoding = self.tgt_embed[1]
        assert isinstance(encoding, PositionalEncoding)
        return encoding.max_len

    def embed(self, stack: nn.Sequential, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed ``tokens`` at the given ``positions``: ``(..., d_model)``."""
        encoding = stack[1]
        assert isinstance(encoding, PositionalEncoding)
        if positions.numel():
            check_length(int(positions.max()) + 1, encoding.max_len)
        x: Tensor = encoding(stack[0](tokens), positions)
        return x

    def cache(self, capacity: int) -> DecoderCache:
        """Return an empty cache for decoding up to ``capacity`` target positions."""
        return DecoderCache(len(self.decoder.layers), capacity)

    def encode_packed(self, src: Tensor, mask: PackedMask) -> Tensor:
        """Encode the rows of ``src (batch, m)`` that the mask lays out: ``(rows, d_model)``."""
        rows = mask.queries
        x = self.embed(self.src_embed, src.flatten()[rows.index], rows.positions)
        memory: Tensor = self.encoder(x, mask)
        return memory

    def forward_packed(
        self, src: Tensor, tgt: Tensor, src_keep: Tensor, tgt_keep: Tensor
    ) -> Tensor:
        """As ``Translator.forward_packed``; other positions are not computed at all."""
        source, target = Rows(src_keep), Rows(tgt_keep)
        see_source = src_keep.unsqueeze(1)  # (batch, 1, m)
        see_past = subsequent_mask(tgt.size(1), tgt.device) & tgt_keep.unsqueeze(1)
        memory = self.encode_packed(src, PackedMask(see_source, source, source))
        x = self.embed(self.tgt_embed, tgt.flatten()[target.index], target.positions)
        cross = PackedMask(see_source, target, source)
        y: Tensor = self.decoder(x, memory, cross, PackedMask(see_past, target, target))
        return y


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model, named as in Table 3 of the paper.

    ``d_k`` and ``d_v`` are ``d_model / h`` unless given.
    """

    N: int = 6
    d_model: int = 512
    d_ff: int = 2048
    h: int = 8
    d_k: int | None = None
    d_v: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    ff_dropout: float = 0.0
    norm: Norm = "post"
    positions: Literal["sinusoid", "learned"] = "sinusoid"
    max_len: int = 1024
    tie: Literal["all", "target", "none"] = "all"

    @property
    def width(self) -> int:
        """Width of the layers, as other architectures name it."""
        return self.d_model

    def build(self, src_vocab: int, tgt_vocab: int) -> EncoderDecoder:
        """Build a model of these sizes; see ``build_model``."""
        return build_model(src_vocab, tgt_vocab, self)


base = ModelConfig()
big = ModelConfig(d_model=1024, d_ff=4096, h=16, dropout=0.3)
tiny = ModelConfig(N=4, d_model=128, d_ff=256, h=4, dropout=0.3)  # for small corpora
table3_A1 = ModelConfig(h=1)  # noqa: N816
table3_A4 = ModelConfig(h=4)  # noqa: N816
table3_A16 = ModelConfig(h=16)  # noqa: N816
table3_A32 = ModelConfig(h=32)  # noqa: N816
table3_B16 = ModelConfig(d_k=16)  # noqa: N816
table3_B32 = ModelConfig(d_k=32)  # noqa: N816
table3_C_N2 = ModelConfig(N=2)  # noqa: N816
table3_C_N4 = ModelConfig(N=4)  # noqa: N816
table3_C_N8 = ModelConfig(N=8)  # noqa: N816
table3_C_d256 = ModelConfig(d_model=256, d_k=32, d_v=32)  # noqa: N816
table3_C_d1024 = ModelConfig(d_model=1024, d_k=128, d_v=128)  # noqa: N816
table3_C_ff1024 = ModelConfig(d_ff=1024)  # noqa: N816
table3_C_ff4096 = ModelConfig(d_ff=4096)  # noqa: N816
table3_D_drop0 = ModelConfig(dropout=0.0)  # noqa: N816
table3_D_drop2 = ModelConfig(dropout=0.2)  # noqa: N816
table3_E = ModelConfig(positions="learned")  # noqa: N816

TABLE3: Mapping[str, ModelConfig] = {
    "table3_A1": table3_A1,
    "table3_A4": table3_A4,
    "table3_A16": table3_A16,
    "table3_A32": table3_A32,
    "table3_B16": table3_B16,
    "table3_B32": table3_B32,
    "table3_C_N2": table3_C_N2,
    "table3_C_N4": table3_C_N4,
    "table3_C_N8": table3_C_N8,
    "table3_C_d256": table3_C_d256,
    "table3_C_d1024": table3_C_d1024,
    "table3_C_ff1024": table3_C_ff1024,
    "table3_C_ff4096": table3_C_ff4096,
    "table3_D_drop0": table3_D_drop0,
    "table3_D_drop2": table3_D_drop2,
    "table3_E": table3_E,
}
PRESETS: Mapping[str, ModelConfig] = {"tiny": tiny, "base": base, "big": big, **TABLE3}


def build_model(src_vocab: int, tgt_vocab: int, config: ModelConfig = base) -> EncoderDecoder:
    """Build a model of the given sizes, with fresh weights from the global random generator.

    Args:
        src_vocab: Number of source tokens.
        tgt_vocab: Number of target tokens.
        config: Sizes and variants.

    Raises:
        ValueError: Weights are to be tied between vocabularies of different sizes.
    """
    c = config
    if c.tie == "all" and src_vocab != tgt_vocab:
        raise ValueError(
            f"one matrix for both languages needs one vocabulary: {src_vocab} source tokens, "
            f"{tgt_vocab} target tokens; share the vocabulary, or tie='target'"
        )
    attention = MultiHeadedAttention(c.h, c.d_model, c.attention_dropout, d_k=c.d_k, d_v=c.d_v)
    network = PositionwiseFeedForward(c.d_model, c.d_ff, c.ff_dropout)
    position = {"sinusoid": PositionalEncoding, "learned": LearnedPositions}[c.positions]

    def embedding(vocab: int) -> nn.Sequential:
        words = Embeddings(c.d_model, vocab)
        return nn.Sequential(words, position(c.d_model, c.dropout, c.max_len))

    decoder_layer = DecoderLayer(
        c.d_model, attention, copy.deepcopy(attention), network, c.dropout, norm=c.norm
    )
    model = EncoderDecoder(
        Encoder(EncoderLayer(c.d_model, attention, network, c.dropout, norm=c.norm), c.N),
        Decoder(decoder_layer, c.N),
        embedding(src_vocab),
        embedding(tgt_vocab),
        Generator(c.d_model, tgt_vocab),
    )
    tie_weights(model, c.tie)
    initialise(model)
    return model


def tie_weights(model: EncoderDecoder, tie: Literal["all", "target", "none"] = "all") -> None:
    """Let the generator share the target embeddings' matrix, and the source's too (section 3.4)."""
    source, target = model.src_embed[0], model.tgt_embed[0]
    assert isinstance(source, Embeddings)
    assert isinstance(target, Embeddings)
    if tie != "none":
        model.generator.proj.weight = target.lut.weight
    if tie == "all":
        source.lut.weight = target.lut.weight


def initialise(model: EncoderDecoder) -> None:
    """Draw matrices by Glorot's rule, each head's projections on their own; biases are zero.

    Embeddings have a standard deviation of ``1 / sqrt(d_model)``: multiplied by
    ``sqrt(d_model)`` they are as large as the positions, and as the generator's weights
    they give logits of about unit variance.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
            nn.init.xavier_uniform_(module.weight)
    for module in model.modules():
        if isinstance(module, MultiHeadedAttention):  # W^Q, W^K, W^V apart
            for block in module.in_proj.weight.detach().split(module.sizes):
                nn.init.xavier_uniform_(block)
        elif isinstance(module, Embeddings):
            nn.init.normal_(module.lut.weight, std=module.d_model**-0.5)


def make_model(
    src_vocab: int,
    tgt_vocab: int,
    N: int = 6,
    d_model: int = 512,
    d_ff: int = 2048,
    h: int = 8,
    dropout: float = 0.1,
    *,
    d_k: int | None = None,
    d_v: int | None = None,
    attention_dropout: float = 0.0,
    ff_dropout: float = 0.0,
    norm: Norm = "post",
    positions: Literal["sinusoid", "learned"] = "sinusoid",
    max_len: int = 5000,
    tie: Literal["all", "target", "none"] | None = None,
) -> EncoderDecoder:
    """Build a model from its sizes; the defaults are the paper's base model.

    Args:
        src_vocab: Number of source tokens.
        tgt_vocab: Number of target tokens.
        N: Number of layers in each stack.
        d_model: Width of the layers.
        d_ff: Width of the feed-forward networks.
        h: Number of heads.
        dropout: Probability of dropping an element, where section 5.4 places dropout.
        d_k: Width of a head's queries and keys; ``d_model / h`` unless given.
        d_v: Width of a head's values; ``d_model / h`` unless given.
        attention_dropout: Probability of dropping an attention weight (not in the paper).
        ff_dropout: Probability of dropping a hidden unit (not in the paper).
        norm: ``"post"`` as printed, ``"pre"`` as in later official code.
        positions: ``"sinusoid"``, or ``"learned"`` as in Table 3, row E.
        max_len: Number of positions.
        tie: Share the embeddings' matrix with the generator ``"all"`` three ways, on the
            ``"target"`` side, or ``"none"``; ``"all"`` where the vocabularies are of one size,
            else ``"target"``.

    Returns:
        The model, in training mode.
    """
    if tie is None:
        tie = "all" if src_vocab == tgt_vocab else "target"
    config = ModelConfig(
        N=N,
        d_model=d_model,
        d_ff=d_ff,
        h=h,
        d_k=d_k,
        d_v=d_v,
        dropout=dropout,
        attention_dropout=attention_dropout,
        ff_dropout=ff_dropout,
        norm=norm,
        positions=positions,
        max_len=max_len,
        tie=tie,
    )
    return build_model(src_vocab, tgt_vocab, config)


def count_parameters(model: nn.Module) -> int:
    """Return the number of weights and biases; shared ones count once."""
    return sum(p.numel() for p in model.parameters())


def parameters_by_part(model: EncoderDecoder) -> dict[str, int]:
    """Return the number of parameters by part; shared ones count where they come first."""
    seen: set[int] = set()
    counts = dict.fromkeys(("embeddings", "encoder", "decoder", "generator"), 0)
    for name, parameter in model.named_parameters():
        part = name.split(".")[0]
        part = "embeddings" if part.endswith("embed") else part
        counts[part] += 0 if id(parameter) in seen else parameter.numel()
        seen.add(id(parameter))
    return counts


def parameter_count(config: ModelConfig, vocab: int) -> int:
    """Return the parameters of a model whose two languages share one vocabulary, by formula.

    Args:
        config: Sizes; ``tie`` must be ``"all"``.
        vocab: Number of tokens.

    Raises:
        ValueError: The matrices are not tied.
    """
    c = config
    if c.tie != "all":
        raise ValueError(f"the formula is for tie='all', not {c.tie!r}")
    d = c.d_model
    keys = c.h * (d // c.h if c.d_k is None else c.d_k)
    values = c.h * (d // c.h if c.d_v is None else c.d_v)
    attention = 2 * (d + 1) * keys + (d + 1) * values + (values + 1) * d
    network = (d + 1) * c.d_ff + (c.d_ff + 1) * d
    norm = 2 * d
    layers = c.N * (3 * attention + 2 * network + 5 * norm) + (2 * 2 * d if c.norm == "pre" else 0)
    positions = 2 * c.max_len * d if c.positions == "learned" else 0
    return layers + vocab * d + vocab + positions  # one matrix; the generator has a bias


def article_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Translate the weights of the article's model for ``make_model(..., norm="pre", tie="none")``.

    Outputs agree to about 1e-4: the article adds its epsilon to the deviation, we to the
    variance. Its table of positions is left out; ours is computed.

    Args:
        state: The article's ``state_dict``.

    Returns:
        A ``state_dict`` for ``load_state_dict``.
    """
    ours: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.endswith(".pe"):
            continue
        if ".linears." in name:
            stem, rest = name.split(".linears.")
            number, kind = rest.split(".")
            if number == "3":
                ours[f"{stem}.out_proj.{kind}"] = value
            elif number == "0":  # queries, keys and values become one matrix
                parts = [state[f"{stem}.linears.{i}.{kind}"] for i in range(3)]
                ours[f"{stem}.in_proj.{kind}"] = torch.cat(parts)
        elif name.endswith(".a_2"):
            size = value.numel()
            ours[name.replace("a_2", "weight")] = value * math.sqrt((size - 1) / size)
        else:
            ours[name.replace("b_2", "bias")] = value
    return ours
