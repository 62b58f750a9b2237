"""The fast layer gives the readable layer's values and gradients, or hands back to it."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

from annotated_transformer.fast import attention as attention_module
from annotated_transformer.fast import dropout as dropout_module
from annotated_transformer.fast import model as module
from annotated_transformer.fast.decoding import start_steps
from annotated_transformer.fast.dropout import LEVELS, cheap_dropout, dropout_factors
from annotated_transformer.fast.loss import FastLoss, fast_batch_loss
from annotated_transformer.fast.model import FastModel, can_accelerate
from annotated_transformer.fast.packing import IndexedBatch
from annotated_transformer.model import multi_head
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.embeddings import Embeddings
from annotated_transformer.model.multi_head import (
    MultiHeadedAttention,
    split_heads,
    subsequent_mask,
)
from annotated_transformer.model.transformer import make_model
from annotated_transformer.training.batches import Batch, make_batch
from annotated_transformer.training.loop import batch_loss
from tests.parts import part_of

VOCAB = 23
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"norm": "pre"},
    {"d_k": 3, "d_v": 5},
    {"d_k": 4, "d_v": 4, "h": 3},
    {"positions": "learned"},
    {"tie": "none"},
    {"tie": "target", "norm": "pre", "positions": "learned"},
)


def model(seed: int = 0, **options: Any) -> EncoderDecoder:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"N": 2, "d_model": 16, "d_ff": 24, "h": 2, "dropout": 0.0}
    return make_model(VOCAB, VOCAB, **{**sizes, "max_len": 200, **options}).double()


def batch(seed: int, pairs: int = 5, longest: int = 9, empty: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def sentence() -> list[int]:
        length = int(torch.randint(0 if empty else 1, longest + 1, (1,), generator=generator))
        return torch.randint(4, VOCAB, (length,), generator=generator).tolist()

    return make_batch([sentence() for _ in range(pairs)], [sentence() for _ in range(pairs)])


def gradients(net: EncoderDecoder, loss: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def assert_equal(net: EncoderDecoder, pairs: Batch, smoothing: float = 0.1) -> None:
    """Both layers agree in loss, likelihood and every gradient."""
    slow, slow_nll = batch_loss(net, pairs, smoothing)
    expected = gradients(net, slow)
    fast, fast_nll = fast_batch_loss(net, pairs, smoothing)
    found = gradients(net, fast)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-11)
    torch.testing.assert_close(fast_nll, slow_nll, rtol=0, atol=1e-9)
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-11, msg=name)


@settings(max_examples=40)
@given(
    st.integers(0, 10**6), st.sampled_from(OPTIONS), st.integers(1, 6), st.sampled_from([0.0, 0.1])
)
def test_value_and_gradient_are_those_of_the_readable_layer(
    seed: int, options: dict[str, Any], pairs: int, smoothing: float
) -> None:
    net = model(seed, **options)
    assert can_accelerate(net)
    assert_equal(net, batch(seed, pairs, empty=True), smoothing)


@pytest.mark.parametrize("options", OPTIONS)
def test_long_sentences_take_the_fused_kernel_and_agree(options: dict[str, Any]) -> None:
    assert_equal(model(**options), batch(0, 2, longest=190))


def test_a_wrong_attention_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "attend_rows", lambda attn, x, memory, mask: x)
    with pytest.raises(AssertionError):
        assert_equal(model(), batch(0))


def test_the_state_dict_is_the_same() -> None:
    net = model()
    ours = FastModel(net).state_dict()
    assert ours.keys() == net.state_dict().keys()
    assert all(ours[name] is not None for name in ours)
    assert {id(p) for p in FastModel(net).parameters()} == {id(p) for p in net.parameters()}


@pytest.mark.parametrize("dropped", ["dropout", "attention_dropout", "ff_dropout"])
def test_dropout_is_at_work_in_training_alone(dropped: str) -> None:
    options: dict[str, Any] = {dropped: 0.5}
    net, pairs = model(**options), batch(1)
    net.train()
    assert len({fast_batch_loss(net, pairs)[0].item() for _ in range(4)}) == 4
    net.eval()
    assert len({fast_batch_loss(net, pairs)[0].item() for _ in range(4)}) == 1
    torch.testing.assert_close(fast_batch_loss(net, pairs)[0], batch_loss(net, pairs)[0])


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.3, 0.5]))
def test_the_cheap_dropout_keeps_as_many_and_the_mean(seed: int, p: float) -> None:
    torch.manual_seed(seed)
    x = torch.ones(200, 301, dtype=torch.double)
    y = cheap_dropout(nn.Dropout(p), x)
    share = float((y == 0).double().mean())
    assert abs(share - p) < 6 * (p * (1 - p) / x.numel()) ** 0.5
    assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p), dtype=torch.double), rtol=1e-4)
    assert torch.equal(cheap_dropout(nn.Dropout(p).eval(), x), x)


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.3, 0.5, 0.999])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_rate_of_dropout_and_its_independence(p: float, seed: int) -> None:
    torch.manual_seed(seed)
    count = 2**19
    keep = dropout_factors(torch.empty(count), p).bool()
    true_rate = round(p * LEVELS) / LEVELS
    assert abs(true_rate - p) <= 0.5 / LEVELS
    error = math.sqrt(true_rate * (1 - true_rate) / count)
    assert abs((~keep).double().mean().item() - true_rate) < 6 * error
    dropped = (~keep).double() - true_rate
    for lag in (1, 2, 3, 4, 5):  # inside a word of 64 bits, and across
        product = (dropped[:-lag] * dropped[lag:]).mean().item()
        assert abs(product) < 6 * true_rate * (1 - true_rate) / math.sqrt(count)


def test_all_sixteen_patterns_of_a_word_are_equally_likely() -> None:
    torch.manual_seed(0)
    count = 2**18
    keep = dropout_factors(torch.empty(4 * count), 0.5).bool().view(count, 4)
    patterns = (keep * torch.tensor([1, 2, 4, 8])).sum(-1).bincount(minlength=16)
    expected = count / 16
    chi_square = ((patterns - expected) ** 2 / expected).sum().item()
    assert chi_square < 50  # 15 degrees of freedom: one in 80,000 exceeds it


def test_dropout_repeats_with_the_seed_and_has_the_derivative_of_its_mask() -> None:
    module, x = nn.Dropout(0.5), torch.randn(4, 5, dtype=torch.double, requires_grad=True)

    def drop(x: Tensor) -> Tensor:
        torch.manual_seed(3)  # the same decisions each time
        return cheap_dropout(module, x)

    assert torch.equal(drop(x), drop(x))
    assert not torch.equal(drop(x), cheap_dropout(module, x))
    assert torch.autograd.gradcheck(drop, x)
    assert cheap_dropout(nn.Dropout(0.0), x) is x


def test_dropout_elsewhere_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, p: ("pytorch", p))
    assert cheap_dropout(nn.Dropout(0.5), torch.empty(3, device="meta")) == ("pytorch", 0.5)


# --- nothing leaks ------------------------------------------------------------------------------


def rows_of(net: EncoderDecoder, pairs: Batch, src: Tensor, tgt: Tensor) -> Tensor:
    """Outputs ``(batch, n, d_model)``, zero at padding; dropout is the same each time."""
    torch.manual_seed(5)
    keep = pairs.tgt_y != pairs.pad
    rows: Tensor = FastModel(net)(src, tgt, pairs.src_mask[:, 0], keep)
    return rows.new_zeros(*tgt.shape, 16).masked_scatter(keep.unsqueeze(-1), rows)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans(), st.sampled_from(OPTIONS), st.data())
def test_the_future_is_not_seen(
    seed: int, count: int, training: bool, options: dict[str, Any], data: st.DataObject
) -> None:
    net, pairs = model(seed, dropout=0.3, **options).train(training), batch(seed, count)
    sentence = data.draw(st.integers(0, count - 1))
    length = int((pairs.tgt_y[sentence] != pairs.pad).sum())
    place = data.draw(st.integers(1, length - 1))
    changed = pairs.tgt.clone()
    changed[sentence, place] = 4 + (changed[sentence, place] - 3) % (VOCAB - 4)  # another token
    with torch.no_grad():
        before, after = (rows_of(net, pairs, pairs.src, tgt) for tgt in (pairs.tgt, changed))
    assert torch.equal(before[sentence, :place], after[sentence, :place])
    others = [i for i in range(count) if i != sentence]
    assert torch.equal(before[others], after[others])
    if not training:  # dropout may hide it
        assert (before[sentence, place] - after[sentence, place]).abs().max() > 1e-6


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans())
def test_padding_is_not_seen(seed: int, count: int, training: bool) -> None:
    net, pairs = model(seed, dropout=0.3).train(training), batch(seed, count)
    garbage = [
        torch.where(keep, tokens, 7)
        for tokens, keep in (
            (pairs.src, pairs.src_mask[:, 0]),
            (pairs.tgt, pairs.tgt_y != pairs.pad),
        )
    ]
    with torch.no_grad():
        before, after = (rows_of(net, pairs, *both) for both in ((pairs.src, pairs.tgt), garbage))
    assert torch.equal(before, after)


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_a_batch_equals_its_sentences_one_by_one(seed: int, count: int) -> None:
    net, pairs = model(seed), batch(seed, count)
    together = rows_of(net, pairs, pairs.src, pairs.tgt)
    for i in range(count):
        m, n = int(pairs.src_mask[i].sum()), int((pairs.tgt_y[i] != pairs.pad).sum())
        see = torch.ones(1, m, dtype=torch.bool), torch.ones(1, n, dtype=torch.bool)
        alone = FastModel(net)(pairs.src[i : i + 1, :m], pairs.tgt[i : i + 1, :n], *see)
        torch.testing.assert_close(together[i, :n], alone, rtol=0, atol=1e-11)


def test_a_source_without_tokens_gives_what_the_readable_layer_gives() -> None:
    net, keep = model(), torch.ones(2, 2, dtype=torch.bool)
    src, tgt = torch.tensor([[0, 0], [7, 4]]), torch.tensor([[1, 5], [1, 6]])
    expected = net(src, tgt, (src != 0).unsqueeze(1), subsequent_mask(2))
    found = FastModel(net)(src, tgt, src != 0, keep)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=0, atol=1e-11)
    (slope,) = torch.autograd.grad(found.sin().sum(), net.get_parameter("tgt_embed.0.lut.weight"))
    assert slope.isfinite().all()


# --- where it hands back ------------------------------------------------------------------------


def unlabelled(pairs: Batch) -> None:
    pairs.tgt_y = pairs.tgt_y.clone()
    pairs.tgt_y[:, 0] = pairs.pad


def windowed(pairs: Batch) -> None:
    near = torch.ones(pairs.tgt.size(1), pairs.tgt.size(1)).triu(-1).bool()
    pairs.tgt_mask = pairs.tgt_mask & near


def by_query(pairs: Batch) -> None:
    m = pairs.src.size(1)
    pairs.src_mask = pairs.src_mask & torch.ones(m, m).tril().bool()


def hidden_source(pairs: Batch) -> None:
    pairs.src_mask = pairs.src_mask.clone()
    pairs.src_mask[:, :, 0] = False


def with_numbers(pairs: Batch) -> None:
    pairs.src_mask, pairs.tgt_mask = pairs.src_mask.float(), pairs.tgt_mask.float()


@pytest.mark.parametrize(
    "change",
    [unlabelled, windowed, by_query, hidden_source, with_numbers],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("options", OPTIONS[:2])
def test_a_batch_with_masks_of_its_own_is_computed_with_them(
    change: Callable[[Batch], None], options: dict[str, Any]
) -> None:
    net, pairs, usual = model(**options), batch(3), batch(3)
    change(pairs)
    assert_equal(net, pairs)
    same = torch.equal(batch_loss(net, pairs)[0], batch_loss(net, usual)[0])
    assert same == (change is with_numbers)
    assert_equal(net, IndexedBatch(pairs))


REPLACED = """
    src_embed tgt_embed src_embed.0 encoder decoder encoder.norm generator generator.proj
    encoder.layers.0 decoder.layers.1 encoder.layers.0.self_attn decoder.layers.1.src_attn
    encoder.layers.1.feed_forward decoder.layers.0.feed_forward.w_1 encoder.layers.0.sublayer
    decoder.layers.0.sublayer.2 decoder.layers.1.self_attn.linears
