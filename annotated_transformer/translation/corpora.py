"""Parallel text, from files, from Multi30k, and from the grammar, through one door.

Defined in the chapter *Corpora* (book/translation/corpora.md).
"""

# Written from book/translation/corpora.md: edit the chapter instead.

import codecs
import contextlib
import gzip
import hashlib
import html
import http.client
import os
import re
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from annotated_transformer.translation.grammar import GRAMMAR_SIZES, grammar_pairs


class CorpusError(ValueError):
    """A corpus that cannot be had; the message names the file, the line and the remedy.

    Defined in: book/translation/corpora.md
    """


@dataclass(frozen=True)
class ParallelText:
    """Sentences and their translations, with what a record needs to name them.

    Attributes:
        name: The corpus: ``grammar``, ``multi30k`` or ``files``.
        split: The part of it: ``train``, ``val``, ``test`` ...
        languages: Source and target language.
        source: The sentences, untokenised.
        target: Their translations, in the same order.
        origin: Where the text came from, in a line.
        checksums: File names with the SHA-256 of their bytes.
        blank: The numbers, from 1, of the lines left out because a side was blank.

    Defined in: book/translation/corpora.md
    """

    name: str
    split: str
    languages: tuple[str, str]
    source: tuple[str, ...]
    target: tuple[str, ...]
    origin: str
    checksums: tuple[tuple[str, str], ...]
    blank: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.source)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Go through the pairs."""
        return iter(zip(self.source, self.target, strict=True))

    def head(self, size: int) -> "ParallelText":
        """Return the first pairs."""
        return replace(self, source=self.source[:size], target=self.target[:size])

    def report(self) -> str:
        """Say how many lines were left out and the first of them, if any were."""
        if not self.blank:
            return ""
        dropped, total = len(self.blank), len(self) + len(self.blank)
        first = ", ".join(map(str, self.blank[:5])) + (", ..." if dropped > 5 else "")
        return f"{dropped} of {total} pairs dropped, a side is blank: lines {first}"


def read_lines(path: str | Path) -> list[str]:
    r"""Read a text, plain or gzipped, as a list of lines.

    Only ``\n`` and ``\r\n`` end a line. ``str.splitlines`` would also cut at U+2028,
    U+0085 and a form feed, and one cut too many shifts every later pair.

    Raises:
        CorpusError: If the file cannot be read, is cut short, or is not UTF-8.

    Defined in: book/translation/corpora.md
    """
    path = Path(path)
    rows = _read_bytes(path).removeprefix(codecs.BOM_UTF8).split(b"\n")
    if rows[-1] == b"":  # the last line ended as it should
        rows.pop()
    lines = []
    for number, row in enumerate(rows, start=1):
        try:
            lines.append(row.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{path}, line {number}: byte {error.start + 1} "
                f"(0x{row[error.start]:02x}) is not valid UTF-8; convert the file to UTF-8"
            ) from None
    return lines


def _read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked where it is gzipped.

    Defined in: book/translation/corpora.md
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CorpusError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from None
    if path.suffix != ".gz" and not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content) if content else b""
    except EOFError:
        raise CorpusError(
            f"{path}: the gzip data ends too early; fetch the whole file again"
        ) from None
    except (OSError, zlib.error):
        raise CorpusError(
            f"{path}: not a gzip file, or a damaged one; fetch it again, or drop the "
            "ending .gz if it is plain text"
        ) from None


TAGS = re.compile(
    r"""<doc\b[^>]*?\bdocid\s*=\s*["']?(?P<doc>[^"'>]*)|"""
    r"""<seg\b[^>]*?\bid\s*=\s*["']?(?P<id>\w+)["']?[^>]*>(?P<text>.*?)</seg\s*>|"""
    r"""(?P<open></?seg\b)""",
    re.DOTALL | re.IGNORECASE,
)


def read_segments(path: str | Path) -> list[tuple[str, str]]:
    """Read a test set in XML or SGML: its segments with their names, in their order.

    Returns:
        For each segment ``document/number``, and its text without line ends.

    Raises:
        CorpusError: If the file cannot be read, has no segment, one without an end, or two
            of one name.

    Defined in: book/translation/corpora.md
    """
    text = "\n".join(read_lines(path))
    found: dict[str, str] = {}
    document = ""
    for tag in TAGS.finditer(text):
        line = text.count("\n", 0, tag.start()) + 1
        if tag["doc"] is not None:
            document = tag["doc"]
        elif tag["open"] or "<seg" in tag["text"].lower():
            raise CorpusError(
                f"{path}, line {line}: a segment without its beginning or end; fetch the file again"
            )
        elif (name := f"{document}/{tag['id']}") in found:
            raise CorpusError(f"{path}, line {line}: segment {name} is there twice")
        else:
            found[name] = " ".join(html.unescape(tag["text"]).split("\n")).strip()
    if not found:
        raise CorpusError(f"{path}: has no <seg>; is it the test set, or a page of a web site?")
    return list(found.items())


