"""The command that makes the package's model makes the same again, as far as it is followed."""

import json
import random
from functools import cache
from pathlib import Path

import pytest

from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.engine.config import Options, load_recipe
from annotated_transformer.engine.trainer import Trainer
from annotated_transformer.pretrained import FOLDER, RUNNING, load_pretrained
from annotated_transformer.translation.tokenizers import BPETokenizer
from benchmarks import pretrained as made

RECORD = json.loads((Path(__file__).parents[2] / made.RECORD).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def texts() -> tuple[ParallelText, ParallelText]:
    return made.both_directions("train", RECORD["grammar_pairs"]), made.both_directions("val", 20)


def test_the_text_and_the_words_are_those_of_the_record(
    texts: tuple[ParallelText, ParallelText],
) -> None:
    sums = RECORD["corpus"]["checksums"]
    assert dict(texts[0].checksums).items() <= sums.items()
    stored = json.loads((FOLDER / "words.json").read_text(encoding="utf-8"))
    assert made.seen_words(texts[0]) == stored
    pairs = list(texts[0])
    source, target = random.Random(0).choice(pairs)
    assert (target, source) in pairs
    assert RUNNING.text("de") not in texts[0].source


def test_its_tokenizer_and_its_first_losses_are_made_again(
    texts: tuple[ParallelText, ParallelText], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine sums are taken in another order, so losses are like, not the same."""
    # Each sentence is a source and a target, so it is encoded once and found again.
    monkeypatch.setattr(BPETokenizer, "encode", cache(BPETokenizer.encode))
    recipe = load_recipe(made.RECIPE)
    usual = Options().described()  # of options that are younger than the record
    assert recipe.described() == {**usual, **RECORD["options"], "updates": recipe.optim.updates}
    trainer = Trainer(recipe.replace(steps=10, save_every=1e6), tmp_path / "run", texts)
    assert trainer.system.tokenizers[0].to_json() == load_pretrained().tokenizer.to_json()
    assert not trainer.train(progress=False)
    losses = made.first_losses(tmp_path / "run/log.jsonl")
    assert [update for update, _ in losses] == [10]
    for (_, loss), (_, recorded) in zip(losses, RECORD["first_losses"], strict=False):
        assert loss == pytest.approx(recorded, rel=1e-3)


def test_the_interval_is_wilsons() -> None:
    """Its ends are the shares that are just 1.96 standard errors away from what was counted."""
    for right, total in ((990, 1000), (0, 10), (7, 9)):
        for end in made.wilson(right, total):
            error = (end * (1 - end) / total) ** 0.5
            assert abs(right / total - end) == pytest.approx(1.96 * error, abs=1e-7)
