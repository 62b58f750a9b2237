"""The folder of one run: its lock, what it can go on from, and the weights that it leaves."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from annotated_transformer.data.files import locked, not_written, remove_leftovers, write_atomically
from annotated_transformer.engine.checkpoints import (
    AVERAGED,
    WEIGHTS,
    CheckpointError,
    check_fingerprint,
    damaged,
    load_tensors,
    numbered,
    restore_run,
    run_tensors,
    save_tensors,
    save_weights,
    snapshots,
)
from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.state import Checkpoint, TrainState
from annotated_transformer.engine.system import System
from annotated_transformer.engine.typed import from_dict
from annotated_transformer.training.distributed import DistributedWorld


def checkpoint_paths(folder: str | Path) -> list[Path]:
    """Return the files from which a run can go on, the oldest first."""
    return numbered(Path(folder) / "training")


def read_checkpoint(path: Path, *, verify: bool = True) -> tuple[dict[str, Any], Checkpoint]:
    """Return the tensors of a file to go on from, and the rest of it.

    Raises:
        CheckpointError: The file is damaged.
    """
    tensors, data = load_tensors(path, verify=verify)
    try:
        return tensors, from_dict(Checkpoint, data)
    except TypeError as error:
        raise damaged(path, error) from None


def read_state(folder: str | Path) -> TrainState | None:
    """Return how far a run is, also one that is under way; None where nothing sound is kept."""
    for path in reversed(checkpoint_paths(folder)):
        with contextlib.suppress(CheckpointError):  # damaged, or replaced at this moment
            return read_checkpoint(path, verify=False)[1].state
    return None


class SaveClock:
    """Says when the next checkpoint is due, so that saving takes a twentieth of the time at most.

    Args:
        every: Seconds between two checkpoints, where saving is quick.
    """

    def __init__(self, every: float) -> None:
        self.every, self.took = every, 0.0
        self.saved = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self.saved > max(self.every, 20 * self.took)

    def measure(self, save: Callable[[], None]) -> None:
        """Save, and remember how long it took."""
        start = time.monotonic()
        save()
        self.saved = time.monotonic()
        self.took = self.saved - start if self.every else 0.0  # 0: after each update


class Checkpointer:
    """The files of one run; the main process writes them.

    Args:
        folder: Where they are.
        world: The processes of the run, which call all methods together.
        keep: How many checkpoints to keep to go on from.
    """

    def __init__(self, folder: Path, world: DistributedWorld, keep: int = 2) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self.mark = folder / "training" / "begun"  # there until the first checkpoint is
        self._lock: contextlib.ExitStack | None = None

    def hold(self) -> None:
        """Keep other processes out of the folder, until ``release`` or the end of the process.

        Raises:
            FileError: The folder cannot be made or written.
            UsageError: Another process trains there.
        """
        if self._lock is not None or not self.world.main:
            return
        lock = contextlib.ExitStack()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locked(self.folder, wait=False))
        except BlockingIOError:
            raise UsageError(
                f"{self.folder}: another process trains there; wait for its end, or give another "
                "folder with --out"
            ) from None
        except OSError as error:
            raise not_written(error, self.folder) from None
        self._lock = lock
        for place in ("", "snapshots", "training", "non_finite"):
            remove_leftovers(self.folder / place)

    def release(self) -> None:
        """Let others into the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def has_begun(self) -> bool:
        """Whether there is something to go on from.

        Raises:
            CheckpointError: There are weights, which would be overwritten, and nothing else.
        """
        if checkpoint_paths(self.folder):
            return True
        for path in (self.folder / name for name in (WEIGHTS, AVERAGED, "snapshots")):
            if path.exists() and not self.mark.exists():
                raise CheckpointError(
                    f"{path}: is there, but nothing that the run could go on from, in "
                    f"{self.folder / 'training'}; move it, or give another folder with --out"
                )
        return False

    def begin(self, update: int) -> None:
        """Forget what came after an update; weights without a checkpoint will be this run's."""
        if self.world.main:
            for path in snapshots(self.folder):
                if int(path.stem) > update:  # a run that was killed, perhaps with other options
                    path.unlink()
            if not checkpoint_paths(self.folder):
                write_atomically(self.mark, b"")

    def save(
        self, system: System, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint
    ) -> None:
        """Write all that is needed to go on."""
        tensors = run_tensors(system.model, optimizer, self.world)
        if self.world.main:
            path = self.folder / "training" / f"{checkpoint.state.updates:08d}.safetensors"
            save_tensors(path, tensors, asdict(checkpoint))
            self.mark.unlink(missing_ok=True)
            for old in checkpoint_paths(self.folder)[: -self.keep]:
                old.unlink(missing_ok=True)

    def restore(self, system: System, optimizer: torch.optim.Optimizer) -> Checkpoint | None:
        """Put back what the newest sound checkpoint has; None where there never was one.

        Damaged ones are renamed, with a warning, if there is a sound one before them. Only the
        main process reads a whole file, for its digest; a process with a shard reads its part.

        Raises:
            CheckpointError: All are damaged, or of another model.
        """
        failed: list[tuple[Path, CheckpointError]] = []
        for path in reversed(checkpoint_paths(self.folder)):
            try:
                tensors, found = read_checkpoint(path, verify=self.world.main)
                check_fingerprint(system, {"tokenizers": found.tokenizers}, path)
                restore_run(tensors, found.groups, system.model, optimizer, self.world, path)
            except CheckpointError as error:
                failed.append((path, error))
                continue
            for newer, reason in failed:
                warnings.warn(f"{reason}; going back to {path.name}", stacklevel=2)
                newer.replace(newer.with_suffix(".damaged"))
            return found
        if failed:
            raise failed[0][1]
        return None

    def snapshot(self, system: System, update: int, keep: int) -> None:
        """Keep these weights for the average, and drop those that are too old for it."""
        path = self.folder / "snapshots" / f"{update:08d}.safetensors"
        save_weights(system, path, write=self.world.main, update=update)
        for old in snapshots(self.folder)[:-keep] if self.world.main else ():
            old.unlink()
