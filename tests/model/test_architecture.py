"""Wiring, stacks, sub-layers and layer normalization against plain arithmetic."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from annotated_transformer.fast.model import can_accelerate
from annotated_transformer.model.architecture import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderDecoder,
    EncoderLayer,
    Generator,
    LayerNorm,
    Norm,
    SublayerConnection,
    clones,
)
from annotated_transformer.model.feed_forward import PositionwiseFeedForward
from annotated_transformer.model.multi_head import MultiHeadedAttention, subsequent_mask
from annotated_transformer.model.transformer import make_model
from tests.parts import part_of

seeds = st.integers(0, 2**31)
orders = pytest.mark.parametrize("norm", ["post", "pre"])


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def network(size: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, 8), nn.ReLU(), nn.Linear(8, size))


class Mixer(nn.Module):
    """Stands in for attention: a masked mean of the values, to which the query is added."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(size, size), nn.Linear(size, size)
        self.seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        self.seen.append((query, key, value, mask))
        weights = mask / mask.sum(-1, keepdim=True)
        mixed: Tensor = self.key(key).tanh() + self.value(value)
        return query + weights.expand(len(key), query.size(1), -1) @ mixed


# Wiring


class Call(nn.Module):
    """A stand-in that returns a text: its name, and what it was given."""

    order = "post"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *inputs: str) -> str:
        return f"{self.name}({', '.join(inputs)})"


def test_encoder_decoder_connects_its_parts() -> None:
    parts = ("encoder", "decoder", "src_embed", "tgt_embed", "generator")
    model: Any = EncoderDecoder(*(Call(part) for part in parts))  # texts take the tensors' places
    assert [name for name, _ in model.named_children()] == list(parts)
    assert model.encode("src", "m") == "encoder(src_embed(src), m)"
    assert model.decode("memory", "m", "tgt", "n") == "decoder(tgt_embed(tgt), memory, m, n)"
    whole = "decoder(tgt_embed(tgt), encoder(src_embed(src), m), m, n)"
    assert model("src", "tgt", "m", "n") == whole


def test_stacks_apply_their_layers_one_after_the_other() -> None:
    f: Any = Call("f")
    assert Encoder(f, 3)("x", "m") == "f(f(f(x, m), m), m)"
    assert Decoder(f, 2)("y", "x", "m", "n") == "f(f(y, x, m, n), x, m, n)"


def test_layers_call_each_attention_with_its_inputs_and_mask() -> None:
    x, memory = torch.randn(2, 3, 6), torch.randn(2, 4, 6)
    ones, past = torch.ones(2, 1, 4), torch.ones(1, 3, 3).tril()
    own = Mixer()
    EncoderLayer(6, own, network(), 0.0)(memory, ones)
    ((query, key, value, mask),) = own.seen
    assert query is key is value is memory
    assert mask is ones
    own, other = Mixer(), Mixer()
    DecoderLayer(6, own, other, network(), 0.0)(x, memory, ones, past)
    ((query, key, value, mask),) = own.seen
    assert query is key is value is x
    assert mask is past
    ((query, key, value, mask),) = other.seen
    assert key is value is memory
    assert query.shape == x.shape
    assert not torch.equal(query, x)
    assert mask is ones


@orders
def test_layers_follow_their_equations(norm: Norm) -> None:
    torch.manual_seed(0)
    x, memory = normal(2, 3, 6), normal(2, 4, 6)
    ones, past = torch.ones(2, 1, 4).double(), torch.ones(1, 3, 3).tril().double()
    encoder = EncoderLayer(6, Mixer(), network(), 0.0, norm=norm).double()
    decoder = DecoderLayer(6, Mixer(), Mixer(), network(), 0.0, norm=norm).double()

    def framed(frame: nn.Module, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        normed = part_of(frame, "norm", LayerNorm)
        out: Tensor = normed(x + sublayer(x)) if norm == "post" else x + sublayer(normed(x))
        return out

    def encode(memory: Tensor) -> Tensor:
        own, last = encoder.sublayer
        memory = framed(own, memory, lambda x: encoder.self_attn(x, x, x, ones))
        return framed(last, memory, encoder.feed_forward)

    def decode(x: Tensor, memory: Tensor) -> Tensor:
        (own, other, last), attend = decoder.sublayer, decoder.src_attn
        assert attend is not None
        x = framed(own, x, lambda x: decoder.self_attn(x, x, x, past))
        x = framed(other, x, lambda x: attend(x, memory, memory, ones))
        return framed(last, x, decoder.feed_forward)

    inputs = [x, memory, *encoder.parameters(), *decoder.parameters()]
    y, printed = decoder(x, encoder(memory, ones), ones, past), decode(x, encode(memory))
    torch.testing.assert_close(y, printed)
    mine, others = (torch.autograd.grad(z.sin().sum(), inputs) for z in (y, printed))
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other)


@orders
def test_only_a_pre_norm_stack_ends_with_a_norm_of_its_own(norm: Norm) -> None:
    x, mask = normal(2, 3, 6), torch.ones(1, 3, 3).double()
    layers: list[nn.Module] = [EncoderLayer(6, Mixer(), network(), 0.0, norm=norm)]
    layers.append(DecoderLayer(6, Mixer(), Mixer(), network(), 0.0, norm=norm))
    for kind, layer, others in zip(
        (Encoder, Decoder), layers, ((mask,), (x, mask, mask)), strict=True
    ):
        stack = kind(layer, 2).double()
        assert isinstance(stack.norm, LayerNorm if norm == "pre" else nn.Identity)
        y = x
        for one in stack.layers:
            y = one(y, *others)
        y = F.layer_norm(y, [6]) if norm == "pre" else y
        torch.testing.assert_close(stack(x, *others), y)


