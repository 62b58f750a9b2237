"""A translation system, which is a model with its tokenizers, and the translation of lines."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import torch
from tqdm import tqdm

from annotated_transformer.background.convolutional import ConvolutionConfig
from annotated_transformer.background.seq2seq import RecurrentConfig
from annotated_transformer.data.files import CorpusError
from annotated_transformer.engine.config import Options, UsageError
from annotated_transformer.engine.texts import Tokenizers
from annotated_transformer.fast.decoding import keep_decoder_weights
from annotated_transformer.fast.search import beam_search, greedy_search
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.transformer import PRESETS, ModelConfig
from annotated_transformer.training.batches import token_batches
from annotated_transformer.translation.beam_search import check_search
from annotated_transformer.translation.tokenizers import BPETokenizer

Architecture: TypeAlias = ModelConfig | RecurrentConfig | ConvolutionConfig
ARCHITECTURES: dict[str, type[Architecture]] = {
    "transformer": ModelConfig,
    "recurrent": RecurrentConfig,
    "convolution": ConvolutionConfig,
}
ATTENTION: Mapping[str, Literal["none", "additive", "dot"]] = {
    "rnn": "none",
    "rnn-attention": "additive",
    "rnn-dot": "dot",
}


@dataclass
class System:
    """A complete translation system: a model with its tokenizers.

    Attributes:
        model: Encoder and decoder.
        config: The model's configuration, of any architecture.
        languages: Source and target language, such as ``("de", "en")``.
        tokenizers: For source and target; the same object if the vocabulary is shared.
        training: How it was trained: ``options`` and ``checksums``; may be empty.
    """

    model: EncoderDecoder
    config: Architecture
    languages: tuple[str, str]
    tokenizers: Tokenizers
    training: dict[str, Any]

    @property
    def shared(self) -> bool:
        """Whether both languages share one vocabulary."""
        return self.tokenizers[0] is self.tokenizers[1]

    @property
    def lowercase(self) -> bool:
        """Whether its output is lower-case."""
        return isinstance(self.tokenizers[1], BPETokenizer) and self.tokenizers[1].lowercase

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizers; weights work only with the tokenizers they were trained on."""
        text = "\n".join(tokenizer.to_json() for tokenizer in self.tokenizers)
        return hashlib.sha256(text.encode()).hexdigest()


def architecture(config: Architecture) -> str:
    """Return the name of this kind of model in files."""
    return next(name for name, kind in ARCHITECTURES.items() if isinstance(config, kind))


def model_config(options: Options, shared: bool) -> Architecture:
    """Return the model configuration for the given options.

    Args:
        options: The options of the run.
        shared: Whether both languages share one vocabulary, and so one embedding.

    Raises:
        UsageError: The sizes do not make a valid model.
    """
    model = options.model
    given = {
        each.metadata["config"]: getattr(group, each.name)
        for group in (options.data, model)
        for each in fields(group)
        if "config" in each.metadata and getattr(group, each.name) is not None
    }
    try:
        if model.architecture == "transformer":
            tie = "all" if shared else "target"
            return replace(PRESETS[model.preset], **{"tie": tie, **given})
        sizes = {{"N": "layers"}.get(name, name): value for name, value in given.items()}
        if model.architecture == "convolution":
            return ConvolutionConfig(**sizes)
        return RecurrentConfig(ATTENTION[model.architecture], **sizes)
    except ValueError as error:
        raise UsageError(f"--architecture {model.architecture}: {error}") from None


def fresh_model(tokenizers: Tokenizers, config: Architecture, seed: int) -> EncoderDecoder:
    """Build a model; the seed fixes its weights and the random numbers after them.

    Raises:
        UsageError: The sizes do not make a valid model.
    """
    torch.manual_seed(seed)
    try:
        return config.build(len(tokenizers[0]), len(tokenizers[1]))
    except ValueError as error:
        raise UsageError(f"--architecture {architecture(config)}: {error}") from None


def translate_lines(
    system: System,
    lines: Sequence[str],
    *,
    beam: int = 1,
    alpha: float = 0.6,
    max_tokens: int = 4096,
    name: str = "input",
    progress: bool = False,
) -> list[str]:
    """Translate lines, each on its own; blank lines stay blank.

    Args:
        system: A trained system.
        lines: Sentences.
        beam: Beam size; 1 is greedy decoding.
        alpha: Strength of the length penalty in beam search.
        max_tokens: Maximum source tokens of a batch, over all hypotheses.
        name: Name of the input in errors.
        progress: Show a progress bar.

    Raises:
        CorpusError: A line is longer than the model's limit.
        ValueError: The beam or alpha is out of range.
    """
    check_search(beam, alpha)
    limit = system.config.max_len - 1
    ids = [system.tokenizers[0].encode(line) if line.strip() else [] for line in lines]
    for number, tokens in enumerate(ids, 1):
        if len(tokens) > limit:
            raise CorpusError(
                f"{name}, line {number}: {len(tokens)} tokens, more than the {limit} that fit "
                "the model; split the line into sentences"
            )
    full = [i for i, tokens in enumerate(ids) if tokens]
    out = [""] * len(lines)
    lengths = [(len(ids[i]) + 1, 0) for i in full]
    order = token_batches(lengths, max(max_tokens // beam, limit + 1), shuffle=False)
    closed = sys.stderr is None  # by the parent process
    bar = tqdm(total=len(full), unit="line", disable=not progress or closed, file=sys.stderr)
    with bar, keep_decoder_weights(system.model):
        for batch in order:
            sources = [ids[full[int(i)]] for i in batch]
            found = best_outputs(system.model, sources, limit, beam, alpha)
            for i, tokens in zip(batch, found, strict=True):
                out[full[int(i)]] = " ".join(system.tokenizers[1].decode(tokens).split())
            bar.update(len(batch))
    return out


def best_outputs(
    model: EncoderDecoder, sources: list[list[int]], limit: int, beam: int, alpha: float
) -> list[list[int]]:
    """Return the best output for each source, with at most ``limit`` tokens."""
    if beam == 1:
        return greedy_search(model, sources, limit)
    found = beam_search(model, sources, beam=beam, alpha=alpha, max_len=limit)
    return [hypotheses[0].tokens for hypotheses in found]
