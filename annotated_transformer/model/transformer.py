# Written from book/model/transformer.md: edit the chapter instead.
"""The whole model: sizes, construction, first weights, parameter counts (§3, Table 3)."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from annotated_transformer.model.architecture import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderDecoder,
    EncoderLayer,
    Generator,
    Norm,
    check_choice,
)
from annotated_transformer.model.embeddings import Embeddings, LearnedPositions, PositionalEncoding
from annotated_transformer.model.feed_forward import PositionwiseFeedForward
from annotated_transformer.model.multi_head import MultiHeadedAttention, head_widths

Positions = Literal["sinusoid", "learned"]
Tie = Literal["all", "target", "none"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and variants of a model, named as in Table 3; the defaults are the paper's base."""

    N: int = 6  #: Layers in each stack.
    d_model: int = 512  #: Width of the layers.
    d_ff: int = 2048  #: Width of the feed-forward networks.
    h: int = 8  #: Number of heads.
    d_k: int | None = None  #: Width of a head's queries and keys; d_model / h unless given.
    d_v: int | None = None  #: Width of a head's values; d_model / h unless given.
    dropout: float = 0.1  #: Probability of dropping an element where §5.4 places dropout.
    attention_dropout: float = 0.0  #: Probability for attention weights; §6.3, for parsing only.
    ff_dropout: float = 0.0  #: Probability for hidden units (not in the paper).
    norm: Norm = "post"  #: As the paper prints it; ``"pre"`` as its later code has it.
    positions: Positions = "sinusoid"  #: Or ``"learned"``, as in Table 3, row (E).
    max_len: int = 1024  #: Number of positions, the longest sentence.
    tie: Tie = "all"  #: Shares ``"all"`` matrices (§3.4), the ``"target"`` side's or ``"none"``.

    def __post_init__(self) -> None:
        """Refuse what no model can be built from; see :func:`check_config`."""
        check_config(self)

    @property
    def width(self) -> int:
        """Width of the layers, as other architectures name it."""
        return self.d_model

    def build(self, src_vocab: int, tgt_vocab: int) -> EncoderDecoder:
        """Build a model of these sizes; see :func:`build_model`."""
        return build_model(src_vocab, tgt_vocab, self)


def check_whole(**sizes: int) -> None:
    """Raise ValueError for a size that is no whole number above 0; the message names it."""
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: must be a whole number above 0")


def check_config(config: ModelConfig) -> None:
    """Check that a model can be built from these sizes.

    Raises:
        ValueError: A value is out of its range; the message names it.
    """
    sizes = ("N", "d_model", "d_ff", "h", "d_k", "d_v", "max_len")
    check_whole(**{name: value for name in sizes if (value := getattr(config, name)) is not None})
    for name in ("dropout", "attention_dropout", "ff_dropout"):
        value = getattr(config, name)
        if type(value) is bool or not (isinstance(value, int | float) and 0 <= value < 1):
            raise ValueError(f"{name}={value!r}: must be at least 0 and below 1")
    for name, kind in (("norm", Norm), ("positions", Positions), ("tie", Tie)):
        check_choice(name, getattr(config, name), kind)
    head_widths(config.h, config.d_model, config.d_k, config.d_v)


base = ModelConfig()
big = ModelConfig(d_model=1024, d_ff=4096, h=16, dropout=0.3)
tiny = ModelConfig(N=4, d_model=128, d_ff=256, h=4, dropout=0.3)  # for small corpora
ROWS: Mapping[str, Mapping[str, Any]] = {  # of Table 3: what differs from the base
    "A1": {"h": 1},
    "A4": {"h": 4},
    "A16": {"h": 16},
    "A32": {"h": 32},
    "B16": {"d_k": 16},
    "B32": {"d_k": 32},
    "C_N2": {"N": 2},
    "C_N4": {"N": 4},
    "C_N8": {"N": 8},
    "C_d256": {"d_model": 256, "d_k": 32, "d_v": 32},
    "C_d1024": {"d_model": 1024, "d_k": 128, "d_v": 128},
    "C_ff1024": {"d_ff": 1024},
    "C_ff4096": {"d_ff": 4096},
    "D_drop0": {"dropout": 0.0},
    "D_drop2": {"dropout": 0.2},
    "E": {"positions": "learned"},
}
TABLE3 = {f"table3_{row}": replace(base, **sizes) for row, sizes in ROWS.items()}
#: Sizes by name, such as ``base``, or ``table3_E`` for a row of Table 3.
PRESETS: Mapping[str, ModelConfig] = {"tiny": tiny, "base": base, "big": big, **TABLE3}


