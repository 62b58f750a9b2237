"""The house is in order, and each rule is seen to fail on a project that breaks it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import colab
import execution
import export
import house
import jupytext
import nbformat
import pytest
import scoreboard
from house import ROOT, Write

CLAIMS = scoreboard.load_claims()
PACKAGE = ROOT / "annotated_transformer"
CORE = [
    *sorted(
        path
        for part in ("model", "training", "background", "fast")
        for path in (PACKAGE / part).rglob("*.py")
    ),
    *(PACKAGE / f"{name}.py" for name in ("__init__", "notation", "article")),
    *(PACKAGE / f"translation/{name}.py" for name in ("greedy", "beam_search")),
]


def toc(root: Path, *pages: str) -> None:
    """Write a table of contents."""
    lines = ["format: jb-book", "root: book/index", "chapters:"]
    lines += [f"  - file: book/{page}" for page in pages]
    (root / "_toc.yml").write_text("\n".join(lines) + "\n")


# --- the tree ------------------------------------------------------------------


def test_package_and_notebooks_are_up_to_date() -> None:
    assert export.run([], check=True) == []


def test_imports_follow_the_reading_order() -> None:
    assert house.disorder(ROOT) == []


def test_every_chapter_has_its_place() -> None:
    assert house.untidy(ROOT) == []


def test_files_of_tests_have_names_of_their_own() -> None:
    """Pytest imports them by name; those of the browser run by themselves."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    apart = {path.name for path in (ROOT / "tests" / "browser").glob("test_*.py")}
    assert {name for name in names if names.count(name) > 1 + (name in apart)} == set()


def test_every_claim_tag_is_sound() -> None:
    assert house.bad_claims(ROOT, CLAIMS) == []


def test_every_chapter_is_finished() -> None:
    assert house.unfinished(ROOT) == []


def test_no_docstring_is_taken_for_a_type(tmp_path: Path) -> None:
    assert house.taken_for_types(ROOT) == []
    (tmp_path / "annotated_transformer").mkdir()
    source = 'class A:\n    a: int\n    """For a parser: a number."""\n    b: int\n    """One."""\n'
    (tmp_path / "annotated_transformer" / "a.py").write_text(source)
    (fault,) = house.taken_for_types(tmp_path)
    assert fault.endswith("a.py, line 3: For a parser: a number.")
    source = "A = 1  #: For a parser: one.\nB = 2  #: See :func:`f`.\n"
    (tmp_path / "annotated_transformer" / "a.py").write_text(source)
    (fault,) = house.taken_for_types(tmp_path)
    assert fault.endswith("a.py, line 1: For a parser: one.")


def test_every_picture_is_seen() -> None:
    assert house.unseen(ROOT) == []


