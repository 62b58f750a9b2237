"""Tests of the archives, of the streams, of the rules, and of sides that drift."""

import codecs
import gzip
import itertools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.translation import cleaning
from annotated_transformer.translation.cleaning import (
    BLOCK,
    LONGEST_LINE,
    DriftCheck,
    Report,
    Rules,
    Seen,
    clean,
    fingerprints,
    stream_lines,
    stream_sides,
)
from annotated_transformer.translation.corpora import read_lines, read_parallel
from annotated_transformer.translation.downloads import DATA_VARIABLE, CorpusError

DATA = os.environ.get(DATA_VARIABLE)


def message(action: Callable[[], object]) -> str:
    """Return the text of the error that an action ends with, which must be one line."""
    with pytest.raises(CorpusError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text


# ------------------------------------------------------------------------- streams


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


texts = st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])))


@settings(max_examples=60)
@given(texts, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_a_stream_has_the_lines_of_the_list(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, packed: bool, bom: bool
) -> None:
    content = end.join(lines).encode()
    if content.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return
    folder = tmp_path_factory.mktemp("stream")
    path = write(folder / ("x.gz" if packed else "x"), codecs.BOM_UTF8 * bom + content)
    assert list(stream_lines(path)) == read_lines(path)


def test_bad_bytes_are_carried_along(tmp_path: Path) -> None:
    lines = list(stream_lines(write(tmp_path / "x", b"a\xffb\n\xe4\nok")))
    assert lines == ["a\udcffb", "\udce4", "ok"]


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gz", b"short\n" + b"a" * (LONGEST_LINE + 1))
    assert "line 2: longer than" in message(lambda: list(stream_lines(path)))
    path = write(tmp_path / "y", b"a" * (LONGEST_LINE - 1) + b"\nb")
    assert [len(line) for line in stream_lines(path)] == [LONGEST_LINE - 1, 1]
    for end in (b"\n", b"\r\n"):
        path = write(tmp_path / "z", b"a" * LONGEST_LINE + end + b"b")
        assert [len(line) for line in stream_lines(path)] == [LONGEST_LINE, 1]
        path = write(tmp_path / "z", b"a" * (LONGEST_LINE + 1) + end + b"b")
        assert "line 1: longer than" in message(lambda path=path: list(stream_lines(path)))


@pytest.mark.parametrize("page", [b"<!DOCTYPE html>\n<p>", b"\xef\xbb\xbf \n<HTML><p>"])
@pytest.mark.parametrize("name", ["x.de", "x.gz"])
def test_a_page_is_no_text(tmp_path: Path, page: bytes, name: str) -> None:
    text = message(lambda: list(stream_lines(write(tmp_path / name, page))))
    assert "HTML page" in text
    assert str(tmp_path / name) in text


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no such file" in message(lambda: list(stream_lines(tmp_path / "none")))
    assert "cannot be read" in message(lambda: list(stream_lines(tmp_path)))
    path = tmp_path / "x.gz"
    for cut in (-1, -9, 12):
        path.write_bytes(gzip.compress(os.urandom(900) + b"\n")[:cut])
        assert "damaged gzip" in message(lambda: list(stream_lines(path)))


def test_sides_are_opened_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.de").write_text("<b> is text here\n a\n")
    (tmp_path / "train.tags.de-en.en").write_text("<title>t\n b \n<url>\nc\n")
    (one, first), (two, second) = stream_sides(tmp_path / "a.de", tmp_path / "train.tags.de-en.en")
    assert (one, two) == ("a.de", "train.tags.de-en.en (without tags)")
    assert list(first) == ["<b> is text here", " a"]
    assert list(second) == ["b", "c"]
    (tmp_path / "x.sgm").write_text("<doc docid=1><seg id=1>d</seg>\n<seg id=2></seg></doc>")
    (one, first), (two, second) = stream_sides(tmp_path / "x.sgm", tmp_path / "a.de")
    assert (one, two) == ("x.sgm (segments alone)", "a.de")
    assert (list(first), list(second)) == (["d", ""], ["<b> is text here", " a"])
    (tmp_path / "x.sgm").write_text("<doc docid=1><seg id=1>d")
    assert "segment without" in message(lambda: stream_sides(tmp_path / "x.sgm", tmp_path / "a.de"))


# ---------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("ein Satz", "a sentence", ""),
        ("größer", "ﬁne 😀", ""),
        ("gro\udcdfer", "fine", "broken characters"),
        ("fine", "bro\ufffdken", "broken characters"),
        ("", "fine", "blank"),
        ("fine", "\u3000\t", "blank"),
        ("a " * 201, "b " * 201, "too long"),
        ("a " * 200, "b " * 200, ""),
        ("a", "b b b b", ""),
        ("a", "b b b b b", "length ratio"),
        ("a a a a a", "b", "length ratio"),
    ],
)
def test_reasons(source: str, target: str, reason: str) -> None:
    assert Rules().reason(source, target) == reason


