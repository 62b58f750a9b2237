"""What the extensions share that rewrite the pages: the body of each passes through a function."""

from collections.abc import Callable
from typing import Any

from sphinx.application import Sphinx


def rewrite_bodies(app: Sphinx, rewrite: Callable[[str], str]) -> None:
    """Pass the body of every page that is written through a function, in the order of the calls."""

    def finish(
        _app: Sphinx, _page: str, _template: str, context: dict[str, Any], _: object
    ) -> None:
        if "body" in context:
            context["body"] = rewrite(context["body"])

    app.connect("html-page-context", finish)
