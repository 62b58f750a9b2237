"""A system of five words with large random weights, for tests of searches on text."""

from annotated_transformer.engine.system import System
from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.translation.tokenizers import WordTokenizer
from tests.translation.small import opinionated

WORDS = ("a", "b", "c", "d", "e")


def system_of(seed: int = 0, *, max_len: int = 12, ends: float = 0.0, N: int = 1) -> System:
    """Return a system of nine tokens in float64."""
    words = WordTokenizer("en", [(word, False) for word in WORDS])
    model = opinionated(seed, ends, len(words), N=N)
    config = ModelConfig(N=N, d_model=8, d_ff=16, h=2, max_len=max_len, tie="none")
    return System(model, config, ("de", "en"), (words, words), {})
