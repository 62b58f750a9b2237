"""Make a build take half its time; the pages are the same.

For the navigation of each page, Sphinx copies the sections of all pages, and then drops them,
because it shows titles alone. For each entry of the bibliography, pybtex looks through the metadata
of all packages. And Python's garbage collector looks through trees of which nothing is garbage.
"""

import gc
from typing import Any

from docutils import nodes
from pybtex.plugin import find_plugin, register_plugin
from sphinx import addnodes
from sphinx.application import Sphinx


def titles(contents: nodes.bullet_list) -> nodes.bullet_list:
    """Return a page's table of contents without its sections; where it lists pages, as it is."""
    if next(iter(contents.findall(addnodes.toctree)), None):
        return contents
    short = contents.deepcopy()
    for item in short.children:
        item[1:] = []
    return short


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    gc.set_threshold(100_000, 50, 100)  # objects between two collections; by default 700
    for name in ("text", "plaintext"):
        register_plugin("pybtex.backends", name, find_plugin("pybtex.backends", name), force=True)
    short: dict[str, nodes.bullet_list] = {}

    def lighten(
        _app: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: object
    ) -> None:
        whole = context["toctree"]

        def toctree(**options: Any) -> str:
            if not options.get("titles_only"):
                return str(whole(**options))
            if not short:  # not before every page was read
                short.update({page: titles(toc) for page, toc in app.env.tocs.items()})
            tocs, app.env.tocs = app.env.tocs, short
            try:
                return str(whole(**options))
            finally:
                app.env.tocs = tocs

        context["toctree"] = toctree

    app.connect("html-page-context", lighten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
