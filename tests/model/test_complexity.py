"""Layers of Table 1 against PyTorch's and brute force; counters against graphs made by hand."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from annotated_transformer.model.complexity import (
    Convolution,
    DilatedStack,
    RecurrentLayer,
    RestrictedSelfAttention,
    SelfAttention,
    neighbourhood_mask,
    training_flops,
    windowed_attention,
)
from annotated_transformer.model.multi_head import MultiHeadedAttention, padding_mask
from annotated_transformer.model.transformer import ModelConfig, base, build_model
from annotated_transformer.training.batches import make_batch
from benchmarks.chapters import definitions

PAGE = definitions("model/complexity", {"KINDS", "PRODUCTS"})
operations, dependent_steps, connected, layers_to_connect = map(
    PAGE.__getitem__, ("operations", "dependent_steps", "connected", "layers_to_connect")
)
SeparableConvolution: Any = PAGE["SeparableConvolution"]
seeds = st.integers(0, 2**31)
odd = st.integers(0, 5).map(lambda i: 2 * i + 1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def slopes(y: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    steering = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
    return torch.autograd.grad(y, inputs, steering)


def assert_equal(ones: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


class Largest(TorchDispatchMode):
    """Remember the most elements of any tensor that is made."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.most = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
        self.most = max([self.most, *sizes])
        return made


# --- the layers ------------------------------------------------------------------


