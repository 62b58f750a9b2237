"""The whole model against PyTorch's, its parameters by counting, its cached and packed forms."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from annotated_transformer.model.attention import padding_mask, subsequent_mask
from annotated_transformer.model.embeddings import LearnedPositions, sinusoid
from annotated_transformer.model.transformer import (
    PRESETS,
    TABLE3,
    ModelConfig,
    article_state,
    base,
    big,
    build_model,
    count_parameters,
    initialise,
    make_model,
    parameter_count,
    parameters_by_part,
    tie_weights,
    tiny,
)

V = 13
seeds = st.integers(0, 2**31)
lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=3)
orders = pytest.mark.parametrize("norm", ["post", "pre"])


def make(norm="post", seed=0, **options):
    """Make a small model in double precision whose biases and gains are random, too."""
    torch.manual_seed(seed)
    options = {"N": 2, "d_model": 16, "d_ff": 24, "h": 4, "dropout": 0.0, **options}
    model = make_model(V, V, norm=norm, **options).double()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5)
    return model


def pairs(lengths, seed=0):
    """Make a padded batch of random tokens: source, target, which of them are real."""
    torch.manual_seed(seed)
    src_keep, tgt_keep = (
        torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)
        for sizes in zip(*lengths, strict=True)
    )
    src, tgt = (torch.randint(1, V, keep.shape) * keep for keep in (src_keep, tgt_keep))
    return src, tgt, padding_mask(src, 0), padding_mask(tgt, 0) & subsequent_mask(tgt.size(1))


def assert_close(ones, others, tolerance=1e-10):
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def slopes(y, inputs):
    steering = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
    return torch.autograd.grad(y, inputs, steering)


# Equality with torch.nn.Transformer


def parts(model, twin):
    """Yield our parameters beside PyTorch's, for the stacks."""
    for ours, theirs in ((model.encoder, twin.encoder), (model.decoder, twin.decoder)):
        for layer, other in zip(ours.layers, theirs.layers, strict=True):
            attentions = [(layer.self_attn, other.self_attn)]
            if hasattr(layer, "src_attn"):
                attentions.append((layer.src_attn, other.multihead_attn))
            for mine, its in attentions:
                yield mine.in_proj.weight, its.in_proj_weight
                yield mine.in_proj.bias, its.in_proj_bias
                yield mine.out_proj.weight, its.out_proj.weight
                yield mine.out_proj.bias, its.out_proj.bias
            modules = [(layer.feed_forward.w_1, other.linear1)]
            modules.append((layer.feed_forward.w_2, other.linear2))
            for i, sublayer in enumerate(layer.sublayer, start=1):
                modules.append((sublayer.norm, getattr(other, f"norm{i}")))
            for mine, its in modules:
                yield mine.weight, its.weight
                yield mine.bias, its.bias
        if theirs.norm is not None:
            yield ours.norm.weight, theirs.norm.weight
            yield ours.norm.bias, theirs.norm.bias


def twin_of(model, norm, training):
    """Make PyTorch's model with our weights; the printed model has no norm after its stacks."""
    twin = nn.Transformer(16, 4, 2, 2, 24, 0.0, batch_first=True, norm_first=norm == "pre").double()
    if norm == "post":
        twin.encoder.norm = twin.decoder.norm = None
    with torch.no_grad():
        for mine, its in parts(model, twin):
            its.copy_(mine)
    stacks = (*model.encoder.parameters(), *model.decoder.parameters())
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in stacks)
    return twin.train(training)


@orders
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@settings(max_examples=10)
@given(seeds, lengths)
def test_equals_pytorchs_transformer(norm, training, seed, lengths):
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
    mine, its = zip(*parts(model, twin), strict=True)
    table = model.tgt_embed[0].lut.weight
    assert_close(slopes(y[real], [table, *mine]), slopes(theirs[real], [table, *its]))


# One model, computed in several ways


