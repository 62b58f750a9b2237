# Written from book/translation/downloads.md: edit the chapter instead.
"""Files from the network, checked against their checksums, and archives unpacked with care."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import http.client
import io
import lzma
import os
import re
import shutil
import stat
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


class CorpusError(ValueError):
    """A corpus that cannot be had; the message names the file, the line and the remedy."""


DATA_VARIABLE = "ANNOTATED_TRANSFORMER_DATA"
MOST_BYTES = 64 * 2**30  # that a download or an archive may have, unless told otherwise


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded, with what it must turn out to be.

    Attributes:
        path: Where it lies below a mirror or the cache: ``multi30k/train.de.gz``.
        urls: Its addresses, tried in this order.
        sha256: The SHA-256 of its bytes, if it is published.
        size: Its size in bytes; 0 if it is not known.
        md5: Its MD5, where that is what is published.
    """

    path: str
    urls: tuple[str, ...]
    sha256: str = ""
    size: int = 0
    md5: str = ""


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    Raises:
        OSError: If it cannot be read.
    """
    return _digest(Path(path), "sha256")


def _digest(path: Path, kind: str) -> str:
    digest = hashlib.new(kind, usedforsecurity=kind != "md5")
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_page(head: bytes) -> bool:
    """Say whether the beginning of a file is that of an HTML page.

    Args:
        head: The first bytes, a few hundred.
    """
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return start.startswith((b"<!doctype html", b"<html"))


def _unlikely(path: Path, size: int, page: bool) -> str:
    """Return why a file without a checksum cannot be it; empty if it may be."""
    with path.open("rb") as file:
        start = file.read(2)
    if page:
        return "it is an HTML page, not the data"
    if size and path.stat().st_size != size:
        return f"expected {size} bytes, found {path.stat().st_size}"
    if path.name.removesuffix(".part").endswith((".gz", ".tgz")) and start != b"\x1f\x8b":
        return "it is not gzipped"
    return "" if start else "it is empty"


def _difference(path: Path, file: RemoteFile) -> str:
    """Return how a file differs from what it must be; empty if it does not."""
    kind, expected = ("sha256", file.sha256) if file.sha256 else ("md5", file.md5)
    try:
        with path.open("rb") as opened:
            page = is_page(opened.read(512))
        found = _digest(path, kind) if expected else ""
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    if not expected:
        return _unlikely(path, file.size, page)
    if found == expected:
        return ""
    wanted = f"{file.size} bytes with {kind}" if file.size else kind
    got = "an HTML page of" if page else "found"
    return f"expected {wanted} {expected}, {got} {path.stat().st_size} bytes with {found}"


_PACKERS = {".gz": gzip, ".tgz": gzip, ".bz2": bz2, ".tbz2": bz2, ".xz": lzma, ".txz": lzma}


def _damage(path: Path, name: str) -> str:
    """Read a compressed file or an archive to its end, and return what is wrong with it.

    Args:
        path: Where it is.
        name: What it is called; the ending tells its kind.

    Returns:
        What is wrong; empty if nothing is, or if a file of this kind cannot tell.
    """
    left = MOST_BYTES
    try:
        for content in _contents(path, name.lower()):
            left -= _copy(content, None, left + 1)
            if left < 0:
                return f"more than {MOST_BYTES} bytes come out of it"
    except (*DAMAGED, OSError) as error:  # an OSError is what bz2 raises
        return f"it is damaged, or not whole ({_reason(error)})"
    return ""


def _contents(path: Path, name: str) -> Iterator[IO[bytes]]:
    """Yield what comes out of a compressed file, or of each member of an archive."""
    if name.endswith((".zip", ".tar")):
        for *_, member in _members(path):
            with member:
                yield member
    elif module := _PACKERS.get(Path(name).suffix):
        with module.open(path) as content:
            yield content


def cache_folder() -> Path:
    """Return the folder for downloads, below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "annotated-transformer"


