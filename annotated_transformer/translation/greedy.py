# Written from book/translation/greedy.md: edit the chapter instead.
"""Greedy decoding: the most probable token, one after the other (§3.1, §6.1)."""

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.multi_head import padding_mask, subsequent_mask
from annotated_transformer.notation import SPECIAL_IDS, SpecialIds
from annotated_transformer.training.loop import evaluation_mode


@torch.no_grad()
def greedy_decode(
    model: EncoderDecoder, src: Tensor, src_mask: Tensor, max_len: int, start_symbol: int
) -> Tensor:
    """Decode greedily: every step computes all positions again.

    Args:
        model: In evaluation mode; otherwise dropout is active.
        src: Source tokens ``(batch, m)``.
        src_mask: ``(batch, 1, m)``, true at real tokens.
        max_len: Number of tokens of each output, the start symbol included.
        start_symbol: First token of every output.

    Returns:
        Tokens ``(batch, max_len)``; ignore those after an end symbol.
    """
    memory = model.encode(src, src_mask)
    ys = torch.full((src.size(0), 1), start_symbol, dtype=src.dtype, device=src.device)
    for _ in range(max_len - 1):
        out = model.decode(memory, src_mask, ys, subsequent_mask(ys.size(1), ys.device))
        ys = torch.cat([ys, model.generator(out[:, -1]).argmax(dim=-1, keepdim=True)], dim=1)
    return ys


class Steps(ABC):
    """Decodes the next position of each hypothesis: all that a search needs of a model."""

    @abstractmethod
    def __call__(self, tokens: Tensor) -> Tensor:
        """Take the newest tokens ``(rows,)``; return logits of the next ones ``(rows, vocab)``."""

    def most_probable(self, tokens: Tensor) -> Tensor:
        """Take the newest tokens ``(rows,)``; return the most probable next ones ``(rows,)``."""
        return self(tokens).argmax(-1)

    @abstractmethod
    def select(self, sentences: Tensor) -> None:
        """Keep only these sentences ``(kept,)``, by index, in this order."""

    @abstractmethod
    def follow(self, parents: Tensor) -> None:
        """Continue the hypotheses ``parents (sentences, beam)``, indices within each sentence."""


def decode_greedily(steps: Steps, limits: Tensor, special: SpecialIds = SPECIAL_IDS) -> Tensor:
    """Take the most probable tokens until each sentence has ended or reached its limit.

    Args:
        steps: Decoder of the sentences, which holds one hypothesis for each.
        limits: Maximum tokens of each output ``(sentences,)``.
        special: Ids of the special symbols.

    Returns:
        Tokens ``(sentences, largest limit)``, padded after the end.
    """
    ys = torch.full((len(limits), int(limits.max())), special.pad, device=limits.device)
    rows = torch.arange(len(ys), device=ys.device)  # sentences of the batch that is left
    token, active = torch.full_like(limits, special.bos), limits > 0
    for step in range(ys.size(1)):
        left = active.nonzero()[:, 0]
        if not len(left):
            break
        if (size := round_up(len(left))) < len(rows):  # ended ones leave, down to a round size
            left = torch.cat([left, (~active).nonzero()[: size - len(left), 0]])
            rows, token, active = rows[left], token[left], active[left]
            steps.select(left)
        token = steps.most_probable(token)
        ys[rows, step] = token.where(active, special.pad)
        active = active & (limits[rows] > step + 1) & (token != special.eos)
    return ys


def round_up(count: int) -> int:
    """Return the next number of the form 2^k or 3 * 2^k, at least ``count``: few batch sizes."""
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def rows_of(sentences: Tensor, beam: int) -> Tensor:
    """Return the rows of the hypotheses of ``sentences (s,)``: ``(s * beam,)``."""
    places = torch.arange(beam, device=sentences.device)
    return (sentences.unsqueeze(1) * beam + places).flatten()


def rows_of_parents(parents: Tensor) -> Tensor:
    """Return the rows of the hypotheses ``parents (sentences, beam)``: ``(sentences * beam,)``."""
    first = torch.arange(0, parents.numel(), parents.size(1), device=parents.device)
    return (first.unsqueeze(1) + parents).flatten()


