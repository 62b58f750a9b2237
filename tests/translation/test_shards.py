"""Tests of the shards, of batches from them, and of preparing a corpus."""

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.data.corpora import load_corpus, read_parallel
from annotated_transformer.data.files import CorpusError
from annotated_transformer.training.batches import make_batch, token_batches
from annotated_transformer.translation import shards
from annotated_transformer.translation.shards import (
    Overlap,
    Preparation,
    Prepared,
    Shard,
    ShardedText,
    encode_piece,
    pooled_batches,
    prepare,
    read_piece,
    remarks,
    sample_pieces,
    worker_pool,
    write_pieces,
    write_shard,
)
from annotated_transformer.translation.tokenizers import BPETokenizer


def message(action: Callable[[], object]) -> str:
    """Return the text of the error that an action ends with, which must be one line."""
    with pytest.raises(CorpusError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text


# -------------------------------------------------------------------------- shards

ids = st.lists(st.integers(0, 65_535), max_size=5)
id_pairs = st.lists(st.tuples(ids, ids), max_size=20)


def plain(shard: Shard | ShardedText) -> list[tuple[list[int], list[int]]]:
    pairs = (shard.pair(i) for i in range(len(shard)))
    return [(source.tolist(), target.tolist()) for source, target in pairs]


@given(id_pairs)
def test_a_shard_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[list[int], list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("shard") / "x.safetensors"
    write_shard(path, pairs, 1 << 16, long=3)
    shard = Shard(path)
    shard.check()
    assert plain(shard) == pairs
    assert shard.data["long"] == 3


@pytest.mark.parametrize(("vocabulary", "width"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_tokens_take_as_few_bytes_as_they_can(tmp_path: Path, vocabulary: int, width: int) -> None:
    path = tmp_path / "x"
    write_shard(path, [([vocabulary - 1], [0])], vocabulary)
    shard = Shard(path)
    assert shard.tokens.itemsize == width
    assert shard.tokens.tolist() == [vocabulary - 1, 0]
    assert not shard.tokens.flags.writeable


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="another system")
def test_shards_are_mapped_and_not_kept_open(tmp_path: Path) -> None:
    write_shard(tmp_path / "x", [([5], [6])], 100)
    Shard(tmp_path / "x")
    before = len(os.listdir("/proc/self/fd"))
    held = [Shard(tmp_path / "x") for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert Path("/proc/self/maps").read_text().count(str(tmp_path / "x")) >= len(held)


def test_sentences_whose_length_takes_more_than_16_bits_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "x", [([0] * 65_534, [1])], 100)
    assert ShardedText([tmp_path / "x"]).lengths().tolist() == [[65_535, 2]]
    write_shard(tmp_path / "x", [([0], [1] * 65_535)], 100)
    assert "more than 65535 tokens" in message(lambda: ShardedText([tmp_path / "x"]))


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
        assert str(path) in message(lambda: Shard(path))
    for place in (len(content) - 1, len(content) - 45):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert "checksum" in message(lambda: Shard(path).check())
    path.write_bytes(b"\xff" * 100)
    assert "damaged" in message(lambda: Shard(path))
    assert "cannot be read" in message(lambda: Shard(tmp_path / "none"))


def write_all(folder: Path, parts: Sequence[Sequence[tuple[list[int], list[int]]]]) -> list[Path]:
    paths = []
    for number, pairs in enumerate(parts):
        paths.append(folder / f"{number:05d}.safetensors")
        write_shard(paths[-1], pairs, 100)
    return paths


small = st.lists(st.integers(4, 99), max_size=6)


@settings(max_examples=50)
@given(st.lists(st.lists(st.tuples(small, small), max_size=6), min_size=1, max_size=4), st.data())
def test_shards_are_one_text(
    tmp_path_factory: pytest.TempPathFactory, parts: Any, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    pairs = [pair for part in parts for pair in part]
    paths = write_all(folder, parts)
    if not pairs:
        assert "no pair" in message(lambda: ShardedText(paths))
        return
    text = ShardedText(paths, check=True)
    assert len(text) == len(pairs)
    assert plain(text) == pairs
    assert text.lengths().tolist() == [[len(s) + 1, len(t) + 1] for s, t in pairs]
    numbers = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=5))
    ours = text.batch(numbers)
    expected = make_batch([pairs[i][0] for i in numbers], [pairs[i][1] for i in numbers])
    for name in ("src", "src_mask", "tgt", "tgt_y", "tgt_mask"):
        assert torch.equal(getattr(ours, name), getattr(expected, name))
    assert ours.ntokens == expected.ntokens


# ------------------------------------------------------------------------- batches

length_pairs = st.lists(st.tuples(*[st.integers(1, 30)] * 2), max_size=200)


@given(length_pairs, st.integers(30, 300), st.integers(1, 5), st.integers(0, 3))
def test_batches_hold_each_pair_once_and_keep_the_budget(
    pairs: list[tuple[int, int]], budget: int, pool: int, epoch: int
) -> None:
    lengths = np.array(pairs, dtype=np.uint16).reshape(-1, 2)
    batches = pooled_batches(lengths, budget, pool=pool, epoch=epoch)
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(len(pairs)))
    for batch in batches:
        assert len(batch) * int(lengths[batch].max()) <= budget
    again = pooled_batches(lengths, budget, pool=pool, epoch=epoch)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in again]


