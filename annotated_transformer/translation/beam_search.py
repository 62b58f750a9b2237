# Written from book/translation/beam_search.md: edit the chapter instead.
"""Beam search with a length penalty (sections 6.1, 6.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.multi_head import subsequent_mask
from annotated_transformer.notation import BOS, EOS
from annotated_transformer.translation.greedy import (
    StartSteps,
    output_limits,
    readable_steps,
    round_up,
    source_batch,
    strip,
)


def length_penalty(length: int, alpha: float) -> float:
    """Return what a log-probability is divided by, 1 for a length of 1.

    Args:
        length: Tokens of the output, the end symbol included.
        alpha: Strength; 0 is none.
    """
    return math.pow((5 + length) / 6, alpha)


@dataclass(frozen=True)
class Hypothesis:
    """An output of a search.

    Attributes:
        tokens: Token numbers, without special symbols.
        score: The log-probability divided by the length penalty; the higher the better.
        log_probability: Natural logarithm of the output's probability, its end symbol included
            unless it was cut at the most tokens.
    """

    tokens: list[int]
    score: float
    log_probability: float


def _finished(tokens: list[int], log_probability: float, alpha: float) -> Hypothesis:
    """Score an output, given with its end symbol unless it was cut."""
    score = log_probability / length_penalty(len(tokens), alpha)
    return Hypothesis(strip(tokens), score, log_probability)


@torch.no_grad()
def beam_search_uncached(
    model: EncoderDecoder, source: list[int], *, beam: int, alpha: float, limit: int
) -> list[Hypothesis]:
    """Search one sentence, computing every position again, until nothing is open.

    Args:
        model: In evaluation mode.
        source: Token numbers, without special symbols.
        beam: Hypotheses kept at each step.
        alpha: Strength of the length penalty.
        limit: Most tokens of an output, the end symbol included; at least 1.

    Returns:
        The finished hypotheses, the best first; at most ``beam``.
    """
    src, mask = source_batch([source], next(model.parameters()).device)
    memory = model.encode(src, mask)
    hypotheses: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[Hypothesis] = []
    for length in range(1, limit + 1):
        candidates = []
        for tokens, log_probability in hypotheses:
            ys = torch.tensor([[BOS, *tokens]], device=src.device)
            out = model.decode(memory, mask, ys, subsequent_mask(length, src.device))
            following = model.generator(out[0, -1]).tolist()  # (vocab,)
            candidates += [([*tokens, t], log_probability + p) for t, p in enumerate(following)]
        candidates.sort(key=lambda candidate: -candidate[1])
        hypotheses, kept = [], candidates[: beam - len(done)]
        for tokens, log_probability in kept:
            if tokens[-1] == EOS or length == limit:
                done.append(_finished(tokens, log_probability, alpha))
            else:
                hypotheses.append((tokens, log_probability))
    return sorted(done, key=lambda hypothesis: -hypothesis.score)


def best_continuations(logits: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the most probable continuations of the hypotheses of each sentence.

    Of what is equally probable, that of the first hypothesis comes first, then the smallest token.

    Args:
        logits: Of the next token ``(sentences, beam, vocab)``.
        log_probs: Of each hypothesis so far ``(sentences, beam)``, float64; minus infinity where
            there is none.

    Returns:
        As many continuations as hypotheses, each of shape ``(sentences, beam)``, the best first:
        log-probability, hypothesis, token.
    """
    candidates = log_probs.unsqueeze(2) + logits.log_softmax(-1)  # (sentences, beam, vocab)
    best, places = stable_topk(candidates.flatten(1), logits.size(1))
    return best, places // logits.size(2), places % logits.size(2)


