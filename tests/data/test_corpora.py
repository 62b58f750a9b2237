"""Tests of the readers of corpora, and of loading them by name."""

import dataclasses
import gzip
import hashlib
import io
import itertools
import os
import re
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.data import corpora
from annotated_transformer.data.corpora import (
    CORPORA,
    FILES,
    language_codes,
    load_corpus,
    read_parallel,
    read_segments,
    text_format,
    text_of_lines,
)
from annotated_transformer.data.downloads import DATA_VARIABLE, RemoteFile
from annotated_transformer.data.files import CorpusError
from annotated_transformer.engine.texts import line_location
from tests.data.small import message

MIRROR = Path(os.environ.get(DATA_VARIABLE, "nowhere"))  # the tests below unset it

# ------------------------------------------------------------------------- reading


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture(autouse=True)
def _no_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.mark.parametrize("packed", [False, True])
def test_named_pipes_are_read_and_counted_once(tmp_path: Path, packed: bool) -> None:
    contents = {"de": b"eins\n\ndrei\n", "en": b"one\ntwo\nthree\n"}
    paths = []
    for language, content in contents.items():
        contents[language] = gzip.compress(content) if packed else content
        paths.append(tmp_path / f"pipe.{language}")
        os.mkfifo(paths[-1])
        write_bytes = partial(paths[-1].write_bytes, contents[language])
        threading.Thread(target=write_bytes, daemon=True).start()
    text = read_parallel(*paths)
    assert list(text) == [("eins", "one"), ("drei", "three")]
    assert text.checksums == tuple(
        (f"pipe.{language}", hashlib.sha256(content).hexdigest())
        for language, content in contents.items()
    )


def test_a_long_second_line_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.de", b"kurz\n" + b"x" * 10_000_000 + b"\n")
    target = write(tmp_path / "a.en", b"short\nlong\n")
    assert f"{source}, line 2: longer than" in message(lambda: read_parallel(source, target))


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
    assert text.report() == "3 of 5 pairs dropped with a blank side: lines 2, 3, 4"
    kept = read_parallel(source, target, drop_blank=False)
    assert len(kept) == 5
    assert kept.blank == ()
    assert kept.report() == ""


def test_lines_that_are_counted_without_others_are_told(tmp_path: Path) -> None:
    text = b"<url>u</url>\na\n\nb\n"
    paths = [write(tmp_path / f"train.tags.de-en.{side}", text) for side in ("de", "en")]
    pairs = read_parallel(*paths)
    assert pairs.report() == "1 of 3 pairs dropped with a blank side: line 2 (without tags)"
    assert line_location(pairs, 1, 0) == "train.tags.de-en.de (without tags), line 3"
    both = corpora._joined([pairs, pairs])
    assert both.report().endswith("lines 2, 5 (of all files together)")
    assert line_location(both, 3, 1) == "train.tags.de-en.en (of all files together), line 6"
    paths[0].write_bytes(text + b"c\n")
    told = message(lambda: read_parallel(*paths))
    assert f"{paths[0]} (without tags) has 4 lines and {paths[1]} (without tags) has 3" in told


def test_a_bare_ampersand_is_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "x.xml", segments(("1", "R&region &amp; M&notes &#38;&#x26;")).encode())
    assert read_segments(path) == [("7/1", "R&region & M&notes &&")]


def test_lists_of_lines_are_a_text() -> None:
    text = text_of_lines(["ein Hund", "ja"], ["a dog", "yes"], split="val")
    assert list(text) == [("ein Hund", "a dog"), ("ja", "yes")]
    assert text.languages == ("de", "en")
    other = text_of_lines(["ein Hund", "nein"], ["a dog", "yes"], split="val")
    changed = [a != b for a, b in zip(text.checksums, other.checksums, strict=True)]
    assert changed == [True, False]


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (["a"], [], "1 lines and 0 translations; give as many of both"),
        ([], [], "0 lines and 0 translations"),
        (["a", "b"], ["a", " "], "pair 2 has a blank side; leave it out"),
        (["a", "b"], ["a", "b\r\n"], "pair 2 holds a line break; strip or split it"),
        (["a", "b\n"], ["a", "b"], "pair 2 holds a line break"),
        ("ab", ["a", "b"], "two lists of strings, not a string"),
        (["a", "b"], "ab", "two lists of strings, not a string"),
    ],
)
def test_lists_that_are_no_text(source: Sequence[str], target: Sequence[str], words: str) -> None:
    with pytest.raises((CorpusError, TypeError), match=words):
        text_of_lines(source, target)


