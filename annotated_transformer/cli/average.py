"""``average`` averages the last checkpoints of a run."""

from annotated_transformer.cli.options import Average
from annotated_transformer.cli.output import log
from annotated_transformer.engine.checkpoints import AVERAGED, average_system


def run(command: Average) -> int:
    """Save the mean in the folder of the run."""
    average_system(command.model, command.last)
    log(f"wrote {command.model / AVERAGED}; translate and evaluate use it with --averaged")
    return 0
