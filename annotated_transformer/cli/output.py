"""The output of the commands: messages, results and files."""

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from annotated_transformer.data.files import FileError, write_atomically
from annotated_transformer.engine.config import UsageError

NAME = "annotated-transformer"
LONGEST = 500  # characters of an error
STANDARD = Path("-")  # the standard input or output


def has_bar(quiet: bool, output: Path) -> bool:
    """Whether a command draws its progress: not between the lines of a pipe that it writes to."""
    return not quiet and (output != STANDARD or (sys.stderr is not None and sys.stderr.isatty()))


def log(text: str) -> None:
    """Print a message to standard error, which drops what cannot be written."""
    if sys.stderr is not None:  # closed by the parent process
        print(text, file=sys.stderr, flush=True)


def escape_text(text: str) -> str:
    """Return a text with codes for what would not print, such as tabs and line breaks."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def print_error(text: object) -> None:
    """Print an error in one line, after the command's name."""
    line = escape_text(str(text))
    log(f"{NAME}: {line if len(line) <= LONGEST else f'{line[:300]} … {line[-200:]}'}")


def print_result(text: str) -> None:
    """Print one or more lines to standard output."""
    write_output(f"{text}\n")


def write_output(text: str) -> None:
    """Write a whole text to standard output, as UTF-8 whatever the locale.

    Raises:
        FileError: It cannot be written; later output is dropped.
        BrokenPipeError: The reader has stopped.
    """
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        sys.stdout.flush()
        stream = getattr(sys.stdout, "buffer", None)
        if stream is None:  # in a notebook it takes only text
            sys.stdout.write(text)
            return
        data = memoryview(text.encode("utf-8", "surrogateescape"))
        while data:  # if unbuffered, a write may be partial, e.g. on a full disk
            data = data[stream.write(data) or 0 :]
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        reason = f"cannot be written: {error.strerror or error}; redirect it elsewhere"
        raise FileError(f"standard output: {reason}") from None


def write_document(text: str, output: Path) -> None:
    """Write a whole text to a file, or to standard output for ``-``."""
    if output == STANDARD:
        write_output(text)
    else:
        write_atomically(output, text.encode())


def drop_output() -> None:
    """Discard further output, so that Python does not complain at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_target(option: str, path: Path | None, *sources: Path) -> None:
    """Check before the work that an output file can be written and is not one of the inputs.

    Raises:
        UsageError: It is not; the message names the option.
        OSError: The path is invalid.
    """
    if path is None or path == STANDARD:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; name a file")
    if os.path.islink(os.path.realpath(path)):
        raise UsageError(f"{option} {path}: is a link to itself; name another file")
    for source in sources:
        if path.exists() and source.exists() and path.samefile(source):
            raise UsageError(f"{option} {path}: is also the input; name another file")
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if not place.is_dir():
        raise UsageError(f"{option} {path}: {place} is a file; choose a folder")
    if not os.access(path if path.exists() and not path.is_file() else place, os.W_OK):
        raise UsageError(f"{option} {path}: {place} is not writable; choose another folder")


def show_scores(scores: Mapping[str, Any], title: str) -> None:
    """Print scores with their signatures."""
    count = scores["sentences"]
    print_result(
        f"{title}, {count} sentence{'s' * (count != 1)}\n"
        f"  {scores['bleu_detail']}\n    {scores['bleu_signature']}\n"
        f"  chrF2 = {scores['chrf']}\n    {scores['chrf_signature']}"
    )


def show_tree_scores(scores: Mapping[str, Any], title: str) -> None:
    """Print a parser's scores, decoding freely and by constraint."""
    count = scores["free"]["sentences"]
    print_result(f"{title}, {count} sentence{'s' * (count != 1)}")
    for name, found in scores.items():
        print_result(
            f"  {name}: F1 = {found['f1']:.2f} ({found['low']:.2f} to {found['high']:.2f}), "
            f"precision {found['precision']:.2f}, recall {found['recall']:.2f}, "
            f"exact {found['exact']:.2f}, well-formed {found['well_formed']:.2f}, "
            f"tags {found['tags']:.2f}"
        )


def command_line() -> str:
    """Return the command line of this process."""
    return shlex.join([NAME, *sys.argv[1:]])
