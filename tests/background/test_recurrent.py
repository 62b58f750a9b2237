"""Recurrent networks against PyTorch's, on packed batches; language models against counting."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from annotated_transformer.background import recurrent
from annotated_transformer.background.recurrent import (
    GRU,
    LSTM,
    RNN,
    Cell,
    GRUCell,
    LanguageModel,
    LSTMCell,
    Recurrent,
    RNNCell,
    State,
    perplexity,
    run_cell,
)
from annotated_transformer.data.grammar import grammar_pairs
from tests.claims import cells

KINDS = [RNN, LSTM, GRU]
seeds = st.integers(0, 2**31)


English = tuple[dict[str, Any], Any, Any, int]  # the chapter's functions, its lines, a vocabulary


def chapter() -> dict[str, Any]:
    """Return what the chapter's cells import and define, without running the rest."""
    names = dict(vars(recurrent))
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    for cell in cells("background/recurrent"):
        if "export" not in cell.tags:
            body: list[ast.stmt] = [
                part for part in ast.parse(cell.source).body if isinstance(part, kinds)
            ]
            flag = annotations.compiler_flag
            exec(compile(ast.Module(body, []), "chapter", "exec", flag), names)
    return names


def run(layer: Recurrent | nn.RNNBase, x: Tensor, lengths: Tensor, state: State) -> list[Tensor]:
    """Return outputs, final states and all gradients; PyTorch's layers on packed batches."""
    x = x.clone().requires_grad_()
    state = tuple(part.clone().requires_grad_() for part in state)
    if isinstance(layer, nn.RNNBase):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, end = layer(packed, state if len(state) == 2 else state[0])
        y, _ = pad_packed_sequence(y, batch_first=True, total_length=x.size(1))
        end = end if isinstance(end, tuple) else (end,)
        named = dict(layer.named_parameters())
    else:
        y, end = layer(x, lengths, state)
        named = {}
        for number, cell in enumerate(layer.cells):
            for part, short in (("from_input", "ih"), ("from_state", "hh")):
                for what in ("weight", "bias"):
                    name = f"{what}_{short}_l{number // layer.ways}"
                    name += "_reverse" if number % layer.ways else ""
                    named[name] = getattr(getattr(cell, part), what)
    numbers = torch.cat([y.flatten(), *(part.flatten() for part in end)])
    steering = torch.arange(len(numbers), dtype=numbers.dtype).sin()
    order = sorted(named)
    slopes = torch.autograd.grad(numbers @ steering, [x, *state, *(named[n] for n in order)])
    return [y, *end, *slopes]


