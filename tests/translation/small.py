"""A small model for the tests of searches."""

from typing import Any

import torch

from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.transformer import make_model
from annotated_transformer.notation import EOS


def opinionated(
    seed: int = 0, ends: float = 0.0, size: int | tuple[int, int] = 11, **options: Any
) -> EncoderDecoder:
    """A model with opinions: its weights are large, so that outputs differ from each other."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "N": 1,
        "d_model": 8,
        "d_ff": 16,
        "h": 2,
        "max_len": 80,
        "tie": "none",
        **options,
    }
    source, target = (size, size) if isinstance(size, int) else size
    made = make_model(source, target, **sizes).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2)
        made.get_parameter("generator.proj.bias").normal_().mul_(0.5)
        made.get_parameter("generator.proj.bias")[EOS] += ends
    return made
