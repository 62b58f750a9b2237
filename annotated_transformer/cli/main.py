"""The command ``annotated-transformer``, with one-line errors and an exit status.

Everything else is imported after signals are handled, so that Ctrl-C never shows a traceback.
"""

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from importlib import import_module
from io import FileIO, TextIOWrapper
from types import FrameType
from typing import Any

from annotated_transformer.engine.interruption import handle_signals

EXTRAS = {  # which extra brings a library; "translation" the others
    **dict.fromkeys(("altair", "matplotlib", "pandas", "seaborn", "vl_convert"), "plots"),
    **dict.fromkeys(("onnx", "onnxruntime"), "onnx"),
    **dict.fromkeys(("anyio", "starlette", "uvicorn"), "serve"),
    "ctranslate2": "ctranslate2",
    "transformers": "huggingface",
}
AGAIN = (["prepare"], ["sweep"])  # commands that resume where they were interrupted
NO_MEMORY = "can't allocate memory", "not enough memory", "out of memory", "can't start new thread"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after the command's name; those of this process by default.

    Returns:
        Exit status 0; 2 after an error; 1 if ``diagnose --strict`` finds something; 130, 143 or
        129 if interrupted by Ctrl-C, termination or the end of the terminal.
    """
    words = sys.argv[1:] if arguments is None else arguments
    occupy_streams()
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise_interrupt(number, frame)

    with redirect_stderr(lossy_errors()), handle_signals(note):
        try:
            return run(words)
        except KeyboardInterrupt as end:
            return report_interruption(words, int(end.args[0] if end.args else signal.SIGINT))
        except BrokenPipeError:  # the reader has stopped
            return 0
        except Exception as error:
            if received:  # a library in compiled code made an error of the interruption
                return report_interruption(words, received[0])
            if (message := error_message(error)) is None:
                raise
            alike = isinstance(error, FloatingPointError) or type(error).__name__ == "UsageError"
            if not (alike and is_worker_rank()):
                report(message)
            return 2


def report_interruption(words: Sequence[str], number: int) -> int:
    """Say that a signal has ended the command, and return the exit status."""
    if not is_worker_rank():
        again = "; run the same command to resume" if words[:1] in AGAIN else ""
        report(f"interrupted{again}")
    return 128 + number


def occupy_streams() -> None:
    """Keep other files from getting the descriptor of a closed standard stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


class LossyFile(FileIO):
    """A file that drops what cannot be written, as for a log whose reader has gone."""

    def write(self, data: Any) -> int:
        """Write or drop the data; return the bytes that are done with."""
        with suppress(OSError):
            return super().write(data)
        return len(data)


def lossy_errors() -> Any:
    """Return standard error such that progress that nobody can read does not end the work."""
    own = sys.__stderr__
    if own is None or own is not sys.stderr:  # closed, or of a notebook
        return sys.stderr
    raw = LossyFile(2, "w", closefd=False)
    return TextIOWrapper(raw, own.encoding, own.errors, write_through=True)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt on a signal: at once, or as ``copyreg`` returns."""
    while frame is not None and frame.f_globals.get("__name__") != "copyreg":
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt(number)

    def leave(left: FrameType, event: str, _: object) -> None:
        if left is frame and event == "return":
            sys.setprofile(None)
            raise KeyboardInterrupt(number)

    sys.setprofile(leave)  # Python's own copyreg ignores whatever is raised before it returns


def is_worker_rank() -> bool:
    """Whether this is a torchrun process other than the first, which reports for all."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def report(message: object) -> None:
    """Print an error or warning after the command's name."""
    from annotated_transformer.cli.output import print_error

    print_error(message)


def run(words: Sequence[str]) -> int:
    """Parse the options, import what the command needs, and run it."""
    from annotated_transformer.cli.output import drop_output

    try:
        from annotated_transformer.cli.arguments import parse_command_line  # tyro may be missing

        command = parse_command_line(words)
        if sys.stderr is None or not sys.stderr.isatty():  # a log, which a bar would fill
            os.environ.setdefault("TQDM_MININTERVAL", "10")  # seconds
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of libraries on import
            module = import_module(f"annotated_transformer.cli.{type(command).__name__.lower()}")
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: report(message)
            return int(module.run(command))
    except SystemExit as end:  # after --help, or when the main process has failed
        return int(end.code or 0)
    except OSError:
        drop_output()
        raise


def error_message(error: Exception) -> str | None:
    """Return a one-line message for the user; None for an error that must be a bug."""
    kind = type(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name.split(".")[0]
        extra = EXTRAS.get(missing, "translation")
        told = f'needs {missing}: pip install ".[{extra}]" in the project folder'
        return None if missing == "annotated_transformer" else told
    if isinstance(error, ImportError):
        return f"a library cannot be loaded: {error}; check this process's limits, or reinstall it"
    ours = kind.__module__.startswith("annotated_transformer.")
    known = isinstance(error, FloatingPointError) or kind.__name__ == "DistNetworkError"  # a port
    if known or (isinstance(error, ValueError) and ours):
        return str(error)
    full = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    if full or isinstance(error, MemoryError):
        return "out of memory; reduce --max-tokens, --beam or the size of the model"
    if isinstance(error, OSError):
        place = error.filename or "an output"
        return f"{place}: {error.strerror or error}; check the path, permissions and disk space"
    return None
