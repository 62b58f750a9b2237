"""The rungs compute the same, wrong ones are found, counts are those of PyTorch."""

import dataclasses
import json
import math
import mmap
import sys
import time
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

from annotated_transformer.fast import attention as fast_attention
from annotated_transformer.fast import dropout as fast_dropout
from annotated_transformer.fast import model as fast_model
from annotated_transformer.fast.loss import FastLoss, linear_cross_entropy
from annotated_transformer.model import multi_head
from annotated_transformer.model.architecture import LayerNorm
from annotated_transformer.model.attention import attention
from annotated_transformer.model.transformer import ModelConfig, build_model
from annotated_transformer.notation import EOS, PAD
from annotated_transformer.training.batches import Batch, make_batch
from benchmarks import ladder, machine, rungs
from benchmarks.ladder import Measured, make_ladder_record, measure_ladder, work_of
from benchmarks.machine import (
    best_seconds,
    counting,
    matmul_peak,
    memory_bandwidth,
    operations,
    roofline,
    seconds_of,
)
from benchmarks.rungs import (
    LADDER,
    WORKS,
    Rung,
    Trainer,
    Work,
    attentions,
    chunked_loss,
    climb,
    compile_loss,
    counted_flops,
    dense_loss,
    difference,
    draw_pairs,
    needed_flops,
    random_batches,
    rungs_for,
    sorted_batches,
    target_tokens,
    use_bfloat16,
)
from benchmarks.workers import Worker, WorkerError, resident

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


def up_to(name: str) -> list[Rung]:
    return RUNGS[: NAMES.index(name) + 1]


def exact(some: list[Rung]) -> Trainer:
    return climb(some, TOY, dtype=torch.float64)


# --- the work --------------------------------------------------------------------------------


