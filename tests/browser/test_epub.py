"""The EPUB of the first part, made from the built book."""

import posixpath
import re
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import epub
import pytest
from playwright.sync_api import Browser

HTML = Path(__file__).parents[2] / "_build" / "html"
X = "{http://www.w3.org/1999/xhtml}"
MATH = "{http://www.w3.org/1998/Math/MathML}math"


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Write the book."""
    out = tmp_path_factory.mktemp("epub") / "book.epub"
    epub.write(HTML, out, epub.part_one())
    return zipfile.ZipFile(out)


def chapters(book: zipfile.ZipFile) -> dict[str, ElementTree.Element]:
    """Return the pages of the book, read as XML."""
    names = [name for name in book.namelist() if name.endswith(".xhtml")]
    return {name: ElementTree.fromstring(book.read(name)) for name in names}


def test_every_chapter_is_there_in_order(book: zipfile.ZipFile) -> None:
    pages = epub.part_one()
    assert len(pages) > 20
    assert book.namelist()[0] == "mimetype"
    assert book.getinfo("mimetype").compress_type == zipfile.ZIP_STORED
    package = book.read("book/package.opf").decode()
    ids = dict(re.findall(r'id="(f\d+)" href="([^"]+)"', package))
    assert [ids[one] for one in re.findall(r'idref="(f\d+)"', package)] == [
        epub.file_of(page) for page in pages
    ]
    assert {f"book/{name}" for name in ids.values()} | {
        "mimetype", "META-INF/container.xml", "book/package.opf"
    } == set(book.namelist())  # fmt: skip


def test_every_link_and_picture_is_inside(book: zipfile.ZipFile) -> None:
    pages = chapters(book)
    ids = {name: {node.get("id") for node in tree.iter()} for name, tree in pages.items()}
    seen = 0
    for name, tree in pages.items():
        for node in tree.iter():
            target = node.get("src") or node.get("href") or ""
            if not target or re.match("https?:", target):
                continue
            path, _, anchor = target.partition("#")
            file = posixpath.join("book", path) if path else name
            assert file in book.namelist(), f"{name}: {target}"
            assert not anchor or anchor in ids[file], f"{name}: {target}"
            seen += 1
    assert seen > 100


def test_what_needs_a_screen_is_left_out(book: zipfile.ZipFile) -> None:
    pages = chapters(book)
    formulas = sum(len(list(tree.iter(MATH))) for tree in pages.values())
    assert formulas > 200
    for name, tree in pages.items():
        tags = {node.tag.removeprefix(X) for node in tree.iter()}
        assert not tags & {"script", "button", "input", "select", "iframe", "style"}, name
        for node in tree.iter(f"{X}img"):
            assert node.get("alt"), name
        words = "".join(tree.itertext())
        assert "\\(" not in words, name
        assert "Show code" not in words, name


def test_a_reader_shows_a_page(book: zipfile.ZipFile, browser: Browser, tmp_path: Path) -> None:
    book.extractall(tmp_path)
    page = browser.new_page(viewport={"width": 500, "height": 800})
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.goto((tmp_path / "book" / epub.file_of("book/model/attention")).as_uri())
    assert "Attention" in page.locator("h1").inner_text()
    assert page.locator("math").first.is_visible()
    assert all(page.evaluate("[...document.images].map((i) => i.naturalWidth > 0)"))
    assert errors == []
    page.close()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(epub.EpubError, match=r"index\.html is not there; run `make book` first"):
        epub.write(tmp_path, tmp_path / "x.epub", ("book/index",))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.html").write_text(
        '<article><h1>A</h1><span class="math">\\(\\left)</span></article>', encoding="utf-8"
    )
    with pytest.raises(epub.EpubError, match="cannot convert"):
        epub.write(tmp_path, tmp_path / "x.epub", ("a",))
