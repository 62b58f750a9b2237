"""The command line, as a user meets it: results, one-line errors, interruptions."""

import errno
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch

from annotated_transformer.data.corpora import ParallelText, load_corpus
from annotated_transformer.data.downloads import DATA_VARIABLE
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.engine.journal import read_journal
from annotated_transformer.results.machine_translation import ABLATION, read_records
from annotated_transformer.translation import command as module
from annotated_transformer.translation.checkpoints import load_system, load_tensors, trainings
from annotated_transformer.translation.command import (
    Evaluate,
    Prepare,
    Train,
    Translate,
    main,
    parse,
    unboxed,
)
from annotated_transformer.translation.evaluation import by_length
from annotated_transformer.translation.system import RECIPES, System, translate_lines

SIZES = (
    "--corpus files --layers 1 --vocabulary 400 --updates 6 --warmup 3 --max-len 128 --quiet "
    "--average 2 --average-every 2"
)
Capture = pytest.CaptureFixture[str]


def write(path: Path, lines: list[str] | tuple[str, ...]) -> str:
    """Write lines and return the path as text."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the options that name a small text."""
    folder = tmp_path_factory.mktemp("texts")
    words = []
    for flag, text in (
        ("--train-files", load_corpus("grammar", size=60)),
        ("--valid-files", load_corpus("grammar", split="val").head(5)),
    ):
        name = flag.removeprefix("--")
        words += [flag, write(folder / f"{name}.de", text.source)]
        words += [write(folder / f"{name}.en", text.target)]
    return words


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """Return the folder of a training by the command line."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", *SIZES.split(), *texts, "--out", str(folder)]) == 0
    return folder


def of_grammar(trained: Path, folder: Path) -> Path:
    """Copy a training, as one of a corpus that the package knows."""
    shutil.copytree(trained, folder)
    config = json.loads((folder / "config.json").read_text())
    config["training"]["options"]["corpus"] = "grammar"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fails(capsys: Capture, *words: str | Path, status: int = 2) -> str:
    """Run a command that must fail in one line; return the line."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("annotated-transformer: ")
    return line


# --- options -------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train"],
        ["translate"],
        ["evaluate"],
        ["average"],
        ["compare"],
        ["ablation"],
        ["prepare"],
    ],
)
def test_help_is_for_newcomers(words: list[str], capsys: Capture) -> None:
    assert main([*words, "--help"]) == 0
    out = capsys.readouterr().out
    assert "{None}" not in out
    if not words:
        assert all(name in out for name in ("train", "translate", "evaluate"))


def test_every_option_has_a_help(capsys: Capture) -> None:
    main(["train", "--help"])
    out = capsys.readouterr().out
    for option in re.findall(r"^│ (--[a-z-]+)", out, re.M):
        after = out.split(f"│ {option}", 1)[1].replace("\n", " ")
        assert re.match(r"[^│]*(│ +│)? *[A-Za-z]", after), option


@pytest.mark.parametrize("words", [["--corpus", "multi30k"], ["--corpus=multi30k"]])
def test_the_corpus_brings_its_recipe(words: list[str]) -> None:
    command = parse(["train", *words, "--seed", "3"])
    assert isinstance(command, Train)
    assert command.training.vocabulary == RECIPES["multi30k"].vocabulary
    assert command.training.seed == 3
    assert parse(["train"]) == Train(training=RECIPES["grammar"])


