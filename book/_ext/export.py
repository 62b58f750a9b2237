"""Write what follows from the chapters: the package and the paired notebooks.

A chapter is a MyST notebook under ``book/``. Where its front matter names a module,
its cells tagged ``export`` become that module; and the whole chapter becomes a paired
``.ipynb`` without outputs beside it, with one cell more: it installs the package where
that is missing (``colab.py``). The same chapters always give the same bytes.

The package has two kinds of modules. Those in the folders ``EXPORTED`` are written from
chapters; those in the folders ``BY_HAND`` are ordinary modules.

Usage::

    python book/_ext/export.py                        # everything
    python book/_ext/export.py book/model/layers.md   # some chapters
    python book/_ext/export.py --check                # list what is stale, exit 1
    python book/_ext/export.py --publish _build/html  # the notebooks, for Colab
"""

import argparse
import ast
import copy
import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import yaml
from colab import TAG
from colab import cell as install_cell
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "annotated_transformer"
MARK = "# Written from "
EXPORTED = ("model", "training", "translation", "results", "background")
BY_HAND = ("fast", "engine", "data", "interop", "exercises", "pretrained", "serving", "cli")

INIT = '''\
{mark}the chapters in book/{part}/: edit them instead.
"""The modules that the chapters in ``book/{part}/`` define."""
'''


class ExportError(Exception):
    """A chapter cannot be exported; the message names the file and the cell."""


def front_matter(text: str) -> dict[str, Any]:
    """Return the YAML front matter of a chapter's text, or an empty dict."""
    if not text.startswith("---\n") or "\n---\n" not in text[4:]:
        return {}
    found: dict[str, Any] | None = yaml.safe_load(text[4 : text.index("\n---\n", 4)])
    return found or {}


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
            for line in str(cell.source).splitlines():
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
    """Return the exported cells of a chapter, each parsed."""
    text = chapter.read_text(encoding="utf-8")
    page = chapter.relative_to(root).as_posix()
    cells = []
    for number, source in enumerate(export_cells(notebook), start=1):
        first = text[: max(text.find(source), 0)].count("\n") + 1
        try:
            ast.parse(source)
        except SyntaxError as error:
            line = first + (error.lineno or 1) - 1
            raise ExportError(
                f"{page}:{line}: export cell {number} does not parse: {error.msg}"
            ) from None
        cells.append(source)
    return cells


def module(chapter: Path, notebook: NotebookNode, root: Path) -> tuple[Path, str] | None:
    """Return the path and the source of the module that a chapter exports, if it exports one."""
    page = chapter.relative_to(root).as_posix()
    spec = notebook.metadata.get("export")
    if spec is None:
        if export_cells(notebook):
            raise ExportError(f"{page}: the front matter needs export: {{module: ..., doc: ...}}")
        return None
    if not {"module", "doc"} <= set(spec):
        raise ExportError(f"{page}: the front matter needs export: {{module: ..., doc: ...}}")
    own = chapter.relative_to(root / "book").with_suffix("").as_posix()
    if spec["module"] != own:
        raise ExportError(
            f"{page}: the front matter exports module {spec['module']}, "
            f"but the package mirrors the book: {own}"
        )
    if "/" in own and own.split("/")[0] not in EXPORTED:
        raise ExportError(f"{page}: modules are exported to {', '.join(EXPORTED)} only")
    path = root / PACKAGE / f"{own}.py"
    note = f"{MARK}{page}: edit the chapter instead."
    head = f'{note}\n"""{str(spec["doc"]).strip()}"""'
    try:
        source = "\n\n".join([head, *checked_cells(chapter, notebook, root)])
        return path, ruff(source + "\n", path, root)
    except ExportError as error:
        raise ExportError(f"{page}: {error}") from None


def paired(notebook: NotebookNode, repository: str = "") -> str:
    """Return the text of a chapter's ``.ipynb``: no outputs, ids from the cells.

    Its first code cell installs the package, from the repository if there is no clone.
    """
    notebook = copy.deepcopy(notebook)
    notebook.cells = [cell for cell in notebook.cells if TAG not in tags(cell)]
    kinds = [cell.cell_type for cell in notebook.cells]
    hidden = {"tags": [TAG], "cellView": "form", "jupyter": {"source_hidden": True}}
    first = nbformat.v4.new_code_cell(
        install_cell(repository, notebook.metadata.get("extras", "")), metadata=hidden
    )
    notebook.cells.insert(kinds.index("code") if "code" in kinds else len(kinds), first)
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
    text: str = nbformat.writes(notebook)
    return text + "\n"


def targets(selected: Sequence[Path], root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield each file that follows from the chapters, with its content."""
    parts: set[str] = set()
    for chapter in selected:
        try:
            notebook = jupytext.read(chapter)
        except Exception as error:
            page = chapter.relative_to(root).as_posix()
            raise ExportError(f"{page}: {error}") from None
        yield chapter.with_suffix(".ipynb"), paired(notebook)
        if (exported := module(chapter, notebook, root)) is None:
            continue
        yield exported
        if (part := exported[0].parent.relative_to(root / PACKAGE).as_posix()) != ".":
            parts.add(part)
    for part in sorted(parts):
        yield (
            root / PACKAGE / part / "__init__.py",
            INIT.format(part=part, mark=MARK),
        )


def orphans(wanted: set[Path], root: Path) -> list[Path]:
    """Return the modules and notebooks that a chapter should define, and none does.

    These are all modules in the folders ``EXPORTED``, and any other that says it was written
    from a chapter.
    """
    package = root / PACKAGE
    found = [p for p in (root / "book").rglob("*.ipynb") if ".ipynb_check" not in str(p)]
    for path in package.rglob("*.py"):
        part = path.relative_to(package).parts[0]
        if part in EXPORTED or path.read_text("utf-8").startswith(MARK):
            found.append(path)
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
            # A notebook may be a reader's own.
            generated = path.suffix == ".py" and path.read_text("utf-8").startswith(MARK)
            if generated and not check:
                path.unlink()
                report.append(f"removed {path.relative_to(root)}")
            else:
                report.append(f"no chapter defines {path.relative_to(root)}")
    return report


def publish(folder: Path, repository: str, root: Path = ROOT) -> None:
    """Write the notebooks to a folder; they install the package from the repository.

    Args:
        folder: Gets the notebooks under their paths in the project.
        repository: Where pip finds the package, such as ``https://github.com/me/book@main``.
        root: The project's folder.
    """
    for chapter in chapters(root):
        name = chapter.relative_to(root).with_suffix(".ipynb")
        text = paired(jupytext.read(chapter), repository)
        for path in (folder / name, folder / "_sources" / name):  # these the pages offer to load
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("chapters", nargs="*", type=Path, metavar="CHAPTER.md")
    parser.add_argument("--check", action="store_true", help="list what is stale")
    parser.add_argument("--publish", type=Path, metavar="DIR", help="write notebooks to publish")
    options = parser.parse_args(arguments)
    if options.publish:
        if not (repository := os.environ.get("BOOK_REPOSITORY_URL")):
            print("--publish: BOOK_REPOSITORY_URL must name the repository", file=sys.stderr)
            return 2
        publish(options.publish, f"{repository}@{os.environ.get('BOOK_REPOSITORY_COMMIT', 'main')}")
        return 0
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