def read_tagged(path: str | Path) -> list[str]:
    """Read a training file of IWSLT: the lines that are not about the talk.

    Raises:
        CorpusError: If the file cannot be read.

    Defined in: book/translation/corpora.md
    """
    return [line.strip() for line in read_lines(path) if not line.startswith("<")]


def read_side(path: str | Path) -> tuple[list[str], list[str]]:
    """Read one side of a parallel text, in the format that its name tells.

    Args:
        path: ``*.xml`` and ``*.sgm`` have segments, ``train.tags.*`` lines with and without
            tags, all others a sentence on each line. Each may be gzipped.

    Returns:
        The sentences, and the names of the segments where there are any.

    Raises:
        CorpusError: If the file is not what its name says.

    Defined in: book/translation/corpora.md
    """
    name = Path(path).name.removesuffix(".gz")
    if name.endswith((".xml", ".sgm")):
        segments = read_segments(path)
        return [text for _, text in segments], [key for key, _ in segments]
    return (read_tagged(path) if name.startswith("train.tags.") else read_lines(path)), []


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    Defined in: book/translation/corpora.md
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_parallel(
    source: str | Path,
    target: str | Path,
    *,
    languages: tuple[str, str] = ("de", "en"),
    name: str = "files",
    split: str = "train",
    drop_blank: bool = True,
) -> ParallelText:
    """Read two files of which line *n* of one translates line *n* of the other.

    Args:
        source: The file in the first language, plain or gzipped, in UTF-8; a test set's or
            IWSLT's own format is known by its name, see ``read_side``.
        target: The file in the second language.
        languages: The two languages, for labels only.
        name: The corpus, for records.
        split: The split, for records.
        drop_blank: Drop pairs with a blank side, as training wants it; their line
            numbers are kept in ``blank``. Evaluation keeps every line.

    Raises:
        CorpusError: If a file cannot be read or is empty, if the line counts differ, or
            if nothing is left.

    Defined in: book/translation/corpora.md
    """
    (one, names), (other, also) = read_side(source), read_side(target)
    for n, (name_of_one, name_of_other) in enumerate(zip(names, also, strict=False), 1):
        if name_of_one != name_of_other:
            raise CorpusError(
                f"{target}: its segment {n} is {name_of_other}, that of {source} is {name_of_one}; "
                "take both from one test set"
            )
    sides = [one, other]
    for path, lines in zip((source, target), sides, strict=True):
        if not lines:
            raise CorpusError(f"{path}: the file is empty; give one sentence on each line")
    first, second = len(sides[0]), len(sides[1])
    if first != second:
        raise CorpusError(
            f"{source} has {first} lines and {target} has {second}: "
            f"line {min(first, second) + 1} has no partner; "
            "line n of one file must translate line n of the other"
        )
    pairs = list(zip(*sides, strict=True))
    blank = [n for n, pair in enumerate(pairs, 1) if not all(side.strip() for side in pair)]
    if drop_blank:
        dropped = set(blank)
        pairs = [pair for n, pair in enumerate(pairs, 1) if n not in dropped]
        if not pairs:
            raise CorpusError(f"{source}, line 1: every pair has a blank side; nothing is left")
    return ParallelText(
        name=name,
        split=split,
        languages=languages,
        source=tuple(pair[0] for pair in pairs),
        target=tuple(pair[1] for pair in pairs),
        origin=f"{source} and {target}",
        checksums=tuple((Path(path).name, sha256_of(path)) for path in (source, target)),
        blank=tuple(blank) if drop_blank else (),
    )