def test_translate_and_evaluate_are_parsed() -> None:
    command = parse(["translate", "m", "in.txt", "-o", "out.txt", "--quiet"])
    assert command == Translate(Path("m"), Path("in.txt"), Path("out.txt"), quiet=True)
    assert parse(["translate", "m"]) == Translate(Path("m"))
    assert parse(["evaluate", "m", "--split", "val"]) == Evaluate(Path("m"), split="val")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "train, plot, translate, evaluate"),
        ("trian", "trian"),
        ("train --preset huge", "'huge'"),
        ("train --layers many", "--layers"),
        ("train --model perceptron", "'transformer', 'rnn', 'rnn-attention', 'rnn-dot', 'conv"),
        ("train --model rnn --norm pre", "--model rnn: has no --preset but tiny, and no --norm"),
        ("train --model convolution --preset base", "has no --preset but tiny"),
        ("train --model rnn-dot --dropout 1", "--dropout 1.0: must be at least 0 and below 1"),
        ("train --model rnn --heads 4", "Unrecognized options: --heads, 4; see"),
        ("train --layers", "--layers"),
        ("train --no-such-option 3", "--no-such-option"),
        ("translate", "translate"),
        ("train --corpus wmt99", "--corpus wmt99: choose among grammar, multi30k, iwslt2014"),
        ("train --corpus wmt14", "too large for memory; prepare it"),
        ("train --updates 0", "--updates 0: must be greater than 0"),
        ("train --pair de-fr", "de-fr"),
        ("train --corpus files", "--train-files"),
        ("train --corpus files --pair de --train-files a b --valid-files a b", "--pair 'de'"),
        (
            "prepare p --pair de-/../../x --train-files a b --valid-files a b",
            "--pair 'de-/../../x'",
        ),
        (
            "prepare p --pair de-de --train-files a b --valid-files a b",
            "give two different languages",
        ),
        ("evaluate --hypotheses a --references b --beam 5", "--beam: is for a system"),
        ("evaluate --hypotheses a --references b --split val", "--split: is for a system"),
        ("evaluate --hypotheses a --references b --averaged", "--averaged: is for a system"),
        ("evaluate", "--hypotheses"),
        ("translate nowhere", "nowhere: no checkpoint here"),
        ("train --corpus prepared", "--prepared FOLDER go together"),
        ("train --corpus grammar --prepared p", "go together"),
        ("train --prepared p --corpus grammar", "go together"),
        ("train --prepared nowhere", "nowhere: not prepared"),
        ("prepare p", "--train-files"),
        ("prepare p --corpus grammar --train-files a b", "brings its files: give no others"),
        ("prepare p --corpus wmt99", "--corpus wmt99: choose among files, grammar"),
        ("prepare p --corpus multi30k --pair de-xx", "no language pair 'de-xx'"),
        ("prepare p --vocabulary 0", "--vocabulary 0"),
        ("prepare p --max-len 70000", "--max-len 70000"),
        ("prepare p --workers 0", "--workers 0"),
        ("prepare p --train-files a b --valid-files a b", "a: no such file"),
    ],
)
def test_wrong_options_are_one_line(line: str, expected: str, capsys: Capture) -> None:
    assert expected in fails(capsys, *line.split())


def test_a_terminal_of_few_signs_gets_the_same_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "--modle", "rnn"]
    line = fails(capsys, *words)
    assert line.endswith(": Unrecognized options: --modle, rnn; see annotated-transformer --help")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(words) == 2
    assert capsys.readouterr().err == f"{line}\n"


def test_an_unknown_box_is_still_a_line() -> None:
    assert unboxed("") == "these options are not understood; see annotated-transformer --help"


# --- training ------------------------------------------------------------------


def test_train_leaves_system_and_record(trained: Path) -> None:
    record = json.loads((trained / "record.json").read_text(encoding="utf-8"))
    assert record["updates"] == 6
    assert record["scores"]["val"]["sentences"] == 5
    assert record["scores"]["val, averaged"]["sentences"] == 5
    assert record["options"]["corpus"] == "files"
    assert list(trained.rglob("*.part")) == []


