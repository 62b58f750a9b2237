"""The rungs compute the same, wrong ones are found, counts are those of PyTorch."""

import dataclasses
import json
import math
import mmap
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from annotated_transformer.engineering import speed
from annotated_transformer.engineering.speed import (
    LADDER,
    LADDER_FIELDS,
    WORKS,
    Measured,
    PlainNorm,
    Runner,
    Trainer,
    Work,
    best_seconds,
    chunked_loss,
    climb,
    compile_forward,
    counted_flops,
    counting,
    dense_loss,
    difference,
    draw_pairs,
    exchange,
    fit,
    make_ladder_record,
    matmul_peak,
    measure_ladder,
    measured_rungs,
    memory_bandwidth,
    needed_flops,
    operations,
    packed_rows,
    padded_rows,
    random_batches,
    read_ladders,
    roofline,
    rungs_for,
    saved_bytes,
    sorted_batches,
    target_tokens,
    use_bfloat16,
)
from annotated_transformer.model.transformer import EncoderDecoder, ModelConfig, build_model
from annotated_transformer.notation import EOS, PAD
from annotated_transformer.results.machine_translation import RecordError
from annotated_transformer.training.batches import Batch, make_batch
from annotated_transformer.training.loop import batch_loss
from benchmarks import ladder as program

TOY = Work(ModelConfig(N=2, d_model=16, d_ff=32, h=2, dropout=0.0, max_len=64), 40, 5, batches=3)
DROPPING = dataclasses.replace(TOY, config=dataclasses.replace(TOY.config, dropout=0.1))
RUNGS = rungs_for("cpu")
NAMES = [rung.name for rung in RUNGS]


@pytest.fixture(autouse=True)
def setting() -> Iterator[None]:
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(before)
    torch.set_num_threads(threads)


def up_to(name: str) -> list[speed.Rung]:
    return RUNGS[: NAMES.index(name) + 1]


def exact(rungs: list[speed.Rung]) -> Trainer:
    return climb(rungs, TOY, dtype=torch.float64)


# --- the work --------------------------------------------------------------------------------


