"""Loading never runs code: hostile pickles, tokenizers, archives and test sets are refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from annotated_transformer.cli.main import main
from annotated_transformer.data.archives import locate_file
from annotated_transformer.data.corpora import Preparation, load_corpus, read_segments
from annotated_transformer.data.files import CorpusError, FileError
from annotated_transformer.data.prepare import prepare_corpus
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.data.symbols import load_any_tokenizer
from annotated_transformer.interop.marian import load_marian
from annotated_transformer.translation.tokenizers import TokenizerError


class Payload:
    """An object whose unpickling makes a folder where the process is."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("it-ran",)


def _of_torch(zipped: bool) -> bytes:
    file = io.BytesIO()
    torch.save({"w": Payload()}, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def _of_numpy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Payload()], dtype=object), allow_pickle=True)
    return file.getvalue()


HOSTILE: dict[str, bytes] = {
    **{f"protocol {n}": pickle.dumps(Payload(), n) for n in (0, 2, 5)},
    "of torch": _of_torch(True),
    "of torch, long ago": _of_torch(False),
    "of numpy": _of_numpy(),
}
LIVE: dict[str, Callable[[bytes], object]] = {
    "of torch": lambda data: torch.load(io.BytesIO(data), weights_only=False),
    "of torch, long ago": lambda data: torch.load(io.BytesIO(data), weights_only=False),
    "of numpy": lambda data: np.load(io.BytesIO(data), allow_pickle=True),
}
unpickled: list[str] | None = None


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if unpickled is not None and event == "pickle.find_class" and "mkdir" in arguments:
        unpickled.append(str(arguments))  # processes of one command send each other other things


sys.addaudithook(_hook)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Be in an empty folder, and watch what is unpickled in the test, by any library."""
    global unpickled
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    unpickled = []
    yield unpickled
    unpickled = None


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_payloads_are_live(kind: str, watched: list[str]) -> None:
    if kind in LIVE:
        LIVE[kind](HOSTILE[kind])
    else:
        pickle.loads(HOSTILE[kind])
    assert Path("it-ran").is_dir()
    assert watched


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Write a small corpus."""
    folder, text = tmp_path_factory.mktemp("texts"), load_corpus("grammar", size=60)
    found = {}
    for split in ("train", "val"):
        found[split] = folder / f"{split}.de", folder / f"{split}.en"
        for path, side in zip(found[split], (text.source, text.target), strict=True):
            path.write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    return found


