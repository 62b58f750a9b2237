"""The directive that places the model in a page, and the scripts that the build writes."""

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from annotated_transformer.pretrained import FOLDER, RUNNING
from tests.test_page_extensions import extension

live = extension("live")
EXTENSIONS = Path(live.__file__).parent
PLACED = """# A page

:::{translator}
:sentence: Say "a" & b.

Without *scripts*.
:::

:::{translator}
:replaces-next:
:::

The next.
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a page with the model and one without."""
    source = tmp_path_factory.mktemp("source")
    (source / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(EXTENSIONS)!r})\n"
        "extensions = ['myst_parser', 'live']\nmyst_enable_extensions = ['colon_fence']\n"
    )
    (source / "index.md").write_text("# Start\n\n```{toctree}\nwith\nplain\n```\n")
    (source / "with.md").write_text(PLACED)
    (source / "plain.md").write_text("# Another\n\nNothing.\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", ".", "html"]
    subprocess.run(command, cwd=source, check=True)
    return source / "html"


def test_the_place_holds_what_stands_there_without_scripts(site: Path) -> None:
    text = (site / "with.html").read_text(encoding="utf-8")
    assert 'class="translator" data-sentence="Say &quot;a&quot; &amp; b."' in text
    inner = text[text.index('class="translator-fallback"') :]
    assert "Without <em>scripts</em>." in inner[: inner.index("</div>")]
    assert re.findall('data-replaces="(.*?)"', text) == ["content", "next"]


def test_only_a_page_with_the_model_loads_its_scripts(site: Path) -> None:
    names = ("live/widget.js", "live/widget.css")
    assert all(name in (site / "with.html").read_text(encoding="utf-8") for name in names)
    assert "live/" not in (site / "plain.html").read_text(encoding="utf-8")
    for page in site.glob("*.html"):  # these come with the first use
        text = page.read_text(encoding="utf-8")
        assert not [name for name in ("weights", "vocabulary", "model") if f"{name}.js" in text]


def test_the_build_writes_the_weights_and_the_vocabulary(site: Path) -> None:
    weights = (site / "_static/live/weights.js").read_text(encoding="utf-8")
    assert len(weights) <= 1_500_000
    stored = base64.b64decode(weights.split('"')[1], validate=True)
    assert stored == (FOLDER / "model.safetensors").read_bytes()
    text = (site / "_static/live/vocabulary.js").read_text(encoding="utf-8")
    data = json.loads(text.removeprefix("var annotatedTransformerVocabulary = ").rstrip(";\n"))
    for name in ("config", "tokenizer", "words"):
        assert data[name] == json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


BOOK = Path(live.__file__).parents[1]


def without_figure(text: str) -> list[str]:
    """Return the places of the model on a page that show no figure without scripts."""
    found = []
    for match in re.finditer(r"^:::\{translator\}\n(.*?)^:::\n\n(.*?)(?=^```$)", text, re.M | re.S):
        place, below = match.groups()
        drawn = (
            ":replaces-next:" in place and below.startswith("```{code-cell}") and "show(" in below
        )
        if not drawn and "![" not in place:
            found.append(place)
    return found


def test_every_place_in_the_book_has_a_figure_without_scripts() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in BOOK.rglob("*.md")}
    places = {stem for stem, text in texts.items() if "\n:::{translator}" in text}
    assert places >= {"index", "multi_head", "transformer"}
    assert {
        stem: without_figure(texts[stem]) for stem in places if without_figure(texts[stem])
    } == {}


def test_place_with_one_sentence_for_a_figure_is_noticed() -> None:
    (sentence,) = without_figure(":::{translator}\n:mixer:\n\nWith scripts.\n:::\n\nText.\n```\n")
    assert "With scripts." in sentence
    assert without_figure(":::{translator}\n:replaces-next:\n:::\n\nText, no cell.\n```\n")
    assert not without_figure(":::{translator}\n\n![A figure.](a.svg)\n:::\n\nText.\n```\n")


def test_weights_that_are_too_large_stop_the_build() -> None:
    with pytest.raises(ValueError, match="more than 1500000"):
        live.weights_script(bytes(1_200_000))


def test_the_default_is_the_running_sentence() -> None:
    assert RUNNING.text("de") == live.RUNNING
