# Written from book/background/comparison.md: edit the chapter instead.
"""Recurrent, convolutional and Transformer models on one text (section 6.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def price(curve: Sequence[Mapping[str, Any]], loss: float, unit: str = "seconds") -> float | None:
    """Return what a training had cost when its validation loss first was a given one.

    Between two measurements the loss is taken to fall along a straight line.

    Args:
        curve: Points with ``valid_loss`` and the unit.
        loss: Nats per token.
        unit: ``seconds`` or ``update``.

    Returns:
        The cost, or None if the loss was never reached. If the first point is there already, that
        point's: the true one is lower.
    """
    before: Mapping[str, Any] | None = None
    for point in curve:
        if point["valid_loss"] <= loss:
            if before is None:
                return float(point[unit])
            share = (before["valid_loss"] - loss) / (before["valid_loss"] - point["valid_loss"])
            return float(before[unit] + share * (point[unit] - before[unit]))
        before = point
    return None