@contextlib.contextmanager
def _clear_write_errors(part: Path) -> Iterator[None]:
    """Turn a failed write into a CorpusError, and leave nothing half-written."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise CorpusError(
            f"{part}: cannot be written: {error.strerror or error}; make room, or name "
            "another folder by XDG_CACHE_HOME"
        ) from None


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold a folder for this process, where the system has such locks.

    Args:
        folder: It must be there.
        wait: For a process that holds it, after saying so.

    Raises:
        BlockingIOError: Another process holds the folder, and is not waited for.
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
            tqdm.write(f"{folder}: waiting for another process", file=sys.stderr)
            fcntl.flock(held, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(held)


def fetch(
    file: RemoteFile,
    *,
    mirror: str | Path | None = None,
    cache: str | Path | None = None,
    progress: bool = True,
    attempts: int = 3,
    timeout: float = 30.0,
    wait: float = 1.0,
) -> Path:
    """Return the path of a file: in the mirror, in the cache, or freshly downloaded.

    Args:
        file: The file.
        mirror: A folder to look in first; by default the one that the environment
            variable ``ANNOTATED_TRANSFORMER_DATA`` names, if any.
        cache: The folder for downloads; by default the user's cache folder.
        progress: Show a progress bar.
        attempts: How often each address is tried.
        timeout: Seconds without a byte after which a connection counts as broken.
        wait: Seconds before the second try of an address, doubled before each other.

    Raises:
        CorpusError: If the mirror's file is altered, no address gives the right bytes,
            or the file cannot be written. Without a checksum, bytes are right if they are as
            many as announced and, in a compressed file or an archive, whole.
    """
    mirror = mirror or os.environ.get(DATA_VARIABLE) or None
    if mirror is not None:
        if not Path(mirror).is_dir():
            raise CorpusError(f"{mirror}: no such folder; correct the option or {DATA_VARIABLE}")
        if (copy := Path(mirror) / file.path).exists():
            if found := _difference(copy, file):
                raise CorpusError(f"{copy}: altered or cut short, {found}; replace the file")
            return copy
    path = (Path(cache) if cache else cache_folder()) / file.path
    if _is_there(path, file):
        return path
    part = path.with_name(path.name + ".part")
    with contextlib.ExitStack() as stack:
        with _clear_write_errors(part):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path.parent, wait=True))
        if _is_there(path, file):  # another process has brought it
            return path
        _download_anywhere(file, part, progress, attempts, timeout, wait)
        with _clear_write_errors(part):
            os.replace(part, path)  # atomic: the file is there whole, or not at all
    if not (file.sha256 or file.md5):
        found = f"{path}: no checksum is published; this one has sha-256 {sha256_of(path)}"
        tqdm.write(found, file=sys.stderr)
    return path


def _is_there(path: Path, file: RemoteFile) -> bool:
    return path.exists() and not _difference(path, file)


class _UnusableError(Exception):
    """An address that need not be tried again."""


class _MismatchError(OSError):
    """What arrived cannot be continued, and is thrown away."""


@dataclass
class _Source:
    """An address, and how many bytes it said that the whole file has; 0 if it did not."""

    url: str
    total: int = 0


def _download_anywhere(
    file: RemoteFile,
    part: Path,
    progress: bool,
    attempts: int,
    timeout: float,
    wait: float,
) -> None:
    """Try each address in turn until ``part`` holds the right bytes."""
    failures = []
    for number, source in enumerate(map(_Source, file.urls)):
        if number or not (file.sha256 or file.md5):
            part.unlink(missing_ok=True)  # what another address began may be another file
        for attempt in range(attempts):
            if attempt:
                time.sleep(wait * 2 ** (attempt - 1))
            try:
                _download(source, file, part, progress, timeout)
                return
            except (_UnusableError, OSError, http.client.HTTPException) as error:
                failure = f"{source.url}: {_reason(error)}"
                if isinstance(error, _UnusableError):
                    break
                if isinstance(error, _MismatchError):
                    source.total = 0
                    with _clear_write_errors(part):
                        part.unlink(missing_ok=True)
        failures.append(failure)
    raise CorpusError(
        f"{file.path}: not downloaded ({'; '.join(failures)}); check the network, or "
        f"give a folder that holds it by the mirror option or {DATA_VARIABLE}"
    )


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split()) or type(error).__name__


def _open(url: str, held: int, timeout: float) -> http.client.HTTPResponse:
    """Ask for a file without its first ``held`` bytes.

    Raises:
        _UnusableError: If this address does not have the file.
        OSError: If the server does not answer, or with an error that may pass.
    """
    headers = {"User-Agent": "annotated-transformer", "Accept-Encoding": "identity"}
    if held:
        headers["Range"] = f"bytes={held}-"
    try:
        request = urllib.request.Request(url, headers=headers)
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            answer = f"the server answers {error.code} {error.reason}"
            if error.code == 416:  # it cannot go on from there
                raise _MismatchError(answer) from None
            if error.code < 500 and error.code not in (408, 429):
                raise _UnusableError(answer) from None
            raise OSError(answer) from None
    except ValueError as error:  # an address, here or in a redirect, that is none
        raise _UnusableError(f"no address ({error})") from None
    return response


_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.IGNORECASE)


def _announced(response: http.client.HTTPResponse, held: int) -> tuple[int, int, int]:
    """Return which bytes an answer holds, and of how many.

    Args:
        response: The answer.
        held: How many bytes it was asked to leave out.

    Returns:
        The number of the first byte, that after the last one, and that of all; the last two
        are 0 if the answer does not tell.

    Raises:
        _MismatchError: If these are not the bytes that were asked for.
    """
    length = response.headers.get("Content-Length") or ""
    chunked = "Transfer-Encoding" in response.headers  # then the length does not count
    sent = int(length) if re.fullmatch(r"\d{1,18}", length) and not chunked else 0
    if response.status != 206:
        return 0, sent, sent  # the file from its beginning
    told = response.headers.get("Content-Range") or ""
    if not (found := _RANGE.fullmatch(told.strip())):
        raise _MismatchError("the server answers 206 without the range that it sends")
    start, end = int(found[1]), int(found[2]) + 1
    total = 0 if found[3] == "*" else int(found[3])
    if start != held:
        raise _MismatchError(f"asked for the bytes from {held} on, the server sends {told}")
    if (sent and sent != end - start) or (total and total < end):
        raise _MismatchError(f"the server contradicts itself: {told}, and {length} bytes")
    return start, end, total


def _download(
    source: _Source, file: RemoteFile, part: Path, progress: bool, timeout: float
) -> None:
    """Download into ``part``, going on after the bytes that it holds already.

    Raises:
        _UnusableError: If this address does not have the file, or has another one.
        _MismatchError: If the bytes do not fit to those in ``part``.
        OSError: If the connection broke; what arrived stays in ``part``.
    """
    held = part.stat().st_size if part.exists() else 0
    if file.size and held >= file.size:
        part.unlink()
        held = 0
    with _open(source.url, held, timeout) as response:
        start, end, total = _announced(response, held)
        if start and total and source.total not in (0, total):
            raise _MismatchError(f"the file had {source.total} bytes, and now has {total}")
        source.total = total or (source.total if start else 0)
        size = source.total or end
        _receive(response, part, start, file.size, file.size or size, progress)
    arrived = part.stat().st_size
    if arrived < min(size, file.size or size):
        raise OSError(f"the connection broke after {arrived} of {size} bytes")
    if end and arrived > end:
        raise _MismatchError(f"the server announced {end} bytes, and sent {arrived}")
    if found := _refusal(part, file):
        part.unlink()
        if start:  # perhaps what was there before is at fault
            raise _MismatchError(found)
        raise _UnusableError(found)


def _refusal(part: Path, file: RemoteFile) -> str:
    """Return why a download is not the file; empty if it is."""
    found = _difference(part, file)
    if not found and not (file.sha256 or file.md5):
        found = _damage(part, file.path)
    return found and f"other bytes than expected: {found}"


def _receive(
    response: http.client.HTTPResponse,
    part: Path,
    held: int,
    most: int,
    size: int,
    progress: bool,
) -> None:
    """Write what arrives behind the first ``held`` bytes of ``part``.

    Args:
        response: Where it comes from.
        part: Where it goes.
        held: How many bytes stay.
        most: After so many bytes in all it stops; 0 for no other bound than that for all.
        size: How many bytes are expected, for the progress bar; 0 if it is not known.
        progress: Show the progress bar.

    Raises:
        _UnusableError: If the file is not known, and too large.
    """
    with (
        contextlib.ExitStack() as stack,
        tqdm(
            desc=part.stem,
            total=size or None,
            initial=held,
            unit="B",
            unit_scale=True,
            disable=not progress,
        ) as bar,
    ):
        with _clear_write_errors(part):
            output = stack.enter_context(open(part, "ab" if held else "wb"))
        while held <= (most or MOST_BYTES):  # a byte too many is enough to know
            chunk = response.read1(1 << 16)
            if not chunk:
                return
            with _clear_write_errors(part):
                output.write(chunk)
                output.flush()
            held += len(chunk)
            bar.update(len(chunk))
    if not most:
        part.unlink()
        raise _UnusableError(f"more than {MOST_BYTES} bytes arrived")


MOST_FILES = 10_000  # that an archive may hold, unless told otherwise


def _stays_inside(name: str) -> bool:
    """Whether a member's name leads to a place below the folder, on any system."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and parts[0] != "" and ".." not in parts and not set(":\0") & set(name)


