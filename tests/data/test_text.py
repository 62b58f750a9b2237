"""Tests of the one reader of lines."""

import bz2
import codecs
import gzip
import hashlib
import io
import lzma
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.data.text import MAX_LINE, read_lines, stream_lines
from tests.data.small import message

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def write(path: Path, content: bytes) -> Path:
    """Write a file, packed as its ending says."""
    path.write_bytes(PACKERS.get(path.suffix, bytes)(content))
    return path


# Anything but the two characters that end lines, and NUL, which no text has.
line_text = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]))
endings = st.sampled_from(["\n", "\r\n"])
packers = st.sampled_from(sorted(PACKERS))


@settings(max_examples=100)
@given(st.lists(line_text, min_size=1), endings, packers, st.booleans(), st.booleans())
def test_reading_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    end: str,
    packer: str,
    bom: bool,
    ended: bool,
) -> None:
    lines = [line.removeprefix("\ufeff") if n == 0 else line for n, line in enumerate(lines)]
    content = end.join(lines).encode() + (end.encode() if ended or not lines[-1] else b"")
    if content.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return
    path = tmp_path_factory.mktemp("text") / f"x{packer}"
    write(path, codecs.BOM_UTF8 * bom + content)
    digest = hashlib.sha256()
    assert read_lines(path, digest=digest) == lines
    assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
    with path.open("rb") as file:
        assert list(stream_lines(file, name="x")) == lines


def test_a_mark_alone_is_no_line(tmp_path: Path) -> None:
    assert read_lines(write(tmp_path / "x", codecs.BOM_UTF8)) == []
    assert read_lines(write(tmp_path / "x", codecs.BOM_UTF8 + b"\n")) == [""]


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    odd = "a\u2028b\x85c\x0bd\x0ce\x1cf\u2029g\rh"
    path = write(tmp_path / "x", f"{odd}\n\"q\"\t'r'\nlast".encode())
    assert read_lines(path) == [odd, "\"q\"\t'r'", "last"]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    assert read_lines(write(tmp_path / "x", b"\xef\xbb\xbfa\nb\n")) == ["a", "b"]
    inner = write(tmp_path / "y", "a\n\ufeffb\n".encode())
    assert read_lines(inner) == ["a", "\ufeffb"]


@pytest.mark.parametrize("packer", sorted(PACKERS))
def test_what_is_packed_is_recognized_by_its_content(tmp_path: Path, packer: str) -> None:
    path = tmp_path / "no_ending"
    path.write_bytes(PACKERS[packer](b"a\n"))
    assert read_lines(path) == ["a"]
    path.write_bytes(PACKERS[packer](b""))
    assert read_lines(path) == []
    twice = PACKERS[packer](b"a\n") + PACKERS[packer](b"b\n")  # what `cat` makes of two files
    path.write_bytes(twice)
    assert read_lines(path) == ["a", "b"]


def test_text_that_begins_like_bzip2(tmp_path: Path) -> None:
    assert read_lines(write(tmp_path / "x", b"BZh9 is how bzip2 begins\n"))[0][:4] == "BZh9"


def test_all_bytes_count_for_the_digest(tmp_path: Path) -> None:
    content = bz2.compress(b"a\n") + b"no bzip2" * 100_000  # bz2 ignores what stands behind
    (tmp_path / "x.bz2").write_bytes(content)
    digest = hashlib.sha256()
    assert read_lines(tmp_path / "x.bz2", digest=digest) == ["a"]
    assert digest.hexdigest() == hashlib.sha256(content).hexdigest()


def test_invalid_utf8_names_line_and_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "x.de", b"good\nba\xfcd\n")
    text = message(lambda: read_lines(path))
    assert f"{path}, line 2" in text
    assert "byte 3 (0xfc)" in text
    packed = write(tmp_path / "x.gz", b"\xff\n")
    assert "line 1: byte 1 (0xff)" in message(lambda: read_lines(packed))
    stream = io.BytesIO(b"a\n\xed\xa0\x80\n")  # half of a pair of surrogates
    assert message(lambda: read_lines(stream, name="it")).startswith("it, line 2: byte 1 (0xed)")


