"""Prepare a corpus larger than memory: clean it, learn its sub-words, encode it in processes.

Each step leaves whole files, and its last file says that it is complete:

1. cleaned text, ``text/SPLIT-00000.txt`` and so on, then ``text/reports.json``;
2. ``tokenizer.json``;
3. for each file of text, ``shards/SPLIT-00000.safetensors``;
4. ``prepared.json``, which names the sources and the shards with their checksums.

A process that is killed loses the step that it was in, and of the third step one shard per worker.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from annotated_transformer.data.cleaning import (
    CleaningReport,
    FingerprintSet,
    clean,
    stream_sides,
)
from annotated_transformer.data.corpora import ParallelText, language_codes, read_parallel
from annotated_transformer.data.drift import ALIGN_AGAIN, find_drift
from annotated_transformer.data.encode import (
    encode_shard,
    learn_subwords,
    processors,
    worker_pool,
    write_text,
)
from annotated_transformer.data.files import (
    CorpusError,
    locked,
    remove_leftovers,
    sha256_of,
    write_atomically,
)
from annotated_transformer.data.overlap import SplitOverlap
from annotated_transformer.data.preparation import Preparation
from annotated_transformer.data.prepared import FORMAT, Prepared, shards_of
from annotated_transformer.data.shards import Shard
from annotated_transformer.data.text import stream_lines
from annotated_transformer.translation.tokenizers import BPETokenizer

SHARD_SIZE = 50_000  # pairs; some seconds of work for one process
SAMPLE = 500_000  # pairs that the sub-words are learned from, at most
MAX_LEN = (1 << 16) - 1  # tokens; longer lines are no sentences, but a mistake

Files = Mapping[str, Sequence[tuple[Path, Path]]]  # by split: source and target, one or more
Log = Callable[[str], None]


def prepare(
    folder: str | Path,
    files: Files,
    options: Preparation,
    *,
    workers: int | None = None,
    shard_size: int = SHARD_SIZE,
    progress: bool = False,
    log: Log = print,
) -> Prepared:
    """Prepare a corpus, or go on where an interrupted process stopped.

    Args:
        folder: Where everything goes.
        files: Source and target files of each split; ``train`` is cleaned, the others are
            for evaluation, and keep every line.
        options: How to do it.
        workers: Processes that encode; as many as there are processors unless given. Their
            number changes nothing in the result.
        shard_size: Pairs of a shard.
        progress: Show progress bars.
        log: Takes messages.

    Returns:
        The prepared corpus. Where the folder holds it already, nothing is done.

    Raises:
        CorpusError: An option or a file cannot be used, or the folder holds something else.
        TokenizerError: What was learned cannot be written.
        CheckpointError: Another file cannot be written.
    """
    folder = Path(folder)
    check_preparation(folder, options)
    plan = _plan(files, options, shard_size)
    with _lock(folder):
        _check_plan(folder, plan, log)
        if (folder / "prepared.json").exists():
            log(f"{folder}: is prepared; nothing to do")
        else:
            _Job(folder, files, options, workers or processors(), shard_size, progress, log).run(
                plan
            )
        shutil.rmtree(folder / "text", ignore_errors=True)
        return Prepared(folder)


def check_preparation(folder: str | Path, options: Preparation) -> None:
    """Check what can be known before the first file is read.

    Raises:
        CorpusError: The languages, the vocabulary or ``max_len`` cannot be meant, or the
            folder cannot be one.
    """
    language_codes(options.pair)
    if options.vocabulary < (smallest := len(BPETokenizer([]))):
        raise CorpusError(
            f"--vocabulary {options.vocabulary}: must be at least {smallest}, "
            "the bytes and the special tokens"
        )
    if not 2 <= options.max_len <= MAX_LEN:
        raise CorpusError(
            f"--max-len {options.max_len}: must be at least 2, a token and the end of the sentence,"
            f" and at most {MAX_LEN}"
        )
    for place in (Path(folder), *Path(folder).parents):
        if place.exists():
            if not place.is_dir():
                raise CorpusError(f"{place}: is a file, not a folder; choose another folder")
            return


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Make the folder, and hold it for this process, where the system has such locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(
            f"{folder}: the folder cannot be made: {error.strerror or error}; choose another folder"
        ) from None
    try:
        with locked(folder, wait=False):
            yield
    except BlockingIOError:
        raise CorpusError(f"{folder}: another process prepares it; wait for its end") from None


def _plan(files: Files, options: Preparation, shard_size: int) -> dict[str, Any]:
    """Say what is made of which sources, named by their checksums."""

    def described(path: Path) -> dict[str, str]:
        next(stream_lines(path), "")  # is it there, and is it text at all?
        return {"file": path.name, "sha256": sha256_of(path)}

    sources = {split: [[*map(described, pair)] for pair in pairs] for split, pairs in files.items()}
    return {"format": FORMAT, "options": asdict(options), "shard": shard_size, "sources": sources}


def _check_plan(folder: Path, plan: Mapping[str, Any], log: Log) -> None:
    """Make sure that what is in the folder belongs to the plan; remove unfinished work of another.

    Raises:
        CorpusError: The folder holds a corpus by another plan, or is something else.
    """
    try:
        before = json.loads((folder / "plan.json").read_bytes())
        # An older version knew fewer options: it did what is now their default.
        before["options"] = {**asdict(Preparation()), **before["options"]}
    except FileNotFoundError:
        if any(not entry.name.startswith(".") for entry in folder.iterdir() if entry.is_file()):
            raise CorpusError(f"{folder}: is in use; choose another folder") from None
        return
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CorpusError(f"{folder / 'plan.json'}: damaged ({error}); delete the folder") from None
    if before == plan:
        return
    differing = " and ".join(name for name in plan if before.get(name) != plan[name])
    if (folder / "prepared.json").exists():
        raise CorpusError(
            f"{folder}: holds a corpus that was prepared with other {differing}; "
            "choose another folder, or delete this one"
        )
    log(f"{folder}: starts over, with other {differing}")
    # The list of what is complete goes first: if we are killed here, it must not be trusted later.
    (folder / "text" / "reports.json").unlink(missing_ok=True)
    for name in ("text", "shards"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "tokenizer.json").unlink(missing_ok=True)


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class _Job:
    """A preparation: what was asked for, and its steps. A step that is complete is skipped."""

    folder: Path
    files: Files
    options: Preparation
    workers: int
    shard_size: int
    progress: bool
    log: Log

    def run(self, plan: Mapping[str, Any]) -> None:
        """Take all steps."""
        text, shards = self.folder / "text", self.folder / "shards"
        for place in (self.folder, text, shards):
            remove_leftovers(place)
        write_atomically(self.folder / "plan.json", _json(plan))
        reports = self.clean(text)
        self.learn(text, reports["train"]["kept"])
        self.encode(text, shards)
        headers = {path.stem: Shard.open(path).header for path in sorted(shards.glob("[!.]*"))}
        self.report_long(reports, headers)
        digest = sha256_of(self.folder / "tokenizer.json")
        summary = {"plan": plan, "reports": reports, "tokenizer": digest, "shards": headers}
        write_atomically(self.folder / "prepared.json", _json(summary))

    def clean(self, folder: Path) -> dict[str, Any]:
        """Write the cleaned text of every split; return a report on each."""
        done = folder / "reports.json"
        if done.exists():
            return dict(json.loads(done.read_bytes()))
        shutil.rmtree(folder, ignore_errors=True)
        held_out: dict[str, ParallelText] = {}
        reports: dict[str, CleaningReport] = {}
        for split in self.files:
            if split != "train":
                held_out[split], reports[split] = self.held_out(split)
                write_text(held_out[split], folder, split, self.shard_size)
        overlap, report = SplitOverlap(held_out), CleaningReport()
        pairs = overlap.watch(self.training_pairs(report))
        bar = tqdm(pairs, "cleaning", unit=" pairs", unit_scale=True, disable=not self.progress)
        write_text(bar, folder, "train", self.shard_size)
        if not report.kept:
            raise CorpusError(f"{self.files['train'][0][0]}: no pair is left after cleaning")
        reports["train"] = report
        for split, note in overlap.notes():
            reports[split].notes.append(note)
        for line in report.lines():
            self.log(line)
        for split in held_out:
            for note in reports[split].notes:
                self.log(f"{split}: {note}")
        found = {split: {"kept": each.kept, **asdict(each)} for split, each in reports.items()}
        write_atomically(done, _json(found))
        return found

    def held_out(self, split: str) -> tuple[ParallelText, CleaningReport]:
        """Copy the text of a split that is for evaluation; every line counts there."""
        if (count := len(self.files[split])) != 1:
            raise CorpusError(f"{split}: give one pair of files for evaluation, not {count}")
        languages = self.options.languages
        text = read_parallel(
            *self.files[split][0], languages=languages, split=split, drop_blank=False
        )
        for language, side in zip(languages, (text.source, text.target), strict=True):
            data = "".join(f"{line}\n" for line in side).encode()
            write_atomically(self.folder / f"{split}.{language}", data)
        report = CleaningReport(len(text))
        if drift := find_drift(text):
            if not self.options.allow_drift:
                raise CorpusError(f"{drift}; {ALIGN_AGAIN}")
            report.notes.append(drift)
        return text, report

    def training_pairs(self, report: CleaningReport) -> Iterator[tuple[str, str]]:
        """Go through the cleaned pairs of all training files."""
        names = "max_words max_ratio keep_duplicates allow_drift".split()
        rules = {name: getattr(self.options, name) for name in names}
        seen = FingerprintSet()
        for paths in self.files["train"]:
            yield from clean(*stream_sides(*paths), report, seen=seen, **rules)

    def learn(self, text: Path, pairs: int) -> None:
        """Learn the vocabulary, in a process with which its memory goes."""
        path, options = self.folder / "tokenizer.json", self.options
        if not path.exists():
            self.log(f"learning {options.vocabulary} sub-words")
            with worker_pool(1) as pool:
                step, lowercase = -(-pairs // SAMPLE), options.tokenizer == "bpe-lower"
                arguments = text, path, options.vocabulary
                pool.submit(learn_subwords, *arguments, step=step, lowercase=lowercase).result()

    def encode(self, text: Path, shards: Path) -> None:
        """Encode every file of text that has no shard yet."""
        shards.mkdir(exist_ok=True)
        with worker_pool(self.workers) as pool:
            futures = []
            for path in sorted(text.glob("*.txt")):
                shard = shards / f"{path.stem}.safetensors"
                if not shard.exists():
                    arguments = path, shard, self.folder / "tokenizer.json", self.options.max_len
                    futures.append(pool.submit(encode_shard, *arguments))
            self.log(f"encoding {len(futures)} shards")
            done = as_completed(futures)
            for future in tqdm(done, "encoding", len(futures), disable=not self.progress):
                future.result()

    def report_long(self, reports: dict[str, Any], headers: Mapping[str, Any]) -> None:
        """Log which pairs the shards lack because they are too long; enter it into the reports."""
        reason = f"more than {self.options.max_len} tokens"
        for split, report in reports.items():
            own = [headers[name] for name in shards_of(split, headers)]
            if not (long := sum(header["long"] for header in own)):
                continue
            total, left = report["kept"], report["kept"] - long
            if not left:
                raise CorpusError(
                    f"{split}: no pair is left, all {total} have {reason}; raise --max-len"
                )
            number, shard = next((n, one) for n, one in enumerate(own) if one["long"])
            first = number * self.shard_size + shard["first_long"]
            report["kept"], report["dropped"][reason] = left, long
            report["first"][reason] = f"{split}, pair {first} of {total}"
            message = f"{split}: {long} of {total} pairs left out, {reason} (--max-len), "
            message += f"first pair {first}"
            if split != "train":  # what is translated and scored keeps every line
                message = f"warning: {message}; the loss is measured on the other {left} alone"
            self.log(message)
