"""Preparing a corpus: whatever happens, the folder holds the whole corpus or goes on to it."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.data import prepare as preparing
from annotated_transformer.data import tensors
from annotated_transformer.data.corpora import Preparation, load_corpus, read_parallel
from annotated_transformer.data.files import FileError, lock_folder, write_atomically
from annotated_transformer.data.prepare import (
    encode_shard,
    learn_subwords,
    prepare_corpus,
    read_text,
    worker_pool,
    write_text,
)
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.data.shards import Shard, write_shard
from annotated_transformer.translation.tokenizers import BPETokenizer, load_tokenizer
from tests.data.small import message, plain
from tests.processes import needs_proc

# ---------------------------------------------------------------------------- text

line = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))


@settings(max_examples=40)
@given(st.lists(st.tuples(line, line), max_size=25))
def test_text_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("text")
    write_text(pairs, folder, "train", 7)
    paths = sorted(folder.glob("*.txt"))
    assert len(paths) == -(-len(pairs) // 7)
    assert [pair for path in paths for pair in read_text(path)] == pairs


@pytest.mark.parametrize("step", [1, 2, 3, 8, 25])
def test_subwords_are_learned_from_pairs_at_equal_distances(tmp_path: Path, step: int) -> None:
    pairs = [(f"{a}{b} ab", f"{b}{a} ba") for a in "abcde" for b in "vwxyz"]
    write_text(pairs, tmp_path, "train", 7)
    write_text([("valid " * 9, "text " * 9)], tmp_path, "val", 7)
    learn_subwords(tmp_path, tmp_path / "learned.json", 262, step=step)
    taken = [side for pair in pairs[::step] for side in pair]
    expected = BPETokenizer.train(taken, 262)
    assert load_tokenizer(tmp_path / "learned.json").to_json() == expected.to_json()


def test_long_pairs_are_dropped_and_counted(tmp_path: Path) -> None:
    tokenizer = BPETokenizer([])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    write_text([("ab", "c"), ("abcd", "c"), ("abc", "abc"), ("", "ok")], tmp_path, "x", 9)
    out = tmp_path / "shard"
    encode_shard(tmp_path / "x-00000.txt", out, tmp_path / "tokenizer.json", 5)
    assert plain(Shard.open(out)) == [
        (tokenizer.encode(a), tokenizer.encode(b))
        for a, b in (("ab", "c"), ("abc", "abc"), ("", "ok"))
    ]
    assert Shard.open(out).header["long"] == 1
    assert Shard.open(out).header["first_long"] == 2
    assert max(len(side) for pair in plain(Shard.open(out)) for side in pair) == 4


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
def files(tmp_path: Path) -> dict[str, list[tuple[Path, Path]]]:
    return {
        "train": [write(tmp_path, "train", list(CORPUS))],
        "val": [write(tmp_path, "val", list(VALID))],
    }


def run(folder: Path, files: Any, options: Preparation = OPTIONS, workers: int = 1) -> list[str]:
    said: list[str] = []
    prepare_corpus(folder, files, options, workers=workers, shard_size=64, log=said.append)
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
    text = found.tokens("train", verify=True)
    decode = found.tokenizer.decode
    assert [(decode(s), decode(t)) for s, t in plain(text)] == list(CORPUS)
    assert len(text.parts) == 5
    assert list(found.text("val")) == list(VALID)
    assert len(found.tokens("val")) == len(VALID)
    assert found.languages == ("de", "en")
    assert dict(found.checksums).keys() == {"train.de", "train.en", "prepared.json"}
    assert "no split 'test'" in message(lambda: found.tokens("test"))
    assert not (tmp_path / "out" / "text").exists()


def test_the_vocabulary_is_learned_from_the_training_text(tmp_path: Path, files: Any) -> None:
    write(tmp_path, "val", [("Xylophon " * 20, "xylophone " * 20)])
    run(tmp_path / "out", files)
    lines = [line for pair in CORPUS for line in pair]
    expected = BPETokenizer.train(lines, OPTIONS.vocabulary)
    found = Prepared(tmp_path / "out").tokenizer
    assert isinstance(found, BPETokenizer)
    assert found.merges == expected.merges


def test_lower_case_prepares_what_the_text_in_lower_case_would_give(
    tmp_path: Path, files: Any
) -> None:
    run(tmp_path / "out", files, replace(OPTIONS, tokenizer="bpe-lower"))
    for path in tmp_path.glob("*.??"):
        path.write_text(path.read_text(encoding="utf-8").lower(), encoding="utf-8")
    run(tmp_path / "lower", files)
    found, expected = Prepared(tmp_path / "out"), Prepared(tmp_path / "lower")
    for split in ("train", "val"):
        assert plain(found.tokens(split)) == plain(expected.tokens(split))
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
    assert run(tmp_path / "out", files) == [
        f"{tmp_path / 'out'}: is already prepared; nothing to do"
    ]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


class Stop(BaseException):
    """What a test stops with, as a killed process does: nothing catches it."""


def test_stopped_at_any_write_it_goes_on(
    tmp_path: Path, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each atomic write is the last of some process; those after it go on to the same end."""
    run(tmp_path / "whole", files)
    real, left = write_atomically, [0]

    def counting(path: str | Path, data: bytes) -> None:
        if not left[0]:
            raise Stop
        left[0] -= 1
        real(path, data)

    class Inline:
        """Works in this process, so that the patch is seen."""

        def __init__(self, *_: object) -> None: ...

        def submit(self, work: Callable[..., None], *arguments: object, **named: object) -> Any:
            work(*arguments, **named)
            from concurrent.futures import Future

            future: Future[None] = Future()
            future.set_result(None)
            return future

        def shutdown(self, **_: object) -> None: ...

    for module in (preparing, tensors):
        monkeypatch.setattr(module, "write_atomically", counting)
    monkeypatch.setattr(preparing, "ProcessPoolExecutor", Inline)
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
    write_text(CORPUS, tmp_path / "text", "train", 64)
    write_text(VALID, tmp_path / "text", "val", 64)
    reports = json.loads((out / "prepared.json").read_text())["reports"]
    (tmp_path / "text" / "reports.json").write_text(json.dumps(reports))
    os.rename(tmp_path / "text", out / "text")
    (out / "prepared.json").unlink()
    for name in ("train-00001", "val-00000"):
        (out / "shards" / f"{name}.safetensors").unlink()
    (out / "shards" / ".train-00001.safetensors.4194305.part").write_bytes(b"half")
    kept = out / "shards" / "train-00000.safetensors"
    before = kept.stat().st_mtime_ns
    assert run(out, files) == ["encoding 2 shards"]
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


