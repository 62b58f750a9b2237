"""``translate`` translates a file or the standard input line by line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from annotated_transformer.cli.options import Parse, Translate
from annotated_transformer.cli.output import STANDARD, check_target, log, write_output
from annotated_transformer.cli.systems import beam_and_alpha, open_pretrained, open_system
from annotated_transformer.data.files import CorpusError, write_atomically
from annotated_transformer.data.text import read_lines
from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.system import translate_lines
from annotated_transformer.engine.treebanks import is_parser
from annotated_transformer.pretrained import FOLDER, Pretrained

BY = (
    "the small model that comes with the package; it knows only the words of the book's grammar; "
    "to use another system, give its folder"
)
MOST_TOLD = 5  # reported lines with unknown words, and words per line


def run(command: Translate) -> int:
    """Translate the input, and write the output when all of it is done."""
    folder, source = places(command)
    own = FOLDER.iterdir() if folder is None else files_of(folder)
    check_target("--output", command.output, source, *own)
    printed, search = command.output == STANDARD, command.search
    pretrained, by = None, BY
    if folder is None:
        system, pretrained = open_pretrained(search)
    else:
        system, weights = open_system(folder, search)
        by = str(folder / weights)
        if is_parser(system.languages):
            raise UsageError(f"{folder}: is a parser; use the command parse")
    lines, name = read_text(source, "" if folder else ", in German or English")
    terminal = sys.stderr is not None and sys.stderr.isatty()
    bar = not command.quiet and (terminal or not printed)
    beam, alpha = beam_and_alpha(search, system)
    found = translate_lines(system, lines, beam=beam, alpha=alpha, name=name, progress=bar)
    text = "".join(f"{line}\n" for line in found)
    if printed:
        write_output(text)
    else:
        write_atomically(command.output, text.encode())
    if not command.quiet:
        if pretrained is not None:
            warn_of_words(pretrained, lines, name)
        log(f"translated {len(lines)} line{'s' * (len(lines) != 1)} by {by}")
    return 0


def files_of(folder: Path) -> Iterator[Path]:
    """Yield files that may belong to a system, which the output must not overwrite."""
    return (path for kind in ("json", "safetensors") for path in folder.glob(f"*.{kind}"))


def places(command: Translate | Parse) -> tuple[Path | None, Path]:
    """Return the folder of the system, if given, and the text.

    A single argument that is a file is the text, because a system is a folder.
    """
    path = command.model
    if path is not None and command.input == STANDARD and path.exists() and not path.is_dir():
        return None, path
    return path, command.input


def warn_of_words(pretrained: Pretrained, lines: Sequence[str], name: str) -> None:
    """Report the words of a text that the package's model has never seen."""
    found = {number: pretrained.unknown(line) for number, line in enumerate(lines, 1)}
    told = [(number, words) for number, words in found.items() if words]
    for number, words in told[:MOST_TOLD]:
        log(f"{name}, line {number}: the model does not know {', '.join(words[:MOST_TOLD])}")
    if more := len(told[MOST_TOLD:]):
        log(f"{name}: {more} more lines have words that the model does not know")


def read_text(path: Path, languages: str = "") -> tuple[list[str], str]:
    """Read strict UTF-8 lines from a file or the standard input; also return its name."""
    if path != STANDARD:
        return read_lines(path), str(path)
    if sys.stdin is None:
        raise CorpusError("standard input: is closed; name a file")
    if sys.stdin.isatty():
        log(f"enter one sentence per line{languages}; Ctrl-D ends")
    return read_lines(sys.stdin.buffer, name="standard input"), "standard input"
