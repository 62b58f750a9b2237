"""The definitions in a chapter's cells, for benchmarks that repeat its experiment with more seeds.

The code is taken from the chapter itself, so that the record and the page cannot diverge.
"""

from __future__ import annotations
import __future__

import ast
import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jupytext

BOOK = Path(__file__).parents[1] / "book"
KINDS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def kept(statement: ast.stmt, values: Collection[str]) -> bool:
    """Whether a statement defines a function, a class or one of the given values."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(part, ast.Name) and part.id in values for part in statement.targets)
    return isinstance(statement, KINDS)


def definitions(chapter: str, values: Collection[str] = ()) -> dict[str, Any]:
    """Return what a chapter's cells define, without running anything else in them.

    Args:
        chapter: Its path in the book, such as ``background/seq2seq``.
        values: Names whose assignments are run as well, in the order of the cells.
    """
    names: dict[str, Any] = {}
    notebook, flag = jupytext.read(BOOK / f"{chapter}.md"), __future__.annotations.compiler_flag
    if "export" in notebook.metadata:
        name = f"annotated_transformer.{notebook.metadata['export']['module'].replace('/', '.')}"
        names = dict(vars(importlib.import_module(name)))
    for cell in notebook.cells:
        skipped = {"export", "remove-cell"} & set(cell.metadata.get("tags", []))
        if cell.cell_type == "code" and not skipped:
            body = [part for part in ast.parse(cell.source).body if kept(part, values)]
            exec(compile(ast.Module(body, []), chapter, "exec", flag), names)
    return names
