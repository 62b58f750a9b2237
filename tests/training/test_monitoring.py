"""Costs as PyTorch counts them; peaks by name; a log that survives; a figure that is read back."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from annotated_transformer.model.attention import subsequent_mask
from annotated_transformer.model.multi_head import MultiHeadedAttention
from annotated_transformer.model.transformer import ModelConfig, base, build_model
from annotated_transformer.training import monitoring
from annotated_transformer.training.batches import make_batch
from annotated_transformer.training.monitoring import (
    DEVICES,
    Journal,
    batch_flops,
    describe_rate,
    peak_flops,
    product_flops,
    read_journal,
    share_of_peak,
    training_figure,
)
from tests.claims import assert_claim_can_fail

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = "training/monitoring"


# --- operations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return pairs * forward * 2 * 3", "return pairs * forward * 2 * 2"),
        ("+ queries * others * (keys + values)", ""),
        ("attention(target, source) + network(target)", "attention(target, source)"),
    ],
)
def test_claim_6_1a_can_fail(old: str, new: str) -> None:
    assert_claim_can_fail(CHAPTER, "6.1a", old, new)


def counted(config: ModelConfig, vocab: int, pairs: int, source: int, target: int) -> int:
    """Return the operations that PyTorch sees in a forward and a backward pass."""
    model = build_model(vocab, vocab, config)
    for part in model.modules():
        if isinstance(part, MultiHeadedAttention):
            part.keep_weights = True  # the counter knows plain products on every device
    src, tgt = torch.ones(pairs, source).long(), torch.ones(pairs, target).long()
    with FlopCounterMode(display=False) as counter:
        seen = torch.ones(1, 1, source).bool()
        model.generator(model(src, tgt, seen, subsequent_mask(target))).sum().backward()
    return counter.get_total_flops()


SIZES: dict[str, Any] = {
    "layers": st.integers(1, 2), "h": st.integers(1, 3), "d_k": st.integers(1, 5),
    "d_v": st.integers(1, 5), "d_ff": st.integers(1, 9), "vocab": st.integers(5, 20),
}  # fmt: skip


def config_of(layers: int, h: int, d_k: int, d_v: int, d_ff: int) -> ModelConfig:
    return ModelConfig(N=layers, d_model=6, d_ff=d_ff, h=h, d_k=d_k, d_v=d_v, max_len=8)


@settings(max_examples=10)
@given(pairs=st.integers(1, 3), source=st.integers(2, 6), target=st.integers(2, 6), **SIZES)
def test_products_are_counted_as_pytorch_counts_them(
    pairs: int, source: int, target: int, vocab: int, **sizes: int
) -> None:
    config = config_of(**sizes)
    expected = counted(config, vocab, pairs, source, target)
    assert product_flops(config, vocab, pairs, source, target) == expected
    assert batch_flops(config, vocab, [source] * pairs, [target] * pairs) == expected


@settings(max_examples=8)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4), **SIZES
)
def test_a_batch_costs_what_its_sentences_cost_one_by_one(
    pairs: list[tuple[int, int]], vocab: int, **sizes: int
) -> None:
    config = config_of(**sizes)
    expected = sum(counted(config, vocab, 1, *pair) for pair in pairs)
    assert batch_flops(config, vocab, [s for s, _ in pairs], [t for _, t in pairs]) == expected


def test_padding_costs_nothing() -> None:
    batch = make_batch([[5] * 3, [5] * 9], [[6] * 8, [6] * 2])
    sides = [side.sum(dim=1).tolist() for side in (batch.src_keep, batch.tgt_keep)]
    assert sides == [[4, 10], [9, 3]]  # with the end symbol
    config = ModelConfig(N=1, d_model=8, d_ff=8, h=2, max_len=16)
    block = product_flops(config, 20, 2, batch.src.size(1), batch.tgt.size(1))
    assert batch_flops(config, 20, *sides) < block
    assert batch_flops(config, 20, [], []) == 0
    with pytest.raises(ValueError, match="shorter"):
        batch_flops(config, 20, [1, 2], [3])


def test_operations_stay_whole_numbers() -> None:
    work = batch_flops(base, 37_000, [1000] * 25, [1001] * 25)
    assert isinstance(work, int)
    assert work == product_flops(base, 37_000, 25, 1000, 1001)


# --- devices ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("Tesla P100-SXM2-16GB", "float32", 10.6),
        ("Tesla P100-PCIE-16GB", "float32", 9.3),
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("Tesla V100-PCIE-16GB", "float16", 112),
        ("Tesla T4", "float16", 65),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312),
        ("A100-SXM4-40GB", "tf32", 156),  # as older drivers say it
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA GeForce RTX 3090", "float16", 71),
        ("GeForce RTX 3090", "float32", 35.6),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),  # the white paper's figure
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA B200", "bfloat16", 2250),
    ],
)
def test_peaks_are_those_of_the_sheets(name: str, precision: str, teraflops: float) -> None:
    peak = peak_flops(name, precision)
    assert peak is not None
    assert peak == pytest.approx(teraflops * 1e12, rel=1e-3)  # sheets round


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM2e", "NVIDIA H200 NVL", "NVIDIA GH200 480GB",
        "NVIDIA GB200", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA L40", "NVIDIA L40S", "NVIDIA A10", "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla V100-SXM3-32GB",
        "NVIDIA T400", "AMD Instinct MI300X", "cpu", "", "NVIDIA",
    ],
)  # fmt: skip
def test_other_names_are_unknown(name: str) -> None:
    assert [peak_flops(name, kind) for kind in ("float32", "float16", "bfloat16")] == [None] * 3


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Tesla T4", "bfloat16"),
        ("Tesla V100-SXM2-16GB", "tf32"),
        ("Tesla P100-SXM2-16GB", "bfloat16"),
        ("NVIDIA B200", "float32"),
        ("NVIDIA A100-SXM4-40GB", "float64"),
    ],
)
def test_a_precision_that_is_missing_gives_none(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None


def test_the_table_of_devices_is_sound() -> None:
    keys = set(re.findall(r"^@\w+\{([^,]+),", (ROOT / "book/references.bib").read_text(), re.M))
    names = [name for device in DEVICES.values() for name in device.names]
    assert len(names) == len(set(names))
    for device in DEVICES.values():
        assert device.source in keys
        assert set(device.teraflops) <= {"float32", "tf32", "bfloat16", "float16"}
        rates = device.teraflops
        order = [rates[k] for k in ("float32", "tf32", "bfloat16", "float16") if k in rates]
        assert order == sorted(order)  # less precise is not slower
        assert 3e11 <= device.bandwidth <= 1e13


def test_a_share_of_the_peak() -> None:
    # 6.4e12 in 0.5 s are 12.8 TFLOP/s: a tenth of two devices of 64
    assert share_of_peak(6.4e12, 0.5, 64e12, devices=2) == pytest.approx(0.1)
    assert share_of_peak(6.4e12, 0.5, None) is None
    assert share_of_peak(0.0, 0.0, 64e12) is None


@pytest.mark.parametrize(
    ("rate", "peak", "text"),
    [
        (1.2e12, 3.16e12, "1.2 TFLOP/s, 38 % of the peak"),
        (180e9, None, "180 GFLOP/s"),
        (1.2345e15, None, "1.23 PFLOP/s"),
        (999.4e9, None, "999 GFLOP/s"),
        (999.96e9, None, "1 TFLOP/s"),
        (2e6, 1e9, "2 MFLOP/s, 0.2 % of the peak"),
        (1e12, 1e12, "1 TFLOP/s, 100 % of the peak"),
        (9.49e10, 1e12, "94.9 GFLOP/s, 9 % of the peak"),
        (9.51e10, 1e12, "95.1 GFLOP/s, 10 % of the peak"),
        (12.0, None, "12 FLOP/s"),
        (0.0, 1e12, "0 FLOP/s, 0 % of the peak"),
        (3e21, None, "3000 EFLOP/s"),
    ],
)
def test_a_rate_in_words(rate: float, peak: float | None, text: str) -> None:
    assert describe_rate(rate, peak) == text


# --- the journal -----------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Journal(path) as journal:
        journal.write(5, loss=1.5, tokens=300, share_of_peak=None, skipped=False)
        assert read_journal(path) == [{"update": 5, "loss": 1.5, "tokens": 300, "skipped": 0}]
        journal.write(10, loss=torch.tensor(0.5), norm=torch.tensor(2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]  # plain JSON
    assert lines[1] == {"update": 10, "loss": 0.5, "norm": 2.0}
    assert isinstance(read_journal(path)[0]["tokens"], int)


def test_no_numbers_come_back(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Journal(path) as journal:
        journal.write(1, a=math.nan, b=math.inf, c=-math.inf)

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    line = path.read_text()
    assert json.loads(line, parse_constant=refuse) == {
        "update": 1, "a": "nan", "b": "inf", "c": "-inf",
    }  # fmt: skip
    (entry,) = read_journal(path)
    assert math.isnan(entry["a"])
    assert (entry["b"], entry["c"]) == (math.inf, -math.inf)


NUMBERS = st.dictionaries(
    st.sampled_from(["loss", "rate", "norm", "tokens"]), st.integers() | st.floats()
)


@settings(max_examples=40)
@given(rows=st.lists(NUMBERS, max_size=6), cut=st.integers(0, 400))
def test_a_file_cut_anywhere_loses_one_line_at_most(
    rows: list[dict[str, float]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "log.jsonl"
    with Journal(path) as journal:
        for number, row in enumerate(rows):
            journal.write(number, **row)
    whole, data = read_journal(path), path.read_bytes()
    assert repr(whole) == repr([{"update": n, **row} for n, row in enumerate(rows)])
    kept = data[:cut]
    path.write_bytes(kept)
    complete = kept.count(b"\n")
    found = read_journal(path)
    assert complete <= len(found) <= complete + 1  # a line may lack its end alone
    assert repr(found) == repr(whole[: len(found)])
    with Journal(path) as journal:  # goes on in a new line
        journal.write(99)
    assert repr(read_journal(path)) == repr([*found, {"update": 99}])


@pytest.mark.parametrize(
    "line",
    ["", '{"update": 2', '{"loss": 2}', "[1]", "7", '{"update": 2, "loss": "low"}',
     '{"update": 2, "loss": null}', "\x00\x00", "\udcff"],
)  # fmt: skip
def test_a_broken_line_is_named_unless_it_is_the_last(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    broken = line.encode("utf-8", "surrogateescape")
    path.write_bytes(b'{"update": 1}\n' + broken + b"\n")
    assert read_journal(path) == [{"update": 1}]
    path.write_bytes(b'{"update": 1}\n' + broken + b'\n{"update": 3}\n')
    where = re.escape(f"{path}, line 2: ")
    with pytest.raises(ValueError, match=where):
        read_journal(path)
    with pytest.raises(ValueError, match=where):
        Journal(path)
    assert path.read_bytes().endswith(b'\n{"update": 3}\n')  # nothing is thrown away


def test_no_file_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_journal(tmp_path / "log.jsonl")
    (tmp_path / "log.jsonl").touch()
    assert read_journal(tmp_path / "log.jsonl") == []


def test_rewinding_drops_what_came_after(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Journal(path) as journal:
        for update in (10, 20, 20, 30, 40):
            journal.write(update, loss=update)
        journal.rewind(20)
        assert [line["update"] for line in read_journal(path)] == [10, 20, 20]
        journal.write(30, loss=7)
    with path.open("ab") as file:
        file.write(b'{"update": 4')
    with Journal(path) as journal:
        journal.rewind(35)
        journal.write(50)
    assert [line["update"] for line in read_journal(path)] == [10, 20, 20, 30, 50]
    assert read_journal(path)[3]["loss"] == 7
    with Journal(path) as journal:
        journal.rewind(0)
    assert path.read_bytes() == b""
    assert sorted(tmp_path.iterdir()) == [path]  # nothing is left over


def test_a_failed_rewind_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    journal = Journal(path)
    journal.write(10)
    journal.write(20)

    def refuse(*_: object) -> None:
        raise OSError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="killed here"):
            journal.rewind(10)
    assert [line["update"] for line in read_journal(path)] == [10, 20]
    journal.write(30)  # still open
    journal.close()
    assert [line["update"] for line in read_journal(path)] == [10, 20, 30]


def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    sizes = []
    with Journal(path) as journal:
        for update in range(3):
            journal.write(update, loss=1.0)
            sizes.append(path.stat().st_size)  # flushed, and whole
            assert path.read_bytes().endswith(b"\n")
    assert sizes == sorted(set(sizes))


WRITER = """
import sys
from pathlib import Path
from annotated_transformer.training.monitoring import Journal
journal = Journal(Path(sys.argv[1]))
for update in range(10**9):
    journal.write(update, loss=update / 7, tokens=update)
