"""The first code cell of every notebook: it installs the package where that is missing.

A chapter does not hold the cell; the exporter adds it. In a notebook that was opened from a clone
it installs the package from that clone; in a published one from the repository that published it;
and in one that Colab opened from GitHub, such as a fork's, from the repository that Colab names.
"""

import inspect

TAG = "colab"
EXTRAS = "plots,translation"


def install(extras: str, repository: str) -> None:
    """Install the package, unless it can be imported.

    Args:
        extras: The package's extras that the notebooks need.
        repository: Where a published notebook finds the package, such as
            ``https://github.com/me/book@main``; else empty.

    Raises:
        RuntimeError: There is no clone around the notebook, no repository, and no word from Colab.
    """
    import importlib
    import json
    import os
    import re
    import subprocess
    import sys
    from contextlib import suppress
    from importlib.util import find_spec
    from pathlib import Path
    from urllib.parse import unquote
    from urllib.request import urlopen

    if find_spec("annotated_transformer"):
        return
    here = Path.cwd()
    project = ("pyproject.toml", "annotated_transformer/__init__.py")
    clones = (
        folder.as_uri()
        for folder in (here, *here.parents, *here.glob("*/"))
        if all((folder / name).exists() for name in project)
    )
    place = next(clones, f"git+{repository}" if repository else "")
    if not place and {"COLAB_JUPYTER_IP", "KMP_TARGET_PORT"} <= set(os.environ):
        sessions = "http://{COLAB_JUPYTER_IP}:{KMP_TARGET_PORT}/api/sessions".format(**os.environ)
        with suppress(OSError, LookupError, ValueError, TypeError):  # an answer of another kind
            with urlopen(sessions, timeout=10) as answer:
                opened = unquote(json.load(answer)[0]["path"])
            if page := re.search(r"(https://github\.com/[^/]+/[^/]+)/blob/(.+?)/book/", opened):
                place = f"git+{page[1]}@{page[2]}"
    if not place:
        raise RuntimeError(
            "annotated_transformer is not installed, and this notebook does not know where to find "
            "it: open the notebook from a clone of its repository, or install the package first"
        )
    wanted = f"annotated-transformer[{extras}] @ {place}"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", wanted], check=True)
    importlib.invalidate_caches()


def cell(repository: str = "", more: str = "") -> str:
    """Return the source of the cell: the function above, and a call of it.

    Args:
        repository: See :func:`install`.
        more: Extras that this notebook alone needs, from the key ``extras`` of its header.
    """
    extras = ",".join(filter(None, (EXTRAS, more)))
    call = f'install("{extras}", repository="{repository}")'
    return f"# @title Install the package\n{inspect.getsource(install)}\n\n{call}"
