"""Run the cells that check a claim of the paper, as they are and on a broken variant.

A check that cannot fail is worth nothing. A test breaks a chapter on purpose, by replacing a
piece of its code, and sees the tagged cell complain::

    from tests.claims import assert_claim_can_fail

    def test_equation_1_needs_its_scale():
        assert_claim_can_fail(
            "model/attention", "3.2a", "/ math.sqrt(query.size(-1))", "/ query.size(-1)"
        )

With ``module="model/attention"`` the code that is broken stands in that module instead, which the
chapter imports.

Only the cells that the tagged ones depend on are run, those without their own assertions, so that
no other check of the chapter fails first. A cell that needs a certain random state must set it
itself, or take numbers from a cell whose names it uses. Figures are not drawn: ``show`` and
``interactive_chart`` do nothing here, and a cell that draws counts for the names that it binds
alone.
"""

from __future__ import annotations

import ast
import builtins
import codeop
import functools
import importlib
import inspect
import sys
import types
import unittest.mock
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jupytext
import matplotlib.pyplot as plt
import torch

BOOK = Path(__file__).resolve().parents[1] / "book"
# A cell with such a call draws, and changes nothing.
PICTURES = {"show", "interactive_chart", "display"}
# Long experiments are run with fewer seeds, or rates, here, unbroken and broken; the notebooks run
# them whole.
FEWER: dict[str, tuple[str, str]] = {
    "model/attention": ("rates = [0.003, 0.01, 0.03, 0.1, 0.3]", "rates = [0.03, 0.1]"),
    "training/optimizer": ("for seed in range(3)]", "for seed in range(1)]"),
    "model/embeddings": ("for seed in range(8)])", "for seed in range(2)])"),
}
# Checks that take seconds, and hold for each seed by itself. That they pass is shown, with all
# seeds, by the notebook, which nbval runs.
PASSED_BY_NOTEBOOK = {
    ("training/optimizer", "3.1d"),
    ("training/regularization", "5.4b-M"),
    ("model/attention", "3.2d"),
    ("model/complexity", "4.d-M"),
    ("model/complexity", "4.i"),
    ("model/embeddings", "3.5d"),
    ("model/embeddings", "3.5e"),
    ("model/multi_head", "3.2g"),
    ("results/attention_maps", "4.h"),
    ("results/attention_maps", "A.2"),
}


class CellError(Exception):
    """A cell raised an exception, which is the ``__cause__``."""

    def __init__(self, number: int, tagged: bool, error: Exception) -> None:
        super().__init__(f"cell {number}: {type(error).__name__}: {error}")
        self.tagged = tagged


@dataclass(frozen=True)
class Cell:
    """A code cell: its place among the code cells of the chapter, its source and its tags."""

    number: int
    source: str
    tags: frozenset[str]

    def checks(self, claim: str) -> bool:
        """Whether the cell is tagged with the claim, or with one kind of check of it."""
        return any(tag == f"claim-{claim}" or tag[:-2] == f"claim-{claim}" for tag in self.tags)


@functools.lru_cache
def cells(chapter: str) -> tuple[Cell, ...]:
    """Read the code cells of ``book/<chapter>.md``."""
    name = chapter.removeprefix("book/").removesuffix(".md")
    notebook = jupytext.read(BOOK / f"{name}.md")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return tuple(
        Cell(number, cell.source, frozenset(cell.metadata.get("tags", [])))
        for number, cell in enumerate(code, start=1)
    )


def with_fewer_seeds(chapter: str) -> tuple[Cell, ...]:
    """Return the cells of a chapter, its long experiment with fewer seeds."""
    old, new = FEWER.get(chapter, ("", ""))
    every = cells(chapter)
    if not old:
        return every
    assert sum(cell.source.count(old) for cell in every) == 1, f"{chapter}: {old!r} occurs once"
    return tuple(replace(cell, source=cell.source.replace(old, new)) for cell in every)


# A chapter's statements are the same objects for all claims, see `_plain`, so what is found in one
# is kept.
@functools.cache
def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Names that are read or written; without a function's own names where they are read."""
    own: set[str] = set()
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, context):
            found.add(part.id)
        elif isinstance(part, ast.arg):
            own.add(part.arg)
        elif isinstance(part, ast.comprehension):
            own |= {n.id for n in ast.walk(part.target) if isinstance(n, ast.Name)}
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = (n for n in ast.walk(part) if isinstance(n, ast.Name))
            own |= {n.id for n in inner if isinstance(n.ctx, ast.Store)}
    return found - own if context is ast.Load else found


@functools.cache
def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement at the top level of a cell binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    nested = (n for n in ast.walk(statement) if isinstance(n, ast.stmt) and n is not statement)
    return _names(statement, ast.Store) | {name for inner in nested for name in _bound(inner)}


@functools.cache
def _touched(statement: ast.stmt) -> set[str]:
    """Names whose objects a statement may change without binding them."""
    if isinstance(statement, ast.Assert | ast.FunctionDef | ast.ClassDef):
        return set()
    if isinstance(statement, ast.Expr) and (
        not isinstance(statement.value, ast.Call) or _function(statement) == "print"
    ):
        return set()
    return _names(statement, ast.Load)


