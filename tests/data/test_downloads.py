"""Tests of downloads, against a server on the loopback that misbehaves as it is told."""

import bz2
import contextlib
import dataclasses
import errno
import gzip
import hashlib
import io
import lzma
import os
import random
import re
import resource
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import pytest

from annotated_transformer.data import downloads
from annotated_transformer.data.downloads import DATA_VARIABLE, RemoteFile, fetch_file
from annotated_transformer.data.files import lock_folder
from tests.data.small import message


@pytest.fixture(autouse=True)
def _no_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


# ----------------------------------------------------------------------- downloads

CONTENT = gzip.compress(random.Random(0).randbytes(300_000), mtime=0)
SIZE = len(CONTENT)
BLOCK = 1 << 16  # what arrived of the next block is lost when a connection breaks


class Server(ThreadingHTTPServer):
    """A server on the loopback that misbehaves as it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents: dict[str, bytes] = {}
        self.breaks: dict[str, list[int]] = {}  # after how many bytes, one for a request
        self.errors: dict[str, list[int]] = {}  # answers to give before the right one
        self.redirects: dict[str, str] = {}
        self.lengths: dict[
            str, int | str | None
        ] = {}  # announced, whatever is sent; None: nothing is
        self.ranges: dict[str, str] = {}  # announced for a rest, whatever is sent
        self.rests: dict[str, bytes] = {}  # sent for every rest
        self.ignore_range = False
        self.refuse_range = False
        self.encoding = ""  # declared
        self.pause = 0  # before each block behind so many bytes; 0: never
        self.requests: list[tuple[str, str | None]] = []
        self.sent: dict[str, int] = {}

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
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body)
        if self.server.encoding:
            self.send_header("Content-Encoding", self.server.encoding)
        length = self.server.lengths.get(path, len(body))
        if length is not None:
            self.send_header("Content-Length", str(length))
        breaks = self.server.breaks.get(path, [])  # before a client can have its answer
        body = body[: breaks.pop(0)] if breaks else body
        self.end_headers()
        pause = self.server.pause or len(body)
        with contextlib.suppress(ConnectionError):  # the client has enough
            for start in range(0, len(body), 1 << 16):
                if start >= pause:
                    time.sleep(1)
                self.wfile.write(body[start : start + (1 << 16)])
                self.server.sent[path] = start + (1 << 16)

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
    return RemoteFile("c/x.gz", urls, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    monkeypatch.setattr(downloads, "WAIT", 0.01)

    def get_quickly(
        file: RemoteFile, *, mirror: Path | None = None, attempts: int = 3, timeout: float = 5
    ) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(downloads, "ATTEMPTS", attempts)
            patch.setattr(downloads, "TIMEOUT", timeout)
            return fetch_file(file, mirror=mirror, cache=tmp_path / "cache", progress=False)

    return get_quickly


def files_below(folder: Path) -> list[str]:
    """Return the names of the files in a folder."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def no_leftovers(tmp_path: Path) -> bool:
    return files_below(tmp_path / "cache") == []


def test_download_then_cache(server: Server, get: Callable[..., Path], tmp_path: Path) -> None:
    server.contents["x"] = CONTENT
    path = get(remote(server, "x"))
    assert path == tmp_path / "cache" / "c" / "x.gz"
    assert path.read_bytes() == CONTENT
    assert get(remote(server, "x")) == path
    assert server.requests == [("x", None)]
    assert files_below(path.parent) == ["x.gz"]


