"""Tests of the readers, of the downloads, and of the one door to all corpora."""

import dataclasses
import errno
import gzip
import hashlib
import io
import itertools
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.translation import corpora
from annotated_transformer.translation.corpora import (
    CORPORA,
    DATA_VARIABLE,
    MULTI30K,
    CorpusError,
    RemoteFile,
    fetch,
    load_corpus,
    read_lines,
    read_parallel,
    read_segments,
)

MIRROR = Path(os.environ.get(DATA_VARIABLE, "nowhere"))  # the tests below unset it

# ------------------------------------------------------------------------- reading


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


# Anything but the two characters that end lines.
line_text = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]))


@settings(max_examples=60, deadline=None)
@given(st.lists(line_text, min_size=1), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_reading_gives_back_what_was_written(lines: list[str], end: str, packed: bool) -> None:
    lines = [line.removeprefix("\ufeff") if n == 0 else line for n, line in enumerate(lines)]
    content = "".join(line + end for line in lines).encode()
    name = "x.gz" if packed else "x.txt"
    folder = Path(os.environ["PYTEST_TMP"])
    assert read_lines(write(folder / name, content)) == lines


@pytest.fixture(autouse=True)
def _folder_for_hypothesis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    odd = "a\u2028b\x85c\x0bd\x0ce\x1cf\u2029g\rh"
    path = write(tmp_path / "x", f"{odd}\n\"q\"\t'r'\nlast".encode())
    assert read_lines(path) == [odd, "\"q\"\t'r'", "last"]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    assert read_lines(write(tmp_path / "x", b"\xef\xbb\xbfa\nb\n")) == ["a", "b"]


def test_gzip_is_recognised_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "no_ending"
    path.write_bytes(gzip.compress(b"a\n"))
    assert read_lines(path) == ["a"]


def message(action: Callable[[], object]) -> str:
    """Return the text of the error that an action ends with, which must be one line."""
    with pytest.raises(CorpusError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_invalid_utf8_names_line_and_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "x.de", b"good\nba\xfcd\n")
    text = message(lambda: read_lines(path))
    assert f"{path}, line 2" in text
    assert "byte 3 (0xfc)" in text
    packed = write(tmp_path / "x.gz", b"\xff\n")
    assert "line 1: byte 1 (0xff)" in message(lambda: read_lines(packed))


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    assert "no such file" in message(lambda: read_lines(tmp_path / "none"))
    assert "cannot be read" in message(lambda: read_lines(tmp_path))


@pytest.mark.parametrize("cut", [1, 5, 9, 12])
def test_truncated_gzip(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(os.urandom(1000) + b"\n")[:-cut])
    text = message(lambda: read_lines(path))
    assert str(path) in text
    assert "again" in text


def test_damaged_gzip(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b"abc\n" * 50))
    content[-6] ^= 1  # the checksum at its end
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    assert "damaged" in message(lambda: read_lines(path))
    path.write_bytes(b"plain text\n")
    assert "not a gzip file" in message(lambda: read_lines(path))


