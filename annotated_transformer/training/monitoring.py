# Written from book/training/monitoring.md: edit the chapter instead.
"""What an update costs, what a device can do, and a log of the training."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from annotated_transformer.model.transformer import ModelConfig

if TYPE_CHECKING:  # drawing is not needed for training
    from matplotlib.figure import Figure


def product_flops(config: ModelConfig, vocab: int, pairs: int, source: int, target: int) -> int:
    """Return the operations of all matrix products in one training step.

    Args:
        config: Sizes of the model.
        vocab: Tokens in the target vocabulary.
        pairs: Sentence pairs in the batch.
        source: Tokens of each source sentence.
        target: Tokens of each target sentence.

    Returns:
        Operations; a multiplication and an addition are two. Forward and backward.
    """
    d, h = config.d_model, config.h
    keys, values = h * (config.d_k or d // h), h * (config.d_v or d // h)

    def attention(queries: int, others: int) -> int:
        projections = queries * d * (keys + values) + others * d * (keys + values)
        return projections + queries * others * (keys + values)

    def network(tokens: int) -> int:
        return 2 * tokens * d * config.d_ff

    encoder = attention(source, source) + network(source)
    decoder = attention(target, target) + attention(target, source) + network(target)
    forward = config.N * (encoder + decoder) + target * d * vocab  # multiplications
    return pairs * forward * 2 * 3


def batch_flops(
    config: ModelConfig, vocab: int, sources: Sequence[int], targets: Sequence[int]
) -> int:
    """Return the operations of all matrix products that one batch needs in training.

    Forward and backward. A causal mask is not subtracted, though it hides nearly half of the
    pairs; padding, and what is computed a second time to save memory, is not counted.

    Args:
        config: Sizes of the model.
        vocab: Tokens in the target vocabulary.
        sources: Tokens of each source sentence, the end symbol included.
        targets: Tokens that are to be predicted of each target sentence, likewise.

    Returns:
        Operations; a multiplication and an addition are two.

    Raises:
        ValueError: There are not as many sources as targets.
    """
    d, h = config.d_model, config.h
    heads = h * (config.d_k or d // h) + h * (config.d_v or d // h)  # keys and values
    network = 2 * d * config.d_ff
    s, t = sum(sources), sum(targets)
    looks = sum(m * m + n * n + m * n for m, n in zip(sources, targets, strict=True))
    source = 3 * d * heads + network  # own attention, and keys and values for the decoder
    target = 3 * d * heads + network  # own attention, and queries and outputs for the source
    layers = config.N * (s * source + t * target + looks * heads)
    return (layers + t * d * vocab) * 2 * 3


@dataclass(frozen=True)
class Device:
    """What its maker says that a device can do, without sparsity.

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


