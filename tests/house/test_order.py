"""The order in which `make unit` runs the files of tests."""

from pathlib import Path

from tests.conftest import LONG, longest_first

ROOT = Path(__file__).parents[2]


def test_long_files_are_there() -> None:
    assert [name for name in LONG if not (ROOT / name).exists()] == []


def test_long_files_come_first_then_those_with_many_tests() -> None:
    many = [f"tests/b.py::test_{i}" for i in range(9)]
    found = longest_first(["tests/a.py::test", *many, "book/c.ipynb::1", f"{LONG[0]}::test"])
    assert list(found) == [LONG[0], "tests/b.py", "tests/a.py", "book/c.ipynb"]


def test_unit_tests_keep_that_order() -> None:
    unit = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nunit:")[2]
    assert "--no-loadscope-reorder" in unit.partition("\n\n")[0]
