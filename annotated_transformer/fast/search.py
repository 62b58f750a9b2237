"""Greedy and beam search with the fast layer: KV caches, and top-k over chunks of logits."""

from functools import partial

import torch
from torch import Tensor

from annotated_transformer.fast.decoding import start_steps
from annotated_transformer.fast.linear import CHUNK, chunk_maxima
from annotated_transformer.translation import beam_search as beam
from annotated_transformer.translation import greedy
from annotated_transformer.translation.beam_search import stable_topk


def best_continuations(logits: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``translation.beam_search.best_continuations`` without sorting all logits.

    Only the chunks with the largest maxima can hold one of the best, so only these are searched.
    """
    _, width, size = logits.shape
    tops = chunk_maxima(logits)  # (sentences, beam, chunks)
    base = log_probs - log_total(logits, tops.amax(-1))  # (sentences, beam)
    tops = tops + base.unsqueeze(2)
    _, chunks = stable_topk(tops.flatten(1), width)
    chunks = chunks.sort(-1).values.unsqueeze(2)  # ties keep their order
    row, start = chunks // tops.size(2), chunks % tops.size(2) * CHUNK
    token = start + torch.arange(CHUNK, device=logits.device)  # (sentences, beam, CHUNK)
    inside, token = token < size, token.clamp(max=size - 1)
    place = (row * size + token).flatten(1)  # in the flattened (beam, vocab)
    values = logits.flatten(1).gather(1, place).view(token.shape)
    values = values + base.gather(1, row.squeeze(2)).unsqueeze(2)  # (sentences, beam, CHUNK)
    log_probs, chosen = stable_topk(values.masked_fill(~inside, -torch.inf).flatten(1), width)
    place = place.gather(1, chosen)
    return log_probs, place // size, place % size


def log_total(logits: Tensor, largest: Tensor) -> Tensor:
    """Return ``logits.logsumexp(-1)``, given the maxima, with log_softmax's faster kernel."""
    return torch.maximum(largest - logits.log_softmax(-1).amax(-1), largest)


greedy_search = partial(greedy.greedy_search, start=start_steps)
beam_search = partial(beam.beam_search, start=start_steps, continuations=best_continuations)