def _function(statement: ast.stmt) -> str:
    """Return the name of the function if a statement is nothing but its call."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""


def _fixed(chapter: tuple[Cell, ...]) -> set[str]:
    """Modules, functions and classes: using them does not change them."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    body = [statement for cell in chapter for statement in _plain(cell.source, True)]
    own = {name for part in body if isinstance(part, kinds) for name in _bound(part)}
    return own | set(dir(builtins))


@functools.cache
def needed(chapter: tuple[Cell, ...], claim: str) -> list[Cell]:
    """Return the cells that check a claim, and those that they depend on, in order."""
    last = max((i for i, cell in enumerate(chapter) if cell.checks(claim)), default=-1)
    assert last >= 0, f"no cell is tagged claim-{claim}"
    fixed, called = _fixed(chapter), set[str]()
    while True:  # functions look their names up when they are called: until nothing is added
        kept = _needed(chapter[: last + 1], claim, fixed, called)
        body = [part for cell in kept for part in _plain(cell.source, cell.checks(claim))]
        functions = [part for part in body if isinstance(part, ast.FunctionDef | ast.ClassDef)]
        more = called.union(*(_names(function, ast.Load) for function in functions))
        if more == called:
            return kept
        called = more


def _needed(chapter: tuple[Cell, ...], claim: str, fixed: set[str], called: set[str]) -> list[Cell]:
    """Go back through the cells, from the last one, with the names that are still wanted."""
    kept: list[Cell] = []
    wanted: set[str] = set()
    for cell in reversed(chapter):
        body = _plain(cell.source, cell.checks(claim))
        bound = {name for statement in body for name in _bound(statement)}
        drawing = any(_function(statement) in PICTURES for statement in body)
        changing = [] if drawing else body
        touched = {name for statement in changing for name in _touched(statement)}
        future = any(isinstance(s, ast.ImportFrom) and s.module == "__future__" for s in body)
        useful = (wanted | called) & (bound | (touched - fixed))
        if cell.checks(claim) or future or useful:
            kept.append(cell)
            wanted = _wanted_before(body, wanted)
    return kept[::-1]


def _wanted_before(body: list[ast.stmt], wanted: set[str]) -> set[str]:
    """Return the names that must be bound before some statements, if ``wanted`` are after them."""
    wanted = set(wanted)
    for statement in reversed(body):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            wanted -= _bound(statement)  # bound anew: earlier cells do not matter
        if isinstance(statement, ast.For):  # its variable is bound anew as well
            own = _names(statement.target, ast.Store)
            inside = _wanted_before([*statement.body, *statement.orelse], set())
            wanted = (wanted | inside) - own | _names(statement.iter, ast.Load)
        else:
            wanted |= _names(statement, ast.Load)
    return wanted


