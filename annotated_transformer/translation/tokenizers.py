# Written from book/translation/tokenizers.md: edit the chapter instead.
"""Words and sub-words, numbered."""

import functools
import itertools
import json
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
    """The methods that models, searches and figures need of a tokenizer.

    Numbers 0 to 3 are the special tokens of the notation chapter; no text is ever
    encoded as padding, beginning or end.
    """

    def encode(self, text: str) -> list[int]:
        """Return the ids of the tokens, without those of beginning and end."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; padding, beginning and end are left out."""

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return a label for every id, for figures."""

    def __len__(self) -> int:
        """Return the size of the vocabulary, special tokens included."""

    def to_json(self) -> str:
        """Return the tokenizer as JSON text: data alone, nothing that runs."""


Entry = tuple[str, bool]  # a word, and whether it is glued to the word before it


def normal_blanks(text: str) -> str:
    """Return the text with every run of white space as one space."""
    return " ".join(text.split())


@functools.cache
def spacy_tokenizer(language: str) -> Callable[[str], Any]:
    """Return spaCy's rules for splitting a language into words; they need no model."""
    import spacy  # takes seconds to load, and sub-words do without it

    try:
        if "." in language:  # a file may not choose what spaCy imports
            raise ImportError
        tokenizer: Callable[[str], Any] = spacy.blank(language).tokenizer
    except ImportError:
        message = f"spaCy has no language {language!r}; use a code as de or en"
        raise TokenizerError(message) from None
    return tokenizer


def split_words(text: str, language: str) -> list[Entry]:
    """Split a text into words, each with whether no space stands before it."""
    found = list(spacy_tokenizer(language)(normal_blanks(text)))
    glued = [False, *(not token.whitespace_ for token in found)]  # to the word before
    return [(token.text, tied) for token, tied in zip(found, glued, strict=False)]


def frequent_words(lines: Iterable[str], language: str, min_freq: int) -> list[Entry]:
    """Return the words that occur at least ``min_freq`` times, the most frequent first."""
    counts = Counter(entry for line in lines for entry in split_words(line, language))
    frequent = [item for item in counts.items() if item[1] >= min_freq]
    return [entry for entry, _ in sorted(frequent, key=lambda item: (-item[1], item[0]))]


FORMAT, FIRST = 1, len(SPECIAL_TOKENS)  # of the JSON text; the number of the first entry


class Numbered:
    """A vocabulary: the special tokens, then ``entries``, whose ids begin with 4."""

    entries: tuple[Any, ...]

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return FIRST + len(self.entries)

    def checked(self, ids: Iterable[int]) -> list[int]:
        """Return the ids as a list; raise IndexError for one that is not in the vocabulary."""
        numbers = list(ids)
        for number in numbers:
            if not 0 <= number < len(self):
                raise IndexError(f"no token has number {number} in a vocabulary of {len(self)}")
        return numbers


def _to_json(data: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, **data}, ensure_ascii=False, separators=(",", ":"))


