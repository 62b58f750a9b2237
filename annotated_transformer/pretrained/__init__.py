"""The small model that comes with the package: it translates the book's grammar, both ways.

One Transformer, with layer normalization after each residual sum as the paper prints it, reads
German and writes English, or the reverse: which language it reads decides. The book follows one
sentence through it, ``RUNNING``. ``python -m benchmarks.pretrained`` makes the model, and
``results/pretrained/model.json`` is the record.

Five files lie in this folder. ``config.json`` has the sizes of the model. ``tokenizer.json`` has
the merges of the byte pair encoding, in the order in which they were learned. ``words.json`` lists
the words of the training text, by language. ``model.safetensors`` has the weights under their names
in the state dict; the matrix that both embeddings and the generator share is there once, as
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
    from annotated_transformer.translation.tokenizers import BPETokenizer

FOLDER = Path(__file__).parent
FILES = ("config.json", "tokenizer.json", "words.json", "model.safetensors")
SUMS = "sha256sums.txt"
FORMAT = 1
RUNNING = grammar_pairs("test", 1, seed=32_624)[0]  # the sentence that the whole book follows
WORD = re.compile(r"\w+")


class PretrainedError(ValueError):
    """The stored model cannot be read; the message names the file and the remedy, in one line."""


@dataclass(frozen=True)
class Pretrained:
    """The stored model, in evaluation mode, with what it needs to read and write sentences.

    Attributes:
        model: The readable Transformer.
        config: Its sizes.
        tokenizer: Sub-words, the same for both languages.
        words: The words that it was trained on, by language.
    """

    model: EncoderDecoder
    config: ModelConfig
    tokenizer: BPETokenizer
    words: Mapping[str, frozenset[str]]

    @property
    def tokenizers(self) -> tuple[BPETokenizer, BPETokenizer]:
        """The tokenizers of source and target, which are one."""
        return self.tokenizer, self.tokenizer

    def batch(self, source: str, target: str) -> Batch:
        """Return a batch of one pair: ``src (1, m)``, ``tgt`` and ``tgt_y (1, n)``, and masks."""
        return make_batch([self.tokenizer.encode(source)], [self.tokenizer.encode(target)])

    def labels(self, text: str, *, target: bool = False) -> list[str]:
        """Return the tokens that the encoder reads, or that the decoder reads, for figures."""
        ids = self.tokenizer.encode(text)
        return self.tokenizer.tokens([BOS, *ids] if target else [*ids, EOS])

    def translate(self, text: str) -> str:
        """Return the translation of a sentence, decoded greedily."""
        (found,) = greedy_search(self.model, [self.tokenizer.encode(text)])
        return self.tokenizer.decode(found)

    def unknown(self, text: str) -> list[str]:
        """Return the words of a text that were never seen in training, in their order.

        The first letter of the text may be a capital where the word has none.
        """
        known = frozenset[str]().union(*self.words.values())
        found = WORD.findall(text)
        lowered = [word[0].lower() + word[1:] for word in found[:1]]
        return [
            word
            for word, other in zip(found, [*lowered, *found[1:]], strict=True)
            if word not in known and other not in known
        ]

    def trace(self, source: str, target: str) -> dict[str, Tensor]:
        """Let the model read a pair, and return what each of its parts computes, by its name."""
        batch = self.batch(source, target)
        return trace(self.model, batch)


@torch.no_grad()
def trace(model: EncoderDecoder, batch: Batch) -> dict[str, Tensor]:
    """Let a model read a batch, and return the output of every module, by its name.

    ``encoder.layers.0.self_attn.linears.0`` is the first encoder layer's queries before they are
    split into heads, ``encoder.layers.0.sublayer.0`` the residual stream after its attention,
    ``generator.proj`` the logits ``(batch, n, vocabulary)``. The weights of an attention
    ``(batch, h, n, m)`` stand under its name and ``.attn``.

    Args:
        model: Is run in the mode that it is in.
        batch: With a target, which the decoder reads.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, _: Any, output: Tensor) -> None:
        found[name] = output.detach()
        if isinstance(module, MultiHeadedAttention) and module.attn is not None:
            found[f"{name}.attn"] = module.attn

    named = [(name, module) for name, module in model.named_modules() if name]
    hooks = [module.register_forward_hook(partial(keep, name)) for name, module in named]
    try:
        model.generator(model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask))
    finally:
        for hook in hooks:
            hook.remove()
    return found


