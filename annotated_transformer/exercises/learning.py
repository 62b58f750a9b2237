"""Exercises on training data: shifted targets, token batches, losses and gradients per token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from annotated_transformer.exercises.declare import Case, Draw, Exercise, draw_examples

Part = tuple[Tensor, Tensor]  # log-probabilities (batch, n, vocab), and targets (batch, n)


def shift_target(tgt: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``tgt (batch, n + 1)`` into the decoder's input and the tokens to predict."""
    return tgt[:, :-1], tgt[:, 1:]


SHIFT_TARGET: Final = Exercise(
    shift_target,
    [(torch.tensor([[1, 7, 8, 2]]),), (torch.tensor([[1, 5, 2, 0], [1, 5, 6, 2]]),),
     (torch.tensor([[1, 2]]),)],
    lambda draw: (draw.integers(0, 9, draw.integer(1, 4), draw.integer(2, 7)),),
    {
        "input and target swapped: the input begins with BOS": lambda t: (t[:, 1:], t[:, :-1]),
        "not shifted: the input contains the token to predict": lambda t: (t[:, :-1], t[:, :-1]),
        "not shifted: the target is its own input": lambda t: (t, t),
        "shifted along the batch, not along the sentence": lambda t: (t[:-1], t[1:]),
        "the input keeps the last token": lambda t: (t, t[:, 1:]),
        "the target keeps BOS": lambda t: (t[:, :-1], t),
    },
)  # fmt: skip


def token_batches(
    lengths: Sequence[int], max_tokens: int, *,
    strict: bool = False, padded: bool = True, late: bool = False, last: bool = True,
) -> list[list[int]]:  # fmt: skip
    """Group sentences, in order, into batches of ``max_tokens``, including padding."""
    batches: list[list[int]] = []
    batch: list[int] = []
    for number, length in enumerate(lengths):
        widths = [lengths[i] for i in batch]
        new = [*widths, length]
        seen = widths if late and widths else new
        cost = max(seen) * len(new) if padded else sum(new)
        if batch and (cost >= max_tokens if strict else cost > max_tokens):
            batches, batch = [*batches, batch], []
        batch.append(number)
    return [*batches, batch] if batch and last else batches


def _one_by_one(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    size = max(1, max_tokens // max(lengths))
    return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]


TOKEN_BATCHES: Final = Exercise(
    token_batches,
    [([3, 3, 3, 3], 6), ([2, 2, 5, 5, 1], 10), ([4, 1, 6], 12)],
    lambda draw: ([draw.integer(1, 9) for _ in range(draw.integer(1, 9))], draw.integer(9, 24)),
    {
        "off by one: a batch may be exactly full": partial(token_batches, strict=True),
        "padding not counted: a batch costs its longest sentence times its size":
            partial(token_batches, padded=False),
        "the new sentence may be the longest, and pads them all": partial(token_batches, late=True),
        "the last batch is missing": partial(token_batches, last=False),
        "a budget of sentences, not of tokens": _one_by_one,
        "lengths returned, not the indices of the sentences":
            lambda lengths, most: [[lengths[i] for i in b] for b in token_batches(lengths, most)],
    },
)  # fmt: skip


def _losses(part: Part, pad: int, *, padding: bool = False) -> Tensor:
    """Return the negative log-likelihood of each real target token."""
    log_probs, target = part
    nll = -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return nll.flatten() if padding else nll[target != pad]


def token_loss(parts: Sequence[Part], pad: int) -> Tensor:
    """Return the loss per real target token of an update of several micro-batches."""
    return torch.cat([_losses(part, pad) for part in parts]).mean()


def _loss_case(draw: Draw) -> Case:
    parts, vocab, pad = [], draw.integer(3, 5), draw.integer(0, 2)
    for _ in range(draw.integer(1, 3)):
        shape = draw.integer(1, 3), draw.integer(1, 4)
        target = draw.integers(0, vocab - 1, *shape)
        target[:, 0] = (pad + 1) % 3  # at least one token of each sentence is real
        parts.append((draw.normal(*shape, vocab).log_softmax(-1), target))
    return parts, pad


def _mean_of_means(parts: Sequence[Part], pad: int) -> Tensor:
    return torch.stack([_losses(part, pad).mean() for part in parts]).mean()


def token_sum(parts: Sequence[Part], pad: int) -> Tensor:
    """Return the summed loss, which is not divided by anything."""
    return torch.cat([_losses(part, pad) for part in parts]).sum()


TOKEN_LOSS: Final = Exercise(
    token_loss,
    *draw_examples(_loss_case),
    {
        "mean of the micro-batches' means: tokens of small batches count more": _mean_of_means,
        "padding counts as well":
            lambda parts, pad: torch.cat([_losses(p, pad, padding=True) for p in parts]).mean(),
        "padding does not add to the loss, but is counted in the number of tokens":
            lambda parts, pad: token_sum(parts, pad) / sum(t.numel() for _, t in parts),
        "sum, not divided by the number of tokens": token_sum,
        "mean over the micro-batches: sum divided by their number, not by the tokens":
            lambda parts, pad: token_sum(parts, pad) / len(parts),
        "divided by the number of sentences, not of tokens":
            lambda parts, pad: token_sum(parts, pad) / sum(len(target) for _, target in parts),
        "sign: the loss is minus the log-probability": lambda *a: -token_loss(*a),
        "sum of the micro-batches' means: divide by the tokens of the whole update":
            lambda parts, pad: _mean_of_means(parts, pad) * len(parts),
        "only the last micro-batch": lambda parts, pad: token_loss(parts[-1:], pad),
    },
)  # fmt: skip


def average_gradients(gradients: Sequence[Tensor], tokens: Sequence[float]) -> Tensor:
    """Return the gradient per token over all processes, from each process's own per token."""
    weighted = [g * count for g, count in zip(gradients, tokens, strict=True)]
    return torch.stack(weighted).sum(0) / sum(tokens)


def _gradients_case(draw: Draw) -> Case:
    count, shape = draw.integer(1, 4), (draw.integer(1, 2), draw.integer(1, 3))
    gradients = [draw.normal(*shape) for _ in range(count)]
    return gradients, [draw.integer(1, 30) for _ in range(count)]


AVERAGE_GRADIENTS: Final = Exercise(
    average_gradients,
    [([torch.ones(1, 2).double(), 3 * torch.ones(1, 2).double()], [30, 10]),
     ([torch.eye(2).double(), torch.zeros(2, 2).double()], [5, 15]),
     ([torch.ones(1, 3).double()], [8])],
    _gradients_case,
    {
        "plain mean: their numbers of tokens differ": lambda g, tokens: torch.stack(g).mean(0),
        "plain sum over the processes": lambda g, tokens: torch.stack(g).sum(0),
        "sum of gradients divided by the tokens: each one is a mean already":
            lambda g, tokens: torch.stack(g).sum(0) / sum(tokens),
        "weighted by the tokens, but not divided by their sum":
            lambda g, tokens: average_gradients(g, tokens) * sum(tokens),
        "more tokens, less weight": lambda g, tokens: average_gradients(g, [1 / n for n in tokens]),
        "divided by the processes as well": lambda g, tokens: average_gradients(g, tokens) / len(g),
    },
)  # fmt: skip
