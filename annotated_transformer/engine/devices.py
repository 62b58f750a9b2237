"""What a device can do, by its data sheet, and how much of that a program uses."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PRECISIONS = ("float32", "tf32", "bfloat16", "float16")


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


def _read(row: Mapping[str, str]) -> Device:
    rates = {name: float(row[name]) for name in PRECISIONS if row[name]}
    return Device(tuple(row["names"].split(", ")), rates, float(row["GB/s"]) * 1e9, row["source"])


# Where a sheet prints only the rate for sparse matrices, half of it stands in the table. What the
# sheets of the B200 say of other precisions differs between their editions.
with Path(__file__).with_name("devices.tsv").open(encoding="utf-8") as _file:
    DEVICES: Mapping[str, Device] = {
        row["device"]: _read(row) for row in csv.DictReader(_file, delimiter="\t")
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
