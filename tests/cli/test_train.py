"""``train``: what it leaves, and what it refuses."""

import errno
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from annotated_transformer.cli import systems, train
from annotated_transformer.cli.main import main
from annotated_transformer.data.corpora import ParallelText, load_corpus
from annotated_transformer.data.downloads import DATA_VARIABLE
from annotated_transformer.engine.checkpointer import checkpoint_paths
from annotated_transformer.engine.checkpoints import load_tensors
from annotated_transformer.engine.config import default_options
from tests.cli.command import SIZES, Capture, fails, write


def test_train_leaves_system_and_record(trained: Path) -> None:
    record = json.loads((trained / "record.json").read_text(encoding="utf-8"))
    assert record["updates"] == 6
    assert record["scores"]["val"]["sentences"] == 5
    assert record["scores"]["val, averaged"]["sentences"] == 5
    assert record["options"]["corpus"] == "files"
    names = ("model.safetensors", "averaged.safetensors")
    losses = {name: load_tensors(trained / name)[1]["valid_loss"] for name in names}
    assert record["weights"] == min(losses, key=losses.__getitem__)
    assert list(trained.rglob("*.part")) == []


def test_the_same_command_again_scores_again(
    trained: Path, texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    newest = checkpoint_paths(trained)[-1]
    before = newest.read_bytes()
    record = tmp_path / "deep" / "record.json"
    words = ["train", *SIZES.split(), *texts, "--out", str(trained), "--record", str(record)]
    assert main(words) == 0
    assert "nrefs:1|" in capsys.readouterr().out
    assert record.exists()
    assert checkpoint_paths(trained)[-1] == newest
    assert newest.read_bytes() == before


def test_other_options_in_the_folder(trained: Path, texts: list[str], capsys: Capture) -> None:
    capsys.readouterr()
    words = ["train", *SIZES.split(), *texts, "--out", str(trained), "--seed", "4"]
    assert main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--seed 0, not 4" in line


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (b"a\nb\n", b"a\n", "line 2 has no partner"),
        (b"", b"", "is empty"),
        (b"\n \n", b"a\nb\n", "blank side"),
        (b"a\nf\xfcr\n", b"a\nb\n", "train.de, line 2: byte 2"),
        (b"a\n", None, "train.en: no such file"),
    ],
)
def test_bad_files(
    source: bytes, target: bytes | None, expected: str, tmp_path: Path, capsys: Capture
) -> None:
    files = [tmp_path / "train.de", tmp_path / "train.en"]
    for path, data in zip(files, (source, target), strict=True):
        if data is not None:
            path.write_bytes(data)
    words: list[str | Path] = [*SIZES.split(), "--train-files", *files, "--valid-files", *files]
    assert expected in fails(capsys, "train", *words, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_long_sentence_names_file_line_and_remedy(
    texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    files = [write(tmp_path / name, ["kurz", "", "wort " * 300]) for name in ("a.de", "a.en")]
    words = ["train", *SIZES.split(), "--vocabulary", "262", *texts[3:], "--train-files", *files]
    assert main([*words, "--out", str(tmp_path / "run")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"a\.de, line 3: \d+ tokens, .*--max-len.*--skip-long", line)
    assert not (tmp_path / "run").exists()


def test_sentences_that_are_too_long_are_not_scored(
    texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """As --skip-long leaves them out of validation; before, the run could never be scored."""
    valid = [write(tmp_path / name, ["kurz", "wort " * 300]) for name in ("a.de", "a.en")]
    words = ["train", *SIZES.split(), *texts[:4], *valid, "--skip-long"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    told = "files val: 1 of 2 sentences are too long for --max-len 128, and are not scored"
    assert told in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "record.json").read_bytes())
    assert record["scores"]["val"]["sentences"] == 1


def test_a_folder_for_tensorboard_that_cannot_be_is_refused(
    texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "file").write_text("")
    words = [*SIZES.split(), *texts, "--tensorboard", str(tmp_path / "file")]
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("needs tensorboard")
    assert "--tensorboard" in (line := fails(capsys, "train", *words, "--out", tmp_path / "run"))
    assert "is a file; choose a folder" in line


def test_blank_lines_are_reported(texts: list[str], tmp_path: Path, capsys: Capture) -> None:
    lines = [*load_corpus("grammar", size=40).source, "", "x"]
    files = [write(tmp_path / name, lines) for name in ("a.de", "a.en")]
    words = ["train", *SIZES.split(), *texts[3:], "--train-files", *files, "--updates", "1"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert "1 of 42 pairs dropped with a blank side: line 41" in capsys.readouterr().err


def test_a_mirror_without_the_file(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    line = fails(capsys, "train", "--corpus", "multi30k", "--mirror", tmp_path / "none")
    assert f"{tmp_path / 'none'}: no such folder" in line
    (tmp_path / "multi30k").mkdir()
    (tmp_path / "multi30k/train.de.gz").write_bytes(b"cut short")
    line = fails(capsys, "train", "--corpus", "multi30k", "--mirror", tmp_path)
    assert "train.de.gz: altered or cut short" in line


def test_a_full_disk(
    texts: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    out = tmp_path / "run"
    assert main(["train", *SIZES.split(), *texts, "--out", str(out)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.endswith("No space left on device; free some space, or choose another folder")
    assert list(out.rglob("*.*")) == []


def test_a_disk_that_is_really_full(texts: list[str], tmp_path: Path, capsys: Capture) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(small)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system of our own can be mounted here")
    try:
        assert main(["train", *SIZES.split(), *texts, "--out", str(small / "run")]) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert ".safetensors: cannot be written: No space left on device" in line
        assert list(small.rglob("*.part")) == []
        load_tensors(small / "run/model.safetensors")  # what was written before is whole
        assert main(["translate", str(small / "run"), texts[4], "--quiet"]) == 0
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_known_corpus_is_looked_over(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    text = load_corpus("grammar", size=300)
    held = ParallelText(
        "iwslt2014", "val", text.languages, text.source[:9], text.target[:9], text.origin,
        text.checksums,
    )  # fmt: skip
    drifted = ParallelText(
        "iwslt2014", "train", text.languages, text.source[:-1], text.target[1:], text.origin,
        (("a.de", "0"), ("a.en", "0")),
    )  # fmt: skip
    texts = {"train": drifted, "val": held}
    monkeypatch.setattr(systems, "load_corpus", lambda name, pair, split, **_: texts[split])
    train.load_texts(default_options({"corpus": "iwslt2014"}).data, bar=False)
    said = capsys.readouterr().err
    assert "line n is translated by line n-1 of a.en" in said
    assert "9 distinct source sentences of val also occur in the training text" in said


def test_files_are_looked_over(texts: list[str], tmp_path: Path, capsys: Capture) -> None:
    page = write(tmp_path / "page.de", ["<!DOCTYPE html>", "<p>404</p>"])
    words = ["train", *SIZES.split(), *texts, "--out", str(tmp_path / "m")]
    assert f"{page}: an HTML page" in fails(capsys, *[page if w == texts[1] else w for w in words])
    text = load_corpus("grammar", size=300)
    drifted = [
        write(tmp_path / "d.de", text.source[:-1]),
        write(tmp_path / "d.en", text.target[1:]),
    ]
    words = ["train", *SIZES.split(), "--train-files", *drifted, "--valid-files", *drifted]
    assert main([*words, "--updates", "1", "--out", str(tmp_path / "m")]) == 0
    said = capsys.readouterr().err
    assert "line n is translated by line n-1 of d.en" in said
    assert "299 distinct source sentences of val also occur in the training text" in said


def test_files_are_not_lost_where_an_option_is_given_twice(
    texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    words = ["train", *SIZES.split(), *texts[:3], *texts, "--out", str(tmp_path / "m")]
    told = "--train-files: given twice; name all files after one --train-files"
    assert told in fails(capsys, *words)
    assert not (tmp_path / "m").exists()


def test_the_end_names_folder_record_and_next_command(
    trained: Path, texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "a run"
    shutil.copytree(trained, folder)
    record = tmp_path / "record.json"
    words = [*SIZES.split(), *texts, "--out", str(folder), "--record", str(record)]
    assert main(["train", *words]) == 0
    said = capsys.readouterr().err
    assert f"the system is in {folder}, the record of its run in {record}\n" in said
    assert f"next: annotated-transformer translate '{folder}' FILE\n" in said
    assert re.search(r"6 take [\d:]+; validation loss \d\.\d{4}\n", said)


def test_the_record_is_not_one_of_the_texts(
    texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    place = texts[texts.index("--valid-files") + 1]
    before = Path(place).read_bytes()
    words = [*SIZES.split(), *texts, "--out", str(tmp_path / "run"), "--record", place]
    assert f"--record {place}: is also the input" in fails(capsys, "train", *words)
    assert Path(place).read_bytes() == before


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        words = [sys.executable, "-m", "annotated_transformer", "train", "--updates", "1"]
        done = subprocess.run(words, env=os.environ | place, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert port in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_without_its_world_is_told(
    texts: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    line = fails(capsys, "train", *SIZES.split(), *texts, "--out", tmp_path / "run")
    assert "RANK is set, but not WORLD_SIZE" in line


def test_own_files_need_no_corpus(texts: list[str], tmp_path: Path) -> None:
    words = SIZES.replace("--corpus files ", "").split()
    assert main(["train", *words, *texts, "--out", str(tmp_path), "--updates", "1"]) == 0
    assert json.loads((tmp_path / "record.json").read_text())["options"]["corpus"] == "files"