def test_a_warning_of_a_cell_is_noticed(tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell("import warnings; warnings.warn('too old'); print(1)")
    path = tmp_path / "page.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    words = ["-m", "pytest", "-q", "--nbval-lax", "-c", os.devnull, "--rootdir", str(tmp_path)]
    words += ["-p", "no:cacheprovider", str(path)]
    for more, found in ((["-p", "conftest"], 1), ([], 0)):  # nbval alone lets it pass
        ran = subprocess.run(
            [sys.executable, *words, *more],
            env={**os.environ, "PYTHONPATH": str(ROOT / "book")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == found, ran.stdout + ran.stderr
        assert ("UserWarning: too old" in ran.stdout) == bool(found)


def test_core_imports_pytorch_alone() -> None:
    assert house.heavy(ROOT, CORE) == []


def test_no_file_names_a_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    assert house.local_names([path for path in paths if path.is_file()], ROOT) == []


def test_notebooks_hold_no_outputs() -> None:
    for chapter in export.chapters():
        cells = jupytext.read(chapter.with_suffix(".ipynb")).cells
        assert not any(cell.get("outputs") for cell in cells), chapter


def test_version_is_said_once() -> None:
    import annotated_transformer

    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{annotated_transformer.__version__}"' in project
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {annotated_transformer.__version__}" in citation


def test_references_are_used_and_known() -> None:
    known = set(
        re.findall(r"^@\w+\{([^,]+),", (ROOT / "book/references.bib").read_text("utf-8"), re.M)
    )
    cited: set[str] = set()
    for path in (ROOT / "book").rglob("*.md"):
        for keys in re.findall(r"\{cite[\w:]*\}`([^`]+)`", path.read_text("utf-8")):
            cited.update(key.strip() for key in keys.split(","))
    assert cited == known


def test_importing_loads_no_heavy_library() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in CORE
    ]
    heavy = "matplotlib altair pandas seaborn spacy torchtext tokenizers sacrebleu".split()
    heavy += ["torch.distributed.fsdp", "torch._dynamo"]  # half a second of each command
    code = f"import sys, {', '.join(names)}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.strip() == "[]"


def unchecked(files: list[str], paths: list[str]) -> list[str]:
    """Return the modules that are in none of the folders whose types are checked."""
    return [path for path in paths if not path.startswith(tuple(f"{file}/" for file in files))]


def test_types_of_every_module_are_checked() -> None:
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = listed.stdout.split("\0")[:-1]
    assert mypy["strict"]
    assert unchecked(mypy["files"], paths) == []
    for file in mypy["files"]:
        assert unchecked([other for other in mypy["files"] if other != file], paths)
    others = {"module", "ignore_missing_imports", "follow_imports"}  # of libraries alone
    relaxed = [{*rule} - others for rule in mypy["overrides"]]
    assert not set().union(*relaxed)  # nothing is checked less strictly
    libraries = {name.split(".")[0] for rule in mypy["overrides"] for name in rule["module"]}
    assert not libraries & {Path(file).parts[0] for file in mypy["files"]}


# --- each rule fails where it should ---------------------------------------------


def test_disorder_is_noticed(project: Path, write: Write) -> None:
    write("index", ("", "X = 1"), exports=False)
    write("model/a", ("export", "from annotated_transformer.model.b import Y"))
    write("model/b", ("export", "from annotated_transformer import model\n\nY = 1"))
    toc(project, "model/a", "model/b")
    (fault,) = house.disorder(project)
    assert "model/a imports from book/model/b" in fault
    toc(project, "model/b", "model/a")
    assert house.disorder(project) == []
    write("index", ("", "from annotated_transformer.by_hand import X"), exports=False)
    assert house.disorder(project) == []
    write("index", ("", "from annotated_transformer.model.b import Y"), exports=False)
    assert len(house.disorder(project)) == 1


def test_chapter_may_not_import_itself(project: Path, write: Write) -> None:
    write("index", ("", "X = 1"), exports=False)
    write("model/a", ("", "import annotated_transformer.model.a as a"))
    toc(project, "model/a")
    assert len(house.disorder(project)) == 1


def test_untidiness_is_noticed(project: Path, write: Write) -> None:
    write("index", ("", "X = 1"), exports=False)
    chapter = write("model/a", ("", "X = 1"))
    (project / "book/page.md").write_text("# A page\n")
    toc(project, "lost")
    export.run([], check=False, root=project)
    faults = house.untidy(project)
    assert sorted(faults) == [
        "book/lost.md does not exist",
        "book/model/a is not in the table of contents",
        "book/model/a says that it exports, and does not",
        "book/page is not in the table of contents",
    ]
    chapter.with_suffix(".ipynb").unlink()
    assert "book/model/a has no notebook" in house.untidy(project)


@pytest.mark.parametrize(
    ("tag", "source", "fault"),
    [
        ("claim-3.5c", "assert 1 + 1 == X", ""),
        ("claim-3.2b-M, hide-input", "assert 1 + 1 == X", ""),
        ("claim-3.5c", "X = 1", "asserts nothing"),
        ("claim-3.5c", "assert True", "asserts nothing"),
        ("claim-3.5c", "print(judge([X]))", ""),
        ("claim-3.5c", "judge([X])", "asserts nothing"),
        ("claim-3.5c, remove-cell", "assert 1 + 1 == X", "not shown"),
        ("claim-9.9z", "assert 1 + 1 == X", "no such claim"),
        ("claim-3.5c-M", "assert 1 + 1 == X", "no check of kind M"),
        ("claim-three", "assert 1 + 1 == X", "not of the form"),
    ],
)
def test_bad_claim_is_noticed(
    project: Path, write: Write, tag: str, source: str, fault: str
) -> None:
    write("a", (tag, source))
    faults = house.bad_claims(project, CLAIMS)
    assert len(faults) == bool(fault)
    assert all(fault in one for one in faults)


EXERCISE = """
:::{{exercise-start}}
:label: ex-{0}
:::
Why?
:::{{exercise-end}}
:::

:::{{solution-start}} ex-{0}
:::
So.
:::{{solution-end}}
:::
"""


def test_unfinished_chapter_is_noticed(project: Path, write: Write) -> None:
    three = "".join(EXERCISE.format(number) for number in range(3))
    write("model/good", ("", "X = 1"), text="\n## Summary\n" + three)
    assert house.unfinished(project) == []
    write("model/bad", ("", "X = 1"), text=EXERCISE.format(1) + three.replace("} ex-2", "} ex-9"))
    assert house.unfinished(project) == [
        "book/model/bad has no summary",
        "book/model/bad: exercise ex-2 has no solution",
    ]
    write("model/bad", (colab.TAG, colab.cell()), text="\n## Summary\n")
    assert house.unfinished(project) == [
        "book/model/bad holds the cell that the exporter adds: take it out",
        "book/model/bad has 0 exercises, not three",
    ]


def test_picture_that_nobody_sees_is_noticed(project: Path, write: Write) -> None:
    takes = ("", "from annotated_transformer.figures import Table, show")
    seen = (
        ("", "picture = show(1, '')\npicture"),
        ("", "Table([], []) if 1 else 2"),
        ("", "show(1, '')"),
    )
    write("model/good", takes, *seen)
    write("model/own", ("", "def show(x):\n    print(x)\n\n\nshow(1)\nshow(2)"))
    assert house.unseen(project) == []
    write("model/bad", takes, ("", "show(1, '')\nassert 1"), ("", "if 1:\n    Table([], [])"))
    assert house.unseen(project) == [
        "book/model/bad, code cell 1: show makes what nobody sees",
        "book/model/bad, code cell 2: Table makes what nobody sees",
    ]


def test_machine_name_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("fine\nrun /home" + "/someone/x\n")
    assert house.local_names([path], tmp_path) == ["a.md:2: /home" + "/s"]


def test_heavy_import_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import math\nimport tqdm\n\n\ndef f():\n    import pandas\n")
    assert sorted(house.heavy(tmp_path, [path])) == ["a.py imports pandas", "a.py imports tqdm"]
    path.write_text("try:\n    import numpy as np\nexcept ImportError:\n    np = None\n")
    assert house.heavy(tmp_path, [path]) == ["a.py imports numpy"]


# --- the exporter ----------------------------------------------------------------


def test_exporting_from_nothing_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("book", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for path in (tmp_path / "book").rglob("*.ipynb"):
        path.unlink()
    written = export.run([], check=False, root=tmp_path)
    assert len(written) > 1.5 * len(export.chapters())
    for line in written:
        name = line.removeprefix("wrote ")
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes(), name
    assert export.run([], check=False, root=tmp_path) == []


def test_check_lists_what_is_stale(project: Path, write: Write) -> None:
    write("model/a", ("export", "X = 1"))
    expected = ["book/model/a.ipynb", "annotated_transformer/model/a.py"]
    expected += ["annotated_transformer/model/__init__.py"]
    assert export.run([], True, project) == [f"stale {name}" for name in expected]
    assert not (project / "annotated_transformer").exists()
    assert export.run([], False, project) == [f"wrote {name}" for name in expected]
    assert export.run([], True, project) == []
    write("model/a", ("", "Y = 2"), ("export", "X = 1"))
    assert export.run([], True, project) == ["stale book/model/a.ipynb"]


def test_outputs_follow_from_the_records_of_every_folder(
    project: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "ROOT", project)
    (project / "requirements.txt").touch()
    reads, other = write("a", ("", 'folder = "results"')), write("b", ("", "x = 1"))
    before = execution.key_of(reads), execution.key_of(other)
    (project / "results" / "part").mkdir(parents=True)
    (project / "results" / "part" / "one.json").write_text("{}")
    assert execution.key_of(reads) != before[0]
    assert execution.key_of(other) == before[1]


def test_outputs_follow_from_the_tables_of_a_module(
    project: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "ROOT", project)
    (project / "requirements.txt").touch()
    folder = project / "annotated_transformer" / "data"
    folder.mkdir(parents=True)
    for name in ("__init__.py", "words.py", "words.tsv"):
        (folder / name).touch()
    reads = write("a", ("", "from annotated_transformer.data import words"))
    other = write("b", ("", "x = 1"))
    before = execution.key_of(reads), execution.key_of(other)
    (folder / "words.tsv").write_text("noun\n")
    assert execution.key_of(reads) != before[0]
    assert execution.key_of(other) == before[1]


def test_module_without_chapter_is_an_orphan(project: Path, write: Write) -> None:
    chapter = write("model/a", ("export", "X = 1"))
    write("model/b", ("export", "X = 1"))
    export.run([], False, project)
    by_hand = project / "annotated_transformer/model/c.py"
    by_hand.write_text("X = 1\n")
    chapter.unlink()
    assert len(export.run([], True, project)) == 3
    export.run([], False, project)
    assert not (project / "annotated_transformer/model/a.py").exists()
    assert by_hand.exists()
    assert export.run([], True, project) == [
        "no chapter defines annotated_transformer/model/c.py",
        "no chapter defines book/model/a.ipynb",  # which may be a reader's own
    ]


def test_error_names_file_line_and_cell(project: Path, write: Write) -> None:
    chapter = write("model/a", ("export", "X = 1"), ("export", "Y = 2\nZ = = 3"))
    line = chapter.read_text().splitlines().index("Z = = 3") + 1
    with pytest.raises(export.ExportError, match=rf"book/model/a\.md:{line}: export cell 2"):
        export.run([], False, project)


@pytest.mark.parametrize(
    ("module", "message"),
    [("model/b", "mirrors the book: model/a"), ("''\n  x: y", "mirrors")],
)
def test_module_must_mirror_the_chapter(
    project: Path, write: Write, module: str, message: str
) -> None:
    write("model/a", ("export", "X = 1"), module=module)
    with pytest.raises(export.ExportError, match=message):
        export.run([], False, project)


def test_front_matter_must_say_what_is_exported(project: Path, write: Write) -> None:
    chapter = write("a", ("export", "X = 1"))
    text = chapter.read_text().replace("  doc: One line.\n", "")
    chapter.write_text(text)
    with pytest.raises(export.ExportError, match="front matter needs export"):
        export.run([], False, project)


def test_unknown_chapter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main(["book/nowhere.md"]) == 2
    assert "not a chapter" in capsys.readouterr().err


def test_every_module_is_of_the_kind_of_its_folder() -> None:
    assert house.misplaced(ROOT) == []


def test_module_of_the_wrong_kind_is_noticed(project: Path, write: Write) -> None:
    write("model/a", ("export", "X = 1"))
    write("engineering/b", ("", "X = 1"), module=None, exports=False)
    export.run([], False, project)
    package = project / "annotated_transformer"
    (package / "data").mkdir()
    (package / "data/c.py").write_text("X = 1\n")
    assert house.misplaced(project) == []
    (package / "data/d.py").write_text(f"{export.MARK}book/data/d.md: edit the chapter instead.\n")
    (package / "model/e.py").write_text("X = 1\n")
    (package / "other").mkdir()
    (package / "other/f.py").write_text("X = 1\n")
    assert house.misplaced(project) == [
        "annotated_transformer/data/d.py is written from a chapter",
        "annotated_transformer/model/e.py is not written from a chapter",
        "annotated_transformer/other/f.py: the package has no folder other",
    ]


def test_chapter_of_a_part_by_hand_may_not_export(project: Path, write: Write) -> None:
    write("data/a", ("export", "X = 1"))
    with pytest.raises(export.ExportError, match="exported to model, training"):
        export.run([], False, project)


def test_first_line_of_a_module_names_its_chapter() -> None:
    for chapter in export.chapters():
        path = ROOT / "annotated_transformer" / chapter.relative_to(ROOT / "book")
        if export.front_matter(chapter.read_text("utf-8")).get("export"):
            first = path.with_suffix(".py").read_text("utf-8").splitlines()[0]
            page = chapter.relative_to(ROOT).as_posix()
            assert first == f"{export.MARK}{page}: edit the chapter instead."


def test_cell_ids_do_not_move(project: Path, write: Write) -> None:
    def ids() -> list[str]:
        export.run([], False, project)
        return [cell.id for cell in jupytext.read(project / "book/a.ipynb").cells]

    write("a", ("export", "X = 1"), ("", "X"), ("", "X"))
    before = ids()
    assert len(set(before)) == len(before)
    write("a", ("export", "X = 1"), ("", "Y = 2"), ("", "X"), ("", "X"))
    assert [one for one in ids() if one in before] == before
