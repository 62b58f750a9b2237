"""Reach the book's extensions, and make small projects to try the checks on."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "book" / "_ext", Path(__file__).parent):
    sys.path.insert(0, str(folder))

from environments import build, copy_project  # noqa: E402

HEADER = """\
---
jupytext:
  formats: md:myst,ipynb
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
export:
  module: {module}
  doc: One line.
---

# A chapter

Some text.
"""
Write = Callable[..., Path]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the wheel and the source distribution of the project as it is now."""
    folder = tmp_path_factory.mktemp("build")
    project = copy_project(folder / "project")
    return {kind: build(project, folder, kind) for kind in ("build_sdist", "build_wheel")}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return the folder of a project with no chapters yet."""
    (tmp_path / "book").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n")
    return tmp_path


@pytest.fixture
def write(project: Path) -> Write:
    """Return a function that writes a chapter of (tags, source) cells."""

    def write_chapter(
        page: str,
        *cells: tuple[str, str],
        module: str | None = None,
        text: str = "",
        exports: bool = True,
    ) -> Path:
        path = project / "book" / f"{page}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        header = HEADER.format(module=page if module is None else module)
        if not exports:
            start, end = header.index("export:"), header.index("---", 4)
            header = header[:start] + header[end:]
        parts = [header + text]
        for tags, source in cells:
            parts.append(f"```{{code-cell}}\n:tags: [{tags}]\n\n{source}\n```\n")
        path.write_text("\n".join(parts), encoding="utf-8")
        return path

    return write_chapter
