"""Sampling: outputs drawn from the model's probabilities, in place of the most probable one.

The options are those of Hugging Face, fairseq and others: the temperature divides the logits, top-k
keeps the k most probable tokens (Fan et al., 2018), and top-p the fewest whose probabilities sum to
at least p (nucleus sampling, Holtzman et al., 2020).
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from annotated_transformer.fast.decoding import start_steps
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.notation import BOS, PAD
from annotated_transformer.training.loop import sum_type
from annotated_transformer.translation.beam_search import Hypothesis, beam_search
from annotated_transformer.translation.greedy import Steps


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens.

    Attributes:
        temperature: Divides the logits; below 1 it favours probable tokens, above 1 the others.
        top_k: Draw only from this many of the most probable tokens; 0 for all.
        top_p: Draw only from the fewest tokens whose probabilities sum to at least this.
        seed: Fixes what is drawn.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature {self.temperature}: must be above 0 and finite")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be above 0 and at most 1")

    def probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities to draw with, and their tokens, the most probable first.

        Args:
            logits: ``(..., vocab)``, or log-probabilities.

        Returns:
            Probabilities in float64, which sum to 1 and are zero for what may not be drawn, and
            tokens, both ``(..., vocab)``. Equally probable tokens stay in order.
        """
        exact = logits.to(sum_type(logits.device))
        scaled, tokens = exact.sort(dim=-1, descending=True, stable=True)
        found = ((scaled - scaled[..., :1]) / self.temperature).softmax(-1)
        rank = torch.arange(found.size(-1), device=found.device)
        if self.top_k:
            found = found.masked_fill(rank >= min(self.top_k, found.size(-1)), 0)
            found = found / found.sum(-1, keepdim=True)
        before = found.cumsum(-1) - found
        found = found.masked_fill((before >= self.top_p) & (rank > 0), 0)
        return found / found.sum(-1, keepdim=True), tokens


class Sampler(Steps):
    """A model's steps, with random numbers of each sentence's own.

    So what is drawn for a sentence does not depend on the batch that it is in. There is one
    hypothesis of each sentence. ``choose`` stands in for the search's choice of the best
    continuations; it never draws the tokens ``never``.
    """

    def __init__(
        self, steps: Steps, rngs: Sequence[random.Random], sampling: Sampling,
        never: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.steps, self.rngs, self.sampling, self.never = steps, list(rngs), sampling, list(never)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Take the newest tokens ``(rows,)``; return logits of the next ones ``(rows, vocab)``."""
        return self.steps(tokens)

    def choose(self, logits: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a token for each sentence: log-probability, hypothesis and token.

        Args:
            logits: Logits of the next token ``(sentences, 1, vocab)``.
            log_probs: Log-probability of each output so far ``(sentences, 1)``.

        Returns:
            Each ``(sentences, 1)``. The log-probability is the model's own, before the
            temperature and what it excludes.
        """
        allowed = logits[:, 0].clone()
        allowed[:, self.never] = -math.inf
        shares, tokens = self.sampling.probabilities(allowed)
        # In the order of the ids: that of equally probable tokens would depend on the batch.
        sums = torch.zeros_like(shares).scatter_(1, tokens, shares).cumsum(-1)
        if sums[:, -1].isnan().any():
            raise FloatingPointError("the model's outputs are NaN: no output has a probability")
        drawn = torch.tensor([[1 - rng.random()] for rng in self.rngs], dtype=shares.dtype)
        token = torch.searchsorted(sums, drawn.to(sums.device) * sums[:, -1:])  # never in a gap
        gained = logits[:, 0].log_softmax(-1).gather(1, token)
        return log_probs + gained, torch.zeros_like(token), token

    def select(self, sentences: Tensor) -> None:
        """Keep the given sentences, in that order."""
        self.rngs = [self.rngs[i] for i in sentences.tolist()]
        self.steps.select(sentences)

    def follow(self, parents: Tensor) -> None:
        """Go on: each sentence has one hypothesis."""
        self.steps.follow(parents)


def sample(
    model: EncoderDecoder,
    sources: list[list[int]],
    sampling: Sampling,
    *,
    max_len: int | None = None,
    names: Sequence[object] | None = None,
) -> list[Hypothesis]:
    """Draw one output for each source; its score is its log-probability.

    Args:
        model: Is in evaluation mode meanwhile.
        sources: Tokens of each sentence, without special symbols.
        sampling: How to draw.
        max_len: Most tokens of an output, apart from the usual limits by source and positions.
        names: One key a sentence, which seeds its random numbers (by default its index).
    """
    keys = range(len(sources)) if names is None else names
    made: list[Sampler] = []

    def begin(model: EncoderDecoder, src: Tensor, mask: Tensor, beam: int) -> Steps:
        rngs = [random.Random(f"{sampling.seed} {key}") for key in keys]
        made.append(Sampler(start_steps(model, src, mask, beam), rngs, sampling, (PAD, BOS)))
        return made[0]

    def choose(logits: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return made[0].choose(logits, log_probs)

    search = partial(beam_search, start=begin, continuations=choose)
    found = search(model, sources, beam=1, alpha=0, max_len=max_len)
    return [best for (best,) in found]