def build_model(src_vocab: int, tgt_vocab: int, config: ModelConfig = base) -> EncoderDecoder:
    """Build a model, with fresh weights from PyTorch's global generator.

    ``src_vocab`` and ``tgt_vocab`` are numbers of tokens; ``model.config`` keeps the sizes.

    Raises:
        ValueError: A vocabulary is empty; or they differ in size, and ``config.tie`` is ``"all"``.
    """
    check_whole(src_vocab=src_vocab, tgt_vocab=tgt_vocab)
    c = config
    attention = MultiHeadedAttention(c.h, c.d_model, c.attention_dropout, d_k=c.d_k, d_v=c.d_v)
    network = PositionwiseFeedForward(c.d_model, c.d_ff, c.ff_dropout)
    positions = PositionalEncoding if c.positions == "sinusoid" else LearnedPositions

    def embed(vocab: int) -> nn.Sequential:
        added = positions(c.d_model, c.dropout, c.max_len)
        return nn.Sequential(Embeddings(c.d_model, vocab), added)

    cross = copy.deepcopy(attention)  # else both attentions of a layer would be one
    model = EncoderDecoder(
        Encoder(EncoderLayer(c.d_model, attention, network, c.dropout, norm=c.norm), c.N),
        Decoder(DecoderLayer(c.d_model, attention, cross, network, c.dropout, norm=c.norm), c.N),
        embed(src_vocab),
        embed(tgt_vocab),
        Generator(c.d_model, tgt_vocab),
    )
    tie_weights(model, c.tie)
    initialize(model)
    model.config = config
    return model


def tie_weights(model: EncoderDecoder, tie: Tie = "all") -> None:
    """Let the generator share the target embeddings' matrix, and the source's too (§3.4).

    Raises:
        ValueError: ``tie`` is no such choice, or ``"all"``, but the vocabularies differ in size.
    """
    check_choice("tie", tie, Tie)
    source, target = (stack.get_submodule("0.lut") for stack in (model.src_embed, model.tgt_embed))
    shared = target.get_parameter("weight")
    if tie == "all" and (own := source.get_parameter("weight")).shape != shared.shape:
        raise ValueError(
            f"tie='all' needs one vocabulary for both languages: there are {len(own)} source and "
            f"{len(shared)} target tokens; share them, or give tie='target'"
        )
    if tie != "none":
        model.generator.get_submodule("proj").register_parameter("weight", shared)
    if tie == "all":
        source.register_parameter("weight", shared)


def initialize(model: nn.Module) -> None:
    """Draw matrices by Glorot's rule, and embeddings with deviation ``1 / sqrt(d_model)``.

    Multiplied by ``sqrt(d_model)``, the embeddings are as large as the positions that are added;
    as the generator's weights they give logits of about unit variance. Biases are zero.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    for module in model.modules():  # afterwards: a generator may share this matrix
        if isinstance(module, Embeddings):
            nn.init.normal_(module.lut.weight, std=module.d_model**-0.5)


def make_model(
    src_vocab: int,  # number of source tokens
    tgt_vocab: int,  # number of target tokens
    N: int = 6,
    d_model: int = 512,
    d_ff: int = 2048,
    h: int = 8,
    dropout: float = 0.1,
    **options: Any,
) -> EncoderDecoder:
    """Build a model, in training mode, from its sizes; the defaults are the paper's base model.

    The sizes, and the ``options`` by name, are fields of :class:`ModelConfig`. ``max_len`` is
    5000 unless given, and ``tie`` is ``"all"`` where the vocabularies are of one size, else
    ``"target"``.

    Raises:
        TypeError: There is no such option.
        ValueError: A value cannot work.
    """
    tie = "all" if src_vocab == tgt_vocab else "target"
    options = {"max_len": 5000, "tie": tie, **options}
    config = ModelConfig(N=N, d_model=d_model, d_ff=d_ff, h=h, dropout=dropout, **options)
    return build_model(src_vocab, tgt_vocab, config)


def count_parameters(model: nn.Module) -> int:
    """Return the number of weights and biases; shared ones count once."""
    return sum(p.numel() for p in model.parameters())


def parameters_by_part(model: EncoderDecoder) -> dict[str, int]:
    """Return the number of parameters by part; shared ones count where they come first."""
    counts = dict.fromkeys(("embeddings", "encoder", "decoder", "generator"), 0)
    for name, parameter in model.named_parameters():  # names a shared parameter once
        part = name.split(".")[0]
        counts["embeddings" if part.endswith("embed") else part] += parameter.numel()
    return counts


def parameter_count(config: ModelConfig, vocab: int) -> int:
    """Return the parameters of a model with one shared vocabulary, by formula.

    Raises:
        ValueError: ``config.tie`` is not ``"all"``.
    """
    c, d = config, config.d_model
    if c.tie != "all":
        raise ValueError(f"the formula is for tie='all', not {c.tie!r}")
    keys, values = c.h * (c.d_k or d // c.h), c.h * (c.d_v or d // c.h)
    attention = 2 * (d + 1) * keys + (d + 1) * values + (values + 1) * d
    network = (d + 1) * c.d_ff + (c.d_ff + 1) * d
    norm = 2 * d
    layers = c.N * (3 * attention + 2 * network + 5 * norm) + (2 * norm if c.norm == "pre" else 0)
    positions = 2 * c.max_len * d if c.positions == "learned" else 0
    return layers + vocab * d + vocab + positions  # one matrix; the generator has a bias
