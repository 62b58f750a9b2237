"""A prepared corpus: how it was made, and how it is read. ``prepare`` makes it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from annotated_transformer.data.corpora import ParallelText, read_parallel
from annotated_transformer.data.files import CorpusError, sha256_of
from annotated_transformer.data.preparation import Preparation
from annotated_transformer.data.shards import PREPARE_AGAIN, Shard, TokenPairs
from annotated_transformer.translation.tokenizers import Tokenizer, load_tokenizer

FORMAT = 2  # of the folder


def shards_of(split: str, names: Iterable[str]) -> list[str]:
    """Return the names of a split's shards, such as ``train-00000``, in order."""
    return [name for name in names if name.rpartition("-")[0] == split]


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
        try:
            raw = (self.folder / "prepared.json").read_bytes()
            data = json.loads(raw)
            plan = data["plan"]
            if (found := plan["format"]) != FORMAT:
                raise CorpusError(
                    f"{self.folder}: prepared in format {found!r}, this version reads format "
                    f"{FORMAT}; {PREPARE_AGAIN}"
                )
            self.options = Preparation(**plan["options"])
            self.reports: dict[str, Any] = data["reports"]
            self.shards: dict[str, dict[str, Any]] = data["shards"]
            files = itertools.chain(*plan["sources"]["train"])
            self.checksums = (
                *((entry["file"], entry["sha256"]) for entry in files),
                ("prepared.json", hashlib.sha256(raw).hexdigest()),
            )
            self.tokenizer = _verified_tokenizer(self.folder / "tokenizer.json", data["tokenizer"])
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
    try:
        found = sha256_of(path)
    except OSError as error:
        raise CorpusError(
            f"{path}: cannot be read: {error.strerror or error}; {PREPARE_AGAIN}"
        ) from None
    if found != sha256:
        raise CorpusError(
            f"{path}: is damaged, or not the tokenizer that the corpus was encoded with; put that "
            f"one back, or {PREPARE_AGAIN}"
        )
    return load_tokenizer(path)
