"""Rules on the package's modules: who may import whom, and how long things may be."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import jupytext
from execution import plain
from export import chapters, tags

PACKAGE = "annotated_transformer"
MODULE_LINES = 500
FUNCTION_LINES = 50
MODEL_LINES = 700  # of model/ together, without complexity
MODEL_CLASS_LINES = 60
ENGINE_CLASS_LINES = 120
CELL_LINES = 30  # of part I, exported or visible
PART_WORDS = 35_000  # of part I, without code, computed captions, exercises and solutions
PART_CHAPTERS = 24
CHAPTER_WORDS = 2_500  # about 25 minutes, with the code between
QUIET = {"print", "len", "show", "Table", "zip", "enumerate"}  # they compute nothing
PACKAGE_LINES = 19_933  # without the exercises; on the way to 12,000: lower it
EXERCISE_LINES = 2_990  # about 45 for each checker

# What each folder may import of the package, besides itself. Top-level modules go by their name.
CORE = {"notation", "model", "training"}
BOOK = {*CORE, "translation", "background", "results", "data", "figures", "fast"}
ALLOWED = {
    "notation": set(),
    "model": {"notation"},
    "training": CORE,
    "translation": CORE,
    "background": {*CORE, "translation"},
    "fast": {*CORE, "translation"},
    "data": {*CORE, "translation"},
    "figures": set(),
    "tree_figures": set(),
    "pretrained": {*CORE, "translation", "data", "engine"},  # the last only when asked for a system
    "article": {*CORE, "translation"},
    "results": {*BOOK, "engine"},
    "engine": BOOK,
    "exercises": BOOK - {"fast", "data"},  # and nothing imports it
    "interop": {*BOOK, "engine"},
    "serving": {*BOOK, "engine", "pretrained"},
    "cli": {*BOOK, "engine", "interop", "pretrained", "serving", "tree_figures"},
    "__init__": set(),
    "__main__": {"cli"},
}


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a module without the package's, such as ``model.attention``."""
    parts = path.relative_to(root / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def modules(root: Path) -> dict[str, ast.Module]:
    """Return the modules of the package by name, parsed."""
    return {
        module_name(path, root): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((root / PACKAGE).rglob("*.py"))
    }


def imported(name: str, tree: ast.Module, known: set[str]) -> set[str]:
    """Return the modules of the package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for one in names:
            if one.split(".")[0] != PACKAGE:
                continue
            inner = one.removeprefix(PACKAGE).lstrip(".")
            while inner and inner not in known:
                inner = inner.rpartition(".")[0]
            found.add(inner or "__init__")
    return found - {name}


def imports_of(root: Path) -> dict[str, set[str]]:
    """Return what each module imports of the package."""
    trees = modules(root)
    return {name: imported(name, tree, set(trees)) for name, tree in trees.items()}


def against_the_layers(root: Path) -> list[str]:
    """Imports run one way: a folder imports from those below it."""
    found = []
    for name, others in imports_of(root).items():
        own = name.split(".")[0]
        for other in sorted(others - {"__init__"}):
            part = other.split(".")[0]
            if part != own and part not in ALLOWED.get(own, set()):
                found.append(f"{name} imports {other}: {own} may not import from {part}")
    return found


def cycles(root: Path) -> list[str]:
    """No module imports itself, by however many others."""
    try:
        list(graphlib.TopologicalSorter(imports_of(root)).static_order())
    except graphlib.CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


def length(node: ast.AST) -> int:
    """Return the lines of a function or class, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])  # type: ignore[attr-defined]
    return int(node.end_lineno - first + 1)  # type: ignore[attr-defined]


