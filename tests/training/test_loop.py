"""Tests of the training loop: what divides, what counts, and what stays untouched."""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from annotated_transformer.fast.loss import fast_batch_loss
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.transformer import make_model
from annotated_transformer.notation import PAD
from annotated_transformer.training.batches import Batch, make_batch
from annotated_transformer.training.loop import (
    LossFunction,
    LossScale,
    NonFiniteError,
    Progress,
    World,
    batch_loss,
    evaluate,
    fit,
    update,
)
from annotated_transformer.training.optimizer import make_adam, noam_schedule, rate
from tests.parts import part_of

VOCAB = 13

Pair = tuple[list[int], list[int]]

sentence = st.lists(st.integers(4, VOCAB - 1), max_size=6)
pairs = st.lists(st.tuples(sentence, sentence), min_size=1, max_size=7)


def model(dropout: float = 0.0, seed: int = 0, **options: Any) -> EncoderDecoder:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "N": 1,
        "d_model": 8,
        "d_ff": 16,
        "h": 2,
        "dropout": dropout,
        "max_len": 64,
        **options,
    }
    return make_model(VOCAB, VOCAB, **sizes).double()


def batch(of: Sequence[Pair]) -> Batch:
    return make_batch([s for s, _ in of], [t for _, t in of])


def plain_loss(net: EncoderDecoder, of: Batch, smoothing: float) -> Tensor:
    """Padded, with all logits at once, divided by the tokens that are not padding."""
    project = part_of(net, "generator.proj", nn.Linear)
    logits = project(net(of.src, of.tgt, of.src_mask, of.tgt_mask))
    gold = of.tgt_y.reshape(-1)
    total = F.cross_entropy(
        logits.flatten(0, 1), gold, ignore_index=PAD, label_smoothing=smoothing, reduction="sum"
    )
    return total / (gold != PAD).sum()


def gradients(net: nn.Module) -> list[Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return found


def near(first: Iterable[Tensor], second: Iterable[Tensor], tolerance: float) -> bool:
    return all((a - b).abs().max() < tolerance for a, b in zip(first, second, strict=True))


FIXED = [([4, 5, 6], [7]), ([8], [9, 10, 11, 12, 4]), ([], []), ([5, 5], [6, 6, 6])]


LOSSES = pytest.mark.parametrize("loss_of", [batch_loss, fast_batch_loss])


@LOSSES
@settings(max_examples=30)
@given(pairs, st.sampled_from([0.0, 0.1, 0.6]), st.sampled_from(["post", "pre"]))
def test_the_loss_is_that_of_the_logits_in_value_and_gradient(
    loss_of: LossFunction, of: list[Pair], smoothing: float, norm: str
) -> None:
    net, one = model(norm=norm), batch(of)
    plain = plain_loss(net, one, smoothing)
    plain.backward()
    expected = gradients(net)
    loss, nll = loss_of(net, one, smoothing)
    loss.backward()
    assert not nll.requires_grad
    assert nll.dtype == torch.float64
    assert abs(loss - plain) < 1e-10
    assert near(gradients(net), expected, 1e-10)
    assert abs(nll / one.ntokens - plain_loss(net, one, 0.0)) < 1e-10


def test_another_number_for_padding() -> None:
    net = model()
    tokens = torch.tensor([[1, 5, 6, 2], [1, 7, 2, 0]])
    other = torch.tensor([[1, 5, 6, 2], [1, 7, 2, 4]])
    found = [batch_loss(net, Batch(of, of, pad), 0.1) for of, pad in ((tokens, 0), (other, 4))]
    assert near(found[0], found[1], 1e-12)


@LOSSES
@settings(max_examples=30)
@given(pairs, st.data())
def test_accumulated_batches_are_the_big_batch(
    loss_of: LossFunction, of: list[Pair], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(of) - 1)), max_size=4)))
    parts = [of[i:j] for i, j in zip([0, *cuts], [*cuts, len(of)], strict=True) if of[i:j]]
    one, many = model(), model()
    first = update(one, [batch(of)], torch.optim.SGD(one.parameters(), 0.5), smoothing=0.1)
    optimizer = torch.optim.SGD(many.parameters(), 0.5)
    second = update(many, [batch(p) for p in parts], optimizer, smoothing=0.1, loss=loss_of)
    assert near(one.parameters(), many.parameters(), 1e-9)
    assert math.isclose(first.grad_norm, second.grad_norm, rel_tol=1e-9)
    assert first.tokens == second.tokens == sum(len(t) + 1 for _, t in of)
    assert math.isclose(first.nll, second.nll, rel_tol=1e-12)


