"""Parallel text from files, from known corpora on the network, and from the grammar."""

import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from annotated_transformer.data.archives import locate_file
from annotated_transformer.data.downloads import RemoteFile, cache_folder, fetch_file
from annotated_transformer.data.files import CorpusError, digest_of_lines
from annotated_transformer.data.grammar import GRAMMAR_SIZES, grammar_pairs
from annotated_transformer.data.text import PACKED_NAME, Digest, read_lines, stream_lines


@dataclass(frozen=True)
class ParallelText:
    """Sentences and their translations, with the metadata for a record."""

    name: str  #: The corpus, such as ``grammar``, ``multi30k`` or ``files``.
    split: str  #: The part of it, such as ``train``, ``val`` or ``test``.
    languages: tuple[str, str]  #: Source and target language.
    source: tuple[str, ...]  #: The sentences, untokenized.
    target: tuple[str, ...]  #: Their translations, in the same order.
    origin: str  #: Where the text came from, in one line.
    checksums: tuple[tuple[str, str], ...]  #: File names with the SHA-256 of their bytes.
    #: The line numbers, from 1, of pairs dropped because a side was blank; ``line_note`` says which
    #: lines of a file are numbered. Numbers continue across several files.
    blank: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()  #: Line numbers of the pairs, where they are not in order.

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.source)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Iterate over the pairs."""
        return iter(zip(self.source, self.target, strict=True))

    def head(self, size: int) -> "ParallelText":
        """Return the first ``size`` pairs, without the record of dropped lines."""
        source, target, numbers = self.source[:size], self.target[:size], self.line_numbers()[:size]
        return replace(self, source=source, target=target, blank=(), numbers=numbers)

    def line_numbers(self) -> tuple[int, ...]:
        """Return each pair's line number in its files, counting blank lines that were dropped."""
        blank = set(self.blank)
        lines = range(1, len(self) + len(blank) + 1)
        return self.numbers or tuple(n for n in lines if n not in blank)

    def report(self) -> str:
        """Return how many pairs were dropped and the first of them; empty if none were."""
        if not self.blank:
            return ""
        dropped, first = len(self.blank), ", ".join(map(str, self.blank[:5]))
        lines = f"line{'s' * (dropped > 1)} {first}{', ...' * (dropped > 5)}{self.line_note(0)}"
        return f"{dropped} of {len(self) + dropped} pairs dropped with a blank side: {lines}"

    def line_note(self, side: int) -> str:
        """Return a note on which lines of a side are numbered; empty if all are, in one file."""
        files = self.checksums[side::2]
        return line_note(files[0][0]) if len(files) == 1 else " (of all files together)"


PAIR = re.compile(r"([A-Za-z]{2,8})-([A-Za-z]{2,8})")


def language_codes(pair: str) -> tuple[str, str]:
    """Split ``de-en`` into the codes of source and target language.

    Raises:
        CorpusError: It is not two different codes of two to eight letters each.
    """
    match = PAIR.fullmatch(pair)
    if match is None or match[1].lower() == match[2].lower():
        remedy = "give two different languages of two to eight letters, such as de-en"
        raise CorpusError(f"--pair {pair!r}: {remedy}")
    return match[1], match[2]


@dataclass(frozen=True)
class Preparation:
    """The options of preparing a corpus."""

    pair: str = "de-en"
    """Source and target language, such as de-en."""
    tokenizer: Literal["bpe", "bpe-lower"] = "bpe"
    """Byte-pair encoding of the text, cased or lower-cased."""
    vocabulary: int = field(default=37_000, metadata={"least": 1, "most": 65_535})
    """Number of sub-words to learn, shared by both languages."""
    max_len: int = 256
    """Maximum tokens of a sentence, including special ones; longer pairs are dropped."""
    max_words: int = field(default=200, metadata={"least": 1, "most": 65_535})
    """Maximum words of a training sentence."""
    max_ratio: float = field(default=4.0, metadata={"above": 0, "below": 65_536})
    """Maximum ratio of the lengths of a training pair, in words."""
    keep_duplicates: bool = False
    """Keep duplicate training pairs."""
    allow_drift: bool = False
    """Continue even if the two sides seem misaligned by some lines."""

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language."""
        return language_codes(self.pair)


TAGS = re.compile(
    r"""<doc\b[^<>]*?\bdocid\s*=\s*(?P<doc>"[^"<>]*"|'[^'<>]*'|[^\s"'<>]+)|"""
    r"""<seg\b[^<>]*?\bid\s*=\s*["']?(?P<id>[^\s"'<>]+)["']?[^<>]*>(?P<text>.*?)</seg\s*>|"""
    r"""(?P<open></?seg\b)""",
    re.DOTALL | re.IGNORECASE,
)
CHARACTERS = re.compile(r"&#?\w+;")  # without a semicolon, & is part of the text


