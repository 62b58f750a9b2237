"""What is wrong with a parallel text is found where it was put."""

import gzip
import random
import unicodedata
from pathlib import Path

import pytest

from annotated_transformer.data.corpora import ParallelText, Preparation, load_corpus, read_parallel
from annotated_transformer.data.diagnosis import REMEDIES, Finding, diagnose_corpus
from annotated_transformer.data.files import CorpusError

TEXT = load_corpus("grammar", size=400)


def files(folder: Path, source: list[bytes], target: list[bytes]) -> tuple[Path, Path]:
    """Write both sides."""
    paths = folder / "s.de", folder / "s.en"
    for path, lines in zip(paths, (source, target), strict=True):
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    return paths


def sides(text: ParallelText = TEXT) -> tuple[list[bytes], list[bytes]]:
    """Return both sides of a text without repetitions, in bytes."""
    pairs = dict.fromkeys(text)
    return [a.encode() for a, _ in pairs], [b.encode() for _, b in pairs]


def test_a_sound_text_has_no_findings(tmp_path: Path) -> None:
    source, target = sides()
    assert diagnose_corpus(*files(tmp_path, source, target)) == (len(source), [])


def test_each_fault_is_found_at_its_line(tmp_path: Path) -> None:
    source, target = sides()
    source[9] = target[9] = b"wort " * 300
    source[19] = b" "
    source[29], target[29] = b"Hund", b"a dog that sleeps in the garden"
    source[39] = b"\xff" + source[39]
    target[49] = target[49] + b"\0"
    source[59], target[59] = source[1], target[1]
    target += [b"more", b"and more"]
    pairs, found = diagnose_corpus(*files(tmp_path, source, target), examples=1)
    assert pairs == len(source)
    assert {each.kind: (each.count, each.lines) for each in found} == {
        "lines without a partner": (2, [pairs + 1]),
        "broken characters": (2, [40]),
        "blank": (1, [20]),
        "too long": (1, [10]),
        "length ratio": (1, [30]),
        "duplicate": (1, [60]),
        "same on both sides": (1, [10]),
    }
    assert [each.kind for each in found] == [kind for kind in REMEDIES if kind in
                                             {each.kind for each in found}]  # fmt: skip
    assert found[0].detail == "only the target has them"
    assert all(each.remedy for each in found)


def test_what_training_takes_but_should_not_is_found(tmp_path: Path) -> None:
    source, target = sides()
    source[4] = target[4]
    source[5] = target[5] = b" "  # blank, not the same
    apart = unicodedata.normalize("NFD", "Die Käfer schlafen")
    target[6], source[7] = apart.encode(), "Die Käfer schlafen".encode()
    for line, odd in enumerate(("\u200b", "\ufeff", "\xad", "\t", "\u2028", "\x85", "\u202e"), 20):
        source[line] = f"Die{odd} Hunde schlafen {line}".encode()
    source[30] = "Die\xa0Hunde – „schlafen“ … 犬".encode()
    _, found = diagnose_corpus(*files(tmp_path, source, target), examples=9)
    assert {each.kind: each.lines for each in found} == {
        "blank": [6],
        "same on both sides": [5],
        "not in NFC": [7],
        "invisible characters": list(range(21, 28)),
    }


def test_a_drift_is_found_near_its_line(tmp_path: Path) -> None:
    rng = random.Random(0)
    lengths = [rng.randrange(3, 40) for _ in range(600)]
    source = [b"w%d " % i + b"wort " * n for i, n in enumerate(lengths)]
    target = [b"v%d " % i + b"word " * n for i, n in enumerate(lengths)]
    del target[300]
    one, other = files(tmp_path, source, target)
    odd = tmp_path / "talk 3: part.de"  # a colon in the name is no end of the place
    odd.write_bytes(Path(one).read_bytes())
    assert diagnose_corpus(odd, other) == diagnose_corpus(one, other)
    pairs, found = diagnose_corpus(one, other)
    kinds = {each.kind: each for each in found}
    assert kinds["drift"].detail.startswith("the lengths suggest")
    assert abs(kinds["drift"].lines[0] - 301) <= 10
    assert "line n is translated by line n-1" in kinds["drift"].detail
    assert kinds["lines without a partner"] == Finding(
        "lines without a partner", 1, [600], "only the source has them"
    )
    assert pairs == 599


def test_what_validation_has_is_found_in_either_language(tmp_path: Path) -> None:
    source, target = sides()
    paths = files(tmp_path, source, target)
    for side in (0, 1):
        held = [[b"x"] * 3, [b"y"] * 3]
        held[side][1] = (source, target)[side][6]
        folder = tmp_path / str(side)
        folder.mkdir()
        valid = read_parallel(*files(folder, *held), split="val", drop_blank=False)
        (found,) = diagnose_corpus(*paths, valid=valid)[1]
        lines = [n for n, line in enumerate((source, target)[side], 1) if line == held[side][1]]
        assert found == Finding("in the validation text", len(lines), lines[:5])


def test_limits_are_those_of_prepare(tmp_path: Path) -> None:
    paths = files(tmp_path, [b"a b c", b"a"], [b"a b c", b"b c"])
    assert [each.kind for each in diagnose_corpus(*paths)[1]] == ["same on both sides"]
    options = Preparation(max_words=2, max_ratio=1.5)
    kinds = [each.kind for each in diagnose_corpus(*paths, options=options)[1]]
    assert kinds == ["too long", "length ratio", "same on both sides"]


def test_files_that_cannot_be_read_are_errors(tmp_path: Path) -> None:
    paths = files(tmp_path, [b"a"], [b"b"])
    with pytest.raises(CorpusError, match="none: no such file"):
        diagnose_corpus(tmp_path / "none", paths[1])
    (tmp_path / "empty").touch()
    for pair in ((tmp_path / "empty", paths[1]), (paths[0], tmp_path / "empty")):
        with pytest.raises(CorpusError, match="empty: the file is empty; give one sentence"):
            diagnose_corpus(*pair)
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"a\n" * 5000)[:-9])
    with pytest.raises(CorpusError, match=r"x\.gz: damaged or cut short"):
        diagnose_corpus(paths[0], tmp_path / "x.gz")