"""


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env=environment)
    try:
        end = time.monotonic() + 60
        while not (path.exists() and path.stat().st_size > 100_000) and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        process.wait()
    lines = read_journal(path)
    assert len(lines) > 1000
    assert [line["update"] for line in lines] == list(range(len(lines)))


# --- TensorBoard -----------------------------------------------------------------------------


class Writer:
    """Stands in for PyTorch's writer."""

    made: list["Writer"]

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.points: list[tuple[str, float, int]] = []
        self.closed = False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert not self.closed
        self.points.append((name, value, step))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    Writer.made = []
    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return Writer.made


def test_tensorboard_gets_the_same_numbers(tmp_path: Path, writers: list[Writer]) -> None:
    with Journal(tmp_path / "log.jsonl", tensorboard=tmp_path / "board") as journal:
        journal.write(10, loss=2.0, share_of_peak=None)
        journal.write(20, loss=1.0, rate=0.1)
        journal.rewind(10)
        journal.write(20, loss=1.5)
    first, second = writers
    assert first.folder == second.folder == str(tmp_path / "board")
    assert first.points == [("loss", 2.0, 10), ("loss", 1.0, 20), ("rate", 0.1, 20)]
    assert first.purge_step is None
    assert second.purge_step == 11  # steps from here on are hidden; 10 stays
    assert second.points == [("loss", 1.5, 20)]
    assert first.closed
    assert second.closed


