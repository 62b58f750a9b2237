"""Write what follows from the chapters: the package and the paired notebooks.

A chapter is a MyST notebook under ``book/``. Its cells tagged ``export`` become
the module that its front matter names, and the whole chapter becomes a paired
``.ipynb`` without outputs beside it. The same chapters always give the same
bytes.

Usage::

    python book/_ext/export.py                        # everything
    python book/_ext/export.py book/model/layers.md   # some chapters
    python book/_ext/export.py --check                # list what is stale, exit 1
"""

import argparse
import ast
import copy
import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import jupytext
import nbformat
import yaml
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "annotated_transformer"
MARK = "# Written from "
WIDTH = 100

INIT = '''\
"""The modules that the chapters in ``book/{part}/`` define."""
{mark}the chapters in book/{part}/: edit them instead.
'''

MAIN = '''\
"""Run the command line: ``python -m annotated_transformer``.

The commands are defined in book/translation/command.md.
"""
# Written from book/_ext/export.py: edit it instead.

from annotated_transformer.translation.command import main

if __name__ == "__main__":
    raise SystemExit(main())
'''


class ExportError(Exception):
    """A chapter cannot be exported; the message names the file and the cell."""


def front_matter(text: str) -> dict:
    """Return the YAML front matter of a chapter's text, or an empty dict."""
    if not text.startswith("---\n") or "\n---\n" not in text[4:]:
        return {}
    return yaml.safe_load(text[4 : text.index("\n---\n", 4)]) or {}


def chapters(root: Path = ROOT) -> list[Path]:
    """Return the notebooks of the book: Markdown files with Jupytext's header."""
    return [
        path
        for path in sorted((root / "book").rglob("*.md"))
        if not any(part.startswith(("_", ".")) for part in path.relative_to(root).parts)
        and "jupytext" in front_matter(path.read_text(encoding="utf-8"))
    ]


def title(notebook: NotebookNode) -> str:
    """Return the text of the chapter's first heading."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if line.startswith("# "):
                    return line[2:].strip()
    return "Untitled"


def tags(cell: NotebookNode) -> list[str]:
    """Return the tags of a cell."""
    return list(cell.metadata.get("tags", []))


def export_cells(notebook: NotebookNode) -> list[str]:
    """Return the sources of the cells that the package gets."""
    return [
        cell.source
        for cell in notebook.cells
        if cell.cell_type == "code" and "export" in tags(cell)
    ]


def with_origin(source: str, page: str) -> str:
    """Append a line naming the chapter to the docstrings of a cell.

    Args:
        source: Python source of one cell.
        page: The chapter's path, such as ``book/model/attention.md``.

    Returns:
        The source, in which the docstring of every function and class defined
        at the top level ends in ``Defined in: <page>``.
    """
    # ast counts columns in bytes, and so does this.
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for node in reversed(ast.parse(source).body):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if ast.get_docstring(node, clean=False) is None:
            continue
        text = node.body[0]
        row, column = (text.end_lineno or 1) - 1, text.end_col_offset or 0
        line = lines[row]
        indent = b" " * text.col_offset
        quotes = 3 if line[:column].endswith((b'"""', b"'''")) else 1
        if quotes == 1:
            raise ExportError(
                f"the docstring of {node.name} needs triple quotes: the exporter adds a line to it"
            )
        start, end = line[: column - quotes].rstrip(), line[column - quotes :]
        added = b"\n\n" if start else b"\n"
        lines[row] = start + added + indent + f"Defined in: {page}\n".encode() + indent + end
    return b"".join(lines).decode()


def ruff(source: str, path: Path, root: Path) -> str:
    """Sort the imports of a module and format it."""
    for command in (["check", "--select=I", "--fix"], ["format"]):
        result = subprocess.run(
            [
                *(sys.executable, "-m", "ruff", *command, "--quiet"),
                *(f"--stdin-filename={path}", "-"),
            ],
            input=source,
            text=True,
            encoding="utf-8",
            capture_output=True,
            cwd=root,
        )
        if result.returncode:
            raise ExportError(f"ruff {command[0]}: {result.stderr.strip()}")
        source = result.stdout
    return source


def checked_cells(chapter: Path, notebook: NotebookNode, root: Path) -> list[str]:
    """Return the exported cells of a chapter, each parsed and with its origin."""
    text = chapter.read_text(encoding="utf-8")
    page = chapter.relative_to(root).as_posix()
    cells = []
    for number, source in enumerate(export_cells(notebook), start=1):
        first = text[: max(text.find(source), 0)].count("\n") + 1
        try:
            cells.append(with_origin(source, page))
        except SyntaxError as error:
            line = first + (error.lineno or 1) - 1
            raise ExportError(
                f"{page}:{line}: export cell {number} does not parse: {error.msg}"
            ) from None
        except ExportError as error:
            raise ExportError(f"{page}:{first}: export cell {number}: {error}") from None
    return cells


