"""The package's layers and lengths, and that each rule fails where it should."""

import re
from pathlib import Path

import house
import layers
import pytest
import yaml
from house import ROOT, Write


def part_one() -> list[str]:
    """Return the pages of the book's first part."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    (part,) = (part for part in toc["parts"] if part["caption"].startswith("I. "))
    return [entry["file"] for entry in part["chapters"]]


def test_imports_run_one_way() -> None:
    assert layers.against_the_layers(ROOT) == []


def test_no_module_imports_itself() -> None:
    assert layers.cycles(ROOT) == []


def test_nothing_is_too_long() -> None:
    assert layers.too_long(ROOT) == []


def test_the_package_is_small() -> None:
    rest, exercises = layers.package_lines(ROOT)
    assert rest <= layers.PACKAGE_LINES
    assert exercises <= layers.EXERCISE_LINES


def test_cells_of_the_first_part_are_short() -> None:
    assert list(layers.long_cells(ROOT, part_one())) == []


def test_exercises_of_all_parts_answer() -> None:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    parts = [part for part in toc["parts"] if part["caption"].startswith("I")]  # I, II and III
    assert len(parts) == 3
    pages = [entry["file"] for part in parts for entry in part["chapters"]]
    assert house.without_answers(ROOT, pages) == []


OWN_MODEL = {"book/results/parsing"}  # its model is another one, trained on the page: it parses


def test_the_running_sentence_goes_through_the_first_part() -> None:
    texts = {page: (ROOT / f"{page}.md").read_text(encoding="utf-8") for page in part_one()}
    without = {page for page, text in texts.items() if not layers.goes_through_the_model(text)}
    assert without == OWN_MODEL
    assert all("RUNNING." in texts[page] for page in OWN_MODEL)  # it still has the sentence


@pytest.mark.parametrize("lost", ["RUNNING", "load_pretrained"])
def test_page_without_the_sentence_or_the_model_is_noticed(lost: str) -> None:
    for page in part_one():
        text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
        kept = re.sub(rf"(?<!import ){lost}(?=[.(\],])", "other", text)  # the import stays
        assert not layers.goes_through_the_model(kept), page


@pytest.mark.parametrize(
    ("cell", "through"),
    [
        ("", False),
        ("print(len(RUNNING.words('en')), load_pretrained())", False),
        ("n = len(RUNNING.words('en'))\nmodel = load_pretrained()\nmodel.translate('Ja.')", False),
        ("german = RUNNING.text('de')\nload_pretrained().trace(german, german)", True),
        ("system = load_pretrained()\nfor line in RUNNING.german:\n    system.batch(line)", True),
        ("net = load_pretrained().model\nsearch(net, [RUNNING.german])", True),
        ("net = load_pretrained()\nx = RUNNING.text('de')\nx = 'Ja.'\nnet.translate(x)", False),
        ("n = len(RUNNING.german)\nload_pretrained().translate(n * 'ja ')", False),
        ("## Exercises", False),
    ],
)
def test_what_goes_through_the_model(cell: str, through: bool) -> None:
    fence = "```{{code-cell}}\n{}\n```\n"
    used = "load_pretrained().translate(RUNNING.text('de'))"
    story = f"\n{cell}\n\n{fence.format(used)}" if cell.startswith("#") else fence.format(cell)
    imports = "from annotated_transformer.pretrained import RUNNING, load_pretrained"
    assert layers.goes_through_the_model(fence.format(imports) + story) is through


def test_exercises_that_do_not_answer_are_noticed(tmp_path: Path) -> None:
    form = "```{{exercise-start}} A ({})\n:label: a\n```\n{}```{{exercise-end}}\n```\n{}"
    asked, solved = '\ncheck("masks", mine)\n', '\nassert check("masks", mine).passed\n'
    good, why = form.format("level 1", asked, solved), form.format("level 2", "Why?\n", "")
    found = {}
    for name, text in {
        "good": good + why + why,
        "few": good + why,
        "easy": good * 3,
        "mute": form.format("level 1", "Why?\n", "") + why + why,
        "unsolved": form.format("level 1", asked, "") + why + why,
    }.items():
        (tmp_path / f"{name}.md").write_text(text, encoding="utf-8")
        faults = house.without_answers(tmp_path, [name])
        found[name] = [fault.removeprefix(f"{name}: ") for fault in faults]
    assert found == {
        "good": [],
        "few": ["few has 2 exercises, not three to six"],
        "easy": ["exercises of two levels are wanted"],
        "mute": ["A (level 1): a checker answers what is of level 1"],
        "unsolved": ["A (level 1): the solution is not checked"],
    }


def test_the_first_part_is_read_in_a_few_evenings() -> None:
    """Counted as ``layers.words`` does: without exercises, solutions, code, computed captions."""
    counts = {
        page: layers.words((ROOT / f"{page}.md").read_text(encoding="utf-8")) for page in part_one()
    }
    assert len(counts) <= layers.PART_CHAPTERS
    assert sum(counts.values()) <= layers.PART_WORDS
    assert {page: n for page, n in counts.items() if n > layers.CHAPTER_WORDS} == {}


def test_words_are_those_that_are_read() -> None:
    text = """---
