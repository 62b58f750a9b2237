"""Export to ONNX: an encoder, and one step of the decoder with its KV caches, for onnxruntime.

Both graphs are traced from the readable layer, so every Transformer of ours can be exported.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx  # noqa: F401  # torch.onnx needs both, and a missing one is named
import onnxscript  # noqa: F401
import torch
from torch import Tensor, nn
from torch.export import Dim

from annotated_transformer.engine.system import System
from annotated_transformer.interop.folders import (
    card,
    has_sub_words,
    save_tokenizers,
    transformer_config,
    whole_folder,
)
from annotated_transformer.model.architecture import EncoderDecoder, Generator
from annotated_transformer.model.attention import attention
from annotated_transformer.model.embeddings import PositionalEncoding
from annotated_transformer.model.multi_head import MultiHeadedAttention, padding_mask, split_heads
from annotated_transformer.model.transformer import count_parameters
from annotated_transformer.notation import BOS, EOS, PAD

TARGET = "onnx"
ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
MOST_BYTES = 1_800_000_000  # a file of ONNX holds 2 GB; beyond, weights get a file of their own
USE = """
# pip install numpy onnxruntime tokenizers
import numpy as np, onnxruntime, tokenizers

tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
encoder, decoder = (onnxruntime.InferenceSession(f"{name}.onnx") for name in ("encoder", "decoder"))
source = np.array([tokenizer.encode("…").ids])
memory = dict(zip([x.name for x in encoder.get_outputs()], encoder.run(None, {"source": source})))
caches = {x.name: np.zeros((1, x.shape[1], 0, x.shape[3]), np.float32)
          for x in decoder.get_inputs() if x.name.startswith("past.")}
tokens = [1]  # it begins a sentence, 2 ends one
while tokens[-1] != 2 and len(tokens) < source.size + 50:
    inputs = {"source": source, "token": np.array(tokens[-1:]), **caches, **memory}
    logits, *present = decoder.run(None, inputs)
    tokens.append(int(logits.argmax()))
    caches = dict(zip(caches, present))
print(tokenizer.decode(tokens))
"""
USE_WORDS = """
from annotated_transformer.interop.onnx import OnnxTranslator
from annotated_transformer.translation.tokenizers import load_tokenizer

source, target = load_tokenizer("source.json"), load_tokenizer("target.json")
(found,) = OnnxTranslator(".").greedy([[*source.encode("…"), 2]])  # 2 ends a sentence
print(target.decode(found))
"""
LOST = (
    "Each graph stores what it needs: an embedding that both languages share is in both files. "
    "The search is not part of the graphs. Training cannot go on from here."
)


def export_onnx(system: System, out: Path, *, record: Mapping[str, Any] | None = None) -> None:
    """Write a system as two graphs, see :class:`EncoderGraph` and :class:`StepGraph`.

    Args:
        system: A Transformer of any sizes.
        out: The folder; see :func:`annotated_transformer.interop.folders.whole_folder`.
        record: The record of the run, for the card.

    Raises:
        ExportError: The system is no Transformer.
        FileError: The folder cannot be written, or holds something else.
    """
    config, model = transformer_config(system, TARGET), system.model
    source, token = torch.full((2, 3), EOS), torch.full((2,), BOS)
    encoder, step = EncoderGraph(model).eval(), StepGraph(model).eval()
    memory = encoder(source)
    past = [x[:, :, :2] for x in memory]  # two positions: sizes of 0 and 1 would be taken as fixed
    most = config.max_len
    batch, width, length = Dim("batch"), Dim("source_length", max=most), Dim("length", max=most - 1)
    of_memory, of_past = ([{0: batch, 2: size}] * len(memory) for size in (width, length))
    names = [f"{layer}.{kind}" for layer in range(config.N) for kind in ("keys", "values")]
    kept = [f"memory.{name}" for name in names]
    with whole_folder(out, to=TARGET, precision="float32") as folder:
        _write(encoder, (source,), folder / ENCODER, ["source"], kept, ({0: batch, 1: width},))
        _write(
            step, (source, token, past, memory), folder / DECODER,
            ["source", "token", *(f"past.{name}" for name in names), *kept],
            ["logits", *(f"present.{name}" for name in names)],
            ({0: batch, 1: width}, {0: batch}, of_past, of_memory),
        )  # fmt: skip
        save_tokenizers(system, folder, ends=True)
        use = USE if has_sub_words(system) else USE_WORDS
        (folder / "README.md").write_text(card(system, record, use, LOST), encoding="utf-8")


def _write(
    graph: nn.Module, sample: tuple[Any, ...], path: Path,
    inputs: list[str], outputs: list[str], shapes: tuple[Any, ...],
) -> None:  # fmt: skip
    """Trace a module and write it."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it says which packages are not installed, and not needed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's, of its own internals
            torch.onnx.export(
                graph, sample, path, input_names=inputs, output_names=outputs, verbose=False,
                dynamic_shapes=shapes, external_data=4 * count_parameters(graph) > MOST_BYTES,
            )  # fmt: skip
    finally:
        logger.setLevel(level)


