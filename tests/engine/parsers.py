"""A small parser for the tests of parsing."""

from __future__ import annotations

from annotated_transformer.data.symbols import SymbolTokenizer
from annotated_transformer.engine.system import System
from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.translation.tokenizers import BPETokenizer
from tests.translation.small import opinionated

SYMBOLS = "(S )S (NP )NP (VP )VP DT NN VBZ .".split()


def small_parser(seed: int = 0, ends: float = 0.0) -> System:
    """Return an untrained parser with strong opinions, most of which are no trees."""
    source, target = BPETokenizer([]), SymbolTokenizer(SYMBOLS)
    sizes = {"N": 1, "d_model": 8, "d_ff": 16, "h": 2, "max_len": 400}
    model = opinionated(seed, ends, size=(len(source), len(target)), **sizes)
    config = ModelConfig(**sizes, tie="none")  # type: ignore[arg-type]
    return System(model, config, ("en", "trees"), (source, target), {})
