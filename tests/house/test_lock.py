"""The lock: every package once, by the hashes of its files, and as ``pyproject.toml`` asks."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import tomli
from environments import closure
from house import ROOT
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests import lock
from tests.lowest import requirements

PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}")
# Where the two commands are to work; the Makefile refuses other Pythons.
MACHINES = [
    {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.1",
     "sys_platform": system, "platform_system": name, "platform_machine": machine}
    for minor in (10, 11, 12, 13, 14)
    for system, name, machine in (("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"),
                                  ("darwin", "Darwin", "arm64"))
]  # fmt: skip


def pins(text: str) -> Iterator[Requirement]:
    """Yield what a lock pins.

    Raises:
        ValueError: A line is something else, or a package has no hash.
    """
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    for block in filter(None, re.split(r"\n(?=\S)|\n$", text)):
        first, *hashes = block.split(" \\\n")
        if not re.match(r"[a-z0-9-]+==[\w.+!]+( ; |$)", first):
            raise ValueError(f"not a pin: {first}")
        if not hashes or not all(HASH.fullmatch(line) for line in hashes):
            raise ValueError(f"no hashes: {first}")
        yield Requirement(first)


LOCKED = list(pins(lock.LOCK.read_text("utf-8")))
(TORCH,) = [
    Requirement(line) for line in lock.TORCH.read_text("utf-8").splitlines() if line[0] != "#"
]


HERE = {name: str(value) for name, value in default_environment().items()}


def on(machine: dict[str, str], locked: list[Requirement] = LOCKED) -> dict[str, str]:
    """Return the version of each package that a machine gets.

    Raises:
        ValueError: It would get a package twice.
    """
    found: dict[str, str] = {}
    for one in [*locked, TORCH]:
        if one.marker is None or one.marker.evaluate(HERE | machine):
            if one.name in found:
                raise ValueError(f"{one.name} twice on {machine}")
            found[one.name] = next(iter(one.specifier)).version
    return found


def missing(text: str, locked: list[Requirement] = LOCKED) -> set[str]:
    """Return what a ``pyproject.toml`` asks for and some machine does not get so."""
    found = set()
    for machine in MACHINES:
        versions = on(machine, locked)
        for one in requirements(text):
            if one.marker and not one.marker.evaluate(HERE | machine):
                continue
            got = versions.get(canonicalize_name(one.name))
            if got is None or not one.specifier.contains(got):
                found.add(f"{one}: {got}")
    return found


def test_every_machine_gets_what_the_package_asks_for() -> None:
    assert missing(PYPROJECT) == set()
    project = Requirement("x" + re.findall(r'requires-python = "(.*)"', PYPROJECT)[0]).specifier
    assert project == SpecifierSet(f">={MACHINES[0]['python_version']}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"torch>=2.7"', '"torch>=99"'),
        ('"pooch>=1.7"', '"pooch>=99"'),
        ('"numpy>=2.0"', '"numpy>=2.3"'),  # true for Python 3.11, not for 3.10
        ('"ruff>=', '"unheard-of", "ruff>='),
    ],
)
def test_another_need_is_noticed(old: str, new: str) -> None:
    assert old in PYPROJECT
    assert len(missing(PYPROJECT.replace(old, new))) == 1


def test_package_without_a_pin_is_noticed() -> None:
    assert missing(PYPROJECT, [one for one in LOCKED if one.name != "pooch"]) == {
        "pooch>=1.7: None"
    }
    with pytest.raises(ValueError, match="pooch twice"):
        on(MACHINES[0], [*LOCKED, Requirement("pooch==1.7")])


def test_torch_stands_apart_with_all_that_only_its_build_needs() -> None:
    assert str(TORCH) == f"torch=={next(iter(TORCH.specifier)).version}"
    assert [one.name for one in LOCKED if lock.APART.match(str(one))] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a==1\n", "no hashes: a==1"),
        ("a==1 \\\n    --hash=sha256:12\n", "no hashes: a==1"),
        ("a>=1 \\\n    --hash=sha256:" + "0" * 64, "not a pin"),
        ("--extra-index-url x\n", "not a pin"),
        ("a @ file:x\n", "not a pin"),
    ],
)
def test_line_that_is_no_pin_is_refused(text: str, message: str) -> None:
    good = "b==1 ; sys_platform == 'x' \\\n    --hash=sha256:" + "0" * 64
    assert [one.name for one in pins(f"# c\n{good}\n{good.replace('b', 'c', 1)}\n")] == ["b", "c"]
    with pytest.raises(ValueError, match=message):
        list(pins(f"{good}\n{text}"))


def test_this_environment_is_the_locked_one() -> None:
    versions = on(HERE)
    extras = tomli.loads(PYPROJECT)["project"]["optional-dependencies"]
    everything = closure([f"annotated-transformer[{','.join(extras)}]"])
    everything.pop("annotated-transformer")
    wrong = {
        name: (package.version, versions.get(name))
        for name, package in everything.items()
        if package.version.split("+")[0] != versions.get(name) and not lock.APART.match(f"{name}==")
    }
    assert wrong == {}
    assert version("torch").split("+")[0] == versions["torch"]


# --- how it is made ----------------------------------------------------------------


def test_packages_of_torch_are_left_out() -> None:
    block = "{}==1 \\\n    --hash=sha256:0\n"
    kept = "pytorch-x torchtext cudax nvidia".split()
    names = ["torch", "triton", "nvidia-nccl-cu13", "cuda-bindings", *kept]
    text = "".join(map(block.format, names))
    assert lock.without_torch(text) == "".join(map(block.format, kept))


def test_lock_stays_as_it_was_where_it_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (lock.LOCK, lock.TORCH):
        shutil.copy(path, tmp_path / path.name)
    monkeypatch.setattr(lock, "ROOT", tmp_path)  # has no pyproject.toml
    monkeypatch.setattr(lock, "LOCK", tmp_path / lock.LOCK.name)
    monkeypatch.setattr(sys, "argv", ["lock.py"])
    before = lock.LOCK.read_bytes()
    assert lock.main() == 2
    assert lock.LOCK.read_bytes() == before


def test_pythons_are_those_of_the_lock() -> None:
    minors = [int(machine["python_version"][2:]) for machine in MACHINES]
    least, most = f"3.{min(minors)}", f"3.{max(minors)}"
    assert f"Python {least} to {most}" in (ROOT / "README.md").read_text("utf-8")
    assert f'requires-python = ">={least}"' in PYPROJECT
    found = re.findall(r"\((\d+), (\d+)\)", MAKEFILE.split("FITS")[1].splitlines()[0])
    assert [".".join(one) for one in found] == [least, most]


def project_with(folder: Path, python: str) -> Path:
    """Copy what the environment is made from, with a Python in it that says what it is asked."""
    for name in ("Makefile", "requirements.txt", "requirements-torch.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    own = folder / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text(python, encoding="utf-8")
    own.chmod(0o755)
    return own


@pytest.mark.parametrize("kind", ["without pip", "gone"])
def test_broken_environment_is_made_again(kind: str, tmp_path: Path) -> None:
    """Also where everything seemed to be ready."""
    own = project_with(tmp_path, "#!/bin/sh\nexit 1\n")
    if kind == "gone":  # the Python that it was made with
        own.unlink()
        own.symlink_to(tmp_path / "nowhere")
        (tmp_path / ".venv" / ".ready").touch()
    fresh = tmp_path / "fresh"
    fresh.write_text('#!/bin/sh\necho "$*" | cut -c1-20 >> log\n', encoding="utf-8")
    fresh.chmod(0o755)
    subprocess.run(["make", f"PYTHON={fresh}", ".venv/.ready"], cwd=tmp_path, capture_output=True)
    assert (tmp_path / "log").read_text("utf-8").splitlines()[-1] == "-m venv --clear .ven"


def test_python_without_wheels_is_refused_in_a_line(tmp_path: Path) -> None:
    project_with(tmp_path, "#!/bin/sh\nexit 1\n")
    code = "import sys; sys.version_info = (3, 15, 0); exec(sys.argv.pop())"
    old = tmp_path / "old"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n", encoding="utf-8")
    old.chmod(0o755)
    done = subprocess.run(
        ["make", f"PYTHON={old}", ".venv/.ready"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "This Python is 3.15, and 3.10 to 3.14 would do: make PYTHON=" in done.stderr


SCRIPT = '#!/bin/sh\necho "{name} $*" >> log\nexit {status}\n'


@pytest.mark.parametrize("status", [0, 2, None], ids=["uv", "uv fails", "no uv"])
def test_environment_is_made_from_the_lock(status: int | None, tmp_path: Path) -> None:
    """By uv or else by pip, by hashes where there are some; nothing that the lock does not name."""
    for name in ("Makefile", "requirements.txt", "requirements-torch.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, code in (("python", 0), ("uv", status)):
        if code is not None:
            path = tmp_path / ".venv" / "bin" / name
            path.write_text(SCRIPT.format(name=name, status=code), encoding="utf-8")
            path.chmod(0o755)
    subprocess.run(["make", ".venv/.ready"], cwd=tmp_path, check=True, capture_output=True)
    log = (tmp_path / "log").read_text("utf-8")
    locked = "--require-hashes --no-deps -r requirements.txt"
    this = "--no-deps --no-build-isolation -e ."
    by_uv, by_pip = status is not None, status != 0  # pip where uv fails, or is missing
    assert re.findall(r"install (?:--python \S+ )?(.+)", log) == [
        "--require-hashes --no-deps -r .venv/uv.txt",
        *([locked] if by_uv else []),
        *([f"--no-compile {locked}"] if by_pip else []),
        "--no-compile -r requirements-torch.txt",
        *([this] if by_uv else []),
        *([this] if by_pip else []),
    ]
    checked = [
        line.split()[0] for line in log.splitlines() if " check" in line.split("--python")[0]
    ]
    assert checked == ["uv"] * by_uv + ["python"] * by_pip
    own = (tmp_path / ".venv" / "uv.txt").read_text("utf-8")
    assert re.findall(r"(?m)^[a-z].*?==", own) == ["uv=="]
    assert own in lock.LOCK.read_text("utf-8")
    assert own.count("--hash") > 1
