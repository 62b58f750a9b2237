"""Prepare a corpus larger than memory: clean it, learn sub-words, and encode it in parallel.

Each step writes complete files, and its last file marks the step as done:

1. cleaned text, ``text/SPLIT-00000.txt`` and so on, then ``text/reports.json``;
2. ``tokenizer.json``;
3. for each file of text, ``shards/SPLIT-00000.safetensors``;
4. ``prepared.json``, which lists the sources and shards, with checksums of what they encode.

If the process is killed, the current step is lost, but in step 3 only one shard per worker.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from annotated_transformer.data.archives import locate_file
from annotated_transformer.data.cleaning import (
    CleaningReport,
    FingerprintSet,
    Pairs,
    clean_pairs,
    find_drift,
    note_overlap,
    stream_sides,
)
from annotated_transformer.data.corpora import ParallelText, Preparation, read_parallel
from annotated_transformer.data.files import (
    CorpusError,
    claim_folder,
    digest_of,
    load_object,
    not_written,
    regular_file,
    remove_leftovers,
    write_atomically,
    write_json,
)
from annotated_transformer.data.prepared import (
    FORMAT,
    Prepared,
    check_options,
    checked_reports,
    shards_of,
)
from annotated_transformer.data.shards import Shard, token_type, write_shard
from annotated_transformer.data.symbols import load_any_tokenizer
from annotated_transformer.data.text import reading_errors, stream_lines
from annotated_transformer.translation.tokenizers import BPETokenizer, Tokenizer, TokenizerError

SHARD_SIZE = 50_000  # pairs; a few seconds of work for one process
SAMPLE = 500_000  # maximum number of pairs to learn the sub-words from

Files = Mapping[str, Sequence[tuple[Path, Path]]]  # by split: source and target, one or more
Log = Callable[[str], None]


def prepare_corpus(
    folder: str | Path,
    files: Files,
    options: Preparation,
    *,
    workers: int | None = None,
    shard_size: int = SHARD_SIZE,
    progress: bool = False,
    log: Log = print,
) -> Prepared:
    """Prepare a corpus, or resume where an interrupted process stopped.

    Of the source and target ``files`` of each split, ``train`` is cleaned; the others are for
    evaluation and keep every line. A path may continue inside an archive, or be a named pipe, see
    ``locate_file``. The ``workers``, by default one per processor, encode ``shard_size`` pairs at a
    time, and their number does not change the result. ``log`` is called with messages.

    Returns:
        The prepared corpus. If the folder already has it, nothing is done.

    Raises:
        CorpusError: An option or a file cannot be used, or the folder has other contents.
        FileError: A file cannot be written.
    """
    folder = Path(folder)
    try:
        check_preparation(folder, options)
        busy = CorpusError(f"{folder}: another process is preparing it; wait for it")
        with claim_folder(folder, busy):  # before contents of pipes come into it
            find = functools.partial(locate_file, unpacked=folder / "unpacked")
            files = {key: [(find(a), find(b)) for a, b in pairs] for key, pairs in files.items()}
            plan = _plan(files, options, shard_size)
            _check_plan(folder, plan, log)
            if (folder / "prepared.json").exists():
                log(f"{folder}: is already prepared; nothing to do")
            else:
                shown = progress and sys.stderr is not None
                job = _Job(folder, files, options, workers, shard_size, shown, log)
                job.run(plan)
            shutil.rmtree(folder / "text", ignore_errors=True)
            return Prepared(folder)
    except OSError as error:
        raise not_written(error, error.filename or folder) from None


def check_preparation(folder: str | Path, options: Preparation) -> None:
    """Check the options and the folder before the first file is read.

    Raises:
        CorpusError: The languages, the vocabulary or ``max_len`` are invalid, or the folder is
            a file or inside one.
    """
    check_options(options)
    place = next(p for p in (Path(folder), *Path(folder).absolute().parents) if os.path.exists(p))
    if not place.is_dir():
        raise CorpusError(f"{place}: is a file, not a folder; choose another folder")


def _plan(files: Files, options: Preparation, shard_size: int) -> dict[str, Any]:
    """Describe what will be made from which sources, with their checksums."""

    def described(path: Path) -> dict[str, str]:
        next(stream_lines(path), "")  # checks that it exists and is text
        with reading_errors(path):
            return {"file": path.name, "sha256": digest_of(path)}

    sources = {split: [[*map(described, pair)] for pair in pairs] for split, pairs in files.items()}
    return {"format": FORMAT, "options": asdict(options), "shard": shard_size, "sources": sources}


def _check_plan(folder: Path, plan: Mapping[str, Any], log: Log) -> None:
    """Check that the folder belongs to the plan; remove unfinished work of another plan.

    Raises:
        CorpusError: The folder has a corpus of another plan, or other contents.
    """
    try:
        before = load_object(folder / "plan.json")
        # An older version had fewer options and behaved like their present defaults.
        before["options"] = {**asdict(Preparation()), **before["options"]}
    except FileNotFoundError:
        own = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        if any(entry.is_file() or entry.name in ("text", "shards") for entry in own):
            raise CorpusError(f"{folder}: has other files; choose another folder") from None
        return
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CorpusError(f"{folder / 'plan.json'}: damaged ({error}); delete the folder") from None
    if before == plan:
        return
    differing = " and ".join(name for name in plan if before.get(name) != plan[name])
    if (folder / "prepared.json").exists():
        told = f"{folder}: has a corpus that was prepared with other {differing}"
        raise CorpusError(f"{told}; choose another folder, or delete this one")
    log(f"{folder}: starting over with other {differing}")
    # Delete the list of complete files first, so that it is not trusted if we are killed here.
    (folder / "text" / "reports.json").unlink(missing_ok=True)
    for name in ("text", "shards"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "tokenizer.json").unlink(missing_ok=True)


@dataclass(frozen=True)
class _Job:
    """The parameters and steps of a preparation. Completed steps are skipped."""

    folder: Path
    files: Files
    options: Preparation
    workers: int | None
    shard_size: int
    shown: bool
    log: Log

    def run(self, plan: Mapping[str, Any]) -> None:
        """Run all steps."""
        text, shards = self.folder / "text", self.folder / "shards"
        for place in (self.folder, text, shards):
            remove_leftovers(place)
        write_json(self.folder / "plan.json", plan)
        reports = self.clean(text)
        self.learn(text, reports["train"]["kept"])
        self.encode(text, shards)
        headers = {path.stem: Shard.open(path).header for path in sorted(shards.glob("[!.]*"))}
        self.report_long(reports, headers)
        digest = digest_of(self.folder / "tokenizer.json")
        summary = {"plan": plan, "reports": reports, "tokenizer": digest, "shards": headers}
        write_json(self.folder / "prepared.json", summary)

    def clean(self, folder: Path) -> dict[str, Any]:
        """Write the cleaned text of every split; return a report for each."""
        done = folder / "reports.json"
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
            return checked_reports(load_object(done), self.files)
        shutil.rmtree(folder, ignore_errors=True)
        held_out: dict[str, ParallelText] = {}
        reports: dict[str, CleaningReport] = {}
        for split in self.files:
            if split != "train":
                held_out[split], reports[split] = self.held_out(split)
                write_text(held_out[split], folder, split, self.shard_size)
        for one, two in itertools.combinations(held_out, 2):
            for _ in note_overlap(held_out[one], one, {two: held_out[two]}, reports[two].notes):
                pass
        report, seen, sources = CleaningReport(), FingerprintSet(), self.files["train"]
        cleaned = (
            clean_pairs(*stream_sides(*paths), report, self.options, seen) for paths in sources
        )
        rows = itertools.chain.from_iterable(cleaned)
        bar = tqdm(rows, "cleaning", unit=" pairs", unit_scale=True, disable=not self.shown)
        pairs = note_overlap(bar, "the training text", held_out, report.notes)
        write_text(pairs, folder, "train", self.shard_size)
        if not report.kept:
            raise CorpusError(f"{sources[0][0]}: no pair is left after cleaning; give another text")
        reports["train"] = report
        for line in report.lines():
            self.log(line)
        for split, note in ((one, note) for one in held_out for note in reports[one].notes):
            self.log(f"{split}: {note}")
        found = {split: {"kept": each.kept, **asdict(each)} for split, each in reports.items()}
        write_json(done, found)
        return found

    def held_out(self, split: str) -> tuple[ParallelText, CleaningReport]:
        """Copy the text of an evaluation split, with every line."""
        if (count := len(self.files[split])) != 1:
            raise CorpusError(f"{split}: give one pair of files for evaluation, not {count}")
        (files,), languages = self.files[split], self.options.languages
        text = read_parallel(*files, languages=languages, split=split, drop_blank=False)
        if not any(source.strip() and target.strip() for source, target in text):
            raise CorpusError(f"{text.origin}: every pair has a blank side; give other files")
        for language, side in zip(languages, (text.source, text.target), strict=True):
            data = "".join(f"{line}\n" for line in side).encode()
            write_atomically(self.folder / f"{split}.{language}", data)
        report = CleaningReport(len(text))
        if drift := find_drift(text):
            report.note_drift(drift, self.options)
        return text, report

    def learn(self, text: Path, pairs: int) -> None:
        """Learn the vocabulary in a separate process, so that its memory is released."""
        path, options = self.folder / "tokenizer.json", self.options
        if not path.exists():
            self.log(f"learning {options.vocabulary} sub-words")
            with worker_pool(1) as pool:
                step, lowercase = -(-pairs // SAMPLE), options.tokenizer == "bpe-lower"
                arguments = text, path, options.vocabulary
                pool.submit(learn_subwords, *arguments, step=step, lowercase=lowercase).result()

    def encode(self, text: Path, shards: Path) -> None:
        """Encode all text files that have no shard yet."""
        shards.mkdir(exist_ok=True)
        processors = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
        with worker_pool(self.workers or len(processors)) as pool:
            futures = []
            for path in sorted(text.glob("*.txt")):
                shard = shards / f"{path.stem}.safetensors"
                if not shard.exists():
                    arguments = path, shard, self.folder / "tokenizer.json", self.options.max_len
                    futures.append(pool.submit(encode_shard, *arguments))
            self.log(f"encoding {len(futures)} shards")
            done = as_completed(futures)
            for future in tqdm(done, "encoding", len(futures), disable=not self.shown):
                future.result()

    def report_long(self, reports: dict[str, Any], headers: Mapping[str, Any]) -> None:
        """Log the pairs left out because they are too long, and add them to the reports."""
        reason = f"more than {self.options.max_len} tokens"
        for split, report in reports.items():
            own = [headers[name] for name in shards_of(split, headers)]
            if not (long := sum(header["long"] for header in own)):
                continue
            total, left = report["kept"], report["kept"] - long
            if not left:
                raise CorpusError(f"{split}: all {total} pairs have {reason}; raise --max-len")
            number, shard = next((n, one) for n, one in enumerate(own) if one["long"])
            first = number * self.shard_size + shard["first_long"]
            report["kept"], report["dropped"][reason] = left, long
            report["first"][reason] = f"{split}, pair {first} of {total}"
            message = f"{split}: {long} of {total} pairs left out, {reason} (--max-len), "
            message += f"first pair {first}"
            if split != "train":  # translation and scoring use every line
                message = f"warning: {message}; the loss is measured on the other {left} only"
            self.log(message)


def write_text(pairs: Pairs, folder: Path, split: str, size: int) -> None:
    """Write cleaned pairs into files of ``size`` pairs, alternating source and target lines."""
    pairs = iter(pairs)
    for number in itertools.count():
        part = list(itertools.islice(pairs, size))
        if not part:
            return
        text = "".join(f"{source}\n{target}\n" for source, target in part)
        write_atomically(folder / f"{split}-{number:05d}.txt", text.encode())


def read_text(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a file that ``write_text`` wrote."""
    with regular_file(path).open(encoding="utf-8", newline="\n") as file:
        for source, target in zip(file, file, strict=True):
            yield source[:-1], target[:-1]


