# Written from book/translation/shards.md: edit the chapter instead.
"""Token numbers in memory-mapped shards, batches from them, and how a corpus is prepared."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from annotated_transformer.data.files import remove_leftovers, write_atomically
from annotated_transformer.notation import BOS, EOS, PAD
from annotated_transformer.training.batches import Batch
from annotated_transformer.translation.cleaning import (
    ALIGN,
    DriftCheck,
    Report,
    Rules,
    Seen,
    clean,
    drift_text,
    fingerprints,
    stream_lines,
    stream_sides,
)
from annotated_transformer.translation.corpora import (
    ParallelText,
    language_codes,
    read_parallel,
)
from annotated_transformer.translation.downloads import CorpusError, locked, sha256_of
from annotated_transformer.translation.tokenizers import (
    BPETokenizer,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
    save_tokenizer,
)


def write_shard(
    path: str | Path,
    pairs: Sequence[tuple[Sequence[int] | NDArray[Any], Sequence[int] | NDArray[Any]]],
    vocabulary: int,
    **data: Any,
) -> None:
    """Write pairs of token numbers, without special symbols, into a file; atomically.

    Args:
        path: The file.
        pairs: Source and target of each.
        vocabulary: Numbers are below it; up to 65,536, each takes 2 bytes, above it 4.
        data: What else the header is to say.
    """
    sides = [side for pair in pairs for side in pair]
    offsets = np.zeros(len(sides) + 1, dtype=np.uint32)
    np.cumsum([len(side) for side in sides], out=offsets[1:])
    small = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    rows = [np.asarray(side, dtype=small) for side in sides]
    tokens = np.concatenate([np.zeros(0, dtype=small), *rows])
    header = {**data, "pairs": len(pairs), "sha256": _digest(offsets, tokens)}
    arrays: dict[str, NDArray[Any]] = {"offsets": offsets, "tokens": tokens}
    write_atomically(path, safetensors.numpy.save(arrays, {"data": json.dumps(header)}))


def _digest(offsets: NDArray[Any], tokens: NDArray[Any]) -> str:
    found = hashlib.sha256(offsets.tobytes())
    found.update(tokens.tobytes())
    return found.hexdigest()


class Shard:
    """A file of pairs, mapped into memory.

    Attributes:
        data: What the header says.
        offsets: Where each sentence begins, ``(2 * pairs + 1,)``.
        tokens: All token numbers, source and target by turns.

    Raises:
        CorpusError: The file is missing, cut off, or no shard.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > self.path.stat().st_size:
                    raise ValueError("its header is longer than the file")
                header = json.loads(file.read(length))
            self.data: dict[str, Any] = json.loads(header["__metadata__"]["data"])
            content = _mapped(self.path)[8 + length :]
            self.offsets = _array(content, header["offsets"])
            self.tokens = _array(content, header["tokens"])
            if len(self.offsets) != 2 * self.data["pairs"] + 1:
                raise ValueError("its header does not fit its arrays")
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (struct.error, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise CorpusError(
                f"{path}: damaged ({reason}); delete the folder and prepare the corpus again"
            ) from None

    def __len__(self) -> int:
        """Return the number of pairs."""
        return int(self.data["pairs"])

    def pair(self, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return source and target of a pair."""
        first, second, third = self.offsets[2 * number : 2 * number + 3].tolist()
        return self.tokens[first:second], self.tokens[second:third]

    def check(self) -> None:
        """Raise CorpusError if the numbers do not have the checksum in the header."""
        if _digest(self.offsets, self.tokens) != self.data["sha256"]:
            raise CorpusError(
                f"{self.path}: damaged (its numbers do not have the checksum in its header); "
                "delete the folder and prepare the corpus again"
            )


def _mapped(path: Path) -> NDArray[np.uint8]:
    """Map a file into memory, without keeping it open; what is written there is not kept."""
    size = path.stat().st_size
    try:
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    except RuntimeError as error:
        raise OSError(str(error).split("\n")[0]) from None


def _array(content: NDArray[np.uint8], entry: Mapping[str, Any]) -> NDArray[Any]:
    kind = {"U16": np.uint16, "U32": np.uint32}[entry["dtype"]]
    start, stop = entry["data_offsets"]
    found = content[start:stop].view(kind)
    found.flags.writeable = False
    if found.shape != tuple(entry["shape"]):
        raise ValueError("it is cut off")
    return found


LONGEST = (1 << 16) - 1  # tokens of a sentence, a special symbol included: 2 bytes


class ShardedText:
    """Sentence pairs as token numbers, in shards on the disk.

    Args:
        paths: The shards, in order.
        check: Whether to compare the checksums; this reads everything once.

    Raises:
        CorpusError: A shard is missing or damaged, a sentence is too long, or there is no
            pair in them.
    """

    def __init__(self, paths: Sequence[str | Path], *, check: bool = False) -> None:
        self.shards = [Shard(path) for path in paths]
        if check:
            for shard in self.shards:
                shard.check()
        self.starts = np.cumsum([0, *(len(shard) for shard in self.shards)])
        if not len(self):
            raise CorpusError(f"{Path(paths[0]).parent if paths else 'shards'}: no pair in them")
        self._lengths = np.empty((len(self), 2), dtype=np.uint16)
        for start, shard in zip(self.starts[:-1], self.shards, strict=True):
            found = np.diff(shard.offsets).reshape(-1, 2) + 1
            if (found > LONGEST).any():
                raise CorpusError(f"{shard.path}: a sentence of more than {LONGEST} tokens")
            self._lengths[start : start + len(shard)] = found

    def __len__(self) -> int:
        """Return the number of pairs."""
        return int(self.starts[-1])

    def lengths(self) -> NDArray[np.uint16]:
        """Source and target length of each pair, ``(pairs, 2)``, a special symbol included."""
        return self._lengths

    def pair(self, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return source and target of a pair, without special symbols."""
        home = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.shards[home].pair(number - int(self.starts[home]))

    def batch(self, numbers: Iterable[int]) -> Batch:
        """Make a batch of the pairs with these numbers, as ``make_batch`` does from lists."""
        sides = zip(*(self.pair(int(number)) for number in numbers), strict=True)
        source, target = (_block(rows, begin) for rows, begin in zip(sides, (0, 1), strict=True))
        return Batch(source, target)

    def order(
        self, max_tokens: int, *, seed: int = 0, epoch: int = 0, shuffle: bool = True
    ) -> list[NDArray[np.uint32]]:
        """Group the pairs into batches, see :func:`pooled_batches`."""
        return pooled_batches(self._lengths, max_tokens, seed=seed, epoch=epoch, shuffle=shuffle)


def _block(rows: Sequence[NDArray[Any]], begin: int) -> torch.Tensor:
    """Lay rows into a padded block, each after ``begin`` BOS symbols and before an EOS."""
    block = np.full((len(rows), begin + 1 + max(map(len, rows))), PAD, dtype=np.int64)
    block[:, :begin] = BOS
    for line, row in zip(block, rows, strict=True):
        line[begin : begin + len(row)] = row
        line[begin + len(row)] = EOS
    return torch.from_numpy(block)


def pooled_batches(
    lengths: NDArray[Any],
    max_tokens: int,
    *,
    pool: int = 100,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
) -> list[NDArray[np.uint32]]:
    """Group pairs of similar length into batches of at most ``max_tokens`` (section 5.1).

    The rule is that of ``token_batches``, in arrays.

    Args:
        lengths: ``(pairs, 2)``, special symbols included.
        max_tokens: Most source tokens, and most target tokens, of a batch, padding included.
        pool: Batches that a pool is good for.
        seed: Chooses the order, together with ``epoch``.
        epoch: Number of the pass over the data.
        shuffle: Keep one pool, and batches from short to long, when false.

    Returns:
        Numbers of pairs, batch by batch; each pair stands in exactly one.

    Raises:
        ValueError: A sentence alone is longer than ``max_tokens``.
    """
    if not len(lengths):
        return []
    longer = lengths.max(axis=1)
    if longer.max() > max_tokens:
        raise ValueError(
            f"pair {longer.argmax() + 1} has {longer.max()} tokens, more than the {max_tokens} of "
            "a batch: raise the number, or drop the pair"
        )
    order = np.arange(len(longer), dtype=np.uint32)
    chance = np.random.default_rng([seed, epoch])
    size = len(order)
    if shuffle:
        chance.shuffle(order)
        size = max(1, round(pool * max_tokens / float(longer.mean())))
    batches = []
    for start in range(0, len(order), size):
        part = order[start : start + size]  # a view: sorted where it stands
        part[:] = part[np.lexsort((lengths[part, 1], lengths[part, 0], longer[part]))]
        batches += [part[i:j] for i, j in _cuts(longer[part].astype(np.int64), max_tokens)]
    if shuffle:
        batches = [batches[i] for i in chance.permutation(len(batches))]
    return batches


def _cuts(widths: NDArray[np.int64], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Cut rising widths into batches, each as large as fits."""
    start = 0
    while start < len(widths):
        most = widths[start : start + max_tokens // widths[start]]
        cost = most * np.arange(1, len(most) + 1)
        stop = start + int(np.searchsorted(cost, max_tokens, side="right"))
        yield start, stop
        start = stop


SHARD = 50_000  # pairs; a piece of work for one process, some seconds long


def write_pieces(pairs: Iterable[tuple[str, str]], folder: Path, split: str) -> None:
    """Write cleaned pairs in pieces, ``SHARD`` pairs each."""
    pairs = iter(pairs)
    for number in itertools.count():
        piece = list(itertools.islice(pairs, SHARD))
        if not piece:
            return
        text = "".join(f"{source}\n{target}\n" for source, target in piece)
        write_atomically(folder / f"{split}-{number:05d}.txt", text.encode())


def read_piece(path: Path, step: int = 1, start: int = 0) -> Iterator[tuple[str, str]]:
    """Go through every ``step``-th pair of a piece."""
    with path.open(encoding="utf-8", newline="\n") as file:
        rows = zip(file, file, strict=True)
        for source, target in itertools.islice(rows, start, None, step):
            yield source[:-1], target[:-1]


def sample_pieces(pieces: Sequence[Path], counts: Sequence[int], most: int) -> Iterator[str]:
    """Go through the lines of at most ``most`` pairs at equal distances, both sides.

    Args:
        pieces: The pieces of a text.
        counts: How many pairs each has.
        most: Most pairs to take.
    """
    step, start = max(1, -(-sum(counts) // most)), 0
    for path, count in zip(pieces, counts, strict=True):
        for pair in read_piece(path, step, start):
            yield from pair
        start = (start - count) % step


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path, _: int) -> Tokenizer:
    """Load a tokenizer once in a process: memory is lost with each that is loaded and used."""
    return load_tokenizer(path)


def encode_piece(piece: Path, shard: Path, tokenizer: Path, max_len: int) -> None:
    """Encode a piece of text into a shard, without the pairs of more than ``max_len`` tokens.

    The shard's header says how many these are, ``long``, and which is the first of them,
    ``first_long``, from 1 within the piece; 0 if there is none.

    Args:
        piece: The text.
        shard: The file to write.
        tokenizer: The tokenizer's file; both sides share it.
        max_len: Most tokens of a sentence, special ones included.
    """
    shared = _tokenizer(tokenizer, tokenizer.stat().st_mtime_ns)
    pairs, long = [], []
    for number, (source, target) in enumerate(read_piece(piece), 1):
        pair = shared.encode(source), shared.encode(target)
        if max(map(len, pair)) < max_len:  # the end symbol needs a place
            first, second = (np.array(side, dtype=np.uint32) for side in pair)
            pairs.append((first, second))  # a list would take eight times the memory
        else:
            long.append(number)
    write_shard(shard, pairs, len(shared), long=len(long), first_long=min(long, default=0))


def _start_worker(parent: int) -> None:
    """Leave Ctrl-C to the parent, and go when it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes that work; none of them outlives this one.

    Raises:
        CorpusError: One of them was killed.
    """
    # A forked process shares the memory of its parent; elsewhere each loads its own libraries.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(),))
    try:
        yield pool
    except BrokenProcessPool:
        raise CorpusError(
            "a worker process was killed, perhaps for lack of memory; run the same command again, "
            "it goes on from there; fewer --workers need less"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


FORMAT = 2
SAMPLE = 500_000  # pairs that the vocabulary is learned from, at most


@dataclass(frozen=True)
class Preparation:
    """How a corpus is prepared."""

    pair: str = "de-en"
    """Source and target language."""
    tokenizer: Literal["bpe", "bpe-lower"] = "bpe"
    """Sub-words of the text as it is, or in lower case."""
    vocabulary: int = 37_000
    """Number of sub-words, shared by both languages."""
    max_len: int = 256
    """Most tokens of a sentence, special ones included; longer ones are not in the shards."""
    max_words: int = 200
    """Most words of a training sentence."""
    max_ratio: float = 4.0
    """Most words on one side of a training pair for each on the other."""
    keep_duplicates: bool = False
    """Keep training pairs that were there before."""
    allow_drift: bool = False
    """Go on where the two sides seem to drift against each other."""

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language, one by one."""
        return language_codes(self.pair)

    @property
    def rules(self) -> Rules:
        """Which pairs are left out."""
        return Rules(self.max_words, self.max_ratio, self.keep_duplicates)


Files = Mapping[str, Sequence[tuple[Path, Path]]]  # by split: source and target, one or more


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
    if not 2 <= options.max_len <= LONGEST:
        raise CorpusError(
            f"--max-len {options.max_len}: must be at least 2, a token and the end of the sentence,"
            f" and at most {LONGEST}"
        )
    for place in (Path(folder), *Path(folder).parents):
        if place.exists():
            if not place.is_dir():
                raise CorpusError(f"{place}: is a file, not a folder; choose another folder")
            return


def prepare(
    folder: str | Path,
    files: Files,
    options: Preparation,
    *,
    workers: int | None = None,
    progress: bool = False,
    say: Callable[[str], None] = print,
) -> Prepared:
    """Clean a corpus, learn its vocabulary, and encode it into shards; or go on with it.

    Args:
        folder: Where everything goes.
        files: Source and target files of each split; ``train`` is cleaned, the others are
            for evaluation, and keep every line.
        options: How to do it.
        workers: Processes that encode; as many as there are processors unless given.
        progress: Show progress bars.
        say: What to do with messages.

    Returns:
        The prepared corpus. Where the folder holds it already, nothing is done.

    Raises:
        CorpusError: An option or a file cannot be used, or the folder holds something else.
        TokenizerError: What was learned cannot be written.
        CheckpointError: Another file cannot be written.
    """
    folder = Path(folder)
    check_preparation(folder, options)
    plan = _plan(files, options)
    with _alone(folder):
        return _prepare(folder, files, options, plan, workers, progress, say)


def _prepare(
    folder: Path,
    files: Files,
    options: Preparation,
    plan: dict[str, Any],
    workers: int | None,
    progress: bool,
    say: Callable[[str], None],
) -> Prepared:
    _check_plan(folder, plan, say)
    if (folder / "prepared.json").exists():
        shutil.rmtree(folder / "text", ignore_errors=True)
        say(f"{folder}: is prepared; nothing to do")
        return Prepared(folder)
    for place in (folder, folder / "text", folder / "shards"):
        remove_leftovers(place)
    write_atomically(folder / "plan.json", _json(plan))
    reports = _clean_all(folder, files, options, progress, say)
    if not (folder / "tokenizer.json").exists():
        say(f"learning {options.vocabulary} sub-words")
        counts = [min(SHARD, left) for left in range(reports["train"]["kept"], 0, -SHARD)]
        pieces = sorted((folder / "text").glob("train-*.txt"))
        with worker_pool(1) as pool:  # its memory goes with its process
            pool.submit(_learn, folder, pieces, counts, options).result()
    with worker_pool(workers or processors()) as pool:
        _encode_all(folder, options, pool, progress, say)
    shards = _summary(folder)
    _report_long(reports, shards, options, say)
    digest = sha256_of(folder / "tokenizer.json")
    summary = {"plan": plan, "reports": reports, "tokenizer": digest, "shards": shards}
    write_atomically(folder / "prepared.json", _json(summary))
    shutil.rmtree(folder / "text", ignore_errors=True)
    return Prepared(folder)


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder for this process, where the system has such locks.

    Raises:
        CorpusError: Another process holds it, or it cannot be made.
    """
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


def _plan(files: Files, options: Preparation) -> dict[str, Any]:
    """Name sources by checksum, and what is done with them."""
    sources = {
        split: [[{"file": path.name, "sha256": _checksum(path)} for path in pair] for pair in pairs]
        for split, pairs in files.items()
    }
    return {"format": FORMAT, "options": asdict(options), "shard": SHARD, "sources": sources}


def _checksum(path: Path) -> str:
    next(stream_lines(path), "")  # is it there, and is it text at all?
    return sha256_of(path)


def _check_plan(folder: Path, plan: dict[str, Any], say: Callable[[str], None]) -> None:
    """Make sure that what is in the folder belongs to the plan.

    Raises:
        CorpusError: It was finished by another plan, or is something else.
    """
    if not folder.exists():
        return
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
    if before != plan:
        differing = [name for name in plan if before.get(name) != plan[name]]
        if (folder / "prepared.json").exists():
            raise CorpusError(
                f"{folder}: holds a corpus that was prepared with other {' and '.join(differing)}; "
                "choose another folder, or delete this one"
            )
        say(f"{folder}: begins again, with other {' and '.join(differing)}")
        # The list of what is complete goes first: who is killed here must not trust it later.
        (folder / "text" / "reports.json").unlink(missing_ok=True)
        for name in ("text", "shards"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "tokenizer.json").unlink(missing_ok=True)


def _clean_all(
    folder: Path,
    files: Files,
    options: Preparation,
    progress: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Write the pieces of every split, unless they are there; return what was dropped."""
    done = folder / "text" / "reports.json"
    if done.exists():
        return dict(json.loads(done.read_bytes()))
    shutil.rmtree(folder / "text", ignore_errors=True)
    held: dict[str, ParallelText] = {}
    reports: dict[str, Report] = {}
    for split in files:
        if split != "train":
            held[split], reports[split] = _held_out(folder, split, files[split], options)
            write_pieces(held[split], folder / "text", split)
    report = reports["train"] = Report()
    overlap = Overlap(held)
    pairs = _training_pairs(files["train"], options, report)
    with tqdm(desc="cleaning", unit=" pairs", unit_scale=True, disable=not progress) as bar:
        write_pieces(overlap.watch(_counted(pairs, bar)), folder / "text", "train")
    if not report.kept:
        raise CorpusError(f"{files['train'][0][0]}: no pair is left after cleaning")
    for split, note in overlap.notes():
        reports[split].notes.append(note)
    for line in report.lines():
        say(line)
    for split in held:
        for note in reports[split].notes:
            say(f"{split}: {note}")
    found = {split: {"kept": report.kept, **asdict(report)} for split, report in reports.items()}
    write_atomically(done, _json(found))
    return found


def _held_out(
    folder: Path, split: str, files: Sequence[tuple[Path, Path]], options: Preparation
) -> tuple[ParallelText, Report]:
    """Copy the text of a split that is for evaluation; every line counts there."""
    if len(files) != 1:
        raise CorpusError(f"{split}: give one pair of files for evaluation, not {len(files)}")
    text = read_parallel(*files[0], languages=options.languages, split=split, drop_blank=False)
    for language, side in zip(options.languages, (text.source, text.target), strict=True):
        data = "".join(f"{line}\n" for line in side).encode()
        write_atomically(folder / f"{split}.{language}", data)
    report = Report(len(text))
    if drift := _drift(text):
        if not options.allow_drift:
            raise CorpusError(f"{drift}; {ALIGN}")
        report.notes.append(drift)
    return text, report


def _drift(text: ParallelText) -> str:
    """Say where the sides of a text drift against each other; empty if they fit."""
    lengths = [[len(source), len(target)] for source, target in text]
    found = DriftCheck().add(np.array(lengths, dtype=np.int64).reshape(-1, 2))
    if found is None:
        return ""
    line, shift = found
    for blank in text.blank:  # lines that were dropped before
        line += blank <= line
    source, target = (text.checksums[side][0] + text.among(side) for side in (0, 1))
    return drift_text(source, target, line, shift)


def _training_pairs(
    files: Sequence[tuple[Path, Path]], options: Preparation, report: Report
) -> Iterator[tuple[str, str]]:
    seen = Seen()
    for paths in files:
        source, target = stream_sides(*paths)
        yield from clean(source, target, report, options.rules, seen, drift=not options.allow_drift)


def _counted(pairs: Iterable[tuple[str, str]], bar: tqdm[Any]) -> Iterator[tuple[str, str]]:
    for pair in pairs:
        bar.update()
        yield pair


class Overlap:
    """Finds sentences that two splits share, in either language.

    What it keeps grows with the texts for evaluation, not with the training text.

    Args:
        held: The texts for evaluation, by split. Their blank lines are not compared.
    """

    def __init__(self, held: Mapping[str, ParallelText]) -> None:
        self.lines = {  # by split and side: fingerprint, its first line
            split: tuple(_first_lines(side) for side in (text.source, text.target))
            for split, text in held.items()
        }
        self.met: dict[str, tuple[set[int], set[int]]] = {split: (set(), set()) for split in held}

    def watch(self, pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        """Hand the pairs of the training text on, noting sentences that are held out."""
        pairs = iter(pairs)
        while block := list(itertools.islice(pairs, 10_000)):
            for side in (0, 1) if self.lines else ():
                marks = set(_marks(pair[side] for pair in block))
                for split, known in self.lines.items():
                    self.met[split][side].update(marks & known[side].keys())
            yield from block

    def notes(self) -> Iterator[tuple[str, str]]:
        """Go through the pairs of splits that share sentences.

        Yields:
            The split that a note is to stand with, and how many sentences of which split
            stand in the other, and the first of them.
        """
        for split in self.lines:
            if any(self.met[split]):
                yield "train", self._note(split, "the training text", self.met[split])
        for one, two in itertools.combinations(self.lines, 2):
            sides = zip(self.lines[one], self.lines[two], strict=True)
            shared = [first.keys() & second.keys() for first, second in sides]
            if any(shared):
                yield two, self._note(two, one, shared)

    def _note(self, split: str, other: str, shared: Sequence[Set[int]]) -> str:
        parts = [
            f"{len(marks)} different {name} sentences of {split} stand in {other} too, "
            f"the first in its line {min(known[mark] for mark in marks)}"
            for name, marks, known in zip(
                ("source", "target"), shared, self.lines[split], strict=True
            )
            if marks
        ]
        return "; ".join(parts)


def _marks(lines: Iterable[str]) -> list[int]:
    """Return the fingerprints of lines, without the blanks at their ends."""
    return [int(mark) for mark in fingerprints((line.strip(), "") for line in lines)]


def _first_lines(lines: Sequence[str]) -> dict[int, int]:
    """Return the fingerprints of all lines that are not blank, each with its first line."""
    found: dict[int, int] = {}
    for number, (line, mark) in enumerate(zip(lines, _marks(lines), strict=True), 1):
        if line.strip():
            found.setdefault(mark, number)
    return found


def remarks(train: ParallelText, held: Mapping[str, ParallelText]) -> Iterator[str]:
    """Say what is odd about texts in memory: sides that drift, sentences in two splits."""
    yield from filter(None, map(_drift, (train, *held.values())))
    overlap = Overlap(held)
    for _ in overlap.watch(train):
        pass
    yield from (note for _, note in overlap.notes())


def _learn(
    folder: Path, pieces: Sequence[Path], counts: Sequence[int], options: Preparation
) -> None:
    """Learn the vocabulary from the training text (section 5.1)."""
    lines, lowercase = sample_pieces(pieces, counts, SAMPLE), options.tokenizer == "bpe-lower"
    try:
        tokenizer = BPETokenizer.train(lines, options.vocabulary, lowercase=lowercase)
    except TokenizerError as error:
        raise CorpusError(f"--vocabulary {options.vocabulary}: {error}") from None
    save_tokenizer(tokenizer, folder / "tokenizer.json")


def _encode_all(
    folder: Path,
    options: Preparation,
    pool: ProcessPoolExecutor,
    progress: bool,
    say: Callable[[str], None],
) -> None:
    """Encode all pieces of which there is no shard yet."""
    (folder / "shards").mkdir(exist_ok=True)
    futures = []
    for piece in sorted((folder / "text").glob("*.txt")):
        shard = folder / "shards" / f"{piece.stem}.safetensors"
        if not shard.exists():
            arguments = piece, shard, folder / "tokenizer.json", options.max_len
            futures.append(pool.submit(encode_piece, *arguments))
    say(f"encoding {len(futures)} pieces")
    bar = tqdm(desc="encoding", total=len(futures), unit=" shards", disable=not progress)
    with bar:
        for future in as_completed(futures):
            future.result()
            bar.update()


def _summary(folder: Path) -> dict[str, Any]:
    """Return what each shard's header says."""
    return {
        path.stem: Shard(path).data for path in sorted((folder / "shards").glob("*.safetensors"))
    }


def _report_long(
    reports: dict[str, Any],
    shards: Mapping[str, Mapping[str, Any]],
    options: Preparation,
    say: Callable[[str], None],
) -> None:
    """Say what the shards leave out for its length, and enter it into the reports.

    Raises:
        CorpusError: Nothing is left of a split.
    """
    reason = f"more than {options.max_len} tokens"
    for split, report in reports.items():
        headers = [shards[name] for name in _shards_of(split, shards)]
        if not (long := sum(header["long"] for header in headers)):
            continue
        total, left = report["kept"], report["kept"] - long
        if not left:
            raise CorpusError(
                f"{split}: no pair is left, all {total} have {reason}; raise --max-len"
            )
        first = next(n * SHARD + h["first_long"] for n, h in enumerate(headers) if h["long"])
        report["kept"], report["dropped"][reason] = left, long
        report["first"][reason] = f"{split}, pair {first} of {total}"
        text = f"{split}: {long} of {total} pairs left out, {reason} (--max-len), "
        text += f"first pair {first}"
        if split != "train":
            text = f"warning: {text}; the loss is measured on the other {left} alone"
        say(text)


def _shards_of(split: str, names: Iterable[str]) -> list[str]:
    """Return the names of a split's shards, in order."""
    return [name for name in names if name.rpartition("-")[0] == split]


class Prepared:
    """A corpus as :func:`prepare` left it.

    Attributes:
        tokenizer: Of both languages.
        reports: What became of the pairs of each split: what a ``Report`` holds, and ``kept``.
        checksums: File names with the SHA-256 of their bytes, as ``ParallelText`` has them: the
            files of the training text, and the description of the folder.

    Raises:
        CorpusError: The folder is not prepared, or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            raw = (self.folder / "prepared.json").read_bytes()
            data = json.loads(raw)
            plan = data["plan"]
            if (found := plan["format"]) != FORMAT:
                raise CorpusError(
                    f"{self.folder}: prepared in format {found!r}, this version reads format "
                    f"{FORMAT}; delete the folder and prepare the corpus again"
                )
            self.options = Preparation(**plan["options"])
            self.reports: dict[str, Any] = data["reports"]
            self.shards: dict[str, dict[str, Any]] = data["shards"]
            files = itertools.chain(*plan["sources"]["train"])
            self.checksums = (
                *((entry["file"], entry["sha256"]) for entry in files),
                ("prepared.json", hashlib.sha256(raw).hexdigest()),
            )
            self.tokenizer = _own_tokenizer(self.folder / "tokenizer.json", data["tokenizer"])
        except CorpusError:
            raise
        except FileNotFoundError:
            raise CorpusError(
                f"{self.folder}: not prepared, or not to the end; run the command prepare"
            ) from None
        except OSError as error:
            raise CorpusError(f"{self.folder}: cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{self.folder / 'prepared.json'}: damaged ({error})") from None

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language."""
        return self.options.languages

    def text(self, split: str = "train", *, check: bool = False) -> ShardedText:
        """Return the token numbers of a split; ``check`` compares all checksums."""
        names = _shards_of(split, self.shards)
        if not names:
            raise CorpusError(f"{self.folder}: has no split {split!r}")
        paths = [self.folder / "shards" / f"{name}.safetensors" for name in names]
        text = ShardedText(paths, check=check)
        for name, shard in zip(names, text.shards, strict=True):
            if shard.data != self.shards[name]:
                raise CorpusError(f"{shard.path}: belongs to another corpus; prepare it again")
        return text

    def lines(self, split: str) -> ParallelText:
        """Return the text of a split that is for evaluation, every line of it."""
        first, second = (self.folder / f"{split}.{language}" for language in self.languages)
        text = read_parallel(
            first, second, languages=self.languages, name="prepared", split=split, drop_blank=False
        )
        return text


def _own_tokenizer(path: Path, sha256: str) -> Tokenizer:
    """Load a tokenizer, if it is the one that the corpus was encoded with.

    Raises:
        CorpusError: It is missing, or another.
    """
    try:
        found = sha256_of(path)
    except OSError as error:
        raise CorpusError(
            f"{path}: cannot be read: {error.strerror or error}; "
            "delete the folder and prepare the corpus again"
        ) from None
    if found != sha256:
        raise CorpusError(
            f"{path}: is damaged, or not the tokenizer that the corpus was encoded with; put that "
            "one back, or delete the folder and prepare the corpus again"
        )
    return load_tokenizer(path)
