"""The rules of the house. Each function returns what breaks a rule, one line each."""

import ast
import itertools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import jupytext
import yaml
from colab import TAG
from execution import imports, plain
from export import BY_HAND, EXPORTED, MARK, chapters, export_cells, tags
from scoreboard import Claim, ScoreboardError, parse_tags

PACKAGE = "annotated_transformer"
ROOT = Path(__file__).parents[2]
Write = Callable[..., Path]  # writes a chapter of a small project


def page_of(chapter: Path, root: Path) -> str:
    """Return a chapter's page, such as ``book/model/attention``."""
    return chapter.relative_to(root).with_suffix("").as_posix()


def reading_order(root: Path) -> list[str]:
    """Return the pages of the book in reading order."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    parts = [toc, *toc.get("parts", [])]
    files = [entry["file"] for part in parts for entry in part.get("chapters", [])]
    return [toc["root"], *files]


def module_page(name: str, order: list[str]) -> str | None:
    """Return the page that defines what an import names, or None for a part.

    What no page defines, such as a module written by hand, counts as the first page's.
    """
    parts = name.split(".")[1:]
    while parts:
        if (page := "/".join(["book", *parts])) in order:
            return page
        if any(other.startswith(page + "/") for other in order):
            return None
        parts.pop()
    return order[0]


def disorder(root: Path) -> list[str]:
    """A chapter imports only from chapters before it."""
    order = reading_order(root)
    found = []
    for chapter in chapters(root):
        page = page_of(chapter, root)
        if page not in order:
            continue
        cells = [c.source for c in jupytext.read(chapter).cells if c.cell_type == "code"]
        names = set().union(*(imports(plain(cell)) for cell in cells))
        for source in sorted({one for name in names if (one := module_page(name, order))}):
            late = order.index(source) >= order.index(page)
            if late and source != order[0]:
                found.append(f"{page} imports from {source}, which does not come before it")
    return found


def untidy(root: Path) -> list[str]:
    """Every chapter is in the table of contents, has its notebook, exports what it says."""
    order = reading_order(root)
    found = [
        f"{page} is in the table of contents twice"
        for page in {p for p in order if order.count(p) > 1}
    ]
    found += [f"{page}.md does not exist" for page in order if not (root / f"{page}.md").exists()]
    pages = [
        path
        for path in sorted((root / "book").rglob("*.md"))
        if not any(part.startswith("_") for part in path.relative_to(root).parts)
    ]
    for path in pages:
        if page_of(path, root) not in order:
            found.append(f"{page_of(path, root)} is not in the table of contents")
    for chapter in chapters(root):
        notebook = jupytext.read(chapter)
        if "export" in notebook.metadata and not export_cells(notebook):
            found.append(f"{page_of(chapter, root)} says that it exports, and does not")
        if not chapter.with_suffix(".ipynb").exists():
            found.append(f"{page_of(chapter, root)} has no notebook")
    return found


def misplaced(root: Path) -> list[str]:
    """A folder of the package holds modules of one kind: from chapters, or by hand."""
    found = []
    package = root / PACKAGE
    for path in sorted(package.rglob("*.py")):
        name, parts = path.relative_to(root), path.relative_to(package).parts
        written = path.read_text(encoding="utf-8").startswith(MARK)
        if len(parts) == 1:
            continue
        if parts[0] not in (*EXPORTED, *BY_HAND):
            found.append(f"{name}: the package has no folder {parts[0]}")
        elif written and parts[0] in BY_HAND:
            found.append(f"{name} is written from a chapter")
        elif not written and parts[0] in EXPORTED:
            found.append(f"{name} is not written from a chapter")
    return found


def settles(source: str) -> bool:
    """Whether a cell holds an assertion that can fail, or prints what ``judge`` says of runs."""
    return any(
        not (isinstance(node.test, ast.Constant) and node.test.value)
        if isinstance(node, ast.Assert)
        else isinstance(node, ast.Call) and ast.unparse(node).startswith("print(judge")
        for node in ast.walk(ast.parse(plain(source)))
    )


def bad_claims(root: Path, claims: Mapping[str, Claim]) -> list[str]:
    """A claim's tag names a claim, and its cell asserts something and is shown."""
    found = []
    for chapter in chapters(root):
        page = page_of(chapter, root)
        for number, cell in enumerate(jupytext.read(chapter).cells):
            try:
                named = parse_tags(tags(cell))
            except ScoreboardError as error:
                found.append(f"{page}, cell {number}: {error}")
                continue
            for claim, kind in named:
                where = f"{page}, cell {number}, claim {claim}"
                if claim not in claims:
                    found.append(f"{where}: no such claim")
                elif kind and kind not in {part.kind for part in claims[claim].parts}:
                    found.append(f"{where}: it has no check of kind {kind}")
                if cell.cell_type != "code" or not settles(cell.source):
                    found.append(f"{where}: the cell asserts nothing")
                if {"remove-cell", "remove-input"} & set(tags(cell)):
                    found.append(f"{where}: the cell is not shown")
    return found