def module(chapter: Path, notebook: NotebookNode, root: Path) -> tuple[Path, str]:
    """Return the path and the source of the module that a chapter exports."""
    page = chapter.relative_to(root).as_posix()
    spec = notebook.metadata.get("export") or {}
    if not {"module", "doc"} <= set(spec):
        raise ExportError(f"{page}: the front matter needs export: {{module: ..., doc: ...}}")
    own = chapter.relative_to(root / "book").with_suffix("").as_posix()
    if spec["module"] != ("__init__" if own == "index" else own):
        raise ExportError(
            f"{page}: the front matter exports module {spec['module']}, "
            f"but the package mirrors the book: {own}"
        )
    path = root / PACKAGE / f"{spec['module']}.py"
    cells = checked_cells(chapter, notebook, root)
    origin = f"Defined in the chapter *{title(notebook)}* ({page})."
    if len(origin) > WIDTH:
        origin = f"Defined in the chapter *{title(notebook)}*\n({page})."
    head = f'"""{str(spec["doc"]).strip()}\n\n{origin}\n"""'
    note = f"{MARK}{page}: edit the chapter instead."
    try:
        return path, ruff("\n\n".join([head, note, *cells]) + "\n", path, root)
    except ExportError as error:
        raise ExportError(f"{page}: {error}") from None


def paired(notebook: NotebookNode) -> str:
    """Return the text of a chapter's ``.ipynb``: no outputs, ids from the cells."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata.get("jupytext", {}).get("text_representation", {}).pop(
        "jupytext_version", None
    )
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()
        digest = digest[:10]
        seen[digest] += 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return nbformat.writes(notebook) + "\n"


def targets(selected: Sequence[Path], root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield each file that follows from the chapters, with its content."""
    parts: set[str] = set()
    for chapter in selected:
        try:
            notebook = jupytext.read(chapter)
        except Exception as error:
            page = chapter.relative_to(root).as_posix()
            raise ExportError(f"{page}: {error}") from None
        path, source = module(chapter, notebook, root)
        yield path, source
        yield chapter.with_suffix(".ipynb"), paired(notebook)
        if (part := path.parent.relative_to(root / PACKAGE).as_posix()) != ".":
            parts.add(part)
    for part in sorted(parts):
        yield (
            root / PACKAGE / part / "__init__.py",
            INIT.format(part=part, mark=MARK),
        )
    yield root / PACKAGE / "py.typed", ""
    if (root / "book/translation/command.md").exists():
        yield root / PACKAGE / "__main__.py", MAIN


def orphans(wanted: set[Path], root: Path) -> list[Path]:
    """Return the modules and notebooks that no chapter defines any more."""
    found = [
        *(root / PACKAGE).rglob("*.py"),
        *(p for p in (root / "book").rglob("*.ipynb") if ".ipynb_check" not in str(p)),
    ]
    return sorted(path for path in found if path not in wanted)


def run(selected: Sequence[Path], check: bool, root: Path = ROOT) -> list[str]:
    """Write or check what follows from the chapters.

    Args:
        selected: Chapters to export; empty means all, and looks for orphans.
        check: Only report what is stale.
        root: The project's folder.

    Returns:
        One line for each file that was written, or that is stale.
    """
    report = []
    wanted = dict(targets(selected or chapters(root), root))
    for path, content in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            report.append(f"{'stale' if check else 'wrote'} {path.relative_to(root)}")
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8", newline="\n")
    if not selected:
        for path in orphans(set(wanted), root):
            generated = path.suffix == ".ipynb" or MARK in path.read_text("utf-8")
            if generated and not check:
                path.unlink()
                report.append(f"removed {path.relative_to(root)}")
            else:
                report.append(f"no chapter defines {path.relative_to(root)}")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("chapters", nargs="*", type=Path, metavar="CHAPTER.md")
    parser.add_argument("--check", action="store_true", help="list what is stale")
    options = parser.parse_args(arguments)
    known = chapters()
    selected = [path.resolve() for path in options.chapters]
    for path in selected:
        if path not in known:
            print(f"{path}: not a chapter (a notebook under book/)", file=sys.stderr)
            return 2
    try:
        report = run(selected, options.check)
    except ExportError as error:
        print(error, file=sys.stderr)
        return 2
    for line in report:
        print(line)
    return int(options.check and bool(report))


if __name__ == "__main__":
    sys.exit(main())