def learn_subwords(
    folder: Path, tokenizer: Path, vocabulary: int, *, step: int = 1, lowercase: bool = False
) -> None:
    """Learn the shared sub-words from the training text only (§5.1).

    Args:
        folder: Where ``write_text`` put the training text.
        tokenizer: The file to write.
        vocabulary: Number of sub-words.
        step: Use every ``step``-th pair, to sample all parts of the corpus.
        lowercase: Learn from the text in lower case.

    Raises:
        CorpusError: The text is too short for that many sub-words.
    """
    pairs = itertools.chain.from_iterable(map(read_text, sorted(folder.glob("train-*.txt"))))
    lines = itertools.chain.from_iterable(itertools.islice(pairs, 0, None, step))
    try:
        learned = BPETokenizer.train(lines, vocabulary, lowercase=lowercase)
    except TokenizerError as error:
        raise CorpusError(f"--vocabulary {vocabulary}: {error}") from None
    write_atomically(tokenizer, f"{learned.to_json()}\n".encode())


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path, _: int) -> Tokenizer:
    """Load a tokenizer once per process, because each one loaded and used leaks memory."""
    return load_any_tokenizer(path)


def encode_shard(text: Path, shard: Path, tokenizer: Path, max_len: int) -> None:
    """Encode a text file into a shard, skipping pairs with more than ``max_len`` tokens.

    The shard's header has the number of skipped pairs, ``long``, and the first of them,
    ``first_long``, from 1 within the file; 0 if there is none.

    Args:
        text: The file that ``write_text`` wrote.
        shard: The file to write.
        tokenizer: The tokenizer's file, shared by both sides.
        max_len: Maximum tokens of a sentence, including special ones.
    """
    shared = _tokenizer(tokenizer, tokenizer.stat().st_mtime_ns)
    dtype = token_type(len(shared))
    pairs, long = [], []
    for number, (source, target) in enumerate(read_text(text), 1):
        pair = shared.encode(source), shared.encode(target)
        if max(map(len, pair)) < max_len:  # one is for the end symbol
            # Arrays, because lists would take eight times the memory.
            pairs.append((np.array(pair[0], dtype=dtype), np.array(pair[1], dtype=dtype)))
        else:
            long.append(number)
    of = [digest_of(text), digest_of(tokenizer)]
    write_shard(shard, pairs, len(shared), of=of, long=len(long), first_long=min(long, default=0))


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and exit when the parent ends, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextlib.contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Start worker processes that do not outlive this one.

    Raises:
        CorpusError: A worker was killed.
    """
    # A forked process shares its parent's memory; elsewhere each loads its own libraries.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker)
    try:
        yield pool
    except BrokenProcessPool:
        raise CorpusError(
            "a worker process was killed, perhaps for lack of memory; run the same command again "
            "to resume, with fewer --workers to save memory"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
