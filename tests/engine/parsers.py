"""A small parser, and an archive of the treebank sample's shape, for the tests of parsing."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from annotated_transformer.data.corpora import SOURCES
from annotated_transformer.data.symbols import SymbolTokenizer
from annotated_transformer.engine.system import System
from annotated_transformer.model.transformer import ModelConfig
from tests.translation.small import opinionated

SYMBOLS = "(S )S (NP )NP (VP )VP /DT /NN /VBZ /. a b c dog dogs sees sleeps the <_> .".split()

TREE = "( (S (NP-SBJ-1 (DT A) (NN dog{n})) (VP (VBZ sleeps) (NP (-NONE- *))) (. .)) )\n"


def write_sample(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write an archive of 199 files, and expect it; file n has n % 3 + 1 trees."""
    path = mirror / "ptb/treebank.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        for n in range(1, 200):
            archive.writestr(f"treebank/combined/wsj_{n:04d}.mrg", TREE.format(n=n) * (n % 3 + 1))
    expect(path, monkeypatch)
    return mirror


def expect(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect this archive instead of the real one."""
    data = path.read_bytes()
    known = [len(data), hashlib.sha256(data).hexdigest(), "http://127.0.0.1:9/treebank.zip"]
    monkeypatch.setitem(SOURCES, "treebanks", {"ptb/treebank.zip": known})


def small_parser(seed: int = 0, ends: float = 0.0) -> System:
    """Return an untrained parser with strong opinions, most of which are no trees."""
    symbols = SymbolTokenizer(SYMBOLS)
    sizes = {"N": 1, "d_model": 8, "d_ff": 16, "h": 2, "max_len": 400}
    model = opinionated(seed, ends, size=len(symbols), **sizes)
    config = ModelConfig(**sizes, tie="none")  # type: ignore[arg-type]
    return System(model, config, ("en", "trees"), (symbols, symbols), {})
