"""What everything that keeps files has in common: errors, digests, locks, atomic writes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path


class FileError(ValueError):
    """A file that cannot be read or written; the message names it and the remedy, in one line."""


class CorpusError(FileError):
    """A corpus that cannot be read or fetched; the message names the file, line and remedy."""


def digest_of(path: str | Path, algorithm: str = "sha256") -> str:
    """Return a digest of a file's bytes, in hexadecimal digits.

    Args:
        path: The file.
        algorithm: The name of a hash function of ``hashlib``.

    Raises:
        OSError: The file cannot be read.
    """
    digest = hashlib.new(algorithm, usedforsecurity=algorithm != "md5")
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal digits.

    Raises:
        OSError: The file cannot be read.
    """
    return digest_of(path, "sha256")


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it.

    A process that is killed at any moment leaves the old file or the new one. What is not a
    plain file, such as a pipe or ``/dev/stdout``, is written as it is.

    Raises:
        FileError: The file cannot be written, for instance for lack of space; what was there
            before is untouched.
    """
    path = Path(path)
    real = path.resolve()  # through a link, to what it points to
    part = real.with_name(f".{real.name}.{os.getpid()}.part")
    try:
        opened = path.parent.resolve() in {Path(p).resolve() for p in ("/dev", "/dev/fd")}
        if opened or (path.exists() and not path.is_file()):  # a pipe, a device: not replaced
            path.write_bytes(data)
            return
        real.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, real)
    except OSError as error:
        raise FileError(
            f"{path}: cannot be written: {error.strerror or error}; "
            "free some space, or choose another folder"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what such a file system answers


@contextlib.contextmanager
def locked(folder: str | Path, *, wait: bool) -> Iterator[None]:
    """Hold a folder for this process; the system frees it when the process dies.

    The lock is a file ``.lock`` in the folder, which stays there. On a file system without
    locks nothing is held.

    Args:
        folder: An existing folder.
        wait: Wait for a process that holds it, after saying so on the standard error.

    Raises:
        BlockingIOError: Another process holds the folder, and ``wait`` is false.
        OSError: Nothing can be written in the folder.
    """
    from filelock import FileLock, Timeout  # takes longer to import than most programs need it

    lock = FileLock(Path(folder) / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise BlockingIOError(errno.EAGAIN, f"{folder}: another process holds it") from None
        print(f"{folder}: waiting for another process", file=sys.stderr)
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


LEFTOVER = re.compile(r"\..+\.(?:safetensors|jsonl?|txt)(?:\.(\d+))?\.part")


def remove_leftovers(folder: str | Path) -> None:
    """Remove the temporary files that killed processes of ours left in a folder.

    Other files, and those of a process that is alive, stay.
    """
    for part in Path(folder).glob(".*.part"):
        found = LEFTOVER.fullmatch(part.name)
        if found and not _is_alive(int(found[1] or 0)):
            with contextlib.suppress(OSError):
                part.unlink()


def _is_alive(process: int) -> bool:
    """Whether another process than this one has this number."""
    if process in (0, os.getpid()):
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is somebody else's
    return True