class WordTokenizer(Numbered):
    """Words as spaCy splits text in a language such as ``de``; ``entries`` have ids from 4."""

    def __init__(self, language: str, entries: Sequence[Entry]) -> None:
        self.language, self.entries = language, tuple(entries)
        self._ids = {entry: number for number, entry in enumerate(entries, FIRST)}
        self._all = (*((special, False) for special in SPECIAL_TOKENS), *entries)
        spacy_tokenizer(language)  # an unknown language is refused here

    @classmethod
    def train(cls, lines: Iterable[str], language: str, min_freq: int = 2) -> "WordTokenizer":
        """Take the words that occur at least ``min_freq`` times in the training split."""
        return cls(language, frequent_words(lines, language, min_freq))

    def encode(self, text: str) -> list[int]:
        """Return a number for each word; words outside the vocabulary become UNK."""
        return [self._ids.get(entry, UNK) for entry in split_words(text, self.language)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text, with a space where there was white space, and before unknown words."""
        entries = (self._all[n] for n in self.checked(ids) if n not in (PAD, BOS, EOS))
        return "".join(word if glued else f" {word}" for word, glued in entries).removeprefix(" ")

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the words."""
        return [self._all[number][0] for number in self.checked(ids)]

    def to_json(self) -> str:
        """Return the tokenizer as JSON text."""
        return _to_json({"kind": "words", "language": self.language, "entries": self.entries})


def _byte_level(model: BPE) -> Backend:
    backend = Backend(model)
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelJoin()
    return backend


def learn_bpe(lines: Iterable[str], size: int) -> list[tuple[str, str]]:
    """Learn the merges of a vocabulary of ``size``, or of fewer if the text has no more pairs.

    Raises:
        TokenizerError: The size has no room for bytes and special tokens.
    """
    if size < (smallest := FIRST + 256):
        raise TokenizerError(
            f"a vocabulary of {size} is too small; bytes and special tokens alone take {smallest}"
        )
    learner, alphabet = _byte_level(BPE()), ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=size - FIRST, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    learner.train_from_iterator((" " + line for line in lines), trainer)
    return [(first, second) for first, second in json.loads(learner.to_str())["model"]["merges"]]


class SubwordVocabulary(Numbered):
    """The vocabulary of byte pair encoding: bytes, then what each merge gives.

    Args:
        merges: The merges, in the order they were learned.
        lowercase: Encode text in lower case; it comes back without its capitals.
    """

    def __init__(self, merges: Sequence[tuple[str, str]], *, lowercase: bool = False) -> None:
        self.merges, self.lowercase = tuple(merges), lowercase
        pieces = [*sorted(ByteLevel.alphabet()), *(first + second for first, second in merges)]
        self.entries = tuple(dict.fromkeys(pieces))  # two merges may give one piece
        ids = {token: number for number, token in enumerate(self.entries)}
        self._backend = _byte_level(BPE(ids, list(merges)))

    def encode(self, text: str) -> list[int]:
        """Return the ids of the sub-words; any text can be encoded."""
        if not text:
            return []
        # One space in front: a word is the same token at the start and inside a sentence.
        ids = self._backend.encode(" " + (text.lower() if self.lowercase else text)).ids
        return [number + FIRST for number in ids]

    def to_json(self) -> str:
        """Return the tokenizer as JSON text: its merges, and whether there are capitals."""
        kind = "bpe-lower" if self.lowercase else "bpe"
        return _to_json({"kind": kind, "merges": self.merges})


class BPETokenizer(SubwordVocabulary):
    """Sub-words by byte pair encoding on bytes: no text is outside the vocabulary."""

    @classmethod
    def train(
        cls, lines: Iterable[str], vocab_size: int, *, lowercase: bool = False
    ) -> "BPETokenizer":
        """Learn a vocabulary of exactly ``vocab_size`` entries, special tokens included.

        Give it the training split alone; for a vocabulary that both languages share, the lines
        of both. With ``lowercase`` it learns from text in lower case, and encodes as such.

        Raises:
            TokenizerError: If the size is below 260, or the text has not enough pairs.
        """
        read = (line.lower() if lowercase else line for line in lines)
        tokenizer = cls(learn_bpe(read, vocab_size), lowercase=lowercase)
        if (most := len(tokenizer)) != vocab_size:
            enough = f"the text gives a vocabulary of {most} at most, not {vocab_size}"
            raise TokenizerError(f"{enough}; ask for a smaller one or give more text")
        return tokenizer

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text as it was encoded, or, with ``lowercase``, in lower case."""
        return spelled_out(self.checked(ids), self._backend)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the sub-words; a leading space is shown as ``▁``."""
        return subword_labels(self.checked(ids), self.entries, self._backend)


BROKEN = "ï¿½"  # the bytes of U+FFFD, which stands for broken letters, and is one itself


def spelled_out(numbers: list[int], backend: Backend) -> str:
    """Decode ids with the library ``tokenizers``, each run between special tokens alone."""
    text = ""
    for special, run in itertools.groupby(numbers, key=lambda number: number < FIRST):
        part = list(run)
        unknown = part.count(UNK) * f" {SPECIAL_TOKENS[UNK]}"
        text += unknown if special else backend.decode([number - FIRST for number in part])
    return text.removeprefix(" ")


def subword_labels(numbers: list[int], entries: Sequence[str], backend: Backend) -> list[str]:
    """Return a label for every id; the last of several tokens of one letter shows it."""
    labels: list[str] = []
    part: list[int] = []  # tokens of a letter that is not complete
    for number in numbers:
        if number < FIRST:
            labels, part = [*labels, SPECIAL_TOKENS[number]], []
            continue
        part.append(number - FIRST)
        label, bytes_ = backend.decode(part), "".join(entries[one] for one in part)
        broken = label.endswith("\ufffd") and not bytes_.endswith(BROKEN)
        if broken and len(part) < 4:  # no letter has more than 4 bytes
            labels.append("")
        else:
            labels, part = [*labels, label.replace(" ", "▁")], []
    return labels


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


def load_tokenizer(path: str | Path) -> WordTokenizer | BPETokenizer:
    """Read a tokenizer from a file with its JSON text.

    Raises:
        TokenizerError: If the file is missing or damaged.
    """
    try:
        return tokenizer_from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, TokenizerError) as error:
        raise TokenizerError(f"{path}: {error}; train again, or restore a copy") from None