""".split()


@pytest.mark.parametrize("name", REPLACED)
def test_a_part_that_is_replaced_later_is_used(name: str) -> None:
    net, other = (model(seed, norm="pre", tie="none") for seed in (0, 1))
    pairs = batch(3)
    with torch.no_grad():
        for parameter in other.parameters():  # norms, too, differ
            parameter.add_(0.1)
    loss = FastLoss(net)
    before = loss(pairs, 0.1)[0]
    net.set_submodule(name, other.get_submodule(name))
    found, expected = loss(pairs, 0.1)[0], batch_loss(net, pairs, 0.1)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found, before)


def test_a_layer_that_is_taken_away_later_is_missed() -> None:
    net, pairs = model(), batch(3)
    loss = FastLoss(net)
    before = loss(pairs, 0.1)[0]
    del cast(nn.ModuleList, net.encoder.layers)[1]
    found, expected = loss(pairs, 0.1)[0], batch_loss(net, pairs, 0.1)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found, before)


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 0, 1, 7, 8, 2], [1, 5, 6, 9, 4, 2]],
        [[1, 5, 0, 7, 8, 2], [1, 5, 6, 9, 4, 2]],
        [[0, 5, 6, 7, 2, 0], [1, 5, 6, 9, 4, 2]],
        [[1, 5, 6, 7, 2, 0], [1, 2, 0, 0, 0, 0]],
    ],
    ids=["left", "middle", "begins with padding", "right"],
)
def test_padding_anywhere_is_hidden(rows: list[list[int]]) -> None:
    for side in (rows, [row[::-1] for row in rows]):
        assert_equal(model(), Batch(torch.tensor(side), torch.tensor(rows)))


class Doubled(MultiHeadedAttention):
    """An attention of one's own."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return 2 * super().forward(query, key, value, mask)


