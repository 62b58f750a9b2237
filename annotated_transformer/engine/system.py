"""A translation system, which is a model with its tokenizers, and the translation of lines."""

import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from tqdm import tqdm

from annotated_transformer.background.convolutional import ConvolutionConfig
from annotated_transformer.background.seq2seq import RecurrentConfig
from annotated_transformer.data.files import CorpusError
from annotated_transformer.engine.config import Options, UsageError, option_flag
from annotated_transformer.engine.texts import Tokenizers
from annotated_transformer.fast.decoding import keep_decoder_weights
from annotated_transformer.fast.ensemble import Ensemble
from annotated_transformer.fast.quantized import DecodingPrecision
from annotated_transformer.fast.sampling import Sampling, sample
from annotated_transformer.fast.search import beam_search, greedy_search
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.transformer import PRESETS, ModelConfig
from annotated_transformer.training.batches import token_batches
from annotated_transformer.translation.beam_search import Hypothesis, check_search
from annotated_transformer.translation.tokenizers import BPETokenizer, normal_blanks

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
Found = TypeVar("Found")


@dataclass
class System:
    """A complete translation system: a model with its tokenizers.

    Attributes:
        model: Encoder and decoder.
        config: The model's configuration, of any architecture.
        languages: Source and target language, such as ``("de", "en")``.
        tokenizers: For source and target; the same object if the vocabulary is shared.
        training: How it was trained: ``options`` and ``checksums``; may be empty.
        precision: The precision of decoding: float32, bfloat16 or int8.
    """

    model: EncoderDecoder
    config: Architecture
    languages: tuple[str, str]
    tokenizers: Tokenizers
    training: dict[str, Any]
    precision: DecodingPrecision = "float32"

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


def join_systems(systems: Sequence[System], names: Sequence[str] = ()) -> System:
    """Return an ensemble, which decodes with the mean of the systems' probabilities.

    Args:
        systems: One or more; with one tokenizer, but of any architecture.
        names: Names of the systems in errors (``system 1`` and so on by default).

    Raises:
        UsageError: There is none, or two have different vocabularies or languages.
    """
    if not systems:
        raise UsageError("no systems; give at least one")
    first, said = systems[0], names or [f"system {n}" for n in range(1, len(systems) + 1)]
    for system, name in zip(systems, said, strict=True):
        what = "languages" if system.languages != first.languages else "a vocabulary"
        if (system.languages, system.fingerprint) != (first.languages, first.fingerprint):
            raise UsageError(
                f"{name}: has {what} other than {said[0]}; an ensemble needs systems that were "
                "trained with the same tokenizer"
            )
    shortest = min(systems, key=lambda system: system.config.max_len)
    return replace(shortest, model=Ensemble([system.model for system in systems]).eval())


def architecture_name(config: Architecture) -> str:
    """Return the name of this kind of model in files."""
    return next(name for name, kind in ARCHITECTURES.items() if isinstance(config, kind))


def model_config(options: Options, shared: bool) -> Architecture:
    """Return the model configuration for some options; a shared vocabulary has one embedding.

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
        raise UsageError(as_typed(error)) from None


def as_typed(error: ValueError) -> str:
    """Return a model's error with the names of options."""
    words = re.sub(r"\b(d_\w+|h|tie)\b", lambda name: option_flag(name[0]), str(error))
    return words.replace("=", " ").replace("--h ", "--heads ")


def fresh_model(tokenizers: Tokenizers, config: Architecture, seed: int) -> EncoderDecoder:
    """Build a model; the seed fixes its weights and the random numbers after them.

    Raises:
        UsageError: The sizes do not make a valid model.
    """
    torch.manual_seed(seed)
    try:
        return config.build(len(tokenizers[0]), len(tokenizers[1]))
    except ValueError as error:
        raise UsageError(as_typed(error)) from None


@dataclass(frozen=True)
class Translation:
    """One output of a search, as text."""

    text: str  #: The translation.
    score: float  #: The log-probability divided by the length penalty; the search ranks by it.
    log_probability: float  #: In nats, the end symbol included unless the output was cut before it.
    tokens: list[int]  #: Token ids, without special symbols.


def translate_lines(
    system: System,
    lines: Sequence[str],
    *,
    beam: int = 1,
    alpha: float = 0.6,
    max_tokens: int = 4096,
    name: str = "input",
    first: int = 1,
    progress: bool = False,
) -> list[str]:
    """Translate lines, each on its own; blank lines stay blank.

    Args:
        system: A trained system.
        lines: Sentences.
        beam: Beam size; 1 is greedy decoding (the command's default is 4).
        alpha: Strength of the length penalty in beam search.
        max_tokens: Maximum source tokens of a batch, over all hypotheses.
        name: Name of the input in errors.
        first: Number of the first line in errors.
        progress: Show a progress bar.

    Raises:
        CorpusError: A line is longer than the model's limit.
        ValueError: The beam or alpha is out of range.
    """
    check_search(beam, alpha)

    def best(sources: list[list[int]], _: list[int], limit: int) -> list[str]:
        if beam == 1:
            found = greedy_search(system.model, sources, limit)
        else:
            several = beam_search(system.model, sources, beam=beam, alpha=alpha, max_len=limit)
            found = [hypotheses[0].tokens for hypotheses in several]
        return [text_of(system, tokens) for tokens in found]

    room = max_tokens // beam
    return decode_lines(system, lines, best, "", room, name=name, first=first, progress=progress)