@needs_proc
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
    with lock_folder(tmp_path / "out", wait=True):  # by a worker that had just begun to start
        pass
    process.stderr.close()
    assert not (tmp_path / "out" / "prepared.json").exists()
    said: list[str] = []
    files, options = {"train": [train], "val": [val]}, Preparation(vocabulary=700)
    prepare_corpus(tmp_path / "out", files, options, workers=1, log=said.append)
    assert not any("pairs kept" in text for text in said)  # cleaned already
    found = Prepared(tmp_path / "out")
    assert [found.tokenizer.decode(s) for s, _ in plain(found.tokens())] == [a for a, _ in pairs]


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
        for path in folder.glob("train-*"):
            path.unlink()
        raise Stop

    run(tmp_path / "whole", files)
    places: list[tuple[Preparation, object, str, Callable[..., None]]] = [
        (OPTIONS, preparing._Job, "encode", stop),
        (Preparation(vocabulary=401), shutil, "rmtree", delete_half),
    ]
    for options, owner, name, fault in places:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            with pytest.raises(Stop):
                run(tmp_path / "out", files, options)
    run(tmp_path / "out", files)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_folder_in_use_is_left_alone(tmp_path: Path, files: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert "other files" in message(lambda: run(tmp_path / "out", files))
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
    assert len(Prepared(tmp_path / "out").tokens()) == 301


def test_sentences_of_the_test_in_the_training_text_are_reported(
    tmp_path: Path, files: Any
) -> None:
    shared = [(CORPUS.source[7], "something else"), (CORPUS.source[9], CORPUS.target[9])]
    write(tmp_path, "val", [*list(VALID), *shared, shared[0]])
    said = "\n".join(run(tmp_path / "out", files))
    assert "2 distinct source sentences of val" in said
    assert f"the first on line {len(VALID) + 1} of val" in said
    assert len(Prepared(tmp_path / "out").tokens()) == len(CORPUS)


def test_what_two_texts_for_evaluation_share_is_reported(tmp_path: Path, files: Any) -> None:
    both = ("beides", "both")
    write(tmp_path, "val", [*VALID, both])
    files["test"] = [write(tmp_path, "test", [("neu", "new"), both])]
    said = run(tmp_path / "out", files)
    note = "1 distinct source sentences of test also occur in val, the first on line 2 of test; "
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
    assert said.endswith("continue with --allow-drift")
    options = replace(OPTIONS, allow_drift=True)
    (noted,) = (line for line in run(tmp_path / "out", files, options) if "line n-1" in line)
    found = Prepared(tmp_path / "out")
    assert noted == f"val: {found.reports['val']['notes'][0]}"
    assert list(found.text("val")) == pairs


def test_evaluation_keeps_every_line(tmp_path: Path, files: Any) -> None:
    write(tmp_path, "val", [("", "blank"), ("a", " ")])
    assert "every pair has a blank side" in message(lambda: run(tmp_path / "out", files))
    pairs = [("", "blank"), ("a", "A"), ("a", "A")]
    write(tmp_path, "val", pairs)
    run(tmp_path / "out", files)
    assert list(Prepared(tmp_path / "out").text("val")) == pairs


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
        f"warning: val: 1 of 12 {why} 5; the loss is measured on the other 11 only",
        f"train: 2 of 300 {why} 101",
    ]
    for split, lost in places.items():
        report = found.reports[split]
        assert report["kept"] == len(found.tokens(split)) == len(sides[split]) - len(lost)
        assert report["dropped"] == {"more than 60 tokens": len(lost)}
        assert report["first"]["more than 60 tokens"].startswith(f"{split}, pair {lost[0]} ")
    assert len(found.text("val")) == len(val)  # what is scored keeps every line


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_without_pairs_is_named_with_the_option(
    tmp_path: Path, files: Any, split: str
) -> None:
    short = Preparation(vocabulary=400, max_len=30)
    write(tmp_path, "train", [*CORPUS, *((f"a {n}", f"b {n}") for n in range(300))])
    write(tmp_path, "val", [("a", "b")])
    write(tmp_path, split, [(f"Wort {n} " * 15, f"word {n} " * 15) for n in range(300)])
    text = message(lambda: run(tmp_path / "out", files, short))
    assert text == f"{split}: all 300 pairs have more than 30 tokens; raise --max-len"
    said = run(tmp_path / "out", files, replace(short, max_len=256))
    assert "starting over with other options" in said[0]
    assert len(Prepared(tmp_path / "out").tokens(split)) == 300


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
        assert "starting over with other" in said[0]
        assert len(Prepared(tmp_path / folder).tokens()) == 300
    assert "no such file" in message(
        lambda: run(tmp_path / "5", {"train": [(tmp_path / "none", train[1])]})
    )


