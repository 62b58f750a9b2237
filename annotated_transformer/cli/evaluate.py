"""``evaluate`` scores a system on a corpus, or one file against another."""

from collections.abc import Sequence
from pathlib import Path

from annotated_transformer.cli.options import Evaluate
from annotated_transformer.cli.output import log, print_result, show_scores, show_tree_scores
from annotated_transformer.cli.systems import (
    TEST,
    beam_and_alpha,
    corpus_of,
    load_split,
    open_systems,
    test_split,
)
from annotated_transformer.data.corpora import ParallelText, read_parallel
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.engine.config import UsageError, check_order, option_flag
from annotated_transformer.engine.parser import score_parser
from annotated_transformer.engine.system import System, translate_lines
from annotated_transformer.engine.treebanks import check_trees, is_parser
from annotated_transformer.translation.evaluation import LANGUAGES, score, score_protocols


def run(command: Evaluate) -> int:
    """Print the requested scores."""
    files = (command.hypotheses, command.references)
    if command.model is None and None not in files:
        return evaluate_files(command, *filter(None, files))
    if command.model is None or files != (None, None):
        both = "" if command.model is None else ", not both"
        raise UsageError(f"give a trained system's folder, or --hypotheses and --references{both}")
    if command.language is not None:
        raise UsageError("--language: only for two files; leave it out, a system has its own")
    bar = not command.quiet
    folders = [command.model, *command.ensemble]
    system, by = open_systems(folders, command.search, parsers=True)
    beam, alpha = beam_and_alpha(command.search, system)
    search = "greedy" if beam == 1 else f"beam {beam}, alpha {alpha:g}"
    trees = is_parser(system.languages)
    for name in ("protocols", "ensemble"):
        if trees and getattr(command, name):
            raise UsageError(f"--{name}: not for a parser; leave it out")
    if command.protocols and system.languages[1] not in LANGUAGES:
        raise UsageError(
            f"--protocols: has rules for {', '.join(LANGUAGES)}, not for {system.languages[1]}, "
            "which the system writes; leave it out"
        )
    test = text_to_score(command, system)
    name = f"{test.name} {test.split}"
    if trees:
        found = score_parser(system, test, beam=beam, alpha=alpha, progress=bar)
        show_tree_scores(found, f"{name}, {search}")
    else:
        out = translate_lines(system, test.source, beam=beam, alpha=alpha, name=name, progress=bar)
        show_scores(score(out, test.target, lowercase=system.lowercase), f"{name}, {search}")
        if command.protocols:
            show_protocols(out, test.target, test.languages[1])
    if bar:
        log(f"{'parsed' if trees else 'translated'} by {by}")
    return 0


def evaluate_files(command: Evaluate, hypotheses: Path, references: Path) -> int:
    """Score one file against another."""
    language = command.language
    if language is not None and not command.protocols:
        raise UsageError("--language: has no effect without --protocols; give both")
    if command.protocols and language not in LANGUAGES:
        raise UsageError(
            f"--language{'' if language is None else f' {language}'}: --protocols of two files "
            f"needs the language of the references, among {', '.join(LANGUAGES)}"
        )
    text = read_parallel(hypotheses, references, drop_blank=False)
    show_scores(score(text.source, text.target), str(hypotheses))
    if language is not None:
        show_protocols(text.source, text.target, language)
    return 0


def text_to_score(command: Evaluate, system: System) -> ParallelText:
    """Load the text for the system to translate."""
    pair = "-".join(system.languages)
    if command.prepared is not None:
        for option in ("corpus", "test_files", "mirror"):
            if getattr(command, option) is not None:
                raise UsageError(
                    f"{option_flag(option)} or --prepared, not both; leave one of them out"
                )
        corpus = Prepared(command.prepared)
        if (its := "-".join(corpus.languages)) != pair:
            raise UsageError(f"--prepared {command.prepared}: is {its}, but the system is {pair}")
        return corpus.text(command.split or test_split(corpus))
    if command.test_files is not None:
        for option in ("corpus", "split", "mirror"):
            if getattr(command, option) is not None:
                raise UsageError(f"--test-files or --{option}, not both; leave one of them out")
        trees = is_parser(system.languages)
        files, languages = command.test_files, system.languages
        check_order("--test-files", files, pair, remedy="")
        text = read_parallel(*files, languages=languages, split="test", drop_blank=trees)
        return check_trees(text) if trees else text
    name = command.corpus or corpus_of(system)
    if name == "files":
        raise UsageError(f"{command.model}: its corpus was yours; give --test-files SOURCE TARGET")
    if name == "prepared":
        raise UsageError(f"{command.model}: its corpus was prepared; give --prepared FOLDER")
    split = command.split or TEST.get(name, "")
    return load_split(name, pair, split, mirror=command.mirror, bar=not command.quiet)


def show_protocols(found: Sequence[str], wanted: Sequence[str], language: str) -> None:
    """Print BLEU under the protocols of published numbers."""
    for name, way in score_protocols(found, wanted, language).items():
        print_result(f"  {way['bleu']:6.2f}  {name}\n    {way['signature']}")
