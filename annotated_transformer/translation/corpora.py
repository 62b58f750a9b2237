# Written from book/translation/corpora.md: edit the chapter instead.
"""Parallel text, from files, from corpora on the network, and from the grammar, through one door."""

import codecs
import gzip
import hashlib
import html
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from annotated_transformer.data.grammar import GRAMMAR_SIZES, grammar_pairs
from annotated_transformer.translation.downloads import (
    CorpusError,
    RemoteFile,
    cache_folder,
    fetch,
    is_page,
    locate,
    sha256_of,
)


@dataclass(frozen=True)
class ParallelText:
    """Sentences and their translations, with what a record needs to name them.

    Attributes:
        name: The corpus: ``grammar``, ``multi30k``, ``files`` ...
        split: The part of it: ``train``, ``val``, ``test`` ...
        languages: Source and target language.
        source: The sentences, untokenised.
        target: Their translations, in the same order.
        origin: Where the text came from, in a line.
        checksums: File names with the SHA-256 of their bytes.
        blank: The numbers, from 1, of the lines left out because a side was blank; ``counted``
            says which lines of a file are numbered. Several files are counted on.
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
        """Return the first pairs; of lines that were left out, nothing is said any more."""
        return replace(self, source=self.source[:size], target=self.target[:size], blank=())

    def report(self) -> str:
        """Say how many lines were left out and the first of them, if any were."""
        if not self.blank:
            return ""
        dropped, total = len(self.blank), len(self) + len(self.blank)
        first = ", ".join(map(str, self.blank[:5])) + (", ..." if dropped > 5 else "")
        return f"{dropped} of {total} pairs dropped, a side is blank: lines {first}{self.among(0)}"

    def among(self, side: int) -> str:
        """Say which lines of a side are numbered; the empty text where all are, of one file."""
        files = self.checksums[side::2]
        return counted(files[0][0]) if len(files) == 1 else " (of all files together)"


PAIR = re.compile(r"([A-Za-z]{2,8})-([A-Za-z]{2,8})")


def language_codes(pair: str) -> tuple[str, str]:
    """Split ``de-en`` into the codes of source and target language.

    Raises:
        CorpusError: It is not two different codes of two to eight letters each.
    """
    match = PAIR.fullmatch(pair)
    if match is None or match[1].lower() == match[2].lower():
        raise CorpusError(
            f"--pair {pair!r}: give two different languages, each of two to eight letters, as de-en"
        )
    return match[1], match[2]


def read_lines(path: str | Path) -> list[str]:
    r"""Read a text, plain or gzipped, as a list of lines.

    Only ``\n`` and ``\r\n`` end a line. ``str.splitlines`` would also cut at U+2028,
    U+0085 and a form feed, and one cut too many shifts every later pair.

    Raises:
        CorpusError: If the file cannot be read, is cut short, is an HTML page, or is not UTF-8.
    """
    path = Path(path)
    content = _read_bytes(path)
    if is_page(content[:512]):
        raise CorpusError(f"{path}: an HTML page, not the data; look at it, and fetch it again")
    rows = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
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
    """Return the content of a file, unpacked where it is gzipped."""
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
    r"""<doc\b[^<>]*?\bdocid\s*=\s*(?P<doc>"[^"<>]*"|'[^'<>]*'|[^\s"'<>]+)|"""
    r"""<seg\b[^<>]*?\bid\s*=\s*["']?(?P<id>[^\s"'<>]+)["']?[^<>]*>(?P<text>.*?)</seg\s*>|"""
    r"""(?P<open></?seg\b)""",
    re.DOTALL | re.IGNORECASE,
)
CHARACTERS = re.compile(r"&#?\w+;")  # without its semicolon, & is a mark of the text