def test_a_resumed_training_hides_what_came_after(tmp_path: Path, writers: list[Writer]) -> None:
    with Journal(tmp_path / "log.jsonl", tensorboard=tmp_path) as journal:
        journal.rewind(7)
        journal.write(8, loss=1.0)
    (only,) = writers
    assert only.purge_step == 8


def test_without_tensorboard_there_is_none(tmp_path: Path, writers: list[Writer]) -> None:
    with Journal(tmp_path / "log.jsonl") as journal:
        journal.write(1, loss=1.0)
        journal.rewind(0)
    assert writers == []


def test_a_missing_tensorboard_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        Journal(tmp_path / "log.jsonl", tensorboard=tmp_path / "board")
    assert list(tmp_path.iterdir()) == []


# --- the figure ------------------------------------------------------------------------------

LOG = [
    {"update": 10, "loss": 4.0, "rate": 0.1, "tokens_per_second": 900},
    {"update": 20, "loss": math.nan, "rate": 0.2, "tokens_per_second": 800, "skipped": 1},
    {"update": 30, "loss": 3.0, "tokens_per_second": 1000},
]
CURVE = [
    {"update": 15, "train_loss": 3.9, "valid_loss": 4.1, "tokens_per_second": 850},
    {"update": 30, "train_loss": 3.1, "valid_loss": 3.5, "tokens_per_second": 900},
]