def test_what_another_process_fetches_is_waited_for(
    server: Server, get: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.contents["x"] = CONTENT
    folder = tmp_path / "cache" / "c"
    folder.mkdir(parents=True)
    with futures.ThreadPoolExecutor() as pool:
        with lock_folder(folder, wait=False):
            path = pool.submit(get, remote(server, "x"))
            with pytest.raises(futures.TimeoutError):
                path.result(timeout=0.3)
            (folder / "x.gz").write_bytes(CONTENT)
        assert path.result() == folder / "x.gz"
    assert server.requests == []
    assert f"{folder}: waiting for another process" in capsys.readouterr().err


def test_broken_connection_is_resumed(server: Server, get: Callable[..., Path]) -> None:
    server.contents["x"] = CONTENT
    server.breaks["x"] = [70_000, 140_000]
    assert get(remote(server, "x")).read_bytes() == CONTENT
    assert wanted_ranges(server) == [None, f"bytes={BLOCK}-", f"bytes={3 * BLOCK}-"]


def test_resumed_in_a_later_call(server: Server, get: Callable[..., Path], tmp_path: Path) -> None:
    server.contents["x"] = CONTENT
    server.breaks["x"] = [70_000]
    assert "broken: IncompleteRead(70000 " in message(lambda: get(remote(server, "x"), attempts=1))
    part = tmp_path / "cache" / "c" / "x.gz.part"
    assert part.read_bytes() == CONTENT[:BLOCK]
    assert not (tmp_path / "cache" / "c" / "x.gz").exists()
    assert get(remote(server, "x"), attempts=1).read_bytes() == CONTENT
    assert server.requests[-1] == ("x", f"bytes={BLOCK}-")
    assert not part.exists()


def test_server_that_ignores_range(server: Server, get: Callable[..., Path]) -> None:
    server.contents["x"] = CONTENT
    server.breaks["x"] = [70_000]
    server.ignore_range = True
    assert get(remote(server, "x")).read_bytes() == CONTENT


def test_server_that_refuses_range(server: Server, get: Callable[..., Path]) -> None:
    server.contents["x"] = CONTENT
    server.breaks["x"] = [70_000]
    server.refuse_range = True
    assert get(remote(server, "x")).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, f"bytes={BLOCK}-", None]


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
    assert f"received more than {len(CONTENT)} bytes" in text
    assert server.sent["long"] < 20_000_000


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "br"])
def test_a_packed_file_is_not_unpacked_on_the_way(
    server: Server, get: Callable[..., Path], encoding: str
) -> None:
    """Some servers declare the packing of a file as one for the transfer."""
    server.contents["x"], server.encoding = CONTENT, encoding
    assert get(remote(server, "x")).read_bytes() == CONTENT


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
    file = RemoteFile("c/x.gz", (server.url("x"),), digest=hashlib.md5(CONTENT).hexdigest())
    path = get(file)
    assert path.read_bytes() == CONTENT
    assert get(file) == path
    assert len(server.requests) == 1
    path.write_bytes(CONTENT[:-1])
    server.contents["x"] = CONTENT[:-1] + b"!"
    text = message(lambda: get(file))
    assert f"expected md5 {file.digest}" in text
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
    ("content", "expected"), [(b"", "it is empty"), (b'{"error": 1}', "not a tgz file")]
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


