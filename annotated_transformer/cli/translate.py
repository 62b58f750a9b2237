"""``translate`` translates a file or the standard input line by line."""

import contextlib
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from annotated_transformer.cli.options import Parse, Translate
from annotated_transformer.cli.output import (
    STANDARD,
    check_target,
    has_bar,
    log,
    print_error,
    write_document,
)
from annotated_transformer.cli.systems import at_most, beam_and_alpha, open_pretrained, open_systems
from annotated_transformer.data.files import CorpusError
from annotated_transformer.data.text import live_lines, read_lines
from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.system import System, Translation, n_best_lines, translate_lines
from annotated_transformer.fast.sampling import Sampling
from annotated_transformer.pretrained import FOLDER, Pretrained

BY = (
    "the small model that comes with the package; it knows only the words of the book's grammar; "
    "to use another system, give its folder"
)
MOST_TOLD = 5  # reported lines with unknown words, and words per line


def run(command: Translate) -> int:
    """Translate the input, and write the output when all of it is done, or line by line."""
    folder, source = split_arguments(command)
    folders = [] if folder is None else [folder, *command.ensemble]
    own = [path for each in folders for path in files_of(each)] or FOLDER.iterdir()
    check_target("--output", command.output, source, *own)
    if command.ensemble and folder is None:
        raise UsageError("--ensemble: needs the folder of the first system, too; give it")
    if command.interactive and (source != STANDARD or command.output != STANDARD):
        raise UsageError("--interactive: reads and answers in the terminal; leave out the file")
    draw = {each.name: getattr(command.sampling, each.name) for each in fields(Sampling)}
    sampling = Sampling(**draw) if command.sampling.sample else None
    pretrained, by = None, BY
    if folder is None:
        system, pretrained = open_pretrained(command.search)
    else:
        system, by = open_systems(folders, command.search)
    if sampling is None:
        at_most("--n-best", command.n_best, system)
    decoder = Decoder(command, system, sampling, pretrained)
    if (read := live_input(command, source)) is not None:
        count = translate_stream(command, decoder, read)
    else:
        lines, name = read_text(source, "" if folder else ", in German or English")
        bar = has_bar(command.quiet, command.output)
        text, count = decoder.decode(lines, name, progress=bar), len(lines)
        write_document(text, command.output)
        decoder.warn(lines, name)
    if not command.quiet:
        log(f"translated {count} line{'s' * (count != 1)} by {by}")
    return 0


@dataclass
class Decoder:
    """Translates lines into what is written, as the options say."""

    command: Translate
    system: System
    sampling: Sampling | None
    pretrained: Pretrained | None

    def decode(
        self, lines: Sequence[str], name: str, *, first: int = 1, progress: bool = False
    ) -> str:
        """Return the output for some lines, of which ``first`` is the number of the first."""
        count, search = self.command.n_best, self.command.search
        beam, alpha = beam_and_alpha(search, self.system)
        options: dict[str, Any] = {"name": name, "first": first, "progress": progress}
        if self.sampling is None and count is None and not self.command.scores:
            found = translate_lines(self.system, lines, beam=beam, alpha=alpha, **options)
            return "".join(f"{line}\n" for line in found)
        best, sampling = count or 1, self.sampling
        beam = beam if search.beam else max(beam, best)
        several = n_best_lines(
            self.system, lines, n_best=best, beam=beam, alpha=alpha, sampling=sampling, **options
        )
        return "".join(
            self.row(number, each)
            for number, some in enumerate(several, first)
            for each in some or [Translation("", 0.0, 0.0, [])]
        )

    def row(self, number: int, found: Translation) -> str:
        """Return a line of the output; a translation of a blank line is blank."""
        columns = [str(number)] if self.command.n_best is not None else []
        if columns or self.command.scores:
            columns += [f"{found.score:.4f}", f"{found.log_probability:.4f}"]
        return "\t".join([*columns, found.text]) + "\n"

    def warn(self, lines: Sequence[str], name: str, first: int = 1) -> None:
        """Report the words of a text that the package's model has never seen."""
        if self.pretrained is None or self.command.quiet:
            return
        found = {number: self.pretrained.unknown(line) for number, line in enumerate(lines, first)}
        told = [(number, list(dict.fromkeys(words))) for number, words in found.items() if words]
        for number, words in told[:MOST_TOLD]:
            log(f"{name}, line {number}: the model does not know {', '.join(words[:MOST_TOLD])}")
        if more := len(told[MOST_TOLD:]):
            log(f"{name}: {more} more lines have words that the model does not know")


