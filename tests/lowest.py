"""Run a fast part of the tests with the lowest versions that ``pyproject.toml`` names.

``make lowest`` makes an environment of its own in ``_build/lowest``, installs exactly those
versions there, imports every module of the package and runs the tests. It takes long where pip has
to fetch PyTorch, so ``make test`` does not do it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Collection, Sequence
from pathlib import Path

import tomli
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / "_build" / "lowest"
# What touches the libraries most: kernels and processes, figures, tokenizers, files, options.
TESTS = """
    model/test_transformer.py training/test_distributed.py training/test_loop.py
    fast/test_model.py fast/test_loss.py translation/test_tokenizers.py
    translation/test_evaluation.py engine/test_checkpoints.py engine/test_config.py
    engine/test_log_figure.py data/test_downloads.py data/test_shards.py data/test_text.py
    cli/test_lazy.py cli/test_main.py cli/test_plot.py test_article.py test_article_torchtext.py
    test_figures.py
"""
APART = ("huggingface",)  # transformers asks for newer tokenizers than the package does
IMPORT = """
import importlib, pkgutil, annotated_transformer as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


class BoundError(Exception):
    """A requirement has no lower bound; the message names it."""


def requirements(text: str, *, apart: Collection[str] = ()) -> list[Requirement]:
    """Return all requirements of a ``pyproject.toml``: of the build, the package, its extras.

    Args:
        text: The file's text.
        apart: Extras to leave out.
    """
    table = tomli.loads(text)
    project = table["project"]
    groups = [table["build-system"]["requires"], project["dependencies"]]
    extras = project["optional-dependencies"]
    groups += [lines for name, lines in extras.items() if name not in apart]
    return [Requirement(line) for group in groups for line in group]


def lowest(requirement: Requirement) -> str:
    """Return the lowest version that a requirement allows.

    Raises:
        BoundError: The requirement has no lower bound, or more than one.
    """
    bounds = [one.version for one in requirement.specifier if one.operator in (">=", "==")]
    if len(bounds) != 1:
        raise BoundError(f"{requirement}: needs one lower bound")
    return bounds[0]


def pins(text: str) -> list[str]:
    """Return the pins of the lowest versions.

    Raises:
        BoundError: A requirement has no lower bound, or two groups name different ones.
    """
    found: dict[str, str] = {}
    for one in requirements(text, apart=APART):
        if found.setdefault(one.name, version := lowest(one)) != version:
            raise BoundError(f"{one.name}: bounds {found[one.name]} and {version}")
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def main() -> int:
    """Make the environment, import every module, run the tests; return the status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="use the environment of the last run")
    parser.add_argument("--workers", default="1", help="processes that run the tests")
    options = parser.parse_args()
    python = ENVIRONMENT / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps: dict[str, Sequence[str]] = {}
    if options.keep and not python.exists():
        parser.error(f"--keep: no environment in {ENVIRONMENT}; run without it first")
    if not options.keep:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        venv.create(ENVIRONMENT, with_pip=True)
        steps["install"] = [*pip, *pins((ROOT / "pyproject.toml").read_text("utf-8"))]
        steps["install the package"] = [*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)]
    tests = [str(ROOT / "tests" / name) for name in TESTS.split()]
    steps["import every module"] = [str(python), "-c", IMPORT]
    pytest = [str(python), "-m", "pytest", "-q", "-n", options.workers]
    steps["test"] = [*pytest, "-o", "filterwarnings=default", *tests]
    environ = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    for name, command in steps.items():
        print(f"lowest versions: {name}", flush=True)
        if subprocess.run(command, cwd=ROOT, env=environ | {"OMP_NUM_THREADS": "1"}).returncode:
            print(f"The lowest versions fail: {name}", file=sys.stderr)
            return 1
    print("All checks passed with the lowest versions.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
