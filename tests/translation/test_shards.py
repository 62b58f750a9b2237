"""Tests of the shards, of batches from them, and of preparing a corpus."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.training.batches import make_batch, token_batches
from annotated_transformer.translation import shards
from annotated_transformer.translation.corpora import load_corpus
from annotated_transformer.translation.downloads import CorpusError
from annotated_transformer.translation.shards import (
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


@settings(deadline=None)
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
    assert isinstance(shard.tokens, np.memmap)


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


@settings(max_examples=50, deadline=None)
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


@settings(max_examples=40, deadline=None)
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
    write(tmp_path, "val", [("Xylophon " * 40, "xylophone " * 40)])
    run(tmp_path / "out", files)
    lines = [line for pair in CORPUS for line in pair]
    expected = BPETokenizer.train(lines, OPTIONS.vocabulary)
    assert Prepared(tmp_path / "out").tokenizer.merges == expected.merges  # type: ignore[union-attr]


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
            time.sleep(0.05)
            workers = children(process.pid)
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


def test_a_folder_in_use_is_left_alone(tmp_path: Path, files: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert "in use" in message(lambda: run(tmp_path / "out", files))
    assert contents(tmp_path / "out") == {"thesis.txt": b"mine"}
    (tmp_path / "out" / "plan.json").write_text("{")
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


def test_evaluation_keeps_every_line(tmp_path: Path, files: Any) -> None:
    pairs = [("", "blank"), ("a", "A"), ("a", "A")]
    write(tmp_path, "val", pairs)
    run(tmp_path / "out", files)
    assert list(Prepared(tmp_path / "out").lines("val")) == pairs


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


@pytest.mark.parametrize("name", ["prepared.json", "tokenizer.json"])
def test_a_damaged_description(tmp_path: Path, files: Any, name: str) -> None:
    run(tmp_path / "out", files)
    (tmp_path / "out" / name).write_text('{"plan": 3')
    with pytest.raises(ValueError, match=name):
        Prepared(tmp_path / "out")


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