def read_segments(path: str | Path, digest: Digest | None = None) -> list[tuple[str, str]]:
    """Read the segments of a test set in XML or SGML, in order.

    No XML parser is used, because older sets have a bare ``&``, and a parser can be tricked into
    reading other files.

    Returns:
        For each segment its name ``document/number`` and its text without line ends.

    Raises:
        CorpusError: The file cannot be read; it has no segment, an open one, or one name twice.
    """
    text = "\n".join(read_lines(path, digest=digest))
    found: dict[str, str] = {}
    document = ""
    for tag in TAGS.finditer(text):
        if tag["doc"] is not None:
            document = tag["doc"].strip("\"'")
            continue
        broken = tag["open"] or "<seg" in tag["text"].lower()
        if broken or (name := f"{document}/{tag['id']}") in found:
            place = f"{path}, line {text.count(chr(10), 0, tag.start()) + 1}"
            if broken:
                raise CorpusError(f"{place}: a segment lacks a start or end tag; download it again")
            raise CorpusError(f"{place}: segment {name} occurs twice")
        plain = CHARACTERS.sub(lambda name: html.unescape(name[0]), tag["text"])
        found[name] = " ".join(plain.split("\n")).strip()
    if not found:
        raise CorpusError(f"{path}: has no <seg>; is it the test set, or a web page?")
    return list(found.items())


def text_format(path: str | Path) -> str:
    """Return a file's format by its name: ``segments``, lines with ``tags``, or ``lines``.

    Args:
        path: ``*.xml`` and ``*.sgm`` have segments, ``train.tags.*`` lines with and without
            tags, all others one sentence per line. Each may be compressed.
    """
    name = PACKED_NAME.sub("", Path(path).name)
    if name.endswith((".xml", ".sgm")):
        return "segments"
    return "tags" if name.startswith("train.tags.") else "lines"


def line_note(path: str | Path) -> str:
    """Return a note on which lines of a file are counted; empty if all are."""
    kinds = {"segments": " (segments alone)", "tags": " (without tags)", "lines": ""}
    return kinds[text_format(path)]


def open_side(
    path: str | Path, *, errors: str = "strict", digest: Digest | None = None
) -> tuple[Iterable[str], list[str]]:
    """Open one side of a parallel text, in the format given by its name.

    Args:
        path: The file; for its name see :func:`text_format`. It is read once, so it may be a
            named pipe.
        errors: What to do with bytes that are not UTF-8, see ``stream_lines``.
        digest: Updated with all bytes of the file.

    Returns:
        The sentences, which can be iterated once, and the names of the segments, if any.

    Raises:
        CorpusError: The file does not have the segments that its name implies. Errors in lines
            are raised when they are read.
    """
    if (kind := text_format(path)) == "segments":
        found = read_segments(path, digest)
        return [text for _, text in found], [name for name, _ in found]
    lines = stream_lines(path, errors=errors, digest=digest)
    if kind == "tags":  # in IWSLT, lines with tags describe the talk
        lines = (line.strip() for line in lines if not line.startswith("<"))
    return lines, []


def read_side(path: str | Path) -> tuple[list[str], list[str], str]:
    """Read one side of a parallel text completely, see :func:`open_side`.

    Returns:
        The sentences, the names of the segments, if any, and the file's SHA-256.

    Raises:
        CorpusError: The file does not have the format that its name implies, or is empty.
    """
    digest = hashlib.sha256()
    sentences, names = open_side(path, digest=digest)
    if not (lines := list(sentences)):
        raise CorpusError(f"{path}: the file is empty; give one sentence per line")
    return lines, names, digest.hexdigest()