def read_segments(path: str | Path) -> list[tuple[str, str]]:
    """Read a test set in XML or SGML: its segments with their names, in their order.

    Returns:
        For each segment ``document/number``, and its text without line ends.

    Raises:
        CorpusError: If the file cannot be read, has no segment, one without an end, or two
            of one name.
    """
    text = "\n".join(read_lines(path))
    found: dict[str, str] = {}
    document = ""
    for tag in TAGS.finditer(text):
        if tag["doc"] is not None:
            document = tag["doc"].strip("\"'")
        elif tag["open"] or "<seg" in tag["text"].lower():
            line = text.count("\n", 0, tag.start()) + 1
            raise CorpusError(
                f"{path}, line {line}: a segment without its beginning or end; fetch the file again"
            )
        elif (name := f"{document}/{tag['id']}") in found:
            line = text.count("\n", 0, tag.start()) + 1
            raise CorpusError(f"{path}, line {line}: segment {name} is there twice")
        else:
            plain = CHARACTERS.sub(lambda name: html.unescape(name[0]), tag["text"])
            found[name] = " ".join(plain.split("\n")).strip()
    if not found:
        raise CorpusError(f"{path}: has no <seg>; is it the test set, or a page of a web site?")
    return list(found.items())


def without_tags(lines: Iterable[str]) -> Iterator[str]:
    """Go through a training text of IWSLT: the lines that are not about the talk, stripped."""
    return (line.strip() for line in lines if not line.startswith("<"))


def text_format(path: str | Path) -> str:
    """Tell from a file's name what it holds: ``segments``, lines with ``tags``, or ``lines``.

    Args:
        path: ``*.xml`` and ``*.sgm`` have segments, ``train.tags.*`` lines with and without
            tags, all others a sentence on each line. Each may be gzipped.
    """
    name = Path(path).name.removesuffix(".gz")
    if name.endswith((".xml", ".sgm")):
        return "segments"
    return "tags" if name.startswith("train.tags.") else "lines"


def counted(path: str | Path) -> str:
    """Say which lines of a file are counted; the empty text where all are."""
    kinds = {"segments": " (segments alone)", "tags": " (without tags)", "lines": ""}
    return kinds[text_format(path)]


def read_side(path: str | Path) -> tuple[list[str], list[str]]:
    """Read one side of a parallel text, in the format that its name tells.

    Args:
        path: The file; for its name see ``text_format``.

    Returns:
        The sentences, and the names of the segments where there are any.

    Raises:
        CorpusError: If the file is not what its name says.
    """
    kind = text_format(path)
    if kind == "segments":
        segments = read_segments(path)
        return [text for _, text in segments], [key for key, _ in segments]
    lines = read_lines(path)
    return (list(without_tags(lines)) if kind == "tags" else lines), []


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
        drop_blank: Drop pairs with a blank side, as training wants it; their numbers are
            kept in ``blank``. Evaluation keeps every line.

    Raises:
        CorpusError: If a file cannot be read or is empty, if the line counts differ, or
            if nothing is left.
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
            f"{source}{counted(source)} has {first} lines and "
            f"{target}{counted(target)} has {second}: "
            f"line {min(first, second) + 1} has no partner; "
            "line n of one file must translate line n of the other"
        )
    pairs = list(zip(*sides, strict=True))
    blank = [n for n, pair in enumerate(pairs, 1) if not all(side.strip() for side in pair)]
    if drop_blank:
        dropped = set(blank)
        pairs = [pair for n, pair in enumerate(pairs, 1) if n not in dropped]
        if not pairs:
            raise CorpusError(
                f"{source}{counted(source)}, line 1: every pair has a blank side; nothing is left"
            )
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


COMMIT = "a3d2e0d26b56f3846f66a952536ffed4e401d05a"
SOURCES = (  # the same bytes at each; the checksum decides
    f"https://raw.githubusercontent.com/multi30k/dataset/{COMMIT}/data/task1/raw/",
    f"https://cdn.jsdelivr.net/gh/multi30k/dataset@{COMMIT}/data/task1/raw/",
    f"https://github.com/multi30k/dataset/raw/{COMMIT}/data/task1/raw/",
)
LATEST = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"

