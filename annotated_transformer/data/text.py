"""The package's line reader for UTF-8 files, pipes and streams, plain or compressed."""

import bz2
import codecs
import contextlib
import gzip
import io
import itertools
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from annotated_transformer.data.files import CorpusError, not_read

MAX_LINE = 1 << 20  #: Bytes; a longer line is an error, to bound memory.
MAX_SENTENCE = 10_000  # characters; longer ones would slow sub-word learning to minutes
PACKED = (  # magic bytes, and the function that decompresses
    (re.compile(rb"\x1f\x8b"), gzip.open),
    (re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), bz2.open),
    (re.compile(rb"\xfd7zXZ\0"), lzma.open),
)
PACKED_NAME = re.compile(r"\.(t?gz|t?bz2|t?xz)$", re.IGNORECASE)
DAMAGED = (EOFError, zlib.error, lzma.LZMAError)  # and an OSError without errno


class Digest(Protocol):
    """A hash object of ``hashlib``."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""


class _Source(io.RawIOBase):
    """Passes the bytes of a file to a reader and to a digest.

    A read returns fewer bytes than requested only at the end of the file, so that a pipe that
    first delivers a single byte is not taken for a file of one byte.
    """

    def __init__(self, file: IO[bytes], digest: Digest | None) -> None:
        self.file, self.digest = file, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.file.read(len(buffer))
        buffer[: len(data)] = data
        if self.digest is not None:
            self.digest.update(data)
        return len(data)


def is_page(head: bytes) -> bool:
    """Whether a file begins like an HTML page.

    Args:
        head: The first bytes, a few hundred.
    """
    start = head.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    return start.startswith((b"<!doctype html", b"<html"))


@contextlib.contextmanager
def reading_errors(name: str | Path) -> Iterator[None]:
    """Convert errors while reading a file into a CorpusError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise CorpusError(f"{name}: no such file; check the path") from None
    except (*DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise CorpusError(not_read(error, name, "give a text file")) from None
        reason = " ".join(str(error).split()) or type(error).__name__
        told = f"{name}: damaged or cut short ({reason})"
        raise CorpusError(f"{told}; download the whole file again") from None


def open_packed(file: IO[bytes], name: str | Path, digest: Digest | None = None) -> IO[bytes]:
    """Return a file's contents as a stream, decompressed if it begins like gzip, bzip2 or xz.

    Args:
        file: The open file; it need not be seekable.
        name: Its name, for errors and to check its ending.
        digest: Updated with the file's own bytes as they are read.

    Raises:
        CorpusError: It is an HTML page, or not compressed although its name says so.
    """
    source = io.BufferedReader(_Source(file, digest), 1 << 16)
    head = source.peek(512)
    unpack = next((unpack for start, unpack in PACKED if start.match(head)), None)
    if unpack is not None:
        source = io.BufferedReader(unpack(source), 1 << 16)  # type: ignore[arg-type]
    if is_page(source.peek(512)):
        raise CorpusError(f"{name}: an HTML page, not the data; look at it, download it again")
    if head and unpack is None and (ending := PACKED_NAME.search(str(name))):
        remedy = f"download it again, or remove the ending {ending[0]} if it is plain text"
        raise CorpusError(f"{name}: not a {ending[1]} file; {remedy}")
    return source


def stream_lines(
    source: str | Path | IO[bytes],
    *,
    name: str = "",
    errors: str = "strict",
    digest: Digest | None = None,
) -> Iterator[str]:
    r"""Yield the lines of a UTF-8 text, plain or compressed with gzip, bzip2 or xz.

    Only ``\n`` and ``\r\n`` end a line. ``str.splitlines`` would also split at U+2028, U+0085
    and form feeds, and a single extra split misaligns all later pairs. A byte order mark at the
    beginning is dropped.

    Args:
        source: The path of a file or named pipe, or a binary stream.
        name: Its name in errors; the path by default.
        errors: What to do with bytes that are not UTF-8: ``strict`` refuses them,
            ``surrogateescape`` turns them into lone surrogates.
        digest: Updated with all bytes of the file, before decompression.

    Yields:
        The lines without their line ends.

    Raises:
        CorpusError: The text cannot be read, is truncated, damaged or an HTML page, has a line
            of more than ``MAX_LINE`` bytes, or has bytes that are NUL or not UTF-8.
    """
    name = name or str(source)
    with contextlib.ExitStack() as stack, reading_errors(name):
        if isinstance(source, (str, Path)):
            source = stack.enter_context(Path(source).open("rb"))
        content = open_packed(source, name, digest)
        for number in itertools.count(1):
            row = content.readline(MAX_LINE + 5)  # room for a byte order mark and the line end
            if not row:
                break
            if number == 1 and not (row := row.removeprefix(codecs.BOM_UTF8)):
                break
            yield _decode(row, f"{name}, line {number}", errors)
        while digest and (rest := source.read(1 << 16)):  # after the end of compressed data
            digest.update(rest)


def live_lines(
    read: Callable[[int], bytes], name: str, report: Callable[[CorpusError], None] | None = None
) -> Iterator[list[str]]:
    """Yield the lines of a pipe or terminal as they come, so that each can be answered at once.

    A list holds the lines that were complete after one read: a single one if the writer waits for
    each answer, else up to 64 KB of them. Compressed text is read to its end first.

    Args:
        read: Waits for bytes, and returns those that have come, up to a number; none at the end.
        name: Its name in errors.
        report: Takes the error of a bad line, which is then yielded as a blank one.

    Raises:
        CorpusError: As in :func:`stream_lines`; the lines before the bad one are yielded first.
    """
    with reading_errors(name):
        data = read(1 << 16)
        if is_page(data[:512]) or any(start.match(data) for start, _ in PACKED):
            data += b"".join(iter(lambda: read(1 << 16), b""))
            yield list(stream_lines(io.BytesIO(data), name=name))
            return
        rest, number = b"", 1
        while data and codecs.BOM_UTF8.startswith(data) and (more := read(1 << 16)):
            data += more  # a writer may send the mark before it has a line
        data = data.removeprefix(codecs.BOM_UTF8)
        while data or rest:
            *rows, rest = (rest[: MAX_LINE + 2] + data).split(b"\n")  # enough to see it is too long
            if rest and (not data or (report is None and len(rest) > MAX_LINE + 1)):
                rows, rest = [*rows, rest], b""
            lines = []
            for row in rows:
                try:
                    lines.append(_decode(row, f"{name}, line {number}", "strict"))
                except CorpusError as error:
                    if report is None:
                        yield lines
                        raise
                    report(error)
                    lines.append("")
                number += 1
            if lines:
                yield lines
            data = read(1 << 16) if data else b""


def _decode(row: bytes, place: str, errors: str) -> str:
    """Decode a line and strip its line end."""
    row = row.removesuffix(b"\n").removesuffix(b"\r")
    if len(row) > MAX_LINE:
        raise CorpusError(f"{place}: longer than {MAX_LINE} bytes; give one sentence per line")
    if b"\0" in row and errors == "strict":
        raise CorpusError(f"{place}: has NUL bytes, so it is not text; convert it to UTF-8")
    try:
        return row.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        told = f"{place}: byte {error.start + 1} (0x{row[error.start]:02x}) is not valid UTF-8"
        raise CorpusError(f"{told}; convert the text to UTF-8") from None


def read_lines(
    source: str | Path | IO[bytes], *, name: str = "", digest: Digest | None = None
) -> list[str]:
    """Return all lines of a UTF-8 text; see :func:`stream_lines`."""
    return list(stream_lines(source, name=name, digest=digest))
