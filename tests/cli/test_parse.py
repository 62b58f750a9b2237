"""``parse`` draws trees; a parser is trained, scored and refused where it does not belong."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from annotated_transformer.cli.main import main
from annotated_transformer.engine.checkpoints import load_system
from annotated_transformer.engine.parser import parse_sentences, penn_words
from annotated_transformer.results.parsing import leaves, read_trees
from annotated_transformer.tree_figures import draw_svg, draw_text
from tests.cli.command import Capture, fails, write
from tests.engine.parsers import write_sample

SIZES = (
    "--pair en-trees --layers 1 --d-model 32 --d-ff 32 --heads 2 --vocabulary 280 --dropout 0 "
    "--updates 60 --warmup 10 --peak 0.005 --max-len 64 --max-tokens 256 --quiet"
)
TEXT = ["the dog barks .", "a cat sees the dog .", "the cat sleeps ."]
TREES = [
    "(S (NP (DT the) (NN dog)) (VP (VBZ barks)) (. .))",
    "(S (NP (DT a) (NN cat)) (VP (VBZ sees) (NP (DT the) (NN dog))) (. .))",
    "(S (NP (DT the) (NN cat)) (VP (VBZ sleeps)) (. .))",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a text and its trees."""
    folder = tmp_path_factory.mktemp("texts")
    return [write(folder / "a.en", TEXT), write(folder / "a.trees", TREES)]


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory, files: list[str]) -> Path:
    """Return the folder of a parser that has learned three sentences."""
    folder = tmp_path_factory.mktemp("parser")
    words = ["--train-files", *files, "--valid-files", *files, "--out", str(folder)]
    assert main(["train", *SIZES.split(), *words]) == 0
    return folder


def feed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put a text on the standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_it_learns_the_trees_and_says_so(parser: Path, files: list[str], capsys: Capture) -> None:
    capsys.readouterr()
    assert main(["parse", str(parser), files[0], "--format", "brackets"]) == 0
    found = capsys.readouterr()
    assert found.out.splitlines() == TREES
    assert found.err == f"parsed 3 sentences by {parser}/model.safetensors\n"


def test_the_record_keeps_the_brackets_of_every_sentence(parser: Path) -> None:
    scores = json.loads((parser / "record.json").read_text())["scores"]["val"]
    assert list(scores) == ["free", "constrained"]
    for found in scores.values():
        assert found["sentences"] == 3
        columns = [[int(n) for n in found[key].split()] for key in ("matched", "gold", "test")]
        matched, gold, test = map(sum, columns)
        assert gold == sum(line.count("(") for line in TREES) - sum(len(t.split()) for t in TEXT)
        assert found["f1"] == pytest.approx(200 * matched / (gold + test), abs=0.01)
        assert (found["beam"], found["alpha"]) == (21, 0.3)
    assert scores["free"]["f1"] == scores["constrained"]["f1"] == 100


