"""Peaks by name, as the data sheets have them; utilization; rates as text."""

import re
from pathlib import Path

import pytest

from annotated_transformer.engine.devices import DEVICES, describe_rate, mfu, peak_flops

ROOT = Path(__file__).resolve().parents[2]


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


def test_utilization_is_a_share_of_the_peak() -> None:
    # 6.4e12 in 0.5 s are 12.8 TFLOP/s: a tenth of two devices of 64
    assert mfu(6.4e12, 0.5, 128e12) == pytest.approx(0.1)
    assert mfu(6.4e12, 0.5, None) is None
    assert mfu(0.0, 0.0, 64e12) is None


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
def test_a_rate_as_text(rate: float, peak: float | None, text: str) -> None:
    assert describe_rate(rate, peak) == text