DATA_VARIABLE = "ANNOTATED_TRANSFORMER_DATA"
COMMIT = "a3d2e0d26b56f3846f66a952536ffed4e401d05a"
SOURCES = (  # the same bytes at each; the checksum decides
    f"https://raw.githubusercontent.com/multi30k/dataset/{COMMIT}/data/task1/raw/",
    f"https://cdn.jsdelivr.net/gh/multi30k/dataset@{COMMIT}/data/task1/raw/",
    f"https://github.com/multi30k/dataset/raw/{COMMIT}/data/task1/raw/",
)


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded, with what it must turn out to be.

    Attributes:
        path: Where it lies below a mirror or the cache: ``multi30k/train.de.gz``.
        urls: Its addresses, tried in this order.
        sha256: The SHA-256 of its bytes.
        size: Its size in bytes.

    Defined in: book/translation/corpora.md
    """

    path: str
    urls: tuple[str, ...]
    sha256: str
    size: int


MULTI30K_CONTENTS = {  # split, language, size in bytes: SHA-256
    ("train", "de", 637044): ("726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6"),
    ("train", "en", 568929): ("d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f"),
    ("val", "de", 24681): ("f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a"),
    ("val", "en", 21650): ("14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28"),
    ("test_2016_flickr", "de", 22890): (
        "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8"
    ),
    ("test_2016_flickr", "en", 21077): (
        "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9"
    ),
    ("test_2017_flickr", "de", 21471): (
        "a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee"
    ),
    ("test_2017_flickr", "en", 19138): (
        "76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074"
    ),
}


def _multi30k_file(split: str, language: str, size: int, sha256: str) -> RemoteFile:
    name = f"{split}.{language}.gz"
    urls = tuple(source + name for source in SOURCES)
    return RemoteFile(f"multi30k/{name}", urls, sha256, size)


MULTI30K: Mapping[tuple[str, str], RemoteFile] = {
    (split, language): _multi30k_file(split, language, size, sha256)
    for (split, language, size), sha256 in MULTI30K_CONTENTS.items()
}


def cache_folder() -> Path:
    """Return the folder for downloads, below ``XDG_CACHE_HOME`` or ``~/.cache``.

    Defined in: book/translation/corpora.md
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "annotated-transformer"


def _difference(path: Path, file: RemoteFile) -> str:
    """Return how a file differs from what it must be; empty if it does not.

    Defined in: book/translation/corpora.md
    """
    try:
        found = sha256_of(path)
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    if found == file.sha256:
        return ""
    size = path.stat().st_size
    expected = f"expected {file.size} bytes with sha-256 {file.sha256}"
    return f"{expected}, found {size} bytes with {found}"


@contextlib.contextmanager
def _clear_write_errors(part: Path) -> Iterator[None]:
    """Turn a failed write into a CorpusError, and leave nothing half-written.

    Defined in: book/translation/corpora.md
    """
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise CorpusError(
            f"{part}: cannot be written: {error.strerror or error}; make room, or name "
            "another folder by XDG_CACHE_HOME"
        ) from None


def fetch(
    file: RemoteFile,
    *,
    mirror: str | Path | None = None,
    cache: str | Path | None = None,
    progress: bool = True,
    attempts: int = 3,
    timeout: float = 30.0,
    wait: float = 1.0,
) -> Path:
    """Return the path of a file: in the mirror, in the cache, or freshly downloaded.

    Args:
        file: The file.
        mirror: A folder to look in first; by default the one that the environment
            variable ``ANNOTATED_TRANSFORMER_DATA`` names, if any.
        cache: The folder for downloads; by default the user's cache folder.
        progress: Show a progress bar.
        attempts: How often each address is tried.
        timeout: Seconds without a byte after which a connection counts as broken.
        wait: Seconds before the second try of an address, doubled before each other.

    Raises:
        CorpusError: If the mirror's file is altered, no address gives the right bytes,
            or the file cannot be written.

    Defined in: book/translation/corpora.md
    """
    mirror = mirror or os.environ.get(DATA_VARIABLE) or None
    if mirror is not None:
        if not Path(mirror).is_dir():
            raise CorpusError(f"{mirror}: no such folder; correct the option or {DATA_VARIABLE}")
        if (copy := Path(mirror) / file.path).exists():
            if found := _difference(copy, file):
                raise CorpusError(f"{copy}: altered or cut short, {found}; replace the file")
            return copy
    path = (Path(cache) if cache else cache_folder()) / file.path
    if path.exists() and not _difference(path, file):
        return path
    part = path.with_name(path.name + ".part")
    with _clear_write_errors(part):
        path.parent.mkdir(parents=True, exist_ok=True)
    _download_anywhere(file, part, progress, attempts, timeout, wait)
    with _clear_write_errors(part):
        os.replace(part, path)  # atomic: the file is there whole, or not at all
    return path


class _UnusableError(Exception):
    """An address that need not be tried again.

    Defined in: book/translation/corpora.md
    """


def _download_anywhere(
    file: RemoteFile,
    part: Path,
    progress: bool,
    attempts: int,
    timeout: float,
    wait: float,
) -> None:
    """Try each address in turn until ``part`` holds the right bytes.

    Defined in: book/translation/corpora.md
    """
    failures = []
    for url in file.urls:
        for attempt in range(attempts):
            if attempt:
                time.sleep(wait * 2 ** (attempt - 1))
            try:
                _download(url, file, part, progress, timeout)
                return
            except (_UnusableError, OSError, http.client.HTTPException) as error:
                failure = f"{url}: {_reason(error)}"
                if isinstance(error, _UnusableError):
                    break
        failures.append(failure)
    raise CorpusError(
        f"{file.path}: not downloaded ({'; '.join(failures)}); check the network, or "
        f"give a folder that holds it by the mirror option or {DATA_VARIABLE}"
    )


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split()) or type(error).__name__


