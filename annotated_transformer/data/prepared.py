"""Reading of a corpus that ``prepare`` has made."""

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
from annotated_transformer.data.files import CorpusError, digest_of, parse_object, regular_file
from annotated_transformer.data.shards import PREPARE_AGAIN, Shard, TokenPairs
from annotated_transformer.data.text import reading_errors
from annotated_transformer.translation.tokenizers import BPETokenizer, load_tokenizer

FORMAT = 3  # of the folder
MAX_LEN = (1 << 16) - 1  # tokens; longer lines are mistakes, not sentences
REPORT = {"pairs": int, "kept": int, "dropped": dict, "first": dict, "notes": list}


def shards_of(split: str, names: Iterable[str]) -> list[str]:
    """Return the names of a split's shards, such as ``train-00000``, in order."""
    return [name for name in names if name.rpartition("-")[0] == split]


def check_options(options: Preparation) -> None:
    """Check the options on their own.

    Raises:
        CorpusError: An option has a wrong type or an invalid value.
    """
    smallest = len(BPETokenizer([]))
    for name, usual in asdict(Preparation()).items():
        value, remedy = getattr(options, name), ""
        kinds: Any = str if isinstance(usual, str) else (type(usual), int)
        if not isinstance(value, kinds):
            remedy = f"give a value such as {usual!r}"
        elif name == "tokenizer" and value not in ("bpe", "bpe-lower"):
            remedy = "give bpe or bpe-lower"
        elif name == "vocabulary" and value < smallest:
            remedy = f"must be at least {smallest}, for the bytes and special tokens"
        elif name == "max_len" and not 2 <= value <= MAX_LEN:
            remedy = f"must be at least 2, for a token and the end symbol, and at most {MAX_LEN}"
        if remedy:
            raise CorpusError(f"--{name.replace('_', '-')} {value}: {remedy}")
    language_codes(options.pair)


def checked_reports(data: Any, splits: Iterable[str] = ()) -> dict[str, Any]:
    """Return the reports read from a file, after checking their types and that splits exist.

    Raises:
        TypeError, LookupError, AttributeError: A report is missing or has wrong types.
    """
    for report in [*map(data.__getitem__, splits), *data.values()]:
        if not all(isinstance(report[name], kind) for name, kind in REPORT.items()):
            raise TypeError("a report has wrong types")
    return dict(data)


class Prepared:
    """A corpus made by ``prepare``.

    Attributes:
        folder: Its folder.
        options: The options it was prepared with.
        tokenizer: The tokenizer shared by both languages.
        reports: For each split the fields of its ``CleaningReport``, and ``kept``.
        shards: The header of each shard, by name.
        checksums: File names with the SHA-256 of their bytes, as in ``ParallelText``: the
            files of the training text and the description of the folder.

    Raises:
        CorpusError: The folder is not prepared, has another format, or is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "prepared.json"
        with reading_errors(path):
            if not path.exists():
                raise CorpusError(f"{self.folder}: not prepared completely; run prepare first")
            raw = regular_file(path).read_bytes()
        try:
            data = parse_object(raw)
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
            told = f"{path}: damaged, or from another version ({error})"
            raise CorpusError(f"{told}; {PREPARE_AGAIN}") from None
        path = self.folder / "tokenizer.json"
        with reading_errors(path):
            found = digest_of(path)
        if found != tokenizer:  # one of the same size would take the ids for other words
            told = f"{path}: is damaged, or not the tokenizer that the corpus was encoded with"
            raise CorpusError(f"{told}; restore that one, or {PREPARE_AGAIN}")
        self.tokenizer = load_tokenizer(path)

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language."""
        return self.options.languages

    def tokens(self, split: str = "train", *, verify: bool = False) -> TokenPairs:
        """Return the token ids of a split.

        Args:
            split: Name of the split.
            verify: Verify the checksums of all shards.

        Raises:
            CorpusError: There is no such split, or a shard is missing, damaged or foreign.
        """
        names = shards_of(split, self.shards)
        if not names:
            raise CorpusError(f"{self.folder}: has no split {split!r}")
        shards = [Shard.open(self.folder / "shards" / f"{name}.safetensors") for name in names]
        for name, shard in zip(names, shards, strict=True):
            if shard.header != self.shards[name]:
                raise CorpusError(f"{shard.path}: belongs to another corpus; {PREPARE_AGAIN}")
        return TokenPairs.from_shards(shards, verify=verify)

    def text(self, split: str) -> ParallelText:
        """Return the text of an evaluation split, with every line."""
        first, second = (self.folder / f"{split}.{language}" for language in self.languages)
        return read_parallel(
            first, second, languages=self.languages, name="prepared", split=split, drop_blank=False
        )
