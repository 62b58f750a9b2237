"""The small model that comes with the package: it translates the book's grammar, both ways.

It is one Transformer, normalized after each residual sum as the paper prints it. Given German it
writes English, and given English it writes German. The book follows one sentence, ``RUNNING``,
through it. ``python -m benchmarks.pretrained`` trains the model, and
``results/pretrained/model.json`` is the record of that run.

This folder holds five files. ``config.json`` has the sizes of the model. ``tokenizer.json`` has
the merges of the byte-pair encoding, in the order in which they were learned. ``words.json`` lists
the words of the training text by language. ``model.safetensors`` has the weights under their names
in the state dict; the matrix that both embeddings and the generator share is stored once, as
``src_embed.0.lut.weight``. A matrix ``NAME`` of shape (rows, columns) is stored as 8-bit integers,
with a ``NAME.scale`` of shape (rows,) in float32: row ``i`` is the integers times
``NAME.scale[i]``. Vectors are stored in float32. ``sha256sums.txt`` has a digest of each of the
other files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.multi_head import MultiHeadedAttention
from annotated_transformer.model.transformer import ModelConfig, build_model
from annotated_transformer.notation import BOS, EOS
from annotated_transformer.training.batches import Batch, make_batch
from annotated_transformer.translation.greedy import greedy_search

if TYPE_CHECKING:
    from annotated_transformer.engine.system import System
    from annotated_transformer.translation.tokenizers import BPETokenizer

FOLDER = Path(__file__).parent
FILES = ("config.json", "tokenizer.json", "words.json", "model.safetensors")
SUMS = "sha256sums.txt"
FORMAT = 1
RUNNING = grammar_pairs("test", 1, seed=32_624)[0]  #: The pair that the book follows.
WORD = re.compile(r"\w+")


class PretrainedError(ValueError):
    """The stored model cannot be read; the message is one line with the file and the remedy."""


@dataclass(frozen=True)
class Pretrained:
    """The stored model in evaluation mode, with its tokenizer and the words that it knows."""

    model: EncoderDecoder  #: The readable Transformer.
    config: ModelConfig  #: Its sizes.
    tokenizer: BPETokenizer  #: Splits text into sub-words; the same for both languages.
    words: Mapping[str, frozenset[str]]  #: The words that it was trained on, by language.

    @property
    def tokenizers(self) -> tuple[BPETokenizer, BPETokenizer]:
        """The tokenizers of source and target, here the same one."""
        return self.tokenizer, self.tokenizer

    @property
    def system(self) -> System:
        """The model as a system, for ``translate_lines``, ``save_system`` and so on."""
        from annotated_transformer.engine.system import System

        return System(self.model, self.config, ("de", "en"), self.tokenizers, {"both_ways": True})

    def batch(self, source: str, target: str) -> Batch:
        """Return a batch of one pair: ``src (1, m)``, ``tgt`` and ``tgt_y (1, n)``, and masks."""
        return make_batch([self.tokenizer.encode(source)], [self.tokenizer.encode(target)])

    def labels(self, text: str, *, target: bool = False) -> list[str]:
        """Return the tokens that the encoder (or, for a target, the decoder) reads, for figures."""
        ids = self.tokenizer.encode(text)
        return self.tokenizer.tokens([BOS, *ids] if target else [*ids, EOS])

    def translate(self, text: str) -> str:
        """Return the translation of a sentence, decoded greedily."""
        (found,) = greedy_search(self.model, [self.tokenizer.encode(text)])
        return self.tokenizer.decode(found)

    def unknown(self, text: str) -> list[str]:
        """Return the words of a text that did not occur in training, in the order of the text.

        The first word also counts as known if it is known with a small first letter.
        """
        known = frozenset[str]().union(*self.words.values())
        found = WORD.findall(text)
        lowered = [word[0].lower() + word[1:] for word in found[:1]]
        pairs = zip(found, [*lowered, *found[1:]], strict=True)
        return [word for word, other in pairs if known.isdisjoint((word, other))]

    def trace(self, source: str, target: str) -> dict[str, Tensor]:
        """Run the model on a sentence pair, and return the output of every module by name."""
        return trace_modules(self.model, self.batch(source, target))


@torch.no_grad()
def trace_modules(model: EncoderDecoder, batch: Batch) -> dict[str, Tensor]:
    """Run a model on a batch, and return the output of every module by name.

    ``encoder.layers.0.self_attn.linears.0`` is the first encoder layer's queries before they are
    split into heads, ``encoder.layers.0.sublayer.0`` the residual stream after its attention,
    ``generator.proj`` the logits ``(batch, n, vocabulary)``. The weights ``(batch, h, n, m)`` of an
    attention module are stored under its name followed by ``.attn``.

    Args:
        model: The model, run in its current mode (training or evaluation).
        batch: A batch with a target, which the decoder reads.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, _: Any, output: Tensor) -> None:
        found[name] = output.detach()
        if isinstance(module, MultiHeadedAttention) and module.attn is not None:
            found[f"{name}.attn"] = module.attn

    batch = batch.to(next(model.parameters()).device)
    named = [(name, module) for name, module in model.named_modules() if name]
    hooks = [module.register_forward_hook(partial(keep, name)) for name, module in named]
    try:
        model.generator(model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask))
    finally:
        for hook in hooks:
            hook.remove()
    return found