numbers = st.integers(0, 2**64 - 1) | st.integers(0, 20)


@given(st.lists(st.lists(numbers)))
def test_seen_is_a_set(blocks: list[list[int]]) -> None:
    seen, known = Seen(), set[int]()
    for block in blocks:
        expected = []
        for number in block:
            expected.append(number not in known)
            known.add(number)
        assert seen.add(np.array(block, dtype=np.uint64)).tolist() == expected
        assert len(seen) == len(known)
        sizes = [len(run) for run in seen.runs]
        assert all(a > 2 * b for a, b in itertools.pairwise(sizes))
    probe = np.array([3, 7, 2**63], dtype=np.uint64)
    assert seen.known(probe).tolist() == [int(p) in known for p in probe]


def test_fingerprints_tell_pairs_apart() -> None:
    pairs = [("a", "b"), ("ab", ""), ("", "ab"), ("a", "b"), ("b", "a"), ("\udcff", "b")]
    marks = fingerprints(pairs).tolist()
    assert marks[0] == marks[3]
    assert len(set(marks)) == 5
    assert fingerprints([]).tolist() == []


def cleaned(
    pairs: Sequence[tuple[str, str]], **options: Any
) -> tuple[list[tuple[str, str]], Report]:
    report = Report()
    source, target = ([pair[side] for pair in pairs] for side in (0, 1))
    return list(clean(("s", source), ("t", target), report, **options)), report


@given(st.lists(st.tuples(*[st.sampled_from(["a", " a ", "b c", "", "d " * 9, "\udc80"])] * 2)))
def test_cleaning_is_what_the_rules_say_line_by_line(pairs: list[tuple[str, str]]) -> None:
    kept, report = cleaned(pairs)
    expected, before = [], set()
    for a, b in pairs:
        pair = a.strip(), b.strip()
        if not Rules().reason(*pair) and pair not in before:
            expected.append(pair)
        before.add(pair)
    assert kept == expected
    assert report.pairs == len(pairs)
    assert report.kept == len(kept)


def test_the_report_says_why_and_where() -> None:
    pairs = [("a", "A"), ("", "B"), ("a", "A"), ("c", ""), ("d", "D")]
    _, report = cleaned(pairs)
    assert list(report.lines()) == [
        "2 of 5 pairs kept",
        "  2 dropped (40.00%), blank, first s, line 2",
        "  1 dropped (20.00%), duplicate, first s, line 3",
    ]
    assert len(cleaned(pairs, rules=Rules(keep_duplicates=True))[0]) == 3


def test_duplicates_are_found_across_texts_and_blocks() -> None:
    seen = Seen()
    pairs = [(f"a {n}", f"b {n}") for n in range(BLOCK + 5)]
    kept, report = cleaned([*pairs, pairs[3]], seen=seen)
    assert kept == pairs
    assert report.first == {"duplicate": f"s, line {BLOCK + 6}"}
    assert cleaned(pairs[:7], seen=seen)[0] == []


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("size", [3, BLOCK, BLOCK + 1])
def test_unequal_counts(extra: int, size: int) -> None:
    sides = [["x"] * size, ["y"] * size]
    sides[extra].append("z")
    names = ("t", "s") if extra == 0 else ("s", "t")
    text = message(lambda: list(clean(("s", sides[0]), ("t", sides[1]), Report())))
    assert f"{names[0]} ends after line {size}, and {names[1]} goes on" in text


# ---------------------------------------------------------------------------- drift


def grammar_lengths(count: int) -> np.ndarray:
    pairs = grammar_pairs("train", count)
    return np.array([[len(pair.text("de")), len(pair.text("en"))] for pair in pairs])


LENGTHS = grammar_lengths(3000)


def check_in_blocks(lengths: np.ndarray, size: int) -> tuple[int, int] | None:
    check = DriftCheck()
    for start in range(0, len(lengths), size):
        if found := check.add(lengths[start : start + size]):
            return found
    return None


