"""Label smoothing, against the article's own steps and PyTorch's losses."""

from __future__ import annotations

import json
import math
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import jupytext
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from annotated_transformer.data.records import NO_RECORDS, find_record
from annotated_transformer.figures import PALETTE, canvas, show
from annotated_transformer.training.regularization import LabelSmoothing, Variant, smoothed_target

VARIANTS: tuple[Variant, ...] = ("paper", "others", "article")
SMOOTHING = st.sampled_from([0.0, 0.1, 0.4, 0.9])
SEED = st.integers(0, 10_000)


def article_loss(
    x: Tensor, target: Tensor, size: int, padding_idx: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The article's computation, step by step, in its own order."""
    dist = torch.full_like(x, smoothing / (size - 2))
    dist.scatter_(1, target.unsqueeze(1), 1 - smoothing)
    dist[:, padding_idx] = 0
    dist[target == padding_idx] = 0
    return F.kl_div(x, dist, reduction="sum"), dist


@given(SEED, st.integers(3, 20), SMOOTHING, st.integers(1, 9), st.data())
def test_article_variant_gives_the_articles_values(
    seed: int, size: int, smoothing: float, rows: int, data: st.DataObject
) -> None:
    pad = data.draw(st.integers(0, size - 1))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator, dtype=torch.float64).log_softmax(1)
    x.requires_grad_()
    target = torch.randint(0, size, (rows,), generator=generator)
    loss = LabelSmoothing(size, pad, smoothing)
    expected, dist = article_loss(x, target, size, pad, smoothing)
    got = loss(x, target)
    torch.testing.assert_close(got, expected)
    assert loss.true_dist is not None
    torch.testing.assert_close(loss.true_dist.double(), dist)
    for one, other in zip(
        torch.autograd.grad(got, x), torch.autograd.grad(expected, x), strict=True
    ):
        torch.testing.assert_close(one, other)