def test_a_file_of_which_nothing_is_known(
    server: Server, get: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    server.contents["x"] = CONTENT
    server.breaks["x"] = [100_000, 50_000]  # the announced length tells that it broke
    path = get(RemoteFile("c/x.gz", (server.url("x"),)))
    assert path.read_bytes() == CONTENT
    assert wanted_ranges(server) == [None, None, None]  # nothing tells that a rest fits
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
    assert file.digest in text
    assert hashlib.sha256(server.contents["bad2"]).hexdigest() in text
    assert "127.0.0.1:9" in text
    assert DATA_VARIABLE in text
    assert not (tmp_path / "cache" / "c" / "x.gz").exists()


def test_a_silent_server_times_out(get: Callable[..., Path]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        file = RemoteFile("c/x.gz", (url,), 10, "0" * 64)
        assert "timed out. (read timeout=0.2)" in message(
            lambda: get(file, attempts=1, timeout=0.2)
        )


def test_full_device(server: Server, get: Callable[..., Path], tmp_path: Path) -> None:
    server.contents["x"] = CONTENT
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        text = message(lambda: get(remote(server, "x")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"x.gz: cannot be written: {os.strerror(errno.EFBIG)}; choose another" in text
    assert no_leftovers(tmp_path)
    assert len(server.requests) == 1


def test_cache_that_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    text = message(lambda: fetch_file(remote(server, "x"), cache=tmp_path / "file", progress=False))
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
    path = fetch_file(remote(server, "x"))
    assert path.is_relative_to(tmp_path / "xdg" / "annotated-transformer")
    shown = capfd.readouterr().err
    assert f"c/x.gz: from {server.url('x')}" in shown
    assert "100%" in shown  # the progress bar


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
    for part in (str(copy), file.digest, hashlib.sha256(CONTENT[:-1]).hexdigest()):
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
    assert f"{server.url('lies')}: unexpected contents: damaged or cut short" in text
    assert no_leftovers(tmp_path)
    assert get(unknown(server, "lies", "good")).read_bytes() == CONTENT


def test_a_length_too_large(server: Server, get: Callable[..., Path], tmp_path: Path) -> None:
    server.contents["lies"] = server.contents["good"] = b"a plain text" * 1000
    server.lengths["lies"] = 15000
    text = message(lambda: get(unknown(server, "lies", path="c/x.txt")))
    assert "c/x.txt" in text
    assert f"{server.url('lies')}: Connection broken: IncompleteRead(12000 bytes read, 3000" in text
    assert not (tmp_path / "cache/c/x.txt").exists()
    path = get(unknown(server, "lies", "good", path="c/x.txt"))
    assert path.read_bytes() == server.contents["good"]


def test_a_length_that_is_no_number(server: Server, get: Callable[..., Path]) -> None:
    server.contents["lies"] = server.contents["good"] = CONTENT
    server.lengths["lies"] = "many"
    assert get(remote(server, "lies", "good")).read_bytes() == CONTENT


def test_a_published_size_is_compared(server: Server, get: Callable[..., Path]) -> None:
    server.contents["x"] = b"a plain text"
    file = dataclasses.replace(unknown(server, "x", path="c/x.txt"), size=13)
    assert "expected 13 bytes, found 12" in message(lambda: get(file))
    assert get(dataclasses.replace(file, size=12)).read_bytes() == b"a plain text"


FALSE_RANGES = [
    (f"bytes {BLOCK + 1}-{SIZE - 1}/{SIZE}", CONTENT[BLOCK + 1 :]),
    (f"bytes 0-{SIZE - 1}/{SIZE}", CONTENT),
    (f"bytes {BLOCK}-{SIZE - 1}/{SIZE}", CONTENT),
    (f"bytes {BLOCK}-{SIZE}/{SIZE}", CONTENT[BLOCK:] + b"!"),
    (f"bytes {BLOCK}-{SIZE - 1}/{SIZE}", CONTENT[BLOCK + 1000 :] + bytes(1000)),
    (f"bytes {BLOCK}-{BLOCK + 999}/{SIZE}", CONTENT[BLOCK : BLOCK + 1000]),
    (f"lines {BLOCK}-{'9' * 5000}/*", CONTENT[BLOCK - 1 : -1]),
    ("", b""),
]


@pytest.mark.parametrize(("told", "rest"), FALSE_RANGES)
def test_a_false_rest(server: Server, get: Callable[..., Path], told: str, rest: bytes) -> None:
    """Whatever a server says of a rest and sends as one, the digest decides."""
    server.contents["x"] = server.contents["y"] = CONTENT
    server.ranges["x"], server.rests["x"], server.breaks["x"] = told, rest, [70_000]
    text = message(lambda: get(remote(server, "x"), attempts=2))
    assert f"c/x.gz: download failed ({server.url('x')}: " in text
    server.breaks["x"] = [70_000]
    assert get(remote(server, "x")).read_bytes() == CONTENT  # begun again
    other = dataclasses.replace(remote(server, "x", "y"), path="c/other.gz")
    server.breaks["x"] = [70_000]
    assert get(other, attempts=2).read_bytes() == CONTENT  # from the second source
    expected_ranges = 2 * [None, f"bytes={BLOCK}-"] + [None] + [None, f"bytes={BLOCK}-", None]
    assert wanted_ranges(server) == expected_ranges


def test_a_right_rest_under_a_false_range(server: Server, get: Callable[..., Path]) -> None:
    server.contents["x"], server.breaks["x"] = CONTENT, [70_000]
    server.ranges["x"] = f"bytes */{SIZE}"
    assert get(remote(server, "x"), attempts=2).read_bytes() == CONTENT


@pytest.mark.parametrize("path", ["c/x.gz", "c/x.txt"])
def test_without_a_digest_nothing_is_continued(
    server: Server, get: Callable[..., Path], tmp_path: Path, path: str
) -> None:
    server.contents["x"], server.breaks["x"] = CONTENT, [100_000, 70_000]
    part = tmp_path / "cache" / f"{path}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT[:2000])
    assert get(unknown(server, "x", path=path)).read_bytes() == CONTENT
    assert wanted_ranges(server) == [None, None, None]
    assert files_below(tmp_path / "cache") == [Path(path).name]


def test_no_more_than_the_bound_is_taken(
    server: Server, get: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "MAX_BYTES", SIZE)
    server.contents["x"], server.lengths["x"] = CONTENT, None
    file = unknown(server, "x", path="c/x.txt")
    assert get(file).read_bytes() == CONTENT
    server.contents["y"], server.lengths["y"] = CONTENT + b"!", None
    text = message(lambda: get(unknown(server, "y", path="c/y.txt")))
    assert f"received more than {SIZE} bytes" in text
    assert files_below(tmp_path / "cache") == ["x.txt"]


TAPES: dict[str, Literal["w:gz", "w:bz2", "w:xz"]] = {"tgz": "w:gz", "tbz2": "w:bz2", "txz": "w:xz"}


def packed(kind: str) -> bytes:
    text = random.Random(1).randbytes(20_000)
    pack: dict[str, Callable[[bytes], bytes]] = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
    }
    if kind in pack:
        return pack[kind](text)
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode=TAPES[kind]) as tape:
        info = tarfile.TarInfo("a.de")
        info.size = len(text)
        tape.addfile(info, io.BytesIO(text))
    return output.getvalue()


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "tgz", "tbz2", "txz"])
def test_what_is_packed_is_read_to_its_end(
    server: Server, get: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    content = packed(kind)
    server.contents["good"] = content
    place = len(content) // 2
    flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    for bad in (content[:-5], content[:place], flipped):
        server.contents["bad"] = bad
        text = message(lambda: get(unknown(server, "bad", path=f"c/x.{kind}")))
        assert f"c/x.{kind}: download failed ({server.url('bad')}: " in text
        assert "damaged or cut short" in text
        assert no_leftovers(tmp_path)
    path = get(unknown(server, "bad", "good", path=f"c/x.{kind}"))
    assert path.read_bytes() == content


def test_what_unpacks_to_too_much_is_refused(
    server: Server, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.contents["x"] = gzip.compress(bytes(100_000))
    monkeypatch.setattr(downloads, "MAX_BYTES", 99_999)
    text = message(lambda: get(unknown(server, "x")))
    assert "it unpacks to more than 99999 bytes" in text
    monkeypatch.setattr(downloads, "MAX_BYTES", 100_000)
    assert get(unknown(server, "x")).read_bytes() == server.contents["x"]


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert "XDG_CACHE_HOME" in message(downloads.cache_folder)


FETCH = """
import hashlib, sys
from annotated_transformer.data.downloads import RemoteFile, fetch_file
file = RemoteFile("c/x.gz", (sys.argv[1],), int(sys.argv[2]), sys.argv[3])
print(fetch_file(file, cache=sys.argv[4], progress=False))
"""


def test_processes_that_fetch_the_same_at_once(server: Server, tmp_path: Path) -> None:
    server.contents["x"] = CONTENT
    file = remote(server, "x")
    words = [*file.urls, str(file.size), file.digest, str(tmp_path / "cache")]
    programs = [
        subprocess.Popen([sys.executable, "-c", FETCH, *words], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {program.communicate()[0].strip() for program in programs}
    assert [program.returncode for program in programs] == [0, 0, 0]
    assert paths == {str(tmp_path / "cache/c/x.gz")}
    assert server.requests == [("x", None)]
    assert (tmp_path / "cache/c/x.gz").read_bytes() == CONTENT


def test_a_killed_process_leaves_nothing_that_is_taken_for_the_whole(
    server: Server, get: Callable[..., Path], tmp_path: Path
) -> None:
    server.contents["x"], server.pause = CONTENT, 100_000
    file = remote(server, "x")
    words = [*file.urls, str(file.size), file.digest, str(tmp_path / "cache")]
    part = tmp_path / "cache/c/x.gz.part"
    with subprocess.Popen([sys.executable, "-c", FETCH, *words]) as program:
        while not (part.exists() and part.stat().st_size):
            assert program.poll() is None
            time.sleep(0.01)
        program.kill()
    server.pause = 0
    held = part.stat().st_size
    assert 0 < held < SIZE
    assert files_below(tmp_path / "cache") == ["x.gz.part"]
    assert get(file).read_bytes() == CONTENT
    assert wanted_ranges(server) == [None, f"bytes={held}-"]
    assert files_below(tmp_path / "cache") == ["x.gz"]