def read_parallel(
    source: str | Path,
    target: str | Path,
    *,
    languages: tuple[str, str] = ("de", "en"),
    name: str = "files",
    split: str = "train",
    drop_blank: bool = True,
) -> ParallelText:
    """Read two files in which line *n* of one translates line *n* of the other.

    Args:
        source: The file in the first language, plain or compressed, in UTF-8; the formats of
            test sets and IWSLT are recognized by name, see :func:`text_format`.
        target: The file in the second language.
        languages: The two languages, also of a system that learns from it.
        name: The corpus, for records.
        split: The split, for records.
        drop_blank: Drop pairs with a blank side, for training, and record their line numbers
            in ``blank``. Evaluation keeps every line.

    Raises:
        CorpusError: A file cannot be read or is empty, line counts differ, or no pair is left.
    """
    (first, names, digest), (second, other_names, other_digest) = map(read_side, (source, target))
    check_segments(source, target, names, other_names)
    this, that = (f"{path}{line_note(path)}" for path in (source, target))
    if len(first) != len(second):
        told = f"{this} has {len(first)} lines and {that} has {len(second)}"
        told += f": line {min(len(first), len(second)) + 1} has no partner"
        raise CorpusError(f"{told}; line n of one file must translate line n of the other")
    pairs = list(zip(first, second, strict=True))
    blank: list[int] = []
    if drop_blank:
        blank = [n for n, pair in enumerate(pairs, 1) if not all(map(str.strip, pair))]
        pairs = [pair for pair in pairs if all(map(str.strip, pair))]
    if not pairs:
        raise CorpusError(f"{this}, line 1: every pair has a blank side; give another text")
    sides = tuple(one for one, _ in pairs), tuple(other for _, other in pairs)
    checksums = (Path(source).name, digest), (Path(target).name, other_digest)
    origin = f"{source} and {target}"
    return ParallelText(name, split, languages, *sides, origin, checksums, tuple(blank))


def check_segments(
    source: str | Path, target: str | Path, names: list[str], others: list[str]
) -> None:
    """Raise CorpusError if the names of two files' segments differ."""
    for n, (one, other) in enumerate(zip(names, others, strict=False), 1):
        if one != other:
            told = f"segment {n} is {other}, but in {source} it is {one}"
            raise CorpusError(f"{target}: {told}; use files of the same test set")


# The known corpora: for each split its paths in a mirror, which may continue inside archives; and
# for each file its size (0 if unknown), digest (may be empty) and addresses.
SOURCES = json.loads(Path(__file__).with_name("sources.json").read_text(encoding="utf-8"))
FILES = {
    path: RemoteFile(path, tuple(urls), size, digest)
    for path, (size, digest, *urls) in SOURCES["files"].items()
}
CORPORA: dict[str, tuple[str, ...]] = {
    "grammar": tuple(GRAMMAR_SIZES),
    **{name: tuple(corpus["splits"]) for name, corpus in SOURCES["corpora"].items()},
}  #: The known corpora, each with the names of its splits.


Place = tuple[RemoteFile, str]  # a file, and the path inside it, if it is an archive


def _places(name: str, source: str, target: str, split: str) -> list[tuple[Place, Place]]:
    """Return the places of both sides of each part of a split."""
    missing = CorpusError(f"{name}: {split} does not exist for {source} and {target}")
    corpus = SOURCES["corpora"][name]
    both = f"{source}-{target}", f"{target}-{source}"
    pair = next((pair for pair in both if pair in corpus["pairs"]), "")

    def place(form: str, language: str, side: str) -> Place:
        words = {"pair": pair, "joined": pair.replace("-", ""), "language": language, "side": side}
        path = form.format(**words)
        for file in FILES.values():
            if f"{path}/".startswith(f"{file.path}/"):
                return file, path[len(file.path) :]
        raise missing

    if not pair:
        raise missing
    forms = corpus["splits"][split]
    return [(place(form, source, "src"), place(form, target, "ref")) for form in forms]


def _check_names(name: str, pair: str, split: str) -> tuple[str, str]:
    """Return the two languages, after checking the corpus, pair and split."""
    if name not in CORPORA:
        raise CorpusError(f"no corpus {name!r}; choose among {', '.join(CORPORA)}")
    if split not in CORPORA[name]:
        raise CorpusError(f"{name}: no split {split!r}; choose among {', '.join(CORPORA[name])}")
    source, _, target = pair.partition("-")
    known = ("de", "en") if name == "grammar" else ("de", "en", "fr", "cs")
    if source == target or not {source, target} <= set(known):
        remedy = f"give two of {', '.join(known)}, such as de-en"
        raise CorpusError(f"{name}: no language pair {pair!r}; {remedy}")
    return source, target