class _NoAssertions(ast.NodeTransformer):
    """Take the assertions out of a cell, not out of the functions that it defines."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        return node


def _body(cell: Cell, claim: str, change: tuple[str, str] = ("", "")) -> list[ast.stmt]:
    """Parse a cell; one that does not check the claim loses its own assertions."""
    source = cell.source.replace(*change) if change[0] else cell.source
    return _parsed(source, cell.checks(claim))


def _parsed(source: str, assertions: bool) -> list[ast.stmt]:
    """Parse the source of a cell, with or without its own assertions."""
    body = ast.parse(source).body
    return body if assertions else [_NoAssertions().visit(part) for part in body]


_plain = functools.cache(_parsed)


@contextmanager
def _sandbox(name: str) -> Iterator[dict[str, Any]]:
    """Yield the namespace of a new module; put random state and global settings back after."""
    module = types.ModuleType(name)
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    threads = torch.get_num_threads()
    from annotated_transformer import figures

    quiet = unittest.mock.patch.multiple(
        figures, show=lambda *_: None, interactive_chart=lambda *_: None
    )
    sys.modules[name] = module  # dataclasses look their module up
    with quiet, torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            yield module.__dict__
        finally:
            del sys.modules[name]
            plt.close("all")
            torch.set_float32_matmul_precision(precision)
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)


def _functions(module: types.ModuleType) -> dict[str, types.FunctionType]:
    """Return the functions that a module defines, and the methods of its classes, by name."""
    own = [(name, x) for name, x in vars(module).items() if _home(x) == module.__name__]
    for kind, value in list(own):
        if isinstance(value, type):
            own += [(f"{kind}.{name}", x) for name, x in vars(value).items()]
    plain = ((name, getattr(x, "fget", None) or getattr(x, "__func__", x)) for name, x in own)
    return {name: inspect.unwrap(x) for name, x in plain if isinstance(x, types.FunctionType)}


def _home(x: object) -> object:
    return getattr(x, "__module__", None)


@contextmanager
def broken(module: str, old: str, new: str) -> Iterator[None]:
    """Let a module of the package, such as ``"model/attention"``, run other code for a while.

    Its functions and classes stay the objects that they are, with other code inside, so whoever
    imported them gets the broken ones.
    """
    real = importlib.import_module(f"annotated_transformer.{module.replace('/', '.')}")
    source = Path(str(real.__file__)).read_text(encoding="utf-8")
    count = source.count(old)
    assert count == 1, f"{old!r} occurs {count} times in {module}"
    variant = types.ModuleType(real.__name__)
    exec(compile(source.replace(old, new), str(real.__file__), "exec"), variant.__dict__)
    replaced, kept = _functions(variant), []
    for name, function in _functions(real).items():
        kept.append((function, function.__code__, function.__defaults__, function.__kwdefaults__))
        other = replaced[name]
        function.__code__, function.__defaults__ = other.__code__, other.__defaults__
        function.__kwdefaults__ = other.__kwdefaults__
    try:
        yield
    finally:
        for function, code, defaults, named in kept:
            function.__code__, function.__defaults__ = code, defaults
            function.__kwdefaults__ = named


def run_claim(
    chapter: str,
    claim: str,
    change: tuple[str, str] | None = None,
    *,
    fewer: bool = False,
    whole: bool = False,
    module: str | None = None,
) -> dict[str, Any]:
    """Run the cells that check a claim, and what they depend on.

    Args:
        chapter: The chapter's path in the book, such as ``"model/attention"``.
        claim: Number of the claim, such as ``"3.2a"``.
        change: Old and new text; the old text must occur once in the cells that are run.
        fewer: Run a long experiment with fewer seeds, see ``FEWER``.
        whole: Run every cell up to the last tagged one, and not only those needed.
        module: Replace in this module of the package instead.

    Returns:
        The names that the cells defined.

    Raises:
        CellError: A cell failed.
    """
    if module is not None and change is not None:
        with broken(module, *change):
            return run_claim(chapter, claim, fewer=fewer, whole=whole)
    every = with_fewer_seeds(chapter) if fewer else cells(chapter)
    chosen = needed(every, claim)
    if whole:
        chosen = [cell for cell in every if cell.number <= chosen[-1].number]
    if change is not None:
        count = sum(cell.source.count(change[0]) for cell in chosen)
        assert count == 1, f"{change[0]!r} occurs {count} times in the cells that are run"
    compiler = codeop.Compile()  # keeps `from __future__` from cell to cell, as a notebook does
    with _sandbox(f"_claim_{claim.replace('.', '_')}") as namespace:
        for cell in chosen:
            tree = ast.Module(_body(cell, claim, change or ("", "")), [])
            code = compiler(tree, f"{chapter}.md[cell {cell.number}]", "exec")  # type: ignore[arg-type]
            try:
                exec(code, namespace)
            except Exception as error:
                raise CellError(cell.number, cell.checks(claim), error) from error
    return namespace


def run_page(chapter: str, instead: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run all cells of a chapter, with their assertions; return the names that they defined.

    Args:
        chapter: The chapter's path in the book.
        instead: A cell that holds a key is replaced by its value.

    Raises:
        CellError: A cell failed.
    """
    compiler = codeop.Compile()
    with _sandbox(f"_page_{chapter.replace('/', '_')}") as namespace:
        for cell in cells(chapter):
            source = next((n for o, n in (instead or {}).items() if o in cell.source), cell.source)
            tree = ast.parse(source)
            try:
                exec(compiler(tree, f"{chapter}.md[cell {cell.number}]", "exec"), namespace)  # type: ignore[arg-type]
            except Exception as error:
                raise CellError(cell.number, bool(cell.tags), error) from error
    return namespace


@functools.lru_cache
def _passes(chapter: str, claim: str, whole: bool) -> None:
    run_claim(chapter, claim, fewer=True, whole=whole)


def assert_claim_can_fail(
    chapter: str,
    claim: str,
    old: str,
    new: str,
    *,
    whole: bool = False,
    module: str | None = None,
) -> None:
    """Assert that a claim holds in its chapter, and is refuted when the code is broken.

    Args:
        chapter: The chapter's path in the book, such as ``"model/attention"``.
        claim: Number of the claim.
        old: Text of the chapter's code, which occurs once.
        new: What breaks it.
        whole: Run every cell up to the tagged ones, and not only those needed.
        module: The old text stands in this module of the package, which the chapter imports.

    Raises:
        AssertionError: The unbroken check fails (where it is run, see ``PASSED_BY_NOTEBOOK``), or
            the broken one passes or ends otherwise than by an assertion of a tagged cell.
    """
    try:
        if (chapter, claim) not in PASSED_BY_NOTEBOOK:
            _passes(chapter, claim, whole)
    except CellError as error:
        raise AssertionError(f"claim {claim} fails unbroken: {error}") from error
    refuted: CellError | None = None
    try:
        run_claim(chapter, claim, (old, new), fewer=True, whole=whole, module=module)
    except CellError as error:
        refuted = error
    assert refuted is not None, f"claim {claim} does not notice {old!r} -> {new!r}"
    proper = refuted.tagged and isinstance(refuted.__cause__, AssertionError)
    assert proper, f"the broken variant ends otherwise: {refuted}"
