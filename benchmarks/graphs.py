"""Decoding with a captured CUDA graph for each step: an experiment of ``benchmarks.gpu``.

A decoding step launches about a hundred small kernels, and a GPU finishes each before the CPU has
launched the next one. A graph launches them all at once, but its shapes cannot change: the KV cache
has room for all positions from the beginning, and finished sentences stay in their rows.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from annotated_transformer.fast.decoding import (
    CachedSteps,
    DecoderWeights,
    _decoder_weights,
    _LayerCache,
    attend_once,
)
from annotated_transformer.fast.linear import float32_products
from annotated_transformer.fast.model import FastModel, normalize_rows
from annotated_transformer.fast.packing import PackedMask, Rows
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.translation.greedy import Steps


class _FixedCache(_LayerCache):
    """A KV cache of fixed size, whose current position is a tensor."""

    def reserve(self, positions: int) -> None:
        """Make room for all positions."""
        sentences, h, _, beam, d = self.keys.shape
        self.keys = self.keys.new_zeros(sentences, h, positions, beam, d)
        self.values = self.values.new_zeros(sentences, h, positions, beam, self.values.size(4))

    def write_and_attend(self, x: Tensor, position: Tensor, hidden: Tensor) -> Tensor:
        """Do what ``to_target`` does, over all positions; ``hidden`` hides the later ones."""
        own = self.weights.own
        sizes = [own.h * own.d_k, own.h * own.d_k, own.h * own.d_v]
        q, k, v = (self.heads(part, own.h) for part in self.weights.project(x).split(sizes, dim=1))
        self.keys.index_copy_(2, position, k.unsqueeze(2))
        self.values.index_copy_(2, position, v.unsqueeze(2))
        keys, values = (block.flatten(2, 3).flatten(0, 1) for block in (self.keys, self.values))
        return self.rows(attend_once(q.flatten(0, 1), keys, values, hidden), own.h)

    def step_at(self, x: Tensor, position: Tensor, past: Tensor, source: Tensor | None) -> Tensor:
        """Decode ``x (rows, d_model)`` at a position; same shape."""
        w = self.weights
        x = w.post_norm(0, w.mix.add(self.write_and_attend(w.pre_norm(0, x), position, past), x))
        x = w.post_norm(1, w.mix_source.add(self.to_source(w.pre_norm(1, x), source), x))
        return w.post_norm(2, w.narrow.add(w.widen.relu(w.pre_norm(2, x)), x))


class GraphedSteps(CachedSteps):
    """Decoding steps by one graph, with the same results as ``CachedSteps``.

    On a CPU the same step runs without a graph, so that it can be tested there.

    Args:
        decoder: Rearranged weights.
        memory: The encoder's output, packed ``(rows, d_model)``.
        src_mask: Boolean ``(sentences, 1, m)``, true at real tokens.
        beam: Hypotheses of each sentence.
        positions: Most tokens of an output.
    """

    @torch.inference_mode()
    def __init__(
        self,
        decoder: DecoderWeights,
        memory: Tensor,
        src_mask: Tensor,
        beam: int = 1,
        positions: int = 64,
    ) -> None:
        super().__init__(decoder, memory, src_mask, beam)
        device, count, rows = memory.device, len(src_mask), Rows(src_mask[:, 0])
        self.caches = [_FixedCache(w, memory, rows, beam) for w in decoder.layers]
        for cache in self.caches:
            cache.reserve(positions)
        self.layers = []  # the caches that would grow
        self.positions = torch.arange(positions, device=device)
        self.own = torch.arange(beam, device=device)
        self.places = torch.zeros(count, beam, positions, dtype=torch.long, device=device)
        self.tokens = torch.zeros(count * beam, dtype=torch.long, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.kept = torch.arange(count, device=device)  # the sentences that still count
        self.graph: torch.cuda.CUDAGraph | None = None
        with float32_products():
            if device.type == "cuda":
                self._capture()

    def _capture(self) -> None:
        """Run the step for the first times, and record it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        self.at.zero_()

    def _step(self) -> None:
        """Decode the tokens at the position: the logits of all rows, and the best of each."""
        x = self.decoder.embed(self.tokens) + self.decoder.positions[self.at]
        x = x.to(self.caches[0].keys.dtype)
        here = self.own.view(1, -1, 1).expand(len(self.places), -1, 1)
        self.places.index_copy_(2, self.at, here)
        seen = (self.places.unsqueeze(3) == self.own) & (self.positions <= self.at).unsqueeze(1)
        past = self._hide(seen.flatten(2), x.dtype)
        for cache in self.caches:
            x = cache.step_at(x, self.at, past, self.hidden)
        self.logits = self.decoder.generator(normalize_rows(self.decoder.norm, x))
        self.best = self.logits.argmax(-1)
        self.at += 1

    def _run(self, tokens: Tensor) -> Tensor:
        """Put tokens into their rows and make the step; return the rows that count."""
        if self.length == len(self.positions):
            raise IndexError(f"the graph was made for {self.length} positions")
        self.length += 1
        rows = (self.kept.unsqueeze(1) * self.beam + self.own).flatten()
        self.tokens[rows] = tokens
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()
        return rows

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Decode one position: tokens ``(rows,)`` to logits ``(rows, vocab)``."""
        with float32_products():
            rows = self._run(tokens)  # before the logits are looked at
            return self.logits[rows]

    @torch.inference_mode()
    def most_probable(self, tokens: Tensor) -> Tensor:
        """Decode one position: tokens ``(rows,)`` to the most probable next ones ``(rows,)``."""
        with float32_products():
            rows = self._run(tokens)
            return self.best[rows]

    @torch.inference_mode()
    def select(self, sentences: Tensor) -> None:
        """Keep the given sentences, in that order; the others go on unseen."""
        self.kept = self.kept[sentences]

    @torch.inference_mode()
    def follow(self, parents: Tensor) -> None:
        """Go on from the hypotheses ``parents (sentences, beam)``; no key or value moves."""
        moved = self.places[self.kept].take_along_dim(parents.unsqueeze(2), 1)
        self.places[self.kept] = moved


@torch.no_grad()
def _start(
    model: EncoderDecoder, src: Tensor, src_mask: Tensor, beam: int, *, positions: int
) -> Steps:
    """Encode sentences, and return what decodes them by a graph."""
    mask = (src_mask != 0).expand(src.size(0), 1, -1)
    rows = Rows(mask[:, 0])
    memory = FastModel(model).encode(src, PackedMask(mask, rows, rows))
    return GraphedSteps(_decoder_weights(model), memory, mask, beam, positions)


def graphed(positions: int) -> partial[Steps]:
    """Return what starts the steps of a search whose outputs have at most ``positions`` tokens."""
    return partial(_start, positions=positions)
