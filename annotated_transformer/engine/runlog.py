"""What a run tells while it is under way: lines of its log, and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from tqdm import tqdm

from annotated_transformer.engine.checkpoints import CheckpointError
from annotated_transformer.engine.config import RunOptions, UsageError
from annotated_transformer.engine.devices import mfu, peak_flops
from annotated_transformer.engine.journal import Journal
from annotated_transformer.engine.state import TrainState, Window
from annotated_transformer.engine.system import Architecture
from annotated_transformer.model.complexity import training_flops
from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.training.loop import Progress


def update_flops(config: Architecture, vocabulary: int, lengths: Sequence[Sequence[int]]) -> int:
    """Return the operations of an update; 0 for architectures for which there is no count.

    Args:
        config: Sizes of the model.
        vocabulary: Number of target tokens.
        lengths: Source and target length of each of its pairs.
    """
    if not isinstance(config, ModelConfig):
        return 0
    sources, targets = zip(*lengths, strict=True)
    return training_flops(config, vocabulary, sources, targets)


def device_peak(device: torch.device, precision: str, devices: int) -> float | None:
    """Return what all devices can do together, in operations a second, where that is known."""
    if device.type != "cuda":
        return None
    one = peak_flops(torch.cuda.get_device_name(device), precision)
    return None if one is None else one * devices


def log_line(window: Window, peak: float | None) -> dict[str, float | None]:
    """Return what the log says of the updates since its last line.

    Args:
        window: Their sums.
        peak: Of all devices together, see :func:`device_peak`.
    """
    made, flops = Progress(window.nll, window.tokens, window.seconds), window.flops
    return {
        "loss": made.loss,
        "rate": window.rate,
        "norm": window.norm,
        "tokens": made.tokens,
        "seconds": made.seconds,
        "tokens_per_second": made.speed,
        "flops_per_second": flops / made.seconds if flops and made.seconds else None,
        "share_of_peak": mfu(flops, made.seconds, peak) if flops else None,
        "skipped": window.skipped,
    }


class RunLog:
    """The log and the progress bar of a run, as a context; silent in all but the main process.

    Args:
        folder: Where ``log.jsonl`` is; it loses what came after the state.
        options: How the run runs.
        state: How far it is.
        updates: How many it will have.
        main: Whether this is the main process.
        progress: Show the bar.

    Raises:
        UsageError: TensorBoard is asked for, and not installed.
        CheckpointError: The log cannot be read or written.
    """

    def __init__(
        self,
        folder: Path,
        options: RunOptions,
        state: TrainState,
        updates: int,
        *,
        main: bool = True,
        progress: bool = True,
    ) -> None:
        self.path, self.journal = folder / "log.jsonl", None
        try:
            if main:
                self.journal = Journal(self.path, options.tensorboard)
                self.journal.rewind(state.updates)
        except ImportError as error:
            raise UsageError(f"--tensorboard: {error}") from None
        except ValueError as error:
            raise CheckpointError(f"{error}; mend the line, or move the file") from None
        except OSError as error:
            raise self._failed(error) from None
        self.bar = tqdm(
            total=updates,
            initial=state.updates,
            unit="update",
            disable=not (progress and main),
            file=sys.stderr,
        )

    def _failed(self, error: OSError) -> CheckpointError:
        reason = error.strerror or error
        return CheckpointError(f"{self.path}: cannot be written: {reason}; free some space")

    def write(self, state: TrainState, **numbers: float | None) -> None:
        """Add a line to the log."""
        try:
            if self.journal is not None:
                self.journal.write(state.updates, epoch=state.epoch + 1, **numbers)
        except OSError as error:
            raise self._failed(error) from None

    def show(self, state: TrainState) -> None:
        """Move the bar on by an update."""
        valid = f"validation {state.curve[-1].valid_loss:.3f}, " if state.curve else ""
        loss, speed = state.recent.loss, state.recent.speed
        self.bar.set_postfix_str(
            f"epoch {state.epoch + 1}, loss {loss:.3f}, {valid}{speed:.0f} tokens/s", refresh=False
        )
        self.bar.update()

    def __enter__(self) -> RunLog:
        """Return the log, to be closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the log and the bar."""
        self.bar.close()
        if self.journal is not None:
            self.journal.close()
