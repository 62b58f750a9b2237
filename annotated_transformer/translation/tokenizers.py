# Written from book/translation/tokenizers.md: edit the chapter instead.
"""Words and sub-words, numbered."""

import contextlib
import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelJoin
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from annotated_transformer.notation import BOS, EOS, PAD, SPECIAL_TOKENS, UNK


class TokenizerError(ValueError):
    """A tokenizer that cannot be made, saved or loaded; the message says what to do."""


class Tokenizer(Protocol):
    """What the model's side needs of a tokenizer.

    Number 0 to 3 are the special tokens of the notation chapter; no text is ever
    encoded as padding, beginning or end.
    """

    def encode(self, text: str) -> list[int]:
        """Return the numbers of the tokens, without beginning and end."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; padding, beginning and end are left out."""

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return a label for every number, for figures."""

    def __len__(self) -> int:
        """Return the size of the vocabulary, special tokens included."""

    def to_json(self) -> str:
        """Return the tokenizer as JSON text: data alone, nothing that runs."""


def check_numbers(ids: Iterable[int], size: int) -> list[int]:
    """Return the numbers, or raise IndexError for one that is in no vocabulary of a size."""
    numbers = list(ids)
    for number in numbers:
        if not 0 <= number < size:
            raise IndexError(f"no token has number {number} in a vocabulary of {size}")
    return numbers


def normal_blanks(text: str) -> str:
    """Return the text with every run of white space as one blank."""
    return " ".join(text.split())


@functools.cache
def _spacy_tokenizer(language: str) -> Callable[[str], Any]:
    import spacy  # takes seconds to load, and sub-words do without it

    try:
        tokenizer: Callable[[str], Any] = spacy.blank(language).tokenizer
    except ImportError:
        raise TokenizerError(
            f"spaCy has no language {language!r}; use a code as de or en"
        ) from None
    return tokenizer


def cut(text: str, language: str) -> list[tuple[str, bool]]:
    """Cut a text into words: each with whether it is glued to the word before it."""
    document = _spacy_tokenizer(language)(normal_blanks(text))
    entries = []
    glued = False
    for token in document:
        entries.append((token.text, glued))
        glued = not token.whitespace_
    return entries


FORMAT = 1


def _to_json(data: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, **data}, ensure_ascii=False, separators=(",", ":"))


class WordTokenizer:
    """Words and marks as spaCy cuts them, in a vocabulary from the training text.

    A vocabulary entry is a word and whether it is *glued* to the word before it, as
    the comma is: so the blanks can be put back.
    """

    def __init__(self, language: str, entries: Sequence[tuple[str, bool]]) -> None:
        """Keep a vocabulary.

        Args:
            language: The code of a language that spaCy knows, as ``de``.
            entries: The words, the first one with number 4.
        """
        self.language = language
        self.entries = tuple(entries)
        self._ids = {entry: number for number, entry in enumerate(entries, len(SPECIAL_TOKENS))}
        self._cut = _spacy_tokenizer(language)

    @classmethod
    def train(cls, lines: Iterable[str], language: str, min_freq: int = 2) -> "WordTokenizer":
        """Make a vocabulary of the words that occur at least ``min_freq`` times.

        Give it the lines of the training split alone; the most frequent words come first.
        """
        counts = Counter(entry for line in lines for entry in cut(line, language))
        frequent = [(entry, count) for entry, count in counts.items() if count >= min_freq]
        frequent.sort(key=lambda item: (-item[1], item[0]))
        return cls(language, [entry for entry, _ in frequent])

    def encode(self, text: str) -> list[int]:
        """Return a number for each word; words outside the vocabulary become UNK."""
        return [self._ids.get(entry, UNK) for entry in cut(text, self.language)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; blanks stand where they stood, once each."""
        text = ""
        for number in check_numbers(ids, len(self)):
            if number in (PAD, BOS, EOS):
                continue
            word, glued = self._entry(number)
            text += word if glued or not text else f" {word}"
        return text

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the words."""
        return [self._entry(number)[0] for number in check_numbers(ids, len(self))]

    def _entry(self, number: int) -> tuple[str, bool]:
        first = len(SPECIAL_TOKENS)
        if number < first:
            return SPECIAL_TOKENS[number], False
        return self.entries[number - first]

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return len(SPECIAL_TOKENS) + len(self.entries)

    def to_json(self) -> str:
        """Return the tokenizer as JSON text."""
        return _to_json({"kind": "words", "language": self.language, "entries": self.entries})


def _byte_level(model: BPE) -> Backend:
    backend = Backend(model)
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelJoin()
    return backend


BROKEN = "ï¿½"  # the bytes of U+FFFD, which stands for broken letters, and is one itself


class BPETokenizer:
    """Sub-words by byte pair encoding on bytes: no text is outside the vocabulary.

    Its first 256 entries after the special tokens are the bytes; each later entry joins
    two earlier ones. A blank before a word belongs to the word.
    """

    def __init__(self, merges: Sequence[tuple[str, str]], *, lowercase: bool = False) -> None:
        """Build the vocabulary.

        Args:
            merges: The merges, in the order they were learned.
            lowercase: Encode text in lower case; it comes back without its capitals.
        """
        self.merges, self.lowercase = tuple(merges), lowercase
        alphabet = sorted(ByteLevel.alphabet())
        pieces = [*alphabet, *(first + second for first, second in merges)]
        self.vocabulary = tuple(dict.fromkeys(pieces))  # two merges may give one piece
        ids = {token: number for number, token in enumerate(self.vocabulary)}
        self._backend = _byte_level(BPE(ids, list(merges)))

    @classmethod
    def train(
        cls, lines: Iterable[str], vocab_size: int, *, lowercase: bool = False
    ) -> "BPETokenizer":
        """Learn a vocabulary of exactly ``vocab_size`` entries.

        Args:
            lines: The text of the training split alone; for a vocabulary that both
                languages share, the lines of both.
            vocab_size: Special tokens included; at least 260.
            lowercase: Learn from, and later encode, the text in lower case.

        Raises:
            TokenizerError: If the size is below 260, or the text has not enough pairs.
        """
        smallest = len(SPECIAL_TOKENS) + 256
        if vocab_size < smallest:
            raise TokenizerError(
                f"a vocabulary of {vocab_size} is too small; bytes and special "
                f"tokens alone take {smallest}"
            )
        trainer = BpeTrainer(
            vocab_size=vocab_size - len(SPECIAL_TOKENS),
            initial_alphabet=ByteLevel.alphabet(),
            min_frequency=1,
            show_progress=False,
        )
        learner = _byte_level(BPE())
        read = (" " + (line.lower() if lowercase else line) for line in lines)
        learner.train_from_iterator(read, trainer)
        model = json.loads(learner.to_str())["model"]
        merges = [(first, second) for first, second in model["merges"]]
        tokenizer = cls(merges, lowercase=lowercase)
        if len(tokenizer) != vocab_size:
            raise TokenizerError(
                f"the text gives a vocabulary of {len(tokenizer)} at most, not "
                f"{vocab_size}; ask for a smaller one or give more text"
            )
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the numbers of the sub-words; any text can be encoded."""
        if not text:
            return []
        if self.lowercase:
            text = text.lower()
        # One blank in front: a word is the same token at the start and inside a sentence.
        ids = self._backend.encode(" " + text).ids
        return [number + len(SPECIAL_TOKENS) for number in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text, exactly as it was encoded, or else in lower case."""
        pieces: list[str] = []
        run: list[int] = []
        for number in [*check_numbers(ids, len(self)), PAD]:
            if number >= len(SPECIAL_TOKENS):
                run.append(number - len(SPECIAL_TOKENS))
                continue
            pieces.append(self._backend.decode(run))
            run = []
            if number == UNK:
                pieces.append(f" {SPECIAL_TOKENS[UNK]}")
        return "".join(pieces).removeprefix(" ")

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the sub-words; a leading blank is shown as ``▁``.

        A letter that several tokens share stands in the label of the last of them.
        """
        labels = []
        part: list[int] = []  # tokens of a letter that is not complete
        for number in check_numbers(ids, len(self)):
            if number < len(SPECIAL_TOKENS):
                labels.append(SPECIAL_TOKENS[number])
                part = []
                continue
            part.append(number - len(SPECIAL_TOKENS))
            label = self._backend.decode(part)
            broken = label.endswith("\ufffd") and not self._spelled(part).endswith(BROKEN)
            if broken and len(part) < 4:  # no letter has more than 4 bytes
                labels.append("")
                continue
            labels.append(label)
            part = []
        return [label.replace(" ", "▁") for label in labels]

    def _spelled(self, part: Sequence[int]) -> str:
        return "".join(self.vocabulary[number] for number in part)

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return len(SPECIAL_TOKENS) + len(self.vocabulary)

    def to_json(self) -> str:
        """Return the tokenizer as JSON text: its merges, and whether there are capitals."""
        kind = "bpe-lower" if self.lowercase else "bpe"
        return _to_json({"kind": kind, "merges": self.merges})


def tokenizer_from_json(text: str) -> WordTokenizer | BPETokenizer:
    """Rebuild a tokenizer from what ``to_json`` returned.

    Raises:
        TokenizerError: If the text is damaged, or in a format that this version lacks.
    """
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise TokenizerError(f"format {data['format']!r} is unknown; update the package")
        if data["kind"] == "words":
            entries = [(str(word), bool(glued)) for word, glued in data["entries"]]
            return WordTokenizer(str(data["language"]), entries)
        if data["kind"] in ("bpe", "bpe-lower"):
            merges = [(str(first), str(second)) for first, second in data["merges"]]
            return BPETokenizer(merges, lowercase=data["kind"] == "bpe-lower")
        raise TokenizerError(f"kind {data['kind']!r} is unknown; update the package")
    except TokenizerError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise TokenizerError(f"damaged ({type(error).__name__}: {error})") from None


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    """Write a tokenizer; the file is there whole, or not at all."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(tokenizer.to_json() + "\n")
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the name without the content
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise TokenizerError(f"{path}: cannot be written: {error.strerror or error}") from None


def load_tokenizer(path: str | Path) -> WordTokenizer | BPETokenizer:
    """Read a tokenizer that ``save_tokenizer`` wrote.

    Raises:
        TokenizerError: If the file is missing or damaged.
    """
    try:
        return tokenizer_from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, TokenizerError) as error:
        raise TokenizerError(
            f"{path}: {error}; train again, or take the file from a copy"
        ) from None