MULTI30K_LINES = {
    "train": 29_000, "val": 1_014, "test_2016_flickr": 1_000,
    "test_2017_flickr": 1_000, "test_2017_mscoco": 461, "test_2018_flickr": 1_071,
}  # fmt: skip
MULTI30K_SHA256 = {  # split, language, size in bytes
    ("train", "de", 637044): "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    ("train", "en", 568929): "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    ("val", "de", 24681): "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    ("val", "en", 21650): "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
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
MULTI30K_MD5 = {  # split, language
    ("train", "fr"): "6cb767741dcad3931f966fefbc05203f",
    ("train", "cs"): "d9a5fc268917725a2b0efce3a0cc8607",
    ("val", "fr"): "93fc564584b7e5ba410c761ea5a1c682",
    ("val", "cs"): "83cdc082f646b769095615384cf5c0ca",
    ("test_2016_flickr", "fr"): "08dc7cd4a662f31718412de95ca9bfe3",
    ("test_2016_flickr", "cs"): "3104872229daa1bef3b401d44dd2220b",
    ("test_2017_flickr", "fr"): "cb09af7d2b501f9112f2d6a59fa1360d",
    ("test_2017_mscoco", "de"): "e8cd6ec2bc8a11fc846fa48a46e3d0bb",
    ("test_2017_mscoco", "en"): "a7b684e0edbef1d4a23660c8e8e743fd",
    ("test_2017_mscoco", "fr"): "4995d10954a804d3cdfd907b9fd093e8",
    ("test_2018_flickr", "en"): "a152878809942757a55ce087073486b8",
    ("test_2018_flickr", "de"): "",
    ("test_2018_flickr", "fr"): "",
    ("test_2018_flickr", "cs"): "",
}


def _multi30k_file(split: str, language: str, **known: str | int) -> RemoteFile:
    name = f"{split}.{language}.gz"
    sources = SOURCES if any(known.values()) else (*SOURCES, LATEST)
    return RemoteFile(f"multi30k/{name}", tuple(source + name for source in sources), **known)  # type: ignore[arg-type]


MULTI30K: Mapping[tuple[str, str], RemoteFile] = {
    **{
        (split, language): _multi30k_file(split, language, sha256=sha256, size=size)
        for (split, language, size), sha256 in MULTI30K_SHA256.items()
    },
    **{
        (split, language): _multi30k_file(split, language, md5=md5)
        for (split, language), md5 in MULTI30K_MD5.items()
    },
}

Place = tuple[RemoteFile, str]  # a file, and its member if it is an archive
Parts = list[tuple[Place, Place]]  # of source and target


def _multi30k(source: str, target: str, split: str) -> Parts:
    try:
        return [((MULTI30K[split, source], ""), (MULTI30K[split, target], ""))]
    except KeyError:
        return []


HUGGING_FACE = (
    "https://huggingface.co/datasets/IWSLT/iwslt2017/resolve/"
    "ebd7c60d9800c2a1be010a227e5f0a2363730f7a/data/2017-01-trnted/texts/"
)
IWSLT_SHA256 = {  # pair: SHA-256 and size, from the table of the reader at Hugging Face
    "de-en": ("ebcd53c53c8df742437e3a0fb964772e78764c3f6d4e38df0b6a2f71abc3a8b4", 16751373),
    "en-de": ("623caec69988b224dbe741f16ad90411b93430117a8021c4bb2bcab7ad1eb21e", 16751364),
    "fr-en": ("a40ca3b9a0064bd1fd582df4ced260dd3e7ff9f6f7bf863f139f74b7a5cabd78", 26872507),
    "en-fr": ("1f5bd8cd242de15fb58a04af265adb8e604a7e1b805a42cb0de7dfd15447c5c6", 27691674),
}


def _wit3(year: int, pair: str) -> RemoteFile:
    source, target = pair.split("-")
    place = f"https://wit3.fbk.eu/archive/{year}-01//texts/{source}/{target}/{pair}.tgz"
    return RemoteFile(f"iwslt{year}/{pair}.tgz", (place,))


IWSLT: Mapping[int, Mapping[str, RemoteFile]] = {
    2014: {
        "de-en": RemoteFile(
            "iwslt2014/de-en.tgz",
            ("https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",),
        )
    },
    2016: {pair: _wit3(2016, pair) for pair in IWSLT_SHA256},
    2017: {
        pair: RemoteFile(
            f"iwslt2017/{pair}.tgz",
            (HUGGING_FACE + f"{pair.replace('-', '/')}/{pair}.tgz",),
            sha256,
            size,
        )
        for pair, (sha256, size) in IWSLT_SHA256.items()
    },
}
IWSLT_LAST = {2014: 2012, 2016: 2014, 2017: 2015}  # the last year of the test sets in each


def _iwslt(year: int, source: str, target: str, split: str) -> Parts:
    known = [pair for pair in (f"{source}-{target}", f"{target}-{source}") if pair in IWSLT[year]]
    if not known:
        return []
    pair = known[0]
    tests = [f"TED.tst{test}" for test in range(2010, IWSLT_LAST[year] + 1)]
    names = {"train": ["train"], "val": ["TED.dev2010"], "test": tests}.get(split, [split])

    def place(name: str, language: str) -> Place:
        file = f"IWSLT{year % 100}.{name}.{pair}.{language}.xml"
        if name == "train":
            file = f"train.tags.{pair}.{language}"
        return IWSLT[year][pair], f"{pair}/{file}"

    return [(place(name, source), place(name, target)) for name in names]


WMT14: Mapping[str, RemoteFile] = {
    name: RemoteFile(
        f"wmt14/{url.rpartition('/')[2]}", (f"https://{url}", f"http://{url}"), sha256, size
    )
    for name, url, size, sha256 in (
        (
            "europarl", "www.statmt.org/wmt13/training-parallel-europarl-v7.tgz", 657632379,
            "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
        ),
        (
            "commoncrawl", "www.statmt.org/wmt13/training-parallel-commoncrawl.tgz", 918311367,
            "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
        ),
        (
            "news-commentary", "www.statmt.org/wmt14/training-parallel-nc-v9.tgz", 80418416,
            "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
        ),
        (
            "dev", "data.statmt.org/wmt19/translation-task/dev.tgz", 38654961,
            "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
        ),
    )
}  # fmt: skip


def _wmt14(source: str, target: str, split: str) -> Parts:
    other = next((language for language in ("de", "fr") if language in (source, target)), None)
    if other is None or "en" not in (source, target):
        return []
    if split == "train":
        members = (
            ("europarl", f"training/europarl-v7.{other}-en."),
            ("commoncrawl", f"commoncrawl.{other}-en."),
            ("news-commentary", f"training/news-commentary-v9.{other}-en."),
        )
        return [
            ((WMT14[name], member + source), (WMT14[name], member + target))
            for name, member in members
        ]
    if split == "val":
        names = [f"dev/newstest2013.{language}" for language in (source, target)]
    else:
        test = f"dev/newstest2014-{other}en"
        names = [f"{test}-src.{source}.sgm", f"{test}-ref.{target}.sgm"]
    return [((WMT14["dev"], names[0]), (WMT14["dev"], names[1]))]


CORPORA: Mapping[str, tuple[str, ...]] = {  # name: splits
    "grammar": tuple(GRAMMAR_SIZES),
    "multi30k": tuple(MULTI30K_LINES),
    **{
        f"iwslt{year}": ("train", "val", "test", *(f"TED.tst{n}" for n in range(2010, last + 1)))
        for year, last in IWSLT_LAST.items()
    },
    "wmt14": ("train", "val", "test"),
}
RULES: Mapping[str, Callable[[str, str, str], Parts]] = {
    "multi30k": _multi30k,
    **{f"iwslt{year}": partial(_iwslt, year) for year in IWSLT},
    "wmt14": _wmt14,
}


def _check_names(name: str, pair: str, split: str) -> tuple[str, str]:
    """Return the two languages, if there is such a corpus, pair and split."""
    if name not in CORPORA:
        raise CorpusError(f"no corpus {name!r}; choose among {', '.join(CORPORA)}")
    if split not in CORPORA[name]:
        raise CorpusError(f"{name}: no split {split!r}; choose among {', '.join(CORPORA[name])}")
    source, _, target = pair.partition("-")
    known = ("de", "en") if name == "grammar" else ("de", "en", "fr", "cs")
    if source == target or not {source, target} <= set(known):
        raise CorpusError(
            f"{name}: no language pair {pair!r}; give two of {', '.join(known)}, as de-en"
        )
    return source, target


def corpus_files(
    name: str,
    pair: str = "de-en",
    split: str = "train",
    *,
    mirror: str | Path | None = None,
    cache: str | Path | None = None,
    progress: bool = True,
) -> list[tuple[Path, Path]]:
    """Fetch and unpack the files of a split, and say where they are.

    Args:
        name: One of ``CORPORA``, but not ``grammar``.
        pair: Source and target language, as ``de-en``.
        split: One of ``CORPORA[name]``.
        mirror: A folder with the corpus's files, see ``fetch``.
        cache: Where downloads are kept, see ``fetch``.
        progress: Show a progress bar while downloading.

    Returns:
        Source and target file of each part of the split.

    Raises:
        CorpusError: If there is no such split in these languages, or it cannot be had.
    """
    source, target = _check_names(name, pair, split)
    parts = RULES[name](source, target, split)
    if not parts:
        raise CorpusError(f"{name}: {split} is not to be had in {source} and {target}")
    unpacked = (Path(cache) if cache else cache_folder()) / "unpacked"

    def find(place: Place) -> Path:
        file, member = place
        path = fetch(file, mirror=mirror, cache=cache, progress=progress)
        return locate(path / member, unpacked / name) if member else path

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
    """Load a split of a corpus that the package knows.

    Args:
        name: One of ``CORPORA``: ``grammar`` (embedded, no network), ``multi30k`` ...
        pair: Source and target language, as ``de-en``.
        split: One of ``CORPORA[name]``.
        mirror: A folder with the corpus's files, see ``fetch``.
        cache: Where downloads are kept, see ``fetch``.
        size: Take only so many pairs from the beginning.
        seed: The seed of the grammar.
        progress: Show a progress bar while downloading.

    Raises:
        CorpusError: If there is no such corpus, pair or split, or it cannot be had.
    """
    languages = _check_names(name, pair, split)
    if size is not None and size < 1:
        raise CorpusError(f"{name}: the size must be at least 1, it is {size}")
    if name == "grammar":
        return _grammar_text(languages, split, size, seed)
    parts = [
        read_parallel(
            *paths, languages=languages, name=name, split=split, drop_blank=split == "train"
        )
        for paths in corpus_files(name, pair, split, mirror=mirror, cache=cache, progress=progress)
    ]
    text = parts[0] if len(parts) == 1 else _joined(parts)
    lines = len(text) + len(text.blank)
    if name == "multi30k":
        text = replace(text, origin=f"multi30k/dataset, commit {COMMIT}, task 1, raw")
        if lines != MULTI30K_LINES[split]:
            raise CorpusError(
                f"multi30k {split}: has {lines} lines, it should have {MULTI30K_LINES[split]}; "
                "fetch it again"
            )
    return text if size is None else text.head(size)


def _joined(parts: list[ParallelText]) -> ParallelText:
    """Return one text of several, in their order."""
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
