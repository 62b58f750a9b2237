"""The parts of a model by name, with their types."""

from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def part_of(model: nn.Module, name: str, kind: type[M]) -> M:
    """Return a model's part, such as ``"encoder.layers.0.self_attn"``, which is of this kind."""
    found = model.get_submodule(name)
    assert isinstance(found, kind)
    return found