def distance(
    ours: Recurrent, other: Recurrent | nn.RNNBase, seed: int, lengths: list[int]
) -> float:
    """Return the largest difference between two layers on a random batch."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(len(lengths), max(lengths), ours.input_size)
    shape = (len(ours.cells), len(lengths), ours.hidden_size)
    state = tuple(normal(*shape) for _ in range(ours.cell.states))
    sizes = torch.tensor(lengths)
    pairs = zip(run(ours, x, sizes, state), run(other, x, sizes, state), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


# --- equal to PyTorch's ----------------------------------------------------------


@settings(max_examples=60)
@given(
    seeds,
    st.sampled_from(KINDS),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.booleans(),
)
def test_equals_pytorchs_layer_on_packed_batches(
    seed: int, kind: type[Recurrent], layers: int, both: bool, lengths: list[int], ours_first: bool
) -> None:
    torch.manual_seed(seed)
    if ours_first:
        ours = kind(3, 4, layers, bidirectional=both).double()
        other = ours.to_torch()
    else:
        twin: Callable[..., nn.RNNBase] = kind.twin
        other = twin(3, 4, layers, bidirectional=both, batch_first=True).double()
        ours = kind.from_torch(other)
    assert distance(ours, other, seed, lengths) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_layer_without_lengths_and_state(kind: type[Recurrent]) -> None:
    layer = kind(3, 4, 2, bidirectional=True)
    x = torch.randn(2, 5, 3)
    y, state = layer(x)
    expected, end = layer.to_torch()(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(state, end if isinstance(end, tuple) else (end,))
    full, _ = layer(x, torch.tensor([5, 5]))
    torch.testing.assert_close(full, y)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_between_layers_only(kind: type[Recurrent]) -> None:
    layer = kind(3, 4, 2, dropout=1.0)  # all is dropped: no chance left
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(layer(x)[0], layer.to_torch()(x)[0])
    assert layer(x)[0].abs().min() > 0  # not after the last layer
    half = kind(3, 4, 1, dropout=0.5)
    torch.testing.assert_close(half(x)[0], half.eval()(x)[0])
    deep = kind(3, 4, 2, dropout=0.5)
    assert (deep(x)[0] - deep(x)[0]).abs().max() > 0
    assert not deep.eval().to_torch().training
    torch.testing.assert_close(deep(x)[0], deep.to_torch()(x)[0])


def swapped_gates(self: LSTMCell, product: Tensor, state: State) -> State:
    h, c = state
    f, i, g, o = (product + self.from_state(h)).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def shows_old_cell(self: LSTMCell, product: Tensor, state: State) -> State:
    h, c = state
    i, f, g, o = (product + self.from_state(h)).chunk(4, dim=-1)
    return o.sigmoid() * c.tanh(), f.sigmoid() * c + i.sigmoid() * g.tanh()


def update_turned_round(self: GRUCell, product: Tensor, state: State) -> State:
    (h,) = state
    r_x, z_x, n_x = product.chunk(3, dim=-1)
    r_h, z_h, n_h = self.from_state(h).chunk(3, dim=-1)
    z, n = (z_x + z_h).sigmoid(), (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    return (z * n + (1 - z) * h,)


def reset_before_product(self: GRUCell, product: Tensor, state: State) -> State:
    (h,) = state
    r_x, z_x, n_x = product.chunk(3, dim=-1)
    r_h, z_h, _ = self.from_state(h).chunk(3, dim=-1)
    z = (z_x + z_h).sigmoid()
    n = (n_x + self.from_state((r_x + r_h).sigmoid() * h).chunk(3, dim=-1)[2]).tanh()
    return ((1 - z) * n + z * h,)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (RNN, lambda self, product, state: (product + self.from_state(state[0]),)),
        (RNN, lambda self, product, state: (torch.tanh(product + self.from_state(state[0]) + 1),)),
        (LSTM, swapped_gates),
        (LSTM, shows_old_cell),
        (GRU, update_turned_round),
        (GRU, reset_before_product),
    ],
)
def test_broken_cell_is_noticed(
    kind: type[Recurrent],
    broken: Callable[[Cell, Tensor, State], State],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    ours = kind(3, 4, 2, bidirectional=True).double()
    other = ours.to_torch()
    assert distance(ours, other, 0, [4, 1, 6]) < 1e-12
    monkeypatch.setattr(kind.cell, "step", broken)
    assert distance(ours, other, 0, [4, 1, 6]) > 1e-3


@pytest.mark.parametrize("both", [False, True])
def test_state_that_runs_on_through_padding_is_noticed(
    both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(
        cell: Cell, x: Tensor, state: State, keep: Tensor | None, *, backward: bool = False
    ) -> tuple[Tensor, State]:
        y, end = run_cell(cell, x, state, None, backward=backward)
        return (y if keep is None else y.masked_fill(~keep, 0.0)), end

    torch.manual_seed(0)
    ours = GRU(3, 4, bidirectional=both).double()
    other = ours.to_torch()
    monkeypatch.setattr(recurrent, "run_cell", careless)
    assert distance(ours, other, 0, [6, 6]) < 1e-12
    assert distance(ours, other, 0, [4, 6]) > 1e-3


# --- padding, states, refusals ---------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("junk", [1e30, math.inf, math.nan])
def test_what_stands_at_padding_does_not_matter(kind: type[Recurrent], junk: float) -> None:
    torch.manual_seed(0)
    layer = kind(3, 4, 2, bidirectional=True)
    lengths = torch.tensor([5, 2, 0])
    real = (torch.arange(5) < lengths.unsqueeze(1)).unsqueeze(-1)
    results = []
    for filling in (0.0, junk):
        x = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(1))
        x = x.masked_fill(~real, filling).requires_grad_()
        y, state = layer(x, lengths)
        slopes = torch.autograd.grad((y * y.detach().cos()).sum(), [x, *layer.parameters()])
        results.append([y, *state, *slopes])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    y, (h, *_) = results[0][0], results[0][1:2]
    assert (y[~real.squeeze(-1)] == 0).all()
    assert (h[:, 2] == 0).all()  # no words: the state stays where it began


@settings(max_examples=20)
@given(seeds, st.sampled_from(KINDS), st.integers(1, 5))
def test_state_goes_on_where_it_stopped(seed: int, kind: type[Recurrent], cut: int) -> None:
    torch.manual_seed(seed)
    layer = kind(3, 4, 2).double()
    x = torch.randn(2, 6, 3).double()
    whole, end = layer(x)
    first, state = layer(x[:, :cut])
    second, state = layer(x[:, cut:], state=state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(state, end)


@pytest.mark.parametrize("kind", [recurrent.RNN, recurrent.LSTM, recurrent.GRU])
def test_layers_work_in_16_bits(kind: Any) -> None:
    torch.manual_seed(0)
    layer, x = kind(4, 4), torch.randn(2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        short = layer(x)[0]
    torch.testing.assert_close(short.float(), layer(x)[0], atol=0.02, rtol=0.02)


def test_shapes_that_do_not_fit_are_refused() -> None:
    layer, x = LSTM(3, 4), torch.randn(2, 5, 3)
    with pytest.raises(ValueError, match="n > 0"):
        layer(x[:, :0])
    with pytest.raises(ValueError, match=r"\(batch, n, input\)"):
        layer(x[0])
    with pytest.raises(ValueError, match="2 sentences"):
        layer(x, torch.tensor([5]))
    for wrong in ([6, 1], [-1, 5]):
        with pytest.raises(ValueError, match="between 0 and 5"):
            layer(x, torch.tensor(wrong))
    with pytest.raises(ValueError, match="state must be 2"):
        layer(x, state=(torch.zeros(1, 2, 4),))
    with pytest.raises(ValueError, match=r"\(1, 2, 4\)"):
        layer(x, state=(torch.zeros(2, 2, 4),) * 2)
    with pytest.raises(ValueError, match="num_layers"):
        LSTM(3, 4, 0)
    with pytest.raises(ValueError, match="dropout"):
        LSTM(3, 4, dropout=2)
    with pytest.raises(TypeError, match="abstract"):
        Cell(3, 4)  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (GRU, nn.LSTM(3, 4)),
        (RNN, nn.RNN(3, 4, nonlinearity="relu")),
        (LSTM, nn.LSTM(3, 4, proj_size=2)),
        (LSTM, nn.LSTM(3, 4, bias=False)),
    ],
)
def test_other_layers_have_no_counterpart(kind: type[Recurrent], other: nn.RNNBase) -> None:
    with pytest.raises(ValueError, match="no counterpart"):
        kind.from_torch(other)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_copied_not_shared(kind: type[Recurrent]) -> None:
    layer = kind(3, 4, 2, bidirectional=True, dropout=0.25).double().eval()
    back = kind.from_torch(layer.to_torch())
    assert (back.dropout, back.bidirectional, back.num_layers) == (0.25, True, 2)
    assert not back.training
    for one, other in zip(layer.parameters(), back.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype == torch.float64
        assert one.data_ptr() != other.data_ptr()


# --- the language model ----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fast", [False, True])
def test_language_model_does_not_see_the_future(kind: type[Recurrent], fast: bool) -> None:
    torch.manual_seed(0)
    layer = kind(5, 6, 2)
    model = LanguageModel(9, layer.to_torch() if fast else layer)
    tokens = torch.randint(1, 9, (2, 7))
    changed = tokens.clone()
    changed[:, 4:] = tokens[:, 4:] % 8 + 1
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 7, 9)
    torch.testing.assert_close(before.exp().sum(-1), torch.ones(2, 7))
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] - after[:, 4:]).abs().max() > 1e-4


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")  # it is only slower
def test_language_model_takes_a_layer_with_a_projection() -> None:
    model = LanguageModel(9, nn.LSTM(5, 6, proj_size=3, batch_first=True))
    assert model(torch.randint(1, 9, (2, 7))).shape == (2, 7, 9)


def test_language_model_refuses_layers_that_see_the_future() -> None:
    with pytest.raises(ValueError, match="must not see"):
        LanguageModel(9, LSTM(5, 6, bidirectional=True))
    with pytest.raises(ValueError, match="must not see"):
        LanguageModel(9, nn.LSTM(5, 6, bidirectional=True, batch_first=True))
    with pytest.raises(ValueError, match="batch first"):
        LanguageModel(9, nn.GRU(5, 6))


def test_perplexity_by_hand() -> None:
    torch.manual_seed(0)
    model = LanguageModel(9, GRU(5, 6, 2, dropout=0.5)).train()
    sentences = [[1, 4, 5, 2], [1, 8, 2], [1, 6, 6, 6, 2]]
    padded = torch.tensor([s + [0] * (5 - len(s)) for s in sentences])
    found = perplexity(model, padded)
    assert model.training  # left as it was
    model.eval()
    logs = []
    for sentence in sentences:  # one word at a time, without padding
        for t in range(1, len(sentence)):
            p = model(torch.tensor([sentence[:t]]))[0, -1].softmax(-1)
            logs.append(p[sentence[t]].log().item())
    assert found == pytest.approx(math.exp(-sum(logs) / len(logs)), rel=1e-5)


def test_counting_by_hand() -> None:
    names = chapter()
    tokens = torch.tensor([[1, 4, 5, 2, 0], [1, 4, 4, 5, 2]])
    unigram, bigram = names["count_models"](tokens, 6)
    # predicted: 4 5 2, and 4 4 5 2: seven, plus one for each of 2, 3, 4 and 5
    expected = torch.tensor([0, 0, 3, 1, 4, 3]).double() / 11
    torch.testing.assert_close(unigram, expected)
    # after 4 came 5 twice and 4 once: three times, two kinds
    counts = torch.tensor([0, 0, 0, 0, 1, 2]).double()
    torch.testing.assert_close(bigram[4], (counts + 2 * expected) / 5)
    torch.testing.assert_close(bigram[3], expected)  # never seen
    logs = [bigram[1, 4], bigram[4, 5], bigram[5, 2]]
    by_hand = math.exp(-sum(math.log(p) for p in logs) / 3)
    assert names["count_perplexity"](bigram, tokens[:1]) == pytest.approx(by_hand)


@pytest.fixture(scope="module")
def english() -> English:
    names = chapter()
    training = [list(pair.english) for pair in grammar_pairs("train", 4000)]
    held_out = [list(pair.english) for pair in grammar_pairs("val", 300)]
    known = names["make_vocabulary"](training)
    return names, names["encode"](training, known), names["encode"](held_out, known), len(known)


@pytest.mark.parametrize("seed", range(5))
def test_networks_beat_counting_whatever_the_seed(english: English, seed: int) -> None:
    names, tokens, held_out, vocab = english
    unigram, bigram = names["count_models"](tokens, vocab)
    counted = names["count_perplexity"](bigram, held_out)
    assert names["count_perplexity"](unigram.expand_as(bigram), held_out) > 2 * counted
    for kind in KINDS:
        torch.manual_seed(seed)
        model = LanguageModel(vocab, kind(64, 64).to_torch())
        names["train"](model, tokens, epochs=1, seed=seed)
        assert 1.15 * perplexity(model, held_out) < counted


# --- through time ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_gradients_through_time(seed: int) -> None:
    names = chapter()
    norms, rotating = names["norms_through_time"], names["rotating_cell"]
    for gain in (0.5, 0.9, 1.0):
        found = norms(rotating(gain, seed=seed), n=40, seed=seed)
        assert all(norm <= gain**k * (1 + 1e-9) for k, norm in enumerate(found, start=1))
    ends = [norms(rotating(gain, seed=seed), n=40, seed=seed)[-1] for gain in (1.5, 2.0)]
    assert 10 < ends[0] < ends[1]
    for kind in (LSTMCell, GRUCell):
        biased = names["biased_cell"]
        ends = [norms(biased(kind, b, seed=seed), 40, seed)[-1] for b in (0.0, 1.0, 2.0, 4.0)]
        assert ends == sorted(ends)
        assert ends[0] < 1e-5
        assert ends[-1] > 10 if kind is LSTMCell else 0.5 < ends[-1] < 1


@pytest.mark.parametrize("kind", [RNNCell, LSTMCell, GRUCell])
def test_norms_are_those_of_the_whole_way(kind: type[Cell]) -> None:
    """The product of the steps' derivatives against the derivative of all steps at once."""
    torch.manual_seed(0)
    cell = kind(1, 5).double().requires_grad_(False)
    found = chapter()["norms_through_time"](cell, n=6, seed=3)
    generator = torch.Generator().manual_seed(3)
    size = 5 * cell.states
    begin = 0.1 * torch.randn(size, generator=generator, dtype=torch.float64)
    products = 0.1 * torch.randn(6, cell.gates * 5, generator=generator, dtype=torch.float64)

    def walk(state: Tensor) -> Tensor:
        for product in products:
            state = torch.cat(cell.step(product, state.split(5)))
        return state

    slope = torch.autograd.functional.jacobian(walk, begin)
    assert found[-1] == pytest.approx(torch.linalg.matrix_norm(slope, 2).item())


