"""Options are read before anything heavy is loaded, and a missing extra is named."""

import subprocess
import sys

import pytest

from annotated_transformer.cli import main as module
from annotated_transformer.cli.main import error_message
from tests.cli.command import Capture, fails

HEAVY = {"torch", "numpy", "spacy", "tokenizers", "safetensors", "sacrebleu", "matplotlib"}
LOADED = """
import sys
from annotated_transformer.cli.main import main
status = main(sys.argv[1:])
print("loaded", *{name.split(".")[0] for name in sys.modules}, file=sys.stderr)
sys.exit(status)
"""
BLOCKED = """
import sys
sys.modules[sys.argv.pop(1)] = None
from annotated_transformer.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def python(program: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in a process of its own."""
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("--help", 0),
        ("train --help", 0),
        ("prepare --help", 0),
        ("plot --help", 0),
        ("export --help", 0),
        ("train --udpates 3", 2),
        ("train --corpus grammar --mirror m", 2),
        ("", 2),
    ],
)
def test_options_need_nothing_heavy(line: str, status: int) -> None:
    done = python(LOADED, *line.split())
    assert done.returncode == status, done.stderr
    loaded = set(done.stderr.splitlines()[-1].split())
    assert {"loaded", "tyro"} <= loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    ("missing", "line", "extra"),
    [
        ("tyro", "train --help", "translation"),
        ("safetensors", "translate nowhere", "translation"),
        ("sacrebleu", "compare a b --references c", "translation"),
        ("ctranslate2", "export --to ctranslate2 out", "ctranslate2"),
        ("transformers", "export --to huggingface out", "huggingface"),
        ("onnxruntime", "export --to onnx out", "onnx"),
    ],
)
def test_a_missing_extra_is_named(missing: str, line: str, extra: str) -> None:
    done = python(BLOCKED, missing, *line.split())
    told = f'needs {missing}: pip install ".[{extra}]" in the project folder'
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"annotated-transformer: {told}\n"


def test_what_plots_need_is_an_extra_of_its_own() -> None:
    error = ModuleNotFoundError("No module named 'matplotlib.figure'", name="matplotlib.figure")
    assert error_message(error) == 'needs matplotlib: pip install ".[plots]" in the project folder'
    ours = "annotated_transformer.cli.nothing"
    assert error_message(ModuleNotFoundError("none", name=ours)) is None


def test_a_mistake_of_ours_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise ValueError("of Python's own")

    monkeypatch.setattr(module, "run", fail)
    with pytest.raises(ValueError, match="Python's own"):
        module.main(["translate", "m"])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB, max allowed: 9.07 GB)."),
        RuntimeError("CUDA error: out of memory"),  # another process has filled the GPU
    ],
)
def test_no_memory_is_told_with_a_remedy(
    error: Exception, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(module, "run", fail)
    assert "out of memory; reduce --max-tokens" in fails(capsys, "train")