def test_bad_bytes_are_carried_along(tmp_path: Path) -> None:
    path = write(tmp_path / "x", b"a\xffb\n\xe4\nok")
    assert list(stream_lines(path, errors="surrogateescape")) == ["a\udcffb", "\udce4", "ok"]


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gz", b"short\n" + b"a" * (MAX_LINE + 1))
    assert "line 2: longer than" in message(lambda: read_lines(path))
    path = write(tmp_path / "y", b"a" * (MAX_LINE - 1) + b"\nb")
    assert [len(line) for line in stream_lines(path)] == [MAX_LINE - 1, 1]
    for end in (b"\n", b"\r\n"):
        for mark in (b"", codecs.BOM_UTF8):
            path = write(tmp_path / "z", mark + b"a" * MAX_LINE + end + b"b")
            assert [len(line) for line in stream_lines(path)] == [MAX_LINE, 1]
            path = write(tmp_path / "z", mark + b"a" * (MAX_LINE + 1) + end + b"b")
            assert "line 1: longer than" in message(partial(read_lines, path))


def test_a_long_second_line_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.write(b"short\n")
        file.truncate(10**11)  # a hole: reading it takes minutes, and more memory than we have
    assert "line 2: longer than" in message(lambda: read_lines(tmp_path / "x"))


@pytest.mark.parametrize("page", [b"<!DOCTYPE html>\n<p>", b"\xef\xbb\xbf \n<HTML><p>"])
@pytest.mark.parametrize("name", ["x.de", "x.gz", "plain.gz"])
def test_a_page_is_no_text(tmp_path: Path, page: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(page) if name == "x.gz" else page)
    text = message(lambda: read_lines(path))
    assert text.startswith(f"{path}: an HTML page")


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    assert "no such file" in message(lambda: read_lines(tmp_path / "none"))
    assert "cannot be read: Is a directory" in message(lambda: read_lines(tmp_path))
    assert read_lines(write(tmp_path / "empty", b"")) == []
    (tmp_path / "empty.gz").write_bytes(b"")
    assert read_lines(tmp_path / "empty.gz") == []


@pytest.mark.parametrize("packer", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("cut", [1, 5, 9, 12, 500])
def test_truncated_files(tmp_path: Path, packer: str, cut: int) -> None:
    path = tmp_path / f"x{packer}"
    path.write_bytes(PACKERS[packer](os.urandom(1000) + b"\n")[:-cut])
    text = message(lambda: list(stream_lines(path, errors="surrogateescape")))
    assert text.startswith(f"{path}: damaged or cut short (")
    assert text.endswith("; download the whole file again")


@pytest.mark.parametrize("packer", [".gz", ".bz2", ".xz"])
def test_damaged_files(tmp_path: Path, packer: str) -> None:
    content = bytearray(PACKERS[packer](b"abc\n" * 50))
    content[{".gz": -6, ".bz2": 12, ".xz": 40}[packer]] ^= 1
    path = tmp_path / f"x{packer}"
    path.write_bytes(content)
    assert f"{path}: damaged" in message(lambda: read_lines(path))
    path.write_bytes(b"plain text\n")
    assert f"{path}: not a {packer[1:]} file" in message(lambda: read_lines(path))


class Drops(io.RawIOBase):
    """A stream that hands out one byte at a time."""

    def __init__(self, content: bytes) -> None:
        self.content = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self.content.readinto(buffer[:1])


@pytest.mark.parametrize("packer", sorted(PACKERS))
def test_the_beginning_may_come_in_small_pieces(packer: str) -> None:
    """By it the format is known."""
    content = PACKERS[packer](b"\xef\xbb\xbfa\nb\n")
    assert read_lines(io.BufferedReader(Drops(content))) == ["a", "b"]
    page = PACKERS[packer](b"<!DOCTYPE html>\n")
    assert "page" in message(lambda: read_lines(io.BufferedReader(Drops(page)), name="page"))


@pytest.mark.parametrize("packer", sorted(PACKERS))
def test_a_named_pipe_is_read_once(tmp_path: Path, packer: str) -> None:
    path = tmp_path / f"pipe{packer}"
    os.mkfifo(path)
    content = PACKERS[packer](b"Ein Satz.\n" * 20_000)

    def feed() -> None:
        with path.open("wb", buffering=0) as pipe:
            pipe.write(content)

    writer = threading.Thread(target=feed, daemon=True)
    writer.start()
    digest = hashlib.sha256()
    assert read_lines(path, digest=digest) == ["Ein Satz."] * 20_000
    assert digest.hexdigest() == hashlib.sha256(content).hexdigest()
    writer.join()


def test_what_has_nul_bytes_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "x", "a\nb\n".encode("utf-16-be"))  # without a mark, it is valid UTF-8
    assert f"{path}, line 1: has NUL bytes" in message(lambda: read_lines(path))
