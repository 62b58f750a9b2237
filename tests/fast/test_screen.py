"""Tests of the last product in bytes: what it rules out could not be the best token."""

import math
import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotated_transformer.fast import screen as module
from annotated_transformer.fast.linear import CHUNK
from annotated_transformer.fast.screen import (
    MOST,
    Screen,
    bytes_are_fast,
    first_largest,
    multiplies_bytes,
)

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"
)
needs_bytes = pytest.mark.skipif(
    not multiplies_bytes(), reason="oneDNN does not multiply bytes on this processor"
)


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
@example(2022, 1, 2, 1, 1e-5)  # a bias that is large beside the products: its rounding counts
@given(
    st.integers(0, 10**6),
    st.integers(1, 33),
    st.integers(2, MOST * CHUNK),
    st.integers(1, 90),
    st.sampled_from([1e-5, 1e-3, 1e-2]),
)
def test_the_screen_finds_what_the_whole_product_finds(
    seed: int, rows: int, vocab: int, width: int, apart: float
) -> None:
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
def test_the_bound_of_the_rough_product_holds(
    seed: int, rows: int, vocab: int, width: int, first: int
) -> None:
    x, weight, bias = rows_and_matrix(seed, rows, vocab, width)
    x[:, 0] *= first  # a number far larger than the others leaves them few digits
    screen = Screen(weight, bias)
    rough, error = screen.approximate_logits(x)
    rough = rough.flatten(1)
    assert (rough[:, vocab:] == -math.inf).all()
    exact = x.double() @ weight.double().T + bias.double()
    allowed = bias.isfinite()
    off = (rough[:, :vocab] - exact)[:, allowed]
    assert (off.abs() <= error.double().unsqueeze(1)).all()
    assert (rough[:, :vocab][:, ~allowed] == -math.inf).all()


@needs_bytes
def test_without_the_bound_the_screen_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = rows_and_matrix(0, 400, 900, 64, apart=3e-3)
    screen = Screen(weight, bias)
    wanted = (x @ weight.T + bias).argmax(-1)
    found = screen(x)
    assert found is not None
    assert torch.equal(found, wanted)
    rough = screen.approximate_logits
    monkeypatch.setattr(screen, "approximate_logits", lambda x: (rough(x)[0], torch.zeros(len(x))))
    found = screen(x)
    assert found is not None
    assert not torch.equal(found, wanted)


@needs_bytes
def test_the_screen_gives_up_where_it_must() -> None:
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
def test_one_row_is_multiplied_as_many_are() -> None:
    x, weight, bias = rows_and_matrix(0, 3, 900, 256)
    screen = Screen(weight, bias)
    for row in x.split(1):
        rough, error = screen.approximate_logits(row)
        together, errors = screen.approximate_logits(torch.cat([row, row, row]))
        assert torch.equal(rough.expand(3, -1, -1), together)
        assert torch.equal(error.expand(3), errors)


def broken(*_: object) -> None:
    raise RuntimeError("no such kernel")


@needs_bytes
@pytest.mark.parametrize("fault", ["no product", "sums that overflow"])
def test_bytes_are_used_only_where_they_multiply(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowing(self: Screen, x: Tensor) -> tuple[Tensor, Tensor]:
        return (rough(self, x)[0] * 0.99, torch.zeros(len(x)))

    rough = Screen.approximate_logits
    monkeypatch.setattr(Screen, "approximate_logits", overflowing if "sums" in fault else broken)
    assert not multiplies_bytes.__wrapped__()
    monkeypatch.setattr(module, "multiplies_bytes", lambda: False)
    assert not bytes_are_fast.__wrapped__()


@needs_bytes
def test_a_slow_kernel_is_measured_only_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    rough = Screen.approximate_logits
    calls: list[Tensor] = []

    def slow(self: Screen, x: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(0.2)
        calls.append(x)
        return rough(self, x)

    monkeypatch.setattr(module, "multiplies_bytes", lambda: True)
    monkeypatch.setattr(Screen, "approximate_logits", slow)
    assert not bytes_are_fast.__wrapped__()
    assert len(calls) == 2


@needs_onednn
def test_measuring_changes_no_random_numbers_and_no_setting() -> None:
    bytes_are_fast.cache_clear()
    torch.manual_seed(0)
    before, setting = torch.get_rng_state(), torch.get_float32_matmul_precision()
    bytes_are_fast()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_float32_matmul_precision() == setting


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_first_largest_is_argmax(seed: int, rows: int) -> None:
    values = torch.randn(rows, 7, generator=torch.Generator().manual_seed(seed)).round()
    row, token = torch.ones(rows, 7).nonzero().unbind(1)
    found = first_largest(values.flatten(), row, token)
    assert torch.equal(found, values.argmax(-1))
