"""``translate``: a file, or what comes in, line by line."""

from __future__ import annotations

import sys
from pathlib import Path

from annotated_transformer.cli.options import Translate
from annotated_transformer.cli.output import STANDARD, check_target, log, write_output
from annotated_transformer.cli.systems import open_system
from annotated_transformer.data.files import CorpusError, write_atomically
from annotated_transformer.data.text import read_lines
from annotated_transformer.engine.system import translate_lines


def run(command: Translate) -> int:
    """Translate, and write the whole of it."""
    check_target("--output", command.output, command.input)
    printed = command.output == STANDARD
    system = open_system(command.model, command.search)
    lines, name = read_text(command.input)
    terminal = sys.stderr is not None and sys.stderr.isatty()
    found = translate_lines(
        system,
        lines,
        beam=command.search.beam,
        alpha=command.search.alpha,
        name=name,
        progress=not command.quiet and (terminal or not printed),
    )
    text = "".join(f"{line}\n" for line in found)
    if printed:
        write_output(text)
    else:
        write_atomically(command.output, text.encode())
    return 0


def read_text(path: Path) -> tuple[list[str], str]:
    """Read lines from a file or the standard input, strictly UTF-8; also say its name."""
    if path != STANDARD:
        return read_lines(path), str(path)
    if sys.stdin is None:
        raise CorpusError("standard input: is closed; name a file")
    if sys.stdin.isatty():
        log("one sentence a line, please; Ctrl-D ends")
    return read_lines(sys.stdin.buffer, name="standard input"), "standard input"