def _members(archive: Path) -> Iterator[tuple[str, str, int, IO[bytes]]]:
    """Go through an archive: name, why it is refused or "", claimed size, content."""
    with archive.open("rb") as file:
        zipped = file.read(2) == b"PK"
    if zipped:
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)
                odd = kind not in (0, stat.S_IFREG, stat.S_IFDIR)
                if not info.is_dir() or odd:
                    reason = "a link or a device" if odd else ""
                    yield info.filename, reason, info.file_size, packed.open(info)
    else:
        with tarfile.open(archive) as tape:
            for member in tape:
                if not member.isdir():
                    reason = "" if member.isreg() else "a link or a device"
                    content = tape.extractfile(member) if member.isreg() else None
                    yield member.name, reason, member.size, content or io.BytesIO()


DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    UnicodeDecodeError,  # of a member's name
    RuntimeError,
)  # of an encrypted member


def unpack(
    archive: str | Path,
    folder: str | Path,
    *,
    most_bytes: int = MOST_BYTES,
    most_files: int = MOST_FILES,
) -> Path:
    """Unpack a tar or zip archive into a folder; plain files alone, and never outside it.

    Args:
        archive: The archive; a tar may be packed by gzip, bzip2 or xz.
        folder: Where the files go. If it exists, it is complete, and nothing is done.
        most_bytes: How much may come out.
        most_files: How many files may come out.

    Returns:
        The folder.

    Raises:
        CorpusError: The archive is damaged, or a member of it is refused; the message names
            both. Nothing of it is left behind.
    """
    archive, folder = Path(archive), Path(folder)
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent, wait=True):
            if not folder.exists():  # else another process has unpacked it
                _unpack_alone(archive, folder, most_bytes, most_files)
    except DAMAGED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(
            f"{archive}: not a tar or zip archive, or a damaged one ({reason}); delete it, and "
            "fetch it again"
        ) from None
    except OSError as error:
        raise CorpusError(
            f"{archive}: cannot be unpacked into {folder}: {error.strerror or error}"
        ) from None
    return folder