def too_long(root: Path) -> list[str]:
    """Modules, functions, the model part and its classes keep to their lengths."""
    found, model = [], 0
    for path in sorted((root / PACKAGE).rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        lines, in_model = len(text.splitlines()), path.parent.name == "model"
        if lines > MODULE_LINES:
            found.append(f"{name} has {lines} lines, more than {MODULE_LINES}")
        in_model = in_model and path.stem != "complexity"
        model += lines if in_model else 0
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            most = FUNCTION_LINES
            if isinstance(node, ast.ClassDef):
                in_engine = path.parent.name == "engine"
                most = MODEL_CLASS_LINES if in_model else ENGINE_CLASS_LINES if in_engine else 0
            if most and (lines := length(node)) > most:
                found.append(f"{name}: {node.name} has {lines} lines, more than {most}")
    if model > MODEL_LINES:
        found.append(f"model/ without complexity has {model} lines, more than {MODEL_LINES}")
    return found


def package_lines(root: Path) -> tuple[int, int]:
    """Return the lines of the package's modules, and of its exercises."""
    lines = {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for path in (root / PACKAGE).rglob("*.py")
    }
    exercises = sum(n for path, n in lines.items() if path.parent.name == "exercises")
    return sum(lines.values()) - exercises, exercises


def long_cells(root: Path, pages: list[str]) -> Iterator[str]:
    """A cell of these pages that is exported or visible is short."""
    hidden = {"hide-input", "remove-input", "remove-cell"}
    for chapter in chapters(root):
        page = chapter.relative_to(root).with_suffix("").as_posix()
        if page not in pages:
            continue
        for number, cell in enumerate(jupytext.read(chapter).cells):
            own = set(tags(cell))
            if cell.cell_type != "code" or (own & hidden and "export" not in own):
                continue
            if (lines := len(plain(cell.source).splitlines())) > CELL_LINES:
                yield f"{page}, cell {number}: {lines} lines, more than {CELL_LINES}"


def words(text: str) -> int:
    """Return how many words a reader reads before the exercises; a formula counts as one.

    What is not on the page does not count: options of directives, such as a box's line for the
    page of all boxes, targets of links, and the text alternative of a picture. Nor do citations,
    and captions that a cell writes.
    """
    story = text.partition("\n## Exercise")[0]
    for hidden in (r"\A---\n.*?\n---\n", r"^```\{code-cell\}.*?^```$"):
        story = re.sub(hidden, "", story, flags=re.DOTALL | re.MULTILINE)
    story = re.sub(r"\$\$.*?\$\$|\$[^$]*\$", " formula ", story, flags=re.DOTALL)
    story = re.sub(r"!\[[^\]]*\]\([^)]*\)|\{cite\}`[^`]*`", "", story)
    unread = r"^(:::|```|:[a-z]+: |\([a-z0-9-]+\)=).*$|<[^>]*>|\{[a-z:]+\}(?=`)"
    story = re.sub(unread, "", story, flags=re.MULTILINE)
    return sum(any(letter.isalnum() for letter in word) for word in story.split())


def names(node: ast.AST) -> set[str]:
    """Return the names that an expression reads or binds; a length says nothing of its text."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "len":
        return set()
    found = {node.id} if isinstance(node, ast.Name) else set[str]()
    return found.union(*map(names, ast.iter_child_nodes(node)))


def bindings(statement: ast.stmt) -> Iterator[tuple[set[str], set[str]]]:
    """Return what a statement assigns to, and the names that each is made of."""
    for node in expressions(statement):
        if isinstance(node, ast.comprehension):
            yield names(node.target), names(node.iter)
    if isinstance(statement, ast.For):
        yield names(statement.target), names(statement.iter)
    elif isinstance(statement, ast.Assign):
        yield set().union(*map(names, statement.targets)), names(statement.value)
    elif isinstance(statement, ast.AnnAssign) and statement.value:
        yield names(statement.target), names(statement.value)


def expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Return the expressions of a statement, without those of the statements in it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt):
            yield from ast.walk(child)


def goes_through_the_model(text: str) -> bool:
    """Whether a page, before its exercises, hands the running sentence to the package's model.

    An import is no use: some call must name both, or what was made of both, as
    ``system.trace(german, english)`` does after ``german = RUNNING.text("de")``.
    """
    story = text.partition("\n## Exercise")[0]
    cells = jupytext.reads(story, fmt="md:myst").cells
    tree = ast.parse("\n".join(plain(c.source) for c in cells if c.cell_type == "code"))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    model, sentence = {"load_pretrained"}, {"RUNNING"}  # and what is made of them, so far
    for statement in sorted(statements, key=lambda node: node.lineno):
        made = list(bindings(statement))
        for targets, parts in made:
            for known in (model, sentence):
                known -= targets - parts
                known |= targets if parts & known else set()
        for call in (node for node in expressions(statement) if isinstance(node, ast.Call)):
            values = [*call.args, *(word.value for word in call.keywords)]
            by, given = names(call.func), set[str]().union(*map(names, values))
            if not by & QUIET and given & sentence and (by | given) & (model - sentence):
                return True
    return False