def test_the_generator_gives_log_probabilities() -> None:
    generator, x = Generator(16, 13).double(), normal(2, 3, 16)
    logits = x @ generator.proj.weight.T + generator.proj.bias
    expected = logits - logits.exp().sum(-1, keepdim=True).log()
    torch.testing.assert_close(generator(x), expected)
    torch.testing.assert_close(generator(x).exp().sum(-1), torch.ones(2, 3).double())
    mine, others = (torch.autograd.grad(y.sin().sum(), x)[0] for y in (generator(x), expected))
    torch.testing.assert_close(mine, others)


def test_clones_share_nothing() -> None:
    copies = clones(nn.Linear(2, 2), 3)
    assert len(copies) == 3
    assert len({p.data_ptr() for p in copies.parameters()}) == 6
    assert torch.equal(copies.get_parameter("0.weight"), copies.get_parameter("2.weight"))


# Layer normalization


@settings(max_examples=30)
@given(seeds, st.lists(st.integers(1, 4), max_size=3), st.sampled_from([1e-5, 1e-2]))
def test_layer_norm_is_pytorchs(seed: int, shape: list[int], eps: float) -> None:
    torch.manual_seed(seed)
    norm, x = LayerNorm(6, eps).double(), normal(*shape, 6)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    y, theirs = norm(x), F.layer_norm(x, [6], norm.weight, norm.bias, eps)
    torch.testing.assert_close(y, theirs)
    inputs = [x, *norm.parameters()]
    mine, others = (torch.autograd.grad(z.sin().sum(), inputs) for z in (y, theirs))
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other)


def test_layer_norm_has_pytorchs_names_and_a_derivative_at_constant_vectors() -> None:
    norm = LayerNorm(6)
    norm.load_state_dict(nn.LayerNorm(6).state_dict())
    x = torch.full((2, 6), 3.0, requires_grad=True)
    y = norm(x)
    assert torch.equal(y, torch.zeros(2, 6))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


# Sub-layers


@orders
def test_sublayer_follows_its_equation(norm: Norm) -> None:
    frame, inner = SublayerConnection(6, 0.0, norm=norm).double(), nn.Linear(6, 6).double()
    nn.init.normal_(frame.norm.weight)
    nn.init.normal_(frame.norm.bias)
    x = normal(2, 3, 6)

    def ln(x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        return (x - mean) / (variance + 1e-5).sqrt() * frame.norm.weight + frame.norm.bias

    printed = ln(x + inner(x)) if norm == "post" else x + inner(ln(x))
    y = frame(x, inner)
    torch.testing.assert_close(y, printed)
    inputs = [x, *frame.parameters(), *inner.parameters()]
    mine, others = (torch.autograd.grad(z.sin().sum(), inputs) for z in (y, printed))
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other)


def test_post_norm_is_the_default() -> None:
    x = torch.randn(3, 6)
    torch.testing.assert_close(
        SublayerConnection(6, 0.0)(x, torch.zeros_like), F.layer_norm(x, [6])
    )


def test_a_silent_sublayer_leaves_a_pre_norm_sum_alone() -> None:
    x = torch.randn(3, 6)
    assert torch.equal(SublayerConnection(6, 0.1, norm="pre")(x, torch.zeros_like), x)


@orders
def test_dropout_acts_between_sublayer_and_sum(norm: Norm) -> None:
    torch.manual_seed(0)
    frame = SublayerConnection(64, 0.5, norm=norm)
    frame.set_submodule("norm", nn.Identity())
    added = frame(torch.full((50, 64), 8.0), torch.ones_like) - 8
    assert set(added.unique().tolist()) == {0.0, 2.0}
    assert 0.4 < (added == 0).float().mean() < 0.6


@orders
def test_dropout_acts_in_training_only(norm: Norm) -> None:
    torch.manual_seed(0)
    frame, inner, x = SublayerConnection(6, 0.5, norm=norm), nn.Linear(6, 6), torch.randn(3, 6)
    still = copy.deepcopy(frame)
    still.set_submodule("dropout", nn.Identity())
    assert not torch.equal(frame(x, inner), frame(x, inner))
    assert torch.equal(frame.eval()(x, inner), still(x, inner))


def test_neighbours_and_padding_do_not_matter() -> None:
    frame, inner = SublayerConnection(6, 0.0).double(), network().double()
    x = normal(2, 3, 6)
    torch.testing.assert_close(frame(F.pad(x, (0, 0, 0, 2)), inner)[:, :3], frame(x, inner))
    torch.testing.assert_close(frame(x[:1], inner), frame(x, inner)[:1])


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_decoder_without_memory_is_an_encoder_with_the_causal_mask(norm: Norm) -> None:
    """In value and gradient; and the fast layer leaves such a model to the readable one."""
    torch.manual_seed(0)
    size, mask = 8, subsequent_mask(5)
    attn, network = MultiHeadedAttention(2, size), PositionwiseFeedForward(size, 16)
    own = Decoder(DecoderLayer(size, attn, None, network, 0.0, norm=norm), 2).double().eval()
    other = Encoder(EncoderLayer(size, attn, network, 0.0, norm=norm), 2).double().eval()
    other.load_state_dict(own.state_dict())
    x = torch.randn(3, 5, size, dtype=torch.float64, requires_grad=True)
    y, z = own(x, None, None, mask), other(x, mask)
    assert torch.equal(y, z)
    assert torch.equal(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (y, z)))
    full = make_model(9, 9, N=1, d_model=size, d_ff=16, h=2)
    assert can_accelerate(full)
    full.decoder = Decoder(DecoderLayer(size, attn, None, network, 0.0), 1)
    assert not can_accelerate(full)
