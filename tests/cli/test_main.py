"""The command line, as a user meets it: help, one-line errors, a status."""

import copy
import errno
import io
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from annotated_transformer.cli import systems, translate
from annotated_transformer.cli.arguments import KINDS, strip_error_box
from annotated_transformer.cli.main import main
from annotated_transformer.engine.checkpoints import CheckpointError
from tests.cli.command import Capture, fails

OUT_OF_MEMORY = "out of memory; reduce --max-tokens, --beam or the size of the model"


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
        ["plot"],
    ],
)
def test_help_is_for_newcomers(words: list[str], capsys: Capture) -> None:
    assert main([*words, "--help"]) == 0
    out = capsys.readouterr().out
    assert not re.search(r"\{None\}|default:\s+(None|False)", out)
    if not words:
        assert all(name in out for name in ("train", "translate", "evaluate", "plot", "prepare"))


def test_arguments_have_names_and_no_default_is_empty(capsys: Capture) -> None:
    for name, arguments in (("translate", "[MODEL] [INPUT]"), ("score", "MODEL SOURCE TARGET")):
        assert main([name, "--help"]) == 0
        found = " ".join(capsys.readouterr().out.split())
        assert f"{arguments} " in found
        assert "(default: )" not in found


def test_every_option_has_a_help(capsys: Capture) -> None:
    main(["train", "--help"])
    out = capsys.readouterr().out
    for option in re.findall(r"^│ (--[a-z-]+)", out, re.M):
        after = out.split(f"│ {option}", 1)[1].replace("\n", " ")
        assert re.match(r"[^│]*(│ +│)? *[A-Za-z]", after), option


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "choose among train, translate, score, serve, parse, evaluate, compare, ablation"),
        ("trian", "trian"),
        ("--hlep", "--hlep: there is no such option before a command; did you mean --help?"),
        ("train --preset huge", "--preset huge: choose among tiny, base, big; see "),
        ("train --tie x", "--tie x: choose among all, none, target; see "),
        ("train --layers many", "--layers many: must be a whole number; see "),
        ("serve --port 1.5", "--port 1.5: must be a whole number; see "),
        ("train --dropout much", "--dropout much: must be a number; see "),
        ("train --model perceptron", "perceptron: choose among transformer, rnn, rnn-attention,"),
        ("train --model rnn --norm pre", "--norm: not for --architecture rnn"),
        ("train --model convolution --preset base", "--preset: not for --architecture conv"),
        ("train --model rnn-dot --dropout 1", "--dropout 1.0: must be at least 0 and below 1"),
        ("train --model rnn --heads 4", "--heads: not for --architecture rnn"),
        ("train --layers", "--layers: needs a value; see "),
        ("train --train-files a", "--train-files: needs two files; see "),
        ("translate a b c", ": c: is one argument too many; see "),
        ("translate -x", ": -x: there is no such option; see "),
        ("translate -beam 4", ": -beam: there is no such option; did you mean --beam? see "),
        ("translate --temp 2", "--temp: there is no such option; did you mean --temperature? "),
        ("translate --gpu", "--gpu: there is no such option; did you mean --device? see "),
        ("train --max-epochs 3", "--max-epochs: there is no such option; did you mean --updates?"),
        ("train --warmup-steps 3", "did you mean --warmup? see "),
        ("train --random-seed 1", "did you mean --seed? see "),
        ("train --early-stopping-patience 3", "did you mean --patience? see "),
        ("train --eval-steps 3", "did you mean --validate-every? see "),
        ("train --resume", ": --resume: there is no such option; see "),
        ("train --threads 2", ": --threads: there is no such option; see "),
        ("train --peek 1", "did you mean --peak? see "),
        ("train --vocab-size 9", "did you mean --vocabulary? see "),
        ("train --max-grad-norm 1", "did you mean --clip? see "),
        ("export --format onnx", "did you mean --to? see "),
        ("preprocess", "did you mean prepare? "),
        ("decode", "did you mean translate? "),
        ("translate --model m", ": --model: there is no such option; see "),
        ("translate --quiet=yes", "--quiet: takes no value; leave out =yes"),
        ("translate m --ensemble", "--ensemble: give the folders of more systems"),
        ("train --no-such-option 3", "--no-such-option"),
        ("train --corpus wmt99", "--corpus wmt99: choose among grammar, multi30k, iwslt2014"),
        ("train --corpus wmt14", "too large for memory; prepare it"),
        ("train --updates 0", "--updates 0: must be at least 1"),
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
        ("translate nowhere", "nowhere: no such file or folder; give the folder"),
        ("train --corpus prepared", "--prepared FOLDER go together"),
        ("train --corpus grammar --prepared p", "go together"),
        ("train --prepared p --corpus grammar", "go together"),
        ("train --prepared nowhere", "nowhere: not prepared"),
        ("prepare p", "--train-files"),
        ("prepare p --corpus grammar --train-files a b", "has its own files; leave it out"),
        ("prepare p --corpus wmt99", "--corpus wmt99: choose among files, grammar"),
        ("prepare p --corpus multi30k --pair de-xx", "no language pair 'de-xx'"),
        ("prepare p --vocabulary 0", "--vocabulary 0"),
        ("prepare p --max-len 70000", "--max-len 70000"),
        ("prepare p --workers 0", "--workers 0"),
        ("train --train-files a b", "--valid-files is missing: give two files"),
        ("train --train-files a b --valid-files c d", "a: no such file"),
        ("train --corpus multi30k --train-files a b", "--train-files: only for --corpus files"),
        ("train --corpus grammar --mirror m", "--mirror: --corpus grammar needs no download"),
        ("train --mirror m", "--mirror: --corpus grammar needs no download"),
        ("prepare p --corpus grammar --mirror m", "--mirror: --corpus grammar needs no download"),
        (
            "evaluate --hypotheses a --references b --language de",
            "--language: has no effect without",
        ),
        ("evaluate m --language de", "--language: only for two files"),
        ("evaluate m --averaged --best", "--averaged or --best, not both"),
        ("train --recipe multi", "--recipe multi: neither a file nor one of"),
        ("train --out=", "--out: is empty; give a value"),
        ("train --udpates 3", "--updates? see annotated-transformer train --help"),
        ("export --to onnx x --quiet", "--quiet: there is no such option; see"),
        ("score a b", ": TARGET: missing; give it; see "),
        ("score a", ": SOURCE, TARGET: missing; give them; see "),
        ("compare a b", ": --references: missing; give it; see "),
        ("translate m --n-best 5 --beam 4", "at least 1 and at most 4, the size of --beam"),
        ("translate m --baem 3", "--beam? see annotated-transformer translate --help"),
        ("prepare p --train-files a b --valid-files a b", "a: no such file"),
        ("translate m --beam 1 --alpha 0.6", "--alpha: has no effect with --beam 1"),
        ("evaluate m --beam=1 --alpha=0.6", "--alpha: has no effect with --beam 1"),
        ("evaluate --hypotheses a --references b --beam 4", "--beam: is for a system"),
        ("evaluate --hypotheses a --references b --device cpu", "--device: is for a system"),
        ("train --average 0 --average-every 5", "--average-every: has no effect without"),
        ("train --tokenizer words --vocabulary 99", "--vocabulary: has no effect with"),
        ("train --updates 99999999999", "--updates 99999999999: must be at least 1 and at most 2"),
        ("train --N=0", "--layers 0: must be at least 1"),
        ("parse none --sentence 1+1=", "none: no such file or folder"),
        ("train --sharded --train_files a b --valid-files c d", "--sharded: needs several"),
    ],
)
def test_wrong_options_are_one_line(line: str, expected: str, capsys: Capture) -> None:
    assert expected in fails(capsys, *line.split())


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str, capsys: Capture) -> None:
    assert main(["--tyro-print-completion", shell]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("prepare", "--average-every", "--hypotheses", "mps"))
    assert "give bash or zsh" in fails(capsys, "--tyro-print-completion", "cmd")


