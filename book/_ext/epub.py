"""Write an EPUB 3 of the first part: ``python book/_ext/epub.py``, after ``make book``.

The pages are those of the built book. Drawings become image files, formulas MathML, and what only
a screen can do (scripts, buttons, charts that move) gives way to its still picture. Code that only
draws is left out, as are the folded proofs: the page on the web has them.
"""

import argparse
import hashlib
import posixpath
import re
import sys
import zipfile
from dataclasses import dataclass, field
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from urllib.parse import unquote, urldefrag

import yaml
from bs4 import BeautifulSoup, Tag
from formulas import FormulaError, mathml

ROOT = Path(__file__).resolve().parents[2]
PART = "I. The paper"
FRONT = ("book/index", "book/notation")
TITLE = "The Annotated Transformer, rebuilt"
SVG = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
VIEW = re.compile(r'\bviewBox="[-\d.]+ [-\d.]+ (?P<width>[\d.]+) (?P<height>[\d.]+)"')
LABEL = re.compile(r'aria-label="(?P<label>[^"]*)"')
# Screens only: what moves, what is pressed, code that draws, folded proofs.
DROPPED = (
    "script, style, button, form, input, select, template, noscript, iframe, .headerlink, "
    ".viewcode-link, .live-controls, .claim-link, .translator-live, .tag_hide-input > .cell_input, "
    ".tag_hide-input > details, .tag_checked, .toggle-button, .visually-hidden, .run-time"
)
KEPT = {"class", "id", "href", "src", "alt", "colspan", "rowspan", "start", "title", "role"}
STYLE = """body { line-height: 1.45 }
pre { font-size: .8em; white-space: pre-wrap; border-left: 2px solid #bbb; padding-left: .6em }
code { font-size: .9em }
figure { margin: 1em 0; break-inside: avoid; text-align: center }
img { max-width: 100% }
figcaption, .caption { font-size: .9em }
.admonition, .exercise { border-left: 3px solid #888; padding-left: .8em; margin: 1em 0 }
.admonition-title { font-weight: bold }
.eqno { float: right }
table { border-collapse: collapse }
td, th { padding: .15em .5em; border-bottom: 1px solid #ccc; text-align: left }
"""


class EpubError(Exception):
    """The book cannot be written; the message says why."""


@dataclass
class Writer:
    """The pages of an EPUB, and the pictures that they use."""

    html: Path
    pages: tuple[str, ...]
    images: dict[str, bytes] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)

    def add(self, page: str) -> None:
        """Turn a page of the built book into a chapter."""
        path = self.html / f"{page}.html"
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise EpubError(f"{path} is not there; run `make book` first") from None
        drawings: list[str] = []

        def out(match: re.Match[str]) -> str:
            drawings.append(match[0])
            return f'<img class="drawing" data-drawing="{len(drawings) - 1}"/>'

        soup = BeautifulSoup(SVG.sub(out, text), "html.parser")
        article = soup.select_one("article")
        if article is None:
            raise EpubError(f"{path} has no article; it is not a page of the book")
        for node in article.select(DROPPED):
            if not node.decomposed:
                node.decompose()
        self._set_formulas(article, path)
        for node in article.select("[data-drawing]"):
            self._set_drawing(node, drawings[int(str(node["data-drawing"]))])
        for node in article.select("img[src]"):
            self._set_image(node, path)
        for node in article.select("a[href]"):
            self._set_link(node, page)
        for node in article.find_all(True):
            if node.find_parent("math") is None and node.name != "math":
                node.attrs = {k: v for k, v in node.attrs.items() if k in KEPT and v != ""}
        unique_ids(article)
        heading = article.select_one("h1")
        self.titles[page] = heading.get_text(" ", strip=True) if heading else page
        self.documents[page] = document(self.titles[page], article.decode_contents())

    def _set_formulas(self, article: Tag, path: Path) -> None:
        """Put MathML in the place of TeX."""
        for node in article.select(".math"):
            number = node.select_one(".eqno")
            kept = number.extract() if number else None
            try:
                formula = mathml(node.get_text(), block=node.name == "div")
            except FormulaError as error:
                raise EpubError(f"{path}: {error}") from None
            node.clear()
            node.append(BeautifulSoup(formula, "html.parser"))
            if kept is not None:
                node.insert(0, kept)

    def _set_drawing(self, node: Tag, drawing: str) -> None:
        """Make a drawing in the page a file of its own."""
        named = LABEL.search(drawing)
        if named is None and 'aria-hidden="true"' in drawing:
            node.decompose()
            return
        if "xmlns=" not in drawing.split(">", 1)[0]:
            drawing = drawing.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
        if "xlink:" in drawing and "xmlns:xlink=" not in drawing:
            drawing = drawing.replace("<svg", '<svg xmlns:xlink="http://www.w3.org/1999/xlink"', 1)
        node["src"] = self._store(drawing.encode(), ".svg")
        node["alt"] = BeautifulSoup(named["label"], "html.parser").text if named else "Drawing"

    def _set_image(self, node: Tag, path: Path) -> None:
        """Take an image file along."""
        source = str(node["src"])
        if source in self.images:
            return
        file = (path.parent / unquote(source)).resolve()
        if not file.is_file():
            raise EpubError(f"{path}: there is no image {source}")
        node["src"] = self._store(file.read_bytes(), file.suffix)
        node["alt"] = node.get("alt") or "Figure"

    def _store(self, data: bytes, suffix: str) -> str:
        name = f"images/{hashlib.sha256(data).hexdigest()[:16]}{suffix}"
        self.images[name] = data
        return name

    def _set_link(self, node: Tag, page: str) -> None:
        """Lead a link to a chapter of the EPUB; one that leads out of it becomes text."""
        target, fragment = urldefrag(str(node["href"]))
        if re.match(r"https?:", target):
            return
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), target or f"{page}.html"))
        name = page if not target else name.removesuffix(".html")
        if name in self.pages:
            node["href"] = file_of(name) + (f"#{anchor(fragment)}" if fragment else "")
        else:
            node.unwrap()

    def mend_links(self) -> None:
        """Drop the fragment of links whose target was left out."""
        known = {
            page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in self.documents.items()
        }
        files = {file_of(page): ids for page, ids in known.items()}

        def mended(match: re.Match[str]) -> str:
            return match[0] if match["id"] in files[match["file"]] else f'href="{match["file"]}"'

        pattern = re.compile(r'href="(?P<file>[\w.-]+\.xhtml)#(?P<id>[^"]+)"')
        for page, text in self.documents.items():
            self.documents[page] = pattern.sub(mended, text)


