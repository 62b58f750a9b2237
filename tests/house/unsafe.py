"""What could run code that a file brings along; the package has none of it."""

from __future__ import annotations

import ast
from pathlib import Path

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
NAMES = {"eval", "exec", "compile", "__import__"}  # bare, or of the module builtins
ATTRIBUTES = {  # the last names of what is called
    "os.system", "os.popen", "torch.hub.load", "hub.load", "jit.load", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load",
}  # fmt: skip
OBJECTS = "_object"  # torch.distributed's collectives of objects are pickles
ARGUMENTS = {"allow_pickle", "shell", "trust_remote_code"}


def _call(node: ast.Call) -> bool:
    """Whether a call may run something."""
    name = ast.unparse(node.func)
    parts = name.split(".")
    given = {one.arg: one.value for one in node.keywords}
    if name in NAMES or (parts[0] == "builtins" and parts[-1] in NAMES):
        return True
    if parts[-2:] == ["torch", "load"] and parts[0] != "safetensors":
        safe = given.get("weights_only")
        return not (isinstance(safe, ast.Constant) and safe.value is True)
    if any(name in (one, f"torch.{one}") for one in ATTRIBUTES):
        return True
    if parts[-1].endswith(OBJECTS) or f"{OBJECTS}_list" in parts[-1]:
        return parts[-1].startswith(("all_", "broadcast", "gather", "scatter", "send", "recv"))
    values = [given[name] for name in ARGUMENTS & {one for one in given if one}]
    return any(not (isinstance(one, ast.Constant) and one.value is False) for one in values)


def calls(path: Path) -> list[str]:
    """Return the lines of a module that import or call what may run what it is given."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            continue
        if isinstance(node, ast.Import):
            bad = any(alias.name.split(".")[0] in MODULES for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            taken = {alias.name for alias in node.names}
            bad = (node.module or "").split(".")[0] in MODULES
            bad |= node.module == "torch" and "load" in taken
        else:
            bad = _call(node)
        if bad:
            found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    return found
