"""Fine-tuning starts from the weights and the tokenizer of another run, and from nothing else."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from annotated_transformer.data.corpora import Preparation, load_corpus
from annotated_transformer.data.prepare import prepare_corpus
from annotated_transformer.engine.checkpoints import load_system, save_system, weights_of
from annotated_transformer.engine.config import Options, UsageError, build_options, default_options
from annotated_transformer.engine.journal import read_journal
from annotated_transformer.engine.trainer import Trainer
from tests.engine.small import TEXTS, bits_of

OTHER = (load_corpus("grammar", size=40, seed=5), TEXTS[1])


def tuning(folder: Path, **changes: Any) -> Options:
    """Return the options to fine-tune a run."""
    few = {"updates": 6, "warmup": 2, "max_tokens": 256, "peak": 1e-3, "average": 0}
    return build_options({"finetune_from": folder, "corpus": "grammar", **few, **changes})


def test_the_first_weights_are_those_of_the_run(straight: Trainer, tmp_path: Path) -> None:
    run = Trainer(tuning(straight.folder), tmp_path, OTHER)
    start = load_system(straight.folder)
    found, wanted = weights_of(run.system.model), weights_of(start.model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert run.system.fingerprint == start.fingerprint
    assert run.system.config == start.config
    assert run.state.updates == 0
    assert not run.updater.optimizer.state_dict()["state"]
    assert run.train(progress=False)
    (last,) = (row for row in read_journal(tmp_path / "log.jsonl") if "rate" in row)
    assert last["rate"] == pytest.approx(1e-3 * math.sqrt(2 / 6))  # of the new schedule
    assert run.validator.measure(run.updater.replica).loss < straight.state.curve[-1].valid_loss


def test_an_interrupted_tuning_ends_with_the_same_bits(straight: Trainer, tmp_path: Path) -> None:
    options = tuning(straight.folder, dropout=0.3)
    assert Trainer(options, tmp_path / "a", OTHER).train(progress=False)
    assert not Trainer(options.replace(steps=2), tmp_path / "b", OTHER).train(progress=False)
    assert Trainer(options, tmp_path / "b", OTHER).train(progress=False)
    assert bits_of(tmp_path / "a") == bits_of(tmp_path / "b")
    for wrong in ({"finetune_from": tmp_path / "a"}, {"finetune_from": None}):
        with pytest.raises(UsageError, match="other weights; give the same --finetune-from"):
            Trainer(options.replace(**wrong), tmp_path / "b", OTHER)
    moved = tmp_path / "moved"  # where the weights are does not matter
    shutil.copytree(straight.folder, moved)
    assert Trainer(options.replace(finetune_from=moved), tmp_path / "b", OTHER).state.updates == 6


def test_sizes_come_from_the_run(straight: Trainer) -> None:
    found = default_options({"finetune_from": straight.folder, "corpus": "grammar"})
    assert (found.model.layers, found.data.max_len) == (1, 128)
    assert found.data.vocabulary == 300
    assert found.optim.peak == default_options({"corpus": "grammar"}).optim.peak


@pytest.mark.parametrize(("changes", "words"), [
    ({"d_model": 64}, "--d-model 64: --finetune-from .* has 32; leave it out"),
    ({"layers": 2}, "--layers 2: .* has 1"),
    ({"norm": "pre"}, "--norm pre: .* has post"),
    ({"tie": "target"}, "--tie target: .* has all"),
    ({"positions": "learned"}, "--positions learned: .* has sinusoid"),
])  # fmt: skip
def test_sizes_that_contradict_the_run_are_refused(
    changes: dict[str, Any], words: str, straight: Trainer, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        Trainer(tuning(straight.folder, **changes), tmp_path / "new", OTHER)
    assert not (tmp_path / "new" / "config.json").exists()


def test_what_no_weight_depends_on_may_change(straight: Trainer, tmp_path: Path) -> None:
    options = tuning(straight.folder, dropout=0.4, max_len=200, attention_dropout=0.1)
    run = Trainer(options, tmp_path, OTHER)
    assert vars(run.system.config)["dropout"] == 0.4
    assert run.system.config.max_len == 200


def test_other_architectures_languages_and_tokenizers_are_refused(
    straight: Trainer, tmp_path: Path
) -> None:
    options, system = tuning(straight.folder), load_system(straight.folder)
    recurrent = replace(options, model=replace(Options().model, architecture="rnn"))
    with pytest.raises(UsageError, match=r"--architecture rnn: .* is transformer; leave it out"):
        Trainer(recurrent, tmp_path / "a", OTHER)
    turned = (load_corpus("grammar", "en-de", size=9), load_corpus("grammar", "en-de", "val"))
    with pytest.raises(UsageError, match=r"--pair en-de: .* was trained for de-en"):
        Trainer(options.replace(pair="en-de"), tmp_path / "a", turned)
    files = {}
    for split, text in zip(("train", "val"), TEXTS, strict=True):
        paths = [tmp_path / f"{split}.{language}" for language in text.languages]
        for path, side in zip(paths, (text.source, text.target), strict=True):
            path.write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
        files[split] = [(paths[0], paths[1])]
    corpus = prepare_corpus(
        tmp_path / "p", files, Preparation(vocabulary=290, max_len=128), workers=1
    )
    with pytest.raises(UsageError, match=r"has another tokenizer than .*; give the files with"):
        Trainer(options.replace(corpus="prepared"), tmp_path / "a", corpus)
    save_system(replace(system, training={}), tmp_path / "bare")  # nobody knows how it was trained
    assert Trainer(tuning(tmp_path / "bare"), tmp_path / "b", OTHER).train(progress=False)


@pytest.mark.parametrize(("content", "words"), [
    (None, "there is no run; give the folder of one"),
    ("[]", "is not a JSON object"),
    ("{}", "config.json is damaged"),
    ('{"model": {"N": "x", "max_len": 9}, "training": {}, "architecture": "transformer", '
     '"languages": ["de", "en"]}', "config.json is damaged .*--layers"),
    ('{"model": 3, "training": {}, "architecture": "transformer", "languages": []}', "damaged"),
])  # fmt: skip
def test_a_folder_without_a_sound_run_is_refused(
    content: str | None, words: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=words):
        default_options({"finetune_from": tmp_path})
