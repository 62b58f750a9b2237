"""Files that are hostile or unusual: each is one clear line, or read as it should be."""

import contextlib
import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from annotated_transformer.data import archives, downloads
from annotated_transformer.data.archives import locate_file
from annotated_transformer.data.corpora import Preparation, load_corpus, read_parallel
from annotated_transformer.data.downloads import DATA_VARIABLE, RemoteFile, fetch_file
from annotated_transformer.data.files import FileError, not_written, parse_object, write_atomically
from annotated_transformer.data.prepare import prepare_corpus
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.data.shards import Shard, TokenPairs, write_shard
from annotated_transformer.engine.config import DataOptions
from annotated_transformer.engine.texts import encode_pairs, learn_tokenizers
from tests.data import small
from tests.pipes import pipe_at

message = partial(small.message, kind=FileError)

TEXT = load_corpus("grammar", size=60)
OPTIONS = Preparation(vocabulary=300)
NESTED = "[" * 200_000 + "]" * 200_000


def write(folder: Path) -> dict[str, list[tuple[Path, Path]]]:
    """Write a small corpus, and return its files."""
    folder.mkdir(exist_ok=True)
    found = {}
    for split in ("train", "val"):
        paths = folder / f"{split}.de", folder / f"{split}.en"
        for path, side in zip(paths, (TEXT.source, TEXT.target), strict=True):
            path.write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
        found[split] = [paths]
    return found


def run(folder: Path, files: Any) -> Prepared:
    return prepare_corpus(folder, files, OPTIONS, workers=1, log=lambda _: None)


# -------------------------------------------------------------------- named pipes