def test_unequal_line_counts(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a.de", b"x\ny\nz\n"), write(tmp_path / "a.en", b"x\ny\n")
    text = message(lambda: read_parallel(one, two))
    for part in (str(one), str(two), "3 lines", "has 2", "line 3"):
        assert part in text


@pytest.mark.parametrize("empty", [0, 1])
def test_empty_files(tmp_path: Path, empty: int) -> None:
    paths = [write(tmp_path / "a.de", b"x\n"), write(tmp_path / "a.en", b"x\n")]
    paths[empty].write_bytes(b"")
    assert f"{paths[empty]}: the file is empty" in message(lambda: read_parallel(*paths))


def test_an_empty_gzip_is_an_empty_file(tmp_path: Path) -> None:
    paths = write(tmp_path / "a.de.gz", b""), write(tmp_path / "a.en", b"x\n")
    assert "empty" in message(lambda: read_parallel(*paths))
    paths[0].write_bytes(b"")
    assert "empty" in message(lambda: read_parallel(*paths))


def test_blank_lines_are_dropped_in_training_and_kept_in_evaluation(tmp_path: Path) -> None:
    source = write(tmp_path / "a.de", "a\n \t\nc\n\u00a0\ne\n".encode())
    target = write(tmp_path / "a.en", b"A\nB\n\n\nE\n")
    text = read_parallel(source, target)
    assert list(text) == [("a", "A"), ("e", "E")]
    assert text.blank == (2, 3, 4)
    assert text.report() == "3 of 5 pairs dropped, a side is blank: lines 2, 3, 4"
    kept = read_parallel(source, target, drop_blank=False)
    assert len(kept) == 5
    assert kept.blank == ()
    assert kept.report() == ""


def test_only_blank_lines_leave_nothing(tmp_path: Path) -> None:
    source, target = write(tmp_path / "a.de", b"a\n"), write(tmp_path / "a.en", b"\n")
    assert "nothing is left" in message(lambda: read_parallel(source, target))


def test_many_blank_lines_are_not_all_listed(tmp_path: Path) -> None:
    source = write(tmp_path / "a.de", b"a\n" * 20)
    target = write(tmp_path / "a.en", b"A\n" + b"\n" * 19)
    report = read_parallel(source, target).report()
    assert report.endswith("lines 2, 3, 4, 5, 6, ...")


def segments(*rows: tuple[str, str], doc: str = "7") -> str:
    """Return a test set of one document."""
    inside = "".join(f'<seg id="{n}"> {text} </seg>\n' for n, text in rows)
    return f'<mteval>\n<doc docid="{doc}" genre="x">\n<title>T</title>\n{inside}</doc>\n</mteval>\n'


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["C", "Z"])), min_size=1, max_size=5)
)
def test_segments_are_those_of_an_xml_parser(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("xml") / "set.xml"
    rows = [(str(n), escape(text)) for n, text in enumerate(texts, 1)]
    path.write_bytes(segments(*rows).encode())
    expected = [(element.text or "").strip() for element in ElementTree.parse(path).iter("seg")]
    assert [text for _, text in read_segments(path)] == expected == texts
    assert [name for name, _ in read_segments(path)] == [f"7/{n}" for n, _ in rows]


def test_sgml_that_is_no_xml(tmp_path: Path) -> None:
    path = tmp_path / "set.sgm"
    path.write_text(
        "<refset setid='x'>\n<DOC sysid='ref' docid='a'>\n<p>\n<seg id='1'>Q & A\nagain</seg></p>"
        "</DOC>\n<doc docid=b><seg id=1>x &lt; y</seg></doc></refset>"
    )
    assert read_segments(path) == [("a/1", "Q & A again"), ("b/1", "x < y")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<html>404</html>", "has no <seg>"),
        ('<seg id="1">a\n<seg id="2">b</seg>', "line 1: a segment without"),
        ('<seg id="1">a</seg>\n<seg id="2">b', "line 2: a segment without"),
        ("\n\nb</seg>", "line 3: a segment without"),
        ('<seg id="1">a</seg>\n<seg id="1">b</seg>', "line 2: segment /1 is there twice"),
    ],
)
def test_broken_segments_name_their_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "set.xml").write_text(text)
    with pytest.raises(CorpusError, match=words) as error:
        read_parallel(tmp_path / "set.xml", tmp_path / "set.xml")
    assert "\n" not in str(error.value)


def test_segments_must_have_the_same_names(tmp_path: Path) -> None:
    for language, numbers in (("de", "123"), ("en", "124")):
        rows = [(n, f"{language} {n}") for n in numbers]
        (tmp_path / f"set.{language}.xml").write_text(segments(*rows))
    with pytest.raises(CorpusError, match=r"its segment 3 is 7/4, that of .* is 7/3"):
        read_parallel(tmp_path / "set.de.xml", tmp_path / "set.en.xml")


def test_tags_of_talks_are_no_text(tmp_path: Path) -> None:
    for language in ("de", "en"):
        text = f"<url>u</url>\n<title>t</title>\n {language} 1 \n<speaker>s\n{language} 2\n"
        with gzip.open(tmp_path / f"train.tags.de-en.{language}.gz", "wt") as file:
            file.write(text)
    paths = [tmp_path / f"train.tags.de-en.{language}.gz" for language in ("de", "en")]
    text = read_parallel(*paths)
    assert (text.source, text.target) == (("de 1", "de 2"), ("en 1", "en 2"))


def test_the_real_test_sets_of_iwslt() -> None:
    folder = MIRROR / "iwslt" / "iwslt16-xml"
    counts = {  # as the README beside them says
        "TED.dev2010": 887, "TED.tst2010": 1565, "TED.tst2011": 1433, "TED.tst2014": 1305,
        "TEDX.dev2012": 1165, "TEDX.tst2013": 1363, "TEDX.tst2014": 1414,
    }  # fmt: skip
    if not folder.is_dir():
        pytest.skip("no mirror of the corpora")
    for name, count in counts.items():
        paths = [folder / f"IWSLT16.{name}.de-en.{language}.xml.gz" for language in ("de", "en")]
        text = read_parallel(*paths, drop_blank=False)
        assert len(text) == count
        assert not any("<" in line or "&amp;" in line for line in text.source + text.target)


