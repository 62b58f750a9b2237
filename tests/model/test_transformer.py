"""The whole model against PyTorch's, its sizes, its parameters by counting."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from annotated_transformer.model.architecture import EncoderDecoder, Norm, SublayerConnection
from annotated_transformer.model.embeddings import LearnedPositions, PositionalEncoding, sinusoid
from annotated_transformer.model.feed_forward import PositionwiseFeedForward
from annotated_transformer.model.multi_head import (
    MultiHeadedAttention,
    padding_mask,
    subsequent_mask,
)
from annotated_transformer.model.transformer import (
    PRESETS,
    TABLE3,
    ModelConfig,
    Positions,
    base,
    big,
    build_model,
    count_parameters,
    initialize,
    make_model,
    parameter_count,
    parameters_by_part,
    tie_weights,
    tiny,
)
from tests.parts import part_of

V = 13
seeds = st.integers(0, 2**31)
lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=3)
orders = pytest.mark.parametrize("norm", ["post", "pre"])


def make(norm: Norm = "post", seed: int = 0, **options: Any) -> EncoderDecoder:
    """Make a small model in double precision whose biases and gains are random, too."""
    torch.manual_seed(seed)
    options = {"N": 2, "d_model": 16, "d_ff": 24, "h": 4, "dropout": 0.0, **options}
    model = make_model(V, V, norm=norm, **options).double()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5)
    return model


def pairs(
    lengths: Sequence[tuple[int, int]], seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make a padded batch of random tokens: source, target, which of them are real."""
    torch.manual_seed(seed)
    src_keep, tgt_keep = (
        torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)
        for sizes in zip(*lengths, strict=True)
    )
    src, tgt = (torch.randint(1, V, keep.shape) * keep for keep in (src_keep, tgt_keep))
    return src, tgt, padding_mask(src, 0), padding_mask(tgt, 0) & subsequent_mask(tgt.size(1))


def assert_close(
    ones: Iterable[Tensor], others: Iterable[Tensor], tolerance: float = 1e-10
) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def slopes(y: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    steering = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
    return torch.autograd.grad(y, inputs, steering)


# Equality with torch.nn.Transformer


def parts(model: EncoderDecoder, twin: nn.Transformer) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield PyTorch's parameters, each with those of ours that it consists of."""
    sides: Any = ((model.encoder, twin.encoder), (model.decoder, twin.decoder))  # PyTorch's names
    for ours, theirs in sides:
        for layer, other in zip(ours.layers, theirs.layers, strict=True):
            attentions = [(layer.self_attn, other.self_attn)]
            if hasattr(layer, "src_attn"):
                attentions.append((layer.src_attn, other.multihead_attn))
            for mine, its in attentions:
                *projections, last = mine.linears
                yield [p.weight for p in projections], its.in_proj_weight
                yield [p.bias for p in projections], its.in_proj_bias
                yield [last.weight], its.out_proj.weight
                yield [last.bias], its.out_proj.bias
            modules = [(layer.feed_forward.w_1, other.linear1)]
            modules.append((layer.feed_forward.w_2, other.linear2))
            for i, sublayer in enumerate(layer.sublayer, start=1):
                modules.append((sublayer.norm, getattr(other, f"norm{i}")))
            for mine, its in modules:
                yield [mine.weight], its.weight
                yield [mine.bias], its.bias
        if theirs.norm is not None:
            yield [ours.norm.weight], theirs.norm.weight
            yield [ours.norm.bias], theirs.norm.bias


def twin_of(model: EncoderDecoder, norm: Norm, training: bool) -> nn.Transformer:
    """Make PyTorch's model with our weights; the printed model has no norm after its stacks."""
    twin = nn.Transformer(16, 4, 2, 2, 24, 0.0, batch_first=True, norm_first=norm == "pre").double()
    if norm == "post":
        twin.encoder.norm = twin.decoder.norm = None
    with torch.no_grad():
        for mine, its in parts(model, twin):
            its.copy_(torch.cat(mine))
    stacks = (*model.encoder.parameters(), *model.decoder.parameters())
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in stacks)
    return twin.train(training)


