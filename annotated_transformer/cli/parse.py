"""``parse`` draws the trees of sentences, with a system trained on a treebank."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from annotated_transformer.cli import output
from annotated_transformer.cli.options import Parse
from annotated_transformer.cli.systems import beam_and_alpha, open_system
from annotated_transformer.cli.translate import files_of, read_text, split_arguments
from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.parser import Parse as Found
from annotated_transformer.engine.parser import parse_sentences, penn_words
from annotated_transformer.engine.treebanks import is_parser
from annotated_transformer.results.parsing import Tree
from annotated_transformer.tree_figures import draw_svg, draw_text

USUAL = Path("runs/treebank-en-trees-tiny")  # where train --corpus treebank leaves its system


def run(command: Parse) -> int:
    """Parse the input, and write the trees when all of them are there."""
    given, source = split_arguments(command)
    folder = USUAL if given is None else given
    if given is None and not folder.exists():
        raise UsageError(
            f"no parser is in {folder}: give the folder of one, or train it with "
            f"{output.NAME} train --corpus treebank"
        )
    if command.sentence is not None and source != output.STANDARD:
        raise UsageError(f"--sentence or {source}, not both; leave one of them out")
    output.check_target("--output", command.output, source, *files_of(folder))
    system, weights = open_system(folder, command.search)
    if not is_parser(system.languages):
        pair = " to ".join(system.languages)
        raise UsageError(
            f"{folder}: translates {pair}; to parse, give a system trained with --corpus treebank"
        )
    sentences, name = read_sentences(command, source)
    if command.format == "svg" and (count := sum(map(bool, sentences))) != 1:
        raise UsageError(f"--format svg: draws one sentence, and {name} has {count}; give one")
    beam, alpha = beam_and_alpha(command.search, system)
    found = parse_sentences(
        system, sentences, beam=beam, alpha=alpha, extra=command.extra, name=name,
        constrained=not command.free, progress=output.has_bar(command.quiet, command.output),
    )  # fmt: skip
    text = format_trees(found, command.format)
    output.write_document(text, command.output)
    if not command.quiet:
        report_repairs(found, f"{folder / weights}")
    return 0


def read_sentences(command: Parse, source: Path) -> tuple[list[list[str]], str]:
    """Return the words of each sentence, and the name of the text."""
    split = partial(penn_words, tokenized=command.tokenized)
    if command.sentence is not None:
        return [split(command.sentence)], "--sentence"
    lines, name = read_text(source, ", in English")
    return [split(line) for line in lines], name


def format_trees(found: Sequence[Found | None], form: str) -> str:
    """Return trees in the form that was asked for; in brackets, a blank line stays blank."""
    if form == "brackets":
        return "".join("\n" if parse is None else f"{parse.tree}\n" for parse in found)
    trees: list[Tree] = [parse.tree for parse in found if parse is not None]
    if form == "svg":
        return f"{draw_svg(trees[0])}\n"
    return "\n".join(f"{draw_text(tree).rstrip()}\n" for tree in trees)


def report_repairs(found: Sequence[Found | None], by: str) -> None:
    """Say how many outputs were no trees, and who made them."""
    parses = [parse for parse in found if parse is not None]
    if broken := sum(not parse.well_formed for parse in parses):
        output.log(
            f"{broken} of {len(parses)} outputs were no trees over their words, and were repaired"
        )
    output.log(f"parsed {len(parses)} sentence{'s' * (len(parses) != 1)} by {by}")
