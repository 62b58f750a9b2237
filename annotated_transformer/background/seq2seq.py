# Written from book/background/seq2seq.md: edit the chapter instead.
"""Encoder and decoder, without attention and with it (section 1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from annotated_transformer.background.recurrent import gru_step
from annotated_transformer.model.architecture import EncoderDecoder, Generator
from annotated_transformer.translation.greedy import Steps, rows_of, rows_of_parents


class RecurrentEncoder(nn.Module):
    """Two recurrent networks, one for each direction.

    Args:
        width: Size of an embedding.
        hidden: Size of a state, in each direction.
        layers: Number of layers.
        dropout: Probability of dropping, between layers.
    """

    def __init__(self, width: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.gru = gru(width, hidden, layers, dropout, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Read ``x (batch, m, width)``; ``lengths (batch,)``, on the CPU, counts their tokens.

        Returns:
            Both states at each word, ``(batch, m, 2 * hidden)``, and each direction's last one,
            ``(batch, 2 * hidden)``. Padding, and a sentence without a word, give zeros.
        """
        if bool((lengths == x.size(1)).all()):  # no padding, and packing costs time
            states, last = self.gru(x)
            return states, torch.cat([last[-2], last[-1]], -1)
        some = lengths.clamp(min=1)  # PyTorch cannot pack a sentence without a word
        packed = pack_padded_sequence(x, some, batch_first=True, enforce_sorted=False)
        states, last = self.gru(packed)
        memory, _ = pad_packed_sequence(states, batch_first=True, total_length=x.size(1))
        real = (lengths > 0).to(x).unsqueeze(1)
        return memory * real.unsqueeze(1), torch.cat([last[-2], last[-1]], -1) * real


def gru(
    inputs: int, hidden: int, layers: int, dropout: float, bidirectional: bool = False
) -> nn.GRU:
    """Return PyTorch's GRU; dropout acts between layers, so a single layer has none."""
    between = dropout if layers > 1 else 0.0
    return nn.GRU(
        inputs, hidden, layers, batch_first=True, dropout=between, bidirectional=bidirectional
    )


@dataclass(frozen=True)
class Source:
    """What a decoder knows of the sources; nothing in it depends on the target.

    Attributes:
        memory: The output of the encoder, ``(rows, m, 2 * hidden)``; m is 1 for a fixed context.
        padding: Boolean ``(rows, 1, source length)``, true at padding.
        keys: What queries are compared with, ``(rows, m, hidden)``; empty without attention.
        gates: What each source word would add to the gates of the decoder's cell,
            ``(rows, m, 3 * hidden)``; empty except with additive attention.
    """

    memory: Tensor
    padding: Tensor
    keys: Tensor
    gates: Tensor

    def rows(self, index: Tensor) -> Source:
        """Take the given rows, in that order."""
        parts = self.memory, self.padding, self.keys, self.gates
        return Source(*(part[index] for part in parts))