title: not read
---
(sec-one)=
# One title

Two *words*, $a + b$ and {cite}`one`; {eq}`one`.

![Not read, but heard.](picture.svg)

```{code-cell}
not = read
```

:::{paper} 3.2
:line: Not read here.
A box.
:::

## Exercises

Not read.
"""
    assert layers.words(text) == len("One title Two words formula and one A box".split())


@pytest.fixture
def package(project: Path) -> Path:
    """Return the folder of a package with three layers."""
    sources = {
        "__init__": "",
        "notation": "PAD = 0",
        "model/a": "from annotated_transformer.notation import PAD",
        "fast/b": "from annotated_transformer.model import a",
        "exercises/__init__": "from annotated_transformer.model import a",
        "engine/c": "import annotated_transformer.fast.b\nfrom annotated_transformer import model",
    }
    for name, text in sources.items():
        path = project / "annotated_transformer" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return project / "annotated_transformer"


@pytest.mark.parametrize(
    ("name", "line", "fault"),
    [
        ("model/a", "import annotated_transformer.fast.b", "model may not import from fast"),
        ("model/a", "from annotated_transformer.fast import b", "model may not import from fast"),
        ("fast/b", "def f():\n    from annotated_transformer.engine.c import x", "from engine"),
        ("notation", "from annotated_transformer.model.a import PAD", "notation may not import"),
        (
            "cli/d",
            "from annotated_transformer.exercises import check",
            "cli may not import from ex",
        ),
        (
            "model/a",
            "import annotated_transformer.exercises",
            "model may not import from exercises",
        ),
        ("other/d", "from annotated_transformer.model import a", "other may not import"),
    ],
)
def test_import_against_the_layers_is_noticed(
    package: Path, name: str, line: str, fault: str
) -> None:
    assert layers.against_the_layers(package.parent) == []
    path = package / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{line}\n")
    (found,) = layers.against_the_layers(package.parent)
    assert fault in found


def test_cycle_is_noticed(package: Path) -> None:
    assert layers.cycles(package.parent) == []
    (package / "model/e.py").write_text("from annotated_transformer.model import f\n")
    (package / "model/f.py").write_text("def g():\n    import annotated_transformer.model.e\n")
    (found,) = layers.cycles(package.parent)
    assert {"model.e", "model.f"} == set(found.split(" imports "))


def test_length_is_noticed(package: Path) -> None:
    assert layers.too_long(package.parent) == []
    body = "\n".join(f"    x{i} = {i}" for i in range(60))
    (package / "model/g.py").write_text(f"class G:\n{body}\n\n\ndef f():\n{body}\n")
    (package / "model/complexity.py").write_text(f"class G:\n{body}\n")
    (package / "fast/h.py").write_text("x = 1\n" * 501)
    (package / "engine/k.py").write_text(f"class K:\n{body}\n{body}\n")
    (package / "model/i.py").write_text("x = 1\n" * 499)
    (package / "model/j.py").write_text("x = 1\n" * 100)
    assert layers.too_long(package.parent) == [
        "annotated_transformer/engine/k.py: K has 121 lines, more than 120",
        "annotated_transformer/fast/h.py has 501 lines, more than 500",
        "annotated_transformer/model/g.py: G has 61 lines, more than 60",
        "annotated_transformer/model/g.py: f has 61 lines, more than 50",
        "model/ without complexity has 724 lines, more than 700",
    ]
    assert layers.package_lines(package.parent)[0] > 1100


def test_long_cell_is_noticed(project: Path, write: Write) -> None:
    lines = "\n".join(f"x{i} = {i}" for i in range(31))
    write(
        "model/a",
        ("", "X = 1"),
        ("", lines),
        ("hide-input", lines),
        ("hide-input, export", lines),
    )
    assert list(layers.long_cells(project, ["book/model/a"])) == [
        "book/model/a, cell 2: 31 lines, more than 30",
        "book/model/a, cell 4: 31 lines, more than 30",
    ]
    assert list(layers.long_cells(project, [])) == []