def feed(path: Path, content: bytes) -> Path:
    """Make a named pipe into which a thread writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)

    def write_all() -> None:
        with contextlib.suppress(BrokenPipeError):  # the reader may leave before the end
            path.write_bytes(content)

    threading.Thread(target=write_all, daemon=True).start()
    return path


def test_a_corpus_is_prepared_from_named_pipes_and_again(tmp_path: Path) -> None:
    files = write(tmp_path / "plain")
    contents = {path: path.read_bytes() for pairs in files.values() for path in pairs[0]}

    def pipes() -> dict[str, list[tuple[Path, Path]]]:
        def pipe(path: Path) -> Path:
            return feed(tmp_path / "pipes" / path.name, contents[path])

        return {split: [(pipe(pairs[0][0]), pipe(pairs[0][1]))] for split, pairs in files.items()}

    found = run(tmp_path / "out", pipes())
    assert list(found.text("val")) == list(TEXT)
    expected = run(tmp_path / "other", files)
    assert found.checksums[:2] == expected.checksums[:2]
    assert found.shards == expected.shards
    before = (tmp_path / "out/prepared.json").stat().st_mtime_ns
    run(tmp_path / "out", pipes())
    assert (tmp_path / "out/prepared.json").stat().st_mtime_ns == before


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="another system")
def test_what_another_command_prints_is_prepared(tmp_path: Path) -> None:
    files = write(tmp_path / "plain")
    words = " ".join(f"<(cat {path})" for path in files["train"][0])
    valid = " ".join(map(str, files["val"][0]))
    line = (
        f"{sys.executable} -m annotated_transformer prepare {tmp_path / 'out'} --vocabulary 300 "
        f"--workers 1 --quiet --train-files {words} --valid-files {valid}"
    )
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(Prepared(tmp_path / "out").tokens()) == len(TEXT)


def test_pipes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        feed(tmp_path / name / "pipe", name.encode())
    found = [locate_file(tmp_path / name / "pipe", tmp_path / "u") for name in ("a", "b")]
    assert [path.read_bytes() for path in found] == [b"a", b"b"]


def test_a_pipe_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "u").write_bytes(b"")
    text = message(lambda: locate_file(feed(tmp_path / "pipe", b"a\n"), tmp_path / "u"))
    assert text.endswith("pipe: cannot be written: Not a directory; choose another folder")


# ------------------------------------------------------------- what cannot be written


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space, or choose another folder"),
        (errno.EDQUOT, "free some space, or choose another folder"),
        (errno.EACCES, "choose another folder"),
        (errno.EROFS, "choose another folder"),
        (errno.EISDIR, "choose another folder"),
    ],
)
def test_the_remedy_is_for_the_reason(number: int, remedy: str) -> None:
    error = OSError(number, os.strerror(number))
    text = str(not_written(error, "x/y"))
    assert text == f"x/y: cannot be written: {os.strerror(number)}; {remedy}"


def test_a_full_disk_while_unpacking_and_fetching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(archives, "_extract", full)
    monkeypatch.setattr(downloads, "_download", full)
    (tmp_path / "x.tgz").write_bytes(b"")
    text = message(lambda: locate_file(tmp_path / "x.tgz" / "a", tmp_path / "u"))
    assert text.startswith(f"{tmp_path / 'x.tgz'}: ")
    assert "No space left on device; free some space, or" in text
    text = message(
        lambda: fetch_file(RemoteFile("c/x", ("u",)), cache=tmp_path / "c", progress=False)
    )
    assert "No space left on device; free some space, or" in text
    assert list((tmp_path / "u").iterdir()) == []


@pytest.mark.parametrize("name", ["loop", "loop/below"])
def test_links_in_a_circle(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "back")
    (tmp_path / "back").symlink_to(tmp_path / "loop")
    files = write(tmp_path / "plain")
    assert "cannot be written: " in message(lambda: write_atomically(tmp_path / name, b"x"))
    assert "cannot be written: " in message(lambda: run(tmp_path / name, files))
    assert "not prepared" in message(lambda: Prepared(tmp_path / name))
    assert "no such file" in message(lambda: locate_file(tmp_path / name, tmp_path / "u"))
    pairs = {**files, "train": [(tmp_path / name, files["train"][0][1])]}
    assert "no such file" in message(lambda: run(tmp_path / "out", pairs))
    assert "such folder" in message(lambda: load_corpus("multi30k", mirror=tmp_path / name))
    assert (tmp_path / "loop").is_symlink()


def test_names_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)  # a mirror would be read instead
    files, name = write(tmp_path / "plain"), tmp_path / ("x" * 300)
    assert "File name too long" in message(lambda: write_atomically(name, b"x"))
    assert "File name too long" in message(lambda: run(name, files))
    assert "File name too long" in message(lambda: Prepared(name))
    assert "File name too long" in message(lambda: locate_file(name, tmp_path / "u"))
    assert "File name too long" in message(lambda: load_corpus("multi30k", mirror=name))
    assert "File name too long" in message(lambda: load_corpus("multi30k", cache=name))


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    files, out = write(tmp_path / "plain"), tmp_path / "out"
    (out / "text").mkdir(parents=True)
    (out / "text" / "thesis.txt").write_text("mine")
    assert f"{out}: has other files" in message(lambda: run(out, files))
    assert (out / "text" / "thesis.txt").read_text() == "mine"


# ---------------------------------------------------------------------- no home


def test_without_a_home_a_mirror_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    for name in ("XDG_CACHE_HOME", "HOME", DATA_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    (tmp_path / "multi30k").mkdir()
    text = message(lambda: load_corpus("multi30k", split="val", mirror=tmp_path, progress=False))
    assert "no home directory; set XDG_CACHE_HOME to a folder for files" in text
    for language in ("de", "en"):  # what is there need not be kept anywhere
        (tmp_path / f"multi30k/val.{language}.gz").write_bytes(b"altered")
    text = message(lambda: load_corpus("multi30k", split="val", mirror=tmp_path, progress=False))
    assert "altered or cut short" in text


# ---------------------------------------------------------------------- manifests


def test_json_that_is_nested_too_deeply() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_object(NESTED)
    with pytest.raises(ValueError, match="not a JSON object"):
        parse_object(b"[1]")
    assert parse_object(b'{"a": [1]}') == {"a": [1]}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    run(folder / "out", write(folder / "plain"))
    return folder


DELETE = object()
WRONG: list[tuple[list[str], Any]] = [
    ([], []), ([], 3), ([], "x"), ([], None),
    (["plan"], []), (["plan"], None), (["plan", "format"], 10**30), (["plan", "format"], {}),
    (["plan", "options"], []), (["plan", "options"], 1), (["plan", "options", "pair"], 7),
    (["plan", "options", "pair"], "de-../../x"), (["plan", "options", "vocabulary"], "300"),
    (["plan", "options", "vocabulary"], -1), (["plan", "options", "max_len"], 10**30),
    (["plan", "options", "max_len"], None), (["plan", "options", "tokenizer"], "words"),
    (["plan", "options", "max_ratio"], []), (["plan", "options", "more"], 1),
    (["plan", "sources"], []), (["plan", "sources", "train"], 3),
    (["plan", "sources", "train"], [[1]]), (["reports"], []), (["reports"], {"train": 1}),
    (["reports", "train", "kept"], "many"), (["reports", "val"], []), (["shards"], 1),
    (["shards"], []), (["shards"], [3]), (["shards", "train-00000"], 3), (["tokenizer"], 7),
    (["tokenizer"], DELETE), (["shards"], DELETE), (["reports"], DELETE), (["plan"], DELETE),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "value"), WRONG)
def test_a_description_of_wrong_types(prepared: Path, keys: list[str], value: Any) -> None:
    path = prepared / "out" / "prepared.json"
    good = path.read_bytes()
    data = {"": json.loads(good)}
    place: Any = data
    keys = ["", *keys]
    for key in keys[:-1]:
        place = place[key]
    if value is DELETE:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    try:
        path.write_text(json.dumps(data[""]))
        text = message(lambda: Prepared(prepared / "out").tokens("train"))
    finally:
        path.write_bytes(good)
    assert str(prepared / "out") in text
    assert len(Prepared(prepared / "out").tokens("train")) == len(TEXT)


@pytest.mark.parametrize(
    "name", ["prepared.json", "plan.json", "tokenizer.json", "shards/train-00000.safetensors"]
)
def test_a_pipe_in_place_of_a_file_of_ours(prepared: Path, name: str) -> None:
    out = prepared / "out"
    with pipe_at(out / name):
        if name == "plan.json":
            text = message(lambda: run(out, {}))
        else:
            text = message(lambda: Prepared(out).tokens("train"))
    assert name in text
    assert "not a regular file" in text


@pytest.mark.parametrize("content", [NESTED, "1" * 10_000, '{"plan": NaN}', "\x00", "", "\ufeff{}"])
@pytest.mark.parametrize("name", ["prepared.json", "plan.json", "tokenizer.json"])
def test_descriptions_that_are_no_json(prepared: Path, name: str, content: str) -> None:
    path = prepared / "out" / name
    good = path.read_bytes()
    files = {
        s: [(prepared / f"plain/{s}.de", prepared / f"plain/{s}.en")] for s in ("train", "val")
    }
    try:
        path.write_text(content, encoding="utf-8")
        assert str(path) in message(lambda: run(prepared / "out", files))
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize(
    "content", [NESTED, "[]", '{"train": 1, "val": 2}', '{"train": {"kept": 60}}', "{", ""]
)
def test_reports_that_are_damaged_are_made_again(tmp_path: Path, content: str) -> None:
    files, out = write(tmp_path / "plain"), tmp_path / "out"
    run(tmp_path / "whole", files)

    def stop(text: str) -> None:
        if text.startswith("encoding"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(out, files, OPTIONS, workers=1, log=stop)
    (out / "text" / "reports.json").write_text(content)
    run(out, files)
    assert (out / "prepared.json").read_bytes() == (tmp_path / "whole/prepared.json").read_bytes()


@pytest.mark.parametrize(
    "header", [NESTED, "[]", "3", "{}", '{"pairs": "1"}', '{"pairs": 1}', '{"pairs": [1]}']
)
def test_headers_of_shards_of_wrong_types(tmp_path: Path, header: str) -> None:
    write_shard(tmp_path / "x", [([5], [6])], 100)
    shard = Shard.open(tmp_path / "x")
    arrays = {"offsets": shard.offsets, "tokens": shard.tokens}
    content = safetensors.numpy.save(arrays, {"data": header})
    (tmp_path / "x").write_bytes(content)
    assert f"{tmp_path / 'x'}: damaged (" in message(
        lambda: TokenPairs.from_shards([Shard.open(tmp_path / "x")], verify=True)
    )


def test_arrays_of_wrong_types(tmp_path: Path) -> None:
    data = {"data": json.dumps({"pairs": 1, "sha256": ""})}
    for offsets, tokens in (
        (np.zeros(3, np.float32), np.zeros(0, np.uint16)),
        (np.zeros((3, 1), np.uint32), np.zeros(0, np.uint16)),
        (np.zeros(3, np.uint32), np.zeros(0, np.float32)),
        (np.zeros(3, np.uint32), np.zeros((0, 2), np.uint16)),
        (np.array([0, 5, 2], np.uint32), np.zeros(2, np.uint16)),
        (np.array([1, 1, 2], np.uint32), np.zeros(2, np.uint16)),
    ):
        content = safetensors.numpy.save({"offsets": offsets, "tokens": tokens}, data)
        (tmp_path / "x").write_bytes(content)
        assert "damaged (" in message(lambda: Shard.open(tmp_path / "x"))


# ------------------------------------------------------------------------ long lines


@pytest.mark.parametrize("blanks", [False, True])
def test_a_line_of_a_megabyte_holds_nothing_up(tmp_path: Path, blanks: bool) -> None:
    """Sub-words take minutes to learn from a word so long, and training refuses it anyway."""
    signs = "abcdefghijklmnopqrstuvwxyz" + " " * blanks
    long = "".join(random.Random(0).choices(signs, k=1_000_000))
    files = write(tmp_path / "plain")
    for path in files["train"][0]:
        path.write_text(f"{path.read_text(encoding='utf-8')}{long}\n", encoding="utf-8")
    start = time.monotonic()
    text, options = read_parallel(*files["train"][0]), DataOptions(vocabulary=600)
    tokenizers = learn_tokenizers(text, options)
    with pytest.raises(FileError, match=r"train.de, line 61: \d+ tokens, more than the"):
        encode_pairs(text, tokenizers, options)
    said: list[str] = []
    prepare_corpus(
        tmp_path / "out", files, replace(OPTIONS, vocabulary=600), workers=1, log=said.append
    )
    assert said[:2] == [
        "60 of 61 pairs kept",
        "  1 dropped (1.64%), too long, first train.de, line 61",
    ]
    assert time.monotonic() - start < 60
