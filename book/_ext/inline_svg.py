"""Put our own SVG drawings into the page, so that they follow its colours.

A chapter shows a drawing as an image, which every reader of Markdown can display.
Inside an ``<img>`` a drawing cannot know whether the page is light or dark. So the
HTML gets the drawing itself, where its lines take the colour of the text.
"""

import html
import re
from functools import partial
from pathlib import Path

from bodies import rewrite_bodies
from sphinx.application import Sphinx

IMAGE = re.compile(r'<img\b[^>]*\bsrc="(?:[^"]*/)?_images/(?P<name>[\w-]+)\.svg"[^>]*>')
ALT = re.compile(r'\balt="(?P<text>[^"]*)"')
WIDTH = re.compile(r'<svg[^>]*\swidth="(?P<number>[\d.]+)(?P<unit>pt)?"')
BOX = re.compile(r'<svg[^>]*\sviewBox="\S+ \S+ (?P<width>[\d.]+) ')
LETTERS = re.compile(r'(?<!\.sub \{ )font-size[:=]\s*"?(?P<size>[\d.]+)')
# Pixels of a letter on a phone; exponents and indices may be smaller. Where labels have another
# font, a chart that the browser draws may be wider than its still: 9 pixels are left.
SMALLEST = 9.4


def widen(svg: str) -> str:
    """Give a drawing a least width, at which its letters can be read."""
    width, box = WIDTH.match(svg), BOX.match(svg)
    if width is None or box is None:
        return svg
    full = float(width["number"]) * (4 / 3 if width["unit"] == "pt" else 1)  # pixels
    sizes = [float(size) * full / float(box["width"]) for size in LETTERS.findall(svg)]
    if not (legible := [size for size in sizes if size >= 10]):
        return svg
    least = round(full * min(1.0, SMALLEST / min(legible)))
    return svg.replace("height:auto", f"height:auto;min-width:{least}px", 1)


def drawing(path: Path, alt_text: str) -> str:
    """Return the drawing in a file as part of a page.

    Args:
        path: An SVG file whose lines and text use ``currentColor``.
        alt_text: What the chapter says that one sees; the drawing's own
            description where it is empty.
    """
    svg = path.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :]
    label = ""
    if alt_text:
        svg = re.sub(r' aria-labelledby="[^"]*"', "", svg, count=1)
        label = f'aria-label="{html.escape(alt_text)}" '
    style = 'class="drawing" style="max-width:100%;height:auto"'
    svg = widen(svg.replace("<svg ", f"<svg {label}{style} ", 1).rstrip())
    return f'<span class="drawing-box">{svg}</span>'


def inline(body: str, folder: Path) -> str:
    """Replace the images of a page that are drawings of ours, which are in the folder."""

    def replace(match: re.Match[str]) -> str:
        path = folder / f"{match['name']}.svg"
        if not path.exists() or "currentColor" not in path.read_text(encoding="utf-8"):
            return match[0]
        alt = ALT.search(match[0])
        return drawing(path, html.unescape(alt["text"]) if alt else "")

    return IMAGE.sub(replace, body)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    rewrite_bodies(app, partial(inline, folder=Path(app.srcdir) / "book" / "_static"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
