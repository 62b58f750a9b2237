"""What holds for all tests."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def float32_products() -> None:
    """Begin with PyTorch's default: a command that another file ran in this process chose its own.

    Which products are taken changes last digits, and for short sentences the kernel.
    """
    torch.set_float32_matmul_precision("highest")