def sentences(batches: list[Batch]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    both = [pair for b in batches for pair in zip(b.src.tolist(), b.tgt_y.tolist(), strict=True)]
    return sorted(tuple(tuple(i for i in side if i != PAD) for side in pair) for pair in both)


@settings(max_examples=15)
@given(count=st.integers(1, 40), batches=st.integers(1, 6), seed=st.integers(0, 99))
def test_both_ways_cut_the_same_sentences(count: int, batches: int, seed: int) -> None:
    work = dataclasses.replace(TOY, sentences=count, batches=batches, seed=seed)
    expected = sorted(((*s, EOS), (*t, EOS)) for s, t in draw_pairs(work))
    assert sentences(random_batches(work)) == sentences(sorted_batches(work)) == expected
    assert len(random_batches(work)) == batches >= len(sorted_batches(work))


def test_sorting_leaves_less_padding() -> None:
    work = WORKS["page"]
    sizes = [sum(b.tgt.numel() + b.src.numel() for b in make(work))
             for make in (random_batches, sorted_batches)]  # fmt: skip
    assert sizes[1] < 0.95 * sizes[0]


# --- the bottom is what it says --------------------------------------------------------------


def test_the_bottom_rung_is_the_plain_model() -> None:
    trainer = Trainer(TOY, dtype=torch.float64)
    torch.manual_seed(TOY.seed)
    plain = build_model(40, 40, TOY.config).double()
    for batch in trainer.batches:
        x = plain(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
        logits = plain.generator.proj(x).flatten(0, 1)
        expected = F.cross_entropy(
            logits, batch.tgt_y.flatten(), ignore_index=PAD, label_smoothing=0.1
        )
        assert trainer.loss(batch).item() == pytest.approx(expected.item(), abs=1e-12)
    kinds = [type(part) for part in trainer.model.modules()]
    assert nn.LayerNorm not in kinds
    assert all(layer.attn is not None for layer in speed.attentions(trainer.model))
    assert not isinstance(trainer.optimizer.param_groups[0]["fused"], bool)


def test_plain_norm_is_pytorchs() -> None:
    norm = nn.LayerNorm(7).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(4, 5, 7, dtype=torch.float64)
    assert torch.allclose(PlainNorm(norm)(x), norm(x), atol=1e-12)
    assert [name for name, _ in PlainNorm(norm).named_parameters()] == ["weight", "bias"]


def test_losses_differ_by_nothing() -> None:
    model = build_model(40, 40, TOY.config).double()
    x, gold = torch.randn(9, 16, dtype=torch.float64), torch.randint(1, 40, (9,))
    dense, chunked = (loss(model, x, gold, 9) for loss in (dense_loss, chunked_loss))
    padded = dense_loss(model, torch.cat([x, x]), torch.cat([gold, gold * 0]), 9)
    assert dense.item() == pytest.approx(chunked.item(), abs=1e-12)
    assert padded.item() == pytest.approx(chunked.item(), abs=1e-12)


# --- all rungs compute the same, and each changes something ----------------------------------


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_rung_computes_the_same(name: str) -> None:
    assert difference(exact(RUNGS[:1]), exact(up_to(name))) < 1e-9


def test_the_top_is_the_package() -> None:
    trainer = exact(RUNGS)
    torch.manual_seed(TOY.seed)
    fresh = build_model(40, 40, TOY.config).double()
    kinds = [type(part) for part in fresh.modules()]
    assert [type(part) for part in trainer.model.modules()] == kinds
    ours = [set(vars(part)) for part in speed.attentions(fresh)]
    assert [set(vars(part)) for part in speed.attentions(trainer.model)] == ours
    for batch in trainer.batches:
        assert trainer.loss(batch).item() == batch_loss(fresh, batch, 0.1)[0].item()
    assert trainer.optimizer.param_groups[0]["fused"] is True


def forget_source(trainer: Trainer) -> None:
    def forward(model: EncoderDecoder, batch: Batch) -> tuple[Tensor, Tensor]:
        memory = model.encode(batch.src, None)
        x = model.decode(memory, batch.src_mask, batch.tgt, batch.tgt_mask)
        return x.flatten(0, 1), batch.tgt_y.flatten()

    trainer.forward = forward


def see_future(trainer: Trainer) -> None:
    def forward(model: EncoderDecoder, batch: Batch) -> tuple[Tensor, Tensor]:
        x = model(batch.src, batch.tgt, batch.src_mask, (batch.tgt != PAD).unsqueeze(1))
        return x.flatten(0, 1), batch.tgt_y.flatten()

    trainer.forward = forward


def smooth_less(trainer: Trainer) -> None:
    def criterion(model: EncoderDecoder, x: Tensor, gold: Tensor, tokens: int) -> Tensor:
        return speed.linear_cross_entropy(x, model.generator.proj, gold, 0.0, 1 / tokens)[0]

    trainer.forward, trainer.criterion = packed_rows, criterion


def lose_a_sentence(trainer: Trainer) -> None:
    first = draw_pairs(trainer.work)[1:]
    trainer.batches = [make_batch([s for s, _ in first], [t for _, t in first])]


def detach_keys(trainer: Trainer) -> None:  # the loss stays right, gradients do not
    for layer in speed.attentions(trainer.model):
        plain: Callable[..., tuple[Tensor, Tensor, Tensor]] = vars(layer)["project"]

        def project(*args: Any, plain: Any = plain) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = plain(*args)
            return q, k.detach(), v

        vars(layer)["project"] = project


def halve_gradient(trainer: Trainer) -> None:  # likewise, of one weight alone
    weight = trainer.model.encoder.layers[0].feed_forward.w_1.weight
    weight.register_hook(lambda grad: grad / 2)


@pytest.mark.parametrize(
    "broken",
    [forget_source, see_future, smooth_less, lose_a_sentence, detach_keys, halve_gradient],
)
def test_a_wrong_rung_is_found(broken: Callable[[Trainer], None]) -> None:
    wrong = climb([*RUNGS[:1], speed.Rung("wrong", "", broken)], TOY, dtype=torch.float64)
    assert difference(exact(RUNGS[:1]), wrong) > 1e-4


def test_a_difference_that_is_no_number_is_large() -> None:
    wrong = exact(RUNGS[:1])
    nn.init.constant_(wrong.model.generator.proj.bias, math.nan)
    assert not difference(exact(RUNGS[:1]), wrong) < 1e-9


def test_each_rung_changes_what_it_says() -> None:
    kinds = {n: [type(p) for p in exact(up_to(n)).model.modules()] for n in NAMES}
    assert PlainNorm in kinds["sorted batches"]
    assert PlainNorm not in kinds["fused norm"]
    assert speed.Dropout not in kinds["one projection"]
    assert speed.Dropout in kinds["few random bits"]
    assert exact(up_to("fused attention")).forward is padded_rows
    assert exact(up_to("no padding")).forward is packed_rows
    assert exact(up_to("no padding")).criterion is dense_loss
    assert exact(up_to("loss in chunks")).criterion is chunked_loss
    for name, keeps in (("fused norm", True), ("fused attention", False)):
        trainer = exact(up_to(name))
        trainer.loss(trainer.batches[0])
        assert all((a.attn is not None) == keeps for a in speed.attentions(trainer.model))


def test_rungs_of_a_gpu() -> None:
    names = [rung.name for rung in rungs_for("cuda")]
    assert names[:7] == NAMES[:7]
    assert names[-3:] == ["TF32", "bfloat16", "compiled"]
    assert {"memory kept", "chosen products", "few random bits"}.isdisjoint(names)
    assert {"TF32", "bfloat16", "compiled"}.isdisjoint(NAMES)
    assert len({rung.name for rung in LADDER}) == len(LADDER)


def test_autocast_and_compiling_run_and_come_near() -> None:
    rungs = [rung for rung in rungs_for("cuda") if rung.exact]  # on this processor
    plain, half, compiled = (climb(rungs, TOY) for _ in range(3))
    use_bfloat16(half)
    compile_forward(compiled, backend="eager")
    assert compiled.compiled is not None
    assert 1e-6 < difference(plain, half) < 0.2
    assert difference(plain, compiled) < 1e-4
    for trainer in (half, compiled):
        trainer.run()
        assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert counted_flops(compiled) == counted_flops(plain)


@pytest.mark.parametrize("name", NAMES)
def test_every_rung_learns(name: str) -> None:
    trainer = climb(up_to(name), DROPPING)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 3e-3
    before = speed.pass_gradients(trainer)[0]
    for _ in range(15):
        trainer.run()
    assert speed.pass_gradients(trainer)[0] < before - 0.2


def test_exchange_takes_exactly_one_kind() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.LayerNorm(1)), speed.Dropout(0.1))
    exchange(model, nn.LayerNorm, PlainNorm)
    assert [type(part) for part in model.modules()][3:] == [PlainNorm, speed.Dropout]


