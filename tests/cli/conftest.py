"""A small text, and a run of the command on it."""

from pathlib import Path

import pytest

from annotated_transformer.cli.main import main
from annotated_transformer.data.corpora import load_corpus
from tests.cli.command import SIZES, write


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the options that name a small text."""
    folder = tmp_path_factory.mktemp("texts")
    words = []
    for flag, text in (
        ("--train-files", load_corpus("grammar", size=60)),
        ("--valid-files", load_corpus("grammar", split="val", size=5)),
    ):
        name = flag.removeprefix("--")
        words += [flag, write(folder / f"{name}.de", text.source)]
        words += [write(folder / f"{name}.en", text.target)]
    return words


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """Return the folder of a training by the command line."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", *SIZES.split(), *texts, "--out", str(folder)]) == 0
    return folder
