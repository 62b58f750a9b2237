"""What users ask for, by the command: n-best, samples, ensembles, scores, dialogues, pipes."""

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pytest

from annotated_transformer.cli import score, translate
from annotated_transformer.cli.main import main, raise_interrupt
from annotated_transformer.cli.options import Translate
from annotated_transformer.data.files import CorpusError
from annotated_transformer.data.text import MAX_LINE, live_lines
from annotated_transformer.engine.checkpoints import load_system, load_tensors
from annotated_transformer.engine.interruption import handle_signals
from annotated_transformer.engine.scoring import PairScore, score_pairs
from annotated_transformer.engine.system import Translation, n_best_lines
from annotated_transformer.fast.sampling import Sampling
from annotated_transformer.pretrained import RUNNING
from tests.cli.command import SIZES, Capture, fails, write
from tests.processes import needs_full

GERMAN, ENGLISH = RUNNING.text("de"), RUNNING.text("en")


def rows(capsys: Capture, *words: str | Path) -> list[list[str]]:
    """Run a command that must succeed; return its columns."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


def spy(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[Any]:
    """Keep what a function returns: two executions may differ in the last printed decimal."""
    kept, function = [], vars(module)[name]

    def keeping(*given: Any, **options: Any) -> Any:
        kept.append(function(*given, **options))
        return kept[-1]

    monkeypatch.setattr(module, name, keeping)
    return kept


def test_n_best_lines_have_number_scores_and_text(
    trained: Path, texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    lines = [*Path(texts[4]).read_text(encoding="utf-8").splitlines()[:2], "", "Der Hund ."]
    path = write(tmp_path / "in", lines)
    found = rows(capsys, "translate", trained, path, "--n-best", "3")
    wanted = n_best_lines(load_system(trained), lines, n_best=3)
    wanted[2] = [Translation("", 0.0, 0.0, [])]
    flat = [(number, each) for number, some in enumerate(wanted, 1) for each in some]
    assert len(found) == 10
    for row, (number, each) in zip(found, flat, strict=True):
        scores = f"{each.score:.4f}", f"{each.log_probability:.4f}"
        assert row == [str(number), *scores, each.text]
    one = rows(capsys, "translate", trained, path, "--scores", "--beam", "1")
    assert [len(row) for row in one] == [3] * 4
    assert len(rows(capsys, "translate", trained, path, "--n-best", "6")) == 3 * 6 + 1


def test_samples_are_those_of_the_seed(trained: Path, texts: list[str], capsys: Capture) -> None:
    words = ("translate", trained, texts[4], "--sample")
    options = ("--temperature", "0.8", "--top-k", "20", "--top-p", "0.9")
    first, again, other = (
        rows(capsys, *words, *options, "--seed", seed) for seed in ("7", "7", "8")
    )
    assert first == again != other
    lines = Path(texts[4]).read_text(encoding="utf-8").splitlines()
    wanted = n_best_lines(load_system(trained), lines, sampling=Sampling(0.8, 20, 0.9, 7))
    assert first == [[some[0].text] for some in wanted]
    several = rows(capsys, *words, "--n-best", "2")
    assert [row[0] for row in several] == [str(n) for n in range(1, 6) for _ in range(2)]
    greedy = rows(capsys, "translate", trained, texts[4], "--beam", "1")
    assert rows(capsys, *words, "--temperature", "0.00001") == greedy


def test_an_ensemble_with_itself_and_one_that_cannot_be(
    trained: Path, texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(trained, tmp_path / "twin")
    alone = rows(capsys, "translate", trained, texts[4], "--scores")
    both = rows(capsys, "translate", trained, texts[4], "--scores", "--ensemble", tmp_path / "twin")
    assert [row[2] for row in both] == [row[2] for row in alone]
    for one, two in zip(alone, both, strict=True):
        assert float(one[0]) == pytest.approx(float(two[0]), abs=2e-4)
    sizes = SIZES.replace("400", "350")
    assert main(["train", *sizes.split(), *texts, "--out", str(tmp_path / "other")]) == 0
    line = fails(capsys, "translate", trained, texts[4], "--ensemble", tmp_path / "other")
    assert f"{tmp_path / 'other'}: has a vocabulary other than {trained}" in line
    line = fails(capsys, "translate", trained, texts[4], "--ensemble", tmp_path / "none")
    assert "none: no such file or folder" in line
    assert "--ensemble: needs" in fails(capsys, "translate", texts[4], "--ensemble", trained)


def test_the_standard_input_may_be_the_only_argument() -> None:
    line = [sys.executable, "-m", "annotated_transformer", "translate", "-", "--quiet"]
    done = subprocess.run(line, input="Der Hund schläft.\n", capture_output=True, encoding="utf-8")
    assert (done.stdout, done.stderr, done.returncode) == ("The dog sleeps.\n", "", 0)


def test_a_file_is_no_run(texts: list[str], capsys: Capture) -> None:
    for words in (("evaluate", texts[4]), ("score", texts[4], texts[4], texts[5])):
        assert f"{texts[4]}: is a file; give the folder of a run" in fails(capsys, *words)


def test_scores_of_pairs(
    trained: Path,
    texts: list[str],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = texts[4], texts[5]
    kept = spy(monkeypatch, score, "score_pairs")
    assert main(["score", str(trained), source, target]) == 0
    shown = capsys.readouterr()
    assert "5/5" not in shown.err  # no bar between the lines of a pipe
    found = [line.split("\t") for line in shown.out.splitlines()]
    assert found == [[f"{each.total:.4f}", f"{each.per_token:.4f}"] for each in kept[0]]
    lines = [Path(path).read_text(encoding="utf-8").splitlines() for path in (source, target)]
    for each, alone in zip(kept[0], score_pairs(load_system(trained), *lines), strict=True):
        assert each.tokens == alone.tokens
        assert each.log_probabilities == pytest.approx(alone.log_probabilities, abs=1e-5)
    out = tmp_path / "scores"
    assert main(["score", str(trained), source, target, "--tokens", "-o", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "5/5" in shown.err
    total = math.fsum(each.total for each in kept[1])
    assert f"5 pairs, log-probability {total:.4f}, " in shown.err
    for row, each in zip(out.read_text(encoding="utf-8").splitlines(), kept[1], strict=True):
        pairs = zip(each.tokens, each.log_probabilities, strict=True)
        assert row.split("\t")[2:] == [f"{token} {value:.4f}" for token, value in pairs]
    write(tmp_path / "blank", [*lines[1][:4], ""])
    line = fails(capsys, "score", trained, source, tmp_path / "blank")
    assert "line 5: the target is blank; remove the pair" in line


def test_a_token_with_a_tab_stays_in_its_column() -> None:
    pair = PairScore(["a\tb", "\u2028", "ü", "</s>"], [-1.0, -2.0, -3.0, -4.0])
    line = score.score_line(pair, tokens=True)
    assert line.splitlines() == [line.rstrip("\n")]
    columns = ["-10.0000", "-2.5000", r"a\tb -1.0000", r"\u2028 -2.0000", "ü -3.0000"]
    assert line.rstrip("\n").split("\t") == [*columns, "</s> -4.0000"]


PROGRAM = [sys.executable, "-m", "annotated_transformer"]


@pytest.mark.parametrize("kind", ["broken", pytest.param("full", marks=needs_full)])
def test_progress_that_nobody_can_read_ends_no_work(
    trained: Path, texts: list[str], tmp_path: Path, kind: str
) -> None:
    """As in ``train 2>&1 | head -1``, or with a log on a disk without space."""
    reader, broken = os.pipe()
    os.close(reader)
    errors = broken if kind == "broken" else os.open("/dev/full", os.O_WRONLY)
    out, run = tmp_path / "out", tmp_path / "run"
    sizes = SIZES.replace("--quiet", "").split()
    for words in (
        ["translate", str(trained), texts[4], "--beam", "1", "-o", str(out)],
        ["train", *sizes, *texts, "--out", str(run)],
    ):
        assert subprocess.run([*PROGRAM, *words], stderr=errors).returncode == 0
    assert out.read_text(encoding="utf-8").count("\n") == 5
    assert (run / "record.json").exists()
    for number in {broken, errors}:
        os.close(number)


def test_a_pipe_that_stays_open_is_answered_line_by_line() -> None:
    """The next line is written only when the answer to the last one has come."""
    words = [*PROGRAM, "translate", "--quiet"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        source, answers = process.stdin, process.stdout
        assert source is not None
        assert answers is not None
        for line, answer in ((GERMAN, ENGLISH), ("", ""), (ENGLISH, GERMAN)):
            source.write(f"{line}\n".encode())
            source.flush()
            assert answers.readline().decode() == f"{answer}\n"
        source.write(f"{GERMAN}\n{ENGLISH}".encode())  # two at once, the last without an end
        source.close()
        assert answers.read().decode() == f"{ENGLISH}\n{GERMAN}\n"
        assert process.wait() == 0


def pieces(*parts: bytes) -> "list[list[str]]":
    """Return the lines of a stream that comes in parts."""
    waiting = iter(parts)
    return list(live_lines(lambda _: next(waiting, b""), "pipe"))


def test_lines_are_those_that_are_complete() -> None:
    assert pieces(b"a\nb\nc", b"c\n", b"d") == [["a", "b"], ["cc"], ["d"]]
    assert pieces("ü".encode()[:1], "ü".encode()[1:] + b"\r\n\n") == [["ü", ""]]
    for split in range(4):  # some writers send the mark first, and the text when they have it
        mark = b"\xef\xbb\xbf"
        assert pieces(*filter(None, (mark[:split], mark[split:])), b"a\n") == [["a"]]
        assert pieces(*filter(None, (mark[:split], mark[split:]))) == []
    assert pieces() == []
    assert pieces(b"a" * MAX_LINE + b"\n") == [["a" * MAX_LINE]]
    for parts, words in (
        ((b"a\n", b"b\n\xff\n"), "pipe, line 3: byte 1"),
        ((b"a\0\n",), "pipe, line 1: has NUL bytes"),
        ([b"a" * (1 << 16)] * 40, "pipe, line 1: longer than"),
        ((b"<html>\n",), "HTML page"),
    ):
        with pytest.raises(ValueError, match=words):
            pieces(*parts)


def test_a_line_that_is_too_long_has_one_answer() -> None:
    errors: list[CorpusError] = []
    parts = iter([b"a\n", *[b"b" * (1 << 16)] * 40, b"b\nc\n"])
    found = list(live_lines(lambda _: next(parts, b""), "pipe", errors.append))
    assert found == [["a"], ["", "c"]]
    assert [str(error).split(":")[0] for error in errors] == ["pipe, line 2"]


class Terminal(io.TextIOWrapper):
    """A standard input that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_dialogue_has_a_prompt_and_survives_a_bad_line(
    trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b"Der Hund .\n" + b"wort " * 300 + b"\n\n\xff\nDer Mann .\n"
    monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO(text)))
    capsys.readouterr()
    assert main(["translate", str(trained), "--interactive", "--beam", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 5
    assert shown.err.startswith("enter one sentence per line; Ctrl-D ends\n> > annotated-transf")
    assert "standard input, line 2: " in shown.err
    assert "standard input, line 4: byte 1 (0xff) is not valid UTF-8" in shown.err
    assert shown.err.count("> ") == 6
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert main(["translate", str(trained), "--interactive", "--beam", "1"]) == 0
    assert "> " not in capsys.readouterr().err
    assert "leave out the file" in fails(capsys, "translate", trained, __file__, "--interactive")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert main(["translate", str(trained), "--interactive", "--n-best", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("\t")[0] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row.split("\t")[1:] for row in rows[1:4]] == [["0.0000", "0.0000", ""]] * 3


def test_live_input_is_for_pipes_and_the_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    command, dash = Translate(), Path("-")
    read, write_to = os.pipe()
    os.close(write_to)
    with open(read, "rb") as pipe, open(__file__, "rb") as file:
        streams: list[tuple[IO[bytes], bool]] = [(pipe, True), (file, False)]
        for stream, live in streams:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
            assert (translate.live_input(command, dash) is not None) is live
            assert translate.live_input(command, Path("text")) is None
            to_file = Translate(output=Path("out"))
            assert translate.live_input(to_file, dash) is None


def test_fine_tuning_says_what_it_keeps(
    trained: Path, texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    words: list[str | Path] = ["train", *texts, "--finetune-from", trained]
    words += ["--out", tmp_path / "tuned", "--quiet"]
    words += "--updates 2 --warmup 1 --peak 0.001".split()
    words += ["--eval-bleu", "--best-metric", "bleu", "--patience", "1", "--average", "0"]
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    shown = capsys.readouterr().err
    assert f"kept from {trained}" in shown
    assert "the tokenizer of 400 entries, all sizes" in shown
    assert "new: optimizer state, data, learning-rate schedule (peak 0.001, warm-up 1)" in shown
    record = json.loads((tmp_path / "tuned/record.json").read_text())
    assert record["curve"][-1]["valid_bleu"] is not None
    assert record["options"]["vocabulary"] == 400
    header = load_tensors(tmp_path / "tuned/model.safetensors")[1]
    assert header["tokenizers"] == load_system(trained).fingerprint
    cases: list[tuple[list[str | Path], str]] = [
        (["--vocabulary", "400"], "--vocabulary"),
        (["--preset", "base"], "--preset"),
        (["--d-model", "64"], "--d-model 64"),
        (["--finetune-from", tmp_path], "there is no run"),
        (["--out", trained], "is also --finetune-from"),
    ]
    for more, name in cases:
        assert name in fails(capsys, *words, *more)


def test_a_run_without_patience_left_says_why(
    texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """With a peak of a billionth nothing is learned, and BLEU does not rise."""
    sizes = SIZES.replace("--updates 6", "--updates 90").partition("--average")[0]
    words = ["train", *sizes.split(), *texts]
    words += ["--eval-bleu", "--best-metric", "bleu", "--patience", "2", "--peak", "1e-9"]
    assert main([*words, "--average", "0", "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().err
    assert "2 validations without a better BLEU than 0.0 at update" in shown
    assert "(--patience 2)" in shown


def test_diagnose_prints_a_table(texts: list[str], tmp_path: Path, capsys: Capture) -> None:
    source, target = texts[1:3]
    assert main(["diagnose", source, target]) == 0
    assert capsys.readouterr().out == f"{source} and {target}: 60 pairs, nothing found\n"
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    path = write(tmp_path / "bad", [lines[0], " ", *lines[2:50], "", *lines[51:], "more"])
    words = ["diagnose", path, target, "--examples", "1", "--valid-files", source, target]
    assert main(words) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == f"{path} and {target}: 60 pairs"
    assert table[1].split() == "lines without a partner 1 line 61".split()
    assert "  blank                     2    3.33%  lines 2, …" in table
    assert "  in the validation text   60  100.00%  lines 1, …" in table
    assert main([*words[:3], "--examples", "0"]) == 0
    assert "  blank                    2  3.33%\n" in capsys.readouterr().out
    assert "no such file" in fails(capsys, "diagnose", path, tmp_path / "none")
    one, two = (write(tmp_path / f"{n}", ["Der Hund."] * n) for n in (1, 2))
    assert main(["diagnose", one, two]) == 0
    found = capsys.readouterr().out
    assert f"{one} and {two}: 1 pair\n" in found
    assert " line 2\n" in found
    blank = write(tmp_path / "blank", ["", ""])
    assert main(["diagnose", two, blank]) == 0
    assert " lines 1, 2\n" in capsys.readouterr().out
    assert main(["diagnose", two, blank, "--strict"]) == 1
    assert main(["diagnose", source, target, "--strict"]) == 0


def complete(path: Path, *words: str) -> set[str]:
    """Return what bash offers for the last of some words, with the script at a path."""
    script = f"""
source "{path}"
COMP_WORDS=(annotated-transformer {" ".join(word or "''" for word in words)})
COMP_CWORD={len(words)} COMP_LINE="${{COMP_WORDS[*]}}" COMP_POINT=${{#COMP_LINE}}
function=$(complete -p annotated-transformer | sed 's/.*-F //; s/ .*//')
$function annotated-transformer "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_their_options(tmp_path: Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert main(["--tyro-print-completion", "bash"]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    assert "complete -o default -F _tyro" in path.read_text()  # where nothing is found, files are
    assert {"translate", "score", "diagnose", "train"} <= complete(path, "")
    assert complete(path, "diag") == {"diagnose"}
    assert {"--tokens", "--ensemble"} <= complete(path, "score", "--")
    assert complete(path, "translate", "--temp") == {"--temperature"}
    assert {"--finetune-from", "--patience"} <= complete(path, "train", "--")
    assert complete(path, "diagnose", "--valid") == {"--valid-files"}


@pytest.mark.skipif(os.name != "posix", reason="Windows waits otherwise")
def test_a_signal_that_does_not_wake_the_reader_is_noticed() -> None:
    """As one is that comes just before the wait; here another thread receives it."""
    read, write_to = os.pipe()
    end = threading.Timer(20, lambda: os.write(write_to, b"the end of a hanging test"))
    strike = threading.Timer(
        0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    )
    end.start()
    with handle_signals(raise_interrupt):
        strike.start()
        with pytest.raises(KeyboardInterrupt):
            translate.read_ready(read, 1)
    assert end.is_alive()
    end.cancel()
    strike.join()
    for number in (read, write_to):
        os.close(number)