def test_only_blank_lines_leave_nothing(tmp_path: Path) -> None:
    source, target = write(tmp_path / "a.de", b"a\n"), write(tmp_path / "a.en", b"\n")
    assert "every pair has a blank side" in message(lambda: read_parallel(source, target))


def test_many_blank_lines_are_not_all_listed(tmp_path: Path) -> None:
    source = write(tmp_path / "a.de", b"a\n" * 20)
    target = write(tmp_path / "a.en", b"A\n" + b"\n" * 19)
    report = read_parallel(source, target).report()
    assert report.endswith("lines 2, 3, 4, 5, 6, ...")


@given(*[st.from_regex(r"[A-Za-z]{2,8}", fullmatch=True)] * 2)
def test_two_codes_of_letters_are_a_pair(source: str, target: str) -> None:
    if source.lower() == target.lower():
        assert "two different languages" in message(lambda: language_codes(f"{source}-{target}"))
    else:
        assert language_codes(f"{source}-{target}") == (source, target)


@pytest.mark.parametrize(
    "pair",
    ["", "-", "de", "de-", "-en", "de-de", "de-DE", "de-en-fr", "de_en", "de-en\n", "d-en",
     "de-/../../../escaped", "../de-en", "de-e/n", "de-..", "de-en\0", "de-\u0435n",
     "de-" + "e" * 9],
)  # fmt: skip
def test_what_is_no_pair(pair: str) -> None:
    text = message(lambda: language_codes(pair))
    assert repr(pair) in text
    assert "such as de-en" in text


@given(st.text(), st.sampled_from(["/", "\\", ".", "\0", " ", ":", "\n", "\u2044"]), st.text())
def test_a_path_is_no_language(before: str, sign: str, after: str) -> None:
    for pair in (f"de-{before}{sign}{after}", f"{before}{sign}{after}-de"):
        assert "two different languages" in message(partial(language_codes, pair))


def segments(*rows: tuple[str, str], doc: str = "7") -> str:
    """Return a test set of one document."""
    inside = "".join(f'<seg id="{n}"> {text} </seg>\n' for n, text in rows)
    return f'<mteval>\n<doc docid="{doc}" genre="x">\n<title>T</title>\n{inside}</doc>\n</mteval>\n'


@settings(max_examples=50)
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
        ("<html>404</html>", "an HTML page, not the data"),
        ("<talk>404</talk>", "has no <seg>"),
        ('<seg id="1">a\n<seg id="2">b</seg>', "line 1: a segment lacks"),
        ('<seg id="1">a</seg>\n<seg id="2">b', "line 2: a segment lacks"),
        ("\n\nb</seg>", "line 3: a segment lacks"),
        ('<seg id="1">a</seg>\n<seg id="1">b</seg>', "line 2: segment /1 occurs twice"),
    ],
)
def test_broken_segments_name_their_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "set.xml").write_text(text)
    with pytest.raises(CorpusError, match=words) as error:
        read_parallel(tmp_path / "set.xml", tmp_path / "set.xml")
    assert "\n" not in str(error.value)


def test_names_without_quotes_and_with_points(tmp_path: Path) -> None:
    path = tmp_path / "set.sgm"
    path.write_text(
        "<doc docid=a sysid=src><seg id=1.1>x</seg><seg id='1.2'>y</seg></doc>"
        '<doc sysid="ref" docid="b c"><seg id="1">z</seg></doc>'
    )
    assert [name for name, _ in read_segments(path)] == ["a/1.1", "a/1.2", "b c/1"]


def test_tags_without_end_cost_no_more_than_others(tmp_path: Path) -> None:
    path = tmp_path / "set.sgm"
    path.write_text("<doc " * 50_000)  # quadratic time would be minutes
    with pytest.raises(CorpusError, match="has no <seg>"):
        read_segments(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.de", "lines"),
        ("a.xml.de", "lines"),
        ("a.de.gz", "lines"),
        ("a.xml", "segments"),
        ("a.sgm.xz", "segments"),
        ("a.xml.gz", "segments"),
        ("train.tags.de-en.de", "tags"),
        ("train.tags.de-en.de.bz2", "tags"),
    ],
)
def test_formats_are_known_by_the_name(name: str, kind: str) -> None:
    assert text_format(Path("train.tags.x/b.xml") / name) == kind


def test_segments_must_have_the_same_names(tmp_path: Path) -> None:
    for language, numbers in (("de", "123"), ("en", "124")):
        rows = [(n, f"{language} {n}") for n in numbers]
        (tmp_path / f"set.{language}.xml").write_text(segments(*rows))
    with pytest.raises(CorpusError, match=r"segment 3 is 7/4, but in .* it is 7/3"):
        read_parallel(tmp_path / "set.de.xml", tmp_path / "set.en.xml")