@given(length_pairs, st.integers(30, 300))
def test_sorted_batches_are_those_of_the_lists(pairs: list[tuple[int, int]], budget: int) -> None:
    lengths = np.array(pairs, dtype=np.uint16).reshape(-1, 2)
    ours = [batch.tolist() for batch in pooled_batches(lengths, budget, shuffle=False)]
    assert ours == token_batches(pairs, budget, shuffle=False)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, (3000, 2))
    orders = [
        np.concatenate(pooled_batches(lengths, 400, seed=seed, epoch=epoch)).tolist()
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    places = np.argsort(orders[0])  # anywhere, not near where it was
    assert abs(np.corrcoef(places, np.arange(3000))[0, 1]) < 0.1


def test_padding_is_about_that_of_the_lists() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, (5000, 2))

    def padding(batches: Sequence[Sequence[int]]) -> float:
        return sum(len(b) * int(lengths[list(b)].max(axis=0).sum()) for b in batches)

    plain = padding(token_batches([(a, b) for a, b in lengths.tolist()], 500, pool=20))
    ours = padding([b.tolist() for b in pooled_batches(lengths, 500, pool=20)])
    assert abs(ours / plain - 1) < 0.01


def test_a_pair_that_fits_no_batch_is_named() -> None:
    with pytest.raises(ValueError, match="pair 2 has 9 tokens, more than the 8"):
        pooled_batches(np.array([[1, 1], [2, 9]]), 8)


# -------------------------------------------------------------------------- pieces

line = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))