def cached(model, src, tgt, src_mask, widths=()):
    """Decode step by step with a cache; ``widths`` gives the sizes of the first steps."""
    memory, cache, start, outputs = model.encode(src, src_mask), model.cache(tgt.size(1)), 0, []
    for width in (*widths, *[1] * (tgt.size(1) - sum(widths))):
        see = None
        if width > 1:
            see = subsequent_mask(start + width)[:, start:]
        new = tgt[:, start : start + width]
        outputs.append(model.decode(memory, src_mask, new, see, cache))
        start += width
    assert cache.length == tgt.size(1)
    return torch.cat(outputs, dim=1)


@settings(max_examples=15)
@given(seeds, lengths, st.sampled_from(["post", "pre"]), st.booleans())
def test_cached_equals_uncached(seed, lengths, norm, learned):
    model = make(norm, seed, positions="learned" if learned else "sinusoid", max_len=8).eval()
    src, tgt, src_mask, _ = pairs(lengths, seed)
    whole = model(src, tgt, src_mask, subsequent_mask(tgt.size(1)))
    assert_close([cached(model, src, tgt, src_mask)], [whole])
    assert_close([cached(model, src, tgt, src_mask, (tgt.size(1),))], [whole])


@pytest.mark.parametrize("widths", [(2,), (1, 3), (2, 2)])
def test_a_prefix_may_enter_the_cache_at_once(widths):
    model = make().eval()
    src, tgt, src_mask, _ = pairs([(4, 5), (2, 5)])
    whole = model(src, tgt, src_mask, subsequent_mask(5))
    assert_close([cached(model, src, tgt, src_mask, widths)], [whole])


def test_a_cache_follows_its_sentences():
    model = make().eval()
    src, tgt, src_mask, _ = pairs([(4, 3), (2, 3), (6, 3)])
    whole = model(src, tgt, src_mask, subsequent_mask(3))
    memory, cache = model.encode(src, src_mask), model.cache(3)
    model.decode(memory, src_mask, tgt[:, :1], None, cache)
    model.decode(memory, src_mask, tgt[:, 1:2], None, cache)
    rows = torch.tensor([2, 0])
    cache.select(rows)
    last = model.decode(memory[rows], src_mask[rows], tgt[rows, 2:], None, cache)
    assert_close([last[:, 0]], [whole[rows, 2]])
    with pytest.raises(IndexError, match="capacity of 3"):
        model.decode(memory[rows], src_mask[rows], tgt[rows, 2:], None, cache)


@orders
@settings(max_examples=10)
@given(seeds, lengths)
def test_packed_equals_padded(norm, seed, lengths):
    src, tgt, src_mask, tgt_mask = pairs(lengths, seed)
    model = make(norm, seed)
    padded = model(src, tgt, src_mask, tgt_mask)[tgt != 0]
    packed = model.forward_packed(src, tgt, src != 0, tgt != 0)
    assert_close([packed], [padded])
    inputs = [p for name, p in model.named_parameters() if not name.startswith("generator")]
    assert_close(slopes(packed, inputs), slopes(padded, inputs))


@pytest.mark.parametrize("mode", ["padded", "packed"])
@settings(max_examples=10)
@given(seeds, lengths)
def test_a_batch_of_many_equals_one_by_one(mode, seed, lengths):
    src, tgt, src_mask, tgt_mask = pairs(lengths, seed)
    model = make(seed=seed)
    if mode == "padded":
        many = model(src, tgt, src_mask, tgt_mask)[tgt != 0]
    else:
        many = model.forward_packed(src, tgt, src != 0, tgt != 0)
    one_by_one = []
    for i, (m, n) in enumerate(lengths):
        see_all, see_past = torch.ones(1, 1, m, dtype=torch.bool), subsequent_mask(n)
        one_by_one.append(model(src[i : i + 1, :m], tgt[i : i + 1, :n], see_all, see_past)[0])
    one_by_one = torch.cat(one_by_one)
    assert_close([many], [one_by_one])
    weights = [p for name, p in model.named_parameters() if not name.startswith("generator")]
    assert_close(slopes(many, weights), slopes(one_by_one, weights))


