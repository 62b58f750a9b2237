"""``prepare`` makes a corpus larger than memory ready for training."""

from pathlib import Path

from annotated_transformer.cli.options import Prepare
from annotated_transformer.cli.output import log
from annotated_transformer.cli.systems import TEST, check_mirror
from annotated_transformer.data.corpora import CORPORA, corpus_files, load_corpus
from annotated_transformer.data.files import write_atomically
from annotated_transformer.data.prepare import Files, check_preparation, prepare_corpus
from annotated_transformer.engine.config import UsageError, check_order, option_flag
from annotated_transformer.engine.treebanks import is_parser


def run(command: Prepare) -> int:
    """Prepare a corpus, or resume where an earlier process stopped."""
    options, workers = command.preparation, command.workers
    if is_parser(options.languages):
        raise UsageError(f"--pair {options.pair}: for a parser, train with --train-files instead")
    check_preparation(command.out, options)  # before anything is downloaded
    check_mirror(command.corpus, command.mirror)
    files = own_files(command) if command.corpus == "files" else known_files(command)
    bar = not command.quiet
    corpus = prepare_corpus(command.out, files, options, workers=workers, progress=bar, log=log)
    log(f"{len(corpus.tokens('train'))} sentence pairs in {command.out}; train with --prepared")
    return 0


def own_files(command: Prepare) -> Files:
    """Return the user's files for each split."""
    paths = command.train_files
    if not paths or len(paths) % 2 or command.valid_files is None:
        raise UsageError("--corpus files: give --train-files and --valid-files in pairs")
    for name in ("train_files", "valid_files", "test_files"):
        check_order(option_flag(name), getattr(command, name), command.preparation.pair)
    found = {"train": list(zip(paths[::2], paths[1::2], strict=True)), "val": [command.valid_files]}
    return found if command.test_files is None else {**found, "test": [command.test_files]}


def known_files(command: Prepare) -> Files:
    """Return the files of a known corpus for each split.

    A training text with one sentence per line is read in place; other formats are converted to
    that form in the output folder.

    Raises:
        CorpusError: It is not available, or not in these languages.
        UsageError: There is no such corpus, or files were given as well.
    """
    corpus, names, bar = command.corpus, command.preparation.pair, not command.quiet
    if corpus not in CORPORA:
        raise UsageError(f"--corpus {corpus}: choose among files, {', '.join(CORPORA)}")
    for name in ("train_files", "valid_files", "test_files"):
        if getattr(command, name):
            raise UsageError(
                f"{option_flag(name)}: --corpus {corpus} has its own files; leave it out"
            )
    found: dict[str, list[tuple[Path, Path]]] = {}
    for split in ("train", "val", TEST[corpus]):
        if split == "train" and corpus in ("multi30k", "wmt14"):
            found[split] = corpus_files(corpus, names, split, mirror=command.mirror, progress=bar)
            continue
        text = load_corpus(corpus, names, split, mirror=command.mirror, progress=bar)
        folder = command.out / "corpus" / f"{corpus}-{names}"
        first, second = (folder / f"{split}.{language}" for language in text.languages)
        for path, side in ((first, text.source), (second, text.target)):
            write_atomically(path, "".join(f"{line}\n" for line in side).encode())
        found[split] = [(first, second)]
    return found