def _download(url: str, file: RemoteFile, part: Path, progress: bool, timeout: float) -> None:
    """Download into ``part``, going on after the bytes that it holds already.

    Raises:
        _UnusableError: If this address does not have the file, or has another one.
        OSError: If the connection broke; what arrived stays in ``part``.

    Defined in: book/translation/corpora.md
    """
    held = part.stat().st_size if part.exists() else 0
    if held >= file.size:
        part.unlink()
        held = 0
    headers = {"User-Agent": "annotated-transformer", "Accept-Encoding": "identity"}
    if held:
        headers["Range"] = f"bytes={held}-"
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=timeout
        )
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # it cannot go on from there: start again
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in (408, 429):
                raise _UnusableError(f"the server answers {error.code} {error.reason}") from None
            raise OSError(f"the server answers {error.code} {error.reason}") from None
    with response:
        resumed = f"bytes {held}-" in response.headers.get("Content-Range", "")
        if response.status != 206 or not resumed:
            held = 0  # the server sends the file from its beginning
        _receive(response, file, part, held, progress)
    if part.stat().st_size < file.size:
        raise OSError(f"the connection broke after {part.stat().st_size} of {file.size} bytes")
    if found := _difference(part, file):
        part.unlink()
        raise _UnusableError(f"other bytes than expected: {found}")


def _receive(
    response: http.client.HTTPResponse,
    file: RemoteFile,
    part: Path,
    held: int,
    progress: bool,
) -> None:
    """Write what arrives behind the first ``held`` bytes of ``part``.

    Defined in: book/translation/corpora.md
    """
    with (
        contextlib.ExitStack() as stack,
        tqdm(
            desc=Path(file.path).name,
            total=file.size,
            initial=held,
            unit="B",
            unit_scale=True,
            disable=not progress,
        ) as bar,
    ):
        with _clear_write_errors(part):
            output = stack.enter_context(open(part, "ab" if held else "wb"))
        while held <= file.size:  # a byte too many is enough to know
            chunk = response.read1(1 << 16)
            if not chunk:
                return
            with _clear_write_errors(part):
                output.write(chunk)
                output.flush()
            held += len(chunk)
            bar.update(len(chunk))


CORPORA: Mapping[str, tuple[str, ...]] = {
    "grammar": tuple(GRAMMAR_SIZES),
    "multi30k": tuple(dict.fromkeys(split for split, _ in MULTI30K)),
}


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
    """Load a split of a corpus that the package knows.

    Args:
        name: ``grammar`` (embedded, no network) or ``multi30k``.
        pair: Source and target language, as ``de-en``.
        split: One of ``CORPORA[name]``.
        mirror: A folder with the corpus's files, see ``fetch``.
        cache: Where downloads are kept, see ``fetch``.
        size: Take only so many pairs from the beginning.
        seed: The seed of the grammar.
        progress: Show a progress bar while downloading.

    Raises:
        CorpusError: If there is no such corpus, pair or split, or it cannot be had.

    Defined in: book/translation/corpora.md
    """
    if name not in CORPORA:
        raise CorpusError(f"no corpus {name!r}; choose among {', '.join(CORPORA)}")
    if split not in CORPORA[name]:
        raise CorpusError(f"{name}: no split {split!r}; choose among {', '.join(CORPORA[name])}")
    if pair not in ("de-en", "en-de"):
        also = "; French and Czech have no recorded checksums yet" if name == "multi30k" else ""
        raise CorpusError(f"{name}: no language pair {pair!r}; choose de-en or en-de{also}")
    if size is not None and size < 1:
        raise CorpusError(f"{name}: the size must be at least 1, it is {size}")
    source, target = pair.split("-")
    if name == "grammar":
        return _grammar_text((source, target), split, size, seed)
    files = [MULTI30K[split, language] for language in (source, target)]
    paths = [fetch(file, mirror=mirror, cache=cache, progress=progress) for file in files]
    text = read_parallel(
        *paths,
        languages=(source, target),
        name=name,
        split=split,
        drop_blank=split == "train",
    )
    text = replace(text, origin=f"multi30k/dataset, commit {COMMIT}, task 1, raw")
    return text if size is None else text.head(size)


def _grammar_text(
    languages: tuple[str, str], split: str, size: int | None, seed: int
) -> ParallelText:
    pairs = grammar_pairs(split, size, seed)
    source, target = (tuple(pair.text(language) for pair in pairs) for language in languages)
    checksums = tuple(
        (f"{split}.{language}", hashlib.sha256("\n".join(side).encode()).hexdigest())
        for language, side in zip(languages, (source, target), strict=True)
    )
    origin = f"written by the grammar, seed {seed}"
    return ParallelText("grammar", split, languages, source, target, origin, checksums)
