"""``prepare``: a corpus that is larger than memory."""

from __future__ import annotations

from pathlib import Path

from annotated_transformer.cli.options import Prepare
from annotated_transformer.cli.output import log, print_error
from annotated_transformer.cli.systems import TEST, check_mirror
from annotated_transformer.data.archives import locate
from annotated_transformer.data.corpora import CORPORA, corpus_files, language_codes, load_corpus
from annotated_transformer.data.files import write_atomically
from annotated_transformer.data.prepare import Files, check_preparation, prepare
from annotated_transformer.engine.config import UsageError, flag


def run(command: Prepare) -> int:
    """Prepare, or go on where an earlier process stopped."""
    options = command.preparation
    for name in ("vocabulary", "max_len", "max_words", "max_ratio"):
        if not 0 < (value := getattr(options, name)) < 1 << 16:
            raise UsageError(f"{flag(name)} {value}: must be above 0 and below 65536")
    if command.workers is not None and command.workers < 1:
        raise UsageError(f"--workers {command.workers}: must be at least 1")
    check_preparation(command.out, options)  # before anything is downloaded
    try:
        corpus = prepare(
            command.out,
            find_files(command),
            options,
            workers=command.workers,
            progress=not command.quiet,
            log=log,
        )
    except KeyboardInterrupt:
        print_error("interrupted; the same command goes on from there")
        return 130
    log(f"{len(corpus.tokens('train'))} sentence pairs in {command.out}; train with --prepared")
    return 0


def find_files(command: Prepare) -> Files:
    """Find the files of each split, downloading or unpacking them where that is needed."""
    pair = language_codes(command.preparation.pair)
    check_mirror(command.corpus, command.mirror)
    if command.corpus != "files":
        if command.train_files or command.valid_files or command.test_files:
            raise UsageError(f"--corpus {command.corpus} brings its files: give no others")
        folder = command.out / "corpus" / f"{command.corpus}-{command.preparation.pair}"
        bar = not command.quiet
        return known_files(command.corpus, pair, folder, mirror=command.mirror, progress=bar)
    unpacked = command.out / "unpacked"
    paths = [locate(path, unpacked) for path in command.train_files]
    if not paths or len(paths) % 2 or command.valid_files is None:
        raise UsageError("--corpus files: give --train-files and --valid-files, by two")
    found = {"train": list(zip(paths[::2], paths[1::2], strict=True))}
    for split, files in (("val", command.valid_files), ("test", command.test_files)):
        if files is not None:
            source, target = (locate(path, unpacked) for path in files)
            found[split] = [(source, target)]
    return found


def known_files(
    corpus: str,
    pair: tuple[str, str],
    folder: Path,
    *,
    mirror: Path | None = None,
    progress: bool = True,
) -> Files:
    """Find the files of a corpus that the package knows, split by split.

    A training text of one sentence on each line is read where it lies; all else is written
    into the folder in this form.

    Raises:
        CorpusError: It cannot be had, or not in these languages.
        UsageError: There is no such corpus.
    """
    if corpus not in CORPORA:
        raise UsageError(f"--corpus {corpus}: choose among files, {', '.join(CORPORA)}")
    names = "-".join(pair)
    found: dict[str, list[tuple[Path, Path]]] = {}
    for split in ("train", "val", TEST[corpus]):
        if split == "train" and corpus in ("multi30k", "wmt14"):
            found[split] = corpus_files(corpus, names, split, mirror=mirror, progress=progress)
            continue
        text = load_corpus(corpus, names, split, mirror=mirror, progress=progress)
        first, second = (folder / f"{split}.{language}" for language in pair)
        for path, side in ((first, text.source), (second, text.target)):
            write_atomically(path, "".join(f"{line}\n" for line in side).encode())
        found[split] = [(first, second)]
    return found
