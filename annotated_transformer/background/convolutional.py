# Written from book/background/convolutional.md: edit the chapter instead.
"""A translator made of convolutions, with attention in every decoder layer (section 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.model.architecture import EncoderDecoder, Generator
from annotated_transformer.translation.greedy import Steps


def windows(x: Tensor, kernel: int, causal: bool) -> Tensor:
    """Concatenate the vectors that each position sees, with zeros beyond the ends.

    Args:
        x: One vector a position, ``(batch, n, width)``.
        kernel: Positions that one position sees.
        causal: Whether the window ends at the position itself; otherwise it is centred, and
            an even kernel sees one position more on the right.

    Returns:
        ``(batch, n, kernel * width)``, the leftmost position first.
    """
    left = kernel - 1 if causal else (kernel - 1) // 2
    padded = F.pad(x, (0, 0, left, kernel - 1 - left))  # (batch, n + kernel - 1, width)
    n = x.size(1)
    return torch.cat([padded[:, shift : shift + n] for shift in range(kernel)], dim=-1)


class GatedConvolution(nn.Module):
    """A convolution over positions whose output is gated (Gehring et al. 2017, Section 3.2).

    Args:
        width: Size of the vector of a position, in and out.
        kernel: Positions that one position sees.
        dropout: Probability of dropping an element of the input.
        causal: Whether a position sees only itself and earlier ones.
    """

    def __init__(self, width: int, kernel: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.kernel, self.causal = kernel, causal
        self.linear = nn.Linear(kernel * width, 2 * width)
        self.dropout = nn.Dropout(dropout)
        # GLU leaves a quarter of the variance; dropout divides it by the share kept.
        std = math.sqrt(4 * (1 - dropout) / (kernel * width))
        nn.init.normal_(self.linear.weight, std=std)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``x (batch, n, width)`` over its positions; same shape."""
        return self.gate(windows(self.dropout(x), self.kernel, self.causal))

    def gate(self, seen: Tensor) -> Tensor:
        """Turn windows ``(..., kernel * width)`` into gated outputs ``(..., width)``."""
        y: Tensor = F.glu(self.linear(seen), dim=-1)
        return y


ROOT_HALF = math.sqrt(0.5)


def add_signals(x: Tensor, y: Tensor) -> Tensor:
    """Add two signals; if they are independent, with the same variance, the sum has it as well."""
    return (x + y) * ROOT_HALF


@dataclass
class Source:
    """What the decoder's layers look at.

    Attributes:
        keys: The encoder's outputs, ``(batch, m, width)``.
        values: These plus the source's embeddings, same shape.
        real: Boolean ``(batch, 1, m)``, true at real tokens.
        scale: Root of the number of real tokens, ``(batch, 1, 1)``.
    """

    keys: Tensor
    values: Tensor
    real: Tensor
    scale: Tensor

    @classmethod
    def of(cls, memory: Tensor, src_mask: Tensor | None) -> Source:
        """Take apart what the encoder returned, ``(batch, m, 2 * width)``."""
        keys, values = memory.chunk(2, dim=-1)
        shape = (memory.size(0), 1, memory.size(1))
        real = memory.new_ones(shape, dtype=torch.bool) if src_mask is None else src_mask
        return cls(keys, values, real, real.sum(-1, keepdim=True).to(memory.dtype).sqrt())


class SourceAttention(nn.Module):
    """Dot-product attention of one decoder layer to the source (Gehring et al. 2017, Section 3.3).

    Args:
        width: Size of the vector of a position.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        nn.init.normal_(self.query.weight, std=math.sqrt(1 / width))
        nn.init.zeros_(self.query.bias)

    def forward(self, h: Tensor, g: Tensor, source: Source) -> tuple[Tensor, Tensor]:
        """Look at the source from ``h (batch, n, width)``, given the embeddings ``g`` likewise.

        Returns:
            The summaries ``(batch, n, width)`` and the weights ``(batch, n, m)``. Where a source
            has no real token, both are zero.
        """
        scores = add_signals(self.query(h), g) @ source.keys.transpose(1, 2)  # (batch, n, m)
        lowest = torch.finfo(scores.dtype).min
        weights = scores.masked_fill(~source.real, lowest).softmax(-1) * source.real
        return (weights @ source.values) * source.scale, weights


class PositionedWords(nn.Module):
    """Word embeddings plus embeddings of their positions, both learned.

    Args:
        vocab: Number of tokens in the vocabulary.
        width: Size of an embedding.
        max_len: Number of positions.
        dropout: Probability of dropping an element of the sum.
    """

    def __init__(self, vocab: int, width: int, max_len: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(max_len, width)
        self.dropout = nn.Dropout(dropout)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Embed tokens ``(batch, n)`` at positions ``first``, ``first + 1``, ...

        Returns:
            ``(batch, n, width)``.

        Raises:
            IndexError: There are fewer positions than that.
        """
        length, most = first + tokens.size(1), self.places.num_embeddings
        if length > most:
            raise IndexError(
                f"a sequence of {length} tokens is longer than the model's {most} positions"
            )
        x: Tensor = self.dropout(self.words(tokens) + self.places.weight[first:length])
        return x


