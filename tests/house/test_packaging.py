"""What is installed is whole, small and says what it needs."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from environments import closure, copy_project, make, offline
from house import ROOT

from tests.lowest import BoundError, pins, requirements

PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
BUILD = "from setuptools.build_meta import {0} as build; print(build({1!r}))"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the wheel and the source distribution of the project as it is now."""
    folder = tmp_path_factory.mktemp("build")
    project = copy_project(folder / "project")
    found = {}
    for kind in ("build_sdist", "build_wheel"):
        program = BUILD.format(kind, str(folder))
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=project, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found[kind] = folder / done.stdout.splitlines()[-1]
    return found


def install(folder: Path, wheel: Path, *needs: str) -> Path:
    """Make an environment with the wheel and what is needed, and nothing else."""
    packages = closure([*needs, "pip"])
    packages.pop("annotated-transformer", None)
    python = make(folder, packages.values())
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run([str(python), *pip], env=offline(folder), check=True)
    return python


@pytest.fixture(scope="module")
def core(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the wheel, torch and what torch needs."""
    return install(tmp_path_factory.mktemp("core"), built["build_wheel"], "torch")


@pytest.fixture(scope="module")
def command(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that has the extra for the command, and no other."""
    folder = tmp_path_factory.mktemp("command")
    return install(folder, built["build_wheel"], "annotated-transformer[translation]")


def call(python: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run something of an environment outside the project."""
    command = [str(python.parent / words[0]), *words[1:]]
    folder = python.parents[1]
    return subprocess.run(command, cwd=folder, env=offline(folder), capture_output=True, text=True)


def test_wheel_has_every_module_and_its_tables(built: dict[str, Path]) -> None:
    package = ROOT / "annotated_transformer"
    wanted = {path.relative_to(ROOT).as_posix() for path in package.rglob("*") if path.is_file()}
    with zipfile.ZipFile(built["build_wheel"]) as wheel:
        names = set(wheel.namelist())
    assert {name for name in wanted if "__pycache__" not in name} == {
        name for name in names if ".dist-info/" not in name
    }


def test_source_distribution_builds_and_has_no_test_that_cannot_run(
    built: dict[str, Path], tmp_path: Path
) -> None:
    with tarfile.open(built["build_sdist"]) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path, filter="data")
    assert not [name for name in names if "/tests/" in name or name.endswith("/tests")]
    assert {"LICENSE", "README.md", "pyproject.toml"} <= {Path(name).name for name in names}
    (folder,) = tmp_path.iterdir()
    program = BUILD.format("build_wheel", str(tmp_path))
    subprocess.run(
        [sys.executable, "-c", program], cwd=folder, check=True, capture_output=True, text=True
    )
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(again) as one, zipfile.ZipFile(built["build_wheel"]) as other:
        assert set(one.namelist()) == set(other.namelist())


def test_metadata_says_what_it_is(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["build_wheel"]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["License-Expression"] == "MIT"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert "Transformer" in metadata["Keywords"]
    assert metadata["Project-URL"] == "Paper, https://arxiv.org/abs/1706.03762"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert str(citation["version"]) == metadata["Version"]
    assert metadata["Name"] == "annotated-transformer"


@pytest.mark.parametrize(
    "module", "model.transformer training.loop article fast.model pretrained".split()
)
def test_core_needs_torch_alone(core: Path, module: str) -> None:
    done = call(core, "python", "-c", f"import annotated_transformer.{module}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", ["--help", "train --help", "translate m x", "plot m"])
def test_command_without_its_extra_names_it(core: Path, words: str) -> None:
    done = call(core, "annotated-transformer", *words.split())
    told = 'annotated-transformer: needs tyro: pip install ".[translation]" in its folder\n'
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_command_runs_with_its_extra_and_names_that_of_the_plots(command: Path) -> None:
    done = call(command, "annotated-transformer", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "translate" in done.stdout
    log = command.parents[1] / "log.jsonl"
    log.write_text('{"update": 1, "loss": 2.0}\n')
    done = call(command, "annotated-transformer", "plot", ".")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r'annotated-transformer: needs \w+: pip install "\.\[plots\]" in its folder\n',
        done.stderr,
    )


# --- versions ------------------------------------------------------------------


def test_lowest_versions_are_those_that_are_named() -> None:
    assert {"torch==2.7", "setuptools==77.0.1", "torchtext==0.6.0"} <= set(pins(PYPROJECT))
    assert len(pins(PYPROJECT)) == len({one.name for one in requirements(PYPROJECT)})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"torch>=2.7"', '"torch"', "torch: needs one lower bound"),
        ('"torch>=2.7"', '"torch<3"', "torch<3: needs one lower bound"),
        ('"numpy>=2.0"', '"numpy>=2.1"', "numpy: bounds 2.1 and 2.0"),
    ],
)
def test_bound_that_is_missing_or_doubtful_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(BoundError, match=message):
        pins(PYPROJECT.replace(old, new, 1))


def test_workflows_run_what_make_runs() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    called = set()
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text("utf-8"))
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 40
            for command in filter(None, (step.get("run") for step in job["steps"])):
                made = re.match(r"make (\w+)$|\.ci/run$|git init", command)
                assert made, command
                called.add(made[1])
    assert {"lowest", "links", "site"} == called - {None} <= targets
    assert "exec make test" in (ROOT / ".ci/run").read_text("utf-8")
