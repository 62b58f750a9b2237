"""Parallel text as a stream, the pairs that are dropped, and why."""

import gzip
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from annotated_transformer.data import cleaning
from annotated_transformer.data.cleaning import (
    BLOCK,
    CleaningReport,
    FingerprintSet,
    clean_pairs,
    drop_reason,
    pair_hashes,
    stream_sides,
)
from annotated_transformer.data.corpora import Preparation
from annotated_transformer.data.grammar import grammar_pairs
from tests.data.small import message

# ------------------------------------------------------------------------- streams


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


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
    assert "segment lacks" in message(lambda: stream_sides(tmp_path / "x.sgm", tmp_path / "a.de"))


# ---------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("ein Satz", "a sentence", ""),
        ("größer", "ﬁne 😀", ""),
        ("gro\udcdfer", "fine", "broken characters"),
        ("fine", "bro\ufffdken", "broken characters"),
        ("f\0i\0n\0e", "broken", "broken characters"),
        ("", "fine", "blank"),
        ("fine", "\u3000\t", "blank"),
        ("a " * 201, "b " * 201, "too long"),
        ("a " * 200, "b " * 200, ""),
        ("a" * 10_000, "b" * 10_000, ""),
        ("a", "b" * 10_001, "too long"),
        ("a", "b b b b", ""),
        ("a", "b b b b b", "length ratio"),
        ("a a a a a", "b", "length ratio"),
    ],
)
def test_reasons(source: str, target: str, reason: str) -> None:
    assert drop_reason(source, target) == reason


def test_the_bounds_are_options() -> None:
    assert drop_reason("a a", "b b", Preparation(max_words=1)) == "too long"
    assert drop_reason("a", "b b", Preparation(max_ratio=1.5)) == "length ratio"


numbers = st.integers(0, 2**64 - 1) | st.integers(0, 20)


@given(st.lists(st.lists(numbers)))
def test_seen_is_a_set(blocks: list[list[int]]) -> None:
    seen, known = FingerprintSet(), set[int]()
    for block in blocks:
        expected = []
        for number in block:
            expected.append(number not in known)
            known.add(number)
        assert seen.add(np.array(block, dtype=np.uint64)).tolist() == expected
        sizes = [len(run) for run in seen.runs]
        assert sum(sizes) == len(known)
        assert all(a > 2 * b for a, b in itertools.pairwise(sizes))


def test_fingerprints_tell_pairs_apart() -> None:
    pairs = [("a", "b"), ("ab", ""), ("", "ab"), ("a", "b"), ("b", "a"), ("\udcff", "b")]
    marks = pair_hashes(pairs).tolist()
    assert marks[0] == marks[3]
    assert len(set(marks)) == 5
    assert pair_hashes([]).tolist() == []


def cleaned(
    pairs: Sequence[tuple[str, str]], *, seen: FingerprintSet | None = None, **options: Any
) -> tuple[list[tuple[str, str]], CleaningReport]:
    report = CleaningReport()
    source, target = ([pair[side] for pair in pairs] for side in (0, 1))
    return list(
        clean_pairs(("s", source), ("t", target), report, Preparation(**options), seen)
    ), report


@given(st.lists(st.tuples(*[st.sampled_from(["a", " a ", "b c", "", "d " * 9, "\udc80"])] * 2)))
def test_cleaning_is_what_the_rules_say_line_by_line(pairs: list[tuple[str, str]]) -> None:
    kept, report = cleaned(pairs)
    expected, before = [], set()
    for a, b in pairs:
        pair = a.strip(), b.strip()
        if not drop_reason(*pair) and pair not in before:
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
    assert len(cleaned(pairs, keep_duplicates=True)[0]) == 3


def test_duplicates_are_found_across_texts_and_blocks() -> None:
    seen = FingerprintSet()
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
    text = message(lambda: list(clean_pairs(("s", sides[0]), ("t", sides[1]), CleaningReport())))
    assert f"{names[0]} ends after line {size}, but {names[1]} continues" in text


def test_drift_is_an_error_or_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "BLOCK", 100)
    pairs = [(pair.text("de"), pair.text("en")) for pair in grammar_pairs("train", 1000)]
    source, target = [a for a, _ in pairs], [b for _, b in pairs]
    shifted = list(zip(source[:-1], target[:400] + target[401:], strict=True))
    text = message(lambda: cleaned(shifted))
    assert "--allow-drift" in text
    assert int(text.split("s, line ")[1].split(":")[0]) in range(390, 413)
    kept, report = cleaned(shifted, allow_drift=True)
    assert len(kept) > 900
    assert len(report.notes) == 1
    assert "n-1 of t" in report.notes[0]