class LowRank(nn.Module):
    """A matrix with a learned change of low rank, as LoRA wraps it; it has a ``weight``."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, layer.bias
        self.a = nn.Parameter(torch.randn(2, layer.in_features, dtype=torch.double))
        self.b = nn.Parameter(torch.randn(layer.out_features, 2, dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.layer(x) + x @ self.a.T @ self.b.T
        return changed


class Scaled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight


def doubled_attention(net: EncoderDecoder) -> None:
    net.get_submodule("decoder.layers.0.self_attn").__class__ = Doubled


def low_rank_projection(net: EncoderDecoder) -> None:
    name = "encoder.layers.1.self_attn.linears.0"
    net.set_submodule(name, LowRank(part_of(net, name, nn.Linear)))


def low_rank_generator(net: EncoderDecoder) -> None:
    net.set_submodule("generator.proj", LowRank(part_of(net, "generator.proj", nn.Linear)))


def parametrized(net: EncoderDecoder) -> None:
    layer = net.get_submodule("encoder.layers.0.feed_forward.w_1")
    parametrize.register_parametrization(layer, "weight", Scaled())


def hooked(net: EncoderDecoder) -> None:
    layer = net.get_submodule("encoder.layers.0.self_attn.linears.2")
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)


def hooked_before(net: EncoderDecoder) -> None:
    net.get_submodule("decoder.layers.1").register_forward_pre_hook(
        lambda module, inputs: (2 * inputs[0], *inputs[1:])
    )


def own_forward(net: EncoderDecoder) -> None:
    layer: Any = net.get_submodule("encoder.layers.0.feed_forward")
    layer.forward = lambda x: 0 * x


def other_norm(net: EncoderDecoder) -> None:
    net.set_submodule("encoder.layers.0.sublayer.0.norm", nn.RMSNorm(16).double())


def other_embedding(net: EncoderDecoder) -> None:
    net.src_embed = nn.Sequential(Embeddings(16, VOCAB).double())


def without_bias(name: str, net: EncoderDecoder) -> None:
    layer = part_of(net, name, nn.Linear)
    layer.register_parameter("bias", None)
    layer.weight.data *= 2  # biases begin at zero, so leaving them out changes nothing


def short_vectors(net: EncoderDecoder) -> None:
    part_of(net, "src_embed.0.lut", nn.Embedding).max_norm = 0.05


def own_encode(net: EncoderDecoder) -> None:
    changed: Any = net
    changed.encode = lambda src, mask: EncoderDecoder.encode(net, src, mask) * 2


@pytest.mark.parametrize(
    "change",
    [
        *(doubled_attention, low_rank_projection, low_rank_generator, parametrized, hooked),
        *(hooked_before, own_forward, other_norm, other_embedding, own_encode, short_vectors),
        partial(without_bias, "generator.proj"),
        partial(without_bias, "decoder.layers.1.src_attn.linears.1"),
        partial(without_bias, "encoder.layers.0.feed_forward.w_2"),
    ],
)
def test_what_was_changed_is_run_and_trained(change: Callable[[EncoderDecoder], None]) -> None:
    net, pairs = model(), batch(0)
    before = fast_batch_loss(net, pairs)[0].item()
    loss = FastLoss(net)  # made before the change
    change(net)
    assert not can_accelerate(net)
    assert_equal(net, pairs)
    assert abs(loss(pairs)[0].item() - before) > 1e-9  # the change is heard
    torch.testing.assert_close(loss(pairs)[0], batch_loss(net, pairs)[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "value"), [("padding_idx", 7), ("scale_grad_by_freq", True), ("sparse", True)]
)
def test_gradients_of_an_unusual_embedding(name: str, value: Any) -> None:
    net = model(tie="none")
    setattr(part_of(net, "src_embed.0.lut", nn.Embedding), name, value)
    assert not can_accelerate(net)
    assert_equal(net, batch(0))


def test_a_method_replaced_in_a_class_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    net, pairs = model(), batch(0)
    original = MultiHeadedAttention.forward
    monkeypatch.setattr(
        MultiHeadedAttention, "forward", lambda self, *a, **k: 2 * original(self, *a, **k)
    )
    assert not can_accelerate(net)
    assert_equal(net, pairs)


def test_an_attention_replaced_in_the_module_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    with monkeypatch.context() as changed:
        changed.setattr(multi_head, "attention", lambda q, k, v, mask, dropout: (v * 0 + q, q))
        assert not can_accelerate(net)
    with monkeypatch.context() as changed:
        changed.setattr(multi_head, "split_heads", lambda x, h: -split_heads(x, h))
        assert not can_accelerate(net)
        assert_equal(net, batch(0))
    assert can_accelerate(net)


@pytest.mark.parametrize(
    "run",
    [fast_batch_loss, lambda net, pairs: start_steps(net.eval(), pairs.src, pairs.src_mask)],
    ids=["training", "decoding"],
)
def test_weights_of_an_earlier_call_do_not_stay(
    run: Callable[[EncoderDecoder, Batch], object],
) -> None:
    net, pairs = model(), batch(0)
    net(pairs.src, pairs.tgt, pairs.src_mask, pairs.tgt_mask)
    heads = [part for part in net.modules() if isinstance(part, MultiHeadedAttention)]
    assert all(part.attn is not None for part in heads)
    run(net, batch(1))
    assert all(part.attn is None for part in heads)


GLOBAL = nn.modules.module


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # for layers that get tokens
@pytest.mark.parametrize(
    "register",
    [
        *(GLOBAL.register_module_forward_hook, GLOBAL.register_module_forward_pre_hook),
        *(GLOBAL.register_module_full_backward_hook, GLOBAL.register_module_full_backward_pre_hook),
    ],
)
def test_a_global_hook_is_heard(register: Callable[[Callable[..., None]], Any]) -> None:
    net, calls = model(), list[int]()
    handle = register(lambda *_: calls.append(1))
    try:
        assert not can_accelerate(net)
        fast_batch_loss(net, batch(0))[0].backward()
    finally:
        handle.remove()
    assert len(calls) > 20
    assert can_accelerate(net)


def test_other_models_keep_their_own_forward() -> None:
    class Plain(EncoderDecoder):
        def decode(
            self, memory: Tensor, src_mask: Tensor | None, tgt: Tensor, tgt_mask: Tensor | None
        ) -> Tensor:
            return super().decode(memory, src_mask, tgt, tgt_mask) * 2

    net = model()
    net.__class__ = Plain
    assert not can_accelerate(net)
    assert_equal(net, batch(0))
    assert not can_accelerate(nn.Linear(2, 2))


def test_the_mode_of_the_loss_is_that_of_the_model() -> None:
    net = model(dropout=0.5)
    loss = FastLoss(net)
    loss.eval()
    assert not any(part.training for part in net.modules())
    loss.train()
    assert all(part.training for part in net.modules())


def test_a_tensor_of_weights_stays_readable_after_training_steps() -> None:
    net = model()
    loss = FastLoss(net)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    before = {name: p.clone() for name, p in net.named_parameters()}
    loss(batch(0))[0].backward()
    optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in net.named_parameters())


DROPPED = ["dropout", "attention_dropout", "ff_dropout"]


def slopes_along(loss: FastLoss, pairs: Batch) -> tuple[Tensor, Tensor]:
    """Return the derivative along random directions: by autograd, and by finite differences."""

    def value() -> Tensor:
        torch.manual_seed(1)  # the same decisions each time
        found: Tensor = loss(pairs)[0]
        return found

    weights, step, ends = list(loss.parameters()), 1e-6, []
    gradients = torch.autograd.grad(value(), weights, allow_unused=True)
    directions = [torch.randn_like(w) for w in weights]
    both = zip(gradients, directions, strict=True)
    slope = torch.stack([(g * d).sum() for g, d in both if g is not None]).sum()
    with torch.no_grad():
        for sign in (1, -2):
            for w, d in zip(weights, directions, strict=True):
                w.add_(d, alpha=sign * step)
            ends.append(value())
    return slope, (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("option", DROPPED)
def test_gradients_with_dropout_are_those_of_finite_differences(option: str) -> None:
    options: dict[str, Any] = {option: 0.4}
    found, expected = slopes_along(FastLoss(model(**options).train()), batch(0, 3))
    assert torch.isclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["attention", "dropout"])
def test_finite_differences_notice_a_backward_pass_without_its_mask(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, option, saved = {
        "attention": (attention_module._PackedAttention, "attention_dropout", 4),
        "dropout": (dropout_module._DroppedReLU, "ff_dropout", 0),
    }[name]
    backward: Callable[..., tuple[Tensor | None, ...]] = kind.backward

    def forgetful(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = [torch.ones_like(t) if i == saved else t for i, t in enumerate(ctx.saved_tensors)]
        other = SimpleNamespace(**vars(ctx), saved_tensors=kept)
        return backward(other, grad)

    monkeypatch.setattr(kind, "backward", staticmethod(forgetful))
    options: dict[str, Any] = {option: 0.4}
    found, expected = slopes_along(FastLoss(model(**options).train()), batch(0, 3))
    assert not torch.isclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("option", DROPPED)
def test_the_backward_pass_can_be_repeated(option: str) -> None:
    options: dict[str, Any] = {option: 0.4}
    net = model(**options).train()
    loss, weights = FastLoss(net)(batch(0, 3))[0], list(net.parameters())
    once, twice = (torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("path", ["self_attn.dropout", "feed_forward.dropout"])
def test_all_can_be_dropped_as_in_the_readable_layer(path: str) -> None:
    net, pairs = model().train(), batch(0, 3)
    for i in range(2):
        part_of(net, f"encoder.layers.{i}.{path}", nn.Dropout).p = 1.0
    assert can_accelerate(net)
    assert torch.isclose(FastLoss(net)(pairs)[0], batch_loss(net, pairs)[0], rtol=1e-10)
