"""The convolutional translator against PyTorch's convolutions and loops; what it may not see."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from annotated_transformer.background import convolutional
from annotated_transformer.background.convolutional import (
    ConvolutionalTranslator,
    ConvolutionConfig,
    ConvolutionSteps,
    GatedConvolution,
    Source,
    SourceAttention,
    add_signals,
    windows,
)
from annotated_transformer.fast.loss import fast_batch_loss
from annotated_transformer.model.transformer import build_model, tiny
from annotated_transformer.notation import BOS, PAD
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.loop import batch_loss
from annotated_transformer.translation.greedy import PrefixSteps
from tests.parts import part_of

VOCAB = 9
seeds = st.integers(0, 2**31)
kernels = st.integers(1, 5)
depths = st.integers(1, 3)
batches = st.lists(st.integers(1, 7), min_size=1, max_size=4)  # lengths of sentences


def make(
    seed: int = 0, kernel: int = 3, layers: int = 2, **options: Any
) -> ConvolutionalTranslator:
    """Build a small float64 model whose weights, biases too, are large enough to matter."""
    torch.manual_seed(seed)
    sizes = {"width": 6, "dropout": 0.0, "max_len": 24} | options
    model = ConvolutionConfig(kernel=kernel, layers=layers, **sizes).build(VOCAB, VOCAB)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(4, VOCAB, shape)


def sources(lengths: Sequence[int], more: int = 0) -> tuple[Tensor, Tensor]:
    """Return random sentences with padding, ``more`` positions longer than needed."""
    keep = torch.arange(max(lengths) + more) < torch.tensor(lengths).unsqueeze(1)
    return tokens(*keep.shape).where(keep, torch.tensor(PAD)), keep.unsqueeze(1)


def grads(y: Tensor, model: nn.Module) -> tuple[Tensor, ...]:
    steering = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
    return torch.autograd.grad(y, list(model.parameters()), steering)


def assert_equal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


# An independent computation: PyTorch's convolution, and loops over positions.


def oracle_convolution(layer: GatedConvolution, x: Tensor, left: int) -> Tensor:
    """Return the gated convolution of ``x (n, width)``, by ``conv1d`` and the sigmoid."""
    kernel, width = layer.kernel, x.size(1)
    weight = layer.linear.weight.view(2 * width, kernel, width).transpose(1, 2)
    padded = F.pad(x.T, (left, kernel - 1 - left))
    both = F.conv1d(padded.unsqueeze(0), weight, layer.linear.bias)[0].T  # (n, 2 * width)
    return both[:, :width] * both[:, width:].sigmoid()


def oracle(model: ConvolutionalTranslator, src: Tensor, tgt: Tensor) -> Tensor:
    """Return the decoder's output for one pair of sentences ``(m,)`` and ``(n,)``."""
    half, m = 0.5**0.5, len(src)
    words, places = (model.get_parameter(f"src_embed.{n}.weight") for n in ("words", "places"))
    e = z = words[src] + places[:m]
    for i in range(model.config.layers):
        reader = part_of(model, f"encoder.layers.{i}", GatedConvolution)
        z = half * (z + oracle_convolution(reader, z, (reader.kernel - 1) // 2))
    g = x = model.tgt_embed.words.weight[tgt] + model.tgt_embed.places.weight[: len(tgt)]
    for layer in model.decoder_layers:
        h = oracle_convolution(layer.convolution, x, layer.convolution.kernel - 1)
        query, rows = layer.attention.query, []
        for i in range(len(tgt)):
            q = half * (query.weight @ h[i] + query.bias + g[i])
            powers = torch.stack([(q @ z[j]).exp() for j in range(m)])
            c = sum(powers[j] / powers.sum() * half * (z[j] + e[j]) for j in range(m))
            c = m * math.sqrt(1 / m) * c
            rows.append(half * (x[i] + half * (h[i] + c)))
        x = torch.stack(rows)
    return x


@settings(max_examples=20)
@given(seeds, kernels, depths, st.integers(1, 6), st.integers(1, 6))
def test_equals_the_equations_in_value_and_gradient(
    seed: int, kernel: int, layers: int, m: int, n: int
) -> None:
    model = make(seed, kernel, layers)
    src, tgt = tokens(1, m), tokens(1, n)
    ours = model(src, tgt, None, None)[0]
    theirs = oracle(model, src[0], tgt[0])
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    used = nn.ModuleList(m for name, m in model.named_children() if name != "generator")
    assert_equal(grads(ours, used), grads(theirs, used))


@settings(max_examples=40)
@given(seeds, kernels, st.integers(1, 7), st.booleans())
def test_windows_are_what_a_loop_finds(seed: int, kernel: int, n: int, causal: bool) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, n, 3)
    left = kernel - 1 if causal else (kernel - 1) // 2
    for row in range(2):
        for i in range(n):
            seen = range(i - left, i - left + kernel)
            expected = [x[row, j] if 0 <= j < n else torch.zeros(3) for j in seen]
            assert torch.equal(windows(x, kernel, causal)[row, i], torch.cat(expected))


# Padding and the future.


def padding_shows(seed: int, kernel: int, layers: int, lengths: Sequence[int], more: int) -> bool:
    """Tell whether a sentence fares otherwise beside longer ones than alone."""
    model = make(seed, kernel, layers)
    (src, keep), tgt = sources(lengths, more), tokens(len(lengths), 4)
    together = model(src, tgt, keep, None)
    alone = [
        model(src[i : i + 1, :m], tgt[i : i + 1], None, None)[0] for i, m in enumerate(lengths)
    ]
    return not torch.allclose(together, torch.stack(alone), rtol=1e-9, atol=1e-10)


@settings(max_examples=30)
@given(seeds, kernels, depths, batches, st.integers(0, 3))
def test_padding_changes_nothing(
    seed: int, kernel: int, layers: int, lengths: list[int], more: int
) -> None:
    assert not padding_shows(seed, kernel, layers, lengths, more)


def test_padding_changes_nothing_in_the_gradient() -> None:
    model = make()
    (src, keep), tgt = sources([2, 5, 3], more=2), tokens(3, 4)
    together = grads(model(src, tgt, keep, None).sum(), model.encoder)
    alone = sum(
        model(src[i : i + 1, :m], tgt[i : i + 1], None, None).sum() for i, m in enumerate((2, 5, 3))
    )
    assert_equal(together, grads(alone, model.encoder))


def test_padding_that_is_not_set_to_zero_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutional, "_without", lambda x, padding: x)
    assert padding_shows(0, 3, 2, [2, 5], 0)


