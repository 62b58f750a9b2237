"""Shards on the disk, and sentence pairs from them or from memory."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.data.shards import Shard, TokenPairs, write_shard
from annotated_transformer.training.batches import Batch, make_batch, token_batches
from tests.data.small import Pairs, message, plain

# -------------------------------------------------------------------------- shards

ids = st.lists(st.integers(0, 65_535), max_size=5)
id_pairs = st.lists(st.tuples(ids, ids), max_size=20)


@given(id_pairs)
def test_a_shard_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, pairs: Pairs
) -> None:
    path = tmp_path_factory.mktemp("shard") / "x.safetensors"
    write_shard(path, pairs, 1 << 16, long=3)
    shard = Shard.open(path)
    shard.verify()
    assert plain(shard) == pairs
    assert shard.header["long"] == 3
    assert shard.header["pairs"] == len(pairs)


@pytest.mark.parametrize(("vocabulary", "width"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_tokens_take_as_few_bytes_as_they_can(tmp_path: Path, vocabulary: int, width: int) -> None:
    path = tmp_path / "x"
    write_shard(path, [([vocabulary - 1], [0])], vocabulary)
    shard = Shard.open(path)
    assert shard.tokens.itemsize == width
    assert shard.tokens.tolist() == [vocabulary - 1, 0]
    assert not shard.tokens.flags.writeable


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="another system")
def test_shards_are_mapped_and_not_kept_open(tmp_path: Path) -> None:
    write_shard(tmp_path / "x", [([5], [6])], 100)
    Shard.open(tmp_path / "x")
    before = len(os.listdir("/proc/self/fd"))
    held = [Shard.open(tmp_path / "x") for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert Path("/proc/self/maps").read_text().count(str(tmp_path / "x")) >= len(held)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="another system")
def test_what_is_not_used_takes_no_memory(tmp_path: Path) -> None:
    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssFile:")[1].split()[0]) * 1024

    long = np.full(16 << 20, 5, dtype=np.uint16)
    write_shard(tmp_path / "x", [(long, long)], 100)
    before = resident()
    shard = Shard.open(tmp_path / "x")
    assert resident() - before < 8 << 20
    assert int(shard.tokens.max()) == 5  # this reads it
    assert resident() - before > 32 << 20


def test_numbers_beyond_16_bits_are_not_wrapped(tmp_path: Path) -> None:
    with pytest.raises(OverflowError):
        write_shard(tmp_path / "x", [([70_000], [1])], 100)
    assert not (tmp_path / "x").exists()


def test_damaged_shards(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_shard(path, [([1, 2, 3], [4])] * 10, 100)
    content = path.read_bytes()
    for cut in (0, 4, 30, len(content) - 1):
        path.write_bytes(content[:cut])
        assert message(lambda: Shard.open(path)).startswith(f"{path}: damaged (")
    for place in (len(content) - 1, len(content) - 45):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert "digest" in message(lambda: Shard.open(path).verify())
    other = re.sub(rb"(pairs\W+)10", rb"\g<1>11", content, count=1)
    assert other != content
    path.write_bytes(other)
    assert "does not match its arrays" in message(lambda: Shard.open(path))
    path.write_bytes(b"\xff" * 100)
    assert "damaged" in message(lambda: Shard.open(path))
    assert "cannot be read" in message(lambda: Shard.open(tmp_path / "none"))
    assert "cannot be read" in message(lambda: Shard.open(tmp_path))


# --------------------------------------------------------------------------- pairs


def open_all(folder: Path, parts: Sequence[Pairs]) -> list[Shard]:
    """Write parts of a text into shards, and open them."""
    shards = []
    for number, pairs in enumerate(parts):
        path = folder / f"{number:05d}.safetensors"
        write_shard(path, pairs, 100)
        shards.append(Shard.open(path))
    return shards


def assert_equal(ours: Batch, expected: Batch) -> None:
    for name in ("src", "src_mask", "tgt", "tgt_y", "tgt_mask"):
        assert torch.equal(getattr(ours, name), getattr(expected, name))
        assert getattr(ours, name).dtype == getattr(expected, name).dtype
    assert ours.ntokens == expected.ntokens


small = st.lists(st.integers(4, 99), max_size=6)


@settings(max_examples=50)
@given(st.lists(st.lists(st.tuples(small, small), max_size=6), min_size=1, max_size=4), st.data())
def test_shards_are_one_text_as_lists_in_memory_are(
    tmp_path_factory: pytest.TempPathFactory, parts: list[Pairs], data: st.DataObject
) -> None:
    shards = open_all(tmp_path_factory.mktemp("shards"), parts)
    pairs = [pair for part in parts for pair in part]
    if not pairs:
        assert "no pair" in message(lambda: TokenPairs.from_shards(shards))
        return
    sides = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    numbers = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=5))
    expected = make_batch(*([side[i] for i in numbers] for side in sides))
    for found in (TokenPairs.from_shards(shards, verify=True), TokenPairs.from_lists(*sides)):
        assert len(found) == len(pairs)
        assert plain(found) == pairs
        assert found.lengths().tolist() == [[len(s) + 1, len(t) + 1] for s, t in pairs]
        assert_equal(found.batch(numbers), expected)
        assert_equal(found.batch(torch.tensor(numbers, dtype=torch.int32)), expected)


def test_every_pair_is_in_one_batch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = [
        [(rng.integers(4, 99, n).tolist(), [n] * m) for n, m in rng.integers(4, 30, (50, 2))]
        for _ in range(3)
    ]
    text = TokenPairs.from_shards(open_all(tmp_path, parts))
    batches = [text.batch(numbers) for numbers in token_batches(text.lengths(), 100)]
    found = []
    for batch in batches:
        assert max(batch.src.numel(), batch.tgt.numel()) <= 100
        for source, target in zip(batch.src.tolist(), batch.tgt_y.tolist(), strict=True):
            found.append(([t for t in source if t > 3], [t for t in target if t > 3]))
    assert sorted(found) == sorted(pair for part in parts for pair in part)


def test_a_text_of_nothing_and_unequal_sides() -> None:
    assert len(TokenPairs.from_lists([], [])) == 0
    assert TokenPairs.from_lists([], []).lengths().shape == (0, 2)
    assert "no pair" in message(lambda: TokenPairs.from_shards([]))
    with pytest.raises(ValueError, match="shorter"):
        TokenPairs.from_lists([[5], [6]], [[7]])


def test_lines_are_kept() -> None:
    assert TokenPairs.from_lists([[5], [6]], [[7], [8]], [3, 9]).lines == [3, 9]
    assert not TokenPairs.from_lists([[5]], [[7]]).lines


def test_lengths_may_take_more_than_16_bits(tmp_path: Path) -> None:
    write_shard(tmp_path / "x", [([0] * 70_000, [1])], 100)
    text = TokenPairs.from_shards([Shard.open(tmp_path / "x")])
    assert text.lengths().tolist() == [[70_001, 2]]