AMPERE = {"float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312}
HOPPER = {"float32": 67, "tf32": 989 / 2, "bfloat16": 1979 / 2, "float16": 1979 / 2}
HOPPER_CARD = {"float32": 51, "tf32": 756 / 2, "bfloat16": 1513 / 2, "float16": 1513 / 2}
L4 = {"float32": 30.3, "tf32": 120 / 2, "bfloat16": 242 / 2, "float16": 242 / 2}
GA102 = {"float32": 35.6, "tf32": 35.6, "bfloat16": 71, "float16": 71}
AD102 = {"float32": 82.6, "tf32": 82.6, "bfloat16": 165.2, "float16": 165.2}
VOLTA = ("V100-SXM2-16GB", "V100-SXM2-32GB")
VOLTA_CARD = ("V100-PCIE-16GB", "V100-PCIE-32GB")

DEVICES: Mapping[str, Device] = {
    "P100 SXM2": Device(
        ("P100-SXM2-16GB",), {"float32": 10.6, "float16": 21.2}, 732e9, "nvidia_p100"
    ),
    "P100 PCIe": Device(
        ("P100-PCIE-16GB",), {"float32": 9.3, "float16": 18.7}, 732e9, "nvidia_p100pcie"
    ),
    "V100 SXM2": Device(VOLTA, {"float32": 15.7, "float16": 125}, 900e9, "nvidia_v100"),
    "V100 PCIe": Device(VOLTA_CARD, {"float32": 14, "float16": 112}, 900e9, "nvidia_v100"),
    "V100S": Device(("V100S-PCIE-32GB",), {"float32": 16.4, "float16": 130}, 1134e9, "nvidia_v100"),
    "T4": Device(("T4",), {"float32": 8.1, "float16": 65}, 300e9, "nvidia_t4"),
    "A100 40GB": Device(("A100-SXM4-40GB", "A100-PCIE-40GB"), AMPERE, 1555e9, "nvidia_ampere2020"),
    "A100 80GB SXM": Device(("A100-SXM4-80GB",), AMPERE, 2039e9, "nvidia_a100"),
    "A100 80GB PCIe": Device(("A100 80GB PCIe",), AMPERE, 1935e9, "nvidia_a100"),
    "L4": Device(("L4",), L4, 300e9, "nvidia_l4"),
    "RTX 3090": Device(("RTX 3090",), GA102, 936e9, "nvidia_ga102"),
    "RTX 4090": Device(("RTX 4090",), AD102, 1008e9, "nvidia_ada"),
    "H100 SXM": Device(("H100 80GB HBM3",), HOPPER, 3.35e12, "nvidia_h100"),
    "H100 PCIe": Device(("H100 PCIe",), HOPPER_CARD, 2e12, "nvidia_hopper2022"),
    "H200 SXM": Device(("H200",), HOPPER, 4.8e12, "nvidia_h200"),
    # other rates of the B200 differ between editions of its sheet
    "B200": Device(
        ("B200",), {"bfloat16": 4500 / 2, "float16": 4500 / 2}, 7.7e12, "nvidia_blackwell"
    ),
}

BRANDS = re.compile(r"(?:(?:NVIDIA|Tesla|GeForce) )*")  # drivers differ in these


def peak_flops(name: str, precision: str) -> float | None:
    """Return the most operations a second of a device, without sparsity.

    Args:
        name: What ``torch.cuda.get_device_name`` says.
        precision: ``"float32"``, ``"tf32"``, ``"bfloat16"`` or ``"float16"``.

    Returns:
        Operations a second; None for a device that is not in ``DEVICES``, or a precision
        that it does not have.
    """
    short = BRANDS.sub("", name.strip(), count=1)
    for device in DEVICES.values():
        if short in device.names and precision in device.teraflops:
            return device.teraflops[precision] * 1e12
    return None


def share_of_peak(
    flops: float, seconds: float, peak: float | None, devices: int = 1
) -> float | None:
    """Return which share of the possible operations a training needed: its utilization.

    Args:
        flops: Operations that the model asked for, as ``batch_flops`` counts them.
        seconds: Time that they took.
        peak: Most operations a second of one device.
        devices: How many worked at it.

    Returns:
        A share of 1; None where the peak is unknown or no time has passed.
    """
    return flops / (seconds * peak * devices) if peak and seconds else None


UNITS = {"E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


def describe_rate(flops_per_second: float, peak: float | None = None) -> str:
    """Say a rate in words, such as ``"1.2 TFLOP/s, 38 % of the peak"``.

    Args:
        flops_per_second: Operations a second, of all devices.
        peak: The most that they could do, together; None where that is unknown.
    """
    unit = next((u for u, size in UNITS.items() if flops_per_second / size >= 0.9995), "")
    text = f"{float(f'{flops_per_second / UNITS[unit]:.3g}'):g} {unit}FLOP/s"
    if not peak:
        return text
    percent = 100 * flops_per_second / peak
    return f"{text}, {percent:{'.0f' if percent >= 9.5 else '.1g'}} % of the peak"


NO_NUMBERS = ("nan", "inf", "-inf")


def _written(value: float) -> float | str:
    """Return a number as JSON can hold it."""
    number = int(value) if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else str(number)


def _read(value: object) -> float:
    """Return the number that was written."""
    if isinstance(value, str) and value in NO_NUMBERS:
        return float(value)
    if isinstance(value, int | float):
        return value
    raise ValueError(f"{value!r} is not a number")


def _entry(piece: bytes) -> dict[str, float]:
    """Return what one line says."""
    said = json.loads(piece)
    if not isinstance(said, dict) or "update" not in said:
        raise ValueError("it does not say its update")
    return {name: _read(value) for name, value in said.items()}


def _entries(path: Path) -> list[tuple[bytes, dict[str, float]]]:
    """Return the lines of a journal with what they say, without a broken last one."""
    found = []
    pieces = path.read_bytes().split(b"\n")
    pieces = pieces[:-1] if not pieces[-1] else pieces  # nothing after the last line
    for number, piece in enumerate(pieces, 1):
        try:
            found.append((piece, _entry(piece)))
        except ValueError as error:
            if number == len(pieces):  # the process was killed while it wrote
                break
            raise ValueError(f"{path}, line {number}: not a line of a journal: {error}") from None
    return found


def read_journal(path: Path) -> list[dict[str, float]]:
    """Read a journal, also one that is being written.

    A broken last line is left out: the process was killed while it wrote.

    Args:
        path: The file.

    Returns:
        Its lines; each says its ``update``, and what else was measured.

    Raises:
        OSError: The file cannot be read.
        ValueError: Another line than the last is broken; the message names file and line.
    """
    return [entry for _, entry in _entries(Path(path))]


def _keep(path: Path, update: float) -> None:
    """Leave only whole lines, and of these the ones up to an update."""
    if not path.exists():
        return
    kept = b"".join(piece + b"\n" for piece, entry in _entries(path) if entry["update"] <= update)
    if kept == path.read_bytes():
        return
    other = path.with_name(f".{path.name}.part")
    with other.open("wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(other, path)


class _Board:
    """Numbers for TensorBoard, which draws them in a browser."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"files for TensorBoard need its package ({error}): pip install tensorboard"
            ) from error
        self.folder = folder
        self.make = SummaryWriter
        self.writer: Any = None
        self.purge: int | None = None

    def write(self, update: int, numbers: Mapping[str, float]) -> None:
        """Write one point of each curve."""
        if self.writer is None:
            self.writer = self.make(str(self.folder), purge_step=self.purge)
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, update)

    def rewind(self, update: int) -> None:
        """Let TensorBoard hide what came after an update."""
        self.close()
        self.purge = update + 1  # hidden from here on

    def close(self) -> None:
        """Write what is left."""
        if self.writer is not None:
            self.writer.close()
        self.writer = None


class Journal:
    """A log of a training, one JSON object a line, to which lines are added.

    Opened on a file that is there, it continues it; a broken last line is taken away.

    Args:
        path: The file; its folder must exist.
        tensorboard: Also write files for TensorBoard into this folder.

    Raises:
        ImportError: The package tensorboard is needed, and is not installed.
        ValueError: The file is there and has a broken line that is not its last.
    """

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self.path = Path(path)
        self._board = None if tensorboard is None else _Board(tensorboard)
        _keep(self.path, math.inf)
        self._file = self.path.open("ab")

    def write(self, update: int, **numbers: float | None) -> None:
        """Add one line, at once: a kill leaves at most this line broken.

        Args:
            update: Number of updates so far.
            numbers: What was measured, by name. None is left out; numbers that are not finite
                are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
        """
        known = {name: value for name, value in numbers.items() if value is not None}
        line = {name: _written(value) for name, value in {"update": update, **known}.items()}
        self._file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        self._file.flush()
        if self._board is not None:
            self._board.write(update, known)

    def rewind(self, update: int) -> None:
        """Drop all lines after an update, for a training that goes on from there.

        Args:
            update: The last update that counts.
        """
        self._file.close()
        try:
            _keep(self.path, update)
        finally:
            self._file = self.path.open("ab")
        if self._board is not None:
            self._board.rewind(update)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Journal:
        """Return the journal, to be closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files."""
        self.close()


Rows = Sequence[Mapping[str, float]]


def _points(rows: Rows, key: str) -> tuple[list[float], list[float]]:
    """Return updates and values of the rows that have a value."""
    having = [row for row in rows if key in row]
    return [row["update"] for row in having], [row[key] for row in having]


def training_figure(journal: Rows, curve: Rows = (), name: str | Path = "") -> Figure:
    """Draw loss, learning rate and speed of a training over its updates.

    Args:
        journal: Lines of ``read_journal``.
        curve: Points of the learning curve, with ``update``, ``train_loss``, ``valid_loss`` and
            ``tokens_per_second``; drawn where the journal has nothing.
        name: Folder of the training; its last part is the title.

    Returns:
        A figure of matplotlib, for ``show`` or ``savefig``.

    Raises:
        ImportError: What figures need is not installed.
    """
    from annotated_transformer.figures import canvas, lines

    def either(key: str, other: str) -> tuple[list[float], list[float]]:
        return _points(journal, key) if _points(journal, key)[0] else _points(curve, other)

    speed = either("tokens_per_second", "tokens_per_second")
    losses = {"training": either("loss", "train_loss"), "validation": _points(curve, "valid_loss")}
    panels = {
        "loss, nats per target token": losses,
        "learning rate": {"rate": _points(journal, "rate")},
        "target tokens per second": {"speed": speed},
    }
    figure, axes = canvas(len(panels), size=(6.0, 7.0), sharex=True)
    for ax, (label, series) in zip(axes[:, 0], panels.items(), strict=True):
        drawn = {key: points for key, points in series.items() if points[0]}
        lines(drawn, x_label="updates", y_label=label, ax=ax)
        for line in ax.get_lines():
            line.set(marker="o" if len(line.get_xdata()) < 20 else "", markersize=3)
        ax.label_outer()
    figure.suptitle(Path(name).resolve().name if str(name) else "")
    return figure