@orders
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@settings(max_examples=10)
@given(seeds, lengths)
def test_equals_pytorchs_transformer(
    norm: Norm, training: bool, seed: int, lengths: list[tuple[int, int]]
) -> None:
    src, tgt, src_mask, tgt_mask = pairs(lengths, seed)
    model = make(norm, seed).train(training)
    twin = twin_of(model, norm, training)
    y = model(src, tgt, src_mask, tgt_mask)
    theirs = twin(
        model.src_embed(src),
        model.tgt_embed(tgt),
        tgt_mask=~subsequent_mask(tgt.size(1))[0],
        src_key_padding_mask=src == 0,
        memory_key_padding_mask=src == 0,
        tgt_key_padding_mask=tgt == 0,
    )
    real = tgt != 0
    assert_close([y[real]], [theirs[real]])
    groups, its = zip(*parts(model, twin), strict=True)
    table = model.get_parameter("tgt_embed.0.lut.weight")
    to_table, *to_ours = slopes(y[real], [table, *(p for group in groups for p in group)])
    rest = iter(to_ours)
    joined = [torch.cat([next(rest) for _ in group]) for group in groups]
    assert_close([to_table, *joined], slopes(theirs[real], [table, *its]))


# One model, computed in several ways


@settings(max_examples=15)
@given(seeds, lengths, st.sampled_from(["post", "pre"]), st.booleans())
def test_token_by_token_equals_all_at_once(
    seed: int, lengths: list[tuple[int, int]], norm: Norm, learned: bool
) -> None:
    model = make(norm, seed, positions="learned" if learned else "sinusoid", max_len=8).eval()
    src, tgt, src_mask, _ = pairs(lengths, seed)
    whole = model(src, tgt, src_mask, subsequent_mask(tgt.size(1)))
    memory = model.encode(src, src_mask)
    steps = [
        model.decode(memory, src_mask, tgt[:, :n], subsequent_mask(n))[:, -1]
        for n in range(1, tgt.size(1) + 1)
    ]
    assert_close([torch.stack(steps, dim=1)], [whole])


@settings(max_examples=10)
@given(seeds, lengths)
def test_a_batch_of_many_equals_one_by_one(seed: int, lengths: list[tuple[int, int]]) -> None:
    src, tgt, src_mask, tgt_mask = pairs(lengths, seed)
    model = make(seed=seed)
    many = model(src, tgt, src_mask, tgt_mask)[tgt != 0]
    outputs = []
    for i, (m, n) in enumerate(lengths):
        see_all, see_past = torch.ones(1, 1, m, dtype=torch.bool), subsequent_mask(n)
        outputs.append(model(src[i : i + 1, :m], tgt[i : i + 1, :n], see_all, see_past)[0])
    one_by_one = torch.cat(outputs)
    assert_close([many], [one_by_one])
    weights = [p for name, p in model.named_parameters() if not name.startswith("generator")]
    assert_close(slopes(many, weights), slopes(one_by_one, weights))


def test_a_sentence_without_a_source_token_is_defined() -> None:
    model = make()
    src, tgt = torch.tensor([[0, 0], [3, 4]]), torch.tensor([[1, 5], [1, 6]])
    y = model(src, tgt, padding_mask(src, 0), subsequent_mask(2))
    assert y.isfinite().all()
    assert all(
        slope.isfinite().all()
        for slope in slopes(y, [model.get_parameter("tgt_embed.0.lut.weight")])
    )