def test_a_terminal_of_few_signs_gets_the_same_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "--modle", "rnn"]
    line = fails(capsys, *words)
    told = ": there is no such option; did you mean --model? see annotated-transformer train --help"
    assert line.endswith(told)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(words) == 2
    assert capsys.readouterr().err == f"{line}\n"


def test_an_unknown_box_is_still_a_line() -> None:
    assert strip_error_box("") == "these options are not understood"


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (BrokenPipeError(), 0, ""),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            2,
            "an output: No space left on device; check the path, permissions and disk space",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyboardInterrupt(signal.SIGTERM), 143, "interrupted"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, OUT_OF_MEMORY),
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
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(systems, "open_system", fail)
    assert main(["translate", "m"]) == status
    assert capsys.readouterr().err == (f"annotated-transformer: {expected}\n" if expected else "")


def test_a_signal_of_which_a_library_makes_an_error(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch turns what a handler raises while it looks at a storage into an error of its own."""

    def load(*_: Any) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise CheckpointError("m: damaged") from None

    monkeypatch.setattr(systems, "open_system", load)
    assert main(["translate", "m"]) == 143
    assert capsys.readouterr().err == "annotated-transformer: interrupted\n"


def test_a_signal_that_copyreg_would_ignore(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To note a class's slots, it has a bare ``except``, which each copied module passes."""
    came = []

    class Kind(type):
        def __setattr__(cls, name: str, value: object) -> None:
            signal.raise_signal(signal.SIGTERM)
            came.append(name)

    def load(*_: Any) -> None:
        copy.copy(Kind("Copied", (), {})())
        came.append("copied")

    monkeypatch.setattr(systems, "open_system", load)
    assert main(["translate", "m"]) == 143
    assert (came, sys.getprofile()) == (["__slotnames__"], None)
    assert capsys.readouterr().err == "annotated-transformer: interrupted\n"


def test_under_torchrun_only_the_first_process_says_what_all_would(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> int:
        raise OSError(errno.EIO, "here alone")

    wrong = ["train", "--updates", "0"]
    monkeypatch.setenv("RANK", "1")
    assert "--updates 0" in fails(capsys, *wrong)  # nobody else would say it
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert main(wrong) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(translate, "run", fail)
    assert "here alone" in fails(capsys, "translate", "x")
    monkeypatch.setenv("RANK", "0")
    assert "--updates 0" in fails(capsys, *wrong)


def test_the_page_lists_every_command() -> None:
    page = Path(__file__).resolve().parents[2] / "book" / "engineering" / "command.md"
    found = re.findall(r"^\| `(\w+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(found) == sorted(KINDS)
