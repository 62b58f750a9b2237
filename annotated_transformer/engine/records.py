"""The record that makes a result traceable: the run, versions, commit and processor."""

import contextlib
import os
import platform
import re
import subprocess
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from annotated_transformer import __version__
from annotated_transformer.engine.state import TrainState
from annotated_transformer.engine.system import System, architecture_name
from annotated_transformer.model.transformer import count_parameters

CHOSEN = "beam 5, alpha by validation, averaged"  # the search that an ablation selects itself


def make_record(
    system: System,
    state: TrainState,
    scores: dict[str, Any],
    command: str,
    *,
    pairs: int,
    processes: int = 1,
) -> dict[str, Any]:
    """Return the record of a run: command, options, environment, curve and scores."""
    return {
        **origin(command, state.commit),
        "seed": system.training["options"]["seed"],
        "corpus": {"checksums": system.training["checksums"], "pairs": pairs},
        "options": system.training["options"],
        "architecture": architecture_name(system.config),
        "model": asdict(system.config),
        "parameters": count_parameters(system.model),
        "hardware": {**hardware(system), "processes": processes},
        "updates": state.updates,
        "tokens": state.tokens,
        "flops": state.flops or None,
        "seconds": round(state.seconds, 1),
        "curve": [asdict(point) for point in state.curve],
        "scores": scores,
    }


def origin(command: str, commit: str | None = None) -> dict[str, Any]:
    """Return where a record comes from: command, commit (by default this one), date, versions."""
    return {
        "command": command,
        "commit": commit or source_commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {
            "annotated_transformer": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "sacrebleu": version("sacrebleu"),
            "sacremoses": version("sacremoses"),
        },
    }


def source_commit() -> str:
    """Return the commit of the package's source (``-dirty`` if modified), or ``unknown``."""
    if not (Path(__file__).parents[2] / ".git").exists():
        return "unknown"  # installed, perhaps inside the repository of somebody else
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def hardware(system: System) -> dict[str, Any]:
    """Return the processor, the number of threads, and the GPU, if the system is on one."""
    device = next(system.model.parameters()).device
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    return {"processor": processor_name(), "threads": torch.get_num_threads(), "gpu": gpu}


def processor_name() -> str:
    """Return the processor's name and the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        name = re.findall(r"^model name\s*: *(.*?) *$", text, re.MULTILINE)[0]
    count = usable_cores()
    return f"{name}, {count} core{'s' if count != 1 else ''}"


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
