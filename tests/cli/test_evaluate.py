"""``evaluate`` and ``compare``."""

import os
import threading
from pathlib import Path

import pytest
import sacrebleu

from annotated_transformer.cli import evaluate, systems
from annotated_transformer.cli.main import main
from annotated_transformer.data.corpora import load_corpus
from tests.cli.command import SIZES, Capture, fails, write


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


def test_one_sentence_is_singular(tmp_path: Path, capsys: Capture) -> None:
    files = [write(tmp_path / name, ["a small dog sleeps ."]) for name in ("is", "should")]
    assert main(["evaluate", "--hypotheses", files[0], "--references", files[1]]) == 0
    assert ", 1 sentence\n" in capsys.readouterr().out


def test_evaluate_a_split(trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "load_corpus", lambda *a, **_: load_corpus(*a).head(4))
    words = ["evaluate", str(trained), "--corpus", "grammar", "--quiet"]
    assert main([*words, "--split", "val", "--beam", "1"]) == 0
    assert "grammar val, greedy, 4 sentences" in capsys.readouterr().out
    assert main(words) == 0
    assert "grammar test, beam 4, alpha 0.6, 4 sentences" in capsys.readouterr().out
    assert "no split 'nope'" in fails(capsys, *words, "--split", "nope")
    assert "give --test-files SOURCE TARGET" in fails(capsys, "evaluate", trained)


def test_files_in_the_other_order_are_refused(
    trained: Path, texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """They would be scored, and poorly."""
    ends = "end like --pair en-de, and the pair is de-en"
    told = f"-files: {ends}; give --pair, or exchange"
    words: list[str | Path] = ["evaluate", trained, "--test-files", *texts[5:3:-1]]
    assert f"--test-files: {ends}; exchange the files" in fails(capsys, *words)
    line = fails(capsys, "score", trained, *texts[5:3:-1])
    assert f"SOURCE and TARGET: {ends}; exchange the files" in line
    given = texts[1:3]  # of two pairs of training files, the second is the wrong way round
    words = ["prepare", tmp_path / "p", "--train-files", *given, *given[::-1], *texts[3:]]
    assert f"--train{told}" in fails(capsys, *words)
    assert not (tmp_path / "p").exists()


def test_protocols_have_rules_for_some_languages(
    trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is translated."""
    monkeypatch.setattr(evaluate, "LANGUAGES", ("de", "fr"))
    line = fails(capsys, "evaluate", trained, "--corpus", "grammar", "--protocols")
    assert line.endswith(
        "--protocols: has rules for de, fr, not for en, which the system writes; leave it out"
    )


def test_evaluate_an_ensemble(
    trained: Path, texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """It scores what ``translate`` writes with the same ensemble."""
    other = tmp_path / "other"
    assert main(["train", *SIZES.split(), *texts, "--seed", "1", "--out", str(other)]) == 0
    files, both = texts[4:6], ["--ensemble", str(other), "--beam", "1"]
    out = tmp_path / "found.en"
    assert main(["translate", str(trained), files[0], *both, "--quiet", "-o", str(out)]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(trained), "--test-files", *files, *both]) == 0
    found = capsys.readouterr()
    assert main(["evaluate", "--hypotheses", str(out), "--references", files[1]]) == 0
    assert found.out.splitlines()[1:] == capsys.readouterr().out.splitlines()[1:]
    said = found.err.splitlines()[-1]
    assert said.startswith(f"translated by the mean of {trained}/")
    assert f", {other}/" in said
    words = ("evaluate", "--hypotheses", out, "--references", files[1])
    assert "--ensemble: is for a system" in fails(capsys, *words, *both[:2])


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--beam 0", "--beam 0: must be at least 1"),
        ("--beam 100000", "--beam 100000: must be at most"),
        ("--alpha -1", "--alpha -1.0: must be at least 0 and at most 10"),
        ("--alpha nan", "--alpha nan: must be at least 0 and at most 10"),
        ("--alpha inf", "--alpha inf: must be at least 0 and at most 10"),
        ("--alpha much", "--alpha"),
    ],
)
def test_searches_out_of_range(option: str, expected: str, trained: Path, capsys: Capture) -> None:
    for command in ("translate", "evaluate"):
        assert expected in fails(capsys, command, trained, *option.split())


def test_evaluate_in_several_ways(
    trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systems, "load_corpus", lambda *a, **_: load_corpus(*a).head(4))
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
    assert "capitals count; difference +" in out
    short = write(tmp_path / "4", lines[:3])
    assert "3 lines" in fails(capsys, "compare", first, short, "--references", gold)
    assert "3 lines" in fails(capsys, "compare", short, first, "--references", gold)
    loud = write(tmp_path / "5", [line.upper() for line in lines])
    words = ["compare", first, loud, "--references", gold, "--samples", "50", "--lowercase"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"{loud}: BLEU 100.00" in out
    assert "capitals do not count" in out
    names = (tmp_path / f"{name}.sgm" for name in ("a", "b"))
    for path, docs in zip(names, ("12", "21"), strict=True):
        segments = (f'<doc docid="{n}"><seg id="1">a dog sleeps</seg></doc>' for n in docs)
        path.write_text("\n".join(segments), encoding="utf-8")
    a, b = tmp_path / "a.sgm", tmp_path / "b.sgm"
    assert main(["compare", str(a), str(a), "--references", str(a), "--samples", "9"]) == 0
    for pair in ((a, b), (b, a)):
        assert "use files of the same test set" in fails(
            capsys, "compare", *pair, "--references", a, "--samples", "9"
        )
    assert "--samples 1: must be at least 2" in fails(
        capsys, "compare", first, second, "--references", gold, "--samples", "1"
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_files_may_be_pipes(tmp_path: Path, capsys: Capture) -> None:
    lines = [f"the dog number {i} sleeps in the garden ." for i in range(9)]
    pipes = [tmp_path / name for name in ("first", "second", "references")]

    def run(command: str, *paths: Path) -> None:
        for path in paths:
            os.mkfifo(path)
            threading.Thread(target=write, args=(path, lines), daemon=True).start()
        assert main([*command.split(), "--references", str(paths[-1])]) == 0
        for path in paths:
            path.unlink()

    run(f"evaluate --hypotheses {pipes[0]}", pipes[0], pipes[2])
    assert "BLEU = 100.00" in capsys.readouterr().out
    run(f"compare {pipes[0]} {pipes[1]} --samples 9", *pipes)
    assert "difference +0.00" in capsys.readouterr().out


def test_a_blank_line_of_own_files_counts(
    trained: Path, texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    files = [tmp_path / "a.de", tmp_path / "a.en"]
    for path, own in zip(files, texts[4:6], strict=True):
        path.write_text("\n".join([*Path(own).read_text().splitlines()[:2], "", "."]) + "\n")
    words = map(str, ["evaluate", trained, "--test-files", *files, "--beam", "1"])
    assert main(list(words)) == 0
    assert ", greedy, 4 sentences" in capsys.readouterr().out
