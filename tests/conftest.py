"""What holds for all tests."""

import gc
import signal
import threading
from collections import Counter
from collections.abc import Collection

import pytest
import torch
from hypothesis import settings

# No test asserts an absolute time: an example may take as long as a busy machine makes it.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")

# Python's garbage collector takes a tenth of the time with its usual threshold of 700 objects.
gc.set_threshold(50_000, 20, 100)

# Under nohup, or in the background of a script, signals are ignored, and so they would be by the
# commands that the tests start and stop.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Files with few tests that take long. xdist begins with the files that have the most tests, so
# these would come last, one worker would have nothing to do, and all would wait for the other.
LONG = (
    "tests/training/test_distributed.py",
    "tests/model/test_claims_embeddings.py",
    "tests/model/test_claims_architecture.py",
    "tests/engine/test_killed.py",
    "tests/cli/test_processes.py",
    "tests/cli/test_ablation.py",
    "tests/engineering/test_schedule.py",
    "tests/interop/test_export_onnx.py",
    "tests/results/test_claims_attention_maps_package.py",
    "tests/benchmarks/test_exports.py",
    "tests/benchmarks/test_make_pretrained.py",
    "tests/benchmarks/test_serve_load.py",
    "tests/benchmarks/test_rehearsal.py",
    "tests/benchmarks/test_before.py",
    "tests/house/test_colab.py",
    "tests/house/test_packaging.py",
    "tests/test_installed.py",
)


def longest_first(nodeids: Collection[str]) -> dict[str, int]:
    """Return the files of tests with their places: the long ones, then those with many tests."""
    counts = Counter(nodeid.split("::")[0] for nodeid in nodeids)
    order = sorted(counts, key=lambda file: (file not in LONG, -counts[file]))
    return {file: place for place, file in enumerate(order)}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run long files first where xdist is told to keep the order, as ``make unit`` does."""
    if not config.getoption("loadscopereorder", True):
        places = longest_first([item.nodeid for item in items])
        items.sort(key=lambda item: places[item.nodeid.split("::")[0]])


def pytest_collection_finish() -> None:
    """Leave what was loaded and collected to this process: none of it is ever garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def float32_products() -> None:
    """Begin with PyTorch's default: a command that another file ran in this process chose its own.

    Which products are taken changes last digits, and for short sentences the kernel.
    """
    torch.set_float32_matmul_precision("highest")
