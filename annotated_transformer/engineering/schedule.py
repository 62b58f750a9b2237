# Written from book/engineering/schedule.md: edit the chapter instead.
"""What the paper's training would take on a machine (section 5.2)."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from annotated_transformer.model.transformer import ModelConfig, build_model
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.loop import update
from annotated_transformer.training.monitoring import batch_flops
from annotated_transformer.training.optimizer import make_adam


@dataclass(frozen=True)
class Pace:
    """How fast a machine trains a model.

    Attributes:
        token: Seconds for one more target token, with a source token beside it.
        update: Seconds for the update of the weights.
        flops: Operations of matrix products for each target token.
    """

    token: float
    update: float
    flops: float

    def step(self, tokens: int) -> float:
        """Return the seconds of an update of so many target tokens."""
        return tokens * self.token + self.update

    @property
    def rate(self) -> float:
        """Operations of matrix products per second, while tokens are computed."""
        return self.flops / self.token


def full_batch(sentences: int, length: int, vocab: int) -> Batch:
    """Return a batch of random sentences, all equally long."""
    src = torch.randint(4, vocab, (sentences, length))
    return Batch(src, torch.randint(4, vocab, (sentences, length + 1)))


def measure_pace(
    config: ModelConfig, vocab: int, sentences: int = 8, length: int = 28, repeats: int = 3
) -> Pace:
    """Measure how fast this machine trains a model, in float32.

    Args:
        config: Sizes of the model.
        vocab: Number of tokens of both languages.
        sentences: Of the smaller batch; the other has three times as many.
        length: Tokens of each sentence.
        repeats: Steps of each; the median counts.
    """
    model = build_model(vocab, vocab, config).train()
    optimizer = make_adam(model, lr=1e-5)
    batches = [full_batch(n * sentences, length, vocab) for n in (1, 3)]
    times: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for batch, found in zip(batches, times, strict=True):
            start = time.perf_counter()
            update(model, [batch], optimizer, smoothing=0.1)
            found.append(time.perf_counter() - start)
    small, large = (statistics.median(found[1:]) for found in times)
    tokens = sentences * length
    each = max(large - small, small / 10) / (2 * tokens)  # never nothing, on a noisy machine
    flops = batch_flops(config, vocab, [length], [length]) / length
    return Pace(each, max(0.0, small - tokens * each), flops)


def training_flops(config: ModelConfig, vocab: int, updates: int, length: int = 28) -> int:
    """Return the operations of all matrix products in a training of the paper.

    Args:
        config: Sizes of the model.
        vocab: Number of tokens of both languages.
        updates: Each has 25,000 source and 25,000 target tokens.
        length: Tokens of a sentence, which change the work but little.
    """
    return updates * batch_flops(config, vocab, [length], [length]) * 25_000 // length
