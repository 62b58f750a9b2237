"""No micro-batch waits for its device: on ``meta``, tensors have no values to wait for."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from annotated_transformer.engine.precision import Precision
from annotated_transformer.engine.trainer import Trainer
from annotated_transformer.engine.updater import Updater
from annotated_transformer.fast.packing import IndexedBatch
from annotated_transformer.training.distributed import DistributedWorld, replica_loss
from annotated_transformer.training.loop import ALONE, accumulate_gradients, batch_loss
from tests.engine.small import OPTIONS, TEXTS

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts copies between devices: these wait, too, if the memory is not pinned."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compare the devices of both ends."""
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[-1] if isinstance(args[-1], Tensor) else args[0]
            self.count += source.device != result.device
        return result


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let tensors be read as lists of zeros; return how many numbers each time."""
    found: list[int] = []

    def zeros(tensor: Tensor) -> list[float]:
        found.append(tensor.numel())
        return [0.0] * tensor.numel()

    monkeypatch.setattr(Tensor, "tolist", zeros)
    return found


def test_validation_copies_its_batches_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, bool, str]] = []

    def moved(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
        found.append((device.type, non_blocking, threading.current_thread().name))
        return batch

    run = Trainer(OPTIONS, tmp_path, TEXTS)
    monkeypatch.setattr(IndexedBatch, "to", moved)
    on_cpu, main = list(run.validator.batches(ALONE)), threading.current_thread().name
    assert {*found} == {("cpu", True, main)}
    found.clear()
    run.validator.precision = Precision(device=META)
    ahead = list(run.validator.batches(ALONE))
    assert [(device, quick) for device, quick, _ in found] == [("meta", True)] * len(on_cpu)
    assert main not in {thread for *_, thread in found}
    assert all(torch.equal(one.src, two.src) for one, two in zip(ahead, on_cpu, strict=True))


@pytest.mark.parametrize("kind", ["default", "hooked", "readable", "compiled"])
def test_a_micro_batch_waits_for_nothing(
    kind: str, tmp_path: Path, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # "meta" has no autocast
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    options = OPTIONS.replace(compile=kind == "compiled")
    run = Trainer(options, tmp_path, TEXTS, compiler="eager")
    parts = run.system, run.pairs, options, DistributedWorld(), Precision(device=META), tmp_path
    updater, model = Updater(*parts, "eager"), run.system.model.train()
    if kind == "hooked":  # the readable model with the fast loss
        model.encoder.register_forward_hook(lambda *_: None)
    batches = updater.batches([torch.arange(8), torch.arange(8, 13)])
    looks.clear()
    copies = Copies()  # type: ignore[no-untyped-call]
    with contextlib.nullcontext() if kind == "compiled" else copies:  # torch.compile allows none
        if kind == "readable":
            accumulate_gradients(model, batches, 0.1, 100, loss=batch_loss)
        else:
            accumulate_gradients(updater.replica, batches, 0.1, 100, loss=replica_loss)
    assert (looks, copies.count) == ([2], 0)  # the sums, after the last micro-batch
    assert all(p.grad is not None for p in model.parameters())
