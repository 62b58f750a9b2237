"""Tests of decoding steps: the fast one is the readable one, for every model that it takes."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.model.attention import attention
from annotated_transformer.model.transformer import EncoderDecoder, make_model
from annotated_transformer.notation import BOS
from annotated_transformer.translation import steps as module
from annotated_transformer.translation.decoding import greedy_decode, greedy_decode_uncached
from annotated_transformer.translation.steps import (
    CHUNK,
    MOST,
    ROOM,
    CachedSteps,
    PackedSteps,
    Screen,
    attend_once,
    bytes_are_fast,
    can_pack,
    first_largest,
    most_probable,
    most_probable_next,
    multiplies_bytes,
    packed,
    start_steps,
)

VOCAB = 300
needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this PyTorch has no oneDNN",
)


needs_bytes = pytest.mark.skipif(
    not multiplies_bytes(), reason="oneDNN does not multiply bytes on this processor"
)


def model(seed: int = 0, **options: object) -> EncoderDecoder:
    torch.manual_seed(seed)
    sizes = {"N": 2, "d_model": 16, "d_ff": 24, "h": 2, "max_len": 60, "tie": "none", **options}
    made = make_model(VOCAB, VOCAB, **sizes).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # biases and gains, too
    return made


def block(seed: int, rows: int, m: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, m + 1, (rows, 1), generator=chance)
    src = torch.randint(4, VOCAB, (rows, m), generator=chance)
    return src, (torch.arange(m) < lengths).unsqueeze(1)


def readable(
    net: EncoderDecoder, src: torch.Tensor, mask: torch.Tensor, beam: int = 1
) -> CachedSteps:
    """The oracle: whole blocks, the model's modules, in float64."""
    net = copy.deepcopy(net).double()
    with torch.no_grad():
        return CachedSteps(net, net.encode(src, mask), mask, 60, beam)


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
    st.data(),
)
def test_fast_is_readable(seed, rows, beam, length, norm, kind, sizes, data):
    net = model(seed, norm=norm, positions=kind, **sizes)
    src, mask = block(seed, rows)
    fast, slow = start_steps(net, src, mask, length, beam), readable(net, src, mask, beam)
    assert isinstance(fast, PackedSteps)
    for _ in range(length):
        tokens = torch.randint(4, VOCAB, (rows * beam,))
        found, expected = fast(tokens), slow(tokens)
        assert found.shape == (rows * beam, VOCAB)
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4)
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
def test_the_comparison_notices_a_wrong_step(monkeypatch):
    net, (src, mask) = model(), block(0, 3)
    slow = readable(net, src, mask)(torch.tensor([4, 5, 6]))
    monkeypatch.setattr(module, "_scaled", lambda attention, parameter: parameter.detach())
    fast = start_steps(net, src, mask, 4)(torch.tensor([4, 5, 6]))
    assert not torch.allclose(fast.double(), slow, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["readable", pytest.param("fast", marks=needs_onednn)])
def test_a_hypothesis_is_its_own_whole_past(kind):
    """The oracle: each output decoded at once, by itself, in float64."""
    net, (src, mask), beam = model(3), block(3, 2), 3
    steps = start_steps(net, src, mask, 20, beam) if kind == "fast" else readable(net, src, mask, 3)
    twice = copy.deepcopy(net).double()
    outputs = torch.empty(2, beam, 0, dtype=torch.long)
    for length in range(1, 21):
        newest = torch.randint(4, VOCAB, (2, beam, 1))
        outputs = torch.cat([outputs, newest], dim=2)
        found = steps(newest.flatten()).view(2, beam, VOCAB).double()
        causal = torch.ones(1, length, length).tril().bool()
        for i in range(2):
            for j in range(beam):
                with torch.no_grad():
                    out = twice(src[i : i + 1], outputs[i, j : j + 1], mask[i : i + 1], causal)
                    expected = twice.generator.proj(out[0, -1])
                assert torch.allclose(found[i, j], expected, rtol=1e-4, atol=1e-4)
        parents = torch.randint(beam, (2, beam))
        steps.follow(parents)
        outputs = torch.stack([outputs[i, parents[i]] for i in range(2)])


@needs_onednn
@settings(max_examples=10)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_greedy_decoding_by_fast_steps_is_the_plain_loop(seed, rows):
    net = model(seed)
    src, mask = block(seed, rows)
    plain = greedy_decode_uncached(net, src, mask, 20, BOS)
    assert torch.equal(greedy_decode(net, src, mask, 20, BOS), plain)


@needs_onednn
def test_products_stay_float32_and_the_setting_is_put_back():
    net, (src, mask) = model(), block(0, 3)
    fast = start_steps(net, src, mask, 4)
    torch.set_float32_matmul_precision("medium")
    try:
        fast(torch.tensor([4, 5, 6]))
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(IndexError):
            fast(torch.tensor([VOCAB, 5, 6]))  # no such token
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_what_is_not_ours_or_not_at_rest_takes_the_readable_step():
    src, mask = block(1, 2)
    cases = {
        "training": model().train(),
        "float64": model().double(),
        "kept weights": model(),
        "hook": model(),
        "another module": model(),
    }
    cases["kept weights"].decoder.layers[1].src_attn.keep_weights = True
    cases["hook"].decoder.layers[0].register_forward_hook(lambda *_: None)
    cases["another module"].decoder.layers[0].feed_forward.w_1 = torch.nn.Sequential(
        torch.nn.Linear(16, 24)
    )
    for name, net in cases.items():
        assert not can_pack(net), name
        assert isinstance(start_steps(net, src, mask, 3), CachedSteps), name
        assert start_steps(net, src, mask, 3)(torch.tensor([4, 5])).isfinite().all(), name