def test_tags_of_talks_are_no_text(tmp_path: Path) -> None:
    for language in ("de", "en"):
        text = f"<url>u</url>\n<title>t</title>\n {language} 1 \n<speaker>s\n{language} 2\n"
        with gzip.open(tmp_path / f"train.tags.de-en.{language}.gz", "wt") as file:
            file.write(text)
    paths = [tmp_path / f"train.tags.de-en.{language}.gz" for language in ("de", "en")]
    pairs = read_parallel(*paths)
    assert (pairs.source, pairs.target) == (("de 1", "de 2"), ("en 1", "en 2"))


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


REAL = sorted(
    path
    for folder in ("multi30k", "iwslt", "wmt")
    for path in (MIRROR / folder).rglob("*.de*.gz")
    if re.search(r"\.de(\.xml|\.sgm)?\.gz$", path.name)
)


def real_counts() -> dict[str, int]:
    """Return the files of the mirror's table with their lines or segments; none without it."""
    try:
        table = (MIRROR / "README.md").read_text(encoding="utf-8")
    except OSError:
        return {}
    row = r"^\| `((?:multi30k|iwslt|wmt)/[^`]+\.gz)` \| \w+ \| (\d+)(?: seg)? \|"
    return {name: int(count) for name, count in re.findall(row, table, re.MULTILINE)}


COUNTS = real_counts()


@pytest.mark.skipif(not REAL, reason="no mirror of the corpora")
@pytest.mark.parametrize("source", REAL, ids=lambda path: path.relative_to(MIRROR).as_posix())
def test_real_files_are_read_whole(source: Path) -> None:
    target = source.with_name(re.sub(r"\.de((?:\.xml|\.sgm)?\.gz)$", r".en\1", source.name))
    text = read_parallel(source, target, drop_blank=False)
    assert all(line.strip() for side in (text.source, text.target) for line in side)
    for path in (source, target):
        assert len(text) == COUNTS.get(path.relative_to(MIRROR).as_posix(), len(text))
    if source.name.endswith(".xml.gz"):
        assert not any("<" in line or "&amp;" in line for line in text.source + text.target)


@pytest.mark.skipif(not COUNTS, reason="no mirror of the corpora, or none with a table")
def test_no_real_file_is_left_out() -> None:
    read = {path.relative_to(MIRROR).as_posix() for path in REAL}
    assert read == {name for name in COUNTS if re.search(r"\.de(\.xml)?\.gz$", name)}
    assert 2 * len(read) == len(COUNTS)


def test_files_are_named_with_their_checksums(tmp_path: Path) -> None:
    source, target = write(tmp_path / "a.de.gz", b"a\n"), write(tmp_path / "a.en", b"A\n")
    text = read_parallel(source, target, languages=("xx", "yy"), name="mine", split="dev")
    assert (text.name, text.split, text.languages) == ("mine", "dev", ("xx", "yy"))
    assert dict(text.checksums) == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (source, target)
    }
    assert len(text.head(0)) == 0
    assert dataclasses.replace(text, blank=(2,)).head(1).report() == ""
    assert dataclasses.replace(text, blank=(1,)).head(1).line_numbers() == (2,)


# ---------------------------------------------------------------------- one door


def test_the_table_of_multi30k() -> None:
    names = [path.split("/")[1] for path in FILES if path.startswith("multi30k/")]
    assert {name.split(".")[0] for name in names} == set(CORPORA["multi30k"])
    assert {name.split(".")[1] for name in names} == {"de", "en", "fr", "cs"}
    for name in names:
        file = FILES[f"multi30k/{name}"]
        assert len({url.split("/")[2] for url in file.urls}) >= 2
        assert all(url.endswith(f"/{name}") for url in file.urls)
        assert file.digest or name.startswith("test_2018_flickr")


def test_the_table_of_files() -> None:
    for path, file in FILES.items():
        assert file.path == path
        assert re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{32}|", file.digest)
        assert file.size >= 0
        assert file.urls
        assert all(re.fullmatch(r"https?://[\w.-]+/[\w./@-]+", url) for url in file.urls)
        assert file.digest or not any(url.startswith("http:") for url in file.urls)
    digests = [file.digest for file in FILES.values() if file.digest]
    assert len(set(digests)) == len(digests)
    used = {
        file.path
        for name, splits in CORPORA.items()
        for split in splits
        for source, target in itertools.permutations(("de", "en", "fr", "cs"), 2)
        for parts in parts_of(name, source, target, split)
        for file, _ in parts
    }
    assert used == set(FILES)


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """Return a mirror of three lines in each file of Multi30k."""
    (tmp_path / "multi30k").mkdir()
    lines = {"de": b"eins\n\ndrei\n", "en": b"one\ntwo\nthree\n", "fr": b"un\ndeux\ntrois\n"}
    for split in ("train", "val"):
        for language, content in lines.items():
            path = tmp_path / f"multi30k/{split}.{language}.gz"
            path.write_bytes(gzip.compress(content, mtime=0))
    return tmp_path