class EncoderGraph(nn.Module):
    """The encoder, and all that the decoder computes once for a sentence.

    Inputs: ``source (batch, m)``, ids that end in the end symbol, padded. Outputs, for each layer
    of the decoder: keys ``(batch, h, m, d_k)`` and values ``(batch, h, m, d_v)`` of the memory.
    """

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor) -> list[Tensor]:
        """Encode ``source (batch, m)``; return keys and values, layer by layer."""
        memory = self.model.encode(source, padding_mask(source, PAD))
        found = []
        for layer in cast(Any, self.model.decoder).layers:
            _, w_k, w_v, _ = layer.src_attn.linears
            found += [split_heads(w(memory), layer.src_attn.h) for w in (w_k, w_v)]
        return found


class StepGraph(nn.Module):
    """One step of the decoder, for the newest position.

    Inputs: ``source`` as the encoder's, ``token (batch,)``, the newest tokens; keys and values of
    the ``n`` positions before, ``(batch, h, n, d_k)`` and ``(batch, h, n, d_v)``, where ``n`` is 0
    at first; those of the memory. Outputs: ``logits (batch, vocabulary)``, and keys and values of
    all ``n + 1`` positions.
    """

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, source: Tensor, token: Tensor, past: list[Tensor], memory: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Decode ``token (batch,)`` after what is in the caches."""
        words, places = cast(nn.Sequential, self.model.tgt_embed)
        n, mask = past[0].size(2), padding_mask(source, PAD).unsqueeze(1)
        x = words(token.unsqueeze(1)) + cast(PositionalEncoding, places).pe[:, n : n + 1]
        present: list[Tensor] = []
        decoder = cast(Any, self.model.decoder)
        for i, layer in enumerate(decoder.layers):
            own, caches = layer.self_attn, past[2 * i : 2 * i + 2]

            def to_target(
                x: Tensor, own: MultiHeadedAttention = own, caches: Sequence[Tensor] = caches
            ) -> Tensor:
                w_q, *others, w_o = own.linears
                new = (split_heads(w(x), own.h) for w in others)
                keys, values = (torch.cat(p, 2) for p in zip(caches, new, strict=True))
                present.extend([keys, values])
                y, _ = attention(split_heads(w_q(x), own.h), keys, values)
                return cast(Tensor, w_o(y.transpose(1, 2).flatten(2)))

            def to_source(
                x: Tensor,
                own: MultiHeadedAttention = layer.src_attn,
                keys: Tensor = memory[2 * i],
                values: Tensor = memory[2 * i + 1],
            ) -> Tensor:
                w_q, _, _, w_o = own.linears
                y, _ = attention(split_heads(w_q(x), own.h), keys, values, mask)
                return cast(Tensor, w_o(y.transpose(1, 2).flatten(2)))

            x = layer.sublayer[0](x, to_target)
            x = layer.sublayer[1](x, to_source)
            x = layer.sublayer[2](x, layer.feed_forward)
        proj = cast(Generator, self.model.generator).proj
        return proj(decoder.norm(x))[:, 0], present


class OnnxTranslator:
    """Greedy decoding of several sentences with both graphs, by NumPy and onnxruntime.

    Args:
        folder: The folder that :func:`export_onnx` has written.
        threads: Threads of each session; 0 lets onnxruntime choose.
    """

    def __init__(self, folder: str | Path, *, threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(
                Path(folder) / name, options, providers=["CPUExecutionProvider"]
            )
            for name in (ENCODER, DECODER)
        )

    def no_past(self, batch: int) -> dict[str, Any]:
        """Return the caches before the first position, each ``(batch, h, 0, d)``."""
        return {
            x.name: np.zeros((batch, x.shape[1], 0, x.shape[3]), np.float32)
            for x in self.decoder.get_inputs()
            if x.name.startswith("past.")
        }

    def greedy(
        self, sources: Sequence[Sequence[int]], most: int = 250, *, extra: int = 50
    ) -> list[list[int]]:
        """Translate sentences of ids, each with its end symbol; return ids without one.

        Args:
            sources: Ids of the sentences.
            most: Maximum tokens of an output.
            extra: How many tokens an output may exceed its source by, end symbols not counted.
        """
        lengths = np.array([len(source) for source in sources])
        limits = np.minimum(most, lengths - 1 + extra)
        source = np.full((len(sources), lengths.max()), PAD)
        for row, ids in zip(source, sources, strict=True):
            row[: len(ids)] = ids
        names = [output.name for output in self.encoder.get_outputs()]
        memory = dict(zip(names, self.encoder.run(None, {"source": source}), strict=True))
        caches = self.no_past(len(source))
        token, ended = np.full(len(source), BOS), np.zeros(len(source), bool)
        found: list[list[int]] = [[] for _ in sources]
        for position in range(int(limits.max())):
            fed = {"source": source, "token": token, **caches, **memory}
            logits, *present = self.decoder.run(None, fed)
            token = logits.argmax(-1)
            ended |= (token == EOS) | (limits <= position)
            for row in np.flatnonzero(~ended):
                found[row].append(int(token[row]))
            if ended.all():
                break
            caches = dict(zip(caches, present, strict=True))
        return found