parts_of_paths = st.lists(st.sampled_from(["..", "/", "a", "en", ".", "-", "\\"]), max_size=6)


@settings(max_examples=60)
@given(parts_of_paths.map("".join).filter(lambda code: not code.isalpha()))
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
        (Preparation(pair=7), "--pair 7: give a value such as 'de-en'"),  # type: ignore[arg-type]
        (Preparation(vocabulary=10), f"--vocabulary 10: must be at least {smallest}"),
        (Preparation(vocabulary=smallest - 1), "--vocabulary"),
        (Preparation(max_len=1), "--max-len 1"),
        (Preparation(max_len=65_536), "at most 65535"),
    ):
        assert words in message(partial(run, tmp_path / "out", nowhere, options))
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
    with pytest.raises(FileError, match="link: cannot be written: File exists; choose another"):
        run(tmp_path / "link", files)


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
    ours = [(decode(s), decode(t)) for s, t in plain(found.tokens())]
    assert ours == list(CORPUS)[:200] == list(read_parallel(*paths))
    assert found.reports["train"]["pairs"] == 200


def test_texts_in_segments_must_belong_together(tmp_path: Path, files: Any) -> None:
    files["train"] = [numbered(tmp_path, "xml", 100)]
    assert "segment 1 is 1/1, but in" in message(lambda: run(tmp_path / "out", files))


