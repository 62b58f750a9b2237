# Written from book/translation/beam_search.md: edit the chapter instead.
"""Beam search with a length penalty (§6.1, §6.3)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.notation import SPECIAL_IDS, SpecialIds
from annotated_transformer.training.loop import evaluation_mode, sum_type
from annotated_transformer.translation.greedy import (
    StartSteps,
    Steps,
    output_limits,
    readable_steps,
    round_up,
    source_batch,
    strip_special_tokens,
)


def length_penalty(length: int, alpha: float) -> float:
    """Return what a log-probability is divided by, 1 for a length of 1 (§6.1).

    Args:
        length: Tokens of the output, the end symbol included.
        alpha: Strength; 0 is none.
    """
    return math.pow((5 + length) / 6, alpha)


@dataclass(frozen=True)
class Hypothesis:
    """An output of a search.

    Attributes:
        tokens: Token ids, without special symbols.
        score: The log-probability divided by the length penalty; the higher the better.
        log_probability: In nats, the end symbol included unless the output was cut before it.
    """

    tokens: list[int]
    score: float
    log_probability: float


def _finished(
    tokens: list[int], log_probability: float, alpha: float, special: SpecialIds = SPECIAL_IDS
) -> Hypothesis:
    """Score an output, given with its end symbol unless it was cut."""
    score = log_probability / length_penalty(len(tokens), alpha)
    return Hypothesis(strip_special_tokens(tokens, special), score, log_probability)


def best_continuations(logits: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the most probable continuations of the hypotheses of each sentence.

    Ties go to the earlier hypothesis, then to the smaller token id.

    Args:
        logits: Logits of the next token ``(sentences, beam, vocab)``.
        log_probs: Of the hypotheses ``(sentences, beam)``, float64; minus infinity for none.

    Returns:
        Log-probability, hypothesis and token of as many continuations as there are hypotheses,
        each ``(sentences, beam)``, the best first.
    """
    candidates = log_probs.unsqueeze(2) + logits.log_softmax(-1)  # (sentences, beam, vocab)
    best, places = stable_topk(candidates.flatten(1), logits.size(1))
    return best, places // logits.size(2), places % logits.size(2)


