"""Marian checkpoints in Hugging Face's format, loaded into our readable model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from annotated_transformer.data.files import FileError, load_object, regular_file
from annotated_transformer.engine.checkpoints import (
    damaged_error,
    load_weights,
    unreadable_error,
    weights_of,
)
from annotated_transformer.engine.config import check_sizes
from annotated_transformer.interop.huggingface import reorder_features, sines_first, their_names
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.feed_forward import PositionwiseFeedForward
from annotated_transformer.model.transformer import ModelConfig, build_model
from annotated_transformer.notation import SpecialIds

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "swish": F.silu,
    "silu": F.silu,
    "gelu": F.gelu,
}


class ActivatedFeedForward(PositionwiseFeedForward):
    """The network of §3.3 with another activation; Marian's released systems have SiLU."""

    activation = "relu"  # one of ACTIVATIONS

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x (..., d_model)`` to the same shape."""
        y: Tensor = self.w_2(self.dropout(ACTIVATIONS[self.activation](self.w_1(x))))
        return y


def load_marian(folder: str | Path) -> tuple[EncoderDecoder, SpecialIds]:
    """Read a Marian checkpoint of Hugging Face's layout, without executing any code in it.

    ``transformers`` is not needed. The tokenizer is not read: the model takes and gives ids.

    Args:
        folder: Has ``config.json`` and ``model.safetensors``.

    Returns:
        The readable model in evaluation mode, and the ids that ``greedy_search(special=…)`` and
        :func:`~annotated_transformer.translation.beam_search.beam_search` need.

    Raises:
        FileError: A file is missing or damaged, or the model is none that ours can express.
    """
    folder = Path(folder)
    path = folder / "config.json"
    try:
        data = load_object(path)
        if "model_type" not in data:
            raise FileError(f"{path}: names no model_type; give the folder of a Marian checkpoint")
        config, vocabularies = _config_of(data, path)
        check_sizes(vars(config))
        weights = folder / "model.safetensors"
        if weights.is_file() and weights.stat().st_size < max(vocabularies) * config.d_model:
            raise ValueError(f"{weights.name} has no {max(vocabularies)} tokens")
        names = ("pad", "decoder_start", "eos")
        special = SpecialIds(*(int(data[f"{name}_token_id"]) for name in names))
        model = build_model(*vocabularies, config)
        replace_activation(model, data["activation_function"])
        path = weights
        stored = load_file(regular_file(path))
    except OSError as error:
        raise unreadable_error(path, error) from None
    except FileError:
        raise
    except (SafetensorError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        raise damaged_error(path, f"{type(e).__name__}: {e}") from None
    load_weights(model, _ours(stored, model, config), path)
    back = sines_first(config.d_model).argsort()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(reorder_features(name, parameter, back))
    return model.eval(), special


def _config_of(data: Mapping[str, Any], path: Path) -> tuple[ModelConfig, tuple[int, int]]:
    """Return our sizes of a Marian configuration, and those of the vocabularies."""
    same = ("layers", "ffn_dim", "attention_heads")
    fixed = {"model_type": "marian", "scale_embedding": True, "normalize_before": False,
             "normalize_embedding": False}  # fmt: skip
    fixed |= {f"decoder_{name}": data[f"encoder_{name}"] for name in same}
    for name, wanted in fixed.items():
        if data.get(name, wanted) != wanted:
            told = f"{path}: {name} is {data[name]!r}, and our model has only {wanted!r}"
            raise FileError(f"{told}; choose a Marian checkpoint")
    if data["activation_function"] not in ACTIVATIONS:
        told = f"{path}: there is no activation {data['activation_function']!r} here"
        raise FileError(f"{told}; choose a checkpoint with one of {', '.join(ACTIVATIONS)}")
    shared = data.get("share_encoder_decoder_embeddings", True)
    tied = data.get("tie_word_embeddings", True)
    config = ModelConfig(
        N=data["encoder_layers"], d_model=data["d_model"], d_ff=data["encoder_ffn_dim"],
        h=data["encoder_attention_heads"], max_len=data["max_position_embeddings"],
        dropout=data.get("dropout", 0.1), attention_dropout=data.get("attention_dropout", 0.0),
        ff_dropout=data.get("activation_dropout", 0.0),
        tie=("all" if shared else "target") if tied else "none",
    )  # fmt: skip
    vocab = int(data["vocab_size"])
    return config, (vocab, vocab if shared else int(data.get("decoder_vocab_size") or vocab))


def replace_activation(model: EncoderDecoder, name: str) -> None:
    """Give every feed-forward network of a model another activation than ReLU."""
    if name == "relu":
        return
    for module in model.modules():
        if isinstance(module, PositionwiseFeedForward):
            module.__class__ = ActivatedFeedForward
            cast(ActivatedFeedForward, module).activation = name


def _ours(
    stored: Mapping[str, Tensor], model: EncoderDecoder, config: ModelConfig
) -> dict[str, Tensor]:
    """Return what a file holds under our names; it stores tied matrices once."""
    shared, found = stored.get("model.shared.weight"), {}
    wanted = weights_of(model)
    for theirs, ours in their_names(config).items():
        matrix = ours.endswith((".lut.weight", ".proj.weight"))
        tensor = stored.get(theirs, shared if matrix else None)
        if theirs == "final_logits_bias" and tensor is not None:
            tensor = tensor.flatten()
        if ours in wanted and tensor is not None:
            found[ours] = tensor
    return found
