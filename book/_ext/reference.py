"""The reference: every module of the package, those of the chapters in their order."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from export import MARK, PACKAGE, front_matter
from numpy.typing import ArrayLike
from sphinx.addnodes import desc_signature, pending_xref
from sphinx.application import Sphinx
from sphinx.domains import Domain
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc import DataDocumenter
from sphinx.util.inspect import object_description
from sphinx.util.typing import stringify_annotation

import annotated_transformer

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"book/reference/api": False, "book/reference/api_engineering": True}
ENGINEERING = ("fast", "engine", "data", "interop", "serving")  # folders of the second page
SHOWN = {"exercises": ("__init__", "declare", "machinery"), "grammar": ("pairs",)}
LONGEST_VALUE = 160  # characters of a constant
ARRAY_LIKE = stringify_annotation(ArrayLike, "smart")


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
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if path.stem == "__init__" else parts)
        if name not in known and not hidden(path):
            found.append((name, ""))
    return found


def hidden(path: Path) -> bool:
    """Whether the reference leaves a module out that no chapter in the table of contents defines.

    What checks an exercise is a list of mistakes, which readers should not come upon. The command
    line has a chapter, and ``--help``; so has the way in which the grammar makes its sentences.
    """
    text, folder = path.read_text(encoding="utf-8"), path.parent.name
    if text.startswith(MARK) or folder == "cli" or path.stem not in SHOWN.get(folder, (path.stem,)):
        return True
    if path.stem == "__init__":  # only a few do more than import
        return folder == PACKAGE or not re.search(r"^(def|class) ", text, re.MULTILINE)
    return path.name.startswith("_")


def imports(name: str, page: str) -> str:
    """Return the line below the title of a module: where it is, and what users may rely on."""
    origin = f", defined in {{doc}}`/{page}`" if page else ""
    line = f"Module `{name}`{origin}."
    homes: dict[str, str] = vars(annotated_transformer)["_HOME"]
    if top := [f"`{one}`" for one, home in homes.items() if f"{PACKAGE}.{home}" == name]:
        line += f" Also importable from `{PACKAGE}`, and stable: {', '.join(top)}."
    return line


def automodule(name: str) -> str:
    """Return the directive for a module."""
    options = ("members", "ignore-module-all", "show-inheritance", "special-members: __call__")
    lines = [f".. automodule:: {name}", *(f"   :{one}" + ":" * (":" not in one) for one in options)]
    return "\n".join(["```{eval-rst}", *lines, "```\n"])


def add_modules(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the documentation of each of its modules to a page of the reference."""
    if docname not in PAGES:
        return
    for name, page in modules():
        if (name.split(".")[1] in ENGINEERING) != PAGES[docname]:
            continue
        title = name.removeprefix(PACKAGE + ".")
        source[0] += f"\n## {title}\n\n{imports(name, page)}\n\n{automodule(name)}"


def skip_fields(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Leave out what says nothing: the numbers of a named tuple's fields, and names of a class."""
    numbered = str(getattr(obj, "__doc__", "")).startswith("Alias for field number")
    alias = what == "class" and isinstance(obj, type) and obj.__name__ != name
    return True if numbered or alias else None


def short_default(value: Any) -> str | None:
    """Return a default value as one would write it, None where Sphinx does so.

    Paths are those of the machine that builds the book, and a set has no order.
    """
    kind = type(value)
    if inspect.isroutine(value):
        return value.__name__ if value.__name__.isidentifier() else "..."
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return f"{kind.__name__}()" if value == kind() else None
    if kind is int and value > 2**16 and not value & (value - 1):
        return f"2**{value.bit_length() - 1}"
    if isinstance(value, Path | frozenset) or "<" in object_description(value):
        return "..."
    return None


def short_defaults(
    app: Sphinx, what: str, name: str, obj: Any, options: object, signature: str, returns: str
) -> tuple[str, str] | None:
    """Write the defaults of a signature, and types that NumPy spells out, in their short form."""
    if not signature:
        return None
    if getattr(obj, "__dict__", {}).get("_is_protocol"):  # nobody makes one
        return "", returns
    signature, returns = (
        text and text.replace(ARRAY_LIKE, "ArrayLike") for text in (signature, returns)
    )
    for parameter in inspect.signature(obj).parameters.values():
        default = parameter.default
        if default is not parameter.empty and (short := short_default(default)):
            long = re.escape(object_description(default))
            before = rf"(\b{parameter.name}(?:: [^=]*?)? ?= ?)"  # with its type, if it has one
            if found := re.search(before + long, signature):
                signature = signature[: found.end(1)] + short + signature[found.end() :]
    return signature, returns


def stable(module: str, name: str) -> bool:
    """Whether users may rely on a name of a module."""
    if module == f"{PACKAGE}.article":
        return name in import_module(module).__all__
    home = vars(annotated_transformer)["_HOME"].get(name)
    return home is not None and module == f"{PACKAGE}.{home}"


def tidy(app: Sphinx, tree: nodes.document) -> None:
    """Put the dash between an argument and its meaning, which Sphinx leaves to smart quotes.

    That a class has no base is not said; that a name is stable, is.
    """
    for signature in tree.findall(desc_signature):
        if stable(str(signature.get("module")), str(signature.get("fullname"))):
            signature += nodes.inline("", "stable", classes=["stable"])
    for paragraph in [*tree.findall(nodes.paragraph)]:
        if paragraph.astext() == "Bases: object":
            paragraph.parent.remove(paragraph)
    for node in [*tree.findall(nodes.Text)]:
        if node.astext() == " -- ":
            node.parent.replace(node, nodes.Text(" – "))


class Dots:
    """Stands for a value that is too long to show."""

    def __repr__(self) -> str:
        """Return three dots."""
        return "..."


class ShortData(DataDocumenter):
    """A constant of a module: of a long dictionary the keys are shown, other long values not."""

    priority = DataDocumenter.priority + 1

    def import_object(self, raiseerror: bool = False) -> bool:
        """Find the constant."""
        found = super().import_object(raiseerror)
        self.long = found and len(object_description(self.object)) > LONGEST_VALUE
        if self.long and isinstance(self.object, Mapping):
            self.object, self.long = dict.fromkeys(self.object, Dots()), False
        return found

    def should_suppress_value_header(self) -> bool:
        """Whether the value is left out."""
        return self.long or super().should_suppress_value_header()


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
        elif module.startswith(PACKAGE) and base.__name__ == getattr(obj, "__name__", ""):
            bases[i] = f":py:class:`{module}.{base.__name__}`"
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
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-signature", short_defaults, priority=600)  # after the types
    app.connect("doctree-read", tidy)
    app.add_autodocumenter(ShortData, override=True)
    app.connect("warn-missing-reference", quiet)
    app.connect("env-get-outdated", always)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
