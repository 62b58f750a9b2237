"""Cleaned text in files, and what is made of it in other processes: sub-words, and shards."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from annotated_transformer.data.files import CorpusError, write_atomically
from annotated_transformer.data.shards import token_type, write_shard
from annotated_transformer.translation.tokenizers import (
    BPETokenizer,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
    save_tokenizer,
)


def write_text(pairs: Iterable[tuple[str, str]], folder: Path, split: str, size: int) -> None:
    """Write cleaned pairs into files of ``size`` pairs, source and target line in turn."""
    pairs = iter(pairs)
    for number in itertools.count():
        part = list(itertools.islice(pairs, size))
        if not part:
            return
        text = "".join(f"{source}\n{target}\n" for source, target in part)
        write_atomically(folder / f"{split}-{number:05d}.txt", text.encode())


def read_text(path: Path) -> Iterator[tuple[str, str]]:
    """Go through the pairs of a file that ``write_text`` wrote."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for source, target in zip(file, file, strict=True):
            yield source[:-1], target[:-1]


def learn_subwords(
    folder: Path, tokenizer: Path, vocabulary: int, *, step: int = 1, lowercase: bool = False
) -> None:
    """Learn the sub-words of both languages from the training text alone (§5.1).

    Args:
        folder: Where ``write_text`` put the training text.
        tokenizer: The file to write.
        vocabulary: Number of sub-words.
        step: Take every so many-th pair, so that each part of the corpus has its share.
        lowercase: Learn from the text in lower case.

    Raises:
        CorpusError: There is too little text for so many sub-words.
    """
    pairs = itertools.chain.from_iterable(map(read_text, sorted(folder.glob("train-*.txt"))))
    lines = itertools.chain.from_iterable(itertools.islice(pairs, 0, None, step))
    try:
        learned = BPETokenizer.train(lines, vocabulary, lowercase=lowercase)
    except TokenizerError as error:
        raise CorpusError(f"--vocabulary {vocabulary}: {error}") from None
    save_tokenizer(learned, tokenizer)


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path, _: int) -> Tokenizer:
    """Load a tokenizer once in a process: memory is lost with each that is loaded and used."""
    return load_tokenizer(path)


def encode_shard(text: Path, shard: Path, tokenizer: Path, max_len: int) -> None:
    """Encode a file of text into a shard, without the pairs of more than ``max_len`` tokens.

    The shard's header says how many these are, ``long``, and which is the first of them,
    ``first_long``, from 1 within the file; 0 if there is none.

    Args:
        text: The file that ``write_text`` wrote.
        shard: The file to write.
        tokenizer: The tokenizer's file; both sides share it.
        max_len: Most tokens of a sentence, special ones included.
    """
    shared = _tokenizer(tokenizer, tokenizer.stat().st_mtime_ns)
    dtype = token_type(len(shared))
    pairs, long = [], []
    for number, (source, target) in enumerate(read_text(text), 1):
        pair = shared.encode(source), shared.encode(target)
        if max(map(len, pair)) < max_len:  # the end symbol needs a place
            # Arrays, for lists would take eight times the memory.
            pairs.append((np.array(pair[0], dtype=dtype), np.array(pair[1], dtype=dtype)))
        else:
            long.append(number)
    write_shard(shard, pairs, len(shared), long=len(long), first_long=min(long, default=0))


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start_worker(parent: int) -> None:
    """Leave Ctrl-C to the parent, and exit when it is gone, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
