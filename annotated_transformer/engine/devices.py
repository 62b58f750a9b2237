"""What a device can do, by its data sheet, and how much of that a program uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What the maker of a device states, without sparsity.

    Attributes:
        names: As ``torch.cuda.get_device_name`` reports it, without the maker's name and the
            name of the series before it.
        teraflops: Most operations a second, in 10¹², for each precision that it has; sums of
            products of 16 bits are kept in float32, if it has a choice.
        bandwidth: Most bytes a second to and from its memory.
        source: Key of the data sheet in the bibliography.
    """

    names: tuple[str, ...]
    teraflops: Mapping[str, float]
    bandwidth: float
    source: str


# Where a sheet prints only the rate for sparse matrices, it is halved here: 1979 / 2.
_AMPERE = {"float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312}
_HOPPER = {"float32": 67, "tf32": 989 / 2, "bfloat16": 1979 / 2, "float16": 1979 / 2}
_HOPPER_PCIE = {"float32": 51, "tf32": 756 / 2, "bfloat16": 1513 / 2, "float16": 1513 / 2}
_L4 = {"float32": 30.3, "tf32": 120 / 2, "bfloat16": 242 / 2, "float16": 242 / 2}
# These multiply float16 twice as fast with sums in float16, too; PyTorch keeps them in float32.
_GA102 = {"float32": 35.6, "tf32": 35.6, "bfloat16": 71, "float16": 71}
_AD102 = {"float32": 82.6, "tf32": 82.6, "bfloat16": 165.2, "float16": 165.2}
_V100 = ("V100-SXM2-16GB", "V100-SXM2-32GB")
_V100_PCIE = ("V100-PCIE-16GB", "V100-PCIE-32GB")
_A100_40 = ("A100-SXM4-40GB", "A100-PCIE-40GB")

DEVICES: Mapping[str, Device] = {
    "P100 SXM2": Device(
        ("P100-SXM2-16GB",), {"float32": 10.6, "float16": 21.2}, 732e9, "nvidia_p100"
    ),
    "P100 PCIe": Device(
        ("P100-PCIE-16GB",), {"float32": 9.3, "float16": 18.7}, 732e9, "nvidia_p100pcie"
    ),
    "V100 SXM2": Device(_V100, {"float32": 15.7, "float16": 125}, 900e9, "nvidia_v100"),
    "V100 PCIe": Device(_V100_PCIE, {"float32": 14, "float16": 112}, 900e9, "nvidia_v100"),
    "V100S": Device(("V100S-PCIE-32GB",), {"float32": 16.4, "float16": 130}, 1134e9, "nvidia_v100"),
    "T4": Device(("T4",), {"float32": 8.1, "float16": 65}, 300e9, "nvidia_t4"),
    "A100 40GB": Device(_A100_40, _AMPERE, 1555e9, "nvidia_ampere2020"),
    "A100 80GB SXM": Device(("A100-SXM4-80GB",), _AMPERE, 2039e9, "nvidia_a100"),
    "A100 80GB PCIe": Device(("A100 80GB PCIe",), _AMPERE, 1935e9, "nvidia_a100"),
    "L4": Device(("L4",), _L4, 300e9, "nvidia_l4"),
    "RTX 3090": Device(("RTX 3090",), _GA102, 936e9, "nvidia_ga102"),
    "RTX 4090": Device(("RTX 4090",), _AD102, 1008e9, "nvidia_ada"),
    "H100 SXM": Device(("H100 80GB HBM3",), _HOPPER, 3.35e12, "nvidia_h100"),
    "H100 PCIe": Device(("H100 PCIe",), _HOPPER_PCIE, 2e12, "nvidia_hopper2022"),
    "H200 SXM": Device(("H200",), _HOPPER, 4.8e12, "nvidia_h200"),
    # other rates of the B200 differ between editions of its sheet
    "B200": Device(
        ("B200",), {"bfloat16": 4500 / 2, "float16": 4500 / 2}, 7.7e12, "nvidia_blackwell"
    ),
}

_BRANDS = re.compile(r"(?:(?:NVIDIA|Tesla|GeForce) )*")  # drivers differ in these


def peak_flops(name: str, precision: str) -> float | None:
    """Return the most operations a second of a device, without sparsity.

    A name must fit as a whole: an ``RTX 3090 Ti`` is not an ``RTX 3090``, and a slice of an A100
    (``MIG`` in its name) has a part of the rate.

    Args:
        name: What ``torch.cuda.get_device_name`` says.
        precision: ``"float32"``, ``"tf32"``, ``"bfloat16"`` or ``"float16"``.

    Returns:
        Operations a second; None for a device that is not in ``DEVICES``, or a precision
        that it does not have.
    """
    short = _BRANDS.sub("", name.strip(), count=1)
    for device in DEVICES.values():
        if short in device.names and precision in device.teraflops:
            return device.teraflops[precision] * 1e12
    return None


def mfu(flops: float, seconds: float, peak: float | None, devices: int = 1) -> float | None:
    """Return the model FLOPs utilization: operations that the model needs, over those possible.

    Padding and what is computed twice earn nothing, so the number is comparable between programs.

    Args:
        flops: Operations that the model needs, as ``training_flops`` counts them.
        seconds: Time that they took.
        peak: Most operations a second of one device.
        devices: How many devices shared the work.

    Returns:
        A share of 1; None where the peak is unknown or no time has passed.
    """
    return flops / (seconds * peak * devices) if peak and seconds else None


_UNITS = {"E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


def describe_rate(flops_per_second: float, peak: float | None = None) -> str:
    """Format a rate, such as ``"1.2 TFLOP/s, 38 % of the peak"``.

    Args:
        flops_per_second: Operations a second, of all devices.
        peak: The most that all devices could do; None where that is unknown.
    """
    unit = next((u for u, size in _UNITS.items() if flops_per_second / size >= 0.9995), "")
    text = f"{float(f'{flops_per_second / _UNITS[unit]:.3g}'):g} {unit}FLOP/s"
    if not peak:
        return text
    percent = 100 * flops_per_second / peak
    return f"{text}, {percent:{'.0f' if percent >= 9.5 else '.1g'}} % of the peak"