Continuations = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def stable_topk(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest of each row and their places; the earlier place first, if equal."""
    tops, places = values.topk(count)  # in any order, if equal
    least = tops[:, -1:]
    if ((values >= least).sum(-1, keepdim=True) > count).logical_and(least > -torch.inf).any():
        tops, places = values.sort(dim=-1, descending=True, stable=True)
        return tops[:, :count], places[:, :count]
    places = places.sort(-1).values
    tops, order = values.gather(1, places).sort(dim=-1, descending=True, stable=True)
    return tops, places.gather(1, order)


class _Beams:
    """The hypotheses of all sentences that are at work."""

    def __init__(
        self, limits: list[int], beam: int, alpha: float, n_best: int, device: torch.device
    ) -> None:
        self.alpha, self.n_best, count = alpha, n_best, len(limits)
        self.done: list[list[Hypothesis]] = [
            [] if limit else [Hypothesis([], 0.0, 0.0)] for limit in limits
        ]
        self.sentences = torch.arange(count, device=device)
        self.limits = torch.tensor(limits, device=device)
        longest = [length_penalty(limit, alpha) for limit in limits]
        self.divisors = torch.tensor(longest, dtype=torch.double, device=device)
        self.log_probs = self.divisors.new_full((count, beam), -torch.inf)
        self.log_probs[:, 0] = 0.0
        self.outputs = self.sentences.new_empty(count, beam, 0)
        self.places = torch.full_like(self.sentences, beam)  # not taken by a finished hypothesis
        self.beaten = self.divisors.new_full((count,), -torch.inf)  # by a score above this

    def going(self) -> Tensor:
        """Whether an open hypothesis of each sentence can still win: ``(sentences,)``."""
        bound = self.log_probs.amax(1) / self.divisors
        return (bound > self.beaten) & (self.limits > self.outputs.size(2))

    def grow(
        self, log_probs: Tensor, parents: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take the best continuations; return the parent and the newest token of each hypothesis."""
        outputs = self.outputs.take_along_dim(parents.unsqueeze(2), 1)
        self.outputs = torch.cat([outputs, tokens.unsqueeze(2)], dim=2)
        rank = torch.arange(log_probs.size(1), device=log_probs.device)
        log_probs = log_probs.masked_fill(rank >= self.places.unsqueeze(1), -torch.inf)
        cut = self.limits <= self.outputs.size(2)
        over = ((tokens == EOS) | cut.unsqueeze(1)) & (log_probs > -torch.inf)
        if over.any():
            self._finish(over, log_probs[over].tolist())
        self.log_probs = log_probs.masked_fill(over, -torch.inf)
        return parents, tokens

    def _finish(self, over: Tensor, log_probs: list[float]) -> None:
        """Move hypotheses to those that are done."""
        self.places = self.places - over.sum(1)
        numbers, outputs = over.nonzero()[:, 0].tolist(), self.outputs[over].tolist()
        for i, tokens, log_probability in zip(numbers, outputs, log_probs, strict=True):
            done = self.done[int(self.sentences[i])]
            done.append(_finished(tokens, log_probability, self.alpha))
            if len(done) >= self.n_best:
                self.beaten[i] = sorted((h.score for h in done), reverse=True)[self.n_best - 1]

    def select(self, kept: Tensor) -> None:
        """Keep these sentences."""
        self.sentences, self.limits = self.sentences[kept], self.limits[kept]
        self.divisors, self.log_probs = self.divisors[kept], self.log_probs[kept]
        self.outputs, self.places = self.outputs[kept], self.places[kept]
        self.beaten = self.beaten[kept]


@torch.no_grad()
def beam_search(
    model: EncoderDecoder,
    sources: list[list[int]],
    *,
    beam: int = 4,
    alpha: float = 0.6,
    max_len: int | None = None,
    extra: int = 50,
    n_best: int = 1,
    start: StartSteps = readable_steps,
    continuations: Continuations = best_continuations,
) -> list[list[Hypothesis]]:
    """Translate sentences given as token numbers, batched, by beam search (section 6.1).

    A beam larger than the vocabulary is allowed, and fills with the second token. An empty source
    is translated as its end symbol alone.

    Args:
        model: In evaluation mode.
        sources: Token numbers of each sentence, without special symbols; may be empty.
        beam: Hypotheses kept at each step.
        alpha: Strength of the length penalty, from 0 to 10.
        max_len: Most tokens of an output, where it shall be fewer than ``extra`` allows.
        extra: An output has at most this many tokens more than its source, and never more than
            the model has positions.
        n_best: How many results for each sentence.
        start: Encodes the sentences, and returns what decodes them.
        continuations: Finds the best continuations.

    Returns:
        For each sentence its best hypotheses, the best first. They are ``n_best``, or fewer where
        there are not as many outputs. The same whether sentences come together or alone.

    Raises:
        FloatingPointError: The model's outputs are not numbers.
        IndexError: A source, with its end symbol, is longer than the model's positions.
        ValueError: An option is out of its range.
    """
    check_search(beam, alpha, n_best)
    if not sources:
        return []
    src, mask = source_batch(sources, next(model.parameters()).device)
    limits = output_limits(model, sources, max_len, extra)
    beams = _Beams(limits, beam, alpha, n_best, src.device)
    steps = start(model, src, mask, beam)
    tokens = torch.full((len(sources), beam), BOS, device=src.device)
    while len(left := (going := beams.going()).nonzero()[:, 0]):
        if (size := round_up(len(left))) < len(going):  # finished sentences leave the batch
            left = torch.cat([left, (~going).nonzero()[: size - len(left), 0]])
            beams.select(left)
            steps.select(left)
            tokens = tokens[left]
        logits = steps(tokens.flatten()).unflatten(0, tokens.shape)  # (sentences, beam, vocab)
        parents, tokens = beams.grow(*continuations(logits, beams.log_probs))
        steps.follow(parents)
    if not all(beams.done):
        raise FloatingPointError("the model's outputs are not numbers: no output has a probability")
    return [sorted(done, key=lambda h: -h.score)[:n_best] for done in beams.done]


def check_search(beam: int, alpha: float, n_best: int = 1) -> None:
    """Raise ValueError for an option that is out of its range."""
    if beam < 1:
        raise ValueError(f"beam {beam}: must be at least 1")
    if not 0 <= alpha <= 10:
        raise ValueError(f"alpha {alpha}: must be from 0 to 10")
    if not 1 <= n_best <= beam:
        raise ValueError(f"n_best {n_best}: must be from 1 to the beam, {beam}")
