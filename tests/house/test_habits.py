"""The habits of a kept project: hooks, container, forms, versions, the map of the book."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import llms
import pytest
import yaml
from house import ROOT, reading_order

MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def hooks() -> list[dict[str, str]]:
    """Return the hooks of pre-commit."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    return [hook for repo in config["repos"] for hook in repo["hooks"]]


def test_hooks_use_the_environment_of_the_project() -> None:
    """So committing fetches nothing, and checks with the locked versions."""
    for hook in hooks():
        assert hook["language"] == "system"
        program, *words = hook["entry"].split()
        assert program.startswith(".venv/bin/")
        named = [word for word in words if word.endswith(".py")]
        assert [name for name in named if not (ROOT / name).exists()] == []


def test_hooks_run_the_quick_checks_of_make_test() -> None:
    entries = [hook["entry"].replace(".venv/bin/", "$(BIN)/") for hook in hooks()]
    recipes = re.findall(r"^(?:export|lint|types): \$\(READY\)\n((?:\t.*\n)+)", MAKEFILE, re.M)
    steps = [line.strip() for recipe in recipes for line in recipe.splitlines()]
    assert len(steps) == 4
    for step in steps:
        words = step.removesuffix(" .").replace("--exclude '*.ipynb'", "").strip()
        assert any(entry.startswith(words) for entry in entries), step


def test_hooks_are_what_pre_commit_takes() -> None:
    command = [sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_container_makes_the_book() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text("utf-8"))
    target = re.fullmatch(r"make (\w+)", container["postCreateCommand"])
    assert target
    assert re.search(rf"^{target[1]}:", MAKEFILE, re.M)
    workflow = (ROOT / ".github/workflows/test.yml").read_text("utf-8")
    assert f'python: "{container["image"].rpartition(":")[2]}"' in workflow


def test_forms_are_whole() -> None:
    forms = list((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 3
    for path in forms:
        form = yaml.safe_load(path.read_text("utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields) > 0
        assert all(field["attributes"]["label"] for field in fields)
        assert any(field.get("validations", {}).get("required") for field in fields)


def test_workflows_are_cached_by_the_lock() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
        for job in jobs.values():
            if not any("checkout" in step.get("uses", "") for step in job["steps"]):
                continue  # it runs nothing of the project
            (setup,) = [s["with"] for s in job["steps"] if "setup-python" in s.get("uses", "")]
            lowest = job["steps"][-1].get("run") == "make lowest"
            expected = "pyproject.toml" if lowest else "requirements*.txt"
            assert setup["cache-dependency-path"] == expected


def test_changes_are_told_version_by_version() -> None:
    """The first is that of the package; below it, what was added, changed and mended."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    project = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", text, re.M)
    assert versions[0] == project[0]
    numbers = [[*map(int, version.split("."))] for version in versions]
    assert numbers == sorted(numbers, reverse=True)
    newest = text.split("\n## ")[1]
    assert re.findall(r"^### (\w+)$", newest, re.M) == ["Added", "Changed", "Fixed"]


def test_folders_of_chapters_hold_chapters_alone() -> None:
    """What a cell has written by accident would be committed with them."""
    listed = subprocess.check_output(["git", "ls-files", "book"], cwd=ROOT, text=True)
    paths = [Path(name) for name in listed.splitlines()]
    inside = [path for path in paths if len(path.parts) > 2 and path.parts[1][0] != "_"]
    assert [path for path in inside if path.suffix not in (".md", ".ipynb")] == []


# --- the map of the book -----------------------------------------------------------


def test_map_has_every_page_in_order() -> None:
    text = llms.text()
    pages = re.findall(r"^- \[.+\]\(_sources/(.+)\.md\): \S.*[.?]$", text, re.M)
    assert pages == reading_order(ROOT)
    assert len(text.splitlines()) < 100
    assert "- [Attention](_sources/book/model/attention.md): In our running sentence" in text
    assert "Module `annotated_transformer.model.attention`: Scaled dot-product attention" in text


@pytest.mark.parametrize(
    ("paragraph", "sentence"),
    [
        ("*It* is {doc}`large <x/y>`, see [a](b). And more.", "It is large, see a."),
        ("The chapter {ref}`sec-x` says so {cite}`a,b`. More", "The chapter says so."),
        ("Look:\n\n> x", "Look."),
        ("# A title\n\n```{code-cell}\nx\n```\n\n:::{note}\n:::\n\nWhy? So.", "Why?"),
        ("(label)=\n# A title", ""),
    ],
)
def test_first_sentence(paragraph: str, sentence: str) -> None:
    assert llms.first_sentence(paragraph.split("\n\n")) == sentence


@pytest.mark.parametrize(("builder", "written"), [("html", True), ("epub", False)])
def test_map_is_written_beside_the_pages(tmp_path: Path, builder: str, written: bool) -> None:
    app = SimpleNamespace(builder=SimpleNamespace(name=builder), outdir=tmp_path, srcdir=ROOT)
    llms.write(app, ValueError())  # type: ignore[arg-type]
    assert not (tmp_path / "llms.txt").exists()
    llms.write(app, None)  # type: ignore[arg-type]
    assert (tmp_path / "llms.txt").exists() == written
