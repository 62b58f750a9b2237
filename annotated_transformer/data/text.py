"""The one reader of lines: files, pipes and streams, plain or packed, in UTF-8."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import itertools
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from annotated_transformer.data.files import CorpusError

MAX_LINE = 1 << 20  # bytes; a longer line is an error, for memory is finite
MAX_SENTENCE = 10_000  # characters; from longer ones, sub-words are not learned: it takes minutes
PACKED = (  # how such data begins, and what opens it
    (re.compile(rb"\x1f\x8b"), gzip.open),
    (re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), bz2.open),
    (re.compile(rb"\xfd7zXZ\0"), lzma.open),
)
PACKED_NAME = re.compile(r"\.(t?gz|t?bz2|t?xz)$", re.IGNORECASE)
DAMAGED = (EOFError, zlib.error, lzma.LZMAError)  # and an OSError without a number


class Digest(Protocol):
    """A hash function of ``hashlib`` at work."""

    def update(self, data: bytes, /) -> None:
        """Take more bytes."""


class _Source(io.RawIOBase):
    """The bytes of a file on their way to a reader and to a digest.

    A read ends when it has all that was asked for, or the file ends: a pipe that hands out its
    first byte alone is not taken for a file of one byte.
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
    """Say whether the beginning of a file is that of an HTML page.

    Args:
        head: The first bytes, a few hundred.
    """
    start = head.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    return start.startswith((b"<!doctype html", b"<html"))


@contextlib.contextmanager
def reading(name: str | Path) -> Iterator[None]:
    """Turn what can go wrong while a file is read into a CorpusError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise CorpusError(f"{name}: no such file; check the path") from None
    except (*DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise CorpusError(
                f"{name}: cannot be read: {error.strerror or error}; give a file of text"
            ) from None
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(
            f"{name}: damaged or cut short ({reason}); fetch the whole file again"
        ) from None


def open_packed(file: IO[bytes], name: str | Path, digest: Digest | None = None) -> IO[bytes]:
    """Return what comes out of a file: unpacked, if it begins like gzip, bzip2 or xz.

    Args:
        file: The file, opened; it need not be seekable.
        name: Its name, for errors and for what its ending promises.
        digest: Is given the file's own bytes as they are read.

    Raises:
        CorpusError: It is an HTML page, or plain although its name says that it is packed.
    """
    source = io.BufferedReader(_Source(file, digest), 1 << 16)
    head = source.peek(512)
    unpack = next((unpack for start, unpack in PACKED if start.match(head)), None)
    if unpack is not None:
        source = io.BufferedReader(unpack(source), 1 << 16)  # type: ignore[arg-type]
    if is_page(source.peek(512)):
        raise CorpusError(f"{name}: an HTML page, not the data; look at it, and fetch it again")
    if head and unpack is None and (ending := PACKED_NAME.search(str(name))):
        raise CorpusError(
            f"{name}: not a {ending[1]} file; fetch it again, or drop the ending {ending[0]} "
            "if it is plain text"
        )
    return source


def stream_lines(
    source: str | Path | IO[bytes],
    *,
    name: str = "",
    errors: str = "strict",
    digest: Digest | None = None,
) -> Iterator[str]:
    r"""Go through the lines of a text in UTF-8, plain or packed by gzip, bzip2 or xz.

    Only ``\n`` and ``\r\n`` end a line. ``str.splitlines`` would also cut at U+2028, U+0085
    and a form feed, and one cut too many shifts every later pair. A byte order mark at the
    beginning is dropped.

    Args:
        source: A file or named pipe, by its path, or a binary stream.
        name: What errors call it; the path unless given.
        errors: What becomes of bytes that are not UTF-8: ``strict`` refuses them,
            ``surrogateescape`` makes lone surrogates of them.
        digest: Is given all bytes of the file, as they are before unpacking.

    Yields:
        The lines without their ends.

    Raises:
        CorpusError: The text cannot be read, is cut short, damaged or an HTML page, has a line
            of more than ``MAX_LINE`` bytes, or bytes that are not UTF-8, or NUL.
    """
    name = name or str(source)
    with contextlib.ExitStack() as stack, reading(name):
        if isinstance(source, (str, Path)):
            source = stack.enter_context(Path(source).open("rb"))
        content = open_packed(source, name, digest)
        for number in itertools.count(1):
            row = content.readline(MAX_LINE + 5)  # room for a mark, and for the longest end
            if not row:
                break
            if number == 1:
                row = row.removeprefix(codecs.BOM_UTF8)
            yield _decode(row, f"{name}, line {number}", errors)
        while digest and (rest := source.read(1 << 16)):  # behind the end of packed data
            digest.update(rest)


def _decode(row: bytes, place: str, errors: str) -> str:
    """Return a line without its end."""
    row = row.removesuffix(b"\n").removesuffix(b"\r")
    if len(row) > MAX_LINE:
        raise CorpusError(
            f"{place}: longer than {MAX_LINE} bytes; give text with one sentence on each line"
        )
    if b"\0" in row and errors == "strict":
        raise CorpusError(f"{place}: has NUL bytes, so it is no text; convert it to UTF-8")
    try:
        return row.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{place}: byte {error.start + 1} (0x{row[error.start]:02x}) is not valid UTF-8; "
            "convert the text to UTF-8"
        ) from None


def read_lines(
    source: str | Path | IO[bytes], *, name: str = "", digest: Digest | None = None
) -> list[str]:
    """Return all lines of a text in UTF-8; for all else see :func:`stream_lines`."""
    return list(stream_lines(source, name=name, digest=digest))
