"""What holds for all tests."""

import pytest
import torch
from hypothesis import settings

# No test asserts an absolute time: an example may take as long as a busy machine makes it.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="module", autouse=True)
def float32_products() -> None:
    """Begin with PyTorch's default: a command that another file ran in this process chose its own.

    Which products are taken changes last digits, and for short sentences the kernel.
    """
    torch.set_float32_matmul_precision("highest")
