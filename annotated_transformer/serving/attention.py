"""A translated sentence with its attention weights, for the page."""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from annotated_transformer.engine.scoring import score_tokens
from annotated_transformer.engine.system import System, text_of
from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.notation import BOS, EOS
from annotated_transformer.pretrained import trace_modules
from annotated_transformer.serving.requests import check_tokens
from annotated_transformer.training.batches import make_batch
from annotated_transformer.translation.beam_search import Hypothesis

PARTS = {  # of the answer, with the modules whose weights they are
    "encoder": ("encoder", "self_attn"),
    "self": ("decoder", "self_attn"),
    "cross": ("decoder", "src_attn"),
}
DIGITS = 4  # of a weight


def attention_json(system: System, source: list[int], best: Hypothesis, most: int) -> bytes:
    """Return tokens, probabilities and attention weights of a translated sentence as JSON.

    Args:
        system: The system; only a Transformer has attention by layer and head.
        source: Tokens of the source, without special symbols.
        best: Its translation.
        most: Maximum tokens of the translation.

    Returns:
        An object with ``source`` and ``target``, the tokens as shown, ends included (lengths m and
        n); ``texts``, the translation up to each target token; ``probabilities`` (n); and the
        weights by layer and head ``encoder (N, h, m, m)``, ``self (N, h, n, n)`` and
        ``cross (N, h, n, m)``, empty where there are none. Row i of the last two belongs to the
        step that chose target token i.

    Raises:
        Refusal: The translation has more tokens than are shown.
    """
    ours, theirs = system.tokenizers
    check_tokens("translation", len(best.tokens), most)
    (scores,) = score_tokens(system.model, [source], [best.tokens])
    written, found = [*best.tokens, EOS], dict[str, Tensor]()
    if isinstance(system.config, ModelConfig):
        found = trace_modules(system.model, make_batch([source], [best.tokens]))
    data = {
        "source": ours.tokens([*source, EOS]),
        "target": theirs.tokens(written),
        "read": theirs.tokens([BOS, *best.tokens]),
        "texts": [text_of(system, written[: i + 1]) for i in range(len(written))],
        "probabilities": round_values(torch.tensor(scores, dtype=torch.float64).exp()),
        **{name: round_values(attention_weights(found, *part)) for name, part in PARTS.items()},
    }
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def attention_weights(found: Mapping[str, Tensor], stack: str, part: str) -> Tensor:
    """Return the weights of a kind of attention in all layers ``(N, h, n, m)``, if any."""
    names = [f"{stack}.layers.{i}.{part}.attn" for i in range(len(found))]
    layers = [found[name] for name in names if name in found]
    return torch.cat(layers) if layers else torch.empty(0)


def round_values(values: Tensor) -> object:
    """Return the values as lists of numbers with few digits."""
    scaled: list[object] = (values.cpu().double() * 10**DIGITS).round().div(10**DIGITS).tolist()
    return scaled