def test_a_sentence_without_a_source_token_is_defined():
    model = make()
    src, tgt = torch.tensor([[0, 0], [3, 4]]), torch.tensor([[1, 5], [1, 6]])
    y = model(src, tgt, padding_mask(src, 0), subsequent_mask(2))
    assert y.isfinite().all()
    assert all(slope.isfinite().all() for slope in slopes(y, [model.tgt_embed[0].lut.weight]))
    packed = model.forward_packed(src, tgt, src != 0, tgt != 0)
    assert_close([packed], [y.flatten(0, 1)])


@pytest.mark.parametrize("positions", ["sinusoid", "learned"])
def test_too_long_sentences_are_refused_in_every_form(positions):
    model = make(positions=positions, max_len=3)
    tokens = torch.ones(1, 4, dtype=torch.long)
    mask, keep = torch.ones(1, 1, 4, dtype=torch.bool), torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(IndexError, match="4 tokens"):
        model.encode(tokens, mask)
    with pytest.raises(IndexError, match="4 tokens"):
        model.forward_packed(tokens, tokens, keep, keep)
    memory, cache = model.encode(tokens[:, :3], mask[..., :3]), model.cache(9)
    for _ in range(3):
        model.decode(memory, mask[..., :3], tokens[:, :1], None, cache)
    with pytest.raises(IndexError, match="4 tokens"):
        model.decode(memory, mask[..., :3], tokens[:, :1], None, cache)


# Making a model


@settings(max_examples=15)
@given(
    st.integers(1, 3),
    st.sampled_from([(8, 2, None, None), (12, 4, 5, 7), (6, 4, 2, 3), (10, 1, 3, None)]),
    st.integers(1, 9),
    st.sampled_from(["post", "pre"]),
    st.sampled_from(["sinusoid", "learned"]),
    st.integers(1, 20),
)
def test_the_formula_counts_the_parameters(N, widths, d_ff, norm, positions, vocab):
    d_model, h, d_k, d_v = widths
    config = ModelConfig(N, d_model, d_ff, h, d_k, d_v, norm=norm, positions=positions, max_len=5)
    model = build_model(vocab, vocab, config)
    distinct = {p.data_ptr(): p.numel() for p in model.parameters()}
    assert count_parameters(model) == parameter_count(config, vocab) == sum(distinct.values())
    by_part = parameters_by_part(model)
    assert sum(by_part.values()) == count_parameters(model)
    assert by_part["generator"] == vocab  # its matrix is the embeddings', its bias is not


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_sizes_that_the_formula_says(name):
    with torch.device("meta"):
        model = build_model(37000, 37000, PRESETS[name])
    assert count_parameters(model) == parameter_count(PRESETS[name], 37000)


def test_rows_of_table_3_change_what_the_table_says():
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


def test_the_formula_is_for_tied_matrices():
    with pytest.raises(ValueError, match="'none'"):
        parameter_count(ModelConfig(tie="none"), 10)


@pytest.mark.parametrize(("tie", "matrices"), [("all", 1), ("target", 2), ("none", 3)])
def test_tying(tie, matrices):
    model = make(tie=tie)
    tables = [model.src_embed[0].lut, model.tgt_embed[0].lut, model.generator.proj]
    assert len({table.weight.data_ptr() for table in tables}) == matrices
    loose = make(tie="none")
    tie_weights(loose)
    assert loose.generator.proj.weight is loose.src_embed[0].lut.weight
    by_part = parameters_by_part(model)
    assert by_part["embeddings"] == V * 16 * (1 if tie == "all" else 2)
    assert by_part["generator"] == V + (V * 16 if tie == "none" else 0)


def test_vocabularies_of_two_sizes_share_no_matrix():
    model = make_model(5, 7, N=1, d_model=8, d_ff=8, h=2)
    assert model.generator.proj.weight is model.tgt_embed[0].lut.weight
    assert model.src_embed[0].lut.weight.shape == (5, 8)
    with pytest.raises(ValueError, match="5 source tokens, 7 target tokens"):
        make_model(5, 7, N=1, d_model=8, d_ff=8, h=2, tie="all")


@pytest.mark.parametrize("tie", ["all", "target", "none"])
def test_saving_and_loading_gives_the_same_model(tie, tmp_path):
    torch.manual_seed(0)
    model = make(tie=tie)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = make(seed=1, tie=tie)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    src, tgt, src_mask, tgt_mask = pairs([(4, 5), (2, 3)])
    assert torch.equal(model(src, tgt, src_mask, tgt_mask), other(src, tgt, src_mask, tgt_mask))
    shared = other.generator.proj.weight is other.src_embed[0].lut.weight
    assert shared == (tie == "all")


