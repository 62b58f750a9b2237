"""What our small Sphinx extensions add to a page."""

import importlib.util
import types
from pathlib import Path

import pytest
from docutils import nodes

ROOT = Path(__file__).parents[1]


def extension(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "book" / "_ext" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runtime():
    return extension("runtime")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "under 1 s"),
        (1.4, "1 s"),
        (12.3, "12 s"),
        (59.6, "1 min 00 s"),
        (125, "2 min 05 s"),
    ],
)
def test_durations_read_well(runtime, seconds, text):
    assert runtime.duration(seconds) == text


def test_one_core_is_singular(runtime):
    assert runtime.line(3, 1) == "Run time: 3 s on 1 CPU core"
    assert runtime.line(3, 2) == "Run time: 3 s on 2 CPU cores"
    assert runtime.cores() >= 1


def page(runtime, monkeypatch, data):
    """Run the extension on a page with a title and one paragraph."""
    collector = types.SimpleNamespace(get_exec_data=lambda env, name: data)
    monkeypatch.setattr(runtime, "NbMetadataCollector", collector)
    text = nodes.paragraph("", "First sentence.")
    tree = nodes.document(None, None)
    tree += nodes.section("", nodes.title("", "A chapter"), text)
    runtime.add_line(types.SimpleNamespace(env=types.SimpleNamespace(docname="a")), tree)
    return [node.astext() for node in tree[0]]


def test_run_time_stands_below_the_title(runtime, monkeypatch):
    title, line, text = page(runtime, monkeypatch, {"runtime": 12.0})
    assert (title, text) == ("A chapter", "First sentence.")
    assert line.startswith("Run time: 12 s on ")


@pytest.mark.parametrize("data", [None, {}, {"runtime": None}])
def test_a_page_that_did_not_run_says_nothing(runtime, monkeypatch, data):
    assert page(runtime, monkeypatch, data) == ["A chapter", "First sentence."]


def put(tmp_path, body):
    """Run the drawing extension on the body of a page."""
    folder = tmp_path / "book" / "_static"
    folder.mkdir(parents=True)
    ours = '<?xml version="1.0"?>\n<svg aria-labelledby="t" fill="currentColor"></svg>\n'
    (folder / "ours.svg").write_text(ours)
    (folder / "plain.svg").write_text('<svg fill="red"></svg>')
    context = {"body": body}
    app = types.SimpleNamespace(srcdir=str(tmp_path))
    extension("inline_svg").inline(app, "a", "page.html", context, None)
    return context["body"]


def test_our_drawings_go_into_the_page(tmp_path):
    got = put(tmp_path, '<p><img alt="A &amp; B" src="../_images/ours.svg" /></p>')
    assert got.startswith('<p><svg aria-label="A &amp; B" class="drawing"')
    assert "aria-labelledby" not in got  # one label, that of the chapter
    assert "<?xml" not in got
    assert got.endswith("</svg></p>")


def test_without_a_text_the_drawing_describes_itself(tmp_path):
    assert 'aria-labelledby="t"' in put(tmp_path, '<img alt="" src="_images/ours.svg" />')


@pytest.mark.parametrize("name", ["plain", "unknown"])
def test_other_images_stay(tmp_path, name):
    body = f'<img alt="x" src="../_images/{name}.svg" />'
    assert put(tmp_path, body) == body