@settings(max_examples=40)
@given(st.lists(st.tuples(line, line), max_size=25))
def test_pieces_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD", 7)
        write_pieces(pairs, folder, "train")
    pieces = sorted(folder.glob("*.txt"))
    assert len(pieces) == -(-len(pairs) // 7)
    assert [pair for piece in pieces for pair in read_piece(piece)] == pairs


@pytest.mark.parametrize("most", [1, 2, 5, 9, 24, 25, 26])
def test_a_sample_is_taken_at_equal_distances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(shards, "SHARD", 7)
    pairs = [(f"s{n}", f"t{n}") for n in range(25)]
    write_pieces(pairs, tmp_path, "train")
    pieces, counts = sorted(tmp_path.glob("*.txt")), [7, 7, 7, 4]
    step = max(1, -(-len(pairs) // most))
    taken = list(sample_pieces(pieces, counts, most))
    assert taken == [side for pair in pairs[::step] for side in pair]
    assert len(taken) <= 2 * most


def test_long_pairs_are_dropped_and_counted(tmp_path: Path) -> None:
    tokenizer = BPETokenizer([])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    write_pieces([("ab", "c"), ("abcd", "c"), ("abc", "abc"), ("", "ok")], tmp_path, "x")
    out = tmp_path / "shard"
    encode_piece(tmp_path / "x-00000.txt", out, tmp_path / "tokenizer.json", 5)
    assert plain(Shard(out)) == [
        (tokenizer.encode(a), tokenizer.encode(b))
        for a, b in (("ab", "c"), ("abc", "abc"), ("", "ok"))
    ]
    assert Shard(out).data["long"] == 1
    assert Shard(out).data["first_long"] == 2
    assert max(len(side) for pair in plain(Shard(out)) for side in pair) == 4


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_an_error() -> None:
    def work() -> None:
        with worker_pool(1) as pool:
            pool.submit(die).result()

    assert "worker process was killed" in message(work)


# ------------------------------------------------------------------------- prepare

CORPUS = load_corpus("grammar", size=300)
VALID = load_corpus("grammar", split="val", size=12)
OPTIONS = Preparation(vocabulary=400)


def write(folder: Path, split: str, pairs: Sequence[tuple[str, str]]) -> tuple[Path, Path]:
    paths = folder / f"{split}.de", folder / f"{split}.en"
    for side, path in enumerate(paths):
        path.write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
    return paths


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[Path, Path]]]:
    monkeypatch.setattr(shards, "SHARD", 64)
    return {
        "train": [write(tmp_path, "train", list(CORPUS))],
        "val": [write(tmp_path, "val", list(VALID))],
    }


def run(folder: Path, files: Any, options: Preparation = OPTIONS, workers: int = 1) -> list[str]:
    said: list[str] = []
    prepare(folder, files, options, workers=workers, say=said.append)
    return said


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_prepared_corpus_holds_the_corpus(tmp_path: Path, files: Any) -> None:
    run(tmp_path / "out", files)
    found = Prepared(tmp_path / "out")
    text = found.text("train", check=True)
    decode = found.tokenizer.decode
    assert [(decode(s), decode(t)) for s, t in plain(text)] == list(CORPUS)
    assert len(text.shards) == 5
    assert list(found.lines("val")) == list(VALID)
    assert len(found.text("val")) == len(VALID)
    assert found.languages == ("de", "en")
    assert dict(found.checksums).keys() == {"train.de", "train.en", "prepared.json"}
    assert "no split 'test'" in message(lambda: found.text("test"))
    assert not (tmp_path / "out" / "text").exists()


def test_the_vocabulary_is_learned_from_the_training_text(tmp_path: Path, files: Any) -> None:
    write(tmp_path, "val", [("Xylophon " * 20, "xylophone " * 20)])
    run(tmp_path / "out", files)
    lines = [line for pair in CORPUS for line in pair]
    expected = BPETokenizer.train(lines, OPTIONS.vocabulary)
    assert Prepared(tmp_path / "out").tokenizer.merges == expected.merges  # type: ignore[union-attr]


def test_lower_case_prepares_what_the_text_in_lower_case_would_give(
    tmp_path: Path, files: Any
) -> None:
    run(tmp_path / "out", files, replace(OPTIONS, tokenizer="bpe-lower"))
    for path in tmp_path.glob("*.??"):
        path.write_text(path.read_text(encoding="utf-8").lower(), encoding="utf-8")
    run(tmp_path / "lower", files)
    found, expected = Prepared(tmp_path / "out"), Prepared(tmp_path / "lower")
    for split in ("train", "val"):
        assert plain(found.text(split)) == plain(expected.text(split))
    assert found.tokenizer.encode("MANN") == expected.tokenizer.encode("mann")


def test_another_tokenizer_is_another_corpus(tmp_path: Path, files: Any) -> None:
    run(tmp_path / "out", files)
    options = replace(OPTIONS, tokenizer="bpe-lower")
    assert "with other options" in message(lambda: run(tmp_path / "out", files, options))


def test_a_plan_that_names_no_tokenizer_has_capitals(tmp_path: Path, files: Any) -> None:
    out = tmp_path / "out"
    run(out, files)
    for name in ("prepared.json", "plan.json"):  # as an older version wrote them
        data = json.loads((out / name).read_text(encoding="utf-8"))
        del data.get("plan", data)["options"]["tokenizer"]
        (out / name).write_text(json.dumps(data), encoding="utf-8")
    assert "nothing to do" in run(out, files)[-1]
    assert Prepared(out).options == OPTIONS


def test_the_number_of_workers_changes_nothing(tmp_path: Path, files: Any) -> None:
    run(tmp_path / "one", files)
    run(tmp_path / "three", files, workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_preparing_again_does_nothing(tmp_path: Path, files: Any) -> None:
    run(tmp_path / "out", files)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert run(tmp_path / "out", files) == [f"{tmp_path / 'out'}: is prepared; nothing to do"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


class Stop(BaseException):
    """What a test stops with, as a killed process does: nothing catches it."""


def test_stopped_at_any_write_it_goes_on(
    tmp_path: Path, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each atomic write is the last of some process; those after it go on to the same end."""
    run(tmp_path / "whole", files)
    real, left = shards.write_atomically, [0]

    def counting(path: str | Path, data: bytes) -> None:
        if not left[0]:
            raise Stop
        left[0] -= 1
        real(path, data)

    class Inline:
        """Works in this process, so that the patch is seen."""

        def __init__(self, *_: object) -> None: ...

        def submit(self, work: Callable[..., None], *arguments: object) -> Any:
            work(*arguments)
            from concurrent.futures import Future

            future: Future[None] = Future()
            future.set_result(None)
            return future

        def shutdown(self, **_: object) -> None: ...

    monkeypatch.setattr(shards, "write_atomically", counting)
    monkeypatch.setattr(shards, "ProcessPoolExecutor", Inline)
    stops = 0
    for writes in (1, 1, 3, 2, 6, 1, 4, 1, 1, 1, 1, 1, 1):
        left[0] = writes
        try:
            run(tmp_path / "out", files)
            break
        except Stop:
            stops += 1
            assert "not prepared" in message(lambda: Prepared(tmp_path / "out"))
    left[0] = 99
    run(tmp_path / "out", files)
    assert stops > 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_shards_that_are_there_are_kept(tmp_path: Path, files: Any) -> None:
    out = tmp_path / "out"
    run(out, files)
    whole = contents(out)
    # As if killed in the third step: text and vocabulary are there, two shards are not.
    (tmp_path / "text").mkdir()
    write_pieces(CORPUS, tmp_path / "text", "train")
    write_pieces(VALID, tmp_path / "text", "val")
    reports = json.loads((out / "prepared.json").read_text())["reports"]
    (tmp_path / "text" / "reports.json").write_text(json.dumps(reports))
    os.rename(tmp_path / "text", out / "text")
    (out / "prepared.json").unlink()
    for name in ("train-00001", "val-00000"):
        (out / "shards" / f"{name}.safetensors").unlink()
    (out / "shards" / ".train-00001.safetensors.1.part").write_bytes(b"half")
    kept = out / "shards" / "train-00000.safetensors"
    before = kept.stat().st_mtime_ns
    assert run(out, files) == ["encoding 2 pieces"]
    assert kept.stat().st_mtime_ns == before
    assert contents(out) == whole


def children(pid: int) -> list[int]:
    """Return the children of a process, where the system tells."""
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in paths for child in path.read_text().split()]


def alive(pid: int) -> bool:
    """Whether a process is there, and is more than its exit status."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_killed_and_started_again(tmp_path: Path) -> None:
    pairs = list(load_corpus("grammar", size=4000))
    train, val = write(tmp_path, "train", pairs), write(tmp_path, "val", list(VALID))
    words = [sys.executable, "-m", "annotated_transformer", "prepare", str(tmp_path / "out")]
    words += ["--train-files", *map(str, train), "--valid-files", *map(str, val), "--quiet"]
    words += ["--vocabulary", "700", "--workers", "1"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for text in process.stderr:
        if text.startswith("learning"):
            while not (workers := children(process.pid)):
                assert process.poll() is None
            process.kill()
            break
    process.wait()
    deadline = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers))
    process.stderr.close()
    assert not (tmp_path / "out" / "prepared.json").exists()
    said = run(tmp_path / "out", {"train": [train], "val": [val]}, Preparation(vocabulary=700))
    assert not any("pairs kept" in text for text in said)  # cleaned already
    found = Prepared(tmp_path / "out")
    assert [found.tokenizer.decode(s) for s, _ in plain(found.text())] == [a for a, _ in pairs]


@pytest.mark.parametrize("change", ["options", "sources"])
def test_another_corpus_is_not_mixed_in(tmp_path: Path, files: Any, change: str) -> None:
    run(tmp_path / "out", files)
    options = OPTIONS
    if change == "options":
        options = Preparation(vocabulary=401)
    else:
        write(tmp_path, "train", list(CORPUS)[1:])
    before = contents(tmp_path / "out")
    text = message(lambda: run(tmp_path / "out", files, options))
    assert f"with other {change}" in text
    assert contents(tmp_path / "out") == before


def test_killed_while_it_begins_again(
    tmp_path: Path, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Stop

    def delete_half(folder: Path, **_: object) -> None:
        for piece in folder.glob("train-*"):
            piece.unlink()
        raise Stop

    run(tmp_path / "whole", files)
    for options, place, fault in (
        (OPTIONS, (shards, "_encode_all"), stop),
        (Preparation(vocabulary=401), (shards.shutil, "rmtree"), delete_half),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*place, fault)
            with pytest.raises(Stop):
                run(tmp_path / "out", files, options)
    run(tmp_path / "out", files)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_folder_in_use_is_left_alone(tmp_path: Path, files: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert "in use" in message(lambda: run(tmp_path / "out", files))
    assert contents(tmp_path / "out") == {"thesis.txt": b"mine"}
    for plan in ("{", "{}", "[]", '{"options": 1}'):
        (tmp_path / "out" / "plan.json").write_text(plan)
        assert "damaged" in message(lambda: run(tmp_path / "out", files))


def test_dirt_is_dropped_and_reported(tmp_path: Path, files: Any) -> None:
    source, target = files["train"][0]
    source.write_bytes(source.read_bytes() + b"gr\xfc\xdf\n\nWort\n")
    target.write_bytes(target.read_bytes() + b"green\nblank\n" + b"word " * 300 + b"\n")
    said = run(tmp_path / "out", files)
    assert said[:4] == [
        "300 of 303 pairs kept",
        "  1 dropped (0.33%), broken characters, first train.de, line 301",
        "  1 dropped (0.33%), blank, first train.de, line 302",
        "  1 dropped (0.33%), too long, first train.de, line 303",
    ]
    report = Prepared(tmp_path / "out").reports["train"]
    assert report["kept"] == 300
    assert report["dropped"] == {"broken characters": 1, "blank": 1, "too long": 1}


def test_several_texts_are_one(tmp_path: Path, files: Any) -> None:
    more = write(tmp_path, "more", [*list(CORPUS)[:5], ("Neu", "new")])
    files["train"].append(more)
    said = run(tmp_path / "out", files)
    assert "  5 dropped (1.63%), duplicate, first more.de, line 1" in said
    assert len(Prepared(tmp_path / "out").text()) == 301


def test_sentences_of_the_test_in_the_training_text_are_reported(
    tmp_path: Path, files: Any
) -> None:
    shared = [(CORPUS.source[7], "something else"), (CORPUS.source[9], CORPUS.target[9])]
    write(tmp_path, "val", [*list(VALID), *shared, shared[0]])
    said = "\n".join(run(tmp_path / "out", files))
    assert "2 different source sentences of val" in said
    assert f"the first in its line {len(VALID) + 1}" in said
    assert len(Prepared(tmp_path / "out").text()) == len(CORPUS)


lines_of_few = st.sampled_from(["a", "a ", "b", "c", "d", "", " "])
small_text = st.lists(st.tuples(lines_of_few, lines_of_few), max_size=5)


@given(st.fixed_dictionaries({"train": small_text, "val": small_text, "test": small_text}))
def test_every_two_splits_are_compared_in_both_languages(
    splits: dict[str, list[tuple[str, str]]],
) -> None:
    def lines(split: str, side: int) -> list[str]:
        return [pair[side].strip() for pair in splits[split]]

    expected = []
    for split, other in (("val", "train"), ("test", "train"), ("test", "val")):
        parts = []
        for side, name in enumerate(("source", "target")):
            own = lines(split, side)
            if shared := {line for line in own if line} & set(lines(other, side)):
                place = "the training text" if other == "train" else other
                parts.append(
                    f"{len(shared)} different {name} sentences of {split} stand in {place} too, "
                    f"the first in its line {min(map(own.index, shared)) + 1}"
                )
        if parts:
            expected.append(("train" if other == "train" else split, "; ".join(parts)))
    held = {
        split: replace(
            VALID,
            source=tuple(a for a, _ in splits[split]),
            target=tuple(b for _, b in splits[split]),
        )
        for split in ("val", "test")
    }
    overlap = Overlap(held)
    assert list(overlap.watch(splits["train"])) == splits["train"]
    assert list(overlap.notes()) == expected


def test_of_the_training_text_nothing_is_kept() -> None:
    overlap = Overlap({"val": VALID})
    before = len(pickle.dumps(overlap.__dict__))
    new = ((f"neu {n}", f"new {n}") for n in range(25_000))
    assert sum(1 for _ in overlap.watch(new)) == 25_000
    assert len(pickle.dumps(overlap.__dict__)) == before


def test_what_two_texts_for_evaluation_share_is_reported(tmp_path: Path, files: Any) -> None:
    both = ("beides", "both")
    write(tmp_path, "val", [*VALID, both])
    files["test"] = [write(tmp_path, "test", [("neu", "new"), both])]
    said = run(tmp_path / "out", files)
    note = "1 different source sentences of test stand in val too, the first in its line 2; "
    note += note.replace("source", "target")[:-2]
    assert f"test: {note}" in said
    reports = Prepared(tmp_path / "out").reports
    assert {split: report["notes"] for split, report in reports.items()} == {
        "train": [], "val": [], "test": [note],
    }  # fmt: skip


def test_a_text_for_evaluation_that_drifts(tmp_path: Path, files: Any) -> None:
    text = load_corpus("grammar", split="val", size=400)
    pairs = list(zip(text.source[:-1], text.target[:200] + text.target[201:], strict=True))
    write(tmp_path, "val", pairs)
    said = message(lambda: run(tmp_path / "out", files))
    assert said.startswith("val.de, line ")
    assert abs(int(said.split("line ")[1].split(":")[0]) - 201) <= 12
    assert "by line n-1 of val.en" in said
    assert said.endswith("go on with --allow-drift")
    options = replace(OPTIONS, allow_drift=True)
    (noted,) = (line for line in run(tmp_path / "out", files, options) if "line n-1" in line)
    found = Prepared(tmp_path / "out")
    assert noted == f"val: {found.reports['val']['notes'][0]}"
    assert list(found.lines("val")) == pairs


def test_evaluation_keeps_every_line(tmp_path: Path, files: Any) -> None:
    pairs = [("", "blank"), ("a", "A"), ("a", "A")]
    write(tmp_path, "val", pairs)
    run(tmp_path / "out", files)
    assert list(Prepared(tmp_path / "out").lines("val")) == pairs


def test_what_is_too_long_for_the_shards_is_said(tmp_path: Path, files: Any) -> None:
    long = ("Wort " * 70, "word " * 70)  # at least a token for each word
    train, val = list(CORPUS), list(VALID)
    train[100], train[110], val[4] = long, ("Wort " * 69, "word " * 69), long
    write(tmp_path, "train", train)
    write(tmp_path, "val", val)
    said = run(tmp_path / "out", files, Preparation(vocabulary=400, max_len=60))
    found = Prepared(tmp_path / "out")
    sides = {"train": train, "val": val}
    places = {
        split: [
            n
            for n, pair in enumerate(pairs, 1)
            if max(len(found.tokenizer.encode(side.strip())) for side in pair) + 1 > 60
        ]
        for split, pairs in sides.items()
    }
    assert places == {"train": [101, 111], "val": [5]}
    why = "pairs left out, more than 60 tokens (--max-len), first pair"
    assert said[-2:] == [
        f"warning: val: 1 of 12 {why} 5; the loss is measured on the other 11 alone",
        f"train: 2 of 300 {why} 101",
    ]
    for split, lost in places.items():
        report = found.reports[split]
        assert report["kept"] == len(found.text(split)) == len(sides[split]) - len(lost)
        assert report["dropped"] == {"more than 60 tokens": len(lost)}
        assert report["first"]["more than 60 tokens"].startswith(f"{split}, pair {lost[0]} ")
    assert len(found.lines("val")) == len(val)  # what is scored keeps every line


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_without_pairs_is_named_with_the_option(
    tmp_path: Path, files: Any, split: str
) -> None:
    short = Preparation(vocabulary=400, max_len=30)
    write(tmp_path, "train", [*CORPUS, *((f"a {n}", f"b {n}") for n in range(300))])
    write(tmp_path, "val", [("a", "b")])
    write(tmp_path, split, [(f"Wort {n} " * 15, f"word {n} " * 15) for n in range(300)])
    text = message(lambda: run(tmp_path / "out", files, short))
    assert text == f"{split}: no pair is left, all 300 have more than 30 tokens; raise --max-len"
    said = run(tmp_path / "out", files, replace(short, max_len=256))
    assert "begins again, with other options" in said[0]
    assert len(Prepared(tmp_path / "out").text(split)) == 300


def test_what_cannot_be_prepared(tmp_path: Path, files: Any) -> None:
    train = files["train"][0]
    good = train[1].read_bytes()
    train[1].write_bytes(b"<html><body>404</body></html>")
    assert "HTML page" in message(lambda: run(tmp_path / "1", files))
    train[1].write_bytes(good.split(b"\n", 1)[1])
    assert "ends after line 299" in message(lambda: run(tmp_path / "2", files))
    train[1].write_bytes(b"\n" * 300)
    assert "no pair is left" in message(lambda: run(tmp_path / "3", files))
    train[1].write_bytes(good)
    assert "--vocabulary 99999" in message(
        lambda: run(tmp_path / "4", files, Preparation(vocabulary=99_999))
    )
    for folder in ("2", "4"):  # put right, it begins again
        said = run(tmp_path / folder, files)
        assert "begins again, with other" in said[0]
        assert len(Prepared(tmp_path / folder).text()) == 300
    assert "no such file" in message(
        lambda: run(tmp_path / "5", {"train": [(tmp_path / "none", train[1])]})
    )


pieces_of_paths = st.lists(st.sampled_from(["..", "/", "a", "en", ".", "-", "\\"]), max_size=6)


@settings(max_examples=60)
@given(pieces_of_paths.map("".join).filter(lambda code: not code.isalpha()))
def test_no_pair_of_languages_leads_out_of_the_folder(
    tmp_path_factory: pytest.TempPathFactory, code: str
) -> None:
    folder = tmp_path_factory.mktemp("pairs") / "a" / "b"
    folder.mkdir(parents=True)
    files = {split: [write(folder, split, [("x", "y")] * 3)] for split in ("train", "val")}
    before = contents(folder.parent.parent)

    options = Preparation(pair=f"de-{code}", vocabulary=260)
    assert "--pair" in message(lambda: run(folder / "out", files, options))
    assert contents(folder.parent.parent) == before


def test_what_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    nowhere = {"train": [(tmp_path / "none", tmp_path / "none")]}  # reading would be an error
    smallest = len(BPETokenizer([]))
    for options, words in (
        (Preparation(pair="de-de"), "--pair 'de-de'"),
        (Preparation(vocabulary=10), f"--vocabulary 10: must be at least {smallest}"),
        (Preparation(vocabulary=smallest - 1), "--vocabulary"),
        (Preparation(max_len=1), "--max-len 1"),
        (Preparation(max_len=65_536), "at most 65535"),
    ):
        assert words in message(lambda options=options: run(tmp_path / "out", nowhere, options))
    assert list(tmp_path.iterdir()) == []
    assert "--pair" in message(lambda: Preparation(pair="de-/../x").languages)
    least = Preparation(vocabulary=smallest, max_len=2)
    assert "no such file" in message(lambda: run(tmp_path / "out", nowhere, least))


@pytest.mark.parametrize("below", ["", "deeper", "deeper/still"])
def test_a_file_is_no_folder(tmp_path: Path, files: Any, below: str) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    text = message(lambda: run(taken / below, files))
    assert text == f"{taken}: is a file, not a folder; choose another folder"
    assert taken.read_text() == "mine"


def test_a_folder_that_cannot_be_made(tmp_path: Path, files: Any) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at all")
    assert "cannot be made" in message(lambda: run(tmp_path / "link", files))


def tagged(folder: Path, count: int) -> tuple[Path, Path]:
    """Write a training text as IWSLT has it, and return its two files."""
    paths = folder / "train.tags.de-en.de", folder / "train.tags.de-en.en"
    for side, path in enumerate(paths):
        rows = [f"<url>u</url>\n<title>talk {side}</title>\n"]
        rows += [f" {pair[side]} \n<speaker>s\n" for pair in list(CORPUS)[:count]]
        path.write_text("".join(rows), encoding="utf-8")
    return paths


def numbered(folder: Path, ending: str, count: int, first: int = 1) -> tuple[Path, Path]:
    """Write a text in segments, and return its two files."""
    paths = folder / f"set.de.{ending}", folder / f"set.en.{ending}"
    for side, path in enumerate(paths):
        rows = [
            f'<seg id="{first * side + n}"> {escape(pair[side])} </seg>\n'
            for n, pair in enumerate(list(CORPUS)[:count])
        ]
        path.write_text(f'<doc docid="1">\n<title>t</title>\n{"".join(rows)}</doc>\n')
    return paths


@pytest.mark.parametrize("form", ["tags", "xml", "sgm"])
@pytest.mark.parametrize("packed", [False, True])
def test_both_commands_read_a_file_alike(
    tmp_path: Path, files: Any, form: str, packed: bool
) -> None:
    paths = tagged(tmp_path, 200) if form == "tags" else numbered(tmp_path, form, 200, first=0)
    if packed:
        for path in paths:
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        paths = paths[0].with_name(f"{paths[0].name}.gz"), paths[1].with_name(f"{paths[1].name}.gz")
    files["train"] = [paths]
    run(tmp_path / "out", files)
    found = Prepared(tmp_path / "out")
    decode = found.tokenizer.decode
    ours = [(decode(s), decode(t)) for s, t in plain(found.text())]
    assert ours == list(CORPUS)[:200] == list(read_parallel(*paths))
    assert found.reports["train"]["pairs"] == 200


def test_texts_in_segments_must_belong_together(tmp_path: Path, files: Any) -> None:
    files["train"] = [numbered(tmp_path, "xml", 100)]
    assert "its segment 1 is 1/1, that of" in message(lambda: run(tmp_path / "out", files))


def test_a_report_says_that_lines_are_not_those_of_the_file(tmp_path: Path, files: Any) -> None:
    source, target = tagged(tmp_path, 100)
    for path in (source, target):
        path.write_text(f"{path.read_text(encoding='utf-8')}\n", encoding="utf-8")
    files["train"] = [(source, target)]
    said = run(tmp_path / "out", files)
    assert said[1].endswith("blank, first train.tags.de-en.de (without tags), line 101")


def test_remarks_on_texts_in_memory() -> None:
    train = load_corpus("grammar", size=1000)
    assert list(remarks(train, {"val": VALID})) == []
    drifted = replace(
        train,
        source=train.source[:-1],
        target=train.target[:500] + train.target[501:],
        checksums=(("a.de", ""), ("a.en", "")),
        blank=(3, 4, 990),
    )
    drift, both = remarks(drifted, {"val": VALID, "test": train.head(1)})
    assert drift.startswith("a.de, line 50")
    assert int(drift.split("line ")[1].split(":")[0]) in range(496, 514)
    assert "by line n-1 of a.en" in drift
    assert both.startswith("1 different source sentences of test stand in the training text")
    assert next(remarks(train, {"val": drifted})) == drift


@pytest.mark.parametrize("name", ["prepared.json", "tokenizer.json"])
def test_a_damaged_description(tmp_path: Path, files: Any, name: str) -> None:
    run(tmp_path / "out", files)
    (tmp_path / "out" / name).write_text('{"plan": 3')
    with pytest.raises(ValueError, match=name):
        Prepared(tmp_path / "out")


def test_another_tokenizer_of_the_same_size_is_refused(tmp_path: Path, files: Any) -> None:
    run(tmp_path / "out", files)
    path = tmp_path / "out" / "tokenizer.json"
    own = path.read_bytes()
    other = BPETokenizer.train([f"{n} " * 3 for n in range(10_000)], OPTIONS.vocabulary)
    assert len(other) == len(Prepared(tmp_path / "out").tokenizer)
    path.write_text(other.to_json(), encoding="utf-8")
    for action in (lambda: Prepared(tmp_path / "out"), lambda: run(tmp_path / "out", files)):
        text = message(action)
        assert text.startswith(f"{path}: is damaged, or not the tokenizer that")
        assert "prepare the corpus again" in text
    path.unlink()
    text = message(lambda: Prepared(tmp_path / "out"))
    assert text.startswith(f"{path}: cannot be read")
    assert text.endswith("prepare the corpus again")
    path.write_bytes(own)
    assert len(Prepared(tmp_path / "out").text()) == len(CORPUS)


def test_a_folder_of_an_older_format_is_to_be_prepared_again(tmp_path: Path, files: Any) -> None:
    out = tmp_path / "out"
    run(out, files)
    for name in ("prepared.json", "plan.json"):
        data = json.loads((out / name).read_text(encoding="utf-8"))
        data.pop("tokenizer", None)
        data.get("plan", data)["format"] = 1
        (out / name).write_text(json.dumps(data), encoding="utf-8")
    text = message(lambda: Prepared(out))
    assert text.startswith(f"{out}: prepared in format 1, this version reads format 2")
    assert text.endswith("prepare the corpus again")
    assert "prepared with other format; choose another" in message(lambda: run(out, files))


def test_a_shard_of_another_corpus(tmp_path: Path, files: Any) -> None:
    run(tmp_path / "out", files)
    write_shard(tmp_path / "out" / "shards" / "train-00001.safetensors", [([5], [6])], 400)
    assert "another corpus" in message(lambda: Prepared(tmp_path / "out").text())


def test_two_processes_do_not_prepare_one_folder(tmp_path: Path) -> None:
    with shards._alone(tmp_path / "p"):
        code = (
            "import sys; from pathlib import Path;"
            "from annotated_transformer.translation import shards\n"
            "with shards._alone(Path(sys.argv[1])): pass"
        )
        words = [sys.executable, "-c", code, str(tmp_path / "p")]
        second = subprocess.run(words, capture_output=True, text=True, check=False)
        assert "another process prepares it" in second.stderr
    with shards._alone(tmp_path / "p"):
        pass
