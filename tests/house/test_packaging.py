"""What is installed is whole, small and says what it needs."""

import email
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml
from environments import build, closure, content, install, make, offline
from house import ROOT
from packaging.requirements import Requirement

import annotated_transformer
from tests.lowest import APART, BoundError, pins, requirements
from tests.serving.servers import serves_until_it_is_stopped

PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
EXTRAS = tomli.loads(PYPROJECT)["project"]["optional-dependencies"]


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
    wanted = {name for name in wanted if not re.search(r"__pycache__|\.DS_Store$", name)}
    assert wanted == {name for name in names if ".dist-info/" not in name}


def test_source_distribution_builds_and_has_no_test_that_cannot_run(
    built: dict[str, Path], tmp_path: Path
) -> None:
    with tarfile.open(built["build_sdist"]) as archive:
        names = archive.getnames()
        safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not in 3.11.2
        archive.extractall(tmp_path, **safe)
    assert not [name for name in names if "/tests/" in name or name.endswith("/tests")]
    assert {"LICENSE", "README.md", "pyproject.toml"} <= {Path(name).name for name in names}
    (folder,) = tmp_path.iterdir()
    assert content(build(folder, tmp_path)) == content(built["build_wheel"])


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
    assert metadata.get_all("Provides-Extra") == list(EXTRAS)
    assert len(metadata.get_all("Requires-Dist", [])) == 1 + sum(map(len, EXTRAS.values()))


CORE = """
import torch
import annotated_transformer as package
import annotated_transformer.article, annotated_transformer.fast.model
import annotated_transformer.pretrained
from annotated_transformer import data_gen, greedy_decode, make_adam, make_model, update
model = make_model(11, 11, N=1, d_model=16, d_ff=16, h=2)
optimizer = make_adam(model, lr=1e-3)
losses = [update(model, [batch], optimizer).loss for batch in data_gen(11, 4, 3)]
source = torch.ones(1, 3, dtype=torch.long)
decoded = greedy_decode(model, source, torch.ones(1, 1, 3, dtype=torch.bool), 5, 1)
print(len(losses), tuple(decoded.shape), package.__version__)
print(package.__file__)
"""


def test_core_needs_torch_alone(core: Path) -> None:
    """It is imported from the wheel, trains and decodes."""
    done = call(core, "python", "-c", CORE)
    assert done.returncode == 0, done.stderr
    found, file = done.stdout.splitlines()
    assert found == f"3 (1, 5) {annotated_transformer.__version__}"
    assert Path(file).is_relative_to(core.parents[1])


EXPORT = """
import contextlib, io, os, re
from pathlib import Path
from annotated_transformer.cli.main import main
assert main(["export", "out", "--to", "TARGET"]) == 0
os.chdir("out")
(code,) = re.findall(r"```python\\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
with contextlib.redirect_stdout(io.StringIO()) as out:
    exec(code.replace("…", "Der Hund schläft."), {})
assert "The dog sleeps." in re.split(r"[\\n']", out.getvalue()), out.getvalue()
"""
# What each extra is for; the book and dev serve this project alone. Others are imported.
USES = {
    "translation": """
import io, sys
from annotated_transformer.cli.main import main
sys.stdin = io.TextIOWrapper(io.BytesIO("Der Hund schläft .\\n".encode()))
assert main(["translate", "--quiet"]) == 0
""",
    "torchtext": """
from annotated_transformer.article import MyIterator
assert "torchtext" in MyIterator.__mro__[1].__module__
""",
    "plots": """
from annotated_transformer.figures import lines, show
figure = lines({"a": ([1, 2], [3, 4])}, x_label="x", y_label="y")
assert "<svg" in str(show(figure, "A line.")._repr_mimebundle_())
""",
    **{name: EXPORT.replace("TARGET", name) for name in ("ctranslate2", "huggingface", "onnx")},
}
WITH_COMMAND = {"serve", "ctranslate2", "huggingface", "onnx"}  # they read tokenizers
IMPORT = """
import importlib
from importlib.metadata import packages_distributions
for module, names in packages_distributions().items():
    if {name.lower().replace("_", "-") for name in names} & WANTED:
        importlib.import_module(module)
import annotated_transformer.article
"""


@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_is_enough_by_itself(extra: str, built: dict[str, Path], tmp_path: Path) -> None:
    """What it names can be imported with nothing but what that needs, and does its work."""
    extras = f"translation,{extra}" if extra in WITH_COMMAND else extra
    packages = closure([f"annotated-transformer[{extras}]"])
    packages.pop("annotated-transformer")
    python = make(tmp_path, packages.values())
    (site,) = tmp_path.glob("lib/python*/site-packages")
    with zipfile.ZipFile(built["build_wheel"]) as wheel:
        wheel.extractall(site)
    if extra == "serve":
        command = [str(python), "-m", "annotated_transformer"]
        serves_until_it_is_stopped(command, tmp_path, offline(tmp_path))
        return
    wanted = {Requirement(line).name.lower() for line in EXTRAS[extra]}
    program = USES.get(extra, IMPORT.replace("WANTED", repr(wanted)))
    done = call(python, "python", "-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", ["--help", "train --help", "translate m x", "plot m"])
def test_command_without_its_extra_names_it(core: Path, words: str) -> None:
    done = call(core, "annotated-transformer", *words.split())
    told = 'annotated-transformer: needs tyro: pip install ".[translation]" in the project folder\n'
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
        r'annotated-transformer: needs \w+: pip install "\.\[plots\]" in the project folder\n',
        done.stderr,
    )


# --- versions ------------------------------------------------------------------


def test_lowest_versions_are_those_that_are_named() -> None:
    assert {"torch==2.7", "setuptools==77.0.1", "torchtext==0.6.0"} <= set(pins(PYPROJECT))
    assert len(pins(PYPROJECT)) == len({one.name for one in requirements(PYPROJECT, apart=APART)})


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
            writes = "write" in {
                *workflow["permissions"].values(),
                *job.get("permissions", {}).values(),
            }
            ours = any(step.get("uses", "").startswith("actions/checkout") for step in job["steps"])
            assert not (writes and ours), path.name  # what may write runs no code of the project
            for command in filter(None, (step.get("run") for step in job["steps"])):
                made = re.match(r"make (\w+)$|\.ci/run$|git init", command)
                assert made, command
                called.add(made[1])
    assert {"lowest", "links", "site"} == called - {None} <= targets
    assert "exec make test" in (ROOT / ".ci/run").read_text("utf-8")