@pytest.mark.parametrize("seed", range(5))
def test_open_gates_remember_whatever_the_seed(seed: int) -> None:
    remembered = chapter()["remembered"]
    assert max(remembered(kind, 30, None, seed) for kind in (nn.RNN, nn.LSTM)) < 0.5
    assert min(remembered(kind, 30, 4.0, seed) for kind in (nn.LSTM, nn.GRU)) > 0.9
    assert remembered(nn.LSTM, 10, None, seed, updates=200) > 0.9


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=5), st.floats(0.01, 20))
def test_clip_equals_pytorchs(numbers: list[float], threshold: float) -> None:
    gradient = torch.tensor(numbers, dtype=torch.float64)
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_([parameter], threshold)
    if gradient.norm() > 0:
        clipped = chapter_clip(gradient, threshold)
        torch.testing.assert_close(clipped, parameter.grad, rtol=1e-3, atol=1e-3)


chapter_clip = chapter()["clip"]


# --- the chain -------------------------------------------------------------------


def test_longest_chain_of_known_graphs() -> None:
    names = chapter() | {
        "PRODUCTS": {"AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0"}
    }
    longest = names["longest_chain"]
    longest.__globals__["PRODUCTS"] = names["PRODUCTS"]
    a = torch.randn(3, 3, requires_grad=True)
    for depth in (1, 5, 3000):  # deeper than Python's stack
        y = a
        for _ in range(depth):
            y = (y @ a).tanh()
        assert longest(y) == depth
    assert longest(a @ a + (a @ a) @ a) == 2
    assert longest(torch.cat([a @ a, a])) == 1
    for both, layers in itertools.product((False, True), (1, 2)):
        layer = LSTM(3, 4, layers, bidirectional=both)
        # both directions run side by side; the next layer's inputs wait for all of both
        assert longest(layer(torch.randn(2, 7, 3))[0]) == 7 * layers
