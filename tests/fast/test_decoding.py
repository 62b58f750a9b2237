"""Tests of decoding with KV caches: each step is that of the readable layer."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotated_transformer.fast import decoding as module
from annotated_transformer.fast.decoding import (
    ROOM,
    CachedSteps,
    attend_once,
    keep_decoder_weights,
    start_steps,
)
from annotated_transformer.fast.ensemble import Ensemble
from annotated_transformer.fast.linear import CHUNK, OnednnLinear, PlainLinear, most_probable
from annotated_transformer.fast.model import FastModel
from annotated_transformer.fast.quantized import DecodingPrecision
from annotated_transformer.fast.screen import Screen, multiplies_bytes
from annotated_transformer.model.architecture import EncoderDecoder, SublayerConnection
from annotated_transformer.model.attention import attention
from annotated_transformer.model.multi_head import MultiHeadedAttention
from annotated_transformer.model.transformer import make_model
from annotated_transformer.notation import BOS
from annotated_transformer.translation.greedy import (
    PrefixSteps,
    Steps,
    greedy_decode,
    readable_steps,
)
from tests.parts import part_of

VOCAB = 300
needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this PyTorch has no oneDNN",
)


needs_bytes = pytest.mark.skipif(
    not multiplies_bytes(), reason="oneDNN does not multiply bytes on this processor"
)


def model(seed: int = 0, **options: Any) -> EncoderDecoder:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "N": 2,
        "d_model": 16,
        "d_ff": 24,
        "h": 2,
        "max_len": 60,
        "tie": "none",
        **options,
    }
    made = make_model(VOCAB, VOCAB, **sizes).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # biases and gains, too
    return made


def block(seed: int, rows: int, m: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, m + 1, (rows, 1), generator=generator)
    src = torch.randint(4, VOCAB, (rows, m), generator=generator)
    return src, (torch.arange(m) < lengths).unsqueeze(1)


def readable(net: EncoderDecoder, src: torch.Tensor, mask: torch.Tensor, beam: int = 1) -> Steps:
    """The oracle: whole prefixes by the readable modules, in float64."""
    return readable_steps(copy.deepcopy(net).double(), src, mask, beam)


def by_fast_steps(
    net: EncoderDecoder, src: torch.Tensor, mask: torch.Tensor, max_len: int
) -> torch.Tensor:
    """Decode greedily, a step at a time, without an end."""
    steps, ys = start_steps(net, src, mask), torch.full((len(src), 1), BOS)
    for _ in range(max_len - 1):
        ys = torch.cat([ys, steps.most_probable(ys[:, -1]).unsqueeze(1)], dim=1)
    return ys


@needs_onednn
@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, ROOM + 3),
    st.sampled_from(["post", "pre"]),
    st.sampled_from(["sinusoid", "learned"]),
    st.sampled_from([{}, {"h": 4}, {"d_k": 5, "d_v": 3}, {"h": 3, "d_k": 6, "d_v": 6}]),
    st.booleans(),
    st.data(),
)
def test_fast_is_readable(
    seed: int,
    rows: int,
    beam: int,
    length: int,
    norm: str,
    kind: str,
    sizes: dict[str, int],
    exact: bool,
    data: st.DataObject,
) -> None:
    net = model(seed, norm=norm, positions=kind, **sizes)
    src, mask = block(seed, rows)
    net = net.double() if exact else net
    fast, slow = start_steps(net, src, mask, beam), readable(net, src, mask, beam)
    assert isinstance(fast, CachedSteps)
    for _ in range(length):
        tokens = torch.randint(4, VOCAB, (rows * beam,))
        found, expected = fast(tokens).double().log_softmax(-1), slow(tokens)
        assert found.shape == (rows * beam, VOCAB)
        rtol, atol = (0, 1e-10) if exact else (1e-4, 1e-4)
        assert torch.allclose(found, expected, rtol=rtol, atol=atol)
        if data.draw(st.booleans()):  # hypotheses go on from others of their sentence
            parents = torch.randint(beam, (rows, beam))
            fast.follow(parents)
            slow.follow(parents)
        if data.draw(st.booleans()):  # sentences leave, change places, or come twice
            kept = torch.tensor(
                data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=6))
            )
            fast.select(kept)
            slow.select(kept)
            rows = len(kept)


@needs_onednn
def test_the_comparison_notices_a_wrong_step(monkeypatch: pytest.MonkeyPatch) -> None:
    net, (src, mask) = model(), block(0, 3)
    slow, joined = readable(net, src, mask)(torch.tensor([4, 5, 6])), module.fuse_linears
    monkeypatch.setattr(module, "fuse_linears", lambda *linears, **_: joined(*linears))
    fast = start_steps(net, src, mask)(torch.tensor([4, 5, 6]))
    assert not torch.allclose(fast.double().log_softmax(-1), slow, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["readable", pytest.param("fast", marks=needs_onednn)])
def test_a_hypothesis_is_its_own_whole_past(kind: str) -> None:
    """The oracle: each output decoded at once, by itself, in float64."""
    net, (src, mask), beam = model(3), block(3, 2), 3
    steps = start_steps(net, src, mask, beam) if kind == "fast" else readable(net, src, mask, 3)
    twice = copy.deepcopy(net).double()
    outputs = torch.empty(2, beam, 0, dtype=torch.long)
    for length in range(1, 21):
        newest = torch.randint(4, VOCAB, (2, beam, 1))
        outputs = torch.cat([outputs, newest], dim=2)
        found = steps(newest.flatten()).view(2, beam, VOCAB).double().log_softmax(-1)
        causal = torch.ones(1, length, length).tril().bool()
        for i in range(2):
            for j in range(beam):
                with torch.no_grad():
                    out = twice(src[i : i + 1], outputs[i, j : j + 1], mask[i : i + 1], causal)
                    expected = twice.generator(out[0, -1])
                assert torch.allclose(found[i, j], expected, rtol=1e-4, atol=1e-4)
        parents = torch.randint(beam, (2, beam))
        steps.follow(parents)
        outputs = torch.stack([outputs[i, parents[i]] for i in range(2)])


@needs_onednn
@settings(max_examples=10)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_greedy_decoding_by_fast_steps_is_the_plain_loop(seed: int, rows: int) -> None:
    net = model(seed)
    src, mask = block(seed, rows)
    plain = greedy_decode(net, src, mask, 20, BOS)
    assert torch.equal(by_fast_steps(net, src, mask, 20), plain)


@needs_onednn
def test_products_stay_float32_and_the_setting_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    net, (src, mask) = model(), block(0, 3)
    fast = start_steps(net, src, mask)
    seen, once = set(), module.attend_once

    def watched(*inputs: Any) -> Tensor:
        seen.add(torch.get_float32_matmul_precision())
        return once(*inputs)

    monkeypatch.setattr(module, "attend_once", watched)
    torch.set_float32_matmul_precision("medium")
    try:
        fast(torch.tensor([4, 5, 6]))
        assert seen == {"highest"}
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(IndexError):
            fast(torch.tensor([VOCAB, 5, 6]))  # no such token
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_program_with_the_newer_setting_of_precision_decodes() -> None:
    net, (src, mask) = model(), block(0, 3)
    wanted = start_steps(net, src, mask)(torch.tensor([4, 5, 6]))
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        net = model()
        found = start_steps(net, src, mask)(torch.tensor([4, 5, 6]))
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found, wanted)


def test_what_cannot_be_taken_over_takes_the_readable_step() -> None:
    src, mask = block(1, 2)
    cases = {"training": model().train(), "hook": model(), "another module": model()}
    cases["hook"].get_submodule("decoder.layers.0").register_forward_hook(lambda *_: None)
    w_1 = torch.nn.Sequential(torch.nn.Linear(16, 24))
    cases["another module"].set_submodule("decoder.layers.0.feed_forward.w_1", w_1)
    cases |= {"no dropout": model(), "other heads": model(), "no layers": model()}
    for name, part in cases["no dropout"].named_modules():
        if isinstance(part, torch.nn.Dropout):
            cases["no dropout"].set_submodule(name, torch.nn.Identity())
    other = part_of(cases["other heads"], "decoder.layers.1.src_attn", MultiHeadedAttention)
    other.h, other.d_k, other.d_v = other.h // 2, other.d_k * 2, other.d_v * 2
    cases["no layers"].set_submodule("decoder.layers", torch.nn.ModuleList())
    for name, net in cases.items():
        steps = start_steps(net, src, mask)
        assert isinstance(steps, PrefixSteps), name
        assert steps(torch.tensor([4, 5])).isfinite().all(), name


def test_each_sub_layer_has_its_own_order() -> None:
    net, (src, mask), tokens = model(), block(1, 3), torch.tensor([4, 5, 6])
    part_of(net, "decoder.layers.1.sublayer.1", SublayerConnection).order = "pre"
    fast, slow = start_steps(net, src, mask), readable(net, src, mask)
    assert not isinstance(fast, PrefixSteps)
    found = fast(tokens).double().log_softmax(-1)
    torch.testing.assert_close(found, slow(tokens), rtol=1e-4, atol=1e-4)


def test_products_by_onednn_are_for_large_matrices_in_float32_on_a_cpu() -> None:
    assert type(module.fuse_linears(torch.nn.Linear(128, 384))) is PlainLinear
    layer = torch.nn.Linear(256, 512)
    assert type(module.fuse_linears(layer)) is OnednnLinear
    assert type(module.fuse_linears(layer.double())) is PlainLinear
    assert type(module.fuse_linears(layer.bfloat16())) is PlainLinear


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 9), st.booleans())
def test_both_products_are_one(seed: int, rows: int, wide: bool) -> None:
    torch.manual_seed(seed)
    weight, bias = torch.randn(40 if wide else 3, 7), torch.randn(40 if wide else 3)
    x, residual = torch.randn(rows, 7), torch.randn(rows, len(weight))
    plain, packed = PlainLinear(weight, bias), OnednnLinear(weight, bias)
    for found, expected in (
        (packed(x), plain(x)),
        (packed.relu(x), plain.relu(x)),
        (packed.add(x, residual), plain.add(x, residual)),
        (plain(x), x.double() @ weight.double().T + bias),
    ):
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-4)


def test_a_source_without_tokens_gives_what_the_readable_step_gives() -> None:
    src, mask = block(1, 2)
    mask = mask & torch.tensor([True, False])[:, None, None]
    net, tokens = model().double(), torch.tensor([4, 5])
    steps = start_steps(net, src, mask)
    assert isinstance(steps, CachedSteps)
    expected = readable(net, src, mask)(tokens)
    assert torch.allclose(steps(tokens).log_softmax(-1), expected, rtol=0, atol=1e-10)


@needs_onednn
def test_kept_weights_are_rearranged_once_and_again_after_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, (src, mask) = model(), block(0, 2)
    made, original = [], module.DecoderWeights

    def counted(net: EncoderDecoder, precision: DecodingPrecision) -> module.DecoderWeights:
        made.append(net)
        return original(net, precision)

    monkeypatch.setattr(module, "DecoderWeights", counted)
    tokens = torch.tensor([4, 5])
    with keep_decoder_weights(net):
        first = start_steps(net, src, mask)(tokens)
        start_steps(net, src, mask)
        assert len(made) == 1
        with torch.no_grad():
            net.get_parameter("decoder.layers.0.feed_forward.w_1.weight").mul_(2)
        second = start_steps(net, src, mask)(tokens)
        assert len(made) == 2
        assert not torch.allclose(first, second)
        weights = {name: 2 * tensor for name, tensor in net.state_dict().items()}
        for _ in range(2):  # other tensors, whose changes are as many
            weights = {name: tensor.clone() for name, tensor in weights.items()}
            net.load_state_dict(weights, assign=True)
            start_steps(net, src, mask)
        assert len(made) == 4
    start_steps(net, src, mask)
    assert len(made) == 5
    assert not module._kept


def test_contexts_of_kept_weights_nest() -> None:
    net = model()
    with keep_decoder_weights(net, "bfloat16"):
        with keep_decoder_weights(net):
            assert module._kept[net][0] == "float32"
        assert module._kept[net][0] == "bfloat16"
    assert not module._kept


def test_of_an_ensemble_the_members_weights_are_kept() -> None:
    nets = [model(0), model(1)]
    with keep_decoder_weights(Ensemble(nets), "bfloat16"):
        assert [module._kept[net][0] for net in nets] == ["bfloat16"] * 2
    assert not module._kept


@pytest.mark.parametrize("fast", [False, True])
def test_below_float32_the_encoder_takes_bfloat16_where_that_is_faster(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, (src, mask), seen = model(), block(0, 3), []
    encode = FastModel.encode

    def watched(self: Any, *inputs: Any) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return encode(self, *inputs)

    monkeypatch.setattr(FastModel, "encode", watched)
    monkeypatch.setattr(module, "bfloat16_is_fast", lambda: fast)
    with keep_decoder_weights(net, "bfloat16"):
        steps = start_steps(net, src, mask)
    assert seen == [fast]
    assert isinstance(steps, module.CachedSteps)
    assert steps.layers[0].source_keys.dtype == torch.float32


def test_weights_without_a_count_of_changes_are_rearranged_each_time() -> None:
    with torch.inference_mode():
        net = model()
    src, mask = block(0, 2)
    tokens = torch.tensor([4, 5])
    with keep_decoder_weights(net):
        first = start_steps(net, src, mask)(tokens)
        with torch.inference_mode():
            net.get_parameter("decoder.layers.0.feed_forward.w_1.weight").mul_(2)
        assert not torch.allclose(first, start_steps(net, src, mask)(tokens))


def test_outputs_can_be_changed_and_used_in_training() -> None:
    net, (src, mask) = model(), block(0, 2)
    out = by_fast_steps(net, src, mask, 5)
    out[0, 1] = 7
    net.train()
    loss = net.generator(net(src, out, mask, torch.ones(1, 5, 5).tril().bool())).sum()
    loss.backward()


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.one_of(st.integers(1, 9), st.integers(3 * CHUNK, 6 * CHUNK)),
    st.booleans(),
)
def test_most_probable_is_argmax(seed: int, rows: int, width: int, ties: bool) -> None:
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if ties else logits
    assert torch.equal(most_probable(logits), logits.argmax(-1))
    assert torch.equal(most_probable(-logits), (-logits).argmax(-1))


@needs_bytes
@settings(max_examples=10)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_greedy_decoding_with_a_screen_is_the_plain_loop(seed: int, rows: int) -> None:
    net, calls, original = model(seed), [], Screen.__call__

    def counted(screen: Screen, x: Tensor) -> Tensor | None:
        calls.append(1)
        return original(screen, x)

    src, mask = block(seed, rows)
    plain = greedy_decode(net, src, mask, 20, BOS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WORTH", 0)
        patch.setattr(module, "bytes_are_fast", lambda: True)
        patch.setattr(Screen, "__call__", counted)
        assert torch.equal(by_fast_steps(net, src, mask, 20), plain)
        assert len(calls) == 19


def test_where_the_screen_does_not_pay_all_logits_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, (src, mask) = model(), block(0, 3)
    tokens = torch.tensor([4, 5, 6])
    wanted = readable(net, src, mask)(tokens).argmax(-1)
    monkeypatch.setattr(module, "Screen", None)  # would not do
    assert torch.equal(start_steps(net, src, mask).most_probable(tokens), wanted)


@settings(max_examples=30)
@given(
    st.integers(0, 10**6), st.sampled_from([1, 6, 80, 600]), st.integers(1, 17), st.integers(1, 5)
)
def test_one_query_is_attention(seed: int, pairs: int, m: int, d_k: int) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(pairs, 1, d_k).double(), torch.randn(pairs, m, d_k).double()
    v, seen = torch.randn(pairs, m, 3).double(), torch.rand(pairs, 1, m) < 0.6
    seen[..., 0] = True
    hidden = torch.zeros(pairs, 1, m).double().masked_fill(~seen, -math.inf)
    expected = attention(q, k, v, seen)[0]
    assert torch.allclose(attend_once(q / d_k**0.5, k, v, hidden), expected, atol=1e-12)
    everything = attention(q, k, v)[0]
    assert torch.allclose(attend_once(q / d_k**0.5, k, v, None), everything, atol=1e-12)