def test_files_are_named_with_their_checksums(tmp_path: Path) -> None:
    source, target = write(tmp_path / "a.de.gz", b"a\n"), write(tmp_path / "a.en", b"A\n")
    text = read_parallel(source, target, languages=("xx", "yy"), name="mine", split="dev")
    assert (text.name, text.split, text.languages) == ("mine", "dev", ("xx", "yy"))
    assert dict(text.checksums) == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (source, target)
    }
    assert len(text.head(0)) == 0


# ----------------------------------------------------------------------- downloads

CONTENT = gzip.compress(random.Random(0).randbytes(300_000), mtime=0)


class Server(ThreadingHTTPServer):
    """A server on the loopback that misbehaves as it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents: dict[str, bytes] = {}
        self.breaks: dict[str, list[int]] = {}  # after how many bytes, one for a request
        self.errors: dict[str, list[int]] = {}  # answers to give before the right one
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
        errors = self.server.errors.get(path, [])
        if errors or path not in self.server.contents:
            self.send_error(errors.pop(0) if errors else 404)
            return
        body, start = self.server.contents[path], 0
        if wanted and not self.server.ignore_range:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if self.server.refuse_range or start >= len(body):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        breaks = self.server.breaks.get(path, [])
        end = start + breaks.pop(0) if breaks else len(body)
        self.wfile.write(body[start:end])

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
    server.contents["good"] = CONTENT
    assert get(remote(server, "long", "good")).read_bytes() == CONTENT


def test_missing_then_second_source(server: Server, get: Callable[..., Path]) -> None:
    server.contents["second"] = CONTENT
    assert get(remote(server, "first", "second")).read_bytes() == CONTENT
    assert server.requests == [("first", None), ("second", None)]


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

    monkeypatch.setattr(corpora, "open", full_open, raising=False)
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


# ---------------------------------------------------------------------- one door


def test_the_table_of_multi30k() -> None:
    assert set(MULTI30K) == set(itertools.product(CORPORA["multi30k"], ("de", "en")))
    for (split, language), file in MULTI30K.items():
        assert file.path == f"multi30k/{split}.{language}.gz"
        assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
        assert len({url.split("/")[2] for url in file.urls}) >= 2
        assert all(url.endswith(f"/{split}.{language}.gz") for url in file.urls)
        assert all(re.search(r"[0-9a-f]{40}", url) for url in file.urls)
    assert len({file.sha256 for file in MULTI30K.values()}) == len(MULTI30K)


def test_load_corpus_by_the_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "multi30k").mkdir()
    files = {}
    for language, content in (("de", b"eins\n\ndrei\n"), ("en", b"one\ntwo\nthree\n")):
        for split in ("train", "val"):
            packed = gzip.compress(content)
            path = f"multi30k/{split}.{language}.gz"
            (tmp_path / path).write_bytes(packed)
            sha256 = hashlib.sha256(packed).hexdigest()
            files[split, language] = RemoteFile(path, (), sha256, len(packed))
    monkeypatch.setattr(corpora, "MULTI30K", files)
    text = load_corpus("multi30k", "de-en", "train", mirror=tmp_path)
    assert list(text) == [("eins", "one"), ("drei", "three")]
    assert text.blank == (2,)
    assert dict(text.checksums)["train.de.gz"] == files["train", "de"].sha256
    back = load_corpus("multi30k", "en-de", "val", mirror=tmp_path, size=2)
    assert list(back) == [("one", "eins"), ("two", "")]


def test_load_corpus_grammar_in_both_directions() -> None:
    there = load_corpus("grammar", "de-en", "val", size=20)
    back = load_corpus("grammar", "en-de", "val", size=20)
    assert (there.source, there.target) == (back.target, back.source)
    assert there.languages == ("de", "en")
    assert load_corpus("grammar", split="val", size=20, seed=1).source != there.source


def test_the_grammar_is_the_same_in_another_process() -> None:
    code = (
        "from annotated_transformer.translation.corpora import load_corpus;"
        "print(load_corpus('grammar', split='test', size=200).checksums)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    got = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    text = load_corpus("grammar", split="test", size=200)
    assert got.stdout.strip() == str(text.checksums)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"name": "europarl"}, "grammar, multi30k"),
        ({"name": "grammar", "split": "dev"}, "train, val, test"),
        ({"name": "multi30k", "split": "test"}, "test_2016_flickr"),
        ({"name": "multi30k", "pair": "fr-en"}, "checksums"),
        ({"name": "grammar", "pair": "de"}, "de-en or en-de"),
        ({"name": "grammar", "size": 0}, "at least 1"),
    ],
)
def test_load_corpus_refuses(arguments: dict[str, object], expected: str) -> None:
    assert expected in message(lambda: load_corpus(**arguments))  # type: ignore[arg-type]


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, annotated_transformer.translation.corpora;"
        "print([m for m in ('torch', 'spacy', 'tokenizers', 'matplotlib') if m in sys.modules])"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "[]"