# --- files -----------------------------------------------------------------------------------


def dequantize(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return float32 weights, where a matrix may be stored as 8-bit integers and its scale."""
    found = {}
    for name, tensor in stored.items():
        if f"{name}.scale" in stored:
            found[name] = tensor.float() * stored[f"{name}.scale"].unsqueeze(1)
        elif not name.endswith(".scale"):
            found[name] = tensor
    return found


def load_pretrained(folder: str | Path = FOLDER) -> Pretrained:
    """Load the model that comes with the package. Nothing in its files can run code.

    Args:
        folder: Where the files are.

    Raises:
        PretrainedError: If a file is missing or damaged.
        ModuleNotFoundError: The extra ``translation`` is not installed.
    """
    data = read_files(Path(folder))
    try:  # importing this module needs PyTorch alone
        import safetensors.torch

        import annotated_transformer.translation.tokenizers  # noqa: F401
    except ModuleNotFoundError as error:
        hint = f'{error.name}: install this package with its extra "translation"'
        raise ModuleNotFoundError(f"load_pretrained needs {hint}", name=error.name) from error
    try:
        with torch.random.fork_rng(devices=[]):  # first weights are drawn, and replaced
            return build_from_files(data, safetensors.torch.load(data["model.safetensors"]))
    except Exception as error:  # safetensors and tokenizers raise exceptions of their own
        raise damaged_error(folder, " ".join(str(error).split()) or type(error).__name__) from None


def build_from_files(data: Mapping[str, bytes], stored: Mapping[str, Tensor]) -> Pretrained:
    """Build the model from its files and stored tensors; any exception means damage."""
    from annotated_transformer.translation.tokenizers import BPETokenizer, tokenizer_from_json

    config = json.loads(data["config.json"])
    if config["format"] != FORMAT:
        raise ValueError(f"format {config['format']!r} is unknown")
    tokenizer, sizes = tokenizer_from_json(data["tokenizer.json"].decode()), config["model"]
    if not isinstance(tokenizer, BPETokenizer):
        raise ValueError("tokenizer.json holds no byte-pair encoding")
    model = build_model(len(tokenizer), len(tokenizer), ModelConfig(**sizes))
    weights, own = dequantize(stored), dict(model.named_parameters())
    if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in weights.items()}:
        raise ValueError("the weights do not match config.json")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
    words = json.loads(data["words.json"]).items()
    known = {language: frozenset(found) for language, found in words}
    return Pretrained(model.eval(), ModelConfig(**sizes), tokenizer, known)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files, after comparing each with its SHA-256 digest."""
    try:
        sums = (folder / SUMS).read_text(encoding="utf-8", errors="replace")
        lines = (line.split(maxsplit=1) for line in sums.splitlines())
        digests = {name: digest for digest, name in lines}
        data = {name: (folder / name).read_bytes() for name in FILES}
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise PretrainedError(f"{error.filename}: {reason}; {REMEDY}") from None
    except ValueError:
        raise damaged_error(folder / SUMS, "not a list of digests") from None
    for name, content in data.items():
        if hashlib.sha256(content).hexdigest() != digests.get(name):
            raise damaged_error(folder / name, f"its digest differs from that in {SUMS}")
    return data


REMEDY = "reinstall annotated-transformer, or open a system of your own by load_system"


def damaged_error(path: str | Path, reason: object) -> PretrainedError:
    """Return the error for a damaged file."""
    return PretrainedError(f"{path}: damaged ({reason}); {REMEDY}")