# --- files -----------------------------------------------------------------------------------


def quantise(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices as 8-bit integers with a scale for each row; vectors as they are."""
    found = {}
    for name, tensor in weights.items():
        if tensor.dim() < 2:
            found[name] = tensor.detach().float().clone()
            continue
        scale = tensor.detach().float().abs().amax(dim=1).clamp_min(1e-12) / 127
        found[name] = (tensor.detach().float() / scale.unsqueeze(1)).round().to(torch.int8)
        found[f"{name}.scale"] = scale
    return found


def dequantise(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights in float32 that :func:`quantise` has stored."""
    found = {}
    for name, tensor in stored.items():
        if f"{name}.scale" in stored:
            found[name] = tensor.float() * stored[f"{name}.scale"].unsqueeze(1)
        elif not name.endswith(".scale"):
            found[name] = tensor
    return found


def load_pretrained(folder: str | Path = FOLDER) -> Pretrained:
    """Load the model that comes with the package; nothing in its files can run code.

    Args:
        folder: Where the files are.

    Raises:
        PretrainedError: A file is missing or damaged.
    """
    data = read_files(Path(folder))
    import safetensors.torch  # importing this module needs PyTorch alone

    import annotated_transformer.translation.tokenizers  # noqa: F401  # and a missing one is named

    try:
        with torch.random.fork_rng(devices=[]):  # first weights are drawn, and replaced
            return build(data, safetensors.torch.load(data["model.safetensors"]))
    except Exception as error:  # safetensors and tokenizers raise exceptions of their own
        raise damaged(folder, " ".join(str(error).split()) or type(error).__name__) from None


def build(data: Mapping[str, bytes], stored: Mapping[str, Tensor]) -> Pretrained:
    """Return what the files say; any exception means that they are wrong.

    Args:
        data: The contents of the files.
        stored: The tensors of the last of them.
    """
    from annotated_transformer.translation.tokenizers import BPETokenizer, tokenizer_from_json

    config = json.loads(data["config.json"])
    if config["format"] != FORMAT:
        raise ValueError(f"format {config['format']!r} is unknown")
    tokenizer, sizes = tokenizer_from_json(data["tokenizer.json"].decode()), config["model"]
    if not isinstance(tokenizer, BPETokenizer):
        raise ValueError("the tokenizer is of another kind")
    model = build_model(len(tokenizer), len(tokenizer), ModelConfig(**sizes))
    weights, own = dequantise(stored), dict(model.named_parameters())
    if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in weights.items()}:
        raise ValueError("the weights do not fit the configuration")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
    words = json.loads(data["words.json"]).items()
    known = {language: frozenset(found) for language, found in words}
    return Pretrained(model.eval(), ModelConfig(**sizes), tokenizer, known)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files, each compared with its digest."""
    try:
        sums = (folder / SUMS).read_text(encoding="utf-8", errors="replace")
        lines = (line.split(maxsplit=1) for line in sums.splitlines())
        digests = {name: digest for digest, name in lines}
        data = {name: (folder / name).read_bytes() for name in FILES}
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise PretrainedError(f"{error.filename}: {reason}; {REMEDY}") from None
    except ValueError:
        raise damaged(folder / SUMS, "not a list of digests") from None
    for name, content in data.items():
        if hashlib.sha256(content).hexdigest() != digests.get(name):
            raise damaged(folder / name, f"its digest is not that in {SUMS}")
    return data


REMEDY = "install the package again"


def damaged(path: str | Path, reason: object) -> PretrainedError:
    """Return the error for a file whose contents are wrong."""
    return PretrainedError(f"{path}: damaged ({reason}); {REMEDY}")