def live_input(command: Translate, source: Path) -> Callable[[int], bytes] | None:
    """Return what reads a pipe or terminal whose lines are to be answered as they come.

    None if the input is a file, or the output is one, which appears when all is translated.
    """
    if source != STANDARD or command.output != STANDARD or sys.stdin is None:
        return None
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except (OSError, ValueError):  # a stream of Python's own
        return sys.stdin.buffer.readline if command.interactive else None
    if command.interactive or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(number):
        return partial(read_ready if os.name == "posix" else os.read, number)
    return None


def read_ready(descriptor: int, size: int) -> bytes:
    """Wait for bytes and read them; a signal that came just before the wait is handled, too."""
    while not select.select([descriptor], [], [], 1.0)[0]:
        pass  # Python handles signals here
    return os.read(descriptor, size)


def translate_stream(command: Translate, decoder: Decoder, read: Callable[[int], bytes]) -> int:
    """Translate lines as they come, and return their number.

    A batch is what has come while the last one was translated. With ``--interactive``, each line
    is a batch, after a prompt if a terminal asks, and an invalid one is reported alone.
    """
    name, count, asks = "standard input", 0, False
    if sys.stdin is not None and sys.stdin.isatty():
        languages = "" if decoder.pretrained is None else ", in German or English"
        log(f"enter one sentence per line{languages}; Ctrl-D ends")
        asks = command.interactive
    show_prompt(asks)
    for chunk in live_lines(read, name, print_error if command.interactive else None):
        for lines in [[line] for line in chunk] if command.interactive else [chunk]:
            decoder.warn(lines, name, count + 1)
            try:
                write_document(decoder.decode(lines, name, first=count + 1), command.output)
            except CorpusError as error:
                if not command.interactive:
                    raise
                print_error(error)
                write_document(decoder.decode([""], name, first=count + 1), command.output)
            count += len(lines)
        show_prompt(asks)
    if asks:
        log("")
    return count


def show_prompt(asks: bool) -> None:
    """Show that a line is expected, if a terminal asks."""
    if asks and sys.stderr is not None:
        with contextlib.suppress(OSError):
            print("> ", end="", file=sys.stderr, flush=True)


def files_of(folder: Path) -> Iterator[Path]:
    """Yield files that may belong to a system, which the output must not overwrite."""
    return (path for kind in ("json", "safetensors") for path in folder.glob(f"*.{kind}"))


def split_arguments(command: Translate | Parse) -> tuple[Path | None, Path]:
    """Return the folder of the system, if given, and the text.

    A single argument that is ``-`` or a file is the text, because a system is a folder.
    """
    path = command.model
    if path is None or command.input != STANDARD or path.is_dir():
        return path, command.input
    return (None, path) if path.exists() or path == STANDARD else (path, STANDARD)


def read_text(path: Path, languages: str = "") -> tuple[list[str], str]:
    """Read strict UTF-8 lines from a file or the standard input; also return its name."""
    if path != STANDARD:
        return read_lines(path), str(path)
    if sys.stdin is None:
        raise CorpusError("standard input: is closed; name a file")
    if sys.stdin.isatty():
        log(f"enter one sentence per line{languages}; Ctrl-D ends")
    return read_lines(sys.stdin.buffer, name="standard input"), "standard input"