def corpus_files(
    name: str, pair: str = "de-en", split: str = "train", *, mirror: str | Path | None = None,
    cache: str | Path | None = None, progress: bool = True,
) -> list[tuple[Path, Path]]:  # fmt: skip
    """Download and unpack the files of a split, and return their paths.

    Arguments are those of :func:`load_corpus`; ``grammar`` has no files.

    Returns:
        Source and target file of each part of the split.

    Raises:
        CorpusError: There is no such split in these languages, or the download failed.
    """
    parts = _places(name, *_check_names(name, pair, split), split)

    def find(place: Place) -> Path:
        path, inside = fetch_file(place[0], mirror=mirror, cache=cache, progress=progress), place[1]
        if not inside:
            return path
        return locate_file(f"{path}{inside}", Path(cache or cache_folder()) / "unpacked" / name)

    return [(find(one), find(other)) for one, other in parts]


def load_corpus(
    name: str,
    pair: str = "de-en",
    split: str = "train",
    *,
    mirror: str | Path | None = None,
    cache: str | Path | None = None,
    size: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> ParallelText:
    """Load a split of a known corpus.

    Args:
        name: One of ``CORPORA``: ``grammar`` (built in, no network), ``multi30k`` ...
        pair: Source and target language, such as ``de-en``.
        split: One of ``CORPORA[name]``.
        mirror: A folder with the corpus's files, see ``fetch_file``.
        cache: The folder for downloads, see ``fetch_file``.
        size: Use only the first ``size`` pairs.
        seed: The seed of the grammar.
        progress: Show a progress bar while downloading.

    Raises:
        CorpusError: There is no such corpus, pair or split, or the download failed.
    """
    languages = _check_names(name, pair, split)
    if size is not None and size < 1:
        raise CorpusError(f"{name}: the size must be at least 1, not {size}")
    if name == "grammar":
        pairs = grammar_pairs(split, size, seed)
        source, target = ([each.text(language) for each in pairs] for language in languages)
        origin = f"written by the grammar, seed {seed}"
        return text_of_lines(source, target, languages, name=name, split=split, origin=origin)
    files = corpus_files(name, pair, split, mirror=mirror, cache=cache, progress=progress)
    read = partial(read_parallel, languages=languages, name=name, split=split)
    text = _joined([read(*paths, drop_blank=split == "train") for paths in files])
    corpus = SOURCES["corpora"][name]
    lines, expected = len(text) + len(text.blank), corpus.get("lines", {}).get(split)
    if lines != (expected or lines):
        raise CorpusError(f"{name} {split}: has {lines} lines, but should have {expected}")
    text = replace(text, origin=corpus.get("origin", text.origin))
    return text if size is None else text.head(size)


def _joined(parts: list[ParallelText]) -> ParallelText:
    """Concatenate several texts."""
    blank: list[int] = []
    before = 0
    for part in parts:
        blank += [before + line for line in part.blank]
        before += len(part) + len(part.blank)
    return replace(
        parts[0],
        source=tuple(line for part in parts for line in part.source),
        target=tuple(line for part in parts for line in part.target),
        origin="; ".join(part.origin for part in parts),
        checksums=tuple(checksum for part in parts for checksum in part.checksums),
        blank=tuple(blank),
    )


def text_of_lines(
    source: Sequence[str],
    target: Sequence[str],
    languages: tuple[str, str] = ("de", "en"),
    *,
    name: str = "files",
    split: str = "train",
    origin: str = "lists of lines",
) -> ParallelText:
    """Return a parallel text of two lists: item *n* of one translates item *n* of the other.

    Args:
        source: Sentences, none of them blank.
        target: Their translations.
        languages: The two languages, also of a system that learns from it.
        name: The corpus, for records.
        split: The split, for records and as the name of the sides.
        origin: Where the lines are from, for records.

    Raises:
        CorpusError: There are no lines, one is blank, or the numbers differ.
    """
    if isinstance(source, str) or isinstance(target, str):
        raise TypeError("source and target: give two lists of strings, not a string")
    if len(source) != len(target) or not source:
        told = f"{len(source)} lines and {len(target)} translations"
        raise CorpusError(f"{origin}: {told}; give as many of both")
    for number, pair in enumerate(zip(source, target, strict=True), 1):
        if not all(map(str.strip, pair)):
            raise CorpusError(f"{origin}: pair {number} has a blank side; leave it out")
        if {"\n", "\r"} & set("".join(pair)):
            raise CorpusError(f"{origin}: pair {number} holds a line break; strip or split it")
    sides = zip(languages, (source, target), strict=True)
    checksums = tuple((f"{split}.{language}", digest_of_lines(side)) for language, side in sides)
    return ParallelText(name, split, languages, tuple(source), tuple(target), origin, checksums)