def known(folder: Path, path: str) -> RemoteFile:
    """Return a file of a folder as one that is known by its checksum."""
    content = (folder / path).read_bytes()
    return RemoteFile(path, (), len(content), hashlib.sha256(content).hexdigest())


def parts_of(
    name: str, source: str, target: str, split: str
) -> list[tuple[corpora.Place, corpora.Place]]:
    """Return where the parts of a split are; nothing if there are none."""
    try:
        return [] if name == "grammar" else corpora._places(name, source, target, split)
    except CorpusError:
        return []


def test_load_corpus_by_the_mirror(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [path.relative_to(mirror).as_posix() for path in mirror.rglob("*.gz")]
    files = {path: known(mirror, path) for path in paths}
    monkeypatch.setattr(corpora, "FILES", files)
    with pytest.raises(CorpusError, match="multi30k train: has 3 lines, but should have 29000"):
        load_corpus("multi30k", "de-en", "train", mirror=mirror)
    monkeypatch.setitem(corpora.SOURCES["corpora"]["multi30k"], "lines", {"train": 3, "val": 3})
    text = load_corpus("multi30k", "de-en", "train", mirror=mirror)
    assert list(text) == [("eins", "one"), ("drei", "three")]
    assert text.blank == (2,)
    assert dict(text.checksums)["train.de.gz"] == files["multi30k/train.de.gz"].digest
    assert text.origin.startswith("multi30k/dataset, commit ")
    back = load_corpus("multi30k", "fr-de", "val", mirror=mirror, size=2)
    assert list(back) == [("un", "eins"), ("deux", "")]
    assert message(lambda: load_corpus("multi30k", "cs-de", "val", mirror=mirror)) == (
        "multi30k: val does not exist for cs and de"
    )


def test_multi30k_is_in_every_pair_that_its_files_make() -> None:
    for split in CORPORA["multi30k"]:
        there = {path[-5:-3] for path in FILES if path.startswith(f"multi30k/{split}.")}
        for source, target in itertools.permutations(("de", "en", "fr", "cs"), 2):
            parts = parts_of("multi30k", source, target, split)
            assert bool(parts) == ({source, target} <= there)
    assert sum(path.endswith(".cs.gz") for path in FILES) == 4


def archive(path: Path, members: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tape:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tape.addfile(info, io.BytesIO(text.encode()))


@pytest.mark.parametrize(("year", "last"), [(2014, 2012), (2016, 2014), (2017, 2015)])
def test_iwslt_from_its_archive(
    year: int, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {}
    for language in ("de", "en"):
        talks = f"<url>u</url>\n{language} 1\n\n{language} 3\n"
        members[f"de-en/train.tags.de-en.{language}"] = talks
        for name in ("dev2010", *(f"tst{n}" for n in range(2010, last + 1))):
            text = segments(("1", f"{language} {name}"))
            members[f"de-en/IWSLT{year % 100}.TED.{name}.de-en.{language}.xml"] = text
    archive(tmp_path / f"iwslt{year}/de-en.tgz", members)
    if year == 2017:  # the real archive's checksum is known
        refused = message(lambda: load_corpus("iwslt2017", mirror=tmp_path))
        assert "altered or cut short" in refused
    file = known(tmp_path, f"iwslt{year}/de-en.tgz")
    monkeypatch.setitem(corpora.FILES, file.path, file)
    name = f"iwslt{year}"
    monkeypatch.setitem(corpora.SOURCES["corpora"][name], "pairs", ["de-en"])  # in one direction
    train = load_corpus(name, "en-de", mirror=tmp_path, cache=tmp_path / "c")
    assert list(train) == [("en 1", "de 1"), ("en 3", "de 3")]
    assert train.blank == (2,)
    test = load_corpus(name, "de-en", "test", mirror=tmp_path, cache=tmp_path / "c")
    assert list(test) == [(f"de tst{n}", f"en tst{n}") for n in range(2010, last + 1)]
    assert len(test.checksums) == 2 * len(test)
    for split in CORPORA[name]:
        assert load_corpus(name, "de-en", split, mirror=tmp_path, cache=tmp_path / "c")
    assert "does not exist for fr and en" in message(lambda: load_corpus(name, "fr-en"))


@pytest.mark.parametrize("pair", ["de-en", "en-de", "fr-en", "en-fr"])
def test_wmt14_from_its_archives(
    pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = pair.replace("en", "").strip("-")
    texts = {
        "training-parallel-europarl-v7.tgz": ["training/europarl-v7.{}-en.{}"],
        "training-parallel-commoncrawl.tgz": ["commoncrawl.{}-en.{}"],
        "training-parallel-nc-v9.tgz": ["training/news-commentary-v9.{}-en.{}"],
    }
    for name, members in texts.items():
        content = {
            member.format(other, language): f"{language} {name}\n"
            for member in members
            for language in (other, "en")
        }
        archive(tmp_path / "wmt14" / name, content)
    held = {f"dev/newstest2013.{language}": f"{language} 13\n" for language in (other, "en")}
    for direction in ((other, "en"), ("en", other)):
        for kind, language in zip(("src", "ref"), direction, strict=True):
            text = segments(("1", f"{language} {kind}"))
            held[f"dev/newstest2014-{other}en-{kind}.{language}.sgm"] = text
    archive(tmp_path / "wmt14/dev.tgz", held)
    for path in [path for path in FILES if path.startswith("wmt14/")]:
        monkeypatch.setitem(corpora.FILES, path, known(tmp_path, path))

    def load(split: str) -> list[tuple[str, str]]:
        return list(load_corpus("wmt14", pair, split, mirror=tmp_path, cache=tmp_path / "c"))

    source, target = pair.split("-")
    assert load("train") == [(f"{source} {name}", f"{target} {name}") for name in texts]
    assert load("val") == [(f"{source} 13", f"{target} 13")]
    assert load("test") == [(f"{source} src", f"{target} ref")]
    assert "de and fr" in message(lambda: load_corpus("wmt14", "de-fr"))


def test_parts_are_counted_on(tmp_path: Path) -> None:
    parts = []
    for n, lines in enumerate(("a\n\nc\n", "\ne\n")):
        for language in ("de", "en"):
            (tmp_path / f"{n}.{language}").write_text(lines)
        parts.append(read_parallel(tmp_path / f"{n}.de", tmp_path / f"{n}.en"))
    text = corpora._joined(parts)
    assert text.source == ("a", "c", "e")
    assert text.blank == (2, 4)
    assert [name for name, _ in text.checksums] == ["0.de", "0.en", "1.de", "1.en"]


@pytest.mark.skipif(not MIRROR.is_dir(), reason="no mirror of the corpora")
def test_the_published_sums_of_multi30k_are_those_of_the_files() -> None:
    for split, language in (("train", "de"), ("val", "en"), ("test_2016_flickr", "de")):
        text = load_corpus("multi30k", "de-en", split, mirror=MIRROR)
        assert len(text) == corpora.SOURCES["corpora"]["multi30k"]["lines"][split], language


def test_load_corpus_grammar_in_both_directions() -> None:
    there = load_corpus("grammar", "de-en", "val", size=20)
    back = load_corpus("grammar", "en-de", "val", size=20)
    assert (there.source, there.target) == (back.target, back.source)
    assert there.languages == ("de", "en")
    assert load_corpus("grammar", split="val", size=20, seed=1).source != there.source


def test_the_grammar_is_the_same_in_another_process() -> None:
    code = (
        "from annotated_transformer.data.corpora import load_corpus;"
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
        ({"name": "europarl"}, "grammar, multi30k, iwslt2014"),
        ({"name": "grammar", "split": "dev"}, "train, val, test"),
        ({"name": "multi30k", "split": "test"}, "test_2016_flickr"),
        ({"name": "multi30k", "pair": "it-en"}, "two of de, en, fr, cs"),
        ({"name": "multi30k", "pair": "en-en"}, "two of de, en, fr, cs"),
        ({"name": "grammar", "pair": "de"}, "two of de, en, such as de-en"),
        ({"name": "grammar", "size": 0}, "at least 1"),
    ],
)
def test_load_corpus_refuses(arguments: dict[str, object], expected: str) -> None:
    assert expected in message(lambda: load_corpus(**arguments))  # type: ignore[arg-type]


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, annotated_transformer.data.corpora;"
        "heavy = ('torch', 'spacy', 'tokenizers', 'matplotlib', 'pooch', 'requests');"
        "print([m for m in heavy if m in sys.modules])"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "[]"
