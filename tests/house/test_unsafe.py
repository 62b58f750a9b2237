"""Nothing in the package can run what a file brings along."""

from pathlib import Path

import pytest
import unsafe
from house import ROOT

PACKAGE = ROOT / "annotated_transformer"


def test_nothing_in_the_package_can_run_what_it_loads() -> None:
    assert [fault for path in sorted(PACKAGE.rglob("*.py")) for fault in unsafe.calls(path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import load as f", "import marshal, json", "import joblib",
        "import shelve", "from torch import load", "torch.load(x)", "torch.load(x, 'cpu')",
        "torch.load(x, weights_only=False)", "torch.load(x, weights_only=a)", "eval(x)",
        "exec(x)", "compile(x, '', 'eval')", "__import__(x)", "builtins.eval(x)",
        "torch.hub.load(x)",
        "np.load(x, allow_pickle=True)", "yaml.load(x)",
        "yaml.unsafe_load(x)", "os.system(x)",
        "subprocess.run(x, shell=True)", "f(x, trust_remote_code=True)", "torch.jit.load(x)",
        "broadcast_object_list(x)", "torch.distributed.all_gather_object(x, y)",
    ],
)  # fmt: skip
def test_what_could_run_is_noticed(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.py"
    path.write_text(f"def f():\n    {line}\n")
    assert len(unsafe.calls(path)) == 1
    path.write_text(
        "import re\nre.compile('x')\nmodel.eval()\ntorch.compile(model)\n"
        "torch.load(x, weights_only=True)\nnp.load(x)\njson.load(x)\nsafetensors.torch.load(x)\n"
    )
    assert unsafe.calls(path) == []