# --- counts ----------------------------------------------------------------------------------


def test_the_counter_knows_our_products() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with counting() as counter:
        torch.randn(3, 5).addmm_(a, b)
    assert counter.get_total_flops() == 2 * 3 * 4 * 5
    with FlopCounterMode(display=False) as unaware:
        torch.randn(3, 5).addmm_(a, b)
    assert unaware.get_total_flops() == 0  # else ours would count twice


@pytest.mark.parametrize("masked", [False, True])
def test_the_counter_knows_fused_attention(masked: bool) -> None:
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool) if masked else None
    product = 2 * 2 * 3 * 5 * 7 * 8
    with counting() as counter:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert counter.get_total_flops() == 2 * product
    with counting() as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 5 * product


def test_needed_is_what_single_sentences_take() -> None:
    work = dataclasses.replace(TOY, sentences=3, batches=1)
    trainer = climb(RUNGS, work)
    trainer.batches = [make_batch([s], [t]) for s, t in draw_pairs(work)]
    assert counted_flops(trainer) == needed_flops(work)


def test_what_autograd_keeps() -> None:
    layer = nn.Linear(10, 20)
    x = torch.randn(6, 10)
    assert saved_bytes(layer, lambda: layer(x).exp().sum()) == 4 * (6 * 10 + 6 * 20)
    assert saved_bytes(layer, lambda: layer(x).sum()) == 4 * 6 * 10  # exp alone keeps its result
    y = torch.randn(8, requires_grad=True)
    assert saved_bytes(layer, lambda: (y * y).sum()) == 4 * 8  # saved twice, counts once


