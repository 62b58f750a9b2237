"""Downloads of files, checked against their digests."""

import contextlib
import functools
import io
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from annotated_transformer.data.files import (
    CorpusError,
    digest_of,
    lock_folder,
    not_written,
    regular_file,
)
from annotated_transformer.data.text import is_page, open_packed, reading_errors

DATA_VARIABLE = "ANNOTATED_TRANSFORMER_DATA"
MAX_BYTES = 64 * 2**30  # limit on the size of a download, packed or unpacked
PASSING = (408, 416, 429)  # status codes below 500 that are worth a retry
ATTEMPTS, TIMEOUT, WAIT = 3, 30.0, 1.0  # for each address; seconds without a byte; before a retry


@dataclass(frozen=True)
class RemoteFile:
    """A file to download, with its expected size and digest."""

    path: str  #: Its path in a mirror or the cache, such as ``multi30k/train.de.gz``.
    urls: tuple[str, ...]  #: Its addresses, tried in this order.
    size: int = 0  #: Its size in bytes; 0 if unknown.
    #: Its SHA-256, or else MD5, in hexadecimal digits; empty if none is published.
    digest: str = ""


def cache_folder() -> Path:
    """Return the folder for downloads, in ``XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        CorpusError: There is no home directory.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise CorpusError("no home directory; set XDG_CACHE_HOME to a folder for files") from None
    return Path(base) / "annotated-transformer"


def fetch_file(
    file: RemoteFile,
    *,
    mirror: str | Path | None = None,
    cache: str | Path | None = None,
    progress: bool = True,
) -> Path:
    """Return the path of a file in the mirror or the cache, downloading it if necessary.

    Args:
        file: The file.
        mirror: A folder to look in first; by default the one in the environment
            variable ``ANNOTATED_TRANSFORMER_DATA``, if set.
        cache: The folder for downloads; by default the user's cache folder.
        progress: Show a progress bar.

    Raises:
        CorpusError: The mirror's file is altered, no address has the right contents, or the
            file cannot be written. A file without a digest must have the announced size and,
            if compressed with gzip, bzip2 or xz, be complete.
    """
    if (mirror := mirror or os.environ.get(DATA_VARIABLE)) and (copy := _mirrored(file, mirror)):
        return copy
    path = (Path(cache) if cache else cache_folder()) / file.path
    part = path.with_name(path.name + ".part")
    try:
        if path.exists() and not _fault(path, file):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_folder(path.parent, wait=True):
            if path.exists() and not _fault(path, file):  # another process has downloaded it
                return path
            _download(file, part, progress)
            os.replace(part, path)  # atomic, so the file is never incomplete
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise CorpusError(f"{not_written(error, path)} with XDG_CACHE_HOME") from None
    if not file.digest:
        found = f"{path}: no digest is published; this file has sha-256 {digest_of(path)}"
        print(found, file=sys.stderr)
    return path


def _mirrored(file: RemoteFile, mirror: str | Path) -> Path | None:
    copy = Path(mirror) / file.path
    with reading_errors(mirror):
        if not Path(mirror).is_dir():
            raise CorpusError(f"{mirror}: no such folder; correct --mirror or {DATA_VARIABLE}")
        if not copy.exists():
            return None
    if fault := _fault(copy, file):
        raise CorpusError(f"{copy}: altered or cut short, {fault}; replace the file")
    return copy


def _fault(path: Path, file: RemoteFile) -> str:
    """Return why a file is not the expected one; empty if no fault is found."""
    name, expected = file.path, file.digest
    try:
        with reading_errors(name), regular_file(path).open("rb") as opened:
            size, head = path.stat().st_size, opened.read(512)
            if expected:
                kind = "md5" if len(expected) == 32 else "sha256"
                found = digest_of(path, kind)
                got = f"{'an HTML page of' if is_page(head) else 'found'} {size} bytes with {found}"
                return "" if found == expected else f"expected {kind} {expected}, {got}"
            if size != (file.size or size):
                return f"expected {file.size} bytes, found {size}"
            opened.seek(0)
            content, left = open_packed(opened, name), MAX_BYTES
            while block := content.read(1 << 20):  # compressed data ends with its own checksum
                if (left := left - len(block)) < 0:
                    return f"it unpacks to more than {MAX_BYTES} bytes"
            return "" if head else "it is empty"
    except CorpusError as error:
        return str(error).removeprefix(f"{name}: ").split("; ")[0]  # without the remedy


class _Bounded(io.BufferedWriter):
    """A file with a maximum size."""

    most = MAX_BYTES

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(data) > self.most:
            raise ValueError(f"received more than {self.most} bytes")
        return super().write(data)


def _download(file: RemoteFile, part: Path, progress: bool) -> None:
    """Try each address in turn until ``part`` has the right contents.

    An interrupted download is resumed if a digest can verify the result.

    Raises:
        CorpusError: No address has the file.
        OSError: ``part`` cannot be written.
    """
    import pooch  # imported here to keep reading local files fast
    from requests import RequestException

    failures = []
    for number, url in enumerate(file.urls):
        if number or not file.digest:
            part.unlink(missing_ok=True)  # part of another address's file
        for attempt in range(ATTEMPTS):
            time.sleep(WAIT * 2 ** (attempt - 1) if attempt else 0)
            held = part.stat().st_size if file.digest and part.exists() else 0
            headers = {"User-Agent": "annotated-transformer", "Accept-Encoding": "identity"}
            headers |= {"Range": f"bytes={held}-"} if held else {}
            if progress:
                print(f"{file.path}: from {url}", file=sys.stderr)
            try:
                with (
                    contextlib.ExitStack() as answers,
                    _Bounded(part.open("ab" if held else "wb", buffering=0)) as output,
                ):
                    output.most = file.size or MAX_BYTES
                    hooks = {"response": functools.partial(_as_it_is, answers)}
                    options = {"timeout": TIMEOUT, "headers": headers, "hooks": hooks}
                    pooch.HTTPDownloader(progress, 1 << 16, **options)(url, output, None)
                if not (fault := _fault(part, file)):
                    return
                raise ValueError(f"unexpected contents: {fault}")
            except (RequestException, ValueError) as error:
                failure = f"{url}: {_reason(error)}"
                response = getattr(error, "response", None)
                status = 0 if response is None else response.status_code
                wrong = isinstance(error, ValueError) or status == 416  # no bytes beyond these
                if wrong:
                    part.unlink(missing_ok=True)
                if (wrong and not held) or (status in range(400, 500) and status not in PASSING):
                    break
        failures.append(failure)
    raise CorpusError(
        f"{file.path}: download failed ({'; '.join(failures)}); check the network, or "
        f"give a folder that has the file with --mirror or {DATA_VARIABLE}"
    )


def _as_it_is(answers: contextlib.ExitStack, response: Any, **_: object) -> None:
    """Stop requests from decompressing the body; close the response, which pooch leaves open."""
    answers.callback(response.close)
    response.raw.headers.pop("Content-Encoding", None)


def _reason(error: Exception) -> str:
    """Return the message of the innermost wrapped error in one line."""
    while isinstance(inner := getattr(error, "reason", None) or (*error.args, "")[0], Exception):
        error = inner
    return " ".join((inner if isinstance(inner, str) else str(error)).split())