@pytest.mark.parametrize("size", [1, 7, 300, 5000])
def test_sides_that_fit_raise_no_alarm(size: int) -> None:
    assert check_in_blocks(LENGTHS[:1000] if size < 10 else LENGTHS, size) is None


@settings(max_examples=40)
@given(st.integers(1, 2500), st.sampled_from([0, 1]), st.integers(1, 5), st.integers(400, 5000))
def test_a_lost_line_is_found_where_it_was(line: int, side: int, lost: int, size: int) -> None:
    sides = [LENGTHS[:, 0], LENGTHS[:, 1]]
    sides[side] = np.delete(sides[side], range(line - 1, line - 1 + lost))
    count = min(map(len, sides))
    found = check_in_blocks(np.stack([s[:count] for s in sides], axis=1), size)
    assert found is not None
    assert abs(found[0] - line) <= 12
    assert found[1] == (lost if side == 0 else -lost)


def test_a_drift_that_ends_is_found_where_it_began() -> None:
    sides = [np.delete(LENGTHS[:, 0], 999), np.delete(LENGTHS[:, 1], 1149)]
    found = check_in_blocks(np.stack(sides, axis=1), 5000)
    assert found is not None
    assert abs(found[0] - 1000) <= 12


def test_lines_between_two_blocks_count() -> None:
    sides = [LENGTHS[:-1, 0], np.delete(LENGTHS[:, 1], 499)]
    found = check_in_blocks(np.stack(sides, axis=1), 4)
    assert found is not None
    assert abs(found[0] - 500) <= 12


def test_noise_is_no_drift() -> None:
    chance = np.random.default_rng(0)
    noisy = LENGTHS.copy()
    wrong = chance.random(len(noisy)) < 0.15  # pairs that are no translations
    noisy[wrong, 1] = chance.permutation(noisy[wrong, 1])
    assert check_in_blocks(noisy, 1000) is None
    constant = np.full((3000, 2), 40)
    assert check_in_blocks(constant, 1000) is None


def test_drift_is_an_error_or_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "BLOCK", 100)
    pairs = [(pair.text("de"), pair.text("en")) for pair in grammar_pairs("train", 1000)]
    source, target = [a for a, _ in pairs], [b for _, b in pairs]
    shifted = list(zip(source[:-1], target[:400] + target[401:], strict=True))
    text = message(lambda: cleaned(shifted))
    assert "--allow-drift" in text
    assert int(text.split("s, line ")[1].split(":")[0]) in range(390, 413)
    kept, report = cleaned(shifted, drift=False)
    assert len(kept) > 900
    assert len(report.notes) == 1
    assert "n-1 of t" in report.notes[0]


@pytest.mark.skipif(not DATA, reason="no real corpora at hand")
def test_real_texts_for_evaluation_raise_no_alarm() -> None:
    folder = Path(str(DATA))
    sources = [
        *folder.glob("wmt/news*.de.gz"),
        *folder.glob("multi30k/*.de.gz"),
        *folder.glob("iwslt/iwslt16-xml/IWSLT16.TED.*.de.xml.gz"),
        folder / "iwslt" / "iwslt14-tok" / "valid.de.gz",
    ]
    assert len(sources) > 4
    for source in sources:
        target = re.sub(r"\.de((?:\.xml)?\.gz)$", r".en\1", source.name)
        text = read_parallel(source, source.with_name(target), drop_blank=False)
        lengths = np.array([[len(a), len(b)] for a, b in text])
        assert check_in_blocks(lengths, len(lengths)) is None, source.name


@pytest.mark.skipif(not DATA, reason="no real corpora at hand")
def test_real_corpora_do_not_drift_unless_a_line_is_lost() -> None:
    folder = Path(str(DATA))
    names = ["wmt/newstest2013", "wmt/train-europarl-v7-head20k", "multi30k/val"]
    for name in names:
        lengths = [
            np.array([len(line) for line in read_lines(folder / f"{name}.{language}.gz")])
            for language in ("de", "en")
        ]
        assert check_in_blocks(np.stack(lengths, axis=1), BLOCK) is None
        for lost in range(1, 6):
            other = np.delete(lengths[1], range(500, 500 + lost))
            shifted = np.stack([lengths[0][:-lost], other], axis=1)
            found = check_in_blocks(shifted, BLOCK)
            assert found is not None
            assert abs(found[0] - 501) <= 12
            assert found[1] == -lost
