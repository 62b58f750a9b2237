"""Tests of the settings for a CPU: accuracy decides, and the setting is what is reported."""

import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from annotated_transformer.fast import products as speed
from annotated_transformer.fast.products import (
    TOLERANCE,
    Products,
    choose_products,
    keep_large_blocks,
    prepare_cpu,
)

Product = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def setting() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def medium(monkeypatch: pytest.MonkeyPatch) -> Callable[[Product], None]:
    """Let the products under "medium" be what a function makes of them."""

    def play(change: Product) -> None:
        def product(a: Tensor, b: Tensor) -> Tensor:
            asked = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")  # this machine's own may round
            try:
                return change(a, b) if asked == "medium" else a @ b
            finally:
                torch.set_float32_matmul_precision(asked)

        monkeypatch.setattr(speed, "matmul", product)

    return play


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let "medium" be faster, or slower, whatever the machine does."""

    def play(gain: float) -> None:
        monkeypatch.setattr(speed, "_seconds", lambda _: (gain, 1.0))

    return play


def test_the_choice_is_accurate_and_set() -> None:
    torch.set_float32_matmul_precision("high")  # whatever was set before
    products = choose_products()
    assert torch.get_float32_matmul_precision() == products.precision
    x, w = torch.randn(64, 300), torch.randn(300, 50)
    exact = x.double() @ w.double()
    assert ((x @ w - exact).norm() / exact.norm()) < 1e-5
    assert products.error <= TOLERANCE * products.reference
    assert products.gain >= 1
    assert repr(products.precision) in str(products)


def test_fast_and_accurate_is_taken(
    medium: Callable[[Product], None], faster: Callable[[float], None]
) -> None:
    medium(lambda a, b: a @ b)
    faster(2.0)
    products = choose_products()
    assert (products.precision, products.gain) == ("medium", 2.0)
    assert torch.get_float32_matmul_precision() == "medium"


def test_slower_is_not_taken(
    medium: Callable[[Product], None], faster: Callable[[float], None]
) -> None:
    medium(lambda a, b: a @ b)
    faster(0.5)
    products = choose_products()
    assert (products.precision, products.gain, products.refused) == ("highest", 1.0, None)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: (a.bfloat16() @ b.bfloat16()).float(),
        lambda a, b: a.bfloat16().float() @ b.bfloat16().float(),  # sums in float32
        lambda a, b: (a.half() @ b.half()).float(),
        lambda a, b: (a @ b).bfloat16().float(),
        lambda a, b: (a @ b) * math.nan,
        # only one layout: that of a weight's gradient
        lambda a, b: (a.bfloat16() @ b.bfloat16()).float() if not a.is_contiguous() else a @ b,
    ],
)
def test_products_that_are_not_float32_are_refused_however_fast(
    change: Product, medium: Callable[[Product], None], faster: Callable[[float], None]
) -> None:
    medium(change)
    faster(100.0)
    products = choose_products()
    assert products.precision == "highest"
    assert products.gain == 1.0
    assert products.refused is not None
    assert not products.refused <= TOLERANCE * products.reference
    assert torch.get_float32_matmul_precision() == "highest"
    assert "refused" in str(products)


def test_the_tolerance_takes_other_orders_of_summation(
    medium: Callable[[Product], None], faster: Callable[[float], None]
) -> None:
    def in_parts(a: Tensor, b: Tensor) -> Tensor:
        half = a.size(1) // 2
        return a[:, :half] @ b[:half] + a[:, half:] @ b[half:]

    medium(in_parts)
    faster(2.0)
    assert choose_products().precision == "medium"


def test_a_measurement_that_fails_leaves_the_default(medium: Callable[[Product], None]) -> None:
    def fail(a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("no such instruction")

    medium(fail)
    with pytest.raises(RuntimeError, match="no such instruction"):
        choose_products()
    assert torch.get_float32_matmul_precision() == "highest"


def test_measuring_leaves_the_random_state_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    choose_products()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_blocks_are_left_alone_elsewhere(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: object) -> None:
        raise AssertionError("the C library was looked up")

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", never)
    assert keep_large_blocks() is False


class Musl:
    """A C library without the setting."""

    def __init__(self, _: object) -> None:
        pass


def missing(_: object) -> None:
    raise OSError("no library")


@pytest.mark.parametrize("library", [Musl, missing])
def test_another_c_library_is_no_error(
    library: Callable[[object], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", library)
    assert keep_large_blocks() is False


@pytest.mark.parametrize(("answers", "kept"), [((1, 1), True), ((0, 1), False), ((1, 0), False)])
def test_the_answers_of_the_c_library_count(
    answers: tuple[int, int], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter(answers)
    asked = []

    class Glibc:
        def __init__(self, _: object) -> None:
            pass

        def mallopt(self, option: int, value: int) -> int:
            asked.append((option, value))
            return next(given)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", Glibc)
    assert keep_large_blocks() is kept
    assert asked[0] == (-4, 0)  # M_MMAP_MAX of malloc.h


def test_prepare_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setattr(speed, "keep_large_blocks", lambda: kept.append(True))
    products = prepare_cpu()
    assert kept == [True]
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(speed.KERNELS)
    assert isinstance(products, Products)
    assert torch.get_float32_matmul_precision() == products.precision


def test_a_process_measures_once_and_sets_what_it_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The systems of an ensemble are opened one after the other."""
    products = prepare_cpu()
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(speed, "choose_products", lambda: pytest.fail("it is measured again"))
    assert prepare_cpu() is products
    assert torch.get_float32_matmul_precision() == products.precision
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(pytest.fail.Exception, match="measured again"):  # on other threads
        prepare_cpu()
