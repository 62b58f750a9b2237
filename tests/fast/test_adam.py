"""The optimizer of a run is PyTorch's, bit by bit, and does not load its compiler."""

import subprocess
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

from annotated_transformer.data.corpora import load_corpus
from annotated_transformer.fast.adam import lean_adam
from annotated_transformer.model.transformer import make_model
from annotated_transformer.training.optimizer import make_adam, noam_schedule
from tests.cli.command import SIZES, write


def weights(lean: bool, updates: int = 6) -> tuple[list[torch.Tensor], object]:
    """Train a model, halfway with a second optimizer that goes on from the first."""
    torch.manual_seed(0)
    model = make_model(7, 7, N=1, d_model=8, d_ff=8, h=2)
    optimizer = lean_adam(model) if lean else make_adam(model)
    schedule = noam_schedule(optimizer, 8, warmup=3)
    for number in range(updates):
        if number == updates // 2:
            other = lean_adam(model) if lean else make_adam(model)
            other.load_state_dict(optimizer.state_dict())
            optimizer = schedule.optimizer = other
        x = torch.randint(7, (2, 3))
        seen = torch.ones(2, 1, 3, dtype=torch.bool)
        scores = model.generator(model(x, x, seen, seen))
        F.nll_loss(scores.flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert all(p.grad is None for p in model.parameters())
    return [p.detach() for p in model.parameters()], optimizer.state_dict()


def test_it_is_adam() -> None:
    (ours, own), (theirs, other) = weights(lean=True), weights(lean=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert str(own) == str(other)
    model = make_model(7, 7, N=1, d_model=8, d_ff=8, h=2)
    assert lean_adam(model).defaults == make_adam(model).defaults


def test_a_run_does_not_load_the_compiler(tmp_path: Path) -> None:
    """Nor does one that goes on."""
    text = load_corpus("grammar", size=4)
    files = [write(tmp_path / "source", text.source), write(tmp_path / "target", text.target)]
    sizes = SIZES.replace("--updates 6 ", "").replace("--average 2 --average-every 2", "").split()
    words = [*sizes, "--train-files", *files, "--valid-files", *files, "--out", str(tmp_path / "r")]
    code = f"""import sys
from annotated_transformer.cli.main import main
for updates in ("2", "4"):
    assert main(["train", *{words}, "--updates", updates]) == 0
assert "torch.optim" in sys.modules and "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
