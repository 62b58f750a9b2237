"""From words to options, before anything heavy is loaded."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from annotated_transformer.cli.options import Evaluate, Prepare, Train, Translate
from annotated_transformer.cli.parsing import parse
from annotated_transformer.engine.config import UsageError, load_recipe
from annotated_transformer.engine.system import model_config

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


def test_the_last_word_counts_and_other_names_are_the_same() -> None:
    said = "--model rnn --architecture=transformer --N 3 --h=2 --pieces --max_tokens 99 --tie none"
    command = parse(["train", *said.split()])
    assert isinstance(command, Train)
    assert (command.model.layers, command.model.heads, command.model.tie) == (3, 2, "none")
    assert (command.model.architecture, command.run.sharded) == ("transformer", True)
    assert command.optim.max_tokens == 99


def test_every_size_of_the_model_is_an_option() -> None:
    said = {"N": 2, "d-model": 32, "d-ff": 64, "h": 4, "d-k": 3, "d-v": 5, "norm": "pre"}
    said |= {"positions": "learned", "tie": "target", "dropout": 0.1, "attention-dropout": 0.2}
    said |= {"ff-dropout": 0.3, "max-len": 50}
    words = [word for name, value in said.items() for word in (f"--{name}", str(value))]
    command = parse(["train", *words])
    assert isinstance(command, Train)
    config = model_config(command.options, shared=True)
    assert asdict(config) == {name.replace("-", "_"): value for name, value in said.items()}


def test_a_recipe_is_taken_by_its_name_or_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"like": "multi30k", "optim": {"updates": 7}}')
    for recipe in ("multi30k-lower", str(path)):
        command = parse(["train", "--recipe", recipe, "--pair", "en-de"])
        assert isinstance(command, Train)
        assert command.options == load_recipe(recipe).replace(pair="en-de")


def test_a_prepared_corpus_brings_the_recipe_of_its_languages(tmp_path: Path) -> None:
    plan = {"plan": {"options": {"pair": "en-fr"}}}
    (tmp_path / "prepared.json").write_text(json.dumps(plan))
    command = parse(["train", "--prepared", str(tmp_path), "--preset", "big"])
    assert isinstance(command, Train)
    assert command.model == load_recipe("paper-big-en-fr").model
    command = parse(["prepare", "p", "--pair", "en-fr"])
    assert isinstance(command, Prepare)
    assert command.preparation.vocabulary == 32_000


def test_words_that_name_nothing_are_refused() -> None:
    for words in (["train", "--out", ""], ["translate", "m", "--output="]):
        with pytest.raises(UsageError, match="is empty"):
            parse(words)
    with pytest.raises(UsageError, match="not valid UTF-8"):
        parse(["train", "--out", "a\udcff"])
