"""The command ``annotated-transformer``: errors in one line, and a status."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from annotated_transformer.cli.output import drop_output, print_error

PLOTS = {"altair", "matplotlib", "pandas", "seaborn", "vl_convert"}  # of the extra "plots"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after the command's name; those of this process unless given.

    Returns:
        The status, which is 0, or 2 after an error, 130 or 143 where it was interrupted.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print_error(message)
            status = run(words)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # nobody reads on
        drop_output()
        return 0
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
    except Exception as error:
        if (message := describe(error)) is None:
            raise
        print_error(message)
        if isinstance(error, OSError):
            drop_output()
        return 2


def run(words: Sequence[str]) -> int:
    """Read the options, then load what they need, and do the work."""
    try:
        from annotated_transformer.cli.parsing import parse  # tyro may be missing

        command = parse(words)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries say while they are loaded
            module = import_module(f"annotated_transformer.cli.{type(command).__name__.lower()}")
        return int(module.run(command))
    except SystemExit as end:  # after --help, or where the main process has failed
        return int(end.code or 0)


def describe(error: Exception) -> str | None:
    """Return the one line that a user needs; None for what can only be a mistake of ours."""
    kind = type(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name.split(".")[0]
        if missing == "annotated_transformer":
            return None
        extra = "plots" if missing in PLOTS else "translation"
        return f'needs {missing}: pip install "annotated-transformer[{extra}]"'
    ours = kind.__module__.startswith("annotated_transformer.")
    if isinstance(error, FloatingPointError) or (isinstance(error, ValueError) and ours):
        return str(error)
    if isinstance(error, MemoryError) or kind.__name__ == "OutOfMemoryError":
        return "out of memory; lower --max-tokens, --beam or the size of the model"
    if isinstance(error, OSError):
        return f"{error.filename or 'output'}: {error.strerror or error}"
    return None