def test_fit_finds_the_factors() -> None:
    xs = [1.0, 2.0, 5.0, 9.0]
    found = fit([[1.0] * 4, xs], [3 + 0.5 * x for x in xs])
    assert found == pytest.approx([3, 0.5])
    weighted = fit([[1.0] * 3], [1.0, 1.0, 100.0])[0]
    assert weighted < 1.1  # relative errors: the large number weighs as a small one


# --- the machine -----------------------------------------------------------------------------


def test_limits_are_of_their_kind() -> None:
    peak, bandwidth = matmul_peak(sizes=(128, 256)), memory_bandwidth(megabytes=8)
    assert peak > 1e8
    assert bandwidth > 1e8
    a = torch.randn(64, 64)
    assert 2 * 64**3 / best_seconds(lambda: a @ a, least=0.01) < 1e14


@pytest.mark.parametrize(("threads", "name"), [(1, "thread_time"), (2, "perf_counter")])
def test_best_seconds_is_the_least(
    monkeypatch: pytest.MonkeyPatch, threads: int, name: str
) -> None:
    clock = iter([0, 5, 10, 12, 20, 29])
    monkeypatch.setattr(speed.time, name, lambda: float(next(clock)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert best_seconds(lambda: None, least=1) == 2


def test_operations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = {one.name: one for one in operations(width=8, rows=4096)}
    with FlopCounterMode(display=False) as counter:
        ops["product"].run()
    assert counter.get_total_flops() == ops["product"].flops
    assert ops["product"].bytes == 4 * (2048 * 8 + 8 * 32 + 2048 * 32)
    assert ops["softmax"].bytes == 2 * 4 * 8 * 4096
    monkeypatch.setattr(speed, "operations", lambda device: list(ops.values()))
    points = roofline()
    assert [set(point) for point in points] == [{"name", "intensity", "flops_per_s"}] * 5
    assert points[0]["intensity"] == pytest.approx(ops["product"].flops / ops["product"].bytes)


# --- measuring -------------------------------------------------------------------------------


def test_ratios_are_taken_round_by_round() -> None:
    slow = Measured("a", "", [2.0, 8.0, 2.0], 10, 0, 0)
    fast = Measured("b", "", [1.0, 4.0, 4.0], 10, 0, 0)
    assert fast.ratio(slow) == 2.0
    assert slow.speed == 5.0


def test_a_small_ladder_makes_a_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [RUNGS[0], RUNGS[NAMES.index("loss in chunks")]]
    heights = [RUNGS.index(rung) for rung in few]
    monkeypatch.setattr(speed, "measure_ladder", partial(measure_ladder, heights=heights))
    monkeypatch.setattr(speed, "WORKS", {"toy": DROPPING})
    monkeypatch.setattr(program, "WORKS", {"toy": DROPPING})
    monkeypatch.setattr(speed, "memory_bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(speed, "matmul_peak", lambda *_, **__: 1e9)
    monkeypatch.setattr(speed, "roofline", lambda *_: [])
    path = tmp_path / "ladder-toy.json"
    words = ["--size", "toy", "--rounds", "2", "--device", "cpu", "--record", str(path)]
    monkeypatch.setattr(sys, "argv", ["ladder", *words])
    program.main()
    (record,) = read_ladders(tmp_path).values()
    assert set(record) == set(LADDER_FIELDS)
    assert record["hardware"]["gpu"] is None
    assert record["work"]["config"]["d_model"] == 16
    rungs = measured_rungs(record)
    assert [rung.name for rung in rungs] == [rung.name for rung in few]
    for rung in rungs:
        assert len(rung.seconds) == 2
        assert min(rung.seconds) > 0
        assert rung.tokens == target_tokens(random_batches(DROPPING))
        assert 0 < rung.memory_bytes < 2e9
    assert rungs[0].flops == counted_flops(climb(few[:1], DROPPING))
    assert rungs[1].flops < rungs[0].flops
    shown = capsys.readouterr().out
    assert "products alone" in shown
    assert "loss in chunks" in shown


def test_a_rung_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Runner] = []
    start = Runner.__init__

    def watched(self: Runner, height: int, work: Work, device: str) -> None:
        started.append(self)
        start(self, height, work, device)

    monkeypatch.setattr(Runner, "__init__", watched)
    impossible = dataclasses.replace(TOY, config=dataclasses.replace(TOY.config, dropout=2.0))
    with pytest.raises(RuntimeError, match=r"(?s)'fused norm' failed.*below 1, not 2") as error:
        measure_ladder(impossible, rounds=1, heights=[2])
    assert "Traceback" in str(error.value)
    (runner,) = started
    assert runner.process.returncode is not None


def test_memory_of_this_process_is_measured() -> None:
    before = speed.resident("VmRSS")
    with mmap.mmap(-1, 2**26) as block:  # of its own, whatever the allocator keeps
        block.write(bytes([1]) * 2**26)
        assert speed.resident("VmRSS") - before > 0.9 * 2**26
    assert speed.resident("VmHWM") - before > 0.9 * 2**26


# --- records ---------------------------------------------------------------------------------


def a_record() -> dict[str, Any]:
    return dict.fromkeys(LADDER_FIELDS, 0) | {"rungs": []}


def test_records_are_read_and_refused(tmp_path: Path) -> None:
    assert read_ladders(None) == read_ladders(tmp_path) == {}
    (tmp_path / "ladder-a.json").write_text(json.dumps(a_record()))
    (tmp_path / "other.json").write_text("no JSON")
    assert list(read_ladders(tmp_path)) == ["ladder-a"]
    for field in LADDER_FIELDS:
        less = {key: value for key, value in a_record().items() if key != field}
        (tmp_path / "ladder-b.json").write_text(json.dumps(less))
        with pytest.raises(RecordError, match=rf"ladder-b\.json: has no {field};"):
            read_ladders(tmp_path)
    for text in ("[]", "{", '"x"', "3"):
        (tmp_path / "ladder-b.json").write_text(text)
        with pytest.raises(RecordError, match=r"ladder-b\.json"):
            read_ladders(tmp_path)


def test_the_records_at_hand_are_whole() -> None:
    for record in read_ladders(Path(__file__).resolve().parents[2] / "results").values():
        rungs = measured_rungs(record)
        expected = [rung.name for rung in rungs_for(record["device"])]
        assert [rung.name for rung in rungs] == expected
        assert len({rung.tokens for rung in rungs}) == 1
        assert all(len(rung.seconds) == record["rounds"] for rung in rungs)
        told = record["work"]
        work = Work(**{**told, "config": ModelConfig(**told["config"])})
        assert record["needed_flops"] == needed_flops(work)


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--device", "cuda"], ["--size", "huge"]])
def test_wrong_options_are_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ladder", *words])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        program.main()


def test_a_gpu_record_measures_each_kind_of_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, torch.dtype]] = []

    def peak(device: str, dtype: torch.dtype = torch.float32, sizes: Any = ()) -> float:
        seen.append((torch.get_float32_matmul_precision(), dtype))
        return 1.0

    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(speed, "WORKS", {"toy": TOY})
    monkeypatch.setattr(speed, "measure_ladder", lambda *_, **__: [])
    monkeypatch.setattr(speed, "matmul_peak", peak)
    monkeypatch.setattr(speed, "memory_bandwidth", lambda *_: 1.0)
    monkeypatch.setattr(speed, "roofline", lambda *_: [])
    record = make_ladder_record("toy", device="cuda")
    assert list(record["peaks"]) == ["float32", "TF32", "bfloat16"]
    assert seen == [("highest", torch.float32), ("high", torch.float32), ("high", torch.bfloat16)]
