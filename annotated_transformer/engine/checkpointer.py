"""The folder of one run: its lock, its checkpoints and the weights that it saves."""

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from annotated_transformer.data.files import (
    claim_folder,
    not_written,
    remove_leftovers,
    write_atomically,
)
from annotated_transformer.data.tensors import save_tensors
from annotated_transformer.engine import checkpoints
from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.state import Checkpoint, TrainState
from annotated_transformer.engine.system import System
from annotated_transformer.engine.typed import from_dict
from annotated_transformer.training.distributed import DistributedWorld


def checkpoint_paths(folder: str | Path) -> list[Path]:
    """Return the checkpoints that a run can resume from, oldest first."""
    return checkpoints.numbered_files(Path(folder) / "training")


def read_checkpoint(path: Path, *, verify: bool = True) -> tuple[dict[str, Any], Checkpoint]:
    """Return the tensors of a checkpoint file, and the rest of its contents.

    Raises:
        CheckpointError: The file is damaged.
    """
    tensors, data = checkpoints.load_tensors(path, verify=verify)
    try:
        return tensors, from_dict(Checkpoint, data)
    except TypeError as error:
        raise checkpoints.damaged_error(path, error) from None


def read_state(folder: str | Path) -> TrainState | None:
    """Return the state of a run, even of a live one; None without an intact checkpoint."""
    for path in reversed(checkpoint_paths(folder)):
        with contextlib.suppress(checkpoints.CheckpointError):  # damaged, or just being replaced
            return read_checkpoint(path, verify=False)[1].state
    return None


class SaveClock:
    """Schedules a checkpoint after some seconds, or later: saving takes at most 5 % of the time."""

    def __init__(self, every: float) -> None:
        self.every, self.took = every, 0.0
        self.saved = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self.saved > max(self.every, 20 * self.took)

    def measure(self, save: Callable[[], None]) -> None:
        """Save, and record how long it took."""
        start = time.monotonic()
        save()
        self.saved = time.monotonic()
        self.took = self.saved - start if self.every else 0.0  # every=0: save after each update


class Checkpointer:
    """The files of one run, which the main process writes.

    Args:
        folder: The run's folder.
        world: The processes of the run; all of them must call each method.
        keep: Number of checkpoints to keep for resuming.
    """

    def __init__(self, folder: Path, world: DistributedWorld, keep: int = 2) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self.mark = folder / "training" / "begun"  # exists until the first checkpoint does
        self._lock: contextlib.ExitStack | None = None

    def lock(self) -> None:
        """Lock the folder until ``release`` or the end of the process.

        Raises:
            FileError: The folder cannot be created or written.
            UsageError: Another process is training in it, or another Trainer holds it.
        """
        if self._lock is not None or not self.world.main:
            return
        lock = contextlib.ExitStack()
        try:
            lock.enter_context(claim_folder(self.folder, UsageError(
                f"{self.folder}: another process, or a Trainer that has not ended, has this "
                "folder; wait for it, or choose another folder with --out"
            )))  # fmt: skip
        except OSError as error:
            raise not_written(error, self.folder) from None
        self._lock = lock
        for place in ("", "snapshots", "training", "non_finite"):
            remove_leftovers(self.folder / place)

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def has_begun(self) -> bool:
        """Whether there is a checkpoint to resume from.

        Raises:
            CheckpointError: There are weights, or another program's configuration, which would be
                overwritten, but no checkpoint.
        """
        if checkpoint_paths(self.folder):
            return True
        for name in (checkpoints.WEIGHTS, checkpoints.AVERAGED, "snapshots"):
            if (path := self.folder / name).exists() and not self.mark.exists():
                raise checkpoints.CheckpointError(
                    f"{path}: exists, but {self.folder / 'training'} has no checkpoint to resume "
                    "from; move the file, or choose another folder with --out"
                )
        path = self.folder / "config.json"
        if path.exists() and "format" not in checkpoints.load_run_object(path):
            told = "is of another program, or an export; choose another folder with --out"
            raise checkpoints.CheckpointError(f"{path}: {told}")
        return False

    def begin(self, update: int) -> None:
        """Delete snapshots made after ``update``; mark a new folder as this run's."""
        if self.world.main:
            for path in checkpoints.list_snapshots(self.folder):
                if int(path.stem) > update:  # of a killed run, perhaps with other options
                    path.unlink()
            if not checkpoint_paths(self.folder):
                write_atomically(self.mark, b"")

    def save(self, system: System, optimizer: Optimizer, checkpoint: Checkpoint) -> None:
        """Write everything needed to resume."""
        tensors = checkpoints.run_tensors(system.model, optimizer, self.world)
        if self.world.main:
            path = self.folder / "training" / f"{checkpoint.state.updates:08d}.safetensors"
            save_tensors(path, tensors, asdict(checkpoint))
            self.mark.unlink(missing_ok=True)
            for old in checkpoint_paths(self.folder)[: -self.keep]:
                old.unlink(missing_ok=True)

    def restore(self, system: System, optimizer: Optimizer) -> Checkpoint | None:
        """Load the newest intact checkpoint; return None if there is none at all.

        Damaged ones are renamed, with a warning, if an older one is intact. Only the main process
        reads a whole file, to verify its digest; with shards, each process reads its own part.

        Raises:
            CheckpointError: All are damaged, or belong to another model.
        """
        failed: list[tuple[Path, checkpoints.CheckpointError]] = []
        for path in reversed(checkpoint_paths(self.folder)):
            try:
                tensors, found = read_checkpoint(path, verify=self.world.main)
                checkpoints.check_fingerprint(system, {"tokenizers": found.tokenizers}, path)
                checkpoints.restore_run(
                    tensors, found.groups, system.model, optimizer, self.world, path
                )
            except checkpoints.CheckpointError as error:
                failed.append((path, error))
                continue
            for newer, reason in failed:
                warnings.warn(f"{reason}; resuming from {path.name}", stacklevel=2)
                newer.replace(newer.with_suffix(".damaged"))
            return found
        if failed:
            raise failed[0][1]
        return None

    def snapshot(self, system: System, update: int, keep: int) -> None:
        """Save the weights for averaging, and delete all but the last ``keep`` snapshots."""
        path = self.folder / "snapshots" / f"{update:08d}.safetensors"
        checkpoints.save_weights(system, path, write=self.world.main, update=update)
        for old in checkpoints.list_snapshots(self.folder)[:-keep] if self.world.main else ():
            old.unlink()
