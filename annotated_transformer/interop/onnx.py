"""Export to ONNX: an encoder, and one step of the decoder with its KV caches, for onnxruntime.

Both graphs are written node by node, from the modules of the readable layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from annotated_transformer.engine.system import System
from annotated_transformer.interop import folders
from annotated_transformer.model.architecture import EncoderDecoder, Generator, LayerNorm
from annotated_transformer.model.transformer import count_parameters
from annotated_transformer.notation import BOS, EOS, PAD

TARGET = "onnx"
ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
MOST_BYTES = 1_800_000_000  # a file of ONNX holds 2 GB; beyond, weights get a file of their own
OPSET, IR_VERSION = 17, 8  # the first operators with LayerNormalization, and their file format
Shapes: TypeAlias = dict[str, list[int | str]]
USE = """
# pip install numpy onnxruntime tokenizers
import numpy as np, onnxruntime, tokenizers

tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
tokenizer.encode_special_tokens = True  # "</s>" in a text is text
encoder, decoder = (onnxruntime.InferenceSession(f"{name}.onnx") for name in ("encoder", "decoder"))
source = np.array([tokenizer.encode("…").ids])
memory = dict(zip([x.name for x in encoder.get_outputs()], encoder.run(None, {"source": source})))
caches = {x.name: np.zeros((1, x.shape[1], 0, x.shape[3]), np.float32)
          for x in decoder.get_inputs() if x.name.startswith("past.")}
tokens = [1]  # it begins a sentence, 2 ends one
while tokens[-1] != 2 and len(tokens) <= min(source.size + 49, MOST):  # it has MOST positions
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
    """Write a system as two graphs, see :func:`encoder_graph` and :func:`step_graph`.

    Args:
        system: A Transformer of any sizes.
        out: The folder; see :func:`annotated_transformer.interop.folders.whole_folder`.
        record: The record of the run, for the card.

    Raises:
        ExportError: The system is no Transformer.
        FileError: The folder cannot be written, or holds something else.
    """
    folders.transformer_config(system, TARGET)
    model, big = system.model, 4 * count_parameters(system.model) > MOST_BYTES
    with folders.whole_folder(out, to=TARGET, precision="float32") as folder:
        for name, graph in ((ENCODER, encoder_graph), (DECODER, step_graph)):
            own: Any = {"location": f"{name}.data"}  # where one file would not hold the weights
            onnx.save(graph(model), folder / name, save_as_external_data=big, **own)
        folders.save_tokenizers(system, folder, ends=True)
        use = USE if folders.has_sub_words(system) else USE_WORDS
        card = folders.model_card(system, record, use.replace("MOST", str(_positions(model))), LOST)
        (folder / "README.md").write_text(card, encoding="utf-8")


