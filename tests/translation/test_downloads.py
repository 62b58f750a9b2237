"""Tests of downloads and of archives."""

import bz2
import dataclasses
import errno
import gzip
import hashlib
import io
import lzma
import os
import random
import re
import stat
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from annotated_transformer.translation import downloads
from annotated_transformer.translation.downloads import (
    DATA_VARIABLE,
    CorpusError,
    RemoteFile,
    fetch,
    locate,
    locked,
    unpack,
)


@pytest.fixture(autouse=True)
def _no_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def message(action: Callable[[], object]) -> str:
    """Return the text of the error that an action ends with, which must be one line."""
    with pytest.raises(CorpusError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text


# ----------------------------------------------------------------------- downloads

CONTENT = gzip.compress(random.Random(0).randbytes(300_000), mtime=0)


class Server(ThreadingHTTPServer):
    """A server on the loopback that misbehaves as it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents: dict[str, bytes] = {}
        self.breaks: dict[str, list[int]] = {}  # after how many bytes, one for a request
        self.errors: dict[str, list[int]] = {}  # answers to give before the right one
        self.redirects: dict[str, str] = {}
        self.lengths: dict[str, int | None] = {}  # announced, whatever is sent; None: nothing is
        self.ranges: dict[str, str] = {}  # announced for a rest, whatever is sent
        self.rests: dict[str, bytes] = {}  # sent for every rest
        self.ignore_range = False
        self.refuse_range = False
        self.requests: list[tuple[str, str | None]] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"

    def handle_error(self, *_: object) -> None:
        """Say nothing when a client goes away."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path, wanted = self.path.lstrip("/"), self.headers.get("Range")
        self.server.requests.append((path, wanted))
        if path in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.url(self.server.redirects[path]))
            self.end_headers()
            return
        errors = self.server.errors.get(path, [])
        if errors or path not in self.server.contents:
            self.send_error(errors.pop(0) if errors else 404)
            return
        body = self.server.contents[path]
        if wanted and not self.server.ignore_range:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if self.server.refuse_range or start >= len(body):
                self.send_error(416)
                return
            told = f"bytes {start}-{len(body) - 1}/{len(body)}"
            body = self.server.rests.get(path, body[start:])
            self.send_response(206)
            if told := self.server.ranges.get(path, told):
                self.send_header("Content-Range", told)
        else:
            self.send_response(200)
        length = self.server.lengths.get(path, len(body))
        if length is not None:
            self.send_header("Content-Length", str(length))
        breaks = self.server.breaks.get(path, [])  # before a client can have its answer
        body = body[: breaks.pop(0)] if breaks else body
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def remote(server: Server, *paths: str, content: bytes = CONTENT) -> RemoteFile:
    urls = tuple(server.url(path) for path in paths)
    return RemoteFile("c/x.gz", urls, hashlib.sha256(content).hexdigest(), len(content))


@pytest.fixture
def get(tmp_path: Path) -> Callable[[RemoteFile], Path]:
    return partial(fetch, cache=tmp_path / "cache", progress=False, wait=0.01, timeout=5)


def no_leftovers(tmp_path: Path) -> bool:
    return not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_download_then_cache(server: Server, get: Callable[..., Path], tmp_path: Path) -> None:
    server.contents["x"] = CONTENT
    path = get(remote(server, "x"))
    assert path == tmp_path / "cache" / "c" / "x.gz"
    assert path.read_bytes() == CONTENT
    assert get(remote(server, "x")) == path
    assert server.requests == [("x", None)]
    assert list(path.parent.iterdir()) == [path]