@pytest.mark.parametrize("positions", ["sinusoid", "learned"])
def test_too_long_sentences_are_refused(positions: str) -> None:
    model = make(positions=positions, max_len=3)
    tokens = torch.ones(1, 4, dtype=torch.long)
    mask = torch.ones(1, 1, 4, dtype=torch.bool)
    with pytest.raises(IndexError, match="4 tokens"):
        model.encode(tokens, mask)
    memory = model.encode(tokens[:, :3], mask[..., :3])
    with pytest.raises(IndexError, match="4 tokens"):
        model.decode(memory, mask[..., :3], tokens, subsequent_mask(4))


# Making a model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tie": True}, "tie=True: choose among all, target, none"),
        ({"tie": "both"}, "tie='both': choose among"),
        ({"norm": "middle"}, "norm='middle': choose among post, pre"),
        ({"positions": None}, "positions=None: choose among sinusoid, learned"),
        ({"d_k": 0}, "d_k=0: must be a whole number above 0"),
        ({"d_v": -1}, "d_v=-1: must be"),
        ({"h": True}, "h=True: must be"),
        ({"dropout": False}, "dropout=False: must be"),
        ({"N": 0}, "N=0: must be"),
        ({"d_model": 16.0}, "d_model=16.0: must be"),
        ({"d_ff": "32"}, "d_ff='32': must be"),
        ({"h": 2.5}, "h=2.5: must be"),
        ({"max_len": 0}, "max_len=0: must be"),
        ({"dropout": 1}, "dropout=1: must be at least 0 and below 1"),
        ({"dropout": -0.1}, "dropout=-0.1: must be"),
        ({"attention_dropout": math.nan}, "attention_dropout=nan: must be"),
        ({"ff_dropout": "0.1"}, "ff_dropout='0.1': must be"),
        ({"d_model": 10, "h": 3}, "d_model=10 is not a multiple of h=3"),
    ],
)
def test_sizes_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_model(V, V, **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig(**options)
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(base, **options)


def test_the_limits_themselves_are_allowed() -> None:
    config = ModelConfig(1, 1, 1, 1, 1, 1, dropout=0, attention_dropout=0.999, max_len=1)
    assert build_model(V, V, config).config is config


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((0, 10), "src_vocab=0"), ((10, 0), "tgt_vocab=0"), ((10.0, 10), "src_vocab=10.0")],
)
def test_an_impossible_vocabulary_is_refused(sizes: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}: must be a whole number above 0"):
        make_model(*sizes)


def test_misspelt_options_are_refused() -> None:
    with pytest.raises(TypeError, match="attention_droput"):
        make_model(V, V, attention_droput=0.1)


def test_every_option_reaches_the_model() -> None:
    options: dict[str, Any] = {
        "d_k": 3,
        "d_v": 5,
        "attention_dropout": 0.1,
        "ff_dropout": 0.2,
        "norm": "pre",
    }
    options |= {"positions": "learned", "max_len": 9, "tie": "none"}
    model = make_model(V, V, 1, 8, 12, 2, 0.3, **options)
    config = ModelConfig(1, 8, 12, 2, dropout=0.3, **options)
    assert model.config == config
    for name in ("self_attn", "src_attn"):
        attention = part_of(model, f"decoder.layers.0.{name}", MultiHeadedAttention)
        assert (attention.h, attention.d_k, attention.d_v, attention.dropout.p) == (2, 3, 5, 0.1)
    ffn = part_of(model, "decoder.layers.0.feed_forward", PositionwiseFeedForward)
    assert (ffn.w_1.out_features, ffn.dropout.p) == (12, 0.2)
    names = [f"decoder.layers.0.sublayer.{i}" for i in range(3)]
    frames = [part_of(model, name, SublayerConnection) for name in names]
    assert {frame.dropout.p for frame in frames} == {0.3}
    assert {frame.order for frame in frames} == {"pre"}
    places = [part_of(model, f"{side}_embed.1", LearnedPositions) for side in ("src", "tgt")]
    assert [one.dropout.p for one in places] == [0.3, 0.3]
    assert places[0].max_len == 9
    plain = part_of(make_model(V, V, 1, 8, 12, 2), "src_embed.1", PositionalEncoding)
    assert plain.max_len == 5000
    assert model.training