class _Graph:
    """A growing graph: each method adds nodes, and returns the name of what the last one gives."""

    def __init__(self, model: EncoderDecoder) -> None:
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, Tensor] = {}
        real = self.add("Not", self.add("Equal", "source", torch.tensor(PAD)))
        self.mask = self.add("Unsqueeze", real, torch.tensor([1, 2]))  # (batch, 1, 1, m)

    def add(self, kind: str, *inputs: str | Tensor, output: str = "", **options: Any) -> str:
        """Add a node; tensors among its inputs are stored with the graph."""
        names = []
        for x in inputs:
            if isinstance(x, Tensor):
                name = self.names.get(x, f"constant.{len(self.weights)}")
                self.weights[name] = x.detach().float() if x.is_floating_point() else x
                x = name
            names.append(x)
        output = output or f"{kind}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, names, [output], **options))
        return output

    def embed(self, stack: Any, tokens: str, start: str | Tensor, end: str) -> str:
        """Look up ``tokens (batch, n)`` and add the positions from ``start`` to ``end``."""
        words, places = stack
        x = self.add("Gather", words.lut.weight, tokens)
        x = self.add("Mul", x, torch.tensor(math.sqrt(words.d_model)))
        return self.add("Add", x, self.add("Slice", places.pe, start, end, torch.tensor([1])))

    def linear(self, x: str, layer: nn.Linear) -> str:
        x = self.add("MatMul", x, self.add("Transpose", layer.weight))
        return self.add("Add", x, layer.bias)

    def normalize(self, x: str, layer: nn.Module) -> str:
        if not isinstance(layer, LayerNorm):  # at the end of a post-norm stack
            return x
        return self.add("LayerNormalization", x, layer.weight, layer.bias, epsilon=layer.eps)

    def heads(self, x: str, layer: nn.Linear, h: int, output: str = "") -> str:
        """Project to ``(batch, n, h * d)`` and cut into ``(batch, h, n, d)``."""
        x = self.add("Reshape", self.linear(x, layer), torch.tensor([0, 0, h, -1]))
        return self.add("Transpose", x, perm=[0, 2, 1, 3], output=output)

    def attend(self, x: str, own: Any, keys: str, values: str, mask: str = "") -> str:
        """Attend from ``x`` to keys and values that are already cut into heads."""
        queries = self.heads(x, own.linears[0], own.h)
        scores = self.add("MatMul", queries, self.add("Transpose", keys, perm=[0, 1, 3, 2]))
        scores = self.add("Div", scores, torch.tensor(math.sqrt(own.d_k)))
        if mask:
            scores = self.add("Where", mask, scores, torch.tensor(-math.inf))
        weights = self.add("Softmax", scores, axis=-1)
        if mask:  # a row of minus infinities has no softmax
            weights = self.add("Where", mask, weights, torch.tensor(0.0))
        mixed = self.add("Transpose", self.add("MatMul", weights, values), perm=[0, 2, 1, 3])
        return self.linear(self.add("Reshape", mixed, torch.tensor([0, 0, -1])), own.linears[3])

    def residual(self, x: str, around: Any, sublayer: Callable[[str], str]) -> str:
        """Add a sub-layer's output, with the norm before or after."""
        if around.order == "pre":
            return self.add("Add", x, sublayer(self.normalize(x, around.norm)))
        return self.normalize(self.add("Add", x, sublayer(x)), around.norm)

    def feed_forward(self, x: str, layer: Any) -> str:
        """Apply the feed-forward network of a layer in its residual connection."""
        own = layer.feed_forward
        return self.residual(
            x, layer.sublayer[-1],
            lambda x: self.linear(self.add("Relu", self.linear(x, own.w_1)), own.w_2),
        )  # fmt: skip

    def model(self, inputs: Shapes, outputs: Shapes) -> onnx.ModelProto:
        """Return the whole; weights keep their names and shapes."""
        kinds = dict.fromkeys(("source", "token"), onnx.TensorProto.INT64)
        ends = [
            helper.make_tensor_value_info(name, kinds.get(name, onnx.TensorProto.FLOAT), shape)
            for name, shape in (inputs | outputs).items()
        ]
        graph = helper.make_graph(
            self.nodes, "transformer", ends[: len(inputs)], ends[len(inputs) :],
            [numpy_helper.from_array(w.cpu().numpy(), name) for name, w in self.weights.items()],
        )  # fmt: skip
        opset = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION)


def _positions(model: EncoderDecoder) -> int:
    """Return the number of the decoder's positions, the most tokens of an output."""
    return int(cast(Any, model.tgt_embed)[1].pe.size(1))


def _caches(model: EncoderDecoder, kind: str, length: str) -> Shapes:
    """Return the names and shapes of keys and values, layer by layer."""
    owns = enumerate(layer.self_attn for layer in cast(Any, model.decoder).layers)
    return {f"{kind}.{i}.{name}": ["batch", own.h, length, getattr(own, width)]
            for i, own in owns for name, width in (("keys", "d_k"), ("values", "d_v"))}  # fmt: skip


def encoder_graph(model: EncoderDecoder) -> onnx.ModelProto:
    """Return the encoder, and all that the decoder computes once for a sentence.

    Inputs: ``source (batch, m)``, ids that end in the end symbol, padded. Outputs, for each layer
    of the decoder: keys ``(batch, h, m, d_k)`` and values ``(batch, h, m, d_v)`` of the memory.
    """
    graph, encoder, decoder = _Graph(model), cast(Any, model.encoder), cast(Any, model.decoder)
    length = graph.add("Shape", "source", start=1, end=2)
    x = graph.embed(model.src_embed, "source", torch.tensor([0]), length)
    for layer in encoder.layers:

        def attend(x: str, own: Any = layer.self_attn) -> str:
            keys, values = (graph.heads(x, w, own.h) for w in own.linears[1:3])
            return graph.attend(x, own, keys, values, graph.mask)

        x = graph.feed_forward(graph.residual(x, layer.sublayer[0], attend), layer)
    x = graph.normalize(x, encoder.norm)
    for i, layer in enumerate(decoder.layers):
        for name, w in zip(("keys", "values"), layer.src_attn.linears[1:3], strict=True):
            graph.heads(x, w, layer.src_attn.h, output=f"memory.{i}.{name}")
    width = "source_length"
    return graph.model({"source": ["batch", width]}, _caches(model, "memory", width))


