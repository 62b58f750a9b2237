"""The Transformer of "Attention Is All You Need", explained, tested and fast.

The most used names can be imported from here, and are loaded on first access:
``from annotated_transformer import make_model, attention, Batch``.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_MODULES = {
    "model.architecture": "EncoderDecoder Generator clones Encoder Decoder EncoderLayer "
    "DecoderLayer SublayerConnection LayerNorm",
    "model.attention": "attention",
    "model.multi_head": "MultiHeadedAttention subsequent_mask padding_mask",
    "model.feed_forward": "PositionwiseFeedForward",
    "model.embeddings": "Embeddings PositionalEncoding LearnedPositions sinusoid",
    "model.transformer": "ModelConfig PRESETS build_model make_model count_parameters",
    "training.batches": "Batch make_batch token_batches",
    "training.loop": "batch_loss update fit evaluate Progress NonFiniteError",
    "training.copy_task": "data_gen",
    "training.optimizer": "NoamOpt make_adam noam_schedule rate",
    "training.regularization": "LabelSmoothing smoothed_target",
    "translation.greedy": "greedy_decode greedy_search",
    "translation.beam_search": "beam_search Hypothesis",
    "translation.tokenizers": "BPETokenizer",
    "engine.checkpoints": "load_system save_system",
    "engine.config": "load_recipe",
    "engine.trainer": "Trainer",
    "data.corpora": "text_of_lines",
    "engine.system": "System translate_lines n_best_lines join_systems",
    "engine.scoring": "score_pairs",
    "fast.sampling": "Sampling",
    "pretrained": "load_pretrained",
    "notation": "PAD BOS EOS UNK",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        hint = f'{name} needs {error.name}: install this package with its extra "translation"'
        raise ModuleNotFoundError(hint, name=error.name) from error


def __dir__() -> list[str]:
    return list(__all__)