def sentences(batches: list[Batch]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    both = [pair for b in batches for pair in zip(b.src.tolist(), b.tgt_y.tolist(), strict=True)]
    words = [[tuple(i for i in side if i != PAD) for side in pair] for pair in both]
    return sorted((source, target) for source, target in words)


@settings(max_examples=15)
@given(count=st.integers(1, 40), batches=st.integers(1, 6), seed=st.integers(0, 99))
def test_both_ways_cut_the_same_sentences(count: int, batches: int, seed: int) -> None:
    work = dataclasses.replace(TOY, sentences=count, batches=batches, seed=seed)
    expected = sorted(((*s, EOS), (*t, EOS)) for s, t in draw_pairs(work))
    assert sentences(random_batches(work)) == sentences(sorted_batches(work)) == expected
    assert len(random_batches(work)) == batches >= len(sorted_batches(work))


def test_sorting_leaves_less_padding() -> None:
    work = WORKS["tiny"]
    sizes = [sum(b.tgt.numel() + b.src.numel() for b in make(work))
             for make in (random_batches, sorted_batches)]  # fmt: skip
    assert sizes[1] < 0.95 * sizes[0]


# --- the bottom is what it says --------------------------------------------------------------


def test_the_bottom_rung_is_the_plain_model() -> None:
    trainer = Trainer(TOY, dtype=torch.float64)
    torch.manual_seed(TOY.seed)
    plain = build_model(40, 40, TOY.config).double()
    project = plain.get_submodule("generator.proj")
    for batch in trainer.batches:
        x = plain(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
        logits = project(x).flatten(0, 1)
        expected = F.cross_entropy(
            logits, batch.tgt_y.flatten(), ignore_index=PAD, label_smoothing=0.1
        )
        assert trainer.loss(batch).item() == pytest.approx(expected.item(), abs=1e-12)
    assert not trainer.patches
    for layer in attentions(trainer.model):
        assert layer.attn is not None
        assert layer.attn.numel() > 0
    assert not isinstance(trainer.optimizer.param_groups[0]["fused"], bool)


def test_plain_forms_are_those_of_the_readable_layer() -> None:
    norm = LayerNorm(7).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(4, 5, 7, dtype=torch.float64)
    assert torch.allclose(rungs.fused_norm(norm, x), norm(x), atol=1e-12)
    q, mask = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.ones(5, 5).tril().bool()
    expected = attention(q, q, q, mask)[0]
    assert torch.allclose(rungs.attention_without_weights(q, q, q, mask)[0], expected, atol=1e-12)


def test_patches_are_taken_back() -> None:
    trainer = exact(up_to("fused attention"))
    assert len(trainer.patches) == 2
    before = LayerNorm.forward, vars(multi_head)["attention"]
    with trainer.patched():
        assert LayerNorm.forward is rungs.fused_norm
        assert vars(multi_head)["attention"] is rungs.attention_without_weights
    assert (LayerNorm.forward, vars(multi_head)["attention"]) == before


def test_losses_differ_by_nothing() -> None:
    proj = nn.Linear(16, 40).double()
    x, gold = torch.randn(9, 16, dtype=torch.float64), torch.randint(1, 40, (9,))
    dense, chunked = (loss(proj, x, gold, 9) for loss in (dense_loss, chunked_loss))
    padded = dense_loss(proj, torch.cat([x, x]), torch.cat([gold, gold * 0]), 9)
    assert dense.item() == pytest.approx(chunked.item(), abs=1e-12)
    assert padded.item() == pytest.approx(chunked.item(), abs=1e-12)


# --- all rungs compute the same, and each changes something ----------------------------------


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_rung_computes_the_same(name: str) -> None:
    assert difference(exact(RUNGS[:1]), exact(up_to(name))) < 1e-9


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_top_is_the_package(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [rung for rung in rungs_for(device) if rung.exact]
    trainer = Trainer(TOY, dtype=torch.float64)
    trainer.device = torch.device(device)  # the rungs of a GPU, on this processor
    monkeypatch.setattr(trainer, "placed", list)
    for rung in some:
        rung.change(trainer)
    assert not trainer.patches
    trainer.device = torch.device("cpu")
    torch.manual_seed(TOY.seed)
    fresh = FastLoss(build_model(40, 40, TOY.config).double())
    for batch in trainer.batches:
        assert trainer.loss(batch).item() == fresh(batch, 0.1)[0].item()
    assert trainer.optimizer.param_groups[0]["fused"] is True


def forget_source(trainer: Trainer) -> None:
    def forward(batch: Batch) -> tuple[Tensor, Tensor]:
        memory = trainer.model.encode(batch.src, None)
        x = trainer.model.decode(memory, batch.src_mask, batch.tgt, batch.tgt_mask)
        return x.flatten(0, 1), batch.tgt_y.flatten()

    trainer.forward = forward


def see_future(trainer: Trainer) -> None:
    def forward(batch: Batch) -> tuple[Tensor, Tensor]:
        past = (batch.tgt != PAD).unsqueeze(1)
        x = trainer.model(batch.src, batch.tgt, batch.src_mask, past)
        return x.flatten(0, 1), batch.tgt_y.flatten()

    trainer.forward = forward


def smooth_less(trainer: Trainer) -> None:
    def criterion(projection: nn.Linear, x: Tensor, gold: Tensor, tokens: int) -> Tensor:
        keep = gold != PAD
        return linear_cross_entropy(x[keep], projection, gold[keep], 0.0, 1 / tokens)[0]

    trainer.criterion = criterion


def lose_a_sentence(trainer: Trainer) -> None:
    first = draw_pairs(trainer.work)[1:]
    trainer.batches = [make_batch([s for s, _ in first], [t for _, t in first])]


def detach_keys(trainer: Trainer) -> None:  # the loss stays right, gradients do not
    for layer in attentions(trainer.model):
        w_k = layer.linears[1]
        w_k.register_forward_hook(lambda _, __, out: out.detach() + 0 * out)


def halve_gradient(trainer: Trainer) -> None:  # likewise, of one weight alone
    weight = trainer.model.get_parameter("encoder.layers.0.feed_forward.w_1.weight")
    weight.register_hook(lambda grad: grad / 2)


@pytest.mark.parametrize(
    "broken",
    [forget_source, see_future, smooth_less, lose_a_sentence, detach_keys, halve_gradient],
)
def test_a_wrong_rung_is_found(broken: Callable[[Trainer], None]) -> None:
    wrong = climb([*RUNGS[:1], Rung("wrong", "", broken)], TOY, dtype=torch.float64)
    assert difference(exact(RUNGS[:1]), wrong) > 1e-4


def test_a_difference_that_is_no_number_is_large() -> None:
    wrong = exact(RUNGS[:1])
    nn.init.constant_(wrong.model.get_parameter("generator.proj.bias"), math.nan)
    assert not difference(exact(RUNGS[:1]), wrong) < 1e-9


def test_each_rung_changes_what_it_says() -> None:
    def patches(name: str) -> set[str]:
        return {what for _, what in exact(up_to(name)).patches}

    assert patches("sorted batches") == set()
    assert patches("fused norm") == {"forward"}
    assert patches("fused attention") == {"forward", "attention"}
    assert patches("loss in chunks") == {"attend_rows", "cheap_dropout", "dropped_relu", "_packs"}
    assert patches("one projection") == {"cheap_dropout", "dropped_relu", "_packs"}
    assert patches("fused Adam") == {"_packs"}
    bottom, padded, packed = (exact(up_to(n)) for n in (NAMES[0], "fused attention", "packed rows"))
    assert bottom.forward == bottom.padded_rows
    assert padded.forward == padded.padded_rows
    assert packed.forward(packed.batches[0])[0].size(0) == packed.batches[0].ntokens
    assert packed.criterion is dense_loss
    assert exact(up_to("loss in chunks")).criterion is chunked_loss
    for name, keeps in (("fused norm", True), ("fused attention", False)):
        trainer = exact(up_to(name))
        trainer.loss(trainer.batches[0])
        kept = [layer.attn for layer in attentions(trainer.model)]
        assert all(weights is not None and (weights.numel() > 0) == keeps for weights in kept)


def calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, trainer: Trainer) -> int:
    """Return how often a pass calls a function of the fast layer."""
    found, plain = [], getattr(owner, name)

    def counted(*args: Any) -> Any:
        found.append(1)
        return plain(*args)

    monkeypatch.setattr(owner, name, counted)
    trainer.run()
    monkeypatch.undo()
    return len(found)


@pytest.mark.parametrize(
    ("owner", "name", "rung"),
    [
        (fast_model, "attend_rows", "one projection"),
        (fast_dropout, "dropout_factors", "few random bits"),
        (fast_attention._PackedAttention, "apply", "attention of rows"),
    ],
)
def test_a_device_works_from_its_rung_on(
    owner: Any, name: str, rung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = up_to(rung)[:-1]
    assert calls(monkeypatch, owner, name, climb(below, DROPPING)) == 0
    assert calls(monkeypatch, owner, name, climb(up_to(rung), DROPPING)) > 0


def test_rungs_of_a_gpu() -> None:
    names = [rung.name for rung in rungs_for("cuda")]
    assert names[:7] == NAMES[:7]
    assert names[-3:] == ["TF32", "bfloat16", "compiled"]
    assert {"memory kept", "chosen products", "few random bits"}.isdisjoint(names)
    assert {"TF32", "bfloat16", "compiled"}.isdisjoint(NAMES)
    assert len({rung.name for rung in LADDER}) == len(LADDER)


def test_autocast_and_compiling_run_and_come_near() -> None:
    plain, half, compiled = (climb(RUNGS, TOY) for _ in range(3))  # on this processor
    use_bfloat16(half)
    compile_loss(compiled, backend="eager")
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
    before = rungs.pass_gradients(trainer)[0]
    for _ in range(15):
        trainer.run()
    assert rungs.pass_gradients(trainer)[0] < before - 0.2


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


def test_needed_is_what_single_sentences_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("annotated_transformer.fast.packing.VECTOR", 1)  # fill up no scores
    work = dataclasses.replace(TOY, sentences=3, batches=1)
    trainer = climb(RUNGS, work)
    trainer.batches = [make_batch([s], [t]) for s, t in draw_pairs(work)]
    assert counted_flops(trainer) == needed_flops(work)


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
    monkeypatch.setattr(time, name, lambda: float(next(clock)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert best_seconds(lambda: None, least=1) == 2


def test_the_timer_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))

    def clock() -> float:
        seen.append("clock")
        return float(len(seen))

    for device in ("cuda", torch.device("cuda", 0)):
        seen.clear()
        assert seconds_of(lambda: seen.append("run"), device, clock) == 3
        assert seen == ["wait", "clock", "run", "wait", "clock"]
    seconds_of(lambda: None)  # a CPU has nothing to wait for
    assert len(seen) == 5


def test_operations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = {one.name: one for one in operations(width=8, rows=4096)}
    with FlopCounterMode(display=False) as counter:
        ops["product"].run()
    assert counter.get_total_flops() == ops["product"].flops
    assert ops["product"].bytes == 4 * (2048 * 8 + 8 * 32 + 2048 * 32)
    assert ops["softmax"].bytes == 2 * 4 * 8 * 4096
    monkeypatch.setattr(machine, "operations", lambda device: list(ops.values()))
    points = roofline()
    assert [set(point) for point in points] == [{"name", "intensity", "flops_per_s"}] * 5
    assert points[0]["intensity"] == pytest.approx(ops["product"].flops / ops["product"].bytes)


# --- measuring -------------------------------------------------------------------------------


def test_ratios_are_taken_round_by_round() -> None:
    slow = Measured("a", "", [2.0, 8.0, 2.0], 10, 0, 0)
    fast = Measured("b", "", [1.0, 4.0, 4.0], 10, 0, 0)
    assert fast.ratio(slow) == 2.0
    assert slow.speed == 5.0


def test_a_worker_that_has_counted_ends_before_the_next_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # together they need more memory than a GPU has
    counted: list[Worker] = []

    class Watched(Worker):
        def ask(self, word: str) -> Any:
            if word == "end":
                assert all(one.process.poll() is not None for one in counted)
                counted.append(self)
            return super().ask(word)

    monkeypatch.setattr(ladder, "Worker", Watched)
    measure_ladder(TOY, rounds=1, heights=[0, 1])
    assert len(counted) == 2


def test_a_small_ladder_makes_a_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [RUNGS[0], RUNGS[NAMES.index("loss in chunks")]]
    heights = [RUNGS.index(rung) for rung in few]
    monkeypatch.setattr(ladder, "measure_ladder", partial(measure_ladder, heights=heights))
    monkeypatch.setattr(ladder, "WORKS", {"toy": DROPPING})
    monkeypatch.setattr(ladder, "memory_bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(ladder, "matmul_peak", lambda *_, **__: 1e9)
    monkeypatch.setattr(ladder, "roofline", lambda *_: [])
    path = tmp_path / "ladder-toy.json"
    words = ["--size", "toy", "--rounds", "2", "--device", "cpu", "--record", str(path)]
    monkeypatch.setattr(sys, "argv", ["ladder", *words])
    ladder.main()
    record = json.loads(path.read_text(encoding="utf-8"))
    assert set(record) == FIELDS
    assert record["hardware"]["gpu"] is None
    assert record["work"]["config"]["d_model"] == 16
    found = [Measured(**rung) for rung in record["rungs"]]
    assert [rung.name for rung in found] == [rung.name for rung in few]
    for rung in found:
        assert len(rung.seconds) == 2
        assert min(rung.seconds) > 0
        assert rung.tokens == target_tokens(random_batches(DROPPING))
        assert 0 < rung.memory_bytes < 2e9
    assert found[0].flops == counted_flops(climb(few[:1], DROPPING))
    assert found[1].flops < found[0].flops
    shown = capsys.readouterr().out
    assert "products alone" in shown
    assert "loss in chunks" in shown


def test_a_rung_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Worker] = []
    start = Worker.__init__

    def watched(self: Worker, *args: Any) -> None:
        started.append(self)
        start(self, *args)

    monkeypatch.setattr(Worker, "__init__", watched)
    impossible = dataclasses.replace(TOY, vocabulary=-1)
    with pytest.raises(WorkerError, match=r"(?s)'fused norm' failed.*Traceback.*-1"):
        measure_ladder(impossible, rounds=1, heights=[2])
    (worker,) = started
    assert worker.process.returncode is not None


def test_memory_of_this_process_is_measured() -> None:
    before = resident("VmRSS")
    with mmap.mmap(-1, 2**26) as block:  # of its own, whatever the allocator keeps
        block.write(bytes([1]) * 2**26)
        assert resident("VmRSS") - before > 0.9 * 2**26
    assert resident("VmHWM") - before > 0.9 * 2**26


# --- records ---------------------------------------------------------------------------------


FIELDS = {
    *("kind", "command", "commit", "date", "hardware", "versions", "size", "work", "rounds"),
    *("threads", "device", "peaks", "bandwidth", "roofline", "needed_flops", "rungs"),
}
RESULTS = Path(__file__).resolve().parents[2] / "results"


def test_the_records_at_hand_are_whole() -> None:
    for path in RESULTS.glob("ladder-*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert set(record) == FIELDS
        found = [Measured(**rung) for rung in record["rungs"]]
        assert [rung.name for rung in found] == [r.name for r in rungs_for(record["device"])]
        assert len({rung.tokens for rung in found}) == 1
        assert all(len(rung.seconds) == record["rounds"] for rung in found)
        assert record["needed_flops"] == needed_flops(work_of(record["work"]))


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--device", "cuda"], ["--size", "huge"]])
def test_wrong_options_are_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ladder", *words])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        ladder.main()


def test_a_gpu_record_measures_each_kind_of_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, torch.dtype]] = []

    def peak(device: str, dtype: torch.dtype = torch.float32, sizes: Any = ()) -> float:
        seen.append((torch.get_float32_matmul_precision(), dtype))
        return 1.0

    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(ladder, "WORKS", {"toy": TOY})
    monkeypatch.setattr(ladder, "measure_ladder", lambda *_, **__: [])
    monkeypatch.setattr(ladder, "matmul_peak", peak)
    monkeypatch.setattr(ladder, "memory_bandwidth", lambda *_: 1.0)
    monkeypatch.setattr(ladder, "roofline", lambda *_: [])
    record = make_ladder_record("toy", device="cuda")
    assert list(record["peaks"]) == ["float32", "TF32", "bfloat16"]
    assert seen == [("highest", torch.float32), ("high", torch.float32), ("high", torch.bfloat16)]