def n_best_lines(
    system: System, lines: Sequence[str], *, n_best: int = 1, beam: int = 4, alpha: float = 0.6,
    sampling: Sampling | None = None, max_tokens: int = 4096, name: str = "input", first: int = 1,
    progress: bool = False,
) -> list[list[Translation]]:  # fmt: skip
    """Translate lines like :func:`translate_lines`, and return several translations with scores.

    The beam must be at least ``n_best``. With ``sampling``, each translation is drawn, in place of
    the search: ``beam`` and ``alpha`` are not used, and what is drawn for a line depends on its
    number, counted from ``first``, and the seed, not on the other lines.

    Returns:
        For each line at most ``n_best`` translations, the best first; none for a blank line.

    Raises:
        CorpusError: A line is longer than the model's limit.
        ValueError: An option is out of range.
    """
    if sampling is not None:
        beam, alpha = max(1, n_best), 0.0
    check_search(beam, alpha, n_best)

    def search(sources: list[list[int]], numbers: list[int], limit: int) -> list[list[Translation]]:
        if sampling is not None:
            again = [source for source in sources for _ in range(n_best)]
            keys = [f"{number} {i}" for number in numbers for i in range(n_best)]
            drawn = sample(system.model, again, sampling, max_len=limit, names=keys)
            groups = (drawn[i : i + n_best] for i in range(0, len(drawn), n_best))
            found = [sorted(some, key=lambda each: -each.score) for some in groups]
        else:
            options: dict[str, Any] = {"beam": beam, "alpha": alpha, "n_best": n_best}
            found = beam_search(system.model, sources, max_len=limit, **options)
        return [[to_translation(system, each) for each in some] for some in found]

    room, blank = max_tokens // beam, list[Translation]()
    said: dict[str, Any] = {"name": name, "first": first, "progress": progress}
    return decode_lines(system, lines, search, blank, room, **said)


def to_translation(system: System, found: Hypothesis) -> Translation:
    """Return the output of a search with its text."""
    text = text_of(system, found.tokens)
    return Translation(text, found.score, found.log_probability, found.tokens)


def text_of(system: System, tokens: Sequence[int]) -> str:
    """Return target tokens as one line of text."""
    return normal_blanks(system.tokenizers[1].decode(tokens))


def decode_lines(
    system: System, lines: Sequence[str],
    search: Callable[[list[list[int]], list[int], int], Sequence[Found]], blank: Found,
    max_tokens: int, *, name: str, first: int, progress: bool,
) -> list[Found]:  # fmt: skip
    """Decode lines in batches of similar length; most arguments are :func:`translate_lines`'s.

    ``search`` takes sources, their line numbers, and the maximum tokens of an output; ``blank`` is
    the result for a blank line.

    Raises:
        CorpusError: A line is longer than the model's limit.
    """
    if isinstance(lines, str):
        raise TypeError("lines: give a list of strings, not one string")
    limit = system.config.max_len - 1
    ids = [system.tokenizers[0].encode(line) if line.strip() else [] for line in lines]
    for number, tokens in enumerate(ids, first):
        if len(tokens) > limit:
            raise CorpusError(
                f"{name}, line {number}: {len(tokens)} tokens, more than the {limit} that fit "
                "the model; split the line into sentences"
            )
        if "\n" in lines[number - first]:
            raise CorpusError(f"{name}, line {number}: holds a line break; strip or split it")
    full = [i for i, tokens in enumerate(ids) if tokens]
    out = [blank] * len(lines)
    lengths = [(len(ids[i]) + 1, 0) for i in full]
    order = token_batches(lengths, max([max_tokens, *map(max, lengths)]), shuffle=False)
    closed = sys.stderr is None  # by the parent process
    bar = tqdm(total=len(full), unit="line", disable=not progress or closed, file=sys.stderr)
    with bar, keep_decoder_weights(system.model, system.precision):
        for batch in order:
            chosen = [full[int(i)] for i in batch]
            sources, numbers = [ids[i] for i in chosen], [first + i for i in chosen]
            for i, found in zip(chosen, search(sources, numbers, limit), strict=True):
                out[i] = found
            bar.update(len(batch))
    return out
