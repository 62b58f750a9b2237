"""The reference: which modules it lists, and how it writes names, defaults and constants."""

import ast
import functools
import html
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import reference
import yaml
from docutils import nodes
from house import ROOT
from sphinx.addnodes import desc_signature
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import docutils_namespace

import annotated_transformer
from annotated_transformer import article
from annotated_transformer.model.architecture import EncoderLayer

APP: Any = None  # which is not asked
HOME: dict[str, str] = vars(annotated_transformer)["_HOME"]
PAGES = [(ROOT / f"{page}.md").read_text(encoding="utf-8") for page in reference.PAGES]
SAMPLE = '''
"""A sample, with the option --corpus and "quotes"."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from numpy.typing import ArrayLike

SHORT = {"a": 1}  #: Listed with its value.
LONG = "x" * 200  #: Listed without it.
MANY = {"key": "y" * 200}  #: Listed with its keys.
PLAIN = 3  # not listed


class Ids(NamedTuple):
    """Two numbers."""

    one: int = 1
    two: int = 2


class Writer(Protocol):
    """What writes."""

    kind = Ids

    def __call__(self) -> None:
        """Write it."""


@dataclass
class Sizes:
    """Sizes of a model."""

    width: int = 3
    names: list[str] = field(default_factory=list)
    dropped: frozenset[str] = frozenset("abc")


def draw(values: ArrayLike, ids: Ids = Ids(), sizes: Sizes = Sizes(), other: Sizes = Sizes(4),
         log=print, most=2**36, near: Path = Path("/a/b"), given=object(), key=lambda x: x) -> None:
    """Draw.

    Args:
        values: Of the curve.
    """
'''


@functools.cache
def listed() -> dict[str, Path]:
    """Return the file of each module of the reference."""
    found = {}
    for name, _ in reference.modules():
        path = ROOT / name.replace(".", "/")
        found[name] = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return found


def test_what_users_import_is_listed() -> None:
    names = {name.removeprefix("annotated_transformer.") for name in listed()}
    assert {"pretrained", "exercises", "exercises.machinery", "article", "notation"} <= names
    assert set(HOME.values()) <= names
    empty = {
        "model",
        "engine",
        "fast",
        "data.grammar",
        "__main__",
        "cli.main",
        "annotated_transformer",
    }
    assert not names & {*empty, "data.grammar.clauses", "exercises.attending"}


def test_a_module_says_where_it_is_and_what_is_stable() -> None:
    line = reference.imports("annotated_transformer.training.copy_task", "book/training/copy_task")
    assert line == (
        "Module `annotated_transformer.training.copy_task`, defined in "
        "{doc}`/book/training/copy_task`. "
        "Also importable from `annotated_transformer`, and stable: `data_gen`."
    )
    assert reference.imports("annotated_transformer.article", "").endswith("article`.")


def test_stable_names_are_marked() -> None:
    names = {
        "annotated_transformer.model.attention": ["attention", "MultiHeadedAttention"],
        "annotated_transformer.article": ["attention", "Encoder", "_Stack"],
    }
    found = []
    for module, each in names.items():
        tree = nodes.document(None, None)
        for name in each:
            tree += desc_signature(name, name, module=module, fullname=name)
        reference.tidy(APP, tree)
        found += [node.astext() for node in tree.children]
    helpers = ["MultiHeadedAttention", "_Stack"]  # the first is another module's
    assert [one for one in found if not one.endswith("stable")] == helpers


def test_a_base_of_the_same_name_says_whose_it_is() -> None:
    bases: list[type | str] = [EncoderLayer]
    reference.public_bases(APP, "", article.EncoderLayer, None, bases)
    assert bases == [":py:class:`annotated_transformer.model.architecture.EncoderLayer`"]
    foreign = type("Server", (), {"__module__": "uvicorn.server"})
    bases[:] = [foreign]
    reference.public_bases(APP, "", type("Server", (foreign,), {}), None, bases)
    assert bases == ["``uvicorn.server.Server``"]  # no page of ours could be linked


@pytest.mark.parametrize("page", PAGES)
def test_first_names_are_there_and_stable_where_the_page_says_so(page: str) -> None:
    rows = re.findall(r"^\|.*\{py:.*$", page, re.MULTILINE)
    found = re.findall(r"`~annotated_transformer\.([\w.]+)\.(\w+)`", "\n".join(rows))
    assert len(rows) == 8
    for module, name in found:
        assert f"annotated_transformer.{module}" in listed()
        if "itself gives as well" in page:
            assert HOME[name] == module


