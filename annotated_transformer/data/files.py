"""Shared file handling: errors, digests, locks and atomic writes."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


class FileError(ValueError):
    """A file cannot be read or written; the one-line message names it and the remedy."""


class CorpusError(FileError):
    """A corpus cannot be read or downloaded; the message names the file, line and remedy."""


def not_written(error: OSError, path: str | Path) -> FileError:
    """Return the error for a file or folder that cannot be written, with reason and remedy."""
    full = "free some space, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    reason = error.strerror or error
    return FileError(f"{path}: cannot be written: {reason}; {full}choose another folder")


def not_read(error: OSError, path: str | Path, remedy: str) -> str:
    """Return a message on a file that cannot be read; a missing right has its own remedy."""
    remedy = "let this user read it" if isinstance(error, PermissionError) else remedy
    return f"{path}: cannot be read: {error.strerror or error}; {remedy}"


def parse_object(text: str | bytes, **hooks: Any) -> dict[str, Any]:
    """Parse a JSON object, as ``json.loads``; raise ValueError for anything else."""
    try:
        found = json.loads(text, **hooks)
    except (ValueError, RecursionError) as error:
        deep = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"not JSON: {deep}") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def regular_file(path: str | Path) -> Path:
    """Return a path, but raise OSError for a pipe or a device, which might never come to an end."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return Path(path)


def load_object(path: str | Path) -> dict[str, Any]:
    """Load a file, see :func:`regular_file` and :func:`parse_object`."""
    return parse_object(regular_file(path).read_bytes())


def digest_of(path: str | Path, algorithm: str = "sha256") -> str:
    """Return a digest of a file's bytes, in hexadecimal digits.

    Args:
        path: The file.
        algorithm: A hash function of ``hashlib``.

    Raises:
        OSError: The file cannot be read.
    """
    digest = hashlib.new(algorithm, usedforsecurity=algorithm != "md5")
    with regular_file(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest_of_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines, as of a file without a line break at its end."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def write_atomically(path: str | Path, data: bytes | IO[bytes]) -> None:
    """Write data, or what an open file holds, under a temporary name, flush it, and rename it.

    A process killed at any moment leaves either the old file or the new one. Anything but a
    plain file, such as a pipe or ``/dev/stdout``, is written directly.

    Raises:
        FileError: It cannot be written, e.g. for lack of space; the old file is untouched.
    """
    path = Path(path)
    real = Path(os.path.realpath(path))  # follow links
    part = real.with_name(f".{real.name}.{os.getpid()}.part")
    try:
        opened = os.path.realpath(path.parent) in map(os.path.realpath, ("/dev", "/dev/fd"))
        if opened or (path.exists() and not path.is_file()):  # a pipe, a device: not replaced
            path.write_bytes(data if isinstance(data, bytes) else data.read())
            return
        if real.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        real.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(data) if isinstance(data, bytes) else shutil.copyfileobj(data, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, real)
    except OSError as error:
        raise not_written(error, path) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write a file of JSON for people to read, see :func:`write_atomically`."""
    write_atomically(path, (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())


@contextlib.contextmanager
def lock_folder(folder: str | Path, *, wait: bool) -> Iterator[None]:
    """Lock a folder for this process, on systems that support it.

    Nothing is written: the system keeps the lock, and releases it when the process ends.

    Args:
        folder: An existing folder.
        wait: Wait if another process holds the lock, after a message on standard error.

    Raises:
        BlockingIOError: Another process holds the lock, and ``wait`` is false.
        OSError: The folder cannot be opened.
    """
    if fcntl is None:
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            print(f"{folder}: waiting for another process", file=sys.stderr)
            fcntl.flock(held, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(held)


@contextlib.contextmanager
def claim_folder(folder: Path, error: Exception) -> Iterator[None]:
    """Create a folder, and lock it; raise the error if it is locked. An empty one is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(folder, wait=False))
        except BlockingIOError:
            raise error from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()  # nothing was written


LEFTOVER = re.compile(r"\..+\.(?:safetensors|[A-Za-z]{2,8})\.(\d+)\.part")


def remove_leftovers(folder: str | Path) -> None:
    """Remove the temporary files that killed processes of this package left in a folder.

    Other files, and those of a live process, stay.
    """
    for part in Path(folder).glob(".*.part"):
        found = LEFTOVER.fullmatch(part.name)
        if found and not _is_alive(int(found[1])):
            with contextlib.suppress(OSError):
                part.unlink()


def _is_alive(process: int) -> bool:
    """Whether another process with this id is running."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it belongs to another user
    return True
