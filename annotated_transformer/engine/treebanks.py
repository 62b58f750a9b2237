"""Treebanks as parallel text: a sentence, and its tree as a sequence of symbols (§6.3)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

from annotated_transformer.data.archives import locate_file
from annotated_transformer.data.corpora import SOURCES, ParallelText, text_of_lines
from annotated_transformer.data.downloads import RemoteFile, cache_folder, fetch_file
from annotated_transformer.data.files import CorpusError
from annotated_transformer.data.grammar import GRAMMAR_SIZES, grammar_pairs
from annotated_transformer.data.symbols import SymbolTokenizer, word_shape
from annotated_transformer.notation import SPECIAL_TOKENS
from annotated_transformer.results import parsing

MARKS = "()/"  # first characters of brackets and tags in trees that contain words
TREES = "trees"  # the target "language" of a parser
LANGUAGES = ("en", TREES)
FILES = {"train": (1, 159), "val": (160, 179), "test": (180, 199)}  # of the Penn sample
TREEBANKS: dict[str, tuple[str, ...]] = {  # name: splits
    "treebank": tuple(FILES),
    "grammar-trees": tuple(GRAMMAR_SIZES),
}


def is_parser(languages: tuple[str, str]) -> bool:
    """Whether a system of these languages writes trees."""
    return languages[1] == TREES


def load_treebank(
    name: str,
    pair: str = "en-trees",
    split: str = "train",
    *,
    mirror: str | Path | None = None,
    cache: str | Path | None = None,
    size: int | None = None,
    progress: bool = True,
) -> ParallelText:
    """Load a split of a treebank: words with blanks between, and linearized trees.

    Args:
        name: ``treebank``, the 199 files of the Wall Street Journal that NLTK distributes, split
            by file (1 to 159, 160 to 179, 180 to 199); or ``grammar-trees``, those of the grammar.
        pair: ``en-trees``.
        split: ``train``, ``val`` or ``test``.
        mirror: A folder with ``ptb/treebank.zip``, see ``fetch_file``.
        cache: The folder for downloads, see ``fetch_file``.
        size: Use only the first ``size`` trees.
        progress: Show a progress bar while downloading.

    Raises:
        CorpusError: There is no such split, or the download failed.
    """
    if pair != "-".join(LANGUAGES):
        raise CorpusError(f"{name}: no language pair {pair!r}; give {'-'.join(LANGUAGES)}")
    if split not in TREEBANKS[name]:
        raise CorpusError(f"{name}: no split {split!r}; choose among {', '.join(TREEBANKS[name])}")
    if name == "treebank":
        trees, origin = penn_trees(split, mirror, cache, progress), "Penn Treebank, NLTK's sample"
    else:
        trees = [parsing.read_trees(pair.tree)[0] for pair in grammar_pairs(split, size)]
        origin = "written by the grammar, seed 0"
    source, target = zip(*map(tree_lines, trees), strict=True)
    text = text_of_lines(source, target, LANGUAGES, name=name, split=split, origin=origin)
    return text if size is None else text.head(size)


def penn_trees(
    split: str, mirror: str | Path | None, cache: str | Path | None, progress: bool
) -> list[parsing.Tree]:
    """Return the trees of a split of the Penn sample, without traces and function tags."""
    ((path, (size, digest, *urls)),) = SOURCES["treebanks"].items()
    file = RemoteFile(path, tuple(urls), size, digest)
    archive = fetch_file(file, mirror=mirror, cache=cache, progress=progress)
    unpacked = Path(cache or cache_folder()) / "unpacked" / "treebank"
    folder = locate_file(archive / "treebank/combined/wsj_0001.mrg", unpacked).parent
    first, last = FILES[split]
    paths = (folder / f"wsj_{number:04d}.mrg" for number in range(first, last + 1))
    return [tree for each in paths for tree in clean_trees(each.read_text("utf-8"), each.name)]


def clean_trees(text: str, name: str) -> Iterator[parsing.Tree]:
    """Yield the trees of a text in Penn brackets, without traces and function tags.

    Raises:
        CorpusError: The brackets are unbalanced.
    """
    try:
        found = parsing.read_trees(text)
    except ValueError as error:
        raise CorpusError(f"{name}: {error}") from None
    yield from (tree for tree in map(parsing.clean_tree, found) if tree is not None)


def safe_words(sentence: str) -> str:
    """Return a sentence in which no word can be taken for a bracket, a tag or a special symbol."""
    return " ".join(
        word_shape(word) if word[0] in MARKS or word in SPECIAL_TOKENS else word
        for word in sentence.split()
    )


def with_words(line: str, sentence: str) -> str:
    """Put its word before each tag of a tree: ``(NP the /DT cat /NN )NP``."""
    left = iter(safe_words(sentence).split())
    return " ".join(s if s[0] in "()" else f"{next(left)} /{s}" for s in line.split())


def without_words(symbols: Iterable[str]) -> list[str]:
    """Undo ``with_words``: leave out the words, and the ``/`` of the tags."""
    return [symbol.removeprefix("/") for symbol in symbols if symbol[0] in MARKS]


def tree_vocabulary(text: ParallelText, most: int) -> SymbolTokenizer:
    """Return one vocabulary for words and trees.

    Args:
        text: Sentences, and their trees.
        most: How many words to keep, the most frequent. Another word becomes its shape, if a rare
            word of this text has the same one, or else UNK.
    """
    counts = Counter(word for line in text.source for word in safe_words(line).split())
    kept = [word for word, _ in counts.most_common(most)]
    shapes = sorted({word_shape(word) for word in counts.keys() - set(kept)})
    symbols = sorted({s if s[0] in "()" else f"/{s}" for line in text.target for s in line.split()})
    return SymbolTokenizer(list(dict.fromkeys([*symbols, *shapes, *kept])))


def tree_lines(tree: parsing.Tree) -> tuple[str, str]:
    """Return a tree as two lines: its words, and its symbols."""
    return " ".join(parsing.leaves(tree)), " ".join(parsing.linearize(tree))


def with_phrases(text: ParallelText) -> ParallelText:
    """Return a text of trees, and after it each different constituent of two words or more.

    A constituent has the line number of the first tree with it.
    """
    more: dict[tuple[str, str], int] = {}
    for number, (source, target) in zip(text.line_numbers(), text, strict=True):
        tree = parsing.delinearize(target.split(), source.split())
        for node, opens in parsing.walk(tree):
            if opens and node is not tree and len(parsing.leaves(node)) > 1:
                more.setdefault(tree_lines(node), number)
    sources, targets = zip(*text, *more, strict=True)
    numbers = (*text.line_numbers(), *more.values())
    return replace(text, source=sources, target=targets, numbers=numbers)


def check_trees(text: ParallelText) -> ParallelText:
    """Return the text of someone's own files with linearized trees on the target side.

    A target line has either symbols, or a tree in Penn brackets, which is cleaned and linearized.

    Raises:
        CorpusError: A line is not a tree over the words of its sentence.
    """
    target = []
    for number, (source, line) in zip(text.line_numbers(), text, strict=True):
        if (symbols := own_symbols(line, source.split())) is None:
            place = f"{text.checksums[1][0]}{text.line_note(1)}, line {number}"
            told = f"{place}: is no tree over the words of {shorten(source, 60)!r}"
            raise CorpusError(f"{told}; give Penn brackets, or symbols as (S (NP PRP )NP ... )S")
        target.append(" ".join(symbols))
    return replace(text, target=tuple(target))


def own_symbols(line: str, words: Sequence[str]) -> list[str] | None:
    """Return the symbols of a tree over these words; None if the line has no such tree."""
    if parsing.well_formed(symbols := line.split(), words):
        return symbols
    try:
        (tree,) = clean_trees(line, "")
    except ValueError:  # unbalanced, or not one tree
        return None
    return parsing.linearize(tree) if parsing.leaves(tree) == list(words) else None