# --- docstrings ------------------------------------------------------------------------------


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, of its functions and classes, and of fields."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def unlisted(sources: Mapping[str, str], stable: Iterable[tuple[str, str]] = ()) -> list[str]:
    """Return the constants that the reference does not list, because no comment tells of them.

    Args:
        sources: The modules by name.
        stable: Names that must be listed where they are constants, with their modules; so must
            those that a docstring names.
    """
    defined = {
        name: set(re.findall(r"^ {0,4}([A-Z][A-Z_]+)(?:: [^=\n]+)? = ", source, re.MULTILINE))
        for name, source in sources.items()
    }
    needed = {(home, one) for one, home in stable if one in defined[home]}
    for name, source in sources.items():
        for text in docstrings(source):
            for one in re.findall(r"``([A-Z][A-Z_]+)\b(?:\[\w+\])?``", text):
                homes = [name] if one in defined[name] else defined
                needed |= {(home, one) for home in homes if one in defined[home]}
    found = []
    for home in {home for home, _ in needed}:
        told = ModuleAnalyzer.for_string(sources[home], home).find_attr_docs()
        found += [f"{a}.{one}" for a, one in needed if a == home and ("", one) not in told]
    return sorted(found)


def test_constants_that_are_named_are_listed() -> None:
    sources = {name: path.read_text("utf-8") for name, path in listed().items()}
    stable = [(one, f"annotated_transformer.{home}") for one, home in HOME.items()]
    assert unlisted(sources, stable) == []
    source = 'MOST = 3\nSET = 1\n\n\ndef f() -> None:\n    """Return ``MOST`` or ``NAME``."""\n'
    assert unlisted({"a": source}) == ["a.MOST"]
    assert unlisted({"a": source}, [("SET", "a"), ("f", "a")]) == ["a.MOST", "a.SET"]
    assert unlisted({"a": source.replace("3", "3  #: The most.")}) == []


def mistaken(text: str) -> list[str]:
    """Return the first line on a result if what stands before its colon is taken for a type."""
    lines = re.findall(r"^ *(?:Returns|Yields):\n +(\S.*)$", text, re.MULTILINE)
    return [line for line in lines if ":" in re.sub(r"(:[\w:]+:)?`+.+?`+", "", line)]


def test_no_result_is_taken_for_a_type() -> None:
    """Before a colon in its first line, Sphinx expects the type."""
    found = [
        f"{name}: {one}"
        for name, path in listed().items()
        for text in docstrings(path.read_text("utf-8"))
        for one in mistaken(text)
    ]
    assert found == []
    assert mistaken("Return.\n\n    Returns:\n        Two: a and b.\n") == ["Two: a and b."]
    assert mistaken("Return.\n\n    Returns:\n        A pair, ``a: b``, of :func:`f`.\n") == []


# --- in Sphinx -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the text of a page about ``SAMPLE``, by the options of the book."""
    root = tmp_path_factory.mktemp("reference")
    options = yaml.safe_load((ROOT / "_config.yml").read_text("utf-8"))["sphinx"]["config"]
    kinds = ("autodoc", "napoleon", "smartquotes", "add_module")
    (root / "shown.py").write_text(SAMPLE)
    text = f"# One\n\nThe option --size.\n\n{reference.automodule('shown')}"
    (root / "index.md").write_text(text)
    warnings = io.StringIO()
    with docutils_namespace(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        Sphinx(
            *(root, None, root / "_build", root / "_trees", "html"),
            confoverrides={
                "extensions": [
                    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "reference",
                ],
                **{key: value for key, value in options.items() if key.startswith(kinds)},
            },
            status=None,
            warning=warnings,
        ).build()  # fmt: skip
    assert warnings.getvalue() == ""
    text = re.sub(r"<[^>]+>", "", (root / "_build/index.html").read_text("utf-8"))
    return re.sub(r"\s+", " ", html.unescape(text))


def test_options_keep_their_dashes(page: str) -> None:
    assert "The option --size." in page
    assert "the option --corpus and “quotes”" in page


def test_defaults_are_short(page: str) -> None:
    assert "Sizes(width: int = 3, names: list[str] = ..., dropped: frozenset[str] = ...)" in page
    assert "ids: Ids = Ids(), sizes: Sizes = Sizes(), other: Sizes = Sizes(width=4, " in page
    assert "log=print, most=2**36, near: Path = ..., given=..., key=...) → None" in page
    assert "draw(values: ArrayLike, ids" in page
    assert "values – Of the curve." in page


def test_fields_of_a_named_tuple_are_not_numbered(page: str) -> None:
    assert "Two numbers." in page
    assert "alias" not in page.lower()
    assert "Bases: object" not in page


def test_calls_are_listed_but_not_that_of_a_protocol(page: str) -> None:
    assert "class Writer¶ Bases: Protocol What writes. __call__() → None¶ Write it. class" in page


def test_constants_are_listed_if_they_are_explained(page: str) -> None:
    assert "SHORT = {'a': 1}¶ Listed with its value." in page
    assert "MANY = {'key': ...}¶ Listed with its keys." in page
    assert "LONG¶ Listed without it." in page
    assert "PLAIN" not in page