def test_first_weights():
    torch.manual_seed(0)
    model = make_model(500, 500, N=1, d_model=64, d_ff=256, h=4)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
    assert model.generator.proj.weight.std().item() == pytest.approx(1 / 8, rel=0.05)
    attention = model.encoder.layers[0].self_attn
    for block in attention.in_proj.weight.split(attention.sizes):  # Glorot: a square matrix each
        assert block.abs().max().item() == pytest.approx(math.sqrt(6 / 128), rel=0.01)
    widest = model.encoder.layers[0].feed_forward.w_1.weight.abs().max()
    assert widest.item() == pytest.approx(math.sqrt(6 / 320), rel=0.01)
    layers = torch.cat([p.flatten() for p in model.decoder.parameters()])
    torch.manual_seed(0)
    initialise(model)
    assert not torch.equal(layers, torch.cat([p.flatten() for p in model.decoder.parameters()]))


def test_layers_start_differently():
    model = make_model(V, V, N=3, d_model=16, d_ff=24, h=4)
    weights = [layer.self_attn.in_proj.weight for layer in model.encoder.layers]
    weights += [layer.self_attn.in_proj.weight for layer in model.decoder.layers]
    weights += [layer.src_attn.in_proj.weight for layer in model.decoder.layers]
    assert len({weight.data_ptr() for weight in weights}) == 9
    assert all(not torch.equal(weights[0], other) for other in weights[1:])


def test_learned_positions_are_used_on_both_sides():
    model = make(positions="learned", max_len=7)
    assert isinstance(model.src_embed[1], LearnedPositions)
    assert model.src_embed[1].pe is not model.tgt_embed[1].pe
    torch.testing.assert_close(make().src_embed[1].pe[0, :7].float(), sinusoid(7, 16))


def test_the_generator_gives_log_probabilities():
    model = make()
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    torch.testing.assert_close(model.generator(x).exp().sum(-1), torch.ones(2, 3).double())
    torch.testing.assert_close(
        model.generator(x).argmax(-1),
        (x @ model.generator.proj.weight.T + model.generator.proj.bias).argmax(-1),
    )


# Weights of others


def test_articles_names_are_translated():
    torch.manual_seed(0)
    state = {"src_embed.1.pe": torch.randn(1, 5, 4), "src_embed.0.lut.weight": torch.randn(3, 4)}
    attention = "encoder.layers.0.self_attn"
    for i in range(4):
        state[f"{attention}.linears.{i}.weight"] = torch.randn(4, 4)
        state[f"{attention}.linears.{i}.bias"] = torch.randn(4)
    state |= {"encoder.norm.a_2": torch.randn(4), "encoder.norm.b_2": torch.randn(4)}
    ours = article_state(state)
    assert set(ours) == {
        "src_embed.0.lut.weight",
        *(
            f"{attention}.{part}_proj.{kind}"
            for part in ("in", "out")
            for kind in ("weight", "bias")
        ),
        "encoder.norm.weight",
        "encoder.norm.bias",
    }
    queries, keys, values = ours[f"{attention}.in_proj.weight"].chunk(3)
    assert torch.equal(queries, state[f"{attention}.linears.0.weight"])
    assert torch.equal(keys, state[f"{attention}.linears.1.weight"])
    assert torch.equal(values, state[f"{attention}.linears.2.weight"])
    assert torch.equal(ours[f"{attention}.out_proj.bias"], state[f"{attention}.linears.3.bias"])
    x = torch.randn(4)
    mean, sample = x.mean(), x.std()  # the article divides by the sample's deviation
    theirs = state["encoder.norm.a_2"] * (x - mean) / sample + state["encoder.norm.b_2"]
    norm = nn.LayerNorm(4, eps=0)
    norm.load_state_dict({k: ours[f"encoder.norm.{k}"] for k in ("weight", "bias")})
    torch.testing.assert_close(norm(x), theirs)
