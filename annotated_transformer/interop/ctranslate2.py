"""Export to CTranslate2: the specification of its Transformer, filled with our weights.

Written from the specification itself. Through Hugging Face, which CTranslate2 also reads, the last
row of the vocabulary and the start symbol would change.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import ctranslate2
import torch
from torch import Tensor, nn

from annotated_transformer.engine.system import System
from annotated_transformer.interop import folders
from annotated_transformer.model.architecture import EncoderDecoder, LayerNorm
from annotated_transformer.model.multi_head import MultiHeadedAttention
from annotated_transformer.model.transformer import ModelConfig

Precision = Literal["float32", "bfloat16", "int8"]
TARGET = "ctranslate2"
USE = """
# pip install ctranslate2 tokenizers
import ctranslate2, tokenizers

tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
tokenizer.encode_special_tokens = True  # "</s>" in a text is text
translator = ctranslate2.Translator(".")
tokens = tokenizer.encode("…", add_special_tokens=False).tokens
limits = {"max_input_length": 0, "max_decoding_length": MOST}
(found,) = translator.translate_batch([tokens], beam_size=1, **limits)
print(tokenizer.decode([tokenizer.token_to_id(token) for token in found.hypotheses[0]]))
"""
USE_WORDS = """
import ctranslate2
from annotated_transformer.interop.folders import token_strings
from annotated_transformer.translation.tokenizers import load_tokenizer

source, target = load_tokenizer("source.json"), load_tokenizer("target.json")
translator = ctranslate2.Translator(".")
tokens = [token_strings(source)[number] for number in source.encode("…")]
limits = {"max_input_length": 0, "max_decoding_length": MOST}
(found,) = translator.translate_batch([tokens], beam_size=1, **limits)
print(target.decode([token_strings(target).index(token) for token in found.hypotheses[0]]))
"""
LOST = (
    "Beam search divides the log-probability by length^α, and not by ((5 + length) / 6)^α as the "
    "paper does, and no output is limited to 50 tokens more than its source; other greedy outputs "
    "are the same. At most 256 tokens are generated unless `max_decoding_length` says otherwise, "
    "and at least one. More tokens than the model has positions are an error with "
    "`max_input_length=0`; without it, input is cut at 1,024. Training cannot go on from here."
)


def export_ctranslate2(
    system: System,
    out: Path,
    *,
    precision: Precision = "float32",
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write a system as CTranslate2 reads it.

    Args:
        system: A Transformer of any norm order, kind of positions and tying.
        out: The folder; see :func:`annotated_transformer.interop.folders.whole_folder`.
        precision: Precision of the stored weights; with ``int8`` each row of a matrix has a scale.
        record: The record of the run, for the card.

    Raises:
        ExportError: CTranslate2 cannot express the model.
        FileError: The folder cannot be written, or holds something else.
    """
    config = folders.transformer_config(system, TARGET)
    folders.check_heads(config, TARGET)
    spec = model_spec(system, config)
    with folders.whole_folder(out, to=TARGET, precision=precision) as folder:
        spec.validate()
        spec.optimize(quantization=precision)  # equal matrices become one
        spec.save(str(folder))
        folders.save_tokenizers(system, folder, ends=False)
        use = USE if folders.has_sub_words(system) else USE_WORDS
        use = use.replace("MOST", str(min(256, config.max_len)))
        card = folders.model_card(system, record, use, LOST)
        (folder / "README.md").write_text(card, encoding="utf-8")


def model_spec(system: System, config: ModelConfig) -> Any:
    """Return CTranslate2's specification of a model, with its weights and vocabularies."""
    model: EncoderDecoder = system.model
    layers, pre = (config.N, config.N), config.norm == "pre"
    spec = ctranslate2.specs.TransformerSpec.from_config(layers, config.h, pre_norm=pre)
    spec.config.add_source_eos = True
    spec.register_source_vocabulary(folders.token_strings(system.tokenizers[0]))
    spec.register_target_vocabulary(folders.token_strings(system.tokenizers[1]))
    source, target = _embedding(model.src_embed), _embedding(model.tgt_embed)
    spec.encoder.embeddings[0].weight, spec.encoder.position_encodings.encodings = source
    spec.decoder.embeddings.weight, spec.decoder.position_encodings.encodings = target
    _linear(spec.decoder.projection, model.generator.get_submodule("proj"))
    for stack, ours in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        if pre:
            _norm(stack.layer_norm, cast(LayerNorm, ours.norm))
        for into, layer in zip(stack.layer, cast(Any, ours.layers), strict=True):
            _layer(into, layer)
    return spec


def _layer(into: Any, layer: Any) -> None:
    """Fill the specification of an encoder or decoder layer."""
    norms = [connection.norm for connection in layer.sublayer]
    w_q, w_k, w_v, w_o = cast(MultiHeadedAttention, layer.self_attn).linears
    _linear(into.self_attention.linear[0], w_q, w_k, w_v)
    _linear(into.self_attention.linear[1], w_o)
    _norm(into.self_attention.layer_norm, norms[0])
    if len(norms) == 3:
        w_q, w_k, w_v, w_o = cast(MultiHeadedAttention, layer.src_attn).linears
        _linear(into.attention.linear[0], w_q)
        _linear(into.attention.linear[1], w_k, w_v)
        _linear(into.attention.linear[2], w_o)
        _norm(into.attention.layer_norm, norms[1])
    _linear(into.ffn.linear_0, layer.feed_forward.w_1)
    _linear(into.ffn.linear_1, layer.feed_forward.w_2)
    _norm(into.ffn.layer_norm, norms[-1])


def _linear(into: Any, *layers: nn.Module) -> None:
    """Fill a projection with the rows of one or more of ours, one below the other."""
    into.weight = _plain(torch.cat([layer.get_parameter("weight") for layer in layers]))
    into.bias = _plain(torch.cat([layer.get_parameter("bias") for layer in layers]))


def _norm(into: Any, norm: LayerNorm) -> None:
    """Fill a layer normalization."""
    into.gamma, into.beta = _plain(norm.weight), _plain(norm.bias)


def _embedding(stack: nn.Module) -> tuple[Any, Any]:
    """Return the table of tokens, and that of positions: left out, others would be assumed."""
    table = cast(Any, stack)[1].pe
    return _plain(stack.get_submodule("0.lut").get_parameter("weight")), _plain(table[0])


def _plain(tensor: Tensor) -> Any:
    """Return a copy in float32: CTranslate2 quantizes its arrays where they are."""
    return tensor.detach().cpu().float().numpy().copy()
