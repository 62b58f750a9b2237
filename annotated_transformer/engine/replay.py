"""Updates that became NaN or infinite, computed again."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from annotated_transformer.engine.checkpoints import (
    damaged,
    load_system,
    load_tensors,
    load_weights,
)
from annotated_transformer.engine.config import Options
from annotated_transformer.engine.precision import PreciseLoss, Precision
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.loop import grad_norm


def replay(path: Path) -> tuple[float, float]:
    """Compute a kept update again, in this process; return its loss and its gradient norm.

    On a processor and for a run of one process, to the bit: the random state of a GPU is that
    after the update. A precision that this machine does not have is replaced by float32, with a
    warning.

    Args:
        path: A file in the folder ``non_finite`` of a run.

    Raises:
        CheckpointError: It is damaged, or there is no run around it.
    """
    tensors, data = load_tensors(path)
    system = load_system(path.parent.parent, weights=None)
    own = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    load_weights(system.model, own, path)
    try:
        optim, scale = Options().replace(**data["options"]).optim, float(data["scale"])
        torch.set_rng_state(tensors["random.0"])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(path, error) from None
    precision = Precision.nearest(optim.precision, torch.device("cpu"))
    loss_of, total = PreciseLoss(system.model.train(), precision), 0.0
    for k in itertools.count():
        if f"batch.{k}.src" not in tensors:
            break
        batch = Batch(tensors[f"batch.{k}.src"], tensors[f"batch.{k}.tgt"])
        loss, _ = loss_of(batch, optim.smoothing, data["tokens"])
        (loss * scale).backward()
        total += loss.item()
    return total, grad_norm(system.model.parameters()) / scale
