"""What holds for all tests."""

import signal
import threading

import pytest
import torch
from hypothesis import settings

# No test asserts an absolute time: an example may take as long as a busy machine makes it.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")

# Under nohup, or in the background of a script, signals are ignored, and so they would be by the
# commands that the tests start and stop.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module", autouse=True)
def float32_products() -> None:
    """Begin with PyTorch's default: a command that another file ran in this process chose its own.

    Which products are taken changes last digits, and for short sentences the kernel.
    """
    torch.set_float32_matmul_precision("highest")