class PrefixSteps(Steps):
    """Steps that read the whole output so far again each time: right for every model, and slow."""

    def __init__(
        self, model: EncoderDecoder, memory: Tensor, src_mask: Tensor, beam: int = 1
    ) -> None:
        self.model, self.beam = model, beam
        self.memory = memory.repeat_interleave(beam, 0)  # (sentences, ...) to (rows, ...)
        self.src_mask = src_mask.repeat_interleave(beam, 0)  # (rows, 1, m)
        self.prefix = torch.zeros(len(self.memory), 0, dtype=torch.long, device=memory.device)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Decode one position: tokens ``(rows,)`` to log-probabilities ``(rows, vocab)``."""
        self.prefix = torch.cat([self.prefix, tokens.unsqueeze(1)], 1)
        past = subsequent_mask(self.prefix.size(1), tokens.device)
        out = self.model.decode(self.memory, self.src_mask, self.prefix, past)
        log_probs: Tensor = self.model.generator(out[:, -1])
        return log_probs

    def select(self, sentences: Tensor) -> None:
        """Keep the given sentences, in that order."""
        rows = rows_of(sentences, self.beam)
        self.memory, self.src_mask = self.memory[rows], self.src_mask[rows]
        self.prefix = self.prefix[rows]

    def follow(self, parents: Tensor) -> None:
        """Go on from the hypotheses ``parents (sentences, beam)``; their source is the same."""
        self.prefix = self.prefix[rows_of_parents(parents)]


StartSteps = Callable[[EncoderDecoder, Tensor, Tensor, int], Steps]


@torch.no_grad()
def readable_steps(model: EncoderDecoder, src: Tensor, src_mask: Tensor, beam: int = 1) -> Steps:
    """Encode sentences, and return what decodes them: the model's own steps, if it has some.

    Args:
        model: In evaluation mode.
        src: Source tokens ``(sentences, m)``.
        src_mask: Boolean ``(sentences, 1, m)``, true at real tokens.
        beam: Hypotheses of each sentence.
    """
    if hasattr(model, "_orig_mod"):  # made by torch.compile
        warnings.warn("torch.compile does not speed up searches: they call parts of the model, "
                      "which stay as they are", stacklevel=3)  # fmt: skip
    if start := getattr(model, "start_steps", None):
        steps: Steps = start(src, src_mask, beam)
        return steps
    return PrefixSteps(model, model.encode(src, src_mask), src_mask, beam)


@torch.no_grad()
def greedy_search(
    model: EncoderDecoder,
    sources: list[list[int]],
    max_len: int | None = None,
    *,
    extra: int = 50,
    start: StartSteps = readable_steps,
    special: SpecialIds = SPECIAL_IDS,
) -> list[list[int]]:
    """Translate token ids into token ids, each sentence independently of the others.

    Args:
        model: Put into evaluation mode meanwhile.
        sources: Tokens of each sentence, without special symbols; may be empty.
        max_len: Most tokens of an output, apart from the limits by ``extra`` and positions.
        extra: How many tokens an output may exceed its source by (§6.1).
        start: Encodes the sentences, and returns what decodes them; ``fast.search`` has caches.
        special: Ids of the special symbols.

    Raises:
        IndexError: A source, with its end symbol, is longer than the model's positions.
    """
    if not len(sources):
        return []
    src, mask = source_batch(sources, next(model.parameters()).device, special)
    limits = torch.tensor(output_limits(model, sources, max_len, extra), device=src.device)
    with evaluation_mode(model):
        found = decode_greedily(start(model, src, mask, 1), limits, special)
    return [strip_special_tokens(row, special) for row in found.tolist()]


def source_batch(
    sources: list[list[int]], device: torch.device, special: SpecialIds = SPECIAL_IDS
) -> tuple[Tensor, Tensor]:
    """End sentences and pad them; return tokens ``(batch, m)`` and mask ``(batch, 1, m)``."""
    width = max(len(s) for s in sources) + 1
    pad, _, eos = special
    src = torch.tensor([[*s, eos, *[pad] * (width - len(s) - 1)] for s in sources], device=device)
    return src, padding_mask(src, pad)


def strip_special_tokens(tokens: list[int], special: SpecialIds = SPECIAL_IDS) -> list[int]:
    """Return the tokens before the end symbol, without padding."""
    end = tokens.index(special.eos) if special.eos in tokens else len(tokens)
    return [t for t in tokens[:end] if t != special.pad]


def max_positions(model: EncoderDecoder) -> int:
    """Return the longest sentence that a model takes: the least ``max_len`` of its modules."""
    found = (getattr(module, "max_len", None) for module in model.modules())
    return min((most for most in found if isinstance(most, int)), default=sys.maxsize)


def output_limits(
    model: EncoderDecoder, sources: list[list[int]], max_len: int | None, extra: int
) -> list[int]:
    """Return how many tokens the output of each source may have.

    Args:
        model: The number of its positions limits all outputs.
        sources: Tokens of each sentence, without special symbols.
        max_len: Another limit for all outputs; None if there is none.
        extra: How many tokens an output may exceed its source by.
    """
    most = max_positions(model) if max_len is None else min(max_len, max_positions(model))
    return [max(0, min(most, len(s) + extra)) for s in sources]
