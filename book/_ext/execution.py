"""Which chapters must run again, and which pages must be read again.

The cache of outputs knows a chapter by its code alone. What the code imports, the
records that it reads and the pinned environment count as well, so a key is kept
for each chapter beside its outputs. ``python book/_ext/execution.py`` prints the
notebooks whose outputs are missing or were made from something else.
"""

import ast
import hashlib
import json
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import jupytext
from export import PACKAGE, ROOT, chapters
from jupyter_cache import get_cache
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

CACHE = ROOT / "_build" / ".jupyter_cache"
KEYS = CACHE / "keys"
COMMAND = "annotated-transformer"


def page_of(chapter: Path) -> str:
    """Return a chapter's page, such as ``book/model/attention``."""
    return chapter.relative_to(ROOT).with_suffix("").as_posix()


def warned(outputs: list[dict[str, Any]]) -> str:
    """Return what a cell wrote to the standard error, where warnings go; no page shows any."""
    return "".join(each["text"] for each in outputs if each.get("name") == "stderr")


def imports(source: str) -> set[str]:
    """Return the modules of the package that a source names in its imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name.split(".")[0] == PACKAGE}


def file_of(name: str) -> Path | None:
    """Return the file of a module of the package, if there is one."""
    path = ROOT / name.replace(".", "/")
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


@cache
def needed_by(path: Path) -> frozenset[Path]:
    """Return the files of the package that a module imports, directly or not."""
    found: set[Path] = set()
    todo = [path]
    while todo:
        for name in imports(todo.pop().read_text(encoding="utf-8")):
            file = file_of(name)
            if file is not None and file not in found:
                found.add(file)
                todo.append(file)
    return frozenset(found)


def plain(source: str) -> str:
    """Return a cell without the lines that only IPython understands."""
    lines = source.splitlines()
    return "\n".join(
        line[: len(line) - len(line.lstrip())] + "pass"
        if line.lstrip().startswith(("%", "!"))
        else line
        for line in lines
    )


def key_of(chapter: Path) -> str:
    """Return a digest of everything that a chapter's outputs follow from."""
    notebook = jupytext.read(chapter)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    code = "\n".join(map(plain, cells))
    files: set[Path] = {*ROOT.glob("requirements*.txt"), *(ROOT / PACKAGE).glob("*.html")}
    for name in imports(code):
        if (file := file_of(name)) is not None:
            files |= {file, *needed_by(file)}
    if COMMAND in code:
        files.update((ROOT / PACKAGE).rglob("*.py"))
    for folder in ("results", "benchmarks"):
        if folder in code:
            files.update((ROOT / folder).rglob("*.json"))
    read = ("*.tsv", "*.json", "recipes/*.json", "sweeps/*.json", "sha256sums.txt")
    beside = {file.parent for file in files if file.suffix == ".py"}  # the code that reads them
    files |= {table for parent in beside for name in read for table in parent.glob(name)}
    digest = hashlib.sha256("\0".join(cells).encode())
    for path in sorted(files):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def entry_of(page: str) -> dict[str, Any]:
    """Return what is kept about a chapter's outputs, or an empty dict."""
    path = KEYS / f"{page}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def remember(chapter: Path, seconds: float) -> None:
    """Keep what the outputs of a chapter, just made, follow from."""
    path = KEYS / f"{page_of(chapter)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"key": key_of(chapter), "made": time.time(), "seconds": seconds}
    path.write_text(json.dumps(entry), encoding="utf-8")


def stale() -> list[Path]:
    """Return the chapters whose outputs are missing or out of date."""
    outputs = get_cache(str(CACHE))
    found = []
    for chapter in chapters():
        try:
            outputs.match_cache_notebook(jupytext.read(chapter))
        except KeyError:
            found.append(chapter)
            continue
        if entry_of(page_of(chapter)).get("key") != key_of(chapter):
            found.append(chapter)
    return found


def seen(env: BuildEnvironment) -> dict[str, Any]:
    """Return which outputs each page was read with."""
    found: dict[str, Any] = vars(env).setdefault("outputs_seen", {})
    return found


def outdated(
    app: Sphinx,
    env: BuildEnvironment,
    added: set[str],
    changed: set[str],
    removed: set[str],
) -> list[str]:
    """Return the pages whose outputs are newer than what the page was read with."""
    return [page for page in env.found_docs if seen(env).get(page) != entry_of(page)]


def note(app: Sphinx, docname: str, source: list[str]) -> None:
    """Remember which outputs a page is read with."""
    seen(app.env)[docname] = entry_of(docname)


def merge(app: Sphinx, env: BuildEnvironment, docnames: set[str], other: BuildEnvironment) -> None:
    """Take what a parallel reader found."""
    for docname in docnames:
        if docname in seen(other):
            seen(env)[docname] = seen(other)[docname]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", note)
    app.connect("env-merge-info", merge)
    return {"env_version": 1, "parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    for path in stale():
        print(path.with_suffix(".ipynb").relative_to(ROOT))
    sys.exit(0)
