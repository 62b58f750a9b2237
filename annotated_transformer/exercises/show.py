"""The examples of an exercise: expected results next to what the reader's function returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from matplotlib.axes import Axes
from torch import Tensor

from annotated_transformer.exercises.calls import Outcome
from annotated_transformer.exercises.declare import Case, brief_value
from annotated_transformer.figures import Picture, canvas, heatmap, show

ROWS, COLUMNS = 12, 16  # of a heat map, at most
Example = tuple[Case, Outcome, Outcome]
EMPTY: Final = "no tensor"


def _matrix(value: Any) -> Tensor | None:
    """Return a tensor as rows and columns, or None for anything else."""
    if isinstance(value, tuple) and value:
        value = value[0]
    if not isinstance(value, Tensor) or value.dim() == 0 or not value.numel() or value.is_complex():
        return None
    flat = value.detach()
    flat = flat.unsqueeze(0) if flat.dim() == 1 else flat.flatten(0, -2)
    return flat if flat.dtype == torch.bool else flat.double()


def _draw(ax: Axes, matrix: Tensor | None, title: str, like: Any) -> Any:
    """Draw a tensor, if it is small, with the given colours; return the colours used."""
    if matrix is None or matrix.size(0) > 2 * ROWS or matrix.size(1) > 2 * COLUMNS:
        ax.set(title=title, xticks=[], yticks=[])
        ax.text(0.5, 0.5, EMPTY, ha="center", va="center", transform=ax.transAxes)
        return None
    rows, columns = (range(count) for count in matrix.shape)
    heatmap(matrix, rows, columns, row_label="row", column_label="column", title=title, ax=ax,
            annotate=matrix.numel() <= 9, limits=like[1] if like else None)  # fmt: skip
    mesh: Any = ax.collections[0]
    if mesh.colorbar is None:  # true and false
        return None
    mesh.colorbar.remove()
    if like is not None:
        mesh.set(cmap=like[0], clim=like[1])
    return mesh.cmap, mesh.get_clim()


def draw_examples(name: str, examples: Sequence[Example]) -> Picture | None:
    """Draw heat maps, expected above yours; None if an expected result is not a small tensor."""
    wanted = [_matrix(outcome.value) for _, outcome, _ in examples]
    small = [m for m in wanted if m is not None and m.size(0) <= ROWS and m.size(1) <= COLUMNS]
    if len(small) < len(wanted):
        return None
    figure, axes = canvas(2, len(small), size=(2.1 * len(small), 3.6))
    for i, (_, first, second) in enumerate(examples):
        like = _draw(axes[0, i], _matrix(first.value), f"expected, example {i + 1}", None)
        _draw(axes[1, i], _matrix(second.value), f"yours, example {i + 1}", like)
    return show(figure, f"Three examples of {name}: expected above, what yours returns below.")


def _short(outcome: Outcome) -> str:
    return outcome.error.text if outcome.error else brief_value(outcome.value, 90)


def print_examples(examples: Sequence[Example]) -> None:
    """Print each example's arguments, expected result and the reader's result."""
    for number, (case, wanted, yours) in enumerate(examples, 1):
        print(f"example {number}: {', '.join(brief_value(argument) for argument in case)}")
        print(f"    expected  {_short(wanted)}")
        print(f"    yours     {_short(yours)}")
