"""Write ``requirements.txt``: every package of the environment, with the hashes of its files.

``make lock`` adds what ``pyproject.toml`` asks for and keeps every other version;
``make lock UPGRADE=--upgrade`` (or ``--upgrade-package NAME``) takes newer ones. The versions hold
for all Pythons and systems that the package supports.

PyTorch stands apart, in ``requirements-torch.txt``, and without hashes. Its index, PyTorch's own
index and a distributor's each have another build of the same version, and only the build on the
public index needs NVIDIA's libraries, which it pins itself.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.txt"
TORCH = ROOT / "requirements-torch.txt"
HEADER = f"""\
# Every package of the environment, with the hashes of its files; PyTorch is in {TORCH.name}.
# Written by `make lock` from pyproject.toml; not to be edited.
"""
APART = re.compile(r"(torch|triton|(nvidia|cuda)-[\w-]+)==")


def compiled(*options: str) -> str:
    """Return what uv resolves from ``pyproject.toml``; versions in the lock are preferred."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--all-extras"]
    command += ["--universal", "--python-version", "3.10", "--generate-hashes", "--no-annotate"]
    command += ["--no-header", "--quiet", "--constraints", TORCH.name, "--output-file", LOCK.name]
    environ = os.environ | {"UV_PYTHON_DOWNLOADS": "never"}
    subprocess.run([*command, *options], cwd=ROOT, env=environ, check=True)
    return LOCK.read_text(encoding="utf-8")


def without_torch(text: str) -> str:
    """Leave out PyTorch and what its build for NVIDIA's devices needs."""
    blocks = re.split(r"^(?=[\w-])", text, flags=re.MULTILINE)
    return "".join(block for block in blocks if not APART.match(block))


def main() -> int:
    """Renew the lock; on failure it stays as it was."""
    before = LOCK.read_text(encoding="utf-8") if LOCK.exists() else ""
    after = before
    try:
        after = HEADER + without_torch(compiled(*sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        return error.returncode
    finally:
        LOCK.write_text(after, encoding="utf-8")
    print(f"{LOCK.name} is {'as it was' if after == before else 'renewed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