def step_graph(model: EncoderDecoder) -> onnx.ModelProto:
    """Return one step of the decoder, for the newest position.

    Inputs: ``source`` as the encoder's, ``token (batch,)``, the newest tokens; keys and values of
    the ``n`` positions before, ``(batch, h, n, d_k)`` and ``(batch, h, n, d_v)``, where ``n`` is 0
    at first; those of the memory. Outputs: ``logits (batch, vocabulary)``, and keys and values of
    all ``n + 1`` positions.
    """
    graph, decoder, one = _Graph(model), cast(Any, model.decoder), torch.tensor([1])
    n = graph.add("Shape", "past.0.keys", start=2, end=3)
    token = graph.add("Unsqueeze", "token", one)
    x = graph.embed(model.tgt_embed, token, n, graph.add("Add", n, one))
    for i, layer in enumerate(decoder.layers):

        def to_target(x: str, own: Any = layer.self_attn, i: int = i) -> str:
            keys, values = (
                graph.add("Concat", f"past.{i}.{name}", graph.heads(x, w, own.h), axis=2,
                          output=f"present.{i}.{name}")
                for name, w in zip(("keys", "values"), own.linears[1:3], strict=True)
            )  # fmt: skip
            return graph.attend(x, own, keys, values)

        def to_source(x: str, own: Any = layer.src_attn, memory: str = f"memory.{i}") -> str:
            return graph.attend(x, own, f"{memory}.keys", f"{memory}.values", graph.mask)

        x = graph.residual(x, layer.sublayer[0], to_target)
        x = graph.feed_forward(graph.residual(x, layer.sublayer[1], to_source), layer)
    x = graph.add("Squeeze", graph.normalize(x, decoder.norm), one)
    proj = cast(Generator, model.generator).proj
    graph.add("Gemm", x, proj.weight, proj.bias, transB=1, output="logits")
    inputs: Shapes = {"source": ["batch", "source_length"], "token": ["batch"]}
    inputs |= _caches(model, "past", "length") | _caches(model, "memory", "source_length")
    present = _caches(model, "present", "length_and_one")
    step = graph.model(inputs, {"logits": ["batch", proj.out_features], **present})
    helper.set_model_props(step, {"max_len": str(_positions(model))})
    return step


class OnnxTranslator:
    """Greedy decoding of several sentences with both graphs, by NumPy and onnxruntime.

    Args:
        folder: The folder that :func:`export_onnx` has written.
        threads: Threads of each session; 0 lets onnxruntime choose.
    """

    def __init__(self, folder: str | Path, *, threads: int = 0) -> None:
        import onnxruntime

        options, where = onnxruntime.SessionOptions(), ["CPUExecutionProvider"]
        options.intra_op_num_threads = threads
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(Path(folder) / name, options, providers=where)
            for name in (ENCODER, DECODER)
        )
        self.max_len = int(self.decoder.get_modelmeta().custom_metadata_map.get("max_len", 250))

    def no_past(self, batch: int) -> dict[str, Any]:
        """Return the caches before the first position, each ``(batch, h, 0, d)``."""
        return {
            x.name: np.zeros((batch, x.shape[1], 0, x.shape[3]), np.float32)
            for x in self.decoder.get_inputs()
            if x.name.startswith("past.")
        }

    def greedy(
        self, sources: Sequence[Sequence[int]], most: int | None = None, *, extra: int = 50
    ) -> list[list[int]]:
        """Translate sentences of ids, each with its end symbol; return ids without one.

        Args:
            sources: Ids of the sentences.
            most: Maximum tokens of an output; never more than the model has positions.
            extra: How many tokens an output may exceed its source by, end symbols not counted.
        """
        if not sources:
            return []
        lengths = np.array([len(source) for source in sources])
        most = self.max_len if most is None else min(most, self.max_len)
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