def test_drawn_as_text_or_as_a_picture(
    parser: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = [read_trees(line)[0] for line in TREES]
    feed(monkeypatch, f"{TEXT[0]}\n\n{TEXT[1]}\n")
    capsys.readouterr()
    assert main(["parse", str(parser), "--quiet"]) == 0
    found = capsys.readouterr()
    assert found.out == f"{draw_text(trees[0]).rstrip()}\n\n{draw_text(trees[1]).rstrip()}\n"
    assert found.err == ""
    out = tmp_path / "tree.svg"
    words = ["--sentence", TEXT[2], "--format", "svg", "-o", str(out), "--quiet"]
    assert main(["parse", str(parser), *words]) == 0
    assert out.read_text() == f"{draw_svg(trees[2])}\n"


def test_blank_lines_stay_blank_in_brackets(
    parser: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, f"\n{TEXT[0]}\r\n \n")
    capsys.readouterr()
    assert main(["parse", str(parser), "--format", "brackets"]) == 0
    assert capsys.readouterr().out == f"\n{TREES[0]}\n\n"


def test_plain_text_is_split_unless_it_is_tokenized(parser: Path, capsys: Capture) -> None:
    for text, option in (("Dogs can't (bark).", []), ("Dogs can't (bark).", ["--tokenized"])):
        capsys.readouterr()
        words = ["--sentence", text, "--format", "brackets", "--quiet", *option]
        assert main(["parse", str(parser), *words]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        wanted = penn_words(text, tokenized=bool(option))
        assert re.findall(r" ([^\s()]+)\)", line) == wanted
        assert len(wanted) == (3 if option else 7)
        (tree,) = read_trees(line)
        assert leaves(tree) == wanted


def test_free_decoding_repairs_and_says_how_often(
    parser: Path, capsys: Capture, tmp_path: Path
) -> None:
    lines = ["dog dog dog dog dog sees .", *TEXT]
    path = write(tmp_path / "in", lines)
    capsys.readouterr()
    assert main(["parse", str(parser), path, "--free", "--format", "brackets"]) == 0
    out, err = capsys.readouterr()
    system = load_system(parser)
    found = parse_sentences(system, [line.split() for line in lines], constrained=False)
    broken = sum(parse is not None and not parse.well_formed for parse in found)
    assert broken  # else there is nothing to see
    assert err.splitlines()[0] == (
        f"{broken} of 4 outputs were no trees over their words, and were repaired"
    )
    for line, text in zip(lines, out.splitlines(), strict=True):
        (tree,) = read_trees(text)
        assert leaves(tree) == line.split()
    assert main(["parse", str(parser), path, "--format", "brackets"]) == 0
    assert "repaired" not in capsys.readouterr().err


def test_search_options(parser: Path, capsys: Capture) -> None:
    system, found = load_system(parser), set()
    sentence = "a dog sees a cat sees a cat ."
    for options in ({"beam": 1}, {"beam": 3, "alpha": 2.0}, {"extra": 12}):
        words = [f"--{name}={value}" for name, value in options.items()]
        capsys.readouterr()
        args = ["--sentence", sentence, "--format", "brackets", "--quiet"]
        assert main(["parse", str(parser), *args, *words]) == 0
        (wanted,) = parse_sentences(system, [sentence.split()], **options)
        assert wanted is not None
        out = capsys.readouterr().out
        assert out == f"{wanted.tree}\n"
        found.add(out)
    assert len(found) > 1


def test_evaluate_gives_f1(parser: Path, files: list[str], capsys: Capture) -> None:
    capsys.readouterr()
    assert main(["evaluate", str(parser), "--test-files", *files, "--beam", "1", "--quiet"]) == 0
    head, free, constrained = capsys.readouterr().out.splitlines()
    assert head == "files test, greedy, 3 sentences"
    for name, line in (("free", free), ("constrained", constrained)):
        assert line.startswith(f"  {name}: F1 = 100.00 (100.00 to 100.00), precision 100.00")
    assert main(["evaluate", str(parser), "--test-files", *files]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("files test, beam 21, alpha 0.3, 3 sentences\n")
    assert f"parsed by {parser}/model.safetensors" in err


def test_a_parser_of_the_treebank(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    mirror = str(write_sample(tmp_path / "mirror", monkeypatch))
    sizes = SIZES.replace("--pair en-trees ", "").replace("--updates 60", "--updates 4")
    words = ["train", "--corpus", "treebank", "--mirror", mirror, *sizes.split()]
    assert main([*words, "--norm", "post"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("treebank test, 39 sentences\n  free: F1 = ")
    folder = "runs/treebank-en-trees-tiny"
    assert f"next: annotated-transformer parse {folder} FILE" in err
    record = json.loads((Path(folder) / "record.json").read_text())
    # Files 1 to 159, of 1 to 3 trees, and the noun phrase of each
    assert record["corpus"]["pairs"] == 318 + 159
    assert "dog1" not in json.dumps(record)  # no sentence of a licensed text
    assert main(["evaluate", folder, "--mirror", mirror, "--split", "val", "--beam", "1"]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("treebank val, greedy, 41 sentences\n")
    assert main(["parse", "--sentence", "A dog sleeps.", "--quiet"]) == 0
    assert capsys.readouterr().out


def test_what_is_no_parser_and_what_is_one(
    parser: Path, trained: Path, files: list[str], tmp_path: Path, capsys: Capture
) -> None:
    line = fails(capsys, "parse", trained, files[0])
    assert line.endswith(
        f"{trained}: translates de to en; to parse, give a system trained with --corpus treebank"
    )
    assert "is a parser; use the command parse" in fails(capsys, "translate", parser, files[0])
    words = ("--test-files", *files, "--ensemble", str(parser), "--quiet")
    assert "--ensemble: not for a parser" in fails(capsys, "evaluate", parser, *words)
    assert "use the command evaluate" in fails(capsys, "ablation", parser)
    line = fails(capsys, "parse", parser, "--sentence", "a " * 40)
    assert "--sentence, line 1: 40 words, too many for trees of at most 63 symbols" in line
    line = fails(capsys, "parse", parser, files[0], "--format", "svg")
    assert f"--format svg: draws one sentence, and {files[0]} has 3" in line
    blank = write(tmp_path / "blank.en", ["", *TEXT[:2], ""])
    line = fails(capsys, "parse", parser, blank, "--format", "svg")
    assert line.endswith(f"draws one sentence, and {blank} has 2; give one")
    bad = write(tmp_path / "bad.trees", [TREES[0], TREES[0], TREES[2]])
    line = fails(capsys, "evaluate", parser, "--test-files", files[0], bad)
    assert "bad.trees, line 2: is no tree over the words" in line


def test_a_test_set_that_is_too_long_is_refused_before_training(
    files: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """Although --skip-long leaves its long trees out of validation."""
    long = [write(tmp_path / "b.en", [*TEXT, "the dog " * 9]), str(tmp_path / "b.trees")]
    write(tmp_path / "b.trees", [*TREES, f"(NP {'(DT the) (NN dog) ' * 9})"])
    words = ("--train-files", *files, "--valid-files", *long, "--out", str(tmp_path / "run"))
    assert main(["train", *SIZES.split(), *words, "--max-len", "32", "--skip-long"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "files val, line 4: 18 words, too many for trees of at most 31 symbols" in line
    assert line.endswith("split the line into sentences, or train with a larger --max-len")
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_without_a_parser(
    parser: Path, files: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = fails(capsys, "parse", files[0])
    assert "no parser is in runs/treebank-en-trees-tiny" in line
    assert "train it with annotated-transformer train --corpus treebank" in line
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/treebank-en-trees-tiny").symlink_to(parser)
    assert main(["parse", files[0], "--format", "brackets"]) == 0
    assert capsys.readouterr().out.splitlines() == TREES