def test_root_that_counts_padding_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Source.of

    def careless(memory: Tensor, src_mask: Tensor | None) -> Source:
        source = plain(memory, src_mask)
        source.scale = plain(memory, None).scale
        return source

    monkeypatch.setattr(Source, "of", careless)
    assert padding_shows(0, 3, 2, [2, 5], 0)


def test_attention_to_padding_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Source.of

    def careless(memory: Tensor, src_mask: Tensor | None) -> Source:
        source = plain(memory, src_mask)
        source.real = torch.ones_like(source.real)
        return source

    monkeypatch.setattr(Source, "of", careless)
    assert padding_shows(0, 3, 2, [2, 5], 0)


@settings(max_examples=30)
@given(seeds, batches)
def test_memory_of_padding_is_zero(seed: int, lengths: list[int]) -> None:
    src, keep = sources(lengths, more=2)
    memory = make(seed).encode(src, keep)
    assert (memory[~keep.squeeze(1)] == 0).all()
    assert (memory[keep.squeeze(1)] != 0).all()


def future_shows(model: ConvolutionalTranslator, seed: int, n: int, place: int) -> bool:
    """Tell whether an earlier output changes with the target token at ``place``."""
    torch.manual_seed(seed)
    src, tgt = tokens(1, 4), tokens(1, n)
    changed = tgt.clone()
    changed[0, place] = 4 if tgt[0, place] > 4 else 5
    before, after = (model(src, t, None, None)[0, :place] for t in (tgt, changed))
    return not torch.equal(before, after)