@settings(max_examples=40)
@given(
    seeds, st.integers(1, 19), odd, st.none() | st.integers(1, 8), st.integers(1, 3), st.booleans()
)
def test_windows_equal_a_loop_over_queries(
    seed: int, n: int, r: int, block: int | None, h: int, padded: bool
) -> None:
    q, k, v = (normal(2, h, n, width, seed=seed + i) for i, width in enumerate((3, 3, 5)))
    lengths = torch.randint(n + 1, (2, 1), generator=torch.Generator().manual_seed(seed))
    real = torch.arange(n) < (lengths if padded else n)
    real = real.expand(2, n)
    rows = []
    for i in range(n):
        near = slice(max(0, i - r // 2), i + r // 2 + 1)
        scores = torch.einsum("bhd,bhmd->bhm", q[:, :, i], k[:, :, near]) / math.sqrt(3)
        # by hand: a row of zeros where nothing is to be seen
        grown = scores.exp() * real[:, None, near]
        weights = grown / grown.sum(-1, keepdim=True).clamp(min=1e-300)
        rows.append(torch.einsum("bhm,bhmd->bhd", weights, v[:, :, near]))
    plain = torch.stack(rows, dim=2)
    mask = real[:, None, None] if padded else None
    quick = windowed_attention(q, k, v, r, block, mask=mask)
    assert quick.shape == (2, h, n, 5)
    assert_equal([quick, *slopes(quick, (q, k, v))], [plain, *slopes(plain, (q, k, v))])


@settings(max_examples=20)
@given(seeds, st.integers(1, 12), odd, st.sampled_from([1, 2]), st.booleans())
def test_restricted_layer_equals_the_masked_one(
    seed: int, n: int, r: int, h: int, padded: bool
) -> None:
    torch.manual_seed(seed)
    quick, full = RestrictedSelfAttention(4, r, h).double(), SelfAttention(4, h).double()
    full.load_state_dict(quick.state_dict())
    x = normal(2, n, 4, seed=seed)
    place = range(n)
    mask = torch.tensor([[abs(i - j) <= r // 2 for j in place] for i in place]).unsqueeze(0)
    assert torch.equal(mask, neighbourhood_mask(n, r))
    tokens = torch.tensor([[1] * n, [1] * (n // 2) + [0] * (n - n // 2)])  # zero is padding
    real = padding_mask(tokens, pad=0) if padded else torch.ones(2, 1, n, dtype=torch.bool)
    y, z = quick(x, real if padded else None), full(x, mask & real)
    assert_equal(
        [y, *slopes(y, [x, *quick.parameters()])], [z, *slopes(z, [x, *full.parameters()])]
    )


@pytest.mark.parametrize("h", [1, 2, 3])
def test_masks_of_sentences_are_for_all_heads(h: int) -> None:
    """A mask with a row a sentence, as padding gives it, is not taken for one with a row a head."""
    torch.manual_seed(0)
    layer, x = SelfAttention(6, h).double(), normal(3, 5, 6)
    mask = torch.rand(3, 5, 5) < 0.6
    assert_equal([layer(x, mask)], [layer.heads(x, x, x, mask)])


def test_wide_neighbourhood_is_full_attention() -> None:
    torch.manual_seed(0)
    heads = MultiHeadedAttention(2, 8, 0.0).double()
    full, wide = SelfAttention(8, 2).double(), RestrictedSelfAttention(8, 13, 2).double()
    for layer in (full, wide):
        layer.heads.load_state_dict(heads.state_dict())
    x = normal(2, 7, 8)
    assert_equal([full(x), wide(x)], [heads(x, x, x)] * 2)


@pytest.mark.parametrize("block", [None, 1, 4])
def test_windows_make_no_square_matrix(block: int | None) -> None:
    n, d, r = 512, 4, 9
    x = normal(1, n, d)
    with Largest() as quick:
        y = windowed_attention(x, x, x, r, block, mask=torch.ones(1, 1, n, dtype=torch.bool))
        slopes(y, [x])
    with Largest() as full:
        SelfAttention(d).double()(x, neighbourhood_mask(n, r))
    assert full.most >= n * n
    assert quick.most <= 4 * n * r * d < n * n / 3


@settings(max_examples=20)
@given(seeds, st.integers(1, 7))
def test_recurrent_layer_equals_pytorchs(seed: int, n: int) -> None:
    torch.manual_seed(seed)
    mine, other = RecurrentLayer(4).double(), nn.RNN(4, 4, batch_first=True).double()
    with torch.no_grad():
        w_ih, w_hh, b_ih, b_hh = other.parameters()
        w_ih.copy_(mine.W.weight)
        w_hh.copy_(mine.U.weight)
        b_ih.copy_(mine.W.bias)
        b_hh.zero_()
    x, state = normal(2, n, 4, seed=seed), normal(2, 4, seed=seed + 1)
    y, z = mine(x, state), other(x, state.unsqueeze(0))[0]
    theirs = [x, state, w_ih, b_ih, w_hh]
    ours = [x, state, mine.W.weight, mine.W.bias, mine.U.weight]
    assert_equal([y, *slopes(y, ours)], [z, *slopes(z, theirs)])
    assert_equal([mine(x)], [other(x)[0]])


@settings(max_examples=30)
@given(seeds, st.integers(1, 9), odd, st.integers(1, 4), st.booleans())
def test_convolution_is_a_sum_over_places(
    seed: int, n: int, k: int, dilation: int, causal: bool
) -> None:
    torch.manual_seed(seed)
    layer, x = Convolution(3, k, dilation, causal=causal).double(), normal(2, n, 3, seed=seed)
    y = layer.get_parameter("conv.bias").expand(2, n, 3).clone()
    for i, tap in itertools.product(range(n), range(k)):
        j = i + dilation * (tap - (k - 1 if causal else k // 2))
        if 0 <= j < n:
            y[:, i] += x[:, j] @ layer.conv.weight[:, :, tap].T
    torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-11)


def test_separable_convolution_is_a_convolution_of_products() -> None:
    torch.manual_seed(0)
    layer, x = SeparableConvolution(4, 5).double(), normal(2, 9, 4)
    whole = layer.across.weight.unsqueeze(-1) * layer.along.weight.squeeze(1)  # (d, d, k)
    bias = layer.across(layer.along.bias)
    expected = F.conv1d(x.transpose(1, 2), whole, bias, padding=2).transpose(1, 2)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-11)


def test_no_middle_no_layer() -> None:
    x = normal(1, 4, 2)
    makers: list[Callable[[], object]] = [
        lambda: Convolution(4, 2),
        lambda: SeparableConvolution(4, 4),
        lambda: RestrictedSelfAttention(4, 6),
        lambda: neighbourhood_mask(5, 2),
        lambda: windowed_attention(x, x, x, 0),
    ]
    for make in makers:
        with pytest.raises(ValueError, match="has no middle"):
            make()
    assert Convolution(2, 2, causal=True).double()(x).shape == x.shape
    with pytest.raises(ValueError, match="one for all queries"):
        RestrictedSelfAttention(4, 3)(torch.randn(1, 5, 4), neighbourhood_mask(5, 3))


# --- work ------------------------------------------------------------------------


def test_operations_of_known_products() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.transpose(1, 2)).softmax(-1) @ x

    x = torch.randn(3, 5, 7)
    assert operations(Two(), x) == {"pairs": 2 * 2 * 3 * 5 * 5 * 7}
    assert operations(nn.Linear(7, 2), x) == {"projections": 2 * 3 * 5 * 7 * 2}
    assert operations(nn.Tanh(), x) == {}
    depthwise = operations(SeparableConvolution(7, 3), x)
    assert depthwise == {"kernels": 2 * 3 * 5 * 7 * 3, "projections": 2 * 3 * 5 * 7 * 7}


def test_operations_need_no_numbers() -> None:
    for make in (SelfAttention, RecurrentLayer):
        with torch.device("meta"):
            without = operations(make(8), torch.empty(2, 6, 8))
        assert without == operations(make(8), torch.randn(2, 6, 8))


def test_fused_kernel_of_a_cpu_is_not_counted() -> None:
    x = torch.randn(1, 6, 4)

    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1))

    assert "pairs" not in operations(Fused(), x)  # why the chapter runs the plain form
    assert operations(SelfAttention(4), x)["pairs"] == 4 * 6 * 6 * 4


# --- steps and paths ---------------------------------------------------------------


def test_steps_of_graphs_made_by_hand() -> None:
    x, w = normal(1, 2, 3), normal(3, 3)
    assert dependent_steps(x) == 0
    assert dependent_steps(x.tanh() + 1) == 0
    assert dependent_steps(x @ w + x @ w.T) == 1  # side by side
    assert dependent_steps((x @ w).tanh() @ w) == 2
    assert dependent_steps((x @ w).tanh() @ w + x) == 2  # the longer of two
    assert dependent_steps(F.conv1d(x, normal(2, 2, 1))) == 1
    heads = x.unsqueeze(1)
    assert dependent_steps(F.scaled_dot_product_attention(heads, heads, heads)) == 2


def test_long_chains_need_no_recursion() -> None:
    assert dependent_steps(RecurrentLayer(2)(torch.randn(1, 3000, 2))) == 3000


def test_many_ways_are_walked_once() -> None:
    x, w = normal(1, 3), normal(3, 3)
    for _ in range(60):  # 2 ** 60 ways
        x = x @ w + x @ w.T
    assert dependent_steps(x) == 60


@pytest.mark.parametrize(
    "make",
    [
        lambda: SelfAttention(4),
        lambda: RecurrentLayer(4),
        lambda: Convolution(4, 5),
        lambda: Convolution(4, 3, causal=True),
        lambda: DilatedStack(4, 3, 2),
        lambda: SeparableConvolution(4, 3),
        lambda: RestrictedSelfAttention(4, 5),
        lambda: nn.Sequential(RestrictedSelfAttention(4, 3), Convolution(4, 3), nn.LayerNorm(4)),
    ],
)
def test_connected_agrees_with_disturbing_each_input(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    layer, x = make().double(), normal(9, 4).detach()
    y = layer(x.unsqueeze(0))[0]
    for j in range(9):
        other = x.clone()
        other[j] += torch.randn(4, dtype=x.dtype)
        moved = (layer(other.unsqueeze(0))[0] - y).abs().amax(-1) > 1e-12
        assert torch.equal(connected(layer, x)[:, j], moved)


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 4).map(lambda i: 2 * i + 1), st.booleans())
def test_stacks_connect_as_soon_as_counted(n: int, k: int, causal: bool) -> None:
    x = normal(n, 2)
    contiguous = layers_to_connect(
        lambda depth: nn.Sequential(*(Convolution(2, k, causal=causal) for _ in range(depth))), x
    )
    assert contiguous == max(1, math.ceil((n - 1) / (k - 1 if causal else k // 2)))
    dilated = layers_to_connect(lambda depth: DilatedStack(2, k, depth, causal=causal), x)
    base = k if causal else k // 2 + 1
    assert dilated == next(L for L in range(1, 50) if base**L >= n)


def test_fast_growing_dilations_leave_gaps() -> None:
    """Centred kernels with powers of k: some pairs at the edges are never connected."""

    def fast(depth: int) -> nn.Sequential:
        return nn.Sequential(*(Convolution(2, 3, 3**i) for i in range(depth)))

    with pytest.raises(ValueError, match="6 layers do not connect 6 positions"):
        layers_to_connect(fast, normal(6, 2))
    for n in range(2, 20):
        assert connected(DilatedStack(2, 3, layers=5).double(), normal(n, 2)).all()


def test_what_looks_at_itself_connects_nothing() -> None:
    with pytest.raises(ValueError, match="5 layers do not connect 5 positions"):
        layers_to_connect(lambda depth: nn.Sequential(*[nn.Linear(2, 2)] * depth), normal(5, 2))


# --- a whole model ---------------------------------------------------------------


def counted(config: ModelConfig, vocab: int, pairs: int, source: int, target: int) -> int:
    """The operations that PyTorch sees in a forward and a backward pass."""
    model = build_model(vocab, vocab, config)
    src, tgt = torch.ones(pairs, source).long(), torch.ones(pairs, target).long()
    seen, causal = torch.ones(1, 1, source).bool(), torch.ones(1, target, target).bool().tril()
    with FlopCounterMode(display=False) as counter:
        model.generator(model(src, tgt, seen, causal)).sum().backward()
    flops: int = counter.get_total_flops()
    return flops


SIZES = {
    "layers": st.integers(1, 3), "h": st.integers(1, 3), "d_k": st.integers(1, 5),
    "d_v": st.integers(1, 5), "d_ff": st.integers(1, 9), "vocab": st.integers(5, 20),
}  # fmt: skip


def config_of(layers: int, h: int, d_k: int, d_v: int, d_ff: int) -> ModelConfig:
    return ModelConfig(N=layers, d_model=6, d_ff=d_ff, h=h, d_k=d_k, d_v=d_v, max_len=8)


@settings(max_examples=12)
@given(pairs=st.integers(1, 3), source=st.integers(1, 6), target=st.integers(1, 6), **SIZES)
def test_a_step_costs_what_pytorch_counts(
    pairs: int, source: int, target: int, vocab: int, **sizes: int
) -> None:
    config = config_of(**sizes)
    expected = counted(config, vocab, pairs, source, target)
    assert training_flops(config, vocab, [source] * pairs, [target] * pairs) == expected


@settings(max_examples=8)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4), **SIZES
)
def test_a_batch_costs_what_its_sentences_cost_one_by_one(
    pairs: list[tuple[int, int]], vocab: int, **sizes: int
) -> None:
    config = config_of(**sizes)
    expected = sum(counted(config, vocab, 1, *pair) for pair in pairs)
    sources, targets = zip(*pairs, strict=True)
    assert training_flops(config, vocab, sources, targets) == expected


def test_padding_costs_nothing() -> None:
    batch = make_batch([[5] * 3, [5] * 9], [[6] * 8, [6] * 2])
    keeps = batch.src_mask[:, 0], batch.tgt_y != batch.pad
    sides = [side.sum(dim=1).tolist() for side in keeps]
    assert sides == [[4, 10], [9, 3]]  # with the end symbol
    config = ModelConfig(N=1, d_model=8, d_ff=8, h=2, max_len=16)
    block = [[tokens.size(1)] * 2 for tokens in (batch.src, batch.tgt)]
    assert training_flops(config, 20, *sides) < training_flops(config, 20, *block)
    assert training_flops(config, 20, [], []) == 0
    with pytest.raises(ValueError, match="shorter"):
        training_flops(config, 20, [1, 2], [3])


def test_operations_stay_whole_numbers() -> None:
    work = training_flops(base, 37_000, [1000] * 25, [1001] * 25)
    assert isinstance(work, int)
    assert work == 25 * training_flops(base, 37_000, [1000], [1001])
