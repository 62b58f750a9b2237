"""The origin of a benchmark's results, and the writing of its record."""

from __future__ import annotations

import json
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from annotated_transformer.data.files import write_atomically
from annotated_transformer.engine.records import package_versions, source_commit


def origin(module: str) -> dict[str, Any]:
    """Return the running command, the commit, the date and the versions of libraries."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": source_commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": package_versions(),
    }


def keep(record: dict[str, Any], path: Path) -> None:
    """Write a record atomically."""
    data = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, data.encode())
