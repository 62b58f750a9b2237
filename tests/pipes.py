"""A pipe in the place of a file, whose reader would wait for ever."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

LATE = 'sleep "$1"; while : > "$0"; do sleep 0.1; done'  # a writer with nothing to say


@contextlib.contextmanager
def pipe_at(path: Path, seconds: float = 5) -> Iterator[None]:
    """Put a pipe in a file's place; a reader that waits gets nothing, after some seconds.

    Another process ends the wait, because a library may wait without letting our threads run.
    """
    kept = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    writer = subprocess.Popen(["sh", "-c", LATE, str(path), str(seconds)], start_new_session=True)
    try:
        yield
    finally:
        os.killpg(writer.pid, 9)
        writer.wait()
        path.unlink()
        path.write_bytes(kept)
