"""A prepared corpus: how it was made, and how it is read. ``prepare`` makes it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from annotated_transformer.data.corpora import (
    ParallelText,
    Preparation,
    language_codes,
    read_parallel,
)
from annotated_transformer.data.files import CorpusError, digest_of, parse_json
from annotated_transformer.data.shards import PREPARE_AGAIN, Shard, TokenPairs
from annotated_transformer.data.text import reading
from annotated_transformer.translation.tokenizers import BPETokenizer, Tokenizer, load_tokenizer

FORMAT = 2  # of the folder
MAX_LEN = (1 << 16) - 1  # tokens; longer lines are no sentences, but a mistake
REPORT = {"pairs": int, "kept": int, "dropped": dict, "first": dict, "notes": list}


def shards_of(split: str, names: Iterable[str]) -> list[str]:
    """Return the names of a split's shards, such as ``train-00000``, in order."""
    return [name for name in names if name.rpartition("-")[0] == split]


def check_options(options: Preparation) -> None:
    """Check what can be known of options alone.

    Raises:
        CorpusError: One is of a wrong type, or cannot be meant.
    """
    smallest = len(BPETokenizer([]))
    for name, usual in asdict(Preparation()).items():
        value, remedy = getattr(options, name), ""
        if not isinstance(value, (type(usual), int)):
            remedy = f"give one such as {usual!r}"
        elif name == "tokenizer" and value not in ("bpe", "bpe-lower"):
            remedy = "give bpe or bpe-lower"
        elif name == "vocabulary" and value < smallest:
            remedy = f"must be at least {smallest}, the bytes and the special tokens"
        elif name == "max_len" and not 2 <= value <= MAX_LEN:
            remedy = f"must be at least 2, a token and the end of the sentence, at most {MAX_LEN}"
        if remedy:
            raise CorpusError(f"--{name.replace('_', '-')} {value}: {remedy}")
    language_codes(options.pair)


def checked_reports(data: Any, splits: Iterable[str] = ()) -> dict[str, Any]:
    """Return reports that were read from a file, if they are on these splits, at least.

    Raises:
        TypeError, LookupError, AttributeError: They are not.
    """
    for report in [*map(data.__getitem__, splits), *data.values()]:
        if not all(isinstance(report[name], kind) for name, kind in REPORT.items()):
            raise TypeError("a report of wrong types")
    return dict(data)


class Prepared:
    """A corpus as ``prepare`` left it.

    Attributes:
        folder: Where it is.
        options: How it was prepared.
        tokenizer: Of both languages.
        reports: What became of the pairs of each split: a ``CleaningReport``, and ``kept``.
        shards: The header of each shard, by name.
        checksums: File names with the SHA-256 of their bytes, as ``ParallelText`` has them: the
            files of the training text, and the description of the folder.

    Raises:
        CorpusError: The folder is not prepared, of another format, or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "prepared.json"
        with reading(path):
            if not path.exists():
                raise CorpusError(
                    f"{self.folder}: not prepared, or not to the end; run the command prepare"
                )
            raw = path.read_bytes()
        try:
            data = parse_json(raw)
            plan = data["plan"]
            if plan["format"] != FORMAT:
                raise ValueError(f"format {plan['format']!r}, this version reads {FORMAT}")
            self.options = Preparation(**plan["options"])
            check_options(self.options)
            self.reports = checked_reports(data["reports"])
            self.shards: dict[str, dict[str, Any]] = dict(data["shards"])
            files = itertools.chain(*plan["sources"]["train"])
            self.checksums = (
                *((str(entry["file"]), str(entry["sha256"])) for entry in files),
                ("prepared.json", hashlib.sha256(raw).hexdigest()),
            )
            tokenizer = data["tokenizer"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CorpusError(
                f"{path}: damaged, or of another version ({error}); {PREPARE_AGAIN}"
            ) from None
        self.tokenizer = _verified_tokenizer(self.folder / "tokenizer.json", tokenizer)

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language."""
        return self.options.languages

    def tokens(self, split: str = "train", *, verify: bool = False) -> TokenPairs:
        """Return the token numbers of a split.

        Args:
            split: Its name.
            verify: Compare the checksums of all shards.

        Raises:
            CorpusError: There is no such split, or a shard is missing, damaged or another's.
        """
        names = shards_of(split, self.shards)
        if not names:
            raise CorpusError(f"{self.folder}: has no split {split!r}")
        shards = [Shard.open(self.folder / "shards" / f"{name}.safetensors") for name in names]
        for name, shard in zip(names, shards, strict=True):
            if shard.header != self.shards[name]:
                raise CorpusError(f"{shard.path}: belongs to another corpus; prepare it again")
        return TokenPairs.from_shards(shards, verify=verify)

    def text(self, split: str) -> ParallelText:
        """Return the text of a split that is for evaluation, every line of it."""
        first, second = (self.folder / f"{split}.{language}" for language in self.languages)
        return read_parallel(
            first, second, languages=self.languages, name="prepared", split=split, drop_blank=False
        )


def _verified_tokenizer(path: Path, sha256: str) -> Tokenizer:
    """Load a tokenizer, if it is the one that the corpus was encoded with.

    Another one of the same size would fit the token numbers, and turn them into other words.
    """
    with reading(path):
        found = digest_of(path)
    if found != sha256:
        raise CorpusError(
            f"{path}: is damaged, or not the tokenizer that the corpus was encoded with; put that "
            f"one back, or {PREPARE_AGAIN}"
        )
    return load_tokenizer(path)
