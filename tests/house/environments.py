"""Fresh environments without a network: they get what is installed here, package by package."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from functools import cache
from importlib.metadata import Distribution, distribution
from pathlib import Path

from house import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

lookup = cache(distribution)  # its lists of files are long, and read once


def closure(wanted: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed packages that some requirements name, and all that these need."""
    found: dict[str, Distribution] = {}
    todo, seen = [Requirement(one) for one in wanted], set()
    while todo:
        one = todo.pop()
        if str(one) in seen:
            continue
        seen.add(str(one))
        package = found.setdefault(canonicalize_name(one.name), lookup(one.name))
        for line in package.requires or []:
            need = Requirement(line)
            extras = one.extras or {""}
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras):
                todo.append(need)
    return found


@cache
def files(package: Distribution) -> list[str]:
    """Return the files of a package that lie where it is imported from."""
    assert package.files is not None, f"{package.name} has no list of its files"
    names = map(str, package.files)
    return [n for n in names if not n.startswith("../") and not n.endswith(".pyc")]


def make(folder: Path, packages: Iterable[Distribution]) -> Path:
    """Make an environment that has these packages alone; return its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    shipped = folder / "shipped"
    shipped.mkdir()
    for package in packages:
        for name in {file.split("/")[0] for file in files(package)}:
            if not (shipped / name).exists():
                (shipped / name).symlink_to(Path(str(package.locate_file(name))).resolve())
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shipped.pth").write_text(f"{shipped}\n")
    return python


def pack(package: Distribution, folder: Path) -> None:
    """Write an installed package as a wheel, as pip got it."""
    metadata = next(name for name in files(package) if name.endswith(".dist-info/WHEEL"))
    info = metadata.split("/")[0]
    lines = (package.read_text("WHEEL") or "").splitlines()
    tags = [line.removeprefix("Tag: ").split("-") for line in lines if line.startswith("Tag: ")]
    tag = "-".join(".".join(sorted(set(part))) for part in zip(*tags, strict=True))
    stem = info.removesuffix(".dist-info")
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as wheel:
        for name in files(package):
            if Path(name).name not in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
                wheel.write(str(package.locate_file(name)), name)
        names = [*wheel.namelist(), f"{info}/RECORD"]
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))


def offline(wheels: Path) -> dict[str, str]:
    """Return the variables with which pip installs from a folder of wheels and nothing else."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    pip = {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(wheels)}
    pip |= {"NO_COMPILE": "1", "NO_CACHE_DIR": "1", "DISABLE_PIP_VERSION_CHECK": "1"}
    pip |= {"NO_WARN_CONFLICTS": "1"}  # that only warns, and reads the metadata of all packages
    return own | {f"PIP_{name}": value for name, value in pip.items()}


def copy_project(folder: Path) -> Path:
    """Copy the project's own files: those that git tracks, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return folder


BUILD = "from setuptools.build_meta import {0} as build; print(build({1!r}))"


def build(project: Path, folder: Path, kind: str = "build_wheel") -> Path:
    """Build the wheel of a project, or its ``build_sdist``, with what is installed here."""
    program = BUILD.format(kind, str(folder))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def install(folder: Path, wheel: Path, *needs: str) -> Path:
    """Make an environment with the wheel and what is needed, and nothing else."""
    packages = closure([*needs, "pip"])
    packages.pop("annotated-transformer", None)
    python = make(folder, packages.values())
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run([str(python), *pip], env=offline(folder), check=True)
    return python


def content(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
