"""Encoder and decoder, without attention and with it (section 1).

Defined in the chapter *From sequence to sequence* (book/background/seq2seq.md).
"""

# Written from book/background/seq2seq.md: edit the chapter instead.

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn


class Steps(Protocol):
    """What decodes one more position of each sentence.

    Defined in: book/background/seq2seq.md
    """

    def __call__(self, tokens: Tensor) -> Tensor:
        """Take the newest token of each hypothesis ``(rows,)``; return logits ``(rows, vocab)``."""

    def select(self, sentences: Tensor) -> None:
        """Keep the given sentences, in that order."""

    def follow(self, parents: Tensor) -> None:
        """Go on from the hypotheses ``parents (sentences, beam)``, numbers within a sentence."""


class Translator(nn.Module, ABC):
    """An encoder and a decoder: what is trained and searched, whatever is inside.

    Defined in: book/background/seq2seq.md
    """

    @property
    @abstractmethod
    def projection(self) -> nn.Linear:
        """The last layer, from the decoder's output to logits."""

    @property
    @abstractmethod
    def max_len(self) -> int:
        """Most positions of a sentence."""

    @abstractmethod
    def encode(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        """Encode ``src (batch, m)``; the mask ``(batch, 1, m)`` is true at real tokens."""

    @abstractmethod
    def decode(
        self, memory: Tensor, src_mask: Tensor | None, tgt: Tensor, tgt_mask: Tensor | None
    ) -> Tensor:
        """Decode ``tgt (batch, n)``, each position from the earlier ones: ``(batch, n, d)``."""

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None
    ) -> Tensor:
        """Encode the source, decode the target given its own earlier tokens.

        Args:
            src: Token numbers ``(batch, m)``.
            tgt: Token numbers ``(batch, n)``, starting with the begin symbol.
            src_mask: ``(batch, 1, m)``, true at real tokens.
            tgt_mask: ``(batch, n, n)``, true where a position may see another one; models that
                cannot see the future need none.

        Returns:
            The decoder's output ``(batch, n, d)``; ``projection`` makes it logits.
        """
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)

    def forward_packed(
        self, src: Tensor, tgt: Tensor, src_keep: Tensor, tgt_keep: Tensor
    ) -> Tensor:
        """As ``forward``, at the kept target positions alone.

        Args:
            src: Token numbers ``(batch, m)``.
            tgt: Token numbers ``(batch, n)``.
            src_keep: Boolean ``(batch, m)``, true at the tokens that count.
            tgt_keep: Boolean ``(batch, n)``, likewise.

        Returns:
            ``(rows, d)``, in the order of ``tgt[tgt_keep]``.
        """
        past = causal_mask(tgt.size(1), tgt.device)
        out: Tensor = self(src, tgt, src_keep.unsqueeze(1), past)
        return out[tgt_keep]

    def start_steps(self, src: Tensor, src_mask: Tensor, capacity: int, beam: int = 1) -> Steps:
        """Encode sentences; return what decodes them, token by token.

        Args:
            src: Source tokens ``(sentences, m)``.
            src_mask: Boolean ``(sentences, 1, m)``, true at real tokens.
            capacity: Most target positions.
            beam: Hypotheses of each sentence.
        """
        return PrefixSteps(self, self.encode(src, src_mask), src_mask, beam)


def causal_mask(n: int, device: torch.device) -> Tensor:
    """Return which positions a position may see, itself and those before: ``(1, n, n)``.

    Defined in: book/background/seq2seq.md
    """
    return torch.ones(1, n, n, dtype=torch.bool, device=device).tril()


class PrefixSteps:
    """Steps that read the whole output so far again each time: right for every model, and slow.

    Args:
        model: In evaluation mode.
        memory: The encoder's output, one row a sentence.
        src_mask: Boolean ``(sentences, 1, m)``, true at real tokens.
        beam: Hypotheses of each sentence.

    Defined in: book/background/seq2seq.md
    """

    def __init__(self, model: Translator, memory: Tensor, src_mask: Tensor, beam: int = 1) -> None:
        self.model, self.beam = model, beam
        self.memory = memory.repeat_interleave(beam, 0)  # (rows, ...)
        self.src_mask = src_mask.repeat_interleave(beam, 0)
        self.written = torch.zeros(self.memory.size(0), 0, dtype=torch.long, device=memory.device)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Decode one position: tokens ``(rows,)`` to logits ``(rows, vocab)``."""
        self.written = torch.cat([self.written, tokens.unsqueeze(1)], 1)
        past = causal_mask(self.written.size(1), tokens.device)
        out = self.model.decode(self.memory, self.src_mask, self.written, past)
        logits: Tensor = self.model.projection(out[:, -1])
        return logits

    def select(self, sentences: Tensor) -> None:
        """Keep the given sentences, in that order."""
        rows = rows_of(sentences, self.beam)
        self.memory, self.src_mask = self.memory[rows], self.src_mask[rows]
        self.written = self.written[rows]

    def follow(self, parents: Tensor) -> None:
        """Go on from the hypotheses ``parents (sentences, beam)``; their source is the same."""
        first = torch.arange(0, parents.numel(), self.beam, device=parents.device)
        self.written = self.written[(first.unsqueeze(1) + parents).flatten()]


def rows_of(sentences: Tensor, beam: int) -> Tensor:
    """Return the rows of the hypotheses of ``sentences (s,)``: ``(s * beam,)``.

    Defined in: book/background/seq2seq.md
    """
    places = torch.arange(beam, device=sentences.device)
    return (sentences.unsqueeze(1) * beam + places).flatten()