def unfinished(root: Path) -> list[str]:
    """A chapter of a part ends with a summary and three exercises with solutions."""
    found = []
    for chapter in chapters(root):
        page = page_of(chapter, root)
        text = chapter.read_text(encoding="utf-8")
        if any(TAG in tags(cell) for cell in jupytext.read(chapter).cells):
            found.append(f"{page} holds the cell that the exporter adds: take it out")
        if page.count("/") < 2:
            continue
        if not re.search(r"^## Summary$", text, re.M):
            found.append(f"{page} has no summary")
        labels = exercises(text, "exercise")
        solved = set(re.findall(r"\{solution(?:-start)?\}\s*([\w-]+)", text))
        if len(labels) < 3:
            found.append(f"{page} has {len(labels)} exercises, not three")
        found += [f"{page}: exercise {one} has no solution" for one in labels if one not in solved]
    return found


def without_answers(root: Path, pages: list[str]) -> list[str]:
    """These chapters have three to six exercises of two levels; a checker answers level 1."""
    found = []
    for page in pages:
        text = (root / f"{page}.md").read_text(encoding="utf-8")
        blocks = re.findall(r"\{exercise-start\} ([^\n]*)\n(.*?)\{exercise-end\}", text, re.DOTALL)
        levels = [title[-len("(level 1)") :] for title, _ in blocks]
        if not 3 <= len(blocks) <= 6:
            found.append(f"{page} has {len(blocks)} exercises, not three to six")
        if set(levels) != {"(level 1)", "(level 2)"}:
            found.append(f"{page}: exercises of two levels are wanted")
        for level, (title, body) in zip(levels, blocks, strict=True):
            if (level == "(level 1)") != ("\ncheck(" in body):
                found.append(f"{page}: {title}: a checker answers what is of level 1")
            elif level == "(level 1)" and not all(
                f'assert check("{name}"' in text for name in re.findall(r'\ncheck\("(\w+)"', body)
            ):
                found.append(f"{page}: {title}: the solution is not checked")
    return found


PICTURES = {"show", "interactive_chart", "Table"}


def unseen(root: Path) -> list[str]:
    """A picture or table is the last thing of its cell: Jupyter shows nothing else by itself."""
    found = []
    for chapter in chapters(root):
        cells = [c.source for c in jupytext.read(chapter).cells if c.cell_type == "code"]
        trees = [ast.parse(plain(cell)) for cell in cells]
        names = {
            alias.name
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == f"{PACKAGE}.figures"
            for alias in node.names
        } & PICTURES
        for number, tree in enumerate(trees):
            lost = [
                call.func.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Expr) and node is not tree.body[-1]
                for call in ast.walk(node)
                if isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id in names
            ]
            where = f"{page_of(chapter, root)}, code cell {number}"
            found += [f"{where}: {name} makes what nobody sees" for name in lost]
    return found


def exercises(text: str, kind: str) -> list[str]:
    """Return the labels of the exercises in a chapter."""
    pattern = rf"\{{{kind}(?:-start)?\}}[^\n]*\n(?:[^\n]*\n){{0,4}}?:label:\s*([\w-]+)"
    return re.findall(pattern, text)


LOCAL = re.compile(
    r"/root/|/home/\w|/Users/\w|/tmp/\w|/opt/\w|(?<![\w.~/])/(?:work|mnt|srv|scratch)/\w"
    r"|/private/var|\.\./shared|localhost:\d|\bTODO\b|\bFIXME\b"
)
BINARY = {".safetensors", ".png", ".woff", ".woff2", ".inv", ".npz", ".gz"}


def local_names(paths: list[Path], root: Path) -> list[str]:
    """No file names a path of one machine, or leaves something to do."""
    found = []
    for path in paths:
        if path.suffix in BINARY or path == Path(__file__) or "mathjax" in path.parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := LOCAL.search(line):
                found.append(f"{path.relative_to(root)}:{number}: {match[0]}")
    return found


LAZY = {("article.py", "torchtext")}  # for MyIterator, when that is asked for


def heavy(root: Path, modules: list[Path]) -> list[str]:
    """The core of the package imports PyTorch and the standard library alone, anywhere in it."""
    allowed = {*sys.stdlib_module_names, "torch", PACKAGE}
    found = []
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                library = name.split(".")[0]
                if library not in allowed and (path.name, library) not in LAZY:
                    found.append(f"{path.relative_to(root)} imports {name}")
    return found


def taken_for_types(root: Path, apart: str = "cli") -> list[str]:
    """What is said of a field, or a constant, has no colon: Sphinx takes what precedes for a type.

    The strict build says so, too, but only after minutes. ``apart`` has no page of its own.
    """
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if path.relative_to(root / PACKAGE).parts[0] == apart:
            continue
        source = path.read_text(encoding="utf-8")
        for line, text in enumerate(source.splitlines(), 1):
            for comment in re.findall(r"#: (.*: .*)", text):
                found.append(f"{path.relative_to(root)}, line {line}: {comment}")
        classes = ast.walk(ast.parse(source))
        bodies = (node.body for node in classes if isinstance(node, ast.ClassDef))
        for pair in itertools.chain(*map(itertools.pairwise, bodies)):
            match pair:
                case ast.AnnAssign(), ast.Expr(ast.Constant(str(said)), lineno=line):
                    if ": " in said.split("\n")[0]:
                        found.append(f"{path.relative_to(root)}, line {line}: {said}")
    return found