def test_a_source_without_tokens_takes_the_readable_step():
    src, mask = block(1, 2)
    mask = mask & torch.tensor([True, False])[:, None, None]
    steps = start_steps(model(), src, mask, 3)
    assert isinstance(steps, CachedSteps)
    assert steps(torch.tensor([4, 5])).isfinite().all()


@needs_onednn
def test_kept_weights_are_rearranged_once_and_again_after_a_change(monkeypatch):
    net, (src, mask) = model(), block(0, 2)
    made, original = [], module.PackedDecoder
    monkeypatch.setattr(module, "PackedDecoder", lambda m: made.append(m) or original(m))
    tokens = torch.tensor([4, 5])
    with packed(net):
        first = start_steps(net, src, mask, 2)(tokens)
        start_steps(net, src, mask, 2)
        assert len(made) == 1
        with torch.no_grad():
            net.decoder.layers[0].feed_forward.w_1.weight.mul_(2)
        second = start_steps(net, src, mask, 2)(tokens)
        assert len(made) == 2
        assert not torch.allclose(first, second)
        weights = {name: 2 * tensor for name, tensor in net.state_dict().items()}
        for _ in range(2):  # other tensors, whose changes are as many
            weights = {name: tensor.clone() for name, tensor in weights.items()}
            net.load_state_dict(weights, assign=True)
            start_steps(net, src, mask, 2)
        assert len(made) == 4
    start_steps(net, src, mask, 2)
    assert len(made) == 5
    assert not module._kept


def test_weights_without_a_count_of_changes_take_the_readable_step():
    with torch.inference_mode():
        net = model()
    src, mask = block(0, 2)
    steps = start_steps(net, src, mask, 3)
    assert isinstance(steps, CachedSteps)
    assert steps(torch.tensor([4, 5])).isfinite().all()


def test_outputs_can_be_changed_and_used_in_training():
    net, (src, mask) = model(), block(0, 2)
    out = greedy_decode(net, src, mask, 5, BOS)
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
def test_most_probable_is_argmax(seed, rows, width, ties):
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if ties else logits
    assert torch.equal(most_probable(logits), logits.argmax(-1))
    assert torch.equal(most_probable(-logits), (-logits).argmax(-1))