class RecurrentDecoder(nn.Module, ABC):
    """What the three decoders share: how they start, and how they compute an output.

    Args:
        width: Size of an embedding, and of an output.
        hidden: Size of a state.
        layers: Number of layers.
    """

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = layers
        self.first = nn.Linear(2 * hidden, layers * hidden)
        self.readout = nn.Linear(3 * hidden, width)

    def start(self, memory: Tensor) -> Tensor:
        """Return the states before the first word, ``(layers, rows, hidden)``.

        They come from the memory's first row. Half of it has read the whole sentence backward.
        """
        first = torch.tanh(self.first(memory[:, 0]))  # (rows, layers * hidden)
        return first.view(len(first), self.layers, -1).transpose(0, 1).contiguous()

    def read_off(self, context: Tensor, states: Tensor) -> Tensor:
        """Mix contexts ``(rows, n, 2 * hidden)`` and states to outputs ``(rows, n, width)``."""
        return torch.tanh(self.readout(torch.cat([context, states], -1)))

    def prepare(self, memory: Tensor, padding: Tensor) -> Source:
        """Compute what depends on the source alone."""
        nothing = memory.new_empty(len(memory), 0)
        return Source(memory, padding, nothing, nothing)

    @abstractmethod
    def forward(
        self, x: Tensor, source: Source, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Continue from a state, over one word or many.

        Args:
            x: The words before each position, embedded: ``(rows, n, width)``.
            source: As ``prepare`` gives it.
            state: ``(layers, rows, hidden)``.

        Returns:
            Outputs ``(rows, n, width)``, the new state, and the attention weights
            ``(rows, n, m)``, or None without attention.
        """


class FixedDecoder(RecurrentDecoder):
    """One context for all words: an input of the network at each of them.

    Args:
        width: Size of an embedding, and of an output.
        hidden: Size of a state.
        layers: Number of layers.
        dropout: Probability of dropping, between layers.
    """

    def __init__(self, width: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__(width, hidden, layers)
        self.gru = gru(width + 2 * hidden, hidden, layers, dropout)

    def forward(self, x: Tensor, source: Source, state: Tensor) -> tuple[Tensor, Tensor, None]:
        """Continue from a state; see ``RecurrentDecoder.forward``. There are no weights."""
        context = source.memory.expand(-1, x.size(1), -1)  # (rows, 1, 2h) -> (rows, n, 2h)
        states, state = self.gru(torch.cat([x, context], -1), state)
        return self.read_off(context, states), state, None


def attention_weights(scores: Tensor, padding: Tensor) -> Tensor:
    """Turn scores ``(rows, n, m)`` into weights, zero at padding.

    A row that is all padding gets uniform weights, over a memory that is zero.
    """
    return scores.masked_fill(padding, torch.finfo(scores.dtype).min).softmax(-1)


class AdditiveDecoder(RecurrentDecoder):
    """A context for each word, chosen by the state before it (Bahdanau et al., 2015).

    The first layer attends; arguments as in ``FixedDecoder``.
    """

    def __init__(self, width: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__(width, hidden, layers)
        self.sizes = [3 * hidden, hidden]
        self.word = nn.Linear(width, 3 * hidden)  # to the gates
        self.context = nn.Linear(2 * hidden, 3 * hidden, bias=False)  # to the gates
        self.state = nn.Linear(hidden, 4 * hidden)  # to the gates, and the query
        self.keys = nn.Linear(2 * hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)
        self.upper = gru(hidden, hidden, layers - 1, dropout) if layers > 1 else None
        self.dropout = nn.Dropout(dropout)  # between the first layer and those above

    def prepare(self, memory: Tensor, padding: Tensor) -> Source:
        """Compute keys, and what each source word would add to the gates."""
        return Source(memory, padding, self.keys(memory), self.context(memory))

    def forward(self, x: Tensor, source: Source, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Continue from a state, in a loop; see ``RecurrentDecoder.forward``."""
        states, weights, s = [], [], state[0]
        for word in self.word(x).unbind(1):  # (rows, 3h)
            from_state, query = self.state(s).split(self.sizes, -1)
            scores = self.score(torch.tanh(query.unsqueeze(1) + source.keys))  # (rows, m, 1)
            weights.append(
                attention_weights(scores.transpose(1, 2), source.padding)
            )  # (rows, 1, m)
            s = gru_step(word + (weights[-1] @ source.gates).squeeze(1), from_state, s)
            states.append(s)
        outputs, new, looked = torch.stack(states, 1), s.unsqueeze(0), torch.cat(weights, 1)
        if self.upper is not None:
            outputs, upper = self.upper(self.dropout(outputs), state[1:])
            new = torch.cat([new, upper])
        return self.read_off(looked @ source.memory, outputs), new, looked


class DotDecoder(RecurrentDecoder):
    """A context for each word, chosen by the state after it (Luong et al., 2015, "general").

    The last layer attends; arguments as in ``FixedDecoder``.
    """

    def __init__(self, width: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__(width, hidden, layers)
        self.gru = gru(width, hidden, layers, dropout)
        self.keys = nn.Linear(2 * hidden, hidden, bias=False)

    def prepare(self, memory: Tensor, padding: Tensor) -> Source:
        """Compute the keys."""
        return Source(memory, padding, self.keys(memory), memory.new_empty(len(memory), 0))

    def forward(self, x: Tensor, source: Source, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Continue from a state, then attend; see ``RecurrentDecoder.forward``."""
        states, state = self.gru(x, state)
        weights = attention_weights(states @ source.keys.transpose(1, 2), source.padding)
        return self.read_off(weights @ source.memory, states), state, weights


@dataclass(frozen=True)
class RecurrentConfig:
    """Sizes of a recurrent translator, and its attention.

    Attributes:
        attention: ``none`` (one fixed context), ``additive`` or ``dot``.
        width: Size of an embedding.
        hidden: Size of a state, in the decoder and in each direction of the encoder.
        layers: Number of layers, in the encoder and in the decoder.
        dropout: Probability of dropping, on embeddings and outputs and between layers.
        max_len: Maximum positions of a sentence. No weight depends on it; it only bounds outputs.
    """

    attention: Literal["none", "additive", "dot"] = "additive"
    width: int = 128
    hidden: int = 224
    layers: int = 1
    dropout: float = 0.3
    max_len: int = 4096

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have.

        Raises:
            ValueError: The form is unknown, a size is not positive, or dropout is not in [0, 1).
        """
        if self.attention not in DECODERS:
            raise ValueError(f"attention is none, additive or dot, not {self.attention!r}")
        for name in ("width", "hidden", "layers", "max_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, it is {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, it is {self.dropout}")

    def build(self, src_vocab: int, tgt_vocab: int) -> RecurrentTranslator:
        """Build a model with new weights, drawn by the global random generator."""
        return RecurrentTranslator(src_vocab, tgt_vocab, self)


DECODERS: Mapping[str, Callable[[int, int, int, float], RecurrentDecoder]] = {
    "none": FixedDecoder,
    "additive": AdditiveDecoder,
    "dot": DotDecoder,
}


class RecurrentTranslator(EncoderDecoder):
    """Recurrent encoder and decoder, with attention or without.

    ``src_vocab`` and ``tgt_vocab`` are numbers of tokens.
    """

    encoder: RecurrentEncoder
    decoder: RecurrentDecoder
    src_embed: nn.Embedding
    tgt_embed: nn.Embedding

    def __init__(self, src_vocab: int, tgt_vocab: int, config: RecurrentConfig) -> None:
        c, sizes = config, (config.width, config.hidden, config.layers, config.dropout)
        embeddings = nn.Embedding(src_vocab, c.width), nn.Embedding(tgt_vocab, c.width)
        parts = RecurrentEncoder(*sizes), DECODERS[c.attention](*sizes)
        super().__init__(*parts, *embeddings, Generator(c.width, tgt_vocab))
        self.config, self.dropout = config, nn.Dropout(c.dropout)

    @property
    def max_len(self) -> int:
        """Maximum positions of a sentence."""
        return int(self.config.max_len)

    def encode(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        """Read the source.

        Args:
            src: Token ids ``(batch, m)``.
            src_mask: Boolean ``(batch, 1, m)``, true at real tokens, which come first.

        Returns:
            ``(batch, m, 2 * hidden)``; with one fixed context ``(batch, 1, 2 * hidden)``.

        Raises:
            ValueError: Padding stands before a real token.
        """
        states, last = self.encoder(
            self.dropout(self.src_embed(src)), source_lengths(src, src_mask)
        )
        memory: Tensor = last.unsqueeze(1) if self.config.attention == "none" else states
        return memory

    def decode(
        self,
        memory: Tensor,
        src_mask: Tensor | None,
        tgt: Tensor,
        tgt_mask: Tensor | None = None,
    ) -> Tensor:
        """Decode ``tgt (batch, n)`` to ``(batch, n, width)``; ``tgt_mask`` is not needed."""
        source = self.source(memory, src_mask)
        return self.advance(tgt, source, self.decoder.start(memory))[0]

    def source(self, memory: Tensor, src_mask: Tensor | None) -> Source:
        """Compute what the decoder needs of ``memory``, for all target words."""
        if src_mask is None:
            src_mask = memory.new_ones(len(memory), 1, memory.size(1), dtype=torch.bool)
        source: Source = self.decoder.prepare(memory, ~src_mask)
        return source

    def advance(
        self, tgt: Tensor, source: Source, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Continue from a state over ``tgt (rows, n)``: outputs, new state, weights."""
        outputs, state, weights = self.decoder(self.dropout(self.tgt_embed(tgt)), source, state)
        return self.dropout(outputs), state, weights

    def alignment(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """Return the attention weights.

        Args:
            src: Token ids ``(batch, m)``.
            tgt: Token ids ``(batch, n)``, starting with the start symbol.
            src_mask: Boolean ``(batch, 1, m)``, true at real tokens.

        Returns:
            The weights ``(batch, n, m)`` for the word *after* each position.

        Raises:
            ValueError: The model has no attention.
        """
        if self.config.attention == "none":
            raise ValueError("a model with one fixed context has no attention weights")
        memory = self.encode(src, src_mask)
        source = self.source(memory, src_mask)
        weights: Tensor | None = self.advance(tgt, source, self.decoder.start(memory))[2]
        assert weights is not None
        return weights.masked_fill(source.padding, 0.0)

    @torch.no_grad()
    def start_steps(self, src: Tensor, src_mask: Tensor, beam: int = 1) -> RecurrentSteps:
        """Encode sentences; return the steps that decode them."""
        return RecurrentSteps(self, self.encode(src, src_mask), src_mask, beam)


def source_lengths(src: Tensor, src_mask: Tensor | None) -> Tensor:
    """Return how many real tokens each sentence has, ``(batch,)`` on the CPU.

    Raises:
        ValueError: Padding stands before a real token.
    """
    if src_mask is None:
        return torch.full((len(src),), src.size(1))
    real = src_mask.reshape(len(src), -1).long()
    counted = torch.stack([real.sum(1), real.cumprod(1).sum(1)]).cpu()
    if not torch.equal(counted[0], counted[1]):
        raise ValueError("padding stands before a real token: a recurrent encoder reads in order")
    return counted[0]


class RecurrentSteps(Steps):
    """Steps that continue from the decoder's last state: each costs the same.

    Args:
        model: In evaluation mode.
        memory: The encoder's output, one row a sentence.
        src_mask: Boolean ``(sentences, 1, m)``, true at real tokens.
        beam: Hypotheses of each sentence.
    """

    def __init__(
        self, model: RecurrentTranslator, memory: Tensor, src_mask: Tensor, beam: int = 1
    ) -> None:
        self.model, self.beam = model, beam
        rows = torch.arange(len(memory), device=memory.device).repeat_interleave(beam)
        self.source = model.source(memory, src_mask).rows(rows)
        self.state = model.decoder.start(memory)[:, rows]  # (layers, rows, hidden)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Decode one position: tokens ``(rows,)`` to log-probabilities ``(rows, vocab)``."""
        out, self.state, _ = self.model.advance(tokens.unsqueeze(1), self.source, self.state)
        log_probs: Tensor = self.model.generator(out[:, -1])
        return log_probs

    def select(self, sentences: Tensor) -> None:
        """Keep the given sentences, in that order."""
        rows = rows_of(sentences, self.beam)
        self.source, self.state = self.source.rows(rows), self.state[:, rows]

    def follow(self, parents: Tensor) -> None:
        """Continue from the hypotheses ``parents (sentences, beam)``; the source is the same."""
        self.state = self.state[:, rows_of_parents(parents)]
