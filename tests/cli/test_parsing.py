"""From words to options, before anything heavy is loaded."""

from pathlib import Path

import pytest

from annotated_transformer.cli.options import Evaluate, Prepare, Train, Translate
from annotated_transformer.cli.parsing import parse
from annotated_transformer.engine.config import load_recipe

SIZES = (
    "--corpus files --layers 1 --vocabulary 400 --updates 6 --warmup 3 --max-len 128 --quiet "
    "--average 2 --average-every 2"
)
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("words", [["--corpus", "multi30k"], ["--corpus=multi30k"]])
def test_the_corpus_brings_its_recipe(words: list[str]) -> None:
    command = parse(["train", *words, "--seed", "3"])
    assert isinstance(command, Train)
    assert command.data.vocabulary == load_recipe("multi30k").data.vocabulary
    assert command.optim.seed == 3
    grammar = parse(["train"])
    assert isinstance(grammar, Train)
    assert grammar.options == load_recipe("grammar")


def test_translate_and_evaluate_are_parsed() -> None:
    command = parse(["translate", "m", "in.txt", "-o", "out.txt", "--quiet"])
    assert command == Translate(Path("m"), Path("in.txt"), Path("out.txt"), quiet=True)
    assert parse(["translate", "m"]) == Translate(Path("m"))
    assert parse(["evaluate", "m", "--split", "val"]) == Evaluate(Path("m"), split="val")


@pytest.mark.parametrize(
    ("words", "size"),
    [("", "prepared"), ("--corpus grammar", "grammar"), ("--corpus multi30k", "multi30k"),
     ("--corpus wmt14", "prepared"), ("--corpus files", "prepared")],
)  # fmt: skip
def test_prepare_learns_the_vocabulary_of_the_recipe(words: str, size: str) -> None:
    command = parse(["prepare", "p", *words.split()])
    assert isinstance(command, Prepare)
    assert command.preparation.vocabulary == load_recipe(size).data.vocabulary