class ConvolutionalEncoder(nn.Module):
    """Centred gated convolutions, each in a residual connection."""

    def __init__(self, layers: list[GatedConvolution]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, src_mask: Tensor | None) -> Tensor:
        """Encode ``x (batch, m, width)``, whose mask ``(batch, 1, m)`` is true at real tokens.

        Returns:
            Keys, and next to them values, ``(batch, m, 2 * width)``; both are zero at padding.
        """
        padding = None if src_mask is None else ~src_mask.transpose(1, 2)  # (batch, m, 1)
        embedded = z = _without(x, padding)
        for layer in self.layers:
            z = _without(add_signals(z, layer(z)), padding)
        return torch.cat([z, add_signals(z, embedded)], dim=-1)


def _without(x: Tensor, padding: Tensor | None) -> Tensor:
    """Set ``x (batch, m, width)`` to zero where ``padding (batch, m, 1)`` is true."""
    return x if padding is None else x.masked_fill(padding, 0.0)


class ConvolutionalDecoderLayer(nn.Module):
    """A causal gated convolution, then attention to the source, in a residual connection.

    Args:
        width: Size of the vector of a position.
        kernel: Positions that one position sees, itself included.
        dropout: Probability of dropping an element of the convolution's input.
    """

    def __init__(self, width: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.convolution = GatedConvolution(width, kernel, dropout, causal=True)
        self.attention = SourceAttention(width)

    def forward(self, x: Tensor, g: Tensor, source: Source) -> tuple[Tensor, Tensor]:
        """Apply the layer to ``x (batch, n, width)`` and the embeddings ``g`` of the target.

        Returns:
            Output ``(batch, n, width)`` and the weights of the attention ``(batch, n, m)``.
        """
        return self.attend(x, self.convolution(x), g, source)

    def attend(self, x: Tensor, h: Tensor, g: Tensor, source: Source) -> tuple[Tensor, Tensor]:
        """Complete the layer, given its convolution's output ``h``; shapes as in ``forward``."""
        summary, weights = self.attention(h, g, source)
        return add_signals(x, add_signals(h, summary)), weights

    def before(self, sentences: int, beam: int, like: Tensor) -> Tensor:
        """Return what stands before a sentence: zeros ``(sentences, beam, kernel - 1, width)``."""
        width = self.attention.query.in_features
        return like.new_zeros(sentences, beam, self.convolution.kernel - 1, width)

    def step(self, x: Tensor, g: Tensor, source: Source, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the layer to the newest position of each hypothesis.

        Args:
            x: The newest inputs ``(sentences, beam, width)``.
            g: The newest embeddings, likewise.
            source: The encoded source.
            kept: The inputs before, ``(sentences, beam, kernel - 1, width)``.

        Returns:
            Outputs ``(sentences, beam, width)``, and what to keep for the next step.
        """
        window = torch.cat([kept, x.unsqueeze(2)], dim=2)  # (sentences, beam, kernel, width)
        y, _ = self.attend(x, self.convolution.gate(window.flatten(2)), g, source)
        return y, window[:, :, 1:]


@dataclass(frozen=True)
class ConvolutionConfig:
    """Sizes of a convolutional translator, about those of the Transformer ``tiny``.

    Attributes:
        width: Size of the vector of a position, everywhere.
        kernel: Positions that one position sees in one layer.
        layers: Layers of the encoder, and as many of the decoder.
        dropout: Probability of dropping an element: of the embeddings, of what a convolution
            reads, and of the decoder's output.
        max_len: Maximum positions of a sentence.

    Raises:
        ValueError: A size is not positive, or the dropout is not from 0 up to below 1.
    """

    width: int = 128
    kernel: int = 3
    layers: int = 6
    dropout: float = 0.2
    max_len: int = 256

    def __post_init__(self) -> None:
        """Refuse sizes that make no model."""
        for name in ("width", "kernel", "layers", "max_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, it is {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be from 0 up to below 1, it is {self.dropout}")

    def build(self, src_vocab: int, tgt_vocab: int) -> ConvolutionalTranslator:
        """Build a model with new weights, drawn by the global random generator."""
        return ConvolutionalTranslator(src_vocab, tgt_vocab, self)


class ConvolutionalTranslator(EncoderDecoder):
    """Convolutional encoder and decoder with attention in every decoder layer (ConvS2S).

    ``src_vocab`` and ``tgt_vocab`` are numbers of tokens.
    """

    decoder: nn.ModuleList
    tgt_embed: PositionedWords

    def __init__(self, src_vocab: int, tgt_vocab: int, config: ConvolutionConfig) -> None:
        c = config
        layers = [
            GatedConvolution(c.width, c.kernel, c.dropout, causal=False) for _ in range(c.layers)
        ]
        source = PositionedWords(src_vocab, c.width, c.max_len, c.dropout)
        target = PositionedWords(tgt_vocab, c.width, c.max_len, c.dropout)
        decoder = nn.ModuleList(
            ConvolutionalDecoderLayer(c.width, c.kernel, c.dropout) for _ in range(c.layers)
        )
        generator = Generator(c.width, tgt_vocab)
        nn.init.normal_(generator.proj.weight, std=math.sqrt((1 - c.dropout) / c.width))
        nn.init.zeros_(generator.proj.bias)
        super().__init__(ConvolutionalEncoder(layers), decoder, source, target, generator)
        self.config, self.dropout = config, nn.Dropout(c.dropout)

    @property
    def decoder_layers(self) -> list[ConvolutionalDecoderLayer]:
        """The layers of the decoder, the lowest first."""
        return [layer for layer in self.decoder if isinstance(layer, ConvolutionalDecoderLayer)]

    @property
    def max_len(self) -> int:
        """Maximum positions of a sentence."""
        return self.tgt_embed.places.num_embeddings

    def decode(
        self, memory: Tensor, src_mask: Tensor | None, tgt: Tensor, tgt_mask: Tensor | None = None
    ) -> Tensor:
        """Decode ``tgt (batch, n)``: ``(batch, n, width)``. No layer sees the future, mask or not.

        Raises:
            IndexError: A sentence is longer than ``max_len``.
        """
        return self._decode(memory, src_mask, tgt)[0]

    def alignment(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """Return where each decoder layer looks, ``(layers, batch, n, m)``.

        Args:
            src: Token ids ``(batch, m)``.
            src_mask: Boolean ``(batch, 1, m)``, true at real tokens.
            tgt: Token ids ``(batch, n)``, starting with the start symbol; row ``i`` of a
                result is what the model looks at to write the token after ``tgt[:, i]``.
        """
        return torch.stack(self._decode(self.encode(src, src_mask), src_mask, tgt)[1])

    def _decode(
        self, memory: Tensor, src_mask: Tensor | None, tgt: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the decoder's output, and the weights of each layer's attention."""
        source, found = Source.of(memory, src_mask), []
        x = g = self.tgt_embed(tgt)
        for layer in self.decoder_layers:
            x, weights = layer(x, g, source)
            found.append(weights)
        return self.dropout(x), found

    @torch.no_grad()
    def start_steps(self, src: Tensor, src_mask: Tensor, beam: int = 1) -> ConvolutionSteps:
        """Encode sentences; return the steps that decode them."""
        return ConvolutionSteps(self, self.encode(src, src_mask), src_mask, beam)


class ConvolutionSteps(Steps):
    """Steps that keep the last ``kernel - 1`` inputs of each layer; see ``RecurrentSteps``."""

    def __init__(
        self, model: ConvolutionalTranslator, memory: Tensor, src_mask: Tensor, beam: int = 1
    ) -> None:
        self.model, self.beam, self.length = model, beam, 0
        self.memory, self.src_mask = memory, src_mask
        self.source = Source.of(memory, src_mask)
        self.kept = [layer.before(memory.size(0), beam, memory) for layer in model.decoder_layers]

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Decode one position: tokens ``(rows,)`` to log-probabilities ``(rows, vocab)``.

        Raises:
            IndexError: The model has no position for it.
        """
        g = self.model.tgt_embed(tokens.unsqueeze(1), self.length)  # (rows, 1, width)
        x = g = g.view(-1, self.beam, g.size(-1))  # (sentences, beam, width)
        for number, layer in enumerate(self.model.decoder_layers):
            x, self.kept[number] = layer.step(x, g, self.source, self.kept[number])
        self.length += 1
        log_probs: Tensor = self.model.generator(x.flatten(0, 1))
        return log_probs

    def select(self, sentences: Tensor) -> None:
        """Keep the given sentences, in that order."""
        self.memory, self.src_mask = self.memory[sentences], self.src_mask[sentences]
        self.source = Source.of(self.memory, self.src_mask)
        self.kept = [kept[sentences] for kept in self.kept]

    def follow(self, parents: Tensor) -> None:
        """Go on from the hypotheses ``parents (sentences, beam)``; their source is the same."""
        rows = torch.arange(parents.size(0), device=parents.device).unsqueeze(1)
        self.kept = [kept[rows, parents] for kept in self.kept]
