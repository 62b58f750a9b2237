"""Two sides that drift against each other, and sides that do not."""

import os
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.data import cleaning
from annotated_transformer.data.cleaning import BLOCK, CleaningReport, clean_pairs, find_shift
from annotated_transformer.data.corpora import Preparation, read_parallel
from annotated_transformer.data.downloads import DATA_VARIABLE
from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.data.text import read_lines

DATA = os.environ.get(DATA_VARIABLE)


@cache
def grammar_lengths() -> np.ndarray:
    pairs = grammar_pairs("train", 3000)
    return np.array([[len(pair.text("de")), len(pair.text("en"))] for pair in pairs])


def check_in_blocks(lengths: np.ndarray, size: int) -> tuple[int, int] | None:
    """Look for a drift where texts of these lengths are cleaned, ``size`` lines at a time."""
    source, target = (["x" * n for n in side] for side in lengths.T.tolist())
    report, options = CleaningReport(), Preparation(allow_drift=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cleaning, "BLOCK", size)
        for _ in clean_pairs(("s", source), ("t", target), report, options):
            pass
    if not report.notes:
        return None
    (note,) = report.notes
    found = re.match(r"s, line (\d+): .* by line n([+-]\d) of t", note)
    assert found is not None
    return int(found[1]), int(found[2])


def test_whole_texts_and_blocks_of_them_are_judged_alike() -> None:
    assert find_shift(grammar_lengths()) is None
    assert find_shift(grammar_lengths()[:10]) is None
    slipped = np.stack(
        [grammar_lengths()[:-1, 0], np.delete(grammar_lengths()[:, 1], 1999)], axis=1
    )
    found = find_shift(slipped)
    assert found is not None
    assert abs(found[0] - 2000) <= 12
    assert found[1] == -1
    assert check_in_blocks(slipped, 10_000) == found


@pytest.mark.parametrize("size", [1, 7, 300, 5000])
def test_sides_that_fit_raise_no_alarm(size: int) -> None:
    assert (
        check_in_blocks(grammar_lengths()[:1000] if size < 10 else grammar_lengths(), size) is None
    )


@settings(max_examples=40)
@given(st.integers(1, 2500), st.sampled_from([0, 1]), st.integers(1, 5), st.integers(400, 5000))
def test_a_lost_line_is_found_where_it_was(line: int, side: int, lost: int, size: int) -> None:
    sides = [grammar_lengths()[:, 0], grammar_lengths()[:, 1]]
    sides[side] = np.delete(sides[side], range(line - 1, line - 1 + lost))
    count = min(map(len, sides))
    found = check_in_blocks(np.stack([s[:count] for s in sides], axis=1), size)
    assert found is not None
    assert abs(found[0] - line) <= 12
    assert found[1] == (lost if side == 0 else -lost)


def test_a_drift_that_ends_is_found_where_it_began() -> None:
    sides = [np.delete(grammar_lengths()[:, 0], 999), np.delete(grammar_lengths()[:, 1], 1149)]
    found = check_in_blocks(np.stack(sides, axis=1), 5000)
    assert found is not None
    assert abs(found[0] - 1000) <= 12


def test_lines_between_two_blocks_count() -> None:
    sides = [grammar_lengths()[:-1, 0], np.delete(grammar_lengths()[:, 1], 499)]
    for size in (4, 510, 600):  # noticed in the block that comes after it, at the right place
        found = check_in_blocks(np.stack(sides, axis=1), size)
        assert found is not None
        assert abs(found[0] - 500) <= 12


def test_noise_is_no_drift() -> None:
    rng = np.random.default_rng(0)
    noisy = grammar_lengths().copy()
    wrong = rng.random(len(noisy)) < 0.15  # pairs that are no translations
    noisy[wrong, 1] = rng.permutation(noisy[wrong, 1])
    assert check_in_blocks(noisy, 1000) is None
    constant = np.full((3000, 2), 40)
    assert check_in_blocks(constant, 1000) is None


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
