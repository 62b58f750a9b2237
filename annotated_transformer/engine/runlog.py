"""The output of a live run: its log lines and a progress bar."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from annotated_transformer.data.files import not_written
from annotated_transformer.engine.checkpoints import CheckpointError
from annotated_transformer.engine.config import Options, UsageError
from annotated_transformer.engine.devices import mfu
from annotated_transformer.engine.journal import Journal
from annotated_transformer.engine.state import TrainState, Window
from annotated_transformer.training.loop import Progress


def log_line(window: Window, peak: float | None) -> dict[str, float | None]:
    """Return the log entry for a window of updates; ``peak`` is the rate of all devices."""
    made, flops = Progress(window.nll, window.tokens, window.seconds), window.flops
    return {
        "loss": made.loss,
        "rate": window.rate,
        "grad_norm": window.norm,
        "tokens": made.tokens,
        "seconds": made.seconds,
        "tokens_per_second": made.speed,
        "flops_per_second": flops / made.seconds if flops and made.seconds else None,
        "share_of_peak": mfu(flops, made.seconds, peak) if flops else None,
        "skipped": window.skipped,
    }


class RunLog:
    """The log and the progress bar of a run."""

    def __init__(self, path: Path, journal: Journal | None, bar: Any) -> None:
        self.path, self.journal, self.bar = path, journal, bar

    def write(self, state: TrainState, **numbers: float | None) -> None:
        """Append a line to the log."""
        try:
            if self.journal is not None:
                self.journal.write(state.updates, epoch=state.epoch + 1, **numbers)
        except OSError as error:
            raise not_written(error, self.path) from None

    def show(self, state: TrainState) -> None:
        """Advance the progress bar by one update."""
        valid = f"validation {state.curve[-1].valid_loss:.3f}, " if state.curve else ""
        loss, speed = state.recent.loss, state.recent.speed
        self.bar.set_postfix_str(
            f"epoch {state.epoch + 1}, loss {loss:.3f}, {valid}{speed:.0f} tokens/s", refresh=False
        )
        self.bar.update()


@contextlib.contextmanager
def open_log(
    folder: Path, options: Options, state: TrainState, *, main: bool, progress: bool
) -> Iterator[RunLog]:
    """Open ``log.jsonl``, cut back to the state; only the main process writes and shows a bar.

    Raises:
        UsageError: TensorBoard was requested, but is not installed.
        FileError: The log cannot be read or written.
    """
    path, journal = folder / "log.jsonl", None
    shown = progress and main and sys.stderr is not None
    try:
        if main:
            journal = Journal(path, options.run.tensorboard)
            journal.rewind(state.updates)
    except ImportError as error:
        raise UsageError(f"--tensorboard: {error}") from None
    except OSError as error:
        raise not_written(error, path) from None
    except ValueError as error:
        raise CheckpointError(f"{error}; repair the line, or move the file") from None
    total, done = options.optim.updates, state.updates
    bar = tqdm(total=total, initial=done, unit="update", disable=not shown, file=sys.stderr)
    with bar, contextlib.nullcontext() if journal is None else journal:
        yield RunLog(path, journal, bar)
