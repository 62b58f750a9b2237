"""The reference: every module of the package, those of the chapters in their order."""

from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from export import MARK, PACKAGE, front_matter
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains import Domain
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"book/reference/api": False, "book/reference/api_engineering": True}
ENGINEERING = ("fast", "engine", "data", "interop", "serving")  # folders of the second page


def reading_order(toc: Path = ROOT / "_toc.yml") -> list[str]:
    """Return the pages of the book, such as ``book/model/attention``, in order."""
    data = yaml.safe_load(toc.read_text(encoding="utf-8"))
    parts = [data, *data.get("parts", [])]
    files = [entry["file"] for part in parts for entry in part.get("chapters", [])]
    return [data["root"], *files]


def modules() -> list[tuple[str, str]]:
    """Return each module with the chapter that defines it, or "" where it is written by hand.

    Exported modules come first, in reading order.
    """
    found = []
    for page in reading_order():
        path = ROOT / f"{page}.md"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if spec := front_matter(text).get("export"):
            found.append((f"{PACKAGE}.{spec['module'].replace('/', '.')}", page))
    known = {name for name, _ in found}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        hidden = path.name.startswith("_") or path.read_text(encoding="utf-8").startswith(MARK)
        # What checks an exercise is a list of mistakes, which readers should not come upon.
        hidden |= path.parent.name == "exercises" and path.stem != "machinery"
        hidden |= path.parent.name == "cli"  # which has a chapter, and --help
        # How the grammar makes its sentences has a chapter, too; what they are is in its pairs.
        hidden |= path.parent.name == "grammar" and path.stem != "pairs"
        if name not in known and not hidden:
            found.append((name, ""))
    return found


def add_modules(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the documentation of each of its modules to a page of the reference."""
    if docname not in PAGES:
        return
    for name, page in modules():
        if (name.split(".")[1] in ENGINEERING) != PAGES[docname]:
            continue
        origin = f"Defined in {{doc}}`/{page}`.\n\n" if page else ""
        source[0] += (
            f"\n## {name.removeprefix(PACKAGE + '.')}\n\n{origin}```{{eval-rst}}\n"
            f".. automodule:: {name}\n   :members:\n   :ignore-module-all:\n"
            "   :show-inheritance:\n```\n"
        )


def public_bases(
    app: Sphinx, name: str, obj: object, options: object, bases: list[type | str]
) -> None:
    """Name PyTorch's layers as its documentation does, classes of others without a link.

    Private bases are not named.
    """
    bases[:] = [b for b in bases if isinstance(b, str) or not b.__name__.startswith("_")]
    for i, base in enumerate(bases):
        if isinstance(base, str):
            continue
        module = base.__module__
        if module.startswith("torch.nn.modules."):
            bases[i] = f":py:class:`torch.nn.{base.__name__}`"
        elif module.startswith(("torchtext.", "abc", "contextlib", "uvicorn.")):
            bases[i] = f"``{module}.{base.__name__}``"


def quiet(app: Sphinx, domain: Domain | None, node: pending_xref) -> bool | None:
    """Ask for no link where an annotation names a type of another library.

    A reference that an author writes as a role must lead somewhere.
    """
    written = isinstance(node.next_node(), nodes.literal)
    target = str(node.get("reftarget", ""))
    python = domain is not None and domain.name == "py"
    is_name = all(part.isidentifier() for part in target.split("."))
    return True if python and is_name and not written else None


def always(
    app: Sphinx,
    env: BuildEnvironment,
    added: set[str],
    changed: set[str],
    removed: set[str],
) -> list[str]:
    """Read the reference at every build: its modules may have changed."""
    return [page for page in PAGES if page in env.found_docs]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("source-read", add_modules)
    app.connect("autodoc-process-bases", public_bases)
    app.connect("warn-missing-reference", quiet)
    app.connect("env-get-outdated", always)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
