"""``export`` writes a system as CTranslate2, Hugging Face's transformers or ONNX read it."""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from annotated_transformer.cli.options import Export, Search
from annotated_transformer.cli.output import log
from annotated_transformer.cli.systems import PACKAGED, open_pretrained, open_system, refuse_parser
from annotated_transformer.engine.checkpoints import damaged_error, load_run_object
from annotated_transformer.engine.config import UsageError
from annotated_transformer.interop.folders import check_out, lines_of_record

NEEDS = {  # what writes, and what then reads
    "ctranslate2": ("ctranslate2",),
    "huggingface": ("transformers",),
    "onnx": ("onnx", "onnxruntime"),
}


def run(command: Export) -> int:
    """Write the export, all of it or nothing."""
    folder, out = command.model, command.out
    if out is None:  # a single argument is the new folder
        folder, out = None, folder
    if out is None:
        raise UsageError("no folder for the export; name a new one")
    if folder is None and (out / "log.jsonl").exists():
        raise UsageError(f"{out}: is a run; name a new folder after it")
    check_out(out)
    for library in NEEDS[command.to]:  # a missing one is named before the work
        if find_spec(library) is None:
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)
    search = Search(device="cpu")
    if folder is None:
        system, by, record = open_pretrained(search)[0], PACKAGED, None
    else:
        system, used = open_system(folder, search)
        by, record = str(folder / used), load_record(folder, used)
    refuse_parser(system, folder)
    module = import_module(f"annotated_transformer.interop.{command.to}")
    options = {"precision": command.precision} if command.to == "ctranslate2" else {}
    write = getattr(module, f"export_{command.to}")
    write(system, out, record=record, **options)
    log(f"wrote {out}; {out / 'README.md'} says how to use {by} there")
    return 0


def load_record(folder: Path, weights: str) -> dict[str, Any] | None:
    """Return the record of a run, for these weights; None where it has not written one."""
    path = folder / "record.json"
    if not os.path.lexists(path):
        return None
    record = {**load_run_object(path), "weights": weights}
    try:
        list(lines_of_record(record))
    except (AttributeError, TypeError, ValueError) as error:
        raise damaged_error(path, error) from None
    return record