def drawn(figure: Figure) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Return the curves of each panel by its label."""
    return {
        ax.get_ylabel(): {
            str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))  # type: ignore[arg-type]
            for line in ax.get_lines()
        }
        for ax in figure.axes
    }


LOSS, RATE, SPEED = "loss, nats per target token", "learning rate", "target tokens per second"


def test_the_figure_shows_what_was_logged(tmp_path: Path) -> None:
    figure = training_figure(LOG, CURVE, tmp_path / "system" / "small")
    panels = drawn(figure)
    assert list(panels) == [LOSS, RATE, SPEED]
    assert panels[LOSS]["validation"] == ([15, 30], [4.1, 3.5])
    updates, losses = panels[LOSS]["training"]
    assert updates == [10, 20, 30]
    assert (losses[0], losses[2]) == (4.0, 3.0)
    assert math.isnan(losses[1])
    assert panels[RATE] == {"rate": ([10, 20], [0.1, 0.2])}
    assert panels[SPEED] == {"speed": ([10, 20, 30], [900, 800, 1000])}
    assert figure.get_suptitle() == "small"
    assert figure.axes[-1].get_xlabel() == "updates"
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["training", "validation"]
    figure.savefig(tmp_path / "figure.png")
    assert plt.get_fignums() == []  # explicit: nothing is left open


def test_without_a_journal_the_curve_is_drawn() -> None:
    figure = training_figure([], CURVE)
    assert figure.get_suptitle() == ""
    panels = drawn(figure)
    assert panels[LOSS]["training"] == ([15, 30], [3.9, 3.1])
    assert panels[SPEED]["speed"] == ([15, 30], [850, 900])
    assert panels[RATE] == {}


@pytest.mark.parametrize(("log", "curve"), [([], []), (LOG[:1], []), ([], CURVE[:1])])
def test_few_points_are_seen(log: Any, curve: Any, tmp_path: Path) -> None:
    figure = training_figure(log, curve)
    figure.savefig(tmp_path / "figure.png")
    for ax in figure.axes:
        assert all(line.get_marker() == "o" for line in ax.get_lines())


def test_this_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert training_figure([], name=".").get_suptitle() == tmp_path.name


def test_many_points_are_a_line() -> None:
    log = [{"update": n, "loss": 1.0} for n in range(50)]
    (line,) = training_figure(log).axes[0].get_lines()
    assert line.get_marker() == ""


def test_importing_draws_nothing() -> None:
    code = f"import sys, {monitoring.__name__}; print('matplotlib' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert result.stdout.strip() == "False"