def prepared(folder: Path, texts: dict[str, tuple[Path, Path]]) -> Prepared:
    """Prepare the corpus."""
    files = {split: [pair] for split, pair in texts.items()}
    return prepare_corpus(folder, files, Preparation(vocabulary=300), workers=1, log=lambda _: None)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_of_a_prepared_corpus(
    kind: str, watched: list[str], tmp_path: Path, texts: dict[str, tuple[Path, Path]]
) -> None:
    folder = tmp_path / "corpus"
    prepared(folder, texts)
    files = [path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors")]
    refused, told = set(), []
    for path in files:
        good = path.read_bytes()
        path.write_bytes(HOSTILE[kind])
        try:
            for split in ("train", "val"):
                Prepared(folder).tokens(split, verify=True)
        except CorpusError as error:
            refused.add(path.name)
            told.append(str(error))
        path.write_bytes(good)
    shards = {path.name for path in files if path.parent.name == "shards"}
    assert len(shards) == 2
    assert not any("\n" in text for text in told)
    assert refused >= {"prepared.json", "tokenizer.json", *shards}
    assert watched == []
    assert os.listdir() == []


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_tokenizers(kind: str, watched: list[str], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(HOSTILE[kind])
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        load_any_tokenizer(path)
    assert "\n" not in str(caught.value)
    assert watched == []
    assert os.listdir() == []


NESTED = "[" * 100_000
BAD_TOKENIZERS: list[Any] = [
    *({"kind": "words", "language": one, "entries": []} for one in
      ("os", "../../x", "en.examples", ".", "en\n", "", "x" * 10_000, ["de"], {"de": 1}, 10**30)),
    *({"kind": "bpe", "merges": one} for one in
      (10**30, {"a": "b"}, [[["a"], "b"]], [["a", "b", "c"]], [["\x00", "b"]], "ab", None)),
    *({"kind": "symbols", "entries": one} for one in (10**30, ["a b"], [["a", "a"], ["a", "a"]])),
    {"kind": ["words"]}, {"kind": {}}, {"kind": "symbols"},
    {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}},  # of another library
]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        *(json.dumps({"format": 1, **each}) for each in BAD_TOKENIZERS),
        NESTED,
        '{"format": 1, "kind": "bpe", "merges": ' + NESTED,
        '{"format": 1, "kind": "symbols", "entries": ' + NESTED + "]" * 100_000 + "}",
        '{"format": ' + "9" * 5000 + "}",
        '{"format": 1e999, "kind": "bpe", "merges": []}',
        '{"format": NaN, "kind": "bpe", "merges": []}',
        '{"format": true, "kind": ' + "1" * 100_000 + "}",
    ],
    ids=lambda text: ascii(text[:50]),
)
def test_tokenizers_that_are_none(text: str, watched: list[str], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        load_any_tokenizer(path).encode("a b")
    assert "\n" not in str(caught.value)
    assert "spacy.lang.en.examples" not in sys.modules
    assert watched == []


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("pack", ["tar", "zip"])
def test_hostile_members_of_an_archive(
    pack: str, kind: str, watched: list[str], tmp_path: Path, texts: dict[str, tuple[Path, Path]]
) -> None:
    """They are unpacked, as bytes, and refused as text or as a folder of a run."""
    names = ("train.de", "run/config.json", "run/model.safetensors")
    archive = tmp_path / f"corpus.{pack}"
    if pack == "zip":
        with zipfile.ZipFile(archive, "w") as zipped:
            for name in names:
                zipped.writestr(name, HOSTILE[kind])
    else:
        with tarfile.open(archive, "w") as tape:
            for name in names:
                info = tarfile.TarInfo(name)
                info.size = len(HOSTILE[kind])
                tape.addfile(info, io.BytesIO(HOSTILE[kind]))
    inside = locate_file(archive / "train.de", tmp_path / "unpacked")
    assert inside.read_bytes() == HOSTILE[kind]
    files = {"train": (archive / "train.de", texts["train"][1]), "val": texts["val"]}
    with pytest.raises(CorpusError):
        prepared(tmp_path / "out", files)
    assert main(["translate", str(inside.parent / "run"), str(texts["val"][0])]) == 2
    assert watched == []
    assert os.listdir() == []


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_checkpoints_of_others(kind: str, watched: list[str], tmp_path: Path) -> None:
    """A pickle is neither read beside the weights nor in their place."""
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder")
             for name in ("layers", "ffn_dim", "attention_heads")}  # fmt: skip
    config = {"model_type": "marian", "scale_embedding": True, "activation_function": "relu",
              "d_model": 2, "vocab_size": 5, "max_position_embeddings": 5, "pad_token_id": 1,
              "decoder_start_token_id": 1, "eos_token_id": 0, **sizes}  # fmt: skip
    good = json.dumps(config).encode()
    (tmp_path / "pytorch_model.bin").write_bytes(HOSTILE[kind])
    for name, data in (("config.json", good), ("model.safetensors", HOSTILE[kind]),
                       ("config.json", HOSTILE[kind])):  # fmt: skip
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FileError, match=name if data != good else "model.safetensors"):
            load_marian(tmp_path)
    assert watched == []
    assert os.listdir() == []


def test_entities_of_a_test_set_are_not_followed(watched: list[str], tmp_path: Path) -> None:
    """Neither files nor addresses are put in, and nothing grows."""
    (tmp_path / "secret").write_text("a secret")
    lines = [f'<!ENTITY e{n} "&e{n - 1};&e{n - 1};">' for n in range(1, 40)]
    path = tmp_path / "test.xml"
    path.write_text(
        f'<!DOCTYPE x [<!ENTITY e0 SYSTEM "file://{tmp_path}/secret">{"".join(lines)}]>\n'
        '<mteval><seg id="1">&e39; is &e0; &amp; more</seg></mteval>\n'
    )
    ((_, text),) = read_segments(path)
    assert text == "&e39; is &e0; & more"
