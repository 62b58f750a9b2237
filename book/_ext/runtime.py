"""Say under the title of each chapter how long its cells took to run."""

import os

from docutils import nodes
from myst_nb.sphinx_ import NbMetadataCollector
from sphinx.application import Sphinx


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def duration(seconds: float) -> str:
    """Write a time the way that people say it."""
    if seconds < 0.95:
        return "under 1 s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"


def line(seconds: float, count: int) -> str:
    """Return the sentence for a chapter that ran for ``seconds`` on ``count`` cores."""
    return f"Run time: {duration(seconds)} on {count} CPU core{'s' * (count != 1)}"


def add_line(app: Sphinx, doctree: nodes.document) -> None:
    """Insert the sentence below the title of a chapter that was run."""
    data = NbMetadataCollector.get_exec_data(app.env, app.env.docname)
    title = next(iter(doctree.findall(nodes.title)), None)
    if title is None or not data or data.get("runtime") is None:
        return
    text = nodes.paragraph("", line(data["runtime"], cores()), classes=["run-time"])
    text["translatable"] = False
    title.parent.insert(title.parent.index(title) + 1, text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("doctree-read", add_line)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
