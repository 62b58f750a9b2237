"""Systems to export, sentences of the grammar, and what our own decoding makes of them.

Multi30k may be at hand, but a system that was trained on it is not, so the grammar has to do: its
500 sentences are translated by the model that comes with the package.
"""

import contextlib
import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from annotated_transformer.data.corpora import ParallelText, load_corpus
from annotated_transformer.engine.system import System
from annotated_transformer.fast.search import greedy_search
from annotated_transformer.model.transformer import ModelConfig, build_model
from annotated_transformer.notation import PAD
from annotated_transformer.pretrained import load_pretrained
from annotated_transformer.training.batches import make_batch
from annotated_transformer.translation.tokenizers import BPETokenizer, WordTokenizer

TOLERANCE = 1e-4  # of logits
MOST = 12  # tokens of what an untrained model generates, which knows no end


@cache
def embedded() -> System:
    """Return the model that comes with the package."""
    return load_pretrained().system


@cache
def sentences() -> ParallelText:
    """Return 500 sentence pairs."""
    return load_corpus("grammar", split="test", size=500)


@cache
def sources() -> list[list[int]]:
    """Return the tokens of the German sentences for the package's model."""
    return [embedded().tokenizers[0].encode(line) for line in sentences().source]


@cache
def translations() -> list[list[int]]:
    """Return our own greedy translations, as tokens."""
    return greedy_search(embedded().model, sources(), 250)


def worded() -> System:
    """Return a system with words, and so with two vocabularies."""
    text = sentences().head(100)
    one = WordTokenizer.train(text.source, "de", 2)
    other = WordTokenizer.train(text.target, "en", 2)
    config = ModelConfig(N=1, d_model=16, d_ff=24, h=2, max_len=64, tie="target")
    torch.manual_seed(6)
    model = build_model(len(one), len(other), config).eval()
    return System(model, config, ("de", "en"), (one, other), {})


def printed_by_card(folder: Path, sentence: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the code in the card of an export with a sentence; return what it prints."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert "…" in code
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code.replace("…", sentence), {})
    return out.getvalue().rstrip("\n")


def small(**sizes: Any) -> System:
    """Return a system with random weights, norms and biases too."""
    lines = [*sentences().source[:100], *sentences().target[:100]]
    tokenizer = BPETokenizer.train(lines, 300)
    config = ModelConfig(**{"N": 2, "d_model": 16, "d_ff": 24, "h": 2, "max_len": 64, **sizes})
    torch.manual_seed(5)
    model = build_model(300, 300, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return System(model, config, ("de", "en"), (tokenizer, tokenizer), {})


def small_texts(system: System) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Return a few source sentences of different lengths, their tokens, and those of targets."""
    one, other = system.tokenizers
    text = sentences().head(8)
    return (
        list(text.source),
        [one.encode(line) for line in text.source],
        [other.encode(line) for line in text.target],
    )


def distance(
    found: Tensor, system: System, source: list[list[int]], target: list[list[int]]
) -> float:
    """Return the largest difference of logits ``(batch, n, vocabulary)`` to ours, padding apart."""
    real = make_batch(source, target).tgt != PAD
    return float((found - logits_of(system, source, target))[real].abs().max())


@torch.no_grad()
def logits_of(system: System, source: list[list[int]], target: list[list[int]]) -> Tensor:
    """Return our logits ``(batch, n, vocabulary)`` of given targets, by the readable layer."""
    batch = make_batch(source, target)
    out = system.model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    found: Tensor = system.model.generator.get_submodule("proj")(out)
    return found