def rows_and_matrix(
    seed: int, rows: int, vocab: int, width: int, apart: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, and a vocabulary's matrix and bias; some tokens are alike, some forbidden."""
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, width, generator=chance) * torch.rand(1, generator=chance) * 3
    bias = torch.randn(vocab, generator=chance)
    close = torch.randint(vocab, (vocab // 2,), generator=chance)
    weight[: vocab // 2] = weight[close] + apart * torch.randn(vocab // 2, width, generator=chance)
    bias[: vocab // 2] = bias[close]
    bias[torch.rand(vocab, generator=chance) < 0.2] = -math.inf
    bias[-1] = 0.0  # something is allowed
    return 5 * torch.randn(rows, width, generator=chance), weight, bias


@needs_bytes
@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(1, 33),
    st.integers(2, MOST * CHUNK),
    st.integers(1, 90),
    st.sampled_from([1e-5, 1e-3, 1e-2]),
)
def test_the_screen_finds_what_the_whole_product_finds(seed, rows, vocab, width, apart):
    x, weight, bias = rows_and_matrix(seed, rows, vocab, width, apart)
    exact = x.double() @ weight.double().T + bias.double()
    found = Screen(weight, bias)(x)
    assert found is not None  # so few chunks are never too many
    chosen = exact.gather(1, found.unsqueeze(1))
    rounding = 1e-6 * x.norm(dim=1, keepdim=True) * weight.norm(dim=1).max()  # float32's own
    assert (chosen >= exact.amax(1, keepdim=True) - rounding).all()


@needs_bytes
@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(1, 33),
    st.integers(2, 700),
    st.integers(1, 700),
    st.sampled_from([0, 1, 100]),
)
def test_the_bound_of_the_rough_product_holds(seed, rows, vocab, width, first):
    x, weight, bias = rows_and_matrix(seed, rows, vocab, width)
    x[:, 0] *= first  # a number far larger than the others leaves them few digits
    screen = Screen(weight, bias)
    rough, error = screen.rough(x)
    rough = rough.flatten(1)
    assert (rough[:, vocab:] == -math.inf).all()
    exact = x.double() @ weight.double().T + bias.double()
    allowed = bias.isfinite()
    off = (rough[:, :vocab] - exact)[:, allowed]
    assert (off.abs() <= error.double().unsqueeze(1) + 1e-6 * exact[:, allowed].abs()).all()
    assert (rough[:, :vocab][:, ~allowed] == -math.inf).all()


@needs_bytes
def test_without_the_bound_the_screen_is_wrong():
    x, weight, bias = rows_and_matrix(0, 400, 900, 64, apart=3e-3)
    screen = Screen(weight, bias)
    wanted = (x @ weight.T + bias).argmax(-1)
    assert torch.equal(screen(x), wanted)
    rough = screen.rough
    screen.rough = lambda x: (rough(x)[0], torch.zeros(len(x)))
    assert not torch.equal(screen(x), wanted)


@needs_bytes
def test_the_screen_gives_up_where_it_must():
    x, weight, bias = rows_and_matrix(0, 3, (MOST + 1) * CHUNK, 8)
    assert Screen(weight, bias)(x) is not None
    assert Screen(torch.zeros_like(weight), torch.zeros_like(bias))(x) is None  # all are alike
    for number in (math.nan, math.inf):
        x[1, 2] = number
        assert Screen(weight, bias)(x) is None
    x[1, 2] = 0.0
    assert Screen(weight, torch.full_like(bias, -math.inf))(x) is None
    weight[4, 4] = math.nan
    assert Screen(weight, bias)(x) is None


@needs_bytes
def test_one_row_is_multiplied_as_many_are():
    x, weight, bias = rows_and_matrix(0, 3, 900, 256)
    screen = Screen(weight, bias)
    for row in x.split(1):
        rough, error = screen.rough(row)
        together, errors = screen.rough(torch.cat([row, row, row]))
        assert torch.equal(rough.expand(3, -1, -1), together)
        assert torch.equal(error.expand(3), errors)


def broken(*_: object) -> None:
    raise RuntimeError("no such kernel")


@needs_bytes
@pytest.mark.parametrize("fault", ["no product", "sums that overflow"])
def test_bytes_are_used_only_where_they_multiply(fault, monkeypatch):
    def overflowing(self, x):
        return (rough(self, x)[0] * 0.99, torch.zeros(len(x)))

    rough = Screen.rough
    monkeypatch.setattr(Screen, "rough", overflowing if "sums" in fault else broken)
    assert not multiplies_bytes.__wrapped__()
    monkeypatch.setattr(module, "multiplies_bytes", lambda: False)
    assert not bytes_are_fast.__wrapped__()


@needs_bytes
@settings(max_examples=10)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_greedy_decoding_with_a_screen_is_the_plain_loop(seed, rows):
    net, calls = model(seed), []
    src, mask = block(seed, rows)
    plain = greedy_decode_uncached(net, src, mask, 20, BOS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WORTH", 0)
        patch.setattr(module, "bytes_are_fast", lambda: True)
        original = Screen.__call__
        patch.setattr(Screen, "__call__", lambda self, x: calls.append(1) or original(self, x))
        assert torch.equal(greedy_decode(net, src, mask, 20, BOS), plain)
        assert len(calls) == 19


@pytest.mark.parametrize("kind", [CachedSteps, pytest.param(PackedSteps, marks=needs_onednn)])
def test_where_the_screen_does_not_pay_all_logits_are_computed(kind, monkeypatch):
    net, (src, mask) = model(), block(0, 3)
    tokens = torch.tensor([4, 5, 6])
    wanted = readable(net, src, mask)(tokens).argmax(-1)
    if kind is CachedSteps:
        monkeypatch.setattr(module, "can_pack", lambda model: False)
    monkeypatch.setattr(module, "Screen", None)  # would not do
    steps = start_steps(net, src, mask, 4)
    assert isinstance(steps, kind)
    assert torch.equal(most_probable_next(steps, tokens), wanted)


@needs_onednn
def test_measuring_changes_no_random_numbers_and_no_setting():
    bytes_are_fast.cache_clear()
    torch.manual_seed(0)
    before, setting = torch.get_rng_state(), torch.get_float32_matmul_precision()
    bytes_are_fast()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_float32_matmul_precision() == setting


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_first_largest_is_argmax(seed, rows):
    values = torch.randn(rows, 7, generator=torch.Generator().manual_seed(seed)).round()
    row, token = torch.ones(rows, 7).nonzero().unbind(1)
    found = first_largest(values.flatten(), row, token)
    assert torch.equal(found, values.argmax(-1))


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 9), st.integers(1, 5))
def test_one_query_is_attention(seed, pairs, m, d_k):
    torch.manual_seed(seed)
    q, k = torch.randn(pairs, 1, d_k).double(), torch.randn(pairs, m, d_k).double()
    v, seen = torch.randn(pairs, m, 3).double(), torch.rand(pairs, 1, m) < 0.6
    seen[..., 0] = True
    hidden = torch.zeros(pairs, 1, m).double().masked_fill(~seen, -math.inf)
    expected = attention(q, k, v, seen)[0]
    assert torch.allclose(attend_once(q / d_k**0.5, k, v, hidden), expected, atol=1e-12)
    everything = attention(q, k, v)[0]
    assert torch.allclose(attend_once(q / d_k**0.5, k, v), everything, atol=1e-12)
