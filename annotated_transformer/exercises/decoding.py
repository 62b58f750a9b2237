"""Exercises on greedy decoding and beam search with a given model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from annotated_transformer.exercises.declare import Case, Draw, Exercise, draw_examples
from annotated_transformer.translation.beam_search import length_penalty

Step = Callable[[list[int]], Tensor]  # from the tokens so far to log-probabilities (vocab,)


def make_step(table: Tensor) -> Step:
    """Return a toy model, whose log-probabilities depend on all tokens so far."""

    def step(tokens: list[int]) -> Tensor:
        mixed = sum(table[(token + 3 * i) % len(table)] for i, token in enumerate(tokens))
        return torch.as_tensor(mixed).log_softmax(-1)

    return step


def greedy(
    step: Step, start: int, end: int, max_len: int, *,
    worst: bool = False, stop: bool = True, whole: bool = True, drop: int = 0, late: int = 0,
) -> list[int]:  # fmt: skip
    """Decode greedily, at most ``max_len`` tokens including start and end."""
    tokens = [start]
    while len(tokens) < max_len + late and not (stop and tokens[-1] == end and len(tokens) > 1):
        scores = step(tokens if whole else tokens[-1:])
        tokens.append(int(scores.argmin() if worst else scores.argmax()))
    return tokens[drop:]


def _greedy_case(draw: Draw) -> Case:
    vocab = draw.integer(4, 6)
    symbols = draw.random.sample(range(vocab), 2)  # start and end
    return make_step(2 * draw.normal(vocab, vocab)), *symbols, draw.integer(2, 9)


def _without_end(decode: Callable[..., list[int]], *case: Any) -> list[int]:
    tokens = decode(*case)
    return tokens[:-1] if tokens[-1] == case[2] else tokens


GREEDY_DECODE: Final = Exercise(
    greedy,
    *draw_examples(_greedy_case, 1, 2, 3),
    {
        "the end symbol does not end the output": partial(greedy, stop=False),
        "only the newest token is read: give all tokens so far": partial(greedy, whole=False),
        "the least probable token, not the most probable": partial(greedy, worst=True),
        "off by one: one token too many; max_len counts the start symbol": partial(greedy, late=1),
        "off by one: one token too few": partial(greedy, late=-1),
        "the start symbol is missing from the output": partial(greedy, drop=1),
        "the end symbol is missing from the output": partial(_without_end, greedy),
    },
)  # fmt: skip


LENGTH_PENALTY: Final = Exercise(
    length_penalty,
    [(1, 0.6), (7, 0.6), (20, 1.0)],
    lambda draw: (draw.integer(1, 60), 0.1 * draw.integer(0, 15)),
    {
        "the length to the power of α, not (5 + length) / 6": lambda n, alpha: math.pow(n, alpha),
        "α has the wrong sign": lambda n, alpha: length_penalty(n, -alpha),
        "off by one: a length of 1 gives 1": lambda n, alpha: length_penalty(n + 1, alpha),
        "brackets: 5 + length / 6": lambda n, alpha: (5 + n / 6) ** alpha,
        "the denominator is not raised to α": lambda n, alpha: (5 + n) ** alpha / 6,
        "multiplied by α: α is the exponent": lambda n, alpha: (5 + n) / 6 * alpha,
        "divided by 5, not by 6": lambda n, alpha: ((5 + n) / 5) ** alpha,
    },
)  # fmt: skip


Choice = tuple[Tensor, Tensor, Tensor]


def beam_step(scores: Tensor, log_probs: Tensor, beam: int) -> Choice:
    """Choose the best continuations over all hypotheses.

    From ``scores (hypotheses,)`` so far and ``log_probs (hypotheses, vocab)`` of the next token,
    return the new scores, the index of the parent hypothesis, and the token, best first.
    """
    best, index = (scores.unsqueeze(1) + log_probs).flatten().topk(beam)
    return best, index // log_probs.size(1), index % log_probs.size(1)


def _each(scores: Tensor, log_probs: Tensor, beam: int) -> Choice:
    best, tokens = (scores.unsqueeze(1) + log_probs).max(1)
    order = best.argsort(descending=True)[:beam]
    return best[order], order, tokens[order]


def _exchanged(scores: Tensor, log_probs: Tensor, beam: int) -> Choice:
    best, parents, tokens = beam_step(scores, log_probs, beam)
    return best, tokens, parents


def _by_hypotheses(scores: Tensor, log_probs: Tensor, beam: int) -> Choice:
    best, index = (scores.unsqueeze(1) + log_probs).flatten().topk(beam)
    return best, index // len(scores), index % len(scores)


def _beam_case(draw: Draw) -> Case:
    beam, vocab = draw.integer(2, 4), draw.integer(4, 6)
    return -draw.normal(beam).abs(), draw.normal(beam, vocab).log_softmax(-1), beam


BEAM_STEP: Final = Exercise(
    beam_step,
    *draw_examples(_beam_case),
    {
        "the best token of each hypothesis: take the best continuations over all hypotheses": _each,
        "the scores so far are not added": lambda s, p, beam: beam_step(0 * s, p, beam),
        "probabilities added, not their logarithms": lambda s, p, beam: beam_step(s, p.exp(), beam),
        "the worst continuations": lambda s, p, beam: beam_step(-s, -p, beam),
        "hypotheses and tokens swapped": _exchanged,
        "wrong index of the hypothesis: divide by the size of the vocabulary": _by_hypotheses,
    },
)  # fmt: skip


Hypothesis = tuple[float, list[int]]
Rank = Callable[[float, list[int], int], Any]  # of a hypothesis, given the end symbol


def penalized(score: float, tokens: list[int], end: int) -> float:
    """Rank with a length penalty, which is wrong here."""
    return score / length_penalty(len(tokens) - 1, 0.6)


def finished(score: float, tokens: list[int], end: int) -> tuple[bool, float]:
    """Rank finished hypotheses first, which is wrong here."""
    return tokens[-1] == end, score


def beam_search(
    step: Step, start: int, end: int, beam: int, max_len: int, *, add: int = 1, stop: bool = True,
    early: bool = False, aside: bool = False, each: bool = False, whole: bool = True,
    exp: bool = False, wide: int = 0, rank: Rank = lambda s, *_: s, best: Rank = lambda s, *_: s,
) -> list[int]:  # fmt: skip
    """Return the most probable output that a beam finds; the options make the known mistakes.

    A finished hypothesis keeps its place in the beam, but is not continued. The search ends when
    all hypotheses are finished or have ``max_len`` tokens, including start and end.
    """
    hypotheses: list[Hypothesis] = [(0.0, [start])]
    done: list[Hypothesis] = []
    for _ in range(max_len - 1):
        new: list[Hypothesis] = []
        for score, tokens in hypotheses:
            if stop and tokens[-1] == end:
                new.append((score, tokens))
                continue
            scores = step(tokens if whole else tokens[-1:])
            scores = scores.exp() if exp else scores
            more = [(add * score + float(s), [*tokens, i]) for i, s in enumerate(scores)]
            new += sorted(more, reverse=True)[: 1 if each and len(hypotheses) > 1 else None]
        new.sort(key=lambda one: rank(one[0], one[1], end), reverse=True)
        hypotheses = new[: beam + wide]
        if aside or early:
            done += [one for one in hypotheses if one[1][-1] == end]
            hypotheses = [one for one in hypotheses if one[1][-1] != end]
        if early and done:
            break
    return max([*done, *hypotheses], key=lambda one: best(one[0], one[1], end))[1]


def _toy_case(draw: Draw) -> Case:
    vocab = draw.integer(4, 6)
    step, symbols = make_step(draw.normal(vocab, vocab)), draw.random.sample(range(vocab), 2)
    return step, *symbols, draw.integer(2, 3), draw.integer(3, 6)


def _search_case(draw: Draw) -> Case:
    """Draw cases until one shows a mistake that most cases hide."""
    options: list[dict[str, Any]] = [{"wide": 1}, {"best": finished}, {"best": penalized}]
    wrong = draw.random.choice(options)
    cases = (_toy_case(draw) for _ in count())
    return next(one for one in cases if beam_search(*one, **wrong) != beam_search(*one))


BEAM_SEARCH: Final = Exercise(
    beam_search,
    [_toy_case(Draw(seed)) for seed in (285, 1582, 2301)],  # which show the rarest mistakes
    _search_case,
    {
        "a finished hypothesis gives its place to another: it keeps it while it is among the best":
            partial(beam_search, aside=True),
        "length penalty in the beam: use the log-probability": partial(beam_search, rank=penalized),
        "length penalty at the end: use the log-probability": partial(beam_search, best=penalized),
        "finished hypotheses win over more probable ones": partial(beam_search, best=finished),
        "off by one: the beam is one too wide": partial(beam_search, wide=1),
        "the best token of each hypothesis: take the best continuations over all hypotheses":
            partial(beam_search, each=True),
        "stopped at the first that is finished: a better one may come":
            partial(beam_search, early=True),
        "the scores so far are not added": partial(beam_search, add=0),
        "a length penalty: none is asked for": partial(beam_search, rank=penalized, best=penalized),
        "divided by the length: use the plain log-probability":
            partial(beam_search, best=lambda s, tokens, _: s / (len(tokens) - 1)),
        "greedy: only one hypothesis is kept": lambda s, a, e, beam, n: beam_search(s, a, e, 1, n),
        "finished hypotheses are continued": partial(beam_search, stop=False),
        "probabilities added, not their logarithms": partial(beam_search, exp=True),
        "the worst hypothesis of the beam is returned": partial(beam_search, best=lambda s, *_: -s),
        "only the newest token is read: give all tokens so far": partial(beam_search, whole=False),
        "off by one: one token too many; max_len counts the start symbol":
            lambda s, a, e, beam, n: beam_search(s, a, e, beam, n + 1),
        "off by one: one token too few": lambda s, a, e, beam, n: beam_search(s, a, e, beam, n - 1),
        "the start symbol is missing from the output": lambda *a: beam_search(*a)[1:],
        "the end symbol is missing from the output": partial(_without_end, beam_search),
    },
)  # fmt: skip