@given(SEED, st.integers(3, 12), st.sampled_from(VARIANTS), SMOOTHING)
def test_every_variant_is_the_divergence_from_its_target(
    seed: int, size: int, variant: Variant, smoothing: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, size, generator=generator, dtype=torch.float64).log_softmax(1)
    target = torch.randint(0, size, (6,), generator=generator)
    dense = smoothed_target(target, size, smoothing, variant=variant, dtype=torch.float64)
    sums = dense.sum(1)
    torch.testing.assert_close(sums, (target != 0).double())
    got = LabelSmoothing(size, 0, smoothing, variant=variant)(x, target)
    torch.testing.assert_close(got, F.kl_div(x, dense, reduction="sum"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_who_gets_what(variant: Variant) -> None:
    row = smoothed_target(torch.tensor([4]), 6, 0.3, variant=variant)[0]
    others = {"paper": 6, "others": 5, "article": 4}[variant]
    assert row[1].item() == pytest.approx(0.3 / others)
    assert row[0].item() == pytest.approx(0.0 if variant == "article" else 0.3 / others)
    assert row[4].item() == pytest.approx(0.7 + (0.05 if variant == "paper" else 0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_smoothing_is_the_negative_log_likelihood(variant: Variant) -> None:
    x = torch.randn(5, 9).log_softmax(1)
    target = torch.tensor([3, 0, 8, 1, 0])
    got = LabelSmoothing(9, 0, 0.0, variant=variant)(x, target)
    torch.testing.assert_close(got, F.nll_loss(x, target, ignore_index=0, reduction="sum"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_counts_for_nothing(variant: Variant, smoothing: float) -> None:
    loss = LabelSmoothing(7, 0, smoothing, variant=variant)
    x = torch.randn(3, 7).log_softmax(1)
    target = torch.tensor([2, 5, 1])
    noise = torch.randn(4, 7).log_softmax(1)
    padded = loss(torch.cat([x, noise]), torch.cat([target, torch.zeros(4, dtype=torch.long)]))
    torch.testing.assert_close(padded, loss(x, target))
    assert loss(noise, torch.zeros(4, dtype=torch.long)) == 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_finite_where_a_probability_is_zero(variant: Variant, smoothing: float) -> None:
    loss = LabelSmoothing(5, 0, smoothing, variant=variant)
    probabilities = torch.tensor([[0, 0.2, 0.7, 0.1, 0], [0, 0.2, 0.7, 0.1, 0]])
    x = probabilities.log().requires_grad_()
    value = loss(x, torch.tensor([2, 4]))
    value.backward()
    assert value.isfinite()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_zero_probability_of_padding_leaves_the_articles_value() -> None:
    # the article's penalty curve has such rows; today's kl_div makes them NaN
    x = torch.tensor([[0, 0.7, 0.1, 0.1, 0.1]], dtype=torch.float64).log()
    dist = article_loss(x, torch.tensor([1]), 5, 0, 0.1)[1]
    expected = F.kl_div(x[:, 1:], dist[:, 1:], reduction="sum")
    torch.testing.assert_close(LabelSmoothing(5, 0, 0.1)(x, torch.tensor([1])), expected)


def test_the_divergence_is_zero_at_its_target() -> None:
    for variant in VARIANTS:
        dense = smoothed_target(torch.tensor([3, 1]), 6, 0.2, variant=variant, dtype=torch.float64)
        loss = LabelSmoothing(6, 0, 0.2, variant=variant)(dense.log(), torch.tensor([3, 1]))
        assert abs(loss.item()) < 1e-12


def test_attributes_of_the_article() -> None:
    loss = LabelSmoothing(5, 0, 0.4)
    assert (loss.size, loss.padding_idx, loss.smoothing, loss.confidence) == (5, 0, 0.4, 0.6)
    assert isinstance(loss.criterion, nn.KLDivLoss)
    assert loss.criterion.reduction == "sum"
    assert LabelSmoothing(5, 0, 0.4).true_dist is None
    x = torch.tensor([[0, 0.2, 0.7, 0.1, 0]] * 3).log()
    value = loss(x, torch.tensor([2, 1, 0]))  # the article's example
    third = 0.4 / 3
    expected = [[0, third, 0.6, third, third], [0, 0.6, third, third, third], [0.0] * 5]
    assert loss.true_dist is not None
    torch.testing.assert_close(loss.true_dist, torch.tensor(expected))
    assert not loss.true_dist.requires_grad
    loss.criterion = nn.KLDivLoss(reduction="none")  # it is the one that is used
    torch.testing.assert_close(loss(x, torch.tensor([2, 1, 0])).sum(), value)


def test_the_dense_target_has_the_type_of_its_input() -> None:
    loss = LabelSmoothing(5, 0, 0.1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert loss(torch.randn(2, 5).log_softmax(1).to(dtype), torch.tensor([1, 2])).dtype == dtype
        assert loss.true_dist is not None
        assert loss.true_dist.dtype == dtype


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_the_papers_variant_is_pytorchs_cross_entropy_less_the_entropy(smoothing: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 7, dtype=torch.float64)
    target = torch.tensor([3, 0, 6, 1, 0, 5, 2, 4, 6])
    dense = smoothed_target(target, 7, smoothing, dtype=torch.float64)
    plain = F.cross_entropy(
        logits, target, ignore_index=0, label_smoothing=smoothing, reduction="sum"
    )
    found = LabelSmoothing(7, 0, smoothing, variant="paper")(logits.log_softmax(1), target)
    torch.testing.assert_close(found, plain - torch.special.entr(dense).sum())


ROOT = Path(__file__).resolve().parents[2]
RECORD = "table3-small.json"
TOLD = "without dropout: perplexity times "


def real_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the two cells of the chapter that read real runs, as if the folder were the book's."""
    cells = jupytext.read(ROOT / "book/training/regularization.md").cells
    sources = [c.source for c in cells if RECORD in c.source or "def compare(" in c.source]
    assert len(sources) == 2
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"find_record": find_record, "math": math, "statistics": statistics}
    names |= {"PALETTE": PALETTE, "canvas": canvas, "show": show, "product": product}
    exec("\n".join(sources), names)
    return names


@pytest.fixture
def record() -> dict[str, Any]:
    """Return the record that comes with the repository."""
    found: dict[str, Any] = json.loads((ROOT / "results" / RECORD).read_text(encoding="utf-8"))
    return found


def test_page_says_so_where_no_run_is_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert real_run(tmp_path, monkeypatch)["runs"] == {}
    assert capsys.readouterr().out == f"{NO_RECORDS}\nNot yet run, as far as this folder knows\n"


@pytest.mark.parametrize("lost", [(), ("base",), ("D_drop0",), ("D_smooth0", "base")])
def test_record_of_fewer_rows_breaks_no_page(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    record: dict[str, Any],
    lost: tuple[str, ...],
) -> None:
    for row in lost:
        record["rows"][row]["runs"].clear()  # a row that waits for its first seed
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / RECORD).write_text(json.dumps(record), encoding="utf-8")
    names = real_run(tmp_path, monkeypatch)
    assert len(names["runs"]) == 5 - len(lost)
    both_at_hand = not {"base", "D_drop0"} & set(lost)
    assert (TOLD in capsys.readouterr().out) is both_at_hand


def test_what_the_page_says_follows_the_record(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    record: dict[str, Any],
) -> None:
    rows = record["rows"]
    base, bare = (rows[row]["runs"] for row in ("base", "D_drop0"))
    for seed in bare.keys() & base.keys():
        bare[seed]["loss"] = base[seed]["loss"] + math.log(3)
        bare[seed]["bleu"] = base[seed]["bleu"] + 2
    bare["alone"] = {"loss": 99.0, "bleu": 0.0}  # a seed that the base has not, and does not count
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / RECORD).write_text(json.dumps(record), encoding="utf-8")
    real_run(tmp_path, monkeypatch)
    assert f"{TOLD}3.00, BLEU +2.0 (the paper's: times 1.17, BLEU -1.2)" in capsys.readouterr().out
