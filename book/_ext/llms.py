"""Write ``llms.txt`` beside the pages: a map of the book, for programs that read.

Each chapter is one line: its text as Markdown, its first sentence, and the module that it exports.
"""

import re
from pathlib import Path
from typing import Any

import yaml
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
ABOUT = """\
> The paper "Attention Is All You Need" (Vaswani et al., 2017), paragraph by paragraph, in code that
> runs. The chapters export the Python package `annotated_transformer`.

Pages are HTML; the links lead to their text as Markdown, in which a `code-cell` is a cell that is
run. The page `book/model/attention.html` is that of `_sources/book/model/attention.md`.
"""
ROLE = re.compile(r"\{[\w:-]+\}`(?:([^`<]*?)\s*<[^`>]*>|[^`]*)`\s*")


def split(text: str) -> tuple[dict[str, Any], list[str]]:
    """Return a chapter's front matter and the paragraphs after it."""
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    front = yaml.safe_load(found[1]) if found else {}
    return front, re.split(r"\n\s*\n", text[found.end() if found else 0 :].strip())


def plain(text: str) -> str:
    """Return prose without emphasis and links; a role leaves its title, if it has one."""
    text = ROLE.sub(lambda role: f"{role[1]} " if role[1] else "", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"[*`]", "", text).split())


def first_sentence(paragraphs: list[str]) -> str:
    """Return the first sentence of the first paragraph of prose."""
    for paragraph in paragraphs:
        if re.match(r"[A-Z\"*_\[$]|`[^`]", paragraph):
            text = re.sub(r" ([.,;:])", r"\1", plain(paragraph))
            sentence = re.split(r"(?<=[.?!:])\s+(?=[A-Z])", text)[0]
            return f"{sentence[:-1]}." if sentence.endswith(":") else sentence
    return ""


def entry(page: str, root: Path) -> str:
    """Return the line of one page."""
    front, paragraphs = split((root / f"{page}.md").read_text(encoding="utf-8"))
    (title, *_) = re.findall(r"^# (.*)$", "\n".join(paragraphs), re.MULTILINE)
    words = [first_sentence(paragraphs)]
    if export := front.get("export"):
        module = export["module"].replace("/", ".")
        words.append(f"Module `annotated_transformer.{module}`: {export['doc']}")
    words = [one for one in words if one]
    return f"- [{plain(title)}](_sources/{page}.md)" + (f": {' '.join(words)}" if words else "")


def text(root: Path = ROOT) -> str:
    """Return the map of the book, in reading order."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    title = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))["title"]
    parts = [f"# {title}", ABOUT.rstrip(), entry(toc["root"], root)]
    for part in toc["parts"]:
        lines = [entry(chapter["file"], root) for chapter in part["chapters"]]
        parts += [f"## {part['caption']}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the map when the pages are written."""
    if error is None and app.builder.name == "html":
        (Path(app.outdir) / "llms.txt").write_text(text(Path(app.srcdir)), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
