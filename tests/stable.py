"""The names that users may rely on in 0.x, with their positional parameters, as JSON.

``python tests/stable.py`` adds new ones to ``tests/stable.json`` when a version is released. A name
goes from there one minor version after it began to raise a DeprecationWarning.
"""

import inspect
import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
MODULES = ("annotated_transformer", "annotated_transformer.article")
Names = dict[str, list[str] | None]  # None for what is not called


def positional(thing: object) -> list[str] | None:
    """Return the names of positional parameters, with ``=`` after those that may be left out."""
    if not callable(thing):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        name + "=" * (one.default is not one.empty)
        for name, one in inspect.signature(thing).parameters.items()
        if one.kind in kinds
    ]


def present() -> dict[str, Names]:
    """Return the public names of each module that is stable."""
    found: dict[str, Names] = {}
    for module in MODULES:
        home = import_module(module)
        found[module] = {name: positional(getattr(home, name)) for name in sorted(home.__all__)}
    return found


def broken(promised: Mapping[str, Names], now: Mapping[str, Names]) -> list[str]:
    """Return what was promised and is no longer so: calls that worked would fail."""
    faults = []
    for module, names in promised.items():
        for name, parameters in names.items():
            if name not in now.get(module, {}):
                faults.append(f"{module}.{name} is gone")
                continue
            new = now[module][name]
            if parameters is None or new is None:
                same = parameters == new
            else:  # one may become optional, and more that are optional may follow
                old, kept = parameters, new[: len(parameters)]
                same = [one.rstrip("=") for one in old] == [one.rstrip("=") for one in kept]
                same &= all(b.endswith("=") for a, b in zip(old, kept, strict=False) if "=" in a)
                same &= all(one.endswith("=") for one in new[len(old) :])
            if not same:
                faults.append(f"{module}.{name} takes {new}, not {parameters}")
    return faults


def main() -> int:
    """Write the names of this version; refuse to break a promise."""
    now = present()
    if FILE.exists() and (faults := broken(json.loads(FILE.read_text("utf-8")), now)):
        print(*faults, sep="\n", file=sys.stderr)
        return 1
    FILE.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
