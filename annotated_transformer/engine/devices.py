"""Peak rates of devices by their data sheets, and the share of them that a program uses."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PRECISIONS = ("float32", "tf32", "bfloat16", "float16")


@dataclass(frozen=True)
class Device:
    """A device's data sheet, without sparsity."""

    #: As reported by ``torch.cuda.get_device_name``, without the leading names of the manufacturer
    #: and the series.
    names: tuple[str, ...]
    #: Peak TFLOP/s for each supported precision; 16-bit products are accumulated in float32 if the
    #: device has a choice.
    teraflops: Mapping[str, float]
    bandwidth: float  #: Peak memory bandwidth in bytes per second.
    source: str  #: Key of the data sheet in the bibliography.


def _read(row: Mapping[str, str]) -> Device:
    rates = {name: float(row[name]) for name in PRECISIONS if row[name]}
    return Device(tuple(row["names"].split(", ")), rates, float(row["GB/s"]) * 1e9, row["source"])


# Where a sheet gives only the rate for sparse matrices, the table has half of it. The editions of
# the B200's sheet disagree about its other precisions.
with Path(__file__).with_name("devices.tsv").open(encoding="utf-8") as _file:
    DEVICES: Mapping[str, Device] = {
        row["device"]: _read(row) for row in csv.DictReader(_file, delimiter="\t")
    }  #: The data sheets by the name of the device.

_BRANDS = re.compile(r"(?:(?:NVIDIA|Tesla|GeForce) )*")  # drivers differ in these


def peak_flops(name: str, precision: str) -> float | None:
    """Return a device's peak operations per second, without sparsity.

    The whole name must match: an ``RTX 3090 Ti`` is not an ``RTX 3090``, and a slice of an A100
    (``MIG`` in its name) has only part of the rate.

    Args:
        name: As reported by ``torch.cuda.get_device_name``.
        precision: ``"float32"``, ``"tf32"``, ``"bfloat16"`` or ``"float16"``.

    Returns:
        Operations per second; None for a device that is not in ``DEVICES``, or a precision
        that it does not support.
    """
    short = _BRANDS.sub("", name.strip(), count=1)
    for device in DEVICES.values():
        if short in device.names and precision in device.teraflops:
            return device.teraflops[precision] * 1e12
    return None


def mfu(flops: float, seconds: float, peak: float | None) -> float | None:
    """Return the model FLOPs utilization: the operations the model needs over the peak.

    Padding and recomputation do not count, so the number is comparable between programs.

    Args:
        flops: Operations that the model needs, as counted by ``training_flops``.
        seconds: Time they took.
        peak: Peak operations per second of all devices.

    Returns:
        A fraction of 1; None if the peak is unknown or no time has passed.
    """
    return flops / (seconds * peak) if peak and seconds else None


_UNITS = {"E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


def describe_rate(flops_per_second: float, peak: float | None = None) -> str:
    """Format the rate of devices, such as ``"1.2 TFLOP/s, 38 % of the peak"`` if that is known."""
    unit = next((u for u, size in _UNITS.items() if flops_per_second / size >= 0.9995), "")
    text = f"{float(f'{flops_per_second / _UNITS[unit]:.3g}'):g} {unit}FLOP/s"
    if not peak:
        return text
    percent = 100 * flops_per_second / peak
    return f"{text}, {percent:{'.0f' if percent >= 9.5 else '.1g'}} % of the peak"
