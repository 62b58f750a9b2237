"""What the theme and the extensions get wrong for keyboards and screen readers."""

import re
from pathlib import Path

from bodies import rewrite_bodies
from docutils import nodes
from sphinx.application import Sphinx

# In the body of a page: names that hide what is written, and roles that do not fit.
BODY = (
    ('<summary aria-label="Toggle hidden content">', "<summary>"),
    ('<div role="list" class="citation-list">', '<div class="citation-list">'),
    (' role="doc-biblioentry"', ""),
    (' role="doc-backlink"', ""),
)
# Around it: buttons whose name leaves out what stands on them, and icons that shout a second one.
LAYOUT = (
    (
        re.compile(r'(<button class="btn search-button-field [^>]*?) aria-label="Search"'),
        r"\1",
    ),
    (
        re.compile(r'(<i class="theme-switch [^>]*?)\s+title="[^"]*"'),
        r'\1 aria-hidden="true"',
    ),
    (
        re.compile(r'<i class="(fa[srb]? [^"]*|fa-solid [^"]*)">'),
        r'<i class="\1" aria-hidden="true">',
    ),
)


def unique_sections(app: Sphinx, doctree: nodes.document) -> None:
    """Give the contents of exercises and solutions an id of their own."""
    count = 0
    for section in doctree.findall(nodes.section):
        if section["ids"] in (["exercise-content"], ["solution-content"]):
            count += 1
            section["ids"] = [f"{section['ids'][0]}-{count}"]


def mend(body: str) -> str:
    """Mend the body of a page."""
    for wrong, right in BODY:
        body = body.replace(wrong, right)
    return body


def mend_layout(app: Sphinx, exception: Exception | None) -> None:
    """Mend what the theme's templates put around the body."""
    if exception is not None or app.builder.format != "html":
        return
    for path in Path(app.outdir).rglob("*.html"):
        old = path.read_text(encoding="utf-8")
        new = old
        for wrong, right in LAYOUT:
            new = wrong.sub(right, new)
        if new != old:
            path.write_text(new, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("doctree-read", unique_sections, priority=400)  # before the contents are listed
    rewrite_bodies(app, mend)
    app.connect("build-finished", mend_layout)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