def test_a_report_says_that_lines_are_not_those_of_the_file(tmp_path: Path, files: Any) -> None:
    source, target = tagged(tmp_path, 100)
    for path in (source, target):
        path.write_text(f"{path.read_text(encoding='utf-8')}\n", encoding="utf-8")
    files["train"] = [(source, target)]
    said = run(tmp_path / "out", files)
    assert said[1].endswith("blank, first train.tags.de-en.de (without tags), line 101")


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
    assert f"{path}: no such file" in message(lambda: Prepared(tmp_path / "out"))
    path.write_bytes(own)
    assert len(Prepared(tmp_path / "out").tokens()) == len(CORPUS)


def test_a_folder_of_an_older_format_is_to_be_prepared_again(tmp_path: Path, files: Any) -> None:
    out = tmp_path / "out"
    run(out, files)
    for name in ("prepared.json", "plan.json"):
        data = json.loads((out / name).read_text(encoding="utf-8"))
        data.pop("tokenizer", None)
        data.get("plan", data)["format"] = 1
        (out / name).write_text(json.dumps(data), encoding="utf-8")
    text = message(lambda: Prepared(out))
    assert text.startswith(f"{out / 'prepared.json'}: damaged, or from another version (format 1, ")
    assert text.endswith("prepare the corpus again")
    assert "prepared with other format; choose another" in message(lambda: run(out, files))


def test_a_shard_of_another_corpus(tmp_path: Path, files: Any) -> None:
    run(tmp_path / "out", files)
    write_shard(tmp_path / "out" / "shards" / "train-00001.safetensors", [([5], [6])], 400)
    assert "another corpus" in message(lambda: Prepared(tmp_path / "out").tokens())


def test_a_shard_of_as_many_pairs_of_another_corpus(tmp_path: Path, files: Any) -> None:
    run(tmp_path / "out", files)
    run(tmp_path / "other", files, replace(OPTIONS, vocabulary=OPTIONS.vocabulary + 10))
    shards = [tmp_path / name / "shards" / "train-00001.safetensors" for name in ("out", "other")]
    assert Shard.open(shards[0]).header["pairs"] == Shard.open(shards[1]).header["pairs"]
    shutil.copy(shards[1], shards[0])
    assert "another corpus" in message(lambda: Prepared(tmp_path / "out").tokens())


def test_two_processes_do_not_prepare_one_folder(tmp_path: Path, files: Any) -> None:
    out = tmp_path / "p"
    out.mkdir()
    with lock_folder(out, wait=False):
        pipe = tmp_path / "63"
        os.mkfifo(pipe)  # nobody writes: who opens it would wait
        piped = {**files, "train": [(pipe, pipe)]}
        assert "another process is preparing it" in message(lambda: run(out, piped))
        assert not any(out.iterdir())
    run(out, files)


def test_what_cannot_be_read_leaves_no_folder(tmp_path: Path, files: Any) -> None:
    missing = {**files, "train": [(tmp_path / "none", tmp_path / "none")]}
    assert "no such file" in message(lambda: run(tmp_path / "out", missing))
    assert not (tmp_path / "out").exists()


def test_half_a_text_of_a_killed_process_is_removed(tmp_path: Path, files: Any) -> None:
    half = tmp_path / "out" / ".val.de.999999999.part"
    half.parent.mkdir()
    half.write_bytes(b"half")
    run(tmp_path / "out", files)
    assert not half.exists()


def test_no_bar_is_shown_where_the_error_stream_is_closed(
    tmp_path: Path, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    prepare_corpus(tmp_path / "out", files, OPTIONS, workers=1, shard_size=64, progress=True)
    assert (tmp_path / "out" / "prepared.json").exists()