Continuations = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def stable_topk(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row and their indices; ties go to the smaller index."""
    tops, places = values.topk(count)  # in any order, if equal
    least = tops[:, -1:]
    if ((values >= least).sum(-1, keepdim=True) > count).logical_and(least > -torch.inf).any():
        tops, places = values.sort(dim=-1, descending=True, stable=True)
        return tops[:, :count], places[:, :count]
    places = places.sort(-1).values
    tops, order = values.gather(1, places).sort(dim=-1, descending=True, stable=True)
    return tops, places.gather(1, order)


class _Done:
    """The finished outputs of every sentence, the best first; a limit of 0 gives the empty one."""

    def __init__(self, limits: list[int], alpha: float, n_best: int, special: SpecialIds) -> None:
        self.alpha, self.n_best, self.special = alpha, n_best, special
        self.found = [[] if limit else [Hypothesis([], 0.0, 0.0)] for limit in limits]

    def add(self, sentence: int, tokens: list[int], log_probability: float) -> float:
        """Add an output; return the score above which an open hypothesis can still win."""
        found = self.found[sentence]
        found.append(_finished(tokens, log_probability, self.alpha, self.special))
        found.sort(key=lambda hypothesis: -hypothesis.score)  # equal ones stay in order
        return found[self.n_best - 1].score if len(found) >= self.n_best else -math.inf


@dataclass
class _Open:
    """The open hypotheses of the sentences that are left."""

    sentences: Tensor  # (left,), their numbers in the whole batch
    limits: Tensor  # (left,), most tokens of an output
    divisors: Tensor  # (left,), float64, length penalty at the limit
    beaten: Tensor  # (left,), float64, an open hypothesis must score more than this to win
    places: Tensor  # (left,), not taken by finished hypotheses
    log_probs: Tensor  # (left, beam), float64; minus infinity where no hypothesis is open
    outputs: Tensor  # (left, beam, length), tokens so far

    def active(self) -> Tensor:
        """Whether an open hypothesis of each sentence can still win: ``(left,)``."""
        bound = self.log_probs.amax(1) / self.divisors
        return (bound > self.beaten) & (self.limits > self.outputs.size(2))

    def select(self, kept: Tensor) -> None:
        """Keep these sentences."""
        for name, values in list(vars(self).items()):
            setattr(self, name, values[kept])


def _begin(limits: list[int], beam: int, alpha: float, device: torch.device) -> _Open:
    """Begin each sentence with one hypothesis, the empty output."""
    longest = [length_penalty(limit, alpha) for limit in limits]
    divisors = torch.tensor(longest, dtype=sum_type(device), device=device)
    log_probs = divisors.new_full((len(limits), beam), -torch.inf)
    log_probs[:, 0] = 0.0
    sentences = torch.arange(len(limits), device=device)
    return _Open(
        sentences=sentences,
        limits=torch.tensor(limits, device=device),
        divisors=divisors,
        beaten=torch.full_like(divisors, -torch.inf),
        places=torch.full_like(sentences, beam),
        log_probs=log_probs,
        outputs=sentences.new_empty(len(limits), beam, 0),
    )


def _grow(now: _Open, done: _Done, log_probs: Tensor, parents: Tensor, tokens: Tensor) -> None:
    """Take the best continuations of the open hypotheses, each ``(left, beam)``."""
    outputs = now.outputs.take_along_dim(parents.unsqueeze(2), 1)
    now.outputs = torch.cat([outputs, tokens.unsqueeze(2)], dim=2)
    rank = torch.arange(tokens.size(1), device=tokens.device)
    log_probs = log_probs.masked_fill(rank >= now.places.unsqueeze(1), -torch.inf)
    cut = now.limits <= now.outputs.size(2)
    over = ((tokens == done.special.eos) | cut.unsqueeze(1)) & (log_probs > -torch.inf)
    if over.any():
        now.places = now.places - over.sum(1)
        which, ended = over.nonzero()[:, 0].tolist(), now.outputs[over].tolist()
        for i, output, value in zip(which, ended, log_probs[over].tolist(), strict=True):
            now.beaten[i] = done.add(int(now.sentences[i]), output, value)
    now.log_probs = log_probs.masked_fill(over, -torch.inf)


@torch.no_grad()
def _search(steps: Steps, now: _Open, done: _Done, continuations: Continuations) -> None:
    """Decode until no open hypothesis can win.

    Raises:
        FloatingPointError: The model's outputs are NaN.
    """
    tokens = torch.full_like(now.log_probs, done.special.bos, dtype=torch.long)
    while len(left := (active := now.active()).nonzero()[:, 0]):
        if (size := round_up(len(left))) < len(active):  # finished sentences leave the batch
            left = torch.cat([left, (~active).nonzero()[: size - len(left), 0]])
            now.select(left)
            steps.select(left)
            tokens = tokens[left]
        logits = steps(tokens.flatten()).unflatten(0, tokens.shape)  # (left, beam, vocab)
        log_probs, parents, tokens = continuations(logits, now.log_probs)
        _grow(now, done, log_probs, parents, tokens)
        steps.follow(parents)
    if not all(done.found):
        raise FloatingPointError("the model's outputs are NaN: no output has a probability")


def check_search(beam: int, alpha: float, n_best: int = 1) -> None:
    """Raise ValueError for an option that is out of its range."""
    if beam < 1:
        raise ValueError(f"beam {beam}: must be at least 1")
    if not 0 <= alpha <= 10:
        raise ValueError(f"alpha {alpha}: must be from 0 to 10")
    if not 1 <= n_best <= beam:
        raise ValueError(f"n_best {n_best}: must be from 1 to the beam, {beam}")


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
    special: SpecialIds = SPECIAL_IDS,
) -> list[list[Hypothesis]]:
    """Find the ``n_best`` outputs of each source by beam search (§6.1), the best first.

    ``fast.search.beam_search`` finds the same with KV caches, in less time. ``start`` makes the
    steps, ``continuations`` chooses among candidates; ``alpha`` is from 0 to 10. Raises as
    ``greedy_search``, ValueError for an option out of range, and FloatingPointError if outputs
    are NaN.
    """
    check_search(beam, alpha, n_best)
    if not len(sources):
        return []
    src, mask = source_batch(sources, next(model.parameters()).device, special)
    limits = output_limits(model, sources, max_len, extra)
    now, done = _begin(limits, beam, alpha, src.device), _Done(limits, alpha, n_best, special)
    with evaluation_mode(model):
        _search(start(model, src, mask, beam), now, done, continuations)
    return [found[:n_best] for found in done.found]
