"""``plot`` draws the log of a run."""

import io
from dataclasses import asdict

from annotated_transformer.cli.options import Plot
from annotated_transformer.cli.output import check_target, log
from annotated_transformer.data.files import write_atomically
from annotated_transformer.engine.checkpointer import read_state
from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.journal import read_journal
from annotated_transformer.engine.log_figure import log_figure


def run(command: Plot) -> int:
    """Plot what the run has logged so far."""
    if not command.model.is_dir():
        what = "is a file" if command.model.exists() else "no such folder"
        raise UsageError(f"{command.model}: {what}; give the folder of a run")
    path = command.output or command.model / "training.svg"
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"--output {path}: must end with .svg, .png or .pdf")
    check_target("--output", path)
    try:
        journal = read_journal(command.model / "log.jsonl")
    except FileNotFoundError:
        raise UsageError(f"{command.model}: log.jsonl is missing; give a run's folder") from None
    except ValueError as error:
        raise UsageError(f"{error}; repair the line, or move the file") from None
    if not journal:
        raise UsageError(f"{command.model}: log.jsonl has no whole line yet; wait for the first")
    state = read_state(command.model)
    curve = [] if state is None else [asdict(point) for point in state.curve]
    picture = io.BytesIO()
    log_figure(journal, curve, command.model).savefig(picture, format=path.suffix[1:])
    write_atomically(path, picture.getvalue())
    log(f"wrote {path}")
    return 0