def anchor(name: str) -> str:
    """Return an id that XML allows."""
    return name if re.match(r"[A-Za-z_]", name) else f"_{name}"


def unique_ids(article: Tag) -> None:
    """Make the ids ones that XML allows, each once in a page."""
    seen: set[str] = set()
    for node in article.select("[id]"):
        name = anchor(str(node["id"]))
        if name in seen:
            del node["id"]
        else:
            node["id"] = name
            seen.add(name)


def file_of(page: str) -> str:
    """Return the name of a chapter's file."""
    return page.removeprefix("book/").replace("/", "-") + ".xhtml"


def document(title: str, body: str) -> str:
    """Return a page in XHTML."""
    return f"""<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops" lang="en"
 xml:lang="en">
<head><title>{escape(title)}</title><link rel="stylesheet" href="style.css"/></head>
<body>
{body}
</body>
</html>
"""


def contents(writer: Writer) -> str:
    """Return the table of contents."""
    items = "\n".join(
        f'<li><a href="{file_of(page)}">{escape(title)}</a></li>'
        for page, title in writer.titles.items()
    )
    return document("Contents", f'<nav epub:type="toc"><h1>Contents</h1><ol>{items}</ol></nav>')


def package(writer: Writer, files: dict[str, bytes]) -> str:
    """Return the list of all files, and the order of the pages."""
    kinds = {".svg": "image/svg+xml", ".png": "image/png", ".css": "text/css"}
    items, order = [], []
    for number, name in enumerate(files):
        suffix = Path(name).suffix
        more = ' properties="nav"' if name == "nav.xhtml" else ""
        if suffix == ".xhtml" and b"<math" in files[name]:
            more = ' properties="mathml"'
        kind = kinds.get(suffix, "application/xhtml+xml")
        items.append(f'<item id="f{number}" href="{name}" media-type="{kind}"{more}/>')
        if suffix == ".xhtml" and name != "nav.xhtml":
            order.append(f'<itemref idref="f{number}"/>')
    digest = hashlib.sha256("".join(writer.documents.values()).encode()).hexdigest()
    uuid = "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32]))
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    lines = "\n".join(items)
    return f"""<?xml version="1.0" encoding="utf-8"?>
<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id" xml:lang="en">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/">
<dc:identifier id="id">urn:uuid:{uuid}</dc:identifier>
<dc:title>{TITLE}</dc:title>
<dc:creator>{TITLE} contributors</dc:creator>
<dc:language>en</dc:language>
<meta property="dcterms:modified">{now}</meta>
</metadata>
<manifest>
{lines}
</manifest>
<spine>{"".join(order)}</spine>
</package>
"""


CONTAINER = """<?xml version="1.0"?>
<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
<rootfiles><rootfile full-path="book/package.opf" media-type="application/oebps-package+xml"/>
</rootfiles></container>
"""


def part_one() -> tuple[str, ...]:
    """Return the pages of the first part, with what stands before it."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    (part,) = (one for one in toc["parts"] if one["caption"] == PART)
    return FRONT + tuple(chapter["file"] for chapter in part["chapters"])


def write(html: Path, out: Path, pages: tuple[str, ...]) -> None:
    """Write the EPUB.

    Raises:
        EpubError: A page is missing, or holds what cannot be converted.
    """
    writer = Writer(html, pages)
    for page in pages:
        writer.add(page)
    writer.mend_links()
    files = {"nav.xhtml": contents(writer).encode(), "style.css": STYLE.encode()}
    files |= {file_of(page): text.encode() for page, text in writer.documents.items()}
    files |= writer.images
    files["package.opf"] = package(writer, files).encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as book:
        book.writestr("mimetype", "application/epub+zip", zipfile.ZIP_STORED)
        book.writestr("META-INF/container.xml", CONTAINER)
        for name, data in files.items():
            book.writestr(f"book/{name}", data)


def main() -> int:
    """Read the options, and write the book."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--html", type=Path, default=ROOT / "_build/html", help="the built book")
    parser.add_argument("--out", type=Path, default=ROOT / "_build/annotated-transformer.epub")
    chosen = parser.parse_args()
    try:
        write(chosen.html, chosen.out, part_one())
    except EpubError as error:
        print(f"epub: {error}", file=sys.stderr)
        return 2
    print(f"{chosen.out}, {chosen.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
