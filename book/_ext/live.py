"""The model in the page: a place for it, and its weights as scripts.

A directive marks the place::

    :::{translator}
    :sentence: Der Bäcker wirft meine neue Zeitung weg, weil sie nass ist.

    ![What a reader without scripts sees](../_static/how_far.svg)
    :::

Its content, for example a figure, is what is seen until a sentence is translated, and on paper.
Where that figure is computed by the cell below, the directive is empty and has ``:replaces-next:``.
With ``:mixer:`` there are buttons that mute single heads; with ``:trace:`` the vectors that every
part of the model returns can be looked up.
The page loads a small script; the model and its weights follow when a reader first uses it. The
build writes the weights, because a page that is opened from a file may load scripts, but no data.
"""

import base64
import json
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

SERVING = Path(__file__).parents[2] / "annotated_transformer" / "serving" / "static"
SHARED = ("widget.js", "widget.css")  # of the page and of the server's page
PRETRAINED = Path(__file__).parents[2] / "annotated_transformer" / "pretrained"
RUNNING = "Der Bäcker wirft meine neue Zeitung weg, weil sie nass ist."
MOST = 1_500_000  # bytes of the weights' script
FOLDER = "live"
DATA = ("config", "tokenizer", "words")
MARK = 'class="translator"'


def weights_script(model: bytes) -> str:
    """Return the script that hands a page the weights.

    Raises:
        ValueError: It is too large for a page.
    """
    text = f'var annotatedTransformerWeights = "{base64.b64encode(model).decode()}";\n'
    if len(text) > MOST:
        raise ValueError(f"the script of the weights has {len(text)} bytes, more than {MOST}")
    return text


def vocabulary_script(folder: Path) -> str:
    """Return the script that hands a page the sizes, the merges and the words."""
    data = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in DATA}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"var annotatedTransformerVocabulary = {text};\n"


def scripts(folder: Path = PRETRAINED) -> dict[str, str]:
    """Return the scripts that the build writes, by name."""
    return {
        "weights.js": weights_script((folder / "model.safetensors").read_bytes()),
        "vocabulary.js": vocabulary_script(folder),
    }


def write_scripts(app: Sphinx) -> None:
    """Write the package's model beside the other scripts of the pages."""
    if app.builder.format != "html":
        return
    folder = Path(app.outdir) / "_static" / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    shared = {name: (SERVING / name).read_text("utf-8") for name in SHARED}
    for name, text in (scripts() | shared).items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


class translator(nodes.General, nodes.Element):  # type: ignore[misc]  # noqa: N801
    """The place of the model, around what stands there without it."""


class TranslatorDirective(SphinxDirective):
    """Place the model, and parse what stands there without it."""

    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {
        "sentence": directives.unchanged_required,
        "replaces-next": directives.flag,
        "mixer": directives.flag,
        "trace": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        """Return the place, with the directive's content in it."""
        node = translator(sentence=self.options.get("sentence", RUNNING))
        node["replaces"] = "next" if "replaces-next" in self.options else "content"
        node["more"] = [name for name in ("mixer", "trace") if name in self.options]
        self.state.nested_parse(self.content, self.content_offset, node)
        return [node]


def visit_html(self: Any, node: translator) -> None:
    """Open the place."""
    sentence = escape(node["sentence"], quote=True)
    data = f'data-sentence="{sentence}" data-replaces="{node["replaces"]}"'
    data += "".join(f" data-{name}" for name in node["more"])
    self.body.append(f'<div {MARK} {data}><div class="translator-fallback">')


def depart_html(self: Any, node: translator) -> None:
    """Close it."""
    self.body.append("</div></div>\n")


def visit_other(self: Any, node: translator) -> None:
    """Leave the content alone."""


def page_scripts(
    app: Sphinx,
    pagename: str,
    templatename: str,
    context: dict[str, Any],
    doctree: nodes.document | None,
) -> None:
    """Load the widget only where it has a place."""
    if MARK in context.get("body", ""):
        app.add_css_file(f"{FOLDER}/widget.css")
        app.add_js_file(f"{FOLDER}/widget.js")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    other = (visit_other, visit_other)
    app.add_node(translator, html=(visit_html, depart_html), latex=other, text=other, epub=other)
    app.add_directive("translator", TranslatorDirective)
    app.connect("builder-inited", write_scripts)
    app.connect("html-page-context", page_scripts)
    return {
        "version": "1",
        "env_version": 1,
        "parallel_read_safe": True,
        "parallel_write_safe": True,
    }