def _unpack_alone(archive: Path, folder: Path, most_bytes: int, most_files: int) -> None:
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        _unpack_members(archive, part, most_bytes, most_files)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _unpack_members(archive: Path, folder: Path, most_bytes: int, most_files: int) -> None:
    left = most_bytes
    for number, (name, reason, size, content) in enumerate(_members(archive), 1):
        with content:
            if not reason and not _stays_inside(name):
                reason = "its name leads out of the folder"
            if not reason and number > most_files:
                reason = f"there are more than {most_files} files"
            path = folder / name
            if not reason and path.exists():
                reason = "its name is there twice"
            if not reason:
                left -= size
                if left >= 0:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("xb") as file:  # a byte more than claimed is enough to know
                        left -= max(0, _copy(content, file, size + left + 1) - size)
                if left < 0:
                    reason = f"the files have more than {most_bytes} bytes"
            if reason:
                raise CorpusError(f"{archive}, member {name}: refused, {reason}")


def _copy(source: IO[bytes], target: IO[bytes] | None, most: int) -> int:
    """Copy at most so many bytes, or only read them, and return how many there were."""
    copied = 0
    while block := source.read(min(1 << 20, most - copied)):
        if target is not None:
            target.write(block)
        copied += len(block)
    return copied


def locate(path: str | Path, unpacked: str | Path) -> Path:
    """Return where a file is, unpacking the archive that its path leads into.

    Args:
        path: A file, or a path that goes on inside an archive: ``nc.tgz/training/a.de``.
        unpacked: A folder for the contents of archives.

    Raises:
        CorpusError: There is no such file, or the archive is refused.
    """
    path = Path(path)
    archive = next((parent for parent in path.parents if parent.is_file()), None)
    if archive is None:
        if not path.is_file():
            raise CorpusError(f"{path}: no such file; check the path")
        return path
    inside = path.relative_to(archive)
    key = f"{archive.name}-{sha256_of(archive)[:16]}"  # another archive of this name is another
    found = unpack(archive, Path(unpacked) / key) / inside
    if not found.is_file():
        raise CorpusError(f"{archive}: has no member {inside.as_posix()}; check the path")
    return found