@settings(max_examples=30)
@given(seeds, kernels, depths, st.integers(2, 8), st.data())
def test_future_does_not_show(
    seed: int, kernel: int, layers: int, n: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, n - 1))
    assert not future_shows(make(seed, kernel, layers), seed, n, place)


@pytest.mark.parametrize("training", [False, True])
def test_centred_windows_in_the_decoder_look_into_the_future(training: bool) -> None:
    model = make().train(training)
    for layer in model.decoder_layers:
        assert layer.convolution.causal
        layer.convolution.causal = False
    assert future_shows(model, 0, 6, 4)


@pytest.mark.parametrize(("kernel", "layers"), [(1, 2), (2, 3), (3, 1), (3, 4), (4, 2), (5, 3)])
def test_receptive_field_grows_by_kernel_less_one_a_layer(kernel: int, layers: int) -> None:
    model, length = make(kernel=kernel, layers=layers), 21
    src = tokens(1, length)
    words: Any = model.get_submodule("src_embed.words")
    rows = words(src).detach().requires_grad_()
    words.forward = lambda _: rows
    keys = model.encode(src, None)[0, length // 2, : rows.size(-1)]
    (slope,) = torch.autograd.grad(keys.sum(), rows)
    assert (slope[0].abs().sum(-1) > 0).sum() == 1 + layers * (kernel - 1)


# Steps.


def follow_all(
    model: ConvolutionalTranslator, data_seed: int, lengths: Sequence[int], beam: int, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run both kinds of steps through random tokens, choices and survivors; yield logits."""
    torch.manual_seed(data_seed)
    src, keep = sources(lengths)
    quick = model.start_steps(src, keep, beam)
    slow = PrefixSteps(model, model.encode(src, keep), keep, beam)
    assert isinstance(quick, ConvolutionSteps)
    alive = len(lengths)
    for _ in range(count):
        written = tokens(alive * beam)
        yield quick(written), slow(written)
        parents = torch.randint(0, beam, (alive, beam))
        chosen = torch.randperm(alive)[: int(torch.randint(1, alive + 1, ()))]
        for steps in (quick, slow):
            steps.follow(parents)
            steps.select(chosen)
        alive = len(chosen)


@settings(max_examples=40)
@given(seeds, kernels, depths, batches, st.integers(1, 4), st.integers(1, 9))
def test_steps_equal_those_that_read_everything_again(
    seed: int, kernel: int, layers: int, lengths: list[int], beam: int, count: int
) -> None:
    model = make(seed, kernel, layers)
    for quick, slow in follow_all(model, seed, lengths, beam, count):
        torch.testing.assert_close(quick, slow, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("method", ["follow", "select"])
def test_steps_that_do_not_follow_are_noticed(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def careless(self: ConvolutionSteps, chosen: Tensor) -> None:
        if method == "select":  # the first ones, whichever were chosen
            self.kept = [kept[: len(chosen)] for kept in self.kept]
            self.memory, self.src_mask = self.memory[: len(chosen)], self.src_mask[: len(chosen)]
            self.source = Source.of(self.memory, self.src_mask)

    monkeypatch.setattr(ConvolutionSteps, method, careless)
    pairs = list(follow_all(make(), 1, [3, 5, 2, 4], 3, 6))
    assert not all(torch.allclose(quick, slow) for quick, slow in pairs)


def test_steps_keep_the_same_however_long_the_output() -> None:
    model = make(kernel=4)
    src, keep = sources([3, 5])
    steps = model.start_steps(src, keep, beam=2)
    shapes = []
    for _ in range(20):
        steps(tokens(4))
        shapes.append([tuple(kept.shape) for kept in steps.kept])
    assert shapes == [[(2, 2, 3, 6)] * 2] * 20


def test_steps_of_no_sentence() -> None:
    model = make()
    steps = model.start_steps(*sources([3, 5]), beam=2)
    steps.select(torch.tensor([], dtype=torch.long))
    assert steps(torch.tensor([], dtype=torch.long)).shape == (0, VOCAB)


def test_the_loss_of_kept_rows_is_that_of_the_whole() -> None:
    model = make()
    batch = Batch(torch.tensor([[4, 5, 6, 2], [7, 2, 0, 0]]), torch.tensor([[1, 5, 6, 2]] * 2))
    fast, slow = fast_batch_loss(model, batch, 0.1), batch_loss(model, batch, 0.1)
    for mine, yours in zip(fast, slow, strict=True):
        torch.testing.assert_close(mine, yours, rtol=0, atol=1e-9)


# Lengths, sizes, numbers of few bits.


def test_too_many_positions_are_refused_by_their_number() -> None:
    model = make(max_len=5)
    assert model.max_len == 5
    fits, long = tokens(1, 5), tokens(1, 6)
    model(fits, fits, None, None)
    steps = model.start_steps(fits, fits.unsqueeze(1) > 0)
    for _ in range(5):
        steps(tokens(1))
    told = "6 tokens is longer than the model's 5 positions"
    with pytest.raises(IndexError, match=told):
        model.encode(long, None)
    with pytest.raises(IndexError, match=told):
        model(fits, long, None, None)
    with pytest.raises(IndexError, match=told):
        steps(tokens(1))


@pytest.mark.parametrize(
    ("name", "value"),
    [("width", 0), ("kernel", 0), ("layers", -1), ("max_len", 0), ("dropout", 1.0)],
)
def test_sizes_that_make_no_model_are_refused(name: str, value: float) -> None:
    sizes: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=name):
        ConvolutionConfig(**sizes)


def test_about_as_many_parameters_as_the_tiny_transformer() -> None:
    def apart(model: nn.Module, words: int) -> int:
        return sum(p.numel() for p in model.parameters()) - words

    ours = apart(ConvolutionConfig().build(50, 60), (50 + 60 + 60) * 128 + 60)
    theirs = apart(build_model(50, 50, tiny), 50 * 128 + 50)
    assert abs(ours / theirs - 1) < 0.05


def test_a_source_without_words_gives_numbers() -> None:
    model = make()
    src = torch.tensor([[5, 6], [PAD, PAD]])
    out = model(src, tokens(2, 3), (src != PAD).unsqueeze(1), None)
    assert out.isfinite().all()
    source = Source.of(model.encode(src, (src != PAD).unsqueeze(1)), (src != PAD).unsqueeze(1))
    answer, weights = SourceAttention(6).double()(*torch.randn(2, 2, 3, 6).double(), source)
    assert (answer[1] == 0).all()
    assert (weights[1] == 0).all()


def test_alignment_is_weights_that_add_up_to_one() -> None:
    model = make(layers=3)
    (src, keep), tgt = sources([4, 2]), tokens(2, 5)
    weights = model.alignment(src, tgt, keep)
    assert weights.shape == (3, 2, 5, 4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 5).double())
    assert (weights[:, 1, :, 2:] == 0).all()


def test_16_bits_are_near() -> None:
    model = make().float()
    (src, keep), tgt = sources([4, 2]), tokens(2, 5)
    exact = model(src, tgt, keep, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        short = model(src, tgt, keep, None)
    assert (short.float() - exact).abs().mean() < 0.05 * exact.abs().mean()
    logits = model.bfloat16().start_steps(src, keep)(tgt[:, 0])
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


# The size of the signal.


def growth(
    seed: int,
    dropout: float = 0.0,
    layers: int = 12,
    break_it: Callable[[Tensor], object] = lambda _: None,
    scale: float = 0.5**0.5,
) -> float:
    """Return by what the variance grows through a stack, at the start of a training."""
    torch.manual_seed(seed)
    x = first = 0.1 * torch.randn(1, 400, 48)
    for _ in range(layers):
        layer = GatedConvolution(48, 3, dropout, causal=True)
        break_it(layer.linear.weight.data)
        x = (x + layer(x)).detach() * scale
    return float(x.var() / first.var())


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_variance_is_kept(seed: int, dropout: float) -> None:
    assert 0.6 < growth(seed, dropout) < 1.6
    assert growth(seed, dropout, break_it=lambda weight: weight.div_(2)) < 0.1
    assert growth(seed, dropout, scale=1.0) > 1000
    a, b = torch.randn(2, 100_000)
    assert abs(add_signals(a, b).var().item() - 1) < 0.05


def whole(seed: int) -> tuple[float, float]:
    """Return by what the variance grows in a new model's encoder, and in its decoder."""
    torch.manual_seed(seed)
    model = ConvolutionConfig(width=64, dropout=0.0).build(200, 200)
    src, tgt = torch.randint(200, (2, 8, 40))
    memory, given = model.encode(src, None), model.tgt_embed(tgt).var()
    written = model.decode(memory, None, tgt)
    return (memory[..., :64].var() / given).item(), (written.var() / given).item()


@pytest.mark.parametrize("seed", range(5))
def test_encoder_keeps_the_variance_and_decoder_does_not(seed: int) -> None:
    encoder, decoder = whole(seed)
    assert 0.75 < encoder < 1.35
    assert 2 < decoder < 15  # its layers' answers are nearly the same, not independent


def test_without_the_root_the_source_hardly_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Source.of

    def careless(memory: Tensor, src_mask: Tensor | None) -> Source:
        source = plain(memory, src_mask)
        source.scale = torch.ones_like(source.scale)
        return source

    monkeypatch.setattr(Source, "of", careless)
    assert whole(0)[1] < 1


# A small thing to learn: the target is the source, backwards.


def learn(seed: int, attention: bool = True, updates: int = 150) -> tuple[float, float]:
    """Return shares: sequences without a mistake, largest weights in the right place."""
    torch.manual_seed(seed)
    config = ConvolutionConfig(width=32, kernel=3, layers=2, dropout=0.0, max_len=8)
    model = config.build(VOCAB, VOCAB)
    if not attention:
        for layer in model.decoder_layers:
            silent: Any = layer.attention
            silent.forward = lambda h, g, source: (torch.zeros_like(h), None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    begin = torch.full((64, 1), BOS)
    for _ in range(updates):
        src = tokens(64, 5)
        out = model(src, torch.cat([begin, src.flip(1)[:, :-1]], dim=1), None, None)
        loss = F.cross_entropy(model.generator(out).transpose(1, 2), src.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    src = tokens(64, 5)
    steps, written = model.eval().start_steps(src, src.unsqueeze(1) > 0), [begin[:, 0]]
    for _ in range(5):
        written.append(steps(written[-1]).argmax(-1))
    exact = (torch.stack(written[1:], dim=1) == src.flip(1)).all(1).double().mean().item()
    if not attention:
        return exact, 0.0
    looks = model.alignment(src, torch.cat([begin, src.flip(1)[:, :-1]], dim=1)).mean(0)
    return exact, (looks.argmax(-1) == torch.arange(4, -1, -1)).double().mean().item()


@pytest.mark.parametrize("seed", range(5))
def test_learns_to_reverse_and_looks_at_the_right_place(seed: int) -> None:
    exact, aligned = learn(seed)
    assert exact > 0.8
    assert aligned > 0.6  # chance is 0.2


def test_without_attention_nothing_of_the_source_arrives() -> None:
    assert learn(0, attention=False, updates=60)[0] < 0.1