@settings(max_examples=15)
@given(
    st.integers(1, 3),
    st.sampled_from([(8, 2, None, None), (12, 4, 5, 7), (6, 4, 2, 3), (10, 1, 3, None)]),
    st.integers(1, 9),
    st.sampled_from(["post", "pre"]),
    st.sampled_from(["sinusoid", "learned"]),
    st.integers(1, 20),
)
def test_the_formula_counts_the_parameters(
    N: int,
    widths: tuple[int, int, int | None, int | None],
    d_ff: int,
    norm: Norm,
    positions: Positions,
    vocab: int,
) -> None:
    d_model, h, d_k, d_v = widths
    config = ModelConfig(N, d_model, d_ff, h, d_k, d_v, norm=norm, positions=positions, max_len=5)
    model = build_model(vocab, vocab, config)
    distinct = {p.data_ptr(): p.numel() for p in model.parameters()}
    assert count_parameters(model) == parameter_count(config, vocab) == sum(distinct.values())
    by_part = parameters_by_part(model)
    assert sum(by_part.values()) == count_parameters(model)
    assert by_part["generator"] == vocab  # its matrix is the embeddings', its bias is not


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_sizes_that_the_formula_says(name: str) -> None:
    with torch.device("meta"):
        model = build_model(37000, 37000, PRESETS[name])
    assert count_parameters(model) == parameter_count(PRESETS[name], 37000)


def test_rows_of_table_3_change_what_the_table_says() -> None:
    assert (base.N, base.d_model, base.d_ff, base.h, base.dropout) == (6, 512, 2048, 8, 0.1)
    assert (big.N, big.d_model, big.d_ff, big.h, big.dropout) == (6, 1024, 4096, 16, 0.3)
    assert PRESETS["tiny"] is tiny
    assert set(PRESETS) == {"tiny", "base", "big", *TABLE3}
    changes = {
        name: {
            key: value
            for key, value in dataclasses.asdict(config).items()
            if value != getattr(base, key)
        }
        for name, config in TABLE3.items()
    }
    assert changes == {
        **{f"table3_A{h}": {"h": h} for h in (1, 4, 16, 32)},
        **{f"table3_B{d_k}": {"d_k": d_k} for d_k in (16, 32)},
        **{f"table3_C_N{N}": {"N": N} for N in (2, 4, 8)},
        "table3_C_d256": {"d_model": 256, "d_k": 32, "d_v": 32},
        "table3_C_d1024": {"d_model": 1024, "d_k": 128, "d_v": 128},
        **{f"table3_C_ff{d_ff}": {"d_ff": d_ff} for d_ff in (1024, 4096)},
        "table3_D_drop0": {"dropout": 0.0},
        "table3_D_drop2": {"dropout": 0.2},
        "table3_E": {"positions": "learned"},
    }
    sizes = {parameter_count(TABLE3[f"table3_A{h}"], 37000) for h in (1, 4, 16, 32)}
    assert sizes == {parameter_count(base, 37000)}  # row A keeps the amount of computation


def test_the_formula_is_for_tied_matrices() -> None:
    with pytest.raises(ValueError, match="'none'"):
        parameter_count(ModelConfig(tie="none"), 10)


@pytest.mark.parametrize(("tie", "matrices"), [("all", 1), ("target", 2), ("none", 3)])
def test_tying(tie: str, matrices: int) -> None:
    model = make(tie=tie)
    names = ("src_embed.0.lut", "tgt_embed.0.lut", "generator.proj")
    tables = [model.get_parameter(f"{name}.weight") for name in names]
    assert len({table.data_ptr() for table in tables}) == matrices
    loose = make(tie="none")
    tie_weights(loose)
    assert loose.get_parameter("generator.proj.weight") is loose.get_parameter(
        "src_embed.0.lut.weight"
    )
    by_part = parameters_by_part(model)
    assert by_part["embeddings"] == V * 16 * (1 if tie == "all" else 2)
    assert by_part["generator"] == V + (V * 16 if tie == "none" else 0)