def test_what_another_process_fetches_is_waited_for(
    server: Server, get: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.contents["x"] = CONTENT
    folder = tmp_path / "cache" / "c"
    folder.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with locked(folder, wait=False):
            path = pool.submit(get, remote(server, "x"))
            with pytest.raises(TimeoutError):
                path.result(timeout=0.3)
            (folder / "x.gz").write_bytes(CONTENT)
        assert path.result() == folder / "x.gz"
    assert server.requests == []
    assert f"{folder}: waiting for another process" in capsys.readouterr().err


def test_broken_connection_is_resumed(server: Server, get: Callable[..., Path]) -> None:
    server.contents["x"] = CONTENT
    server.breaks["x"] = [1000, 2000]
    assert get(remote(server, "x")).read_bytes() == CONTENT
    assert server.requests == [("x", None), ("x", "bytes=1000-"), ("x", "bytes=3000-")]


def test_resumed_in_a_later_call(server: Server, get: Callable[..., Path], tmp_path: Path) -> None:
    server.contents["x"] = CONTENT
    server.breaks["x"] = [1000]
    assert "connection broke after 1000 of" in message(lambda: get(remote(server, "x"), attempts=1))
    part = tmp_path / "cache" / "c" / "x.gz.part"
    assert part.read_bytes() == CONTENT[:1000]
    assert not (tmp_path / "cache" / "c" / "x.gz").exists()
    assert get(remote(server, "x"), attempts=1).read_bytes() == CONTENT
    assert server.requests[-1] == ("x", "bytes=1000-")
    assert not part.exists()


def test_server_that_ignores_range(server: Server, get: Callable[..., Path]) -> None:
    server.contents["x"] = CONTENT
    server.breaks["x"] = [1000]
    server.ignore_range = True
    assert get(remote(server, "x")).read_bytes() == CONTENT


def test_server_that_refuses_range(server: Server, get: Callable[..., Path]) -> None:
    server.contents["x"] = CONTENT
    server.breaks["x"] = [1000]
    server.refuse_range = True
    assert get(remote(server, "x")).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=1000-", None]


def test_a_damaged_beginning_is_thrown_away(
    server: Server, get: Callable[..., Path], tmp_path: Path
) -> None:
    server.contents["x"] = server.contents["y"] = CONTENT
    part = tmp_path / "cache" / "c" / "x.gz.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"\0" * 500)
    assert get(remote(server, "x", "y")).read_bytes() == CONTENT
    part.write_bytes(b"\0" * (len(CONTENT) + 1))
    (tmp_path / "cache" / "c" / "x.gz").unlink()
    assert get(remote(server, "x")).read_bytes() == CONTENT


def test_wrong_bytes_then_second_source(server: Server, get: Callable[..., Path]) -> None:
    server.contents["bad"] = CONTENT[:-1] + b"!"
    server.contents["good"] = CONTENT
    assert get(remote(server, "bad", "good")).read_bytes() == CONTENT
    assert [path for path, _ in server.requests] == ["bad", "good"]


def test_a_longer_file_is_not_read_to_its_end(server: Server, get: Callable[..., Path]) -> None:
    server.contents["long"] = CONTENT + bytes(50_000_000)
    text = message(lambda: get(remote(server, "long")))
    (found,) = re.findall(r"found (\d+) bytes", text)
    assert len(CONTENT) < int(found) <= len(CONTENT) + 65536


def test_missing_then_second_source(server: Server, get: Callable[..., Path]) -> None:
    server.contents["second"] = CONTENT
    assert get(remote(server, "first", "second")).read_bytes() == CONTENT
    assert server.requests == [("first", None), ("second", None)]


def test_redirects_are_followed_but_not_in_circles(
    server: Server, get: Callable[..., Path]
) -> None:
    server.contents["x"] = CONTENT
    server.redirects = {"moved": "again", "again": "x", "round": "round"}
    assert get(remote(server, "moved")).read_bytes() == CONTENT
    circle = dataclasses.replace(remote(server, "round"), path="c/y.gz")
    assert "redirect" in message(lambda: get(circle))


def test_a_page_in_place_of_the_data_is_named(server: Server, get: Callable[..., Path]) -> None:
    server.contents["page"] = b"\n<!DOCTYPE html><title>not found</title>"
    server.contents["good"] = CONTENT
    text = message(lambda: get(remote(server, "page")))
    assert f"an HTML page of {len(server.contents['page'])} bytes" in text
    unknown = RemoteFile("c/y.gz", (server.url("page"), server.url("good")))
    assert get(unknown).read_bytes() == CONTENT


def test_a_file_that_is_known_by_its_md5(
    server: Server, get: Callable[..., Path], tmp_path: Path
) -> None:
    server.contents["x"] = CONTENT
    file = RemoteFile("c/x.gz", (server.url("x"),), md5=hashlib.md5(CONTENT).hexdigest())
    path = get(file)
    assert path.read_bytes() == CONTENT
    assert get(file) == path
    assert len(server.requests) == 1
    path.write_bytes(CONTENT[:-1])
    server.contents["x"] = CONTENT[:-1] + b"!"
    text = message(lambda: get(file))
    assert f"expected md5 {file.md5}" in text
    assert not path.with_name("x.gz.part").exists()


def test_what_one_address_began_is_not_continued_at_another(
    server: Server, get: Callable[..., Path]
) -> None:
    server.contents["bad"] = bytes(len(CONTENT))
    server.breaks["bad"] = [100_000]
    server.contents["good"] = CONTENT
    file = remote(server, "bad", "good")
    assert get(file, attempts=1).read_bytes() == CONTENT
    assert [wanted for path, wanted in server.requests if path == "good"] == [None]


def test_a_wrong_beginning_is_begun_again_at_the_only_address(
    server: Server, get: Callable[..., Path], tmp_path: Path
) -> None:
    server.contents["x"] = CONTENT
    part = tmp_path / "cache/c/x.gz.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(500))
    assert get(remote(server, "x")).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == ["bytes=500-", None]


@pytest.mark.parametrize(
    ("content", "expected"), [(b"", "empty|not gzipped"), (b'{"error": 1}', "not gzipped")]
)
def test_of_a_file_of_which_nothing_is_known_some_are_refused(
    content: bytes, expected: str, server: Server, get: Callable[..., Path]
) -> None:
    server.contents["x"] = content
    assert re.search(expected, message(lambda: get(RemoteFile("c/x.tgz", (server.url("x"),)))))


def test_an_address_that_is_none(server: Server, get: Callable[..., Path]) -> None:
    server.contents["good"] = CONTENT
    file = dataclasses.replace(remote(server, "good"), urls=("http://[x/", server.url("good")))
    assert get(file).read_bytes() == CONTENT


def test_archives_of_one_name_are_told_apart(tmp_path: Path) -> None:
    found = []
    for folder, text in (("old", b"one"), ("new", b"two"), ("old", b"three")):
        (tmp_path / folder).mkdir(exist_ok=True)
        tar(tmp_path / folder / "x.tgz", ("a.de", text))
        found.append(locate(tmp_path / folder / "x.tgz" / "a.de", tmp_path / "u").read_bytes())
    assert found == [b"one", b"two", b"three"]


def test_a_file_of_which_nothing_is_known(
    server: Server, get: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    server.contents["x"] = CONTENT
    server.breaks["x"] = [100_000, 50_000]  # the announced length tells that it broke
    path = get(RemoteFile("c/x.gz", (server.url("x"),)))
    assert path.read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=100000-", "bytes=150000-"]
    assert hashlib.sha256(CONTENT).hexdigest() in capfd.readouterr().err


def test_no_address_at_all(get: Callable[..., Path]) -> None:
    text = message(lambda: get(RemoteFile("c/x.gz", ())))
    assert "c/x.gz" in text
    assert DATA_VARIABLE in text


@pytest.mark.parametrize("code", [408, 429, 500, 503])
def test_passing_errors_are_tried_again(
    server: Server, get: Callable[..., Path], code: int
) -> None:
    server.contents["x"] = CONTENT
    server.errors["x"] = [code, code]
    assert get(remote(server, "x")).read_bytes() == CONTENT


def test_when_everything_fails(server: Server, get: Callable[..., Path], tmp_path: Path) -> None:
    server.contents["bad"] = b"no"
    server.contents["bad2"] = CONTENT[:-1] + b"!"
    file = remote(server, "none", "bad", "bad2")
    gone = dataclasses.replace(file, urls=(*file.urls, "http://127.0.0.1:9/x"))
    text = message(lambda: get(gone, attempts=2))
    assert "c/x.gz" in text
    assert "404" in text
    assert file.sha256 in text
    assert hashlib.sha256(server.contents["bad2"]).hexdigest() in text
    assert "127.0.0.1:9" in text
    assert DATA_VARIABLE in text
    assert not (tmp_path / "cache" / "c" / "x.gz").exists()


def test_a_silent_server_times_out(get: Callable[..., Path]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        file = RemoteFile("c/x.gz", (url,), "0" * 64, 10)
        assert "timed out" in message(lambda: get(file, attempts=1, timeout=0.2))


def test_full_device(
    server: Server,
    get: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.contents["x"] = CONTENT

    class Full(io.FileIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_open(path: Path, mode: str = "r", **options: object) -> io.IOBase:
        return Full(path, "w") if mode in ("wb", "ab") else open(path, mode)

    monkeypatch.setattr(downloads, "open", full_open, raising=False)
    text = message(lambda: get(remote(server, "x")))
    assert os.strerror(errno.ENOSPC) in text
    assert "x.gz.part" in text
    assert no_leftovers(tmp_path)
    assert len(server.requests) == 1


def test_cache_that_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    text = message(lambda: fetch(remote(server, "x"), cache=tmp_path / "file", progress=False))
    assert "cannot be written" in text


def test_an_altered_file_in_the_cache_is_fetched_again(
    server: Server, get: Callable[..., Path]
) -> None:
    server.contents["x"] = CONTENT
    path = get(remote(server, "x"))
    path.write_bytes(b"altered")
    assert get(remote(server, "x")).read_bytes() == CONTENT


def test_the_default_cache(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.contents["x"] = CONTENT
    path = fetch(remote(server, "x"))
    assert path.is_relative_to(tmp_path / "xdg" / "annotated-transformer")
    assert "x.gz" in capfd.readouterr().err  # the progress bar


def test_the_mirror_comes_first(
    server: Server, get: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "mirror" / "c" / "x.gz"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(CONTENT)
    file = remote(server, "x")
    assert get(file, mirror=tmp_path / "mirror") == copy
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "mirror"))
    assert get(file) == copy
    assert not server.requests


def test_an_altered_mirror_is_refused(
    server: Server, get: Callable[..., Path], tmp_path: Path
) -> None:
    server.contents["x"] = CONTENT
    copy = tmp_path / "mirror" / "c" / "x.gz"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(CONTENT[:-1])
    file = remote(server, "x")
    text = message(lambda: get(file, mirror=tmp_path / "mirror"))
    for part in (str(copy), file.sha256, hashlib.sha256(CONTENT[:-1]).hexdigest()):
        assert part in text
    assert not server.requests


def test_a_mirror_without_the_file_is_passed_over(
    server: Server, get: Callable[..., Path], tmp_path: Path
) -> None:
    server.contents["x"] = CONTENT
    (tmp_path / "mirror").mkdir()
    assert get(remote(server, "x"), mirror=tmp_path / "mirror").read_bytes() == CONTENT
    text = message(lambda: get(remote(server, "x"), mirror=tmp_path / "nowhere"))
    assert "no such folder" in text


# ---------------------------------------- a server that lies, and a file without a checksum


def unknown(server: Server, *paths: str, path: str = "c/x.gz") -> RemoteFile:
    """A file of which nothing is published."""
    return RemoteFile(path, tuple(server.url(path) for path in paths))


def wanted_ranges(server: Server) -> list[str | None]:
    return [wanted for _, wanted in server.requests]


def test_a_length_too_small(server: Server, get: Callable[..., Path], tmp_path: Path) -> None:
    server.contents["lies"] = server.contents["good"] = CONTENT
    server.lengths["lies"] = len(CONTENT) - 1000
    text = message(lambda: get(unknown(server, "lies")))
    assert "c/x.gz" in text
    assert f"{server.url('lies')}: other bytes than expected: it is damaged, or not whole" in text
    assert no_leftovers(tmp_path)
    assert get(unknown(server, "lies", "good")).read_bytes() == CONTENT


def test_a_length_too_large(server: Server, get: Callable[..., Path], tmp_path: Path) -> None:
    server.contents["lies"] = server.contents["good"] = b"a plain text" * 1000
    server.lengths["lies"] = 15000
    text = message(lambda: get(unknown(server, "lies", path="c/x.txt")))
    assert "c/x.txt" in text
    assert f"{server.url('lies')}: the connection broke after 12000 of 15000 bytes" in text
    assert not (tmp_path / "cache/c/x.txt").exists()
    path = get(unknown(server, "lies", "good", path="c/x.txt"))
    assert path.read_bytes() == server.contents["good"]


def test_a_published_size_is_compared(server: Server, get: Callable[..., Path]) -> None:
    server.contents["x"] = b"a plain text"
    file = dataclasses.replace(unknown(server, "x", path="c/x.txt"), size=13)
    assert "expected 13 bytes, found 12" in message(lambda: get(file))
    assert get(dataclasses.replace(file, size=12)).read_bytes() == b"a plain text"


SIZE = len(CONTENT)
FALSE_RANGES = [
    (f"bytes 1001-{SIZE - 1}/{SIZE}", CONTENT[1001:], "asked for the bytes from 1000 on"),
    (f"bytes 0-{SIZE - 1}/{SIZE}", CONTENT, "asked for the bytes from 1000 on"),
    (f"bytes 1000-{SIZE - 1}/{SIZE}", CONTENT, "contradicts itself"),
    (f"bytes 1000-{SIZE}/{SIZE}", CONTENT[1000:] + b"!", "contradicts itself"),
    ("bytes 1000-999/*", CONTENT[1000:], "contradicts itself"),
    (f"bytes 1000-{SIZE + 999}/{SIZE + 1000}", CONTENT, f"had {SIZE} bytes, and now has"),
    (f"bytes */{SIZE}", CONTENT[1000:], "206 without the range"),
    (f"lines 1000-{SIZE - 1}/{SIZE}", CONTENT[1000:], "206 without the range"),
    (f"bytes 1000-{'9' * 5000}/*", CONTENT[1000:], "206 without the range"),
    ("", CONTENT[1000:], "206 without the range"),
]


@pytest.mark.parametrize("path", ["c/x.gz", "c/x.txt"])
@pytest.mark.parametrize(("told", "rest", "expected"), FALSE_RANGES)
def test_a_false_range(
    server: Server, get: Callable[..., Path], path: str, told: str, rest: bytes, expected: str
) -> None:
    server.contents["x"] = server.contents["y"] = CONTENT
    server.ranges["x"], server.rests["x"], server.breaks["x"] = told, rest, [1000]
    text = message(lambda: get(unknown(server, "x", path=path), attempts=2))
    assert f"{path}: not downloaded ({server.url('x')}: " in text
    assert expected in text
    server.breaks["x"] = [1000]
    assert get(unknown(server, "x", path=path)).read_bytes() == CONTENT  # begun again
    server.breaks["x"] = [1000]
    other = unknown(server, "x", "y", path=f"{path}.txt")
    assert get(other, attempts=2).read_bytes() == CONTENT  # from the second source
    expected_ranges = 2 * [None, "bytes=1000-"] + [None] + [None, "bytes=1000-", None]
    assert wanted_ranges(server) == expected_ranges


def test_a_false_rest_under_a_right_range(server: Server, get: Callable[..., Path]) -> None:
    """All numbers agree; only the checksum within the file tells."""
    server.contents["x"] = CONTENT
    server.breaks["x"] = [5000]
    server.rests["x"] = CONTENT[4000:-1000]
    text = message(lambda: get(unknown(server, "x"), attempts=2))
    assert "damaged" in text
    server.breaks["x"] = [5000]
    assert get(unknown(server, "x")).read_bytes() == CONTENT
    assert wanted_ranges(server)[2:] == [None, "bytes=5000-", None]


def test_more_than_the_range_without_a_length(
    server: Server, get: Callable[..., Path], tmp_path: Path
) -> None:
    server.contents["x"], server.lengths["x"] = CONTENT, None
    server.rests["x"] = CONTENT[1000:] + b"!"
    part = tmp_path / "cache/c/x.txt.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT[:1000])
    known = hashlib.sha256(CONTENT).hexdigest()  # else what an earlier call left is not used
    file = dataclasses.replace(unknown(server, "x", path="c/x.txt"), sha256=known)
    text = message(lambda: get(file, attempts=1))
    assert f"the server announced {SIZE} bytes, and sent {SIZE + 1}" in text
    assert not part.exists()
    assert get(file, attempts=1).read_bytes() == CONTENT


@pytest.mark.parametrize("path", ["c/x.gz", "c/x.txt"])
def test_a_rest_in_pieces(server: Server, get: Callable[..., Path], path: str) -> None:
    """A server may send less than the rest, if it says so."""
    server.contents["x"] = CONTENT
    server.breaks["x"] = [1000]
    server.ranges["x"], server.rests["x"] = f"bytes 1000-1999/{SIZE}", CONTENT[1000:2000]
    text = message(lambda: get(unknown(server, "x", path=path), attempts=2))
    assert f"the connection broke after 2000 of {SIZE} bytes" in text


@pytest.mark.parametrize("path", ["c/x.gz", "c/x.txt"])
def test_the_whole_in_place_of_the_rest(
    server: Server, get: Callable[..., Path], path: str
) -> None:
    server.contents["x"], server.ignore_range = CONTENT, True
    server.breaks["x"] = [1000, 500]
    assert get(unknown(server, "x", path=path)).read_bytes() == CONTENT
    assert wanted_ranges(server) == [None, "bytes=1000-", "bytes=500-"]


@pytest.mark.parametrize("path", ["c/x.gz", "c/x.txt"])
def test_a_refused_rest(server: Server, get: Callable[..., Path], path: str) -> None:
    server.contents["x"], server.refuse_range = CONTENT, True
    server.breaks["x"] = [1000]
    assert get(unknown(server, "x", path=path)).read_bytes() == CONTENT
    assert wanted_ranges(server) == [None, "bytes=1000-", None]
    server.breaks["x"] = [1000]
    other = unknown(server, "x", path="c/other.txt")
    assert "answers 416" in message(lambda: get(other, attempts=2))


def test_no_more_than_the_bound_is_taken(
    server: Server, get: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "MOST_BYTES", SIZE)
    server.contents["x"], server.lengths["x"] = CONTENT, None
    file = unknown(server, "x", path="c/x.txt")
    assert get(file).read_bytes() == CONTENT
    server.contents["y"], server.lengths["y"] = CONTENT + b"!", None
    text = message(lambda: get(unknown(server, "y", path="c/y.txt")))
    assert f"more than {SIZE} bytes arrived" in text
    assert [path.name for path in (tmp_path / "cache/c").iterdir()] == ["x.txt"]


def packed(kind: str) -> bytes:
    text = random.Random(1).randbytes(20_000)
    if kind in ("gz", "bz2", "xz"):
        return {"gz": gzip, "bz2": bz2, "xz": lzma}[kind].compress(text)
    output = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(output, "w") as archive:
            archive.writestr("a.de", text)
    else:
        mode = {"tar": "w", "tgz": "w:gz", "tbz2": "w:bz2", "txz": "w:xz"}[kind.split(".")[-1]]
        with tarfile.open(fileobj=output, mode=mode) as tape:
            tape.addfile(special_file("a.de", len(text)), io.BytesIO(text))
    return output.getvalue()


def special_file(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    return info


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zip", "tar", "tgz", "tbz2", "txz"])
def test_what_is_packed_is_read_to_its_end(
    server: Server, get: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    content = packed(kind)
    server.contents["good"] = content
    damaged = [content[:-5], content[: len(content) // 2]]
    if kind != "tar":  # which has no checksum
        place = len(content) // 2
        damaged.append(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    else:
        damaged[0] = content[:10_000]
    for bad in damaged:
        server.contents["bad"] = bad
        text = message(lambda: get(unknown(server, "bad", path=f"c/x.{kind}")))
        assert f"c/x.{kind}: not downloaded ({server.url('bad')}: " in text
        assert "damaged, or not whole" in text
        assert no_leftovers(tmp_path)
    path = get(unknown(server, "bad", "good", path=f"c/x.{kind}"))
    assert path.read_bytes() == content


def test_what_unpacks_to_too_much_is_refused(
    server: Server, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.contents["x"] = gzip.compress(bytes(100_000))
    monkeypatch.setattr(downloads, "MOST_BYTES", 99_999)
    text = message(lambda: get(unknown(server, "x")))
    assert "more than 99999 bytes come out of it" in text
    monkeypatch.setattr(downloads, "MOST_BYTES", 100_000)
    assert get(unknown(server, "x")).read_bytes() == server.contents["x"]


# ------------------------------------------------------------------------ archives

Member = tuple[str, bytes | tarfile.TarInfo]


def tar(path: Path, *members: Member, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tape:  # type: ignore[call-overload]
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            data = b"" if isinstance(content, tarfile.TarInfo) else content
            info.size = len(data)
            tape.addfile(info, io.BytesIO(data))
    return path


def special(kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


def zipped(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def everything(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


CONTENTS = {"a.de": b"eins\n", "sub/b.en": b"two\n", "./c": b""}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz", "zip"])
def test_a_good_archive_is_unpacked_once(tmp_path: Path, mode: str) -> None:
    archive = tmp_path / "x"
    if mode == "zip":
        zipped(archive, *CONTENTS.items(), ("empty/", b""))
    else:
        tar(archive, *CONTENTS.items(), ("empty", special(tarfile.DIRTYPE)), mode=mode)
    folder = unpack(archive, tmp_path / "out")
    assert everything(folder) == {"a.de": b"eins\n", "sub/b.en": b"two\n", "c": b""}
    (folder / "a.de").write_bytes(b"mine")
    assert unpack(archive, folder) == folder
    assert (folder / "a.de").read_bytes() == b"mine"


BAD_NAMES = [
    "../out.txt",
    "a/../../out.txt",
    "/out.txt",
    "..\\out.txt",
    "\\out.txt",
    "c:out.txt",
    "..",
]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("pack", [tar, zipped])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str, pack: Any) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    archive = pack(inner / "x", ("good", b"1"), (name, b"2"))
    before = everything(tmp_path)
    text = message(lambda: unpack(archive, inner / "out"))
    assert f"{archive}, member {name}" in text
    assert "leads out" in text
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "member",
    [
        special(tarfile.SYMTYPE, "/etc"),
        special(tarfile.SYMTYPE, "good"),
        special(tarfile.LNKTYPE, "good"),
        special(tarfile.FIFOTYPE),
        special(tarfile.CHRTYPE),
        special(tarfile.BLKTYPE),
    ],
)
def test_links_and_devices_are_refused(tmp_path: Path, member: tarfile.TarInfo) -> None:
    archive = tar(tmp_path / "x.tgz", ("good", b"1"), ("odd", member), ("odd/file", b"2"))
    text = message(lambda: unpack(archive, tmp_path / "out"))
    assert f"{archive}, member odd" in text
    assert "link or a device" in text
    assert [path.name for path in tmp_path.iterdir()] == ["x.tgz"]


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("odd")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive = zipped(tmp_path / "x.zip", (info, b"/etc"))
    assert "member odd: refused, a link" in message(lambda: unpack(archive, tmp_path / "out"))


@pytest.mark.parametrize("pack", [tar, zipped])
def test_bytes_and_files_are_limited(tmp_path: Path, pack: Any) -> None:
    archive = pack(tmp_path / "x", ("a", bytes(600)), ("b", bytes(600)))
    assert everything(unpack(archive, tmp_path / "1", most_bytes=1200))
    text = message(lambda: unpack(archive, tmp_path / "2", most_bytes=1199))
    assert "member b: refused, the files have more than 1199 bytes" in text
    text = message(lambda: unpack(archive, tmp_path / "3", most_files=1))
    assert "more than 1 files" in text
    assert not (tmp_path / "2").exists()
    assert not (tmp_path / "3").exists()


def test_a_zip_that_lies_about_a_size_writes_no_more_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying(_: Path) -> Any:
        yield "a", "", 10, io.BytesIO(bytes(5000))

    monkeypatch.setattr(downloads, "_members", lying)
    archive = tmp_path / "x.zip"
    archive.write_bytes(b"")
    assert "more than 1000" in message(lambda: unpack(archive, tmp_path / "o", most_bytes=1000))


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    archive = tar(tmp_path / "x", ("a", b"1"), ("a", b"2"))
    assert "twice" in message(lambda: unpack(archive, tmp_path / "out"))
    archive = tar(tmp_path / "y", ("a", b"1"), ("a/b", b"2"))
    assert str(archive) in message(lambda: unpack(archive, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pack", [tar, zipped])
def test_damaged_archives(tmp_path: Path, pack: Any) -> None:
    archive = pack(tmp_path / "x", ("a", os.urandom(5000)))
    content = archive.read_bytes()
    for damaged in (content[:2000], content[:2], b"", b"no archive at all" * 50):
        archive.write_bytes(damaged)
        text = message(lambda: unpack(archive, tmp_path / "out"))
        assert str(archive) in text
        assert not (tmp_path / "out").exists()


def test_a_name_in_a_zip_that_is_no_text(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "x", ("ä", b"1"))
    archive.write_bytes(archive.read_bytes().replace("ä".encode(), b"\xc3("))
    assert "damaged one ('utf-8' codec" in message(lambda: unpack(archive, tmp_path / "out"))


def test_what_another_process_unpacks_is_waited_for(tmp_path: Path) -> None:
    archive = tar(tmp_path / "x", ("a", b"1"))
    with ThreadPoolExecutor() as pool:
        with locked(tmp_path, wait=False):
            (tmp_path / ".out.part").mkdir()  # the other's
            folder = pool.submit(unpack, archive, tmp_path / "out")
            with pytest.raises(TimeoutError):
                folder.result(timeout=0.3)
            (tmp_path / ".out.part" / "b").write_bytes(b"2")
            (tmp_path / ".out.part").rename(tmp_path / "out")
        assert everything(folder.result()) == {"b": b"2"}


def test_what_a_killed_process_left_is_no_archive(tmp_path: Path) -> None:
    archive = tar(tmp_path / "x", ("a", b"1"))
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "half").write_bytes(b"?")
    assert everything(unpack(archive, tmp_path / "out")) == {"a": b"1"}
    assert not (tmp_path / ".out.part").exists()


def test_paths_go_on_inside_archives(tmp_path: Path) -> None:
    archive = tar(tmp_path / "x.tgz", ("t/a.de", b"eins\n"))
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert locate(plain, tmp_path / "u") == plain
    assert locate(archive / "t" / "a.de", tmp_path / "u").read_bytes() == b"eins\n"
    assert "has no member t/b.de" in message(lambda: locate(archive / "t/b.de", tmp_path / "u"))
    assert "no such file" in message(lambda: locate(tmp_path / "none", tmp_path / "u"))
    assert "no such file" in message(lambda: locate(tmp_path / "none/a.de", tmp_path / "u"))
