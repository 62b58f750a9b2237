"""The origin of a benchmark's results, and the writing of its record."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from annotated_transformer.data.files import write_json
from annotated_transformer.engine import records


def origin(module: str) -> dict[str, Any]:
    """Return the running command, the commit, the date and the versions of libraries."""
    return records.origin(shlex.join(["python", "-m", module, *sys.argv[1:]]))


def keep(record: dict[str, Any], path: Path) -> None:
    """Write a record atomically."""
    write_json(path, record)


def kept_runs(
    parser: argparse.ArgumentParser, path: Path | None, updates: object
) -> dict[str, Any]:
    """Return the runs, by seed, of a record that goes on; stop if they had other updates."""
    if path is None or not path.exists():
        return {}
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["updates"] != updates:
        parser.error(f"--record {path}: has {kept['updates']} updates; name another")
    runs: dict[str, Any] = kept["runs"]
    return runs
