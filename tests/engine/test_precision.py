"""Sixteen bits where they are enough: against float64, with overflows made on purpose."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from annotated_transformer.engine.precision import (
    BUCKETS,
    DynamicLossScale,
    PreciseLoss,
    Precision,
    pad_to_bucket,
)
from annotated_transformer.fast.loss import linear_cross_entropy
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.transformer import ModelConfig, build_model
from annotated_transformer.training.batches import Batch, make_batch
from annotated_transformer.training.distributed import replica_loss
from annotated_transformer.training.loop import (
    NonFiniteError,
    Progress,
    evaluate,
    grad_norm,
    take_step,
    update,
)
from annotated_transformer.training.optimizer import make_adam

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def a_model(dropout: float = 0.0, layers: int = 2) -> EncoderDecoder:
    torch.manual_seed(0)
    return build_model(50, 50, ModelConfig(N=layers, d_model=32, d_ff=64, h=2, dropout=dropout))


def some_batch(sentences: int, longest: int, seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, longest, (2, sentences), generator=rng).tolist()
    sides = [[torch.randint(4, 50, (n,), generator=rng).tolist() for n in side] for side in sizes]
    return make_batch(*sides)


# --- precision -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOW)
def test_gradients_are_those_of_float32_but_for_rounding(name: Any) -> None:
    model, batch = a_model(), some_batch(9, 12)
    found = []
    for precision in (Precision(), Precision(name)):
        model.zero_grad()
        loss, nll = PreciseLoss(model, precision)(batch, 0.1, batch.ntokens)
        factor = 1.0 if precision.scale is None else precision.scale.value
        (loss * factor).backward()
        grads = [p.grad / factor for p in model.parameters() if p.grad is not None]
        assert {g.dtype for g in grads} == {torch.float32}
        found.append((loss.item(), nll.item(), torch.cat([g.flatten() for g in grads])))
    (loss, nll, exact), (low_loss, low_nll, low) = found
    roundings = 16 * torch.finfo(LOW[name]).eps
    assert low_loss == pytest.approx(loss, rel=roundings)
    assert low_nll == pytest.approx(nll, rel=roundings)
    assert 0 < (low - exact).norm() < roundings * exact.norm()


@pytest.mark.parametrize("name", [None, *LOW])
def test_the_chunked_loss_under_autocast_is_the_plain_one(name: str | None) -> None:
    torch.manual_seed(1)
    projection, gold = nn.Linear(16, 700), torch.randint(0, 700, (1100,))  # three chunks
    x = torch.randn(1100, 16, requires_grad=True)
    with torch.autocast("cpu", LOW.get(name or ""), enabled=name is not None):
        loss, _ = linear_cross_entropy(x, projection, gold, 0.1, 1 / 1100)
    (loss * 1024).backward()
    ours = []
    for tensor in (x, *projection.parameters()):
        assert tensor.grad is not None
        ours.append(tensor.grad / 1024)
    y = x.detach().double().requires_grad_()
    weight, bias = (p.detach().double().requires_grad_() for p in projection.parameters())
    exact = F.cross_entropy(F.linear(y, weight, bias), gold, label_smoothing=0.1)
    exact.backward()
    eps = torch.finfo(LOW.get(name or "", torch.float32)).eps
    assert loss.item() == pytest.approx(exact.item(), rel=10 * eps)
    for mine, theirs in zip(ours, (y, weight, bias), strict=True):
        assert mine.dtype == torch.float32
        assert theirs.grad is not None
        assert (mine - theirs.grad).norm() < 4 * eps * theirs.grad.norm()


def test_without_a_scale_float16_gradients_vanish() -> None:
    torch.manual_seed(1)
    projection, x = nn.Linear(16, 100), torch.randn(8, 16).mul(1e-3).requires_grad_()
    lost = []
    for factor in (1.0, 2.0**15):
        with torch.autocast("cpu", torch.float16):
            y = F.linear(x, projection.weight.detach())  # a product whose gradient is float16
        (y.float().sum() * 1e-8 * factor).backward()
        assert x.grad is not None
        lost.append(int((x.grad == 0).sum()))
        x.grad = None
    assert lost[0] == x.numel()
    assert lost[1] == 0


def test_what_a_device_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="precision tf32: needs an NVIDIA GPU"):
        Precision("tf32")
    with pytest.raises(ValueError, match="precision float8: choose among float32, tf32"):
        Precision("float8")  # type: ignore[arg-type]


# --- steps -----------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_the_scale_halves_and_doubles(finite: list[bool], patience: int) -> None:
    scale, value, good = DynamicLossScale(64.0, patience), 64.0, 0
    for each in finite:
        scale.adapt(each)
        good = good + 1 if each else 0
        if not each:
            value = max(1.0, value / 2)
        elif good == patience:
            value, good = min(2 * value, 2.0**24), 0
        assert scale.value == value
    other = DynamicLossScale()
    other.load_state_dict(scale.state_dict())
    assert (other.value, other.good) == (scale.value, scale.good)


@pytest.mark.parametrize("clip", [None, 0.01, 1e6])
def test_clipping_is_that_of_torch(clip: float | None) -> None:
    models = a_model(), a_model()
    batch = some_batch(5, 9)
    optimizers = [make_adam(model, lr=0.1) for model in models]
    for model in models:
        PreciseLoss(model)(batch, 0.1, batch.ntokens)[0].backward()
    norm = take_step(optimizers[0], clip)
    limit = math.inf if clip is None else clip
    theirs = nn.utils.clip_grad_norm_(models[1].parameters(), limit)
    optimizers[1].step()
    assert norm == pytest.approx(theirs.item(), rel=1e-5)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert a.grad is None


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_no_number_changes_nothing(bad: float) -> None:
    model, batch = a_model(), some_batch(5, 9)
    optimizer = make_adam(model)
    before = [p.detach().clone() for p in model.parameters()]
    hook = model.get_parameter("generator.proj.bias").register_hook(lambda grad: grad * bad)
    with pytest.raises(NonFiniteError, match="gradient norm of an update of") as error:
        update(PreciseLoss(model), [batch], optimizer, loss=replica_loss)
    hook.remove()
    assert math.isfinite(error.value.loss)
    assert not optimizer.state_dict()["state"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    update(PreciseLoss(model), [batch], optimizer, loss=replica_loss)  # and it goes on
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_float16_leaves_an_update_out_and_goes_on() -> None:
    model, batch = a_model(), some_batch(5, 9)
    half, optimizer = Precision("float16"), make_adam(model, lr=1e-3)
    assert half.scale is not None
    half.scale.value = 2.0**24
    replica, made = PreciseLoss(model, half), list[Progress]()
    for _ in range(25):
        made += [
            update(replica, [batch], optimizer, None, 0.1, loss=replica_loss, scale=half.scale)
        ]
    assert not math.isfinite(made[0].grad_norm)
    assert math.isfinite(made[-1].grad_norm)
    assert made[-1].loss < made[0].loss
    left_out = sum(not math.isfinite(each.grad_norm) for each in made)
    assert half.scale.value == 2.0 ** (24 - left_out)


def test_the_norm_of_all_gradients() -> None:
    model, batch = a_model(), some_batch(5, 9)
    PreciseLoss(model)(batch, 0.1, batch.ntokens)[0].backward()
    grads = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    assert grad_norm(model.parameters()) == pytest.approx(torch.cat(grads).norm().item())


# --- compiled --------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 7), st.integers(2, 40))
def test_a_bucket_changes_no_token(sentences: int, longest: int) -> None:
    batch = some_batch(sentences, longest, seed=sentences)
    src, tgt = pad_to_bucket(batch)
    assert src.size(1) in BUCKETS
    assert src.shape == tgt.shape
    assert len(src) >= 2
    for a, b in ((batch.src, src), (batch.tgt, tgt)):
        assert torch.equal(b[: len(a), : a.size(1)], a)
        assert int(b.sum()) == int(a.sum())  # nothing but padding, which is 0, beside it


def test_a_bucket_is_never_longer_than_the_model() -> None:
    batch = of_length(34, 3)
    assert pad_to_bucket(batch)[0].size(1) == pad_to_bucket(batch, 48)[0].size(1) == 48
    assert pad_to_bucket(batch, 35)[0].size(1) == 35
    far = Batch(torch.full((2, 1500), 5), torch.full((2, 9), 5))
    assert pad_to_bucket(far)[0].size(1) == pad_to_bucket(far, 1500)[0].size(1) == 1500
    assert pad_to_bucket(far, 2000)[0].size(1) == 2000


def of_length(length: int, sentences: int, seed: int = 0) -> Batch:
    """Return a batch whose longest sentence has this many tokens."""
    rng = torch.Generator().manual_seed(seed)
    sizes = [length - 1, *torch.randint(1, length, (sentences - 1,), generator=rng).tolist()]
    sides = [[torch.randint(4, 50, (n,), generator=rng).tolist() for n in sizes] for _ in range(2)]
    return make_batch(*sides)


@pytest.fixture
def twice() -> Iterator[None]:
    """Let PyTorch compile a function no more than twice, where it is not told otherwise."""
    config: Any = torch._dynamo.config
    with config.patch("recompile_limit", 2):
        yield


@pytest.mark.usefixtures("twice")
def test_a_compiled_model_learns_and_validates_in_all_buckets() -> None:
    """PyTorch compiles a function 8 times unless told otherwise, here twice; for gradients, too."""
    model, lengths = a_model(layers=1), BUCKETS[:3]
    compiled, plain = PreciseLoss(model, compiler="aot_eager"), PreciseLoss(model)
    for number, length in enumerate(lengths):
        found = []
        batch = of_length(length, number % 3 + 1)
        for loss_of in (compiled, plain):
            model.zero_grad()
            loss, nll = loss_of(batch, 0.1, batch.ntokens)
            loss.backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            measured = 0.0
            if number >= 2:  # validation comes with programs of its own
                measured = evaluate(loss_of, [batch], loss=replica_loss).nll
            found.append((loss.detach(), nll, torch.tensor(measured), grads))
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in the compiler itself
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_the_compiler_of_pytorch_gives_the_same_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, batch, found = a_model(layers=1), of_length(BUCKETS[0], 2), []
    for loss_of in (PreciseLoss(model, compiler="inductor"), PreciseLoss(model)):
        model.zero_grad()
        loss, nll = loss_of(batch, 0.1, batch.ntokens)
        loss.backward()
        found.append((loss.detach(), nll, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_a_compiled_model_has_a_program_for_each_bucket() -> None:
    programs: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        programs.append(1)
        return graph.forward

    model = a_model(dropout=0.1, layers=1).train()
    loss_of = PreciseLoss(model, compiler=counting)
    lengths = set()
    for seed in range(24):
        batch = some_batch(seed % 6 + 1, 3 + 2 * seed, seed)
        lengths.add(pad_to_bucket(batch)[0].size(1))
        loss_of(batch, 0.1, batch.ntokens)[0].backward()
    assert 3 < len(programs) == len(lengths) <= len(BUCKETS)


def test_padding_of_whole_sentences_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:  # NaN of nothing
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        return scores.masked_fill(~attn_mask, -math.inf).softmax(-1) @ v

    monkeypatch.setattr(F, "scaled_dot_product_attention", strict)
    model, batch = a_model(layers=1), of_length(5, 1)
    loss_of = PreciseLoss(model, compiler="eager")
    loss_of(batch, 0.1, None)[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_changed_model_is_not_compiled() -> None:
    model = a_model()
    model.generator.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="compile: supports only the unmodified"):
        PreciseLoss(model, compiler="eager")
    PreciseLoss(model)


def test_a_model_that_is_changed_later_is_not_computed_as_it_was() -> None:
    model, batch = a_model(layers=1), of_length(5, 2)
    loss_of = PreciseLoss(model, compiler="eager")
    loss_of(batch, 0.1, None)
    hook = model.encoder.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="compile: supports only the unmodified"):
        loss_of(batch, 0.1, None)
    hook.remove()
    loss_of(batch, 0.1, None)
    batch.src_mask = batch.src_mask.clone()
    batch.src_mask[:, :, 0] = False
    with pytest.raises(ValueError, match="compile: masks may hide padding and the future alone"):
        loss_of(batch, 0.1, None)
