"""Options are checked in one way, recipes are files, and neither needs PyTorch."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from annotated_transformer.engine import config
from annotated_transformer.engine.config import (
    CORPORA,
    ModelOptions,
    Options,
    UsageError,
    build_options,
    check_options,
    check_sources,
    default_options,
    list_recipes,
    load_recipe,
)
from annotated_transformer.model.transformer import ModelConfig

PAPERS = [f"paper-{preset}-en-{target}" for preset in ("base", "big") for target in ("de", "fr")]


def test_options_need_no_torch() -> None:
    code = "import sys, annotated_transformer.engine.config as c; c.build_options({})"
    code += "; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "annotated_transformer" in loaded
    assert loaded & {"torch", "numpy", "spacy", "tyro", "tqdm", "safetensors"} == set()


def test_every_field_of_the_model_can_be_set() -> None:
    named = [
        each.metadata["config"]
        for group in (Options().model, Options().data)
        for each in fields(group)
        if "config" in each.metadata
    ]
    assert sorted(named) == sorted(each.name for each in fields(ModelConfig))


def test_no_name_is_in_two_groups() -> None:
    names = [
        each.name for group in fields(Options()) for each in fields(getattr(Options(), group.name))
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"corpus": "wmt99"}, "--corpus wmt99: choose among grammar, multi30k"),
        ({"corpus": "wmt14"}, "--corpus wmt14: too large for memory; prepare it"),
        ({"updates": 0}, "--updates 0: must be at least 1"),
        ({"max_tokens": -3}, "--max-tokens -3"),
        ({"layers": 0}, "--layers 0: must be at least 1 and at most 256"),
        ({"layers": 1_000_000}, "--layers 1000000"),
        ({"heads": 0}, "--heads 0"),
        ({"size": -1}, "--size -1"),
        ({"average": -1}, "--average -1"),
        ({"average_every": 0}, "--average-every 0"),
        ({"peak": float("nan")}, "--peak nan"),
        ({"peak": float("inf")}, "--peak inf"),
        ({"peak": 0.0}, "--peak 0.0: must be above 0"),
        ({"clip": 0.0}, "--clip 0.0"),
        ({"dropout": 1.0}, "--dropout 1.0: must be at least 0 and below 1"),
        ({"attention_dropout": -0.1}, "--attention-dropout -0.1"),
        ({"smoothing": -0.1}, "--smoothing -0.1"),
        ({"smoothing": float("nan")}, "--smoothing nan"),
        ({"keep": 0}, "--keep 0"),
        ({"log_every": 0}, "--log-every 0"),
        ({"steps": 0}, "--steps 0"),
        ({"save_every": -1.0}, "--save-every -1.0"),
        ({"save_every": float("nan")}, "--save-every nan"),
        ({"updates": 2.5}, "--updates: 2.5 is not int"),
        ({"updates": True}, "--updates: True is not int"),
        ({"norm": "both"}, "--norm: 'both' is not 'post' or 'pre'"),
        ({"architecture": "perceptron"}, "--architecture: 'perceptron' is not 'transformer' or"),
        ({"architecture": "rnn", "preset": "base"}, "--preset: not for --architecture rnn"),
        ({"architecture": "rnn", "norm": "pre"}, "--norm: not for --architecture rnn"),
        ({"architecture": "convolution", "d_k": 3}, "--d-k: not for --architecture convolution"),
        ({"architecture": "rnn", "compile": True}, "--compile: works with the Transformer only"),
        ({"layer": 3}, "--layer: there is no such option"),
    ],
)
def test_values_that_cannot_work(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(told)}") as error:
        check_options(Options().replace(**change))
    assert "\n" not in str(error.value)


def test_values_at_their_limits_work() -> None:
    check_options(
        Options().replace(dropout=0.0, layers=256, updates=1, smoothing=0.999, save_every=0.0)
    )
    check_options(Options().replace(architecture="rnn", layers=3, dropout=0.5))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"corpus": "prepared"}, "--corpus prepared and --prepared FOLDER go together"),
        ({"prepared": Path("x")}, "--corpus prepared and --prepared FOLDER go together"),
        ({"corpus": "files"}, "--train-files is missing: give two files"),
        ({"train_files": (Path("a"), Path("b"))}, "--train-files: only for --corpus files, not"),
        ({"mirror": Path("m")}, "--mirror: --corpus grammar needs no download"),
        ({"size": 200_001}, "--size: the grammar has at most 200,000 pairs; ask for fewer"),
    ],
)
def test_a_corpus_and_its_files_go_together(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        check_sources(Options().replace(**change).data)


@pytest.mark.parametrize(
    ("names", "pair", "refused"),
    [
        (("a.en", "a.de.gz"), "de-en", "en-de, and the pair is de-en; give --pair, or exchange"),
        (("a.es.xz", "a.en"), "de-en", "es-en, and the pair is de-en; give --pair, or rename"),
        (("en.txt", "fr.txt"), "en-de", "en-fr, and the pair is en-de; give --pair, or rename"),
        (("english.txt", "x.de.txt"), "de-en", ""),  # one name says nothing
        (("a.de", "a.en"), "de-en", ""),
        (("a.en", "a.de"), "en-de", ""),
        (("a.words", "a.trees"), "en-trees", ""),
        (("a.gz", "b.xz"), "de-en", ""),
        (("a.de.en", "b.de.en"), "de-en", ""),  # as corpora of pairs are named
        (("a.en-de.en", "a.en-de.de"), "de-en", "en-de, and the pair is de-en; give --pair, or"),
        (("x", "y"), "de-en", ""),
        (("is", "a.fr"), "de-en", ""),
    ],
)
@pytest.mark.parametrize("side", ["train_files", "valid_files"])
def test_files_of_other_languages_are_refused(
    names: tuple[str, str], pair: str, refused: str, side: str
) -> None:
    files = {"train_files": (Path("x"), Path("y")), "valid_files": (Path("x"), Path("y"))}
    files[side] = (Path("de.d") / names[0], Path(names[1]))
    data = Options().replace(corpus="files", pair=pair, **files).data
    if refused:
        flag = "--" + side.replace("_", "-")
        with pytest.raises(UsageError, match=re.escape(f"{flag}: end like --pair {refused}")):
            check_sources(data)
    else:
        check_sources(data)


def test_files_imply_their_corpus() -> None:
    two = (Path("a"), Path("b"))
    assert build_options({"train_files": two, "valid_files": two}).data.corpus == "files"
    assert build_options({"prepared": Path("p")}).data.corpus == "prepared"
    with pytest.raises(UsageError, match="--train-files: only for --corpus files, not multi30k"):
        build_options({"train_files": two, "corpus": "multi30k"})
    with pytest.raises(UsageError, match="--valid-files is missing: give two files"):
        build_options({"train_files": two})


# --- recipes ---------------------------------------------------------------------------------


def test_recipes_can_work_and_say_where_they_come_from() -> None:
    assert set(list_recipes()) > {"grammar", "multi30k", "multi30k-lower", "iwslt14", *PAPERS}
    for name, about in list_recipes().items():
        check_options(load_recipe(name))
        assert len(about) > 20, name
    for corpus in CORPORA:
        assert default_options({"corpus": corpus}).data.corpus == corpus


def test_the_paper_is_followed() -> None:
    for name in PAPERS:
        options = load_recipe(name)
        big, french = "big" in name, name.endswith("fr")
        assert options.model.dropout == (0.3 if big and not french else 0.1)
        assert options.data.vocabulary == (32_000 if french else 37_000)
        assert options.data.pair == ("en-fr" if french else "en-de")
        assert options.optim.updates == (300_000 if big else 100_000)
        assert options.optim.average == (20 if big else 5)
        assert (options.optim.warmup, options.optim.smoothing) == (4000, 0.1)
        assert options.optim.peak is None  # the formula
        assert options.optim.max_tokens * options.optim.accumulate == 25_000
        assert options.model.norm is None  # as printed
        assert options.optim.average_every == options.optim.updates // ((84 if big else 12) * 6)


def test_the_recipe_of_the_best_records_is_the_default() -> None:
    paths = (Path(config.__file__).parents[2] / "results").glob("multi30k-*.json")
    records = [json.loads(path.read_text()) for path in paths]
    averaged, pairs = "test_2016_flickr, averaged", ("en-de", "de-en")
    for pair in pairs:
        own = [record for record in records if record["options"]["pair"] == pair]
        best = max(own, key=lambda record: float(record["scores"][averaged]["bleu"]))["options"]
        chosen = build_options({"corpus": "multi30k", "pair": pair, "seed": best["seed"]})
        assert best == {"model": "transformer", **shared(chosen, best)}
        cased = build_options({"recipe": "multi30k-cased", "pair": pair, "seed": best["seed"]})
        assert shared(cased, best) == {**shared(chosen, best), "tokenizer": "bpe"}
    assert load_recipe("multi30k-lower") == load_recipe("multi30k")


def shared(options: Options, record: dict[str, Any]) -> dict[str, Any]:
    """Return what a record of an older version, too, says of a run."""
    return {name: value for name, value in options.described().items() if name in record}


def test_what_ill_fits_a_recipe_is_left_out() -> None:
    assert default_options({}).model.layers == 2
    assert default_options({"preset": "tiny"}).model.layers == 2
    base = default_options({"preset": "base"})
    assert (base.model.layers, base.model.dropout) == (None, None)
    assert base.optim == default_options({}).optim
    assert build_options({"preset": "base", "layers": 3}).model.layers == 3
    assert default_options({"corpus": "multi30k", "preset": "base"}).model.norm == "pre"
    for corpus in CORPORA:
        for name in ("rnn", "rnn-attention", "rnn-dot", "convolution"):
            options = default_options({"corpus": corpus, "architecture": name})
            assert options.model == ModelOptions(name, dropout=options.model.dropout)
            check_options(options)
    assert default_options({"prepared": Path("x"), "preset": "big"}).optim.updates == 300_000
    assert default_options({"recipe": "multi30k-lower"}).data.tokenizer == "bpe-lower"
    chosen = build_options({"recipe": "multi30k-lower", "seed": 5, "pair": "en-de"})
    assert chosen == load_recipe("multi30k-lower").replace(seed=5, pair="en-de")


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"like": "grammar", "optim": {"updates": 7}, "run": {"log_every": 1}}')
    assert load_recipe(path) == load_recipe("grammar").replace(updates=7, log_every=1)
    assert build_options({"recipe": str(path), "seed": 3}).optim.updates == 7


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("[" * 100_000, "is not JSON"),
        ('{"optim": {"updates": 0}}', "--updates 0: must be at least 1"),
        ('{"optim": {"updates": "7"}}', "optim: updates: '7' is not int"),
        ('{"optim": {"steps": 7}}', "optim: 'steps' is unknown"),
        ('{"optim": 7}', "optim: 7 is not OptimOptions"),
        ('{"model": {"norm": []}}', "model: norm: [] is not 'post' or 'pre'"),
        ('{"model": {"layers": true}}', "model: layers: True is not int"),
        ('{"optim": {"peak": 1' + "0" * 400 + "}}", "00 is not float"),
        ('{"speed": {}}', "'speed' is unknown"),
        ('{"like": "mine"}', "like 'mine'"),
        ('{"like": 7}', "like 7"),
    ],
)
def test_a_wrong_recipe_is_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(told)) as error:
        load_recipe(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_recipe_is_told_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--recipe multi: neither a file nor .*multi30k-lower"):
        load_recipe("multi")
    with pytest.raises(UsageError, match="cannot be read"):
        load_recipe(tmp_path)


# --- descriptions ----------------------------------------------------------------------------


def test_a_description_is_flat_and_comes_back_without_places() -> None:
    options = load_recipe("multi30k-lower").replace(mirror=Path("m"), d_k=8, keep=9)
    described = json.loads(json.dumps(options.described()))
    assert described["d_k"] == 8
    assert described["updates"] == 6000
    assert not {"mirror", "prepared", "train_files", "keep", "steps"} & described.keys()
    assert Options().replace(**described) == options.replace(mirror=None, keep=2)
    del described["d_k"]  # as a version wrote it that did not know this option
    assert Options().replace(**described).model.d_k is None
    with pytest.raises(UsageError, match="--speed: there is no such option"):
        Options().replace(**described, speed=3)