def test_the_same_command_again_scores_again(
    trained: Path, texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    newest = trainings(trained)[-1]
    before = newest.read_bytes()
    record = tmp_path / "deep" / "record.json"
    words = ["train", *SIZES.split(), *texts, "--out", str(trained), "--record", str(record)]
    assert main(words) == 0
    assert "nrefs:1|" in capsys.readouterr().out
    assert record.exists()
    assert trainings(trained)[-1] == newest
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
    words = [*SIZES.split(), "--train-files", *files, "--valid-files", *files]
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


def test_blank_lines_are_reported(texts: list[str], tmp_path: Path, capsys: Capture) -> None:
    lines = [*load_corpus("grammar", size=40).source, "", "x"]
    files = [write(tmp_path / name, lines) for name in ("a.de", "a.en")]
    words = ["train", *SIZES.split(), *texts[3:], "--train-files", *files, "--updates", "1"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert "1 of 42 pairs dropped, a side is blank: lines 41" in capsys.readouterr().err


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


# --- translating ---------------------------------------------------------------


def test_translate_files_and_standard_input(
    trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '\nDer Hund schläft.\n\nEr sagt "ja"\tund geht.\r\n'
    (tmp_path / "in.txt").write_bytes(text.encode())
    out = tmp_path / "deep/out.txt"
    assert main(["translate", str(trained), str(tmp_path / "in.txt"), "-o", str(out)]) == 0
    lines = out.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 5
    assert lines[0] == lines[2] == lines[4] == ""
    for content in (text, text.rstrip(), "\ufeff" + text):
        stream = io.TextIOWrapper(io.BytesIO(content.encode()))
        monkeypatch.setattr(sys, "stdin", stream)
        capsys.readouterr()
        assert main(["translate", str(trained)]) == 0
        assert capsys.readouterr().out.split("\n") == lines
    assert [path.name for path in out.parent.iterdir()] == ["out.txt"]


def test_translate_nothing(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "in.txt").write_bytes(b"")
    capsys.readouterr()
    assert main(["translate", str(trained), str(tmp_path / "in.txt")]) == 0
    assert capsys.readouterr().out == ""


def test_bad_standard_input(
    trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for data, expected in (
        (b"gut\nf\xfcr\n", "standard input, line 2: byte 2 (0xfc) is not valid UTF-8"),
        (b"\n\n" + b"wort " * 300, "standard input, line 3: "),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert expected in fails(capsys, "translate", trained)


def test_a_terminal_is_told_what_to_do(
    trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(b""))
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", stream)
    assert main(["translate", str(trained)]) == 0
    assert "Ctrl-D" in capsys.readouterr().err


def test_bad_input_writes_no_output(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "in.txt").write_bytes(b"gut\n\xff\n")
    (tmp_path / "out.txt").write_text("old")
    words = ("translate", trained, tmp_path / "in.txt", "-o", tmp_path / "out.txt")
    assert "in.txt, line 2: byte 1" in fails(capsys, *words)
    write(tmp_path / "in.txt", ["gut", "wort " * 300])
    assert "in.txt, line 2: " in fails(capsys, *words)
    assert "no such file" in fails(capsys, "translate", trained, tmp_path / "none", "-o", "x")
    assert (tmp_path / "out.txt").read_text() == "old"
    assert list(tmp_path.rglob("*.part")) == []


def test_a_damaged_system(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    path = tmp_path / "copy/model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert f"{path}: damaged" in fails(capsys, "translate", tmp_path / "copy", path)
    (tmp_path / "copy/tokenizer.json").write_text("{}")
    assert "tokenizer.json: " in fails(capsys, "translate", tmp_path / "copy", path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_is_full(trained: Path, texts: list[str], capsys: Capture) -> None:
    line = fails(capsys, "translate", trained, texts[4], "-o", "/dev/full", "--quiet")
    assert "/dev/full: cannot be written: No space left on device" in line
    assert not Path("/dev/full").is_file()


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (BrokenPipeError(), 0, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "output: No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (FloatingPointError("the loss is nan"), 2, "the loss is nan"),
    ],
)
def test_what_ends_a_command(
    error: BaseException,
    status: int,
    expected: str,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(module, "load_system", fail)
    assert main(["translate", "m"]) == status
    assert capsys.readouterr().err == (f"annotated-transformer: {expected}\n" if expected else "")


# --- evaluating ----------------------------------------------------------------


def test_evaluate_two_files(tmp_path: Path, capsys: Capture) -> None:
    is_ = ["a small dog sleeps in it .", "", "yes"]
    should = ["the small dog sleeps in it .", "", "y"]
    files = [write(tmp_path / "is", is_), write(tmp_path / "should", should)]
    assert main(["evaluate", "--hypotheses", files[0], "--references", files[1]]) == 0
    out = capsys.readouterr().out
    assert f"BLEU = {sacrebleu.corpus_bleu(is_, [should]).score:.2f}" in out
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in out
    write(tmp_path / "is", is_[1:])
    words = ("evaluate", "--hypotheses", files[0], "--references", files[1])
    assert "line 3 has no partner" in fails(capsys, *words)
    write(tmp_path / "is", [])
    assert "is: the file is empty" in fails(capsys, *words)
    page = write(tmp_path / "page", ["<!DOCTYPE html>", "<p>404</p>"])
    words = ("evaluate", "--hypotheses", page, "--references", page)
    assert "page: an HTML page" in fails(capsys, *words)


def test_evaluate_a_split(trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_corpus", lambda *a, **_: load_corpus(*a).head(4))
    words = ["evaluate", str(trained), "--corpus", "grammar", "--quiet"]
    assert main([*words, "--split", "val", "--beam", "1"]) == 0
    assert "grammar val, greedy, 4 sentences" in capsys.readouterr().out
    assert main(words) == 0
    assert "grammar test, beam 4, alpha 0.6, 4 sentences" in capsys.readouterr().out
    assert "no split 'nope'" in fails(capsys, *words, "--split", "nope")
    assert "--corpus files: choose among" in fails(capsys, "evaluate", trained)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--beam 0", "--beam 0: must be at least 1"),
        ("--beam 100000", "--beam 100000: must be at most"),
        ("--alpha -1", "--alpha -1.0: must be from 0 to 10"),
        ("--alpha nan", "--alpha nan: must be from 0 to 10"),
        ("--alpha inf", "--alpha inf: must be from 0 to 10"),
        ("--alpha much", "--alpha"),
    ],
)
def test_searches_out_of_range(option: str, expected: str, trained: Path, capsys: Capture) -> None:
    for command in ("translate", "evaluate"):
        assert expected in fails(capsys, command, trained, *option.split())


def test_translate_with_a_beam(trained: Path, texts: list[str], capsys: Capture) -> None:
    found = []
    for words in ([], ["--beam", "4", "--alpha", "0.6"], ["--beam", "1"], ["--beam", "3"]):
        assert main(["translate", str(trained), texts[1], *words]) == 0
        found.append(capsys.readouterr().out)
    lines = Path(texts[1]).read_text(encoding="utf-8").splitlines()
    system = load_system(trained)
    assert found[0] == found[1] == "".join(f"{t}\n" for t in translate_lines(system, lines, beam=4))
    assert found[2] == "".join(f"{t}\n" for t in translate_lines(system, lines))


def test_evaluate_in_several_ways(
    trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_corpus", lambda *a, **_: load_corpus(*a).head(4))
    words = ["evaluate", str(trained), "--corpus", "grammar", "--quiet", "--protocols"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "tokenised, compounds split" in out
    assert out.count("nrefs:1|") == 6
    files = [write(tmp_path / name, ["a dog sleeps here .", "yes ."]) for name in "ab"]
    words = ["evaluate", "--hypotheses", files[0], "--references", files[1], "--protocols"]
    assert "--language" in fails(capsys, *words)
    assert "--language tlh: --protocols of two" in fails(capsys, *words, "--language", "tlh")
    assert main([*words, "--language", "en"]) == 0
    assert "100.00  tokenised lower-case" in capsys.readouterr().out


def test_compare(tmp_path: Path, capsys: Capture) -> None:
    lines = [f"the dog number {i} sleeps in the garden ." for i in range(30)]
    worse = [line.replace("garden", "kitchen") for line in lines]
    first, second, gold = (
        write(tmp_path / name, text) for name, text in (("1", worse), ("2", lines), ("3", lines))
    )
    assert main(["compare", first, second, "--references", gold, "--samples", "50"]) == 0
    out = capsys.readouterr().out
    assert f"{second}: BLEU 100.00" in out
    assert "difference +" in out
    short = write(tmp_path / "4", lines[:3])
    assert "3 lines" in fails(capsys, "compare", first, short, "--references", gold)
    assert "--samples 1" in fails(
        capsys, "compare", first, second, "--references", gold, "--samples", "1"
    )


def test_ablation_leaves_a_record(
    trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "was trained on files" in fails(capsys, "ablation", trained)
    of_grammar(trained, tmp_path / "copy")
    monkeypatch.setattr(module, "load_corpus", lambda *a, **_: load_corpus(*a).head(4))
    averaged = tmp_path / "copy" / "averaged.safetensors"
    whole = averaged.read_bytes()
    averaged.unlink()
    assert "averaged.safetensors: is not there; train with --average" in fails(
        capsys, "ablation", tmp_path / "copy"
    )  # and nothing was printed: no search was made in vain
    averaged.write_bytes(whole)
    assert main(["ablation", str(tmp_path / "copy"), "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(module.SEARCHES) + 1
    records = read_records(tmp_path / "copy", ABLATION)
    steps = records["ablation"]["steps"]
    names = [*(name for name, *_ in module.SEARCHES), module.CHOSEN]
    assert [step["name"] for step in steps] == names
    assert sorted(steps[-1]["validation"]) == sorted(map(str, module.ALPHAS))
    best = max(steps[-1]["validation"].values())
    assert steps[-1]["validation"][str(steps[-1]["alpha"])] == best
    assert all(step["scores"]["sentences"] == 4 for step in steps)
    assert all(set(step) >= {"p", "gain", "interval", "sha256"} for step in steps[1:])
    text = (tmp_path / "copy" / "ablation.json").read_text(encoding="utf-8")
    assert not any(line in text for line in load_corpus("grammar", split="test").head(4).target)


def test_capitals_do_not_count_for_a_system_that_writes_none(
    texts: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*SIZES.split(), *texts, "--tokenizer", "bpe-lower", "--out", str(tmp_path / "t")]
    assert main(["train", *words]) == 0
    told = capsys.readouterr().out
    assert "case:lc" in told
    assert "case:mixed" not in told
    folder = of_grammar(tmp_path / "t", tmp_path / "copy")
    monkeypatch.setattr(module, "load_corpus", lambda *a, **_: load_corpus(*a).head(4))
    assert main(["evaluate", str(folder), "--beam", "1", "--quiet"]) == 0
    assert "case:lc" in capsys.readouterr().out
    system, test = load_system(folder), load_corpus("grammar", split="test").head(4)
    step, found = module.Ablation(folder, quiet=True).measure(system, test, 1, 0.0, test.target)
    bleu = sacrebleu.BLEU(lowercase=True).corpus_score(found, [list(test.target)]).score
    assert step["scores"]["bleu"] == round(bleu, 2)
    assert step["gain"] == round(bleu - 100, 2)  # over the references, which are perfect
    assert step["by_length"] == by_length(found, test.target, test.source, lowercase=True)


def test_ablation_takes_the_penalty_of_the_validation_text(
    trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = of_grammar(trained, tmp_path / "copy")
    monkeypatch.setattr(module, "load_corpus", lambda *a, **_: load_corpus(*a).head(3))
    test = load_corpus("grammar", split="test").head(3)
    seen: list[tuple[str, float]] = []

    def best_at_one(_: object, system: System, text: ParallelText, alpha: float) -> float:
        seen.append((text.split, alpha))
        return -abs(alpha - 1.0)

    monkeypatch.setattr(module.Ablation, "lower_case_bleu", best_at_one)
    assert main(["ablation", str(folder), "--quiet"]) == 0
    assert "by validation, averaged (1.0)" in capsys.readouterr().out
    assert seen == [("val", alpha) for alpha in module.ALPHAS]
    last = read_records(folder, ABLATION)["ablation"]["steps"][-1]
    system = load_system(folder, weights="averaged.safetensors")
    expected = translate_lines(system, test.source, beam=5, alpha=1.0)
    assert last["sha256"] == hashlib.sha256("\n".join(expected).encode()).hexdigest()
    assert main(["ablation", str(folder), "--split", "val", "--quiet"]) == 0
    steps = read_records(folder, ABLATION)["ablation"]["steps"]
    assert [step["name"] for step in steps] == [name for name, *_ in module.SEARCHES]


def test_average_and_take_the_average(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    whole = (folder / "averaged.safetensors").read_bytes()
    assert main(["average", str(folder), "--last", "1"]) == 0
    assert "--averaged" in capsys.readouterr().err
    assert (folder / "averaged.safetensors").read_bytes() != whole
    assert main(["average", str(folder)]) == 0
    assert (folder / "averaged.safetensors").read_bytes() == whole
    assert "2 checkpoints were kept, 3 are" in fails(capsys, "average", folder, "--last", "3")
    shutil.rmtree(folder / "snapshots")
    assert "kept no checkpoints to average" in fails(capsys, "average", folder)
    (folder / "model.safetensors").unlink()
    text = write(tmp_path / "in", ["Der Hund schläft ."])
    assert "model.safetensors" in fails(capsys, "translate", folder, text)
    assert main(["translate", str(folder), text, "--averaged"]) == 0
    words = ["evaluate", str(folder), "--averaged", "--corpus", "grammar", "--split", "val"]
    assert main([*words, "--quiet"]) == 0


# --- real processes ------------------------------------------------------------


# Which products are faster is measured, so two processes could choose differently.
PROGRAM = """
import sys
from annotated_transformer.translation import command

command.prepare_cpu = lambda: "float32 products: as they come"
sys.exit(command.main())
"""


def start(words: list[str]) -> "subprocess.Popen[str]":
    """Start the command in a process of its own, on one thread."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    """Wait until a file is there or the process ended."""
    while not path.exists() and process.poll() is None:
        time.sleep(0.01)


# --- prepare --------------------------------------------------------------------


def test_prepare_a_corpus_from_its_archive(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = load_corpus("grammar", size=80)
    (tmp_path / "iwslt2014").mkdir()
    with tarfile.open(tmp_path / "iwslt2014/de-en.tgz", "w:gz") as tape:
        for language, side in (("de", text.source), ("en", text.target)):
            train = "".join(f"<title>Talk {n}</title>\n{line}\n" for n, line in enumerate(side))
            members = {f"train.tags.de-en.{language}": train}
            segments = "".join(f'<seg id="{n}"> {line} </seg>\n' for n, line in enumerate(side[:9]))
            for name in ("dev2010", "tst2010", "tst2011", "tst2012"):
                members[f"IWSLT14.TED.{name}.de-en.{language}.xml"] = segments
            for name, content in members.items():
                info = tarfile.TarInfo(f"de-en/{name}")
                info.size = len(content.encode())
                tape.addfile(info, io.BytesIO(content.encode()))
    words = f"prepare {tmp_path / 'p'} --corpus iwslt2014 --mirror {tmp_path} --vocabulary 300"
    assert main([*words.split(), "--workers", "1", "--quiet"]) == 0
    said = capsys.readouterr()
    assert "80 sentence pairs" in said.out + said.err
    assert len((tmp_path / "p/test.de").read_text().splitlines()) == 27


def test_prepare_and_train(texts: list[str], tmp_path: Path, capsys: Capture) -> None:
    out, model = tmp_path / "p", tmp_path / "m"
    words = ["prepare", str(out), *texts, "--vocabulary", "300", "--workers", "1", "--quiet"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "60 of 60 pairs kept" in captured.err
    assert main(words) == 0
    assert "nothing to do" in capsys.readouterr().err
    sizes = "--preset tiny --layers 1 --updates 4 --warmup 2 --average 0 --quiet".split()
    train = ["train", "--prepared", str(out), *sizes, "--out", str(model)]
    assert main(train) == 0
    assert "prepared val" in capsys.readouterr().out
    record = json.loads((model / "record.json").read_text())
    assert record["options"]["vocabulary"] == 300
    assert record["options"]["corpus"] == "prepared"
    assert set(record["corpus"]["checksums"]) == {
        "train-files.de",
        "train-files.en",
        "prepared.json",
    }
    assert "--size" in fails(capsys, *train, "--size", "3")
    assert f"--vocabulary 400: {out} was prepared with 300" in fails(
        capsys, *train, "--vocabulary", "400"
    )
    assert "was prepared with de-en" in fails(capsys, *train, "--pair", "en-de")
    assert "was prepared with bpe" in fails(capsys, *train, "--tokenizer", "bpe-lower")
    assert main([*train, "--vocabulary", "300", "--pair", "de-en"]) == 0
    capsys.readouterr()
    assess = ["evaluate", str(model), "--beam", "1", "--quiet"]
    scores = record["scores"]["val"]
    assert main([*assess, "--prepared", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"prepared val, greedy, {scores['sentences']} sentences" in said
    assert f"BLEU = {scores['bleu']:.2f}" in said
    assert "give --prepared FOLDER" in fails(capsys, *assess)
    both = [*assess, "--prepared", out, "--corpus", "grammar"]
    assert "--corpus or --prepared" in fails(capsys, *both)
    assert "test.de: no such file" in fails(capsys, *both[:-2], "--split", "test")
    turned = tmp_path / "turned"
    assert main(["prepare", str(turned), *words[2:], "--pair", "en-de"]) == 0
    assert "is en-de, the system de-en" in fails(capsys, *assess, "--prepared", turned)
    os.truncate(out / "shards" / "train-00000.safetensors", 2000)
    capsys.readouterr()
    assert main(train) == 2
    assert "train-00000.safetensors: damaged" in capsys.readouterr().err.splitlines()[-1]


def test_a_prepared_test_split_is_scored(texts: list[str], tmp_path: Path, capsys: Capture) -> None:
    text = load_corpus("grammar", split="test").head(3)
    test = [write(tmp_path / "t.de", text.source), write(tmp_path / "t.en", text.target)]
    out, model = str(tmp_path / "p"), str(tmp_path / "m")
    words = ["prepare", out, *texts, "--test-files", *test, "--vocabulary", "300", "--quiet"]
    assert main([*words, "--workers", "1"]) == 0
    sizes = "--preset tiny --layers 1 --updates 2 --warmup 2 --average 0 --quiet".split()
    assert main(["train", "--prepared", out, *sizes, "--out", model]) == 0
    record = json.loads((tmp_path / "m" / "record.json").read_text())
    assert {name: s["sentences"] for name, s in record["scores"].items()} == {"test": 3}
    capsys.readouterr()
    assert main(["evaluate", model, "--prepared", out, "--beam", "1", "--quiet"]) == 0
    assert "prepared test, greedy, 3 sentences" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "size"),
    [("", "prepared"), ("--corpus grammar", "grammar"), ("--corpus multi30k", "multi30k"),
     ("--corpus wmt14", "prepared"), ("--corpus files", "prepared")],
)  # fmt: skip
def test_prepare_learns_the_vocabulary_of_the_recipe(words: str, size: str) -> None:
    command = parse(["prepare", "p", *words.split()])
    assert isinstance(command, Prepare)
    assert command.preparation.vocabulary == RECIPES[size].vocabulary


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
    monkeypatch.setattr(module, "load_corpus", lambda name, pair, split, **_: texts[split])
    options = replace(RECIPES["iwslt2014"], pair="de-en")
    Train(training=options).texts()
    said = capsys.readouterr().err
    assert "line n is translated by line n-1 of a.en" in said
    assert "9 different source sentences of val stand in the training text too" in said


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
    assert "299 different source sentences of val stand in the training text too" in said


def test_prepare_from_an_archive(texts: list[str], tmp_path: Path, capsys: Capture) -> None:
    archive = tmp_path / "corpus.tgz"
    with tarfile.open(archive, "w:gz") as tape:
        for path in (*texts[1:3], *texts[4:6]):
            tape.add(path, f"data/{Path(path).name}")
    inside = [f"{archive}/data/{Path(word).name}" if "/" in word else word for word in texts]
    words = ["prepare", str(tmp_path / "p"), *inside, "--vocabulary", "300", "--quiet"]
    assert main([*words, "--workers", "1"]) == 0
    assert main([*words, "--workers", "1"]) == 0
    assert "nothing to do" in capsys.readouterr().err
    with tarfile.open(archive, "w:gz") as tape:
        tape.add(texts[1], "../data/x")
    words[1] = str(tmp_path / "q")
    assert f"{archive}, member ../data/x: refused" in fails(capsys, *words)


@pytest.mark.parametrize("pair", ["de-en", "en-de"])
def test_prepare_a_known_corpus(
    pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    sizes = {"train": 60, "val": 5, "test": 7}

    def small(name: str, pair: str, split: str, **_: object) -> ParallelText:
        return load_corpus(name, pair, split, size=sizes[split])

    monkeypatch.setattr(module, "load_corpus", small)
    words = ["prepare", str(tmp_path / "p"), "--corpus", "grammar", "--vocabulary", "300"]
    words += ["--pair", pair, "--quiet", "--workers", "1"]
    assert main(words) == 0
    found = Prepared(tmp_path / "p")
    assert found.languages == tuple(pair.split("-"))
    assert {split: report["kept"] for split, report in found.reports.items()} == sizes
    text = load_corpus("grammar", pair, size=60)
    (first,) = found.tokens("train").pairs([0])
    assert [found.tokenizer.decode(side) for side in first] == [text.source[0], text.target[0]]
    assert main(words) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_prepare_is_interrupted(
    texts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "prepare", interrupted)
    words = ["prepare", tmp_path / "p", *texts]
    assert "goes on from there" in fails(capsys, *words, status=130)


def test_kill_and_ctrl_c_change_nothing(texts: list[str], tmp_path: Path) -> None:
    options = [*SIZES.split(), "--updates", "40", *texts, "--save-every", "0"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    words = ["train", *options, "--out", str(stopped)]
    with start(["train", *options, "--out", str(straight)]) as process:
        # Killed without warning, at a moment drawn by chance.
        chance = random.Random(time.time_ns())
        with start(words) as killed:
            wait_for(stopped / "config.json", killed)
            time.sleep(chance.uniform(0, 0.5))
            killed.kill()
        # Ctrl-C, as soon as there is a checkpoint that is newer.
        (stopped / "model.safetensors").unlink(missing_ok=True)
        with start(words) as interrupted:
            wait_for(stopped / "training", interrupted)
            wait_for(stopped / "model.safetensors", interrupted)
            interrupted.send_signal(signal.SIGINT)
            assert interrupted.stderr is not None
            message = interrupted.stderr.read()
        assert interrupted.returncode == 130
        assert re.search(r"interrupted( after update \d+; the same command goes on.*)?$", message)
        assert "Traceback" not in message
        with start(words) as last:
            assert last.stderr is not None
            assert "Traceback" not in last.stderr.read()
        assert last.returncode == 0
    assert process.returncode == 0
    first, second = (load_tensors(trainings(f)[-1])[0] for f in (straight, stopped))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert list(stopped.rglob("*.part")) == []


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=1"


def start_together(words: list[str]) -> subprocess.Popen[str]:
    """Start the command in two processes."""
    command = [sys.executable, *TORCHRUN.split(), "-m", "annotated_transformer", *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes as Linux shows them")
def test_two_processes_survive_a_termination_and_a_kill(texts: list[str], tmp_path: Path) -> None:
    options = [*SIZES.split(), "--updates", "30", *texts, "--save-every", "0", "--quiet"]
    words = ["train", *options, "--out", str(tmp_path / "run")]
    with start_together(words) as process:  # a cluster wants its machine back
        wait_for(tmp_path / "run/model.safetensors", process)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        message = process.stderr.read()
    assert process.returncode != 0
    assert re.search(r"interrupted after update \d+; the same command goes on", message), message
    done = int(trainings(tmp_path / "run")[-1].stem)
    assert 0 < done < 30
    with start_together(words) as process:
        while trainings(tmp_path / "run")[-1].stem == f"{done:08d}":
            assert process.poll() is None
            time.sleep(0.01)
        kin = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(kin[-1]), signal.SIGKILL)  # one of the two; torchrun starts both again
        assert process.stderr is not None
        message = process.stderr.read()
    assert process.returncode == 0, message
    record = json.loads((tmp_path / "run/record.json").read_text(encoding="utf-8"))
    assert record["updates"] == 30
    assert record["hardware"]["processes"] == 2
    rows = read_journal(tmp_path / "run/log.jsonl")
    assert [row["update"] for row in rows] == [30]


def test_plot_takes_the_curve_of_the_newest_sound_checkpoint(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "going-on"
    shutil.copytree(trained, folder)
    (folder / "record.json").write_text('{"curve": "of an earlier end"}', encoding="utf-8")
    seen: list[Any] = []
    real = module.log_figure

    def watched(journal: Any, curve: Any, name: str) -> Any:
        seen.append(curve)
        return real(journal, curve, name)

    monkeypatch.setattr(module, "log_figure", watched)
    assert main(["plot", str(folder)]) == 0
    newest = trainings(folder)[-1]
    newest.write_bytes(b"damaged")
    assert main(["plot", str(folder)]) == 0
    shutil.rmtree(folder / "training")
    assert main(["plot", str(folder)]) == 0
    curves = [load_tensors(path)[1]["curve"] for path in trainings(trained)]
    assert seen == [curves[1], curves[0], []]
    assert curves[1]


def test_plot_draws_a_log(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    for suffix, start in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        picture = tmp_path / f"picture.{suffix}"
        assert main(["plot", str(trained), "-o", str(picture)]) == 0
        assert picture.read_bytes().startswith(start)
    assert "wrote" in capsys.readouterr().err
    assert "log.jsonl is missing" in fails(capsys, "plot", tmp_path)
    assert "must end with .svg" in fails(capsys, "plot", trained, "-o", tmp_path / "picture.gif")
    (tmp_path / "log.jsonl").write_text("{\n{}\n", encoding="utf-8")
    assert "log.jsonl" in fails(capsys, "plot", tmp_path)
