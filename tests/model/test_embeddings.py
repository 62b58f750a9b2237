"""Embeddings and positions against arithmetic of their own."""

import cmath
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.model.embeddings import (
    Embeddings,
    LearnedPositions,
    PositionalEncoding,
    sinusoid,
)

seeds = st.integers(0, 2**31)
kinds = pytest.mark.parametrize("kind", [PositionalEncoding, LearnedPositions])


@settings(max_examples=30)
@given(seeds, st.lists(st.integers(1, 4), max_size=3), st.integers(1, 9), st.integers(1, 9))
def test_an_embedding_is_a_product_with_a_one_hot_vector(
    seed: int, shape: list[int], d_model: int, vocab: int
) -> None:
    torch.manual_seed(seed)
    embed = Embeddings(d_model, vocab).double()
    tokens = torch.randint(vocab, shape)
    y = embed(tokens)
    assert y.shape == (*shape, d_model)
    plain = F.one_hot(tokens, vocab).double() @ embed.lut.weight * d_model**0.5
    torch.testing.assert_close(y, plain)
    mine, other = (torch.autograd.grad(z.sin().sum(), embed.lut.weight)[0] for z in (y, plain))
    torch.testing.assert_close(mine, other)


@settings(max_examples=20)
@given(st.integers(0, 12), st.integers(1, 17))
def test_sinusoids_are_the_parts_of_complex_powers(length: int, d_model: int) -> None:
    table = sinusoid(length, d_model, torch.float64)
    assert table.shape == (length, d_model)
    for pos in range(length):
        for column in range(d_model):
            turn = cmath.exp(1j * pos * math.exp(-math.log(10000) * (column // 2 * 2) / d_model))
            expected = turn.imag if column % 2 == 0 else turn.real
            assert table[pos, column].item() == pytest.approx(expected, abs=1e-12)


def test_far_positions_keep_their_digits_in_single_precision() -> None:
    exact = sinusoid(100_000, 8, torch.float64)
    assert (sinusoid(100_000, 8).double() - exact).abs().max() < 1e-7


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 500))
def test_a_shift_is_one_rotation(k: int, pos: int, other: int) -> None:
    table = sinusoid(600, 8, torch.float64).view(600, 4, 2)
    turns = torch.view_as_complex(table.flip(-1).contiguous())  # cos + i sin
    torch.testing.assert_close(
        turns[pos + k] / turns[pos], turns[other % 500 + k] / turns[other % 500]
    )


@kinds
def test_positions_are_added_row_by_row(kind: type[PositionalEncoding | LearnedPositions]) -> None:
    torch.manual_seed(0)
    encoding = kind(6, 0.0, max_len=9).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    y = encoding(x)
    assert encoding.max_len == 9
    for sentence in range(2):
        for pos in range(5):
            torch.testing.assert_close(y[sentence, pos], x[sentence, pos] + encoding.pe[0, pos])


def test_sinusoids_are_no_parameter_and_are_not_saved() -> None:
    encoding = PositionalEncoding(6, 0.0, max_len=9)
    assert not list(encoding.parameters())
    assert not encoding.state_dict()
    torch.testing.assert_close(encoding.pe[0], sinusoid(9, 6))
    assert encoding(torch.zeros(1, 3, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_learned_positions_learn_only_where_they_were_used() -> None:
    torch.manual_seed(0)
    encoding = LearnedPositions(6, 0.0, max_len=9)
    assert [p.shape for p in encoding.parameters()] == [(1, 9, 6)]
    encoding(torch.randn(2, 4, 6)).sin().sum().backward()
    assert encoding.pe.grad is not None
    grad = encoding.pe.grad[0]
    assert grad[:4].ne(0).all()
    assert grad[4:].eq(0).all()


@kinds
def test_the_sum_drops_out_in_training_only(
    kind: type[PositionalEncoding | LearnedPositions],
) -> None:
    torch.manual_seed(0)
    encoding, x = kind(64, 0.5, max_len=50), torch.randn(4, 50, 64)
    whole = x + encoding.pe
    y = encoding(x)
    torch.testing.assert_close(y, 2 * whole * (y != 0))
    assert 0.45 < (y == 0).float().mean() < 0.55
    torch.testing.assert_close(encoding.eval()(x), whole)


@kinds
def test_a_sequence_longer_than_the_table_is_refused(
    kind: type[PositionalEncoding | LearnedPositions],
) -> None:
    encoding = kind(6, 0.0, max_len=3)
    assert encoding(torch.zeros(1, 3, 6)).shape == (1, 3, 6)
    with pytest.raises(IndexError, match="a sequence of 4 tokens, and only 3 positions"):
        encoding(torch.zeros(1, 4, 6))
