"""Adam and the learning rate, against arithmetic of our own."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from annotated_transformer.training.optimizer import NoamOpt, make_adam, noam_schedule, rate

WIDTH = st.integers(1, 4096)
WARMUP = st.integers(1, 10_000)


@given(st.integers(1, 1_000_000), WIDTH, st.floats(0.01, 10), WARMUP)
def test_rate_by_exact_squares(step: int, d_model: int, factor: float, warmup: int) -> None:
    # the square of the rate is rational: no root has to be taken
    lower = min(Fraction(1, step), Fraction(step**2, warmup**3))
    exact = Fraction(factor) ** 2 * lower / d_model
    assert math.isclose(rate(step, d_model, factor, warmup) ** 2, exact, rel_tol=1e-12)


@given(WIDTH, WARMUP)
def test_peak_is_at_the_end_of_the_warmup(d_model: int, warmup: int) -> None:
    peak = rate(warmup, d_model, 1.0, warmup)
    assert math.isclose(peak, (d_model * warmup) ** -0.5)
    assert rate(warmup + 1, d_model, 1.0, warmup) < peak
    assert warmup == 1 or rate(warmup - 1, d_model, 1.0, warmup) < peak


def test_step_zero_counts_as_one() -> None:
    assert rate(0, 512, 1.0, 4000) == rate(1, 512, 1.0, 4000)


def test_adam_has_the_constants_of_the_paper() -> None:
    adam = make_adam(nn.Linear(2, 2))
    assert adam.defaults["betas"] == (0.9, 0.98)
    assert adam.defaults["eps"] == 1e-9


def test_adam_by_hand() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=False).double()
    weight = layer.weight.detach().clone()
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    adam = make_adam(layer, lr=0.01)
    for t in range(1, 51):
        layer(torch.randn(4, 3, dtype=torch.float64)).square().sum().backward()
        g = layer.weight.grad
        assert g is not None
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g * g
        weight -= 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.98**t)).sqrt() + 1e-9)
        adam.step()
        adam.zero_grad()
        torch.testing.assert_close(layer.weight.detach(), weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("warmup", [1, 3, 10])
def test_schedule_gives_each_update_its_own_number(warmup: int) -> None:
    adam = make_adam(nn.Linear(2, 1))
    schedule = noam_schedule(adam, 64, 0.5, warmup)
    for update in range(1, 30):
        assert adam.param_groups[0]["lr"] == rate(update, 64, 0.5, warmup)
        adam.step()
        schedule.step()


def test_schedule_survives_saving() -> None:
    def made() -> tuple[torch.optim.Adam, LambdaLR]:
        adam = make_adam(nn.Linear(2, 1))
        return adam, noam_schedule(adam, 64, 1.0, 10)

    adam, schedule = made()
    for _ in range(7):
        adam.step()
        schedule.step()
    other, resumed = made()
    other.load_state_dict(adam.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    other.step()
    resumed.step()
    assert other.param_groups[0]["lr"] == rate(9, 64, 1.0, 10)


def test_article_style_optimizer() -> None:
    layer = nn.Linear(2, 1)
    wrapped = NoamOpt(512, 2, 400, torch.optim.Adam(layer.parameters(), lr=0, betas=(0.9, 0.98)))
    assert (wrapped._step, wrapped._rate) == (0, 0)
    assert (wrapped.model_size, wrapped.factor, wrapped.warmup) == (512, 2, 400)
    before = layer.weight.detach().clone()
    for update in range(1, 6):
        layer(torch.ones(1, 2)).sum().backward()
        wrapped.step()
        wrapped.optimizer.zero_grad()
        used = wrapped.optimizer.param_groups[0]["lr"]
        assert used == wrapped.rate() == rate(update, 512, 2, 400)
        assert (wrapped._step, wrapped._rate) == (update, used)
    assert not torch.equal(layer.weight, before)
    assert wrapped.rate(400) == rate(400, 512, 2, 400)