def test_mean_of_means_would_be_noticed() -> None:
    net = model()
    batch_loss(net, batch(FIXED))[0].backward()
    whole = gradients(net)
    for half in (FIXED[:1], FIXED[1:]):
        (batch_loss(net, batch(half))[0] / 2).backward()
    assert not near(gradients(net), whole, 1e-4)


def test_an_update_moves_weights_and_clears_gradients() -> None:
    net = model()
    before = copy.deepcopy(net.state_dict())
    progress = update(net, [batch(FIXED)], make_adam(net, 0.01))
    assert any(not torch.equal(before[name], now) for name, now in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert progress.seconds > 0
    assert progress.speed == progress.tokens / progress.seconds


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_a_loss_that_is_not_finite_changes_nothing(value: float, place: int) -> None:
    net = model()
    optimizer = make_adam(net)
    schedule = noam_schedule(optimizer, 8)
    good = [([4], [5])]
    bad = [([4], [12])]
    update(net, [batch(good)], optimizer, schedule)
    net.get_parameter("generator.proj.bias").data[12] = value
    weights = [p.detach().clone() for p in net.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    order = [batch(bad), batch(good)]
    with pytest.raises(FloatingPointError, match=r"tokens is (nan|inf|-inf).*learning rate"):
        update(net, order[:: 1 - 2 * place], optimizer, schedule)
    for now, then in zip(net.parameters(), weights, strict=True):
        torch.testing.assert_close(now.data, then, rtol=0, atol=0, equal_nan=True)
        assert now.grad is None
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for number, kept in state["state"].items():
        assert all(torch.equal(kept[k], after["state"][number][k]) for k in kept)
    assert schedule.last_epoch == 1


class BreakBackward(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.value, None


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_infinite_gradient_of_a_finite_loss_changes_nothing(
    value: float, clip: float | None
) -> None:
    net = model()
    optimizer = make_adam(net)
    schedule = noam_schedule(optimizer, 8)
    update(net, [batch(FIXED)], optimizer, schedule)
    weights = [p.detach().clone() for p in net.parameters()]
    state = copy.deepcopy(optimizer.state_dict())

    def broken(*args: Any) -> tuple[Tensor, Tensor]:
        loss, nll = batch_loss(*args)
        broken_loss: Tensor = BreakBackward.apply(loss, value)  # type: ignore[no-untyped-call]
        return broken_loss, nll

    with pytest.raises(NonFiniteError, match=r"gradient norm .* is (nan|inf).*clip") as error:
        update(net, [batch(FIXED)], optimizer, schedule, clip=clip, loss=broken)
    assert math.isfinite(error.value.loss)
    assert not math.isfinite(error.value.grad_norm)
    assert error.value.tokens == batch(FIXED).ntokens
    for now, then in zip(net.parameters(), weights, strict=True):
        assert torch.equal(now, then)
        assert now.grad is None
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for number, kept in state["state"].items():
        assert all(torch.equal(kept[k], after["state"][number][k]) for k in kept)
    assert schedule.last_epoch == 1


def test_clipping_shortens_the_gradient_of_the_whole_update() -> None:
    parts = [batch(FIXED[:1]), batch(FIXED[1:])]

    def moved(clip: float | None) -> tuple[Tensor, float]:
        net = model()
        before = nn.utils.parameters_to_vector(net.parameters()).detach()
        made = update(net, parts, torch.optim.SGD(net.parameters(), 1.0), clip=clip)
        return nn.utils.parameters_to_vector(net.parameters()).detach() - before, made.grad_norm

    (free, norm), (short, same), (long, _) = moved(None), moved(0.01), moved(1e6)
    assert math.isclose(free.norm(), norm, rel_tol=1e-9)
    assert math.isclose(short.norm(), 0.01, rel_tol=1e-9)
    assert norm == same > 0.01  # the norm before clipping is told
    torch.testing.assert_close(short / short.norm(), free / free.norm())
    assert torch.equal(long, free)


class Scale(LossScale):
    """A factor that remembers what it was told."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.told: list[bool] = []

    def adapt(self, finite: bool) -> None:
        self.told.append(finite)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_scale_is_undone_before_the_step(clip: float | None) -> None:
    nets = model(), model()
    scales = None, Scale(1024.0)
    made = [
        update(net, [batch(FIXED)], torch.optim.SGD(net.parameters(), 0.5), clip=clip, scale=scale)
        for net, scale in zip(nets, scales, strict=True)
    ]
    assert near(nets[0].parameters(), nets[1].parameters(), 1e-12)
    assert math.isclose(made[0].grad_norm, made[1].grad_norm, rel_tol=1e-12)
    assert scales[1].told == [True]


def test_with_a_scale_an_overflow_is_told_and_no_error() -> None:
    net = model()
    weights = [p.detach().clone() for p in net.parameters()]
    optimizer, scale = make_adam(net), Scale(math.inf)
    made = update(net, [batch(FIXED)], optimizer, scale=scale)
    assert not math.isfinite(made.grad_norm)
    assert scale.told == [False]
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), weights, strict=True))
    assert all(p.grad is None for p in net.parameters())


class TwoWorlds(World):
    """A second process that does the same as this one, and gradients that are a mean of both."""

    size = 2

    def __init__(self) -> None:
        self.waited = 0

    def sum(self, *values: float) -> list[float]:
        return [2 * value for value in values]

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        self.waited += 1
        return super().no_sync(module)


def test_an_update_counts_the_tokens_of_all_processes() -> None:
    one, both = model(), model()
    world = TwoWorlds()
    parts = [batch(FIXED[:2]), batch(FIXED[2:])]
    alone = update(one, parts, torch.optim.SGD(one.parameters(), 0.5))
    made = update(both, parts, torch.optim.SGD(both.parameters(), 0.5), world=world)
    assert (made.tokens, made.nll) == (2 * alone.tokens, 2 * alone.nll)
    assert near(one.parameters(), both.parameters(), 1e-12)  # twice the sum, by twice the tokens
    assert world.waited == 1  # gradients are exchanged with the last batch only
    assert evaluate(one, parts, world=world).tokens == 2 * alone.tokens


def test_smoothing_that_is_not_finite_counts_too() -> None:
    net = model()
    bias = net.get_parameter("generator.proj.bias")
    bias.data[9] = -math.inf  # the likelihood itself stays finite
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        update(net, [batch([([4], [5])])], make_adam(net), smoothing=0.1)


def test_batches_may_come_from_a_generator() -> None:
    found = []
    for make in (list, iter):
        net = model()
        some = [batch([([4, 5], [6])]), batch([([7], [8, 9])])]
        found.append(update(net, make(some), torch.optim.SGD(net.parameters(), 0.1)).loss)
    assert found[0] == found[1] > 0


def test_an_update_of_nothing_is_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match="at least one target token"):
        update(net, [], make_adam(net))
    padding = Batch(torch.tensor([[4]]), torch.full((1, 3), PAD))
    with pytest.raises(ValueError, match="at least one target token"):
        update(net, [padding], make_adam(net))
    with pytest.raises(ValueError, match="batches: none came"):
        evaluate(net, [padding])


@pytest.mark.parametrize(("count", "accumulate"), [(6, 1), (6, 3), (7, 3), (2, 5), (0, 2)])
def test_the_schedule_counts_updates(count: int, accumulate: int) -> None:
    net = model()
    optimizer = make_adam(net)
    schedule = noam_schedule(optimizer, 8, warmup=2)
    rates = [optimizer.param_groups[0]["lr"]]
    steps = fit(net, [batch(FIXED)] * count, optimizer, schedule, accumulate=accumulate)
    tokens = []
    for progress in steps:
        rates.append(optimizer.param_groups[0]["lr"])
        tokens.append(progress.tokens)
    updates = math.ceil(count / accumulate)
    assert rates == [rate(step, 8, 1.0, 2) for step in range(1, updates + 2)]
    assert sum(tokens) == count * batch(FIXED).ntokens


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_a_limit_that_would_turn_the_gradient_is_refused(clip: float) -> None:
    net = model()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=r"clip .*: must be above 0"):
        update(net, [batch(FIXED)], torch.optim.SGD(net.parameters(), 1.0), clip=clip)
    assert all(map(torch.equal, before.values(), net.state_dict().values()))


def test_groups_of_no_batches_are_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match="accumulate 0: must be at least 1"):
        next(fit(net, [batch(FIXED)], make_adam(net), accumulate=0))


def test_gradients_from_before_do_not_count() -> None:
    def learned(*, looked: bool) -> list[Tensor]:
        net = model()
        if looked:
            batch_loss(net, batch(FIXED[:1]))[0].backward()
        update(net, [batch(FIXED)], torch.optim.SGD(net.parameters(), 1.0))
        return list(net.state_dict().values())

    assert all(map(torch.equal, learned(looked=True), learned(looked=False)))


def test_fit_clips_as_the_update_does() -> None:
    def learned(clip: float | None, *, fitted: bool) -> list[Tensor]:
        net, parts = model(), [batch(FIXED[:1]), batch(FIXED[1:])]
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        if fitted:
            list(fit(net, parts, optimizer, smoothing=0.1, accumulate=2, clip=clip))
        else:
            update(net, parts, optimizer, smoothing=0.1, clip=clip)
        return list(net.state_dict().values())

    same = [torch.equal(a, b) for a, b in zip(
        learned(0.01, fitted=True), learned(0.01, fitted=False), strict=True)]  # fmt: skip
    assert all(same)
    free = learned(None, fitted=True)
    assert not all(map(torch.equal, learned(0.01, fitted=True), free))


def test_fit_trains_in_training_mode_and_stops_when_told() -> None:
    net = model(dropout=0.5).eval()
    taken = []

    def batches() -> Iterator[Batch]:
        for number in range(10):
            taken.append(number)
            yield batch(FIXED)

    steps = fit(net, batches(), make_adam(net, 1e-3))
    next(steps)
    assert net.training
    net.eval()  # as an evaluation in between might
    next(steps)
    assert net.training
    assert taken == [0, 1]


@LOSSES
def test_fit_learns(loss_of: LossFunction) -> None:
    net = model(seed=1)
    steps = fit(net, [batch(FIXED)] * 60, make_adam(net, 0.02), smoothing=0.0, loss=loss_of)
    losses = [step.loss for step in steps]
    assert losses[-1] < losses[0] / 4


@LOSSES
@settings(max_examples=20)
@given(pairs, st.booleans())
def test_evaluation_leaves_the_model_as_it_was(
    loss_of: LossFunction, of: list[Pair], training: bool
) -> None:
    net = model(dropout=0.5).train(training)
    net.get_parameter("generator.proj.bias").grad = kept_grad = torch.ones_like(
        net.get_parameter("generator.proj.bias")
    )
    first = evaluate(net, [batch(of)], loss=loss_of)
    second = evaluate(net, [batch([pair]) for pair in of], loss=loss_of)
    assert first.tokens == second.tokens
    assert math.isclose(first.nll, second.nll, rel_tol=1e-10)  # no dropout
    assert all(module.training == training for module in net.modules())
    assert net.get_parameter("generator.proj.bias").grad is kept_grad
    assert torch.equal(kept_grad, torch.ones_like(kept_grad))


def test_an_evaluation_of_nothing_is_refused() -> None:
    """Batches that are used up would else be a loss of zero, the best of all."""
    model = make_model(9, 9, N=1, d_model=8, d_ff=8, h=2)
    batches = iter([make_batch([[5]], [[6]])])
    assert evaluate(model, batches).loss > 0
    with pytest.raises(ValueError, match="batches: none came"):
        evaluate(model, batches)


def test_evaluation_that_fails_puts_the_mode_back() -> None:
    net = model().train()
    with pytest.raises(IndexError):
        evaluate(net, [batch([([VOCAB], [4])])])
    assert net.training


def test_progress_adds_up() -> None:
    total = Progress(2.0, 4, 1.0, 0.1) + Progress(6.0, 4, 3.0, 0.2)
    assert (total.loss, total.speed, total.grad_norm) == (1.0, 2.0, 0.2)
    assert math.isclose(total.perplexity, math.e)
    assert (Progress().loss, Progress().speed, Progress().perplexity) == (0.0, 0.0, 1.0)
    assert Progress(1e9, 1, 1.0).perplexity > 1e300  # no overflow


@pytest.mark.parametrize("loss", [batch_loss, fast_batch_loss])
def test_a_compiled_model_is_trained_by_its_compiled_code(loss: LossFunction) -> None:
    calls = 0

    def backend(graph: torch.fx.GraphModule, _: Sequence[Tensor]) -> Any:
        def run(*inputs: Tensor) -> Any:
            nonlocal calls
            calls += 1
            return graph.forward(*inputs)

        return run

    net = model()
    compiled = cast("nn.Module", torch.compile(net, backend=backend))
    steps = fit(compiled, [batch(FIXED)] * 3, make_adam(net, 1e-3), loss=loss)
    assert len(list(steps)) == 3
    assert calls >= 3
