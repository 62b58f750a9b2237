"""The checks of the training chapters notice broken code."""

import pytest
import torch

from tests.claims import assert_claim_can_fail, run_claim

BATCHES, DISTRIBUTED, OPTIMIZER, REGULARIZATION = (
    f"training/{name}" for name in ("batches", "distributed", "optimizer", "regularization")
)


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        # the bound: takes one sentence more; counts real tokens; looks at one side only
        ("5.1b-P", "torch.arange(1, len(candidates) + 1)", "torch.arange(len(candidates))"),
        ("5.1b-P", "longest * torch.arange(1, len(candidates) + 1)", "candidates.cumsum(dim=0)"),
        ("5.1b-P", "width = source.maximum(target)", "width = source"),
        # padding: not sorted at all; sorted by something else than length
        ("5.1b-M", "part[by].split(_fill(width[by],", "part.split(_fill(width,"),
        ("5.1b-M", "by = (width * (2 * most) + source - target)", "by = (part % 7)"),
    ],
)
def test_batches(claim: str, old: str, new: str) -> None:
    assert_claim_can_fail(BATCHES, claim, old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(100_000, (0.35, 0.45)", "(100_000, (0.45, 0.55)"),  # another second, another number
        ("(100_000, (0.35, 0.45)", "(150_000, (0.35, 0.45)"),
        ("(11.5, 12.5)", "(10.5, 11.5)"),  # by the hours and the seconds alone this would fit
        ("(3.25e18, 3.35e18)", "(2.95e18, 3.05e18)"),  # 0.4 seconds sharp; not by the hours
        ("(300_000, (0.95, 1.05)", "(300_000, (1.05, 1.15)"),
        ("(3.45 * 24, 3.55 * 24)", "(3.95 * 24, 4.05 * 24)"),
        ("(8 * 9.5e12)", "(8 * 6.0e12)"),  # other GPUs
    ],
)
def test_hardware_and_schedule(old: str, new: str) -> None:
    assert_claim_can_fail(DISTRIBUTED, "5.2a", old, new)


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        ("5.3a", "lr=lr, betas=(0.9, 0.98)", "lr=lr, betas=(0.9, 0.999)"),
        ("5.3a", "lr=lr, betas=(0.9, 0.98)", "lr=lr, betas=(0.98, 0.9)"),
        ("5.3a", "eps=1e-9, fused=True", "eps=1e-8, fused=True"),
        ("5.3a", "v / (1 - beta2**t)", "v"),
        ("5.3b", "step * warmup**-1.5", "step * warmup**-1.4"),
        ("5.3b", "min(step**-0.5,", "max(step**-0.5,"),
        ("5.3b", "factor * model_size**-0.5", "factor * model_size**-0.4"),
        ("5.3b", "rate(done + 1, model_size", "rate(done, model_size"),
        # moved on by every micro-batch: in a loop written out, and in the loop of the package
        ("5.3b", "schedule.step()  # once", "[schedule.step() for _ in range(accumulate)]  # once"),
        ("5.3b", "schedule, accumulate=accumulate):", "schedule, accumulate=1):"),
        # gradients of the wrong order, then of another layer; models that hardly learn
        ("3.1d", "d_model=64, d_ff=256, h=4, dropout=0.0, norm=norm", "d_model=64, d_ff=256, h=4"),
        ("3.1d", "for layer in model.decoder.layers]", "for layer in model.encoder.layers]"),
        ("3.1d", "updates: int = 100", "updates: int = 10"),
    ],
)
def test_optimizer(claim: str, old: str, new: str) -> None:
    assert_claim_can_fail(OPTIMIZER, claim, old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("d_ff=32, h=2, dropout=0.1)", "d_ff=32, h=2, dropout=0.1, ff_dropout=0.1)"),
        (  # dropped after the addition
            "sublayer.dropout = DropAll()",
            "sublayer.dropout = DropAll()\n"
            "        sublayer.forward = lambda x, f, s=sublayer: s.norm(s.dropout(x + f(x)))",
        ),
        (  # positions added after the dropout
            "model.src_embed[1].dropout = DropAll()",
            "model.src_embed[1].forward = lambda x: 0 * x + model.src_embed[1].pe[:, : x.size(1)]",
        ),
    ],
)
def test_dropout(old: str, new: str) -> None:
    assert_claim_can_fail(REGULARIZATION, "5.4a", old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # the variants of the table
        ('"others": size - 1, "article"', '"others": size, "article"'),
        ("dist[:, padding_idx] = 0.0", "pass"),
        ("(smoothing / share if variant ==", "(0 * share if variant =="),
        ("(1 - one_hot) * e / (len(x) - 1)", "(1 - one_hot) * e / len(x)"),
        ("dist[target == padding_idx] = 0.0", "pass"),
        # the module
        ('"variant": self.variant, ', ""),
        ('KLDivLoss(reduction="sum")', 'KLDivLoss(reduction="batchmean")'),
        ("loss: Tensor = self.criterion(x, self.true_dist)", "loss = -(x * self.true_dist).sum()"),
        ("x = x.clamp(min=-1e4)", "pass"),
        # the loss of the training loop
        ("ignore_index=PAD, label_smoothing=e", "label_smoothing=e"),
    ],
)
def test_label_smoothing(old: str, new: str) -> None:
    assert_claim_can_fail(REGULARIZATION, "5.4b-P", old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y[:, rows], label_smoothing=e", "y[:, rows]"),  # no smoothing: no difference
        ("wrong = torch.rand(tasks, count) < noise", "wrong = torch.rand(tasks, count) < 0"),
    ],
)
def test_smoothing_hurts_and_helps(old: str, new: str) -> None:
    assert_claim_can_fail(REGULARIZATION, "5.4b-M", old, new)


def test_the_status_of_smoothing_follows_from_the_measured_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = run_claim(REGULARIZATION, "5.4b-M")
    said = capsys.readouterr().out
    ends, judge = names["ends"], names["judge"]
    assert said.splitlines()[-1] == judge(ends)
    assert judge(ends) == "status: not resolved; both halves hold at 2%"
    (plain, smooth), many = ends[0.02], ends[0.1]
    assert judge({0.02: (plain, smooth)}).startswith("status: holds at our scale;")
    assert judge({0.1: many}).startswith("status: does not hold at our scale;")
    assert judge({0.02: (smooth, plain)}).startswith("status: does not hold at our scale;")
    assert judge({0.02: (plain, plain)}) == "status: not resolved; both halves hold at no share"
    swing = torch.tensor([1.0, -1.0]).repeat(8)  # the same means, but the tasks disagree
    assert judge({0.02: (plain, smooth + swing)}).startswith("status: not resolved;")


@pytest.mark.parametrize(("old", "new"), [('"base": 0.43', '"base": 0.2'), ("1.0", "0.5")])
def test_times_that_ask_for_more_than_we_reached_are_not_plausible(old: str, new: str) -> None:
    assert_claim_can_fail(DISTRIBUTED, "5.2a-R", old, new)