def test_vocabularies_of_two_sizes_share_no_matrix() -> None:
    model = make_model(5, 7, N=1, d_model=8, d_ff=8, h=2)
    assert model.get_parameter("generator.proj.weight") is model.get_parameter(
        "tgt_embed.0.lut.weight"
    )
    assert model.get_parameter("src_embed.0.lut.weight").shape == (5, 8)
    with pytest.raises(ValueError, match=r"5 source and 7 target tokens.*tie='target'"):
        make_model(5, 7, N=1, d_model=8, d_ff=8, h=2, tie="all")


@pytest.mark.parametrize("tie", ["all", "target", "none"])
def test_saving_and_loading_gives_the_same_model(tie: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make(tie=tie)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = make(seed=1, tie=tie)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    src, tgt, src_mask, tgt_mask = pairs([(4, 5), (2, 3)])
    assert torch.equal(model(src, tgt, src_mask, tgt_mask), other(src, tgt, src_mask, tgt_mask))
    shared = other.get_parameter("generator.proj.weight") is other.get_parameter(
        "src_embed.0.lut.weight"
    )
    assert shared == (tie == "all")


def test_first_weights() -> None:
    torch.manual_seed(0)
    model = make_model(500, 500, N=1, d_model=64, d_ff=256, h=4)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
    assert model.get_parameter("generator.proj.weight").std().item() == pytest.approx(
        1 / 8, rel=0.05
    )
    for i in range(4):  # Glorot's bound, of a square matrix each
        linear = model.get_parameter(f"encoder.layers.0.self_attn.linears.{i}.weight")
        assert linear.abs().max().item() == pytest.approx(math.sqrt(6 / 128), rel=0.01)
    widest = model.get_parameter("encoder.layers.0.feed_forward.w_1.weight").abs().max()
    assert widest.item() == pytest.approx(math.sqrt(6 / 320), rel=0.01)
    layers = torch.cat([p.flatten() for p in model.decoder.parameters()])
    torch.manual_seed(0)
    initialize(model)
    assert not torch.equal(layers, torch.cat([p.flatten() for p in model.decoder.parameters()]))


def test_layers_start_differently() -> None:
    model = make_model(V, V, N=3, d_model=16, d_ff=24, h=4)
    kinds = ("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "src_attn")
    weights = [
        model.get_parameter(f"{side}.layers.{i}.{kind}.linears.0.weight")
        for side, kind in kinds
        for i in range(3)
    ]
    assert len({weight.data_ptr() for weight in weights}) == 9
    assert all(not torch.equal(weights[0], other) for other in weights[1:])


def test_learned_positions_are_used_on_both_sides() -> None:
    model = make(positions="learned", max_len=7)
    src, tgt = (part_of(model, f"{side}_embed.1", LearnedPositions) for side in ("src", "tgt"))
    assert src.pe is not tgt.pe
    plain = part_of(make(), "src_embed.1", PositionalEncoding)
    torch.testing.assert_close(plain.pe[0, :7].float(), sinusoid(7, 16))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization", "ignore:torch.quantize_per_tensor")
def test_dynamic_quantization_finds_every_matrix() -> None:
    net = make_model(20, 20, N=2, d_model=8, d_ff=16, h=2).eval()
    small = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    kinds = [type(module) for module in small.modules()]
    encoder_layer, decoder_layer, generator = 4 + 2, 8 + 2, 1
    found = kinds.count(torch.ao.nn.quantized.dynamic.Linear)
    assert found == 2 * encoder_layer + 2 * decoder_layer + generator
    src = torch.tensor([[4, 5, 6]])
    mask = torch.ones(1, 1, 3, dtype=torch.bool)
    error = small.encode(src, mask) - net.encode(src, mask)
    assert 0 < float(error.detach().abs().max()) < 0.5
