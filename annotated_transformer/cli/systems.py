"""Loading of trained systems and of test sets, shared by several commands."""

from collections.abc import Sequence
from pathlib import Path

from annotated_transformer.cli.options import Search
from annotated_transformer.data.corpora import CORPORA, ParallelText, load_corpus
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.engine import checkpoints, parser
from annotated_transformer.engine.checkpoints import AVERAGED, BEST, WEIGHTS, load_system
from annotated_transformer.engine.config import BUILT_IN, UsageError
from annotated_transformer.engine.precision import find_device
from annotated_transformer.engine.system import System, join_systems
from annotated_transformer.engine.treebanks import TREEBANKS, is_parser, load_treebank
from annotated_transformer.fast.model import can_accelerate
from annotated_transformer.fast.products import prepare_cpu
from annotated_transformer.fast.quantized import DecodingPrecision, check_precision
from annotated_transformer.pretrained import Pretrained, load_pretrained

TEST = {  # the split that is scored by default
    name: "test_2016_flickr" if name == "multi30k" else "test" for name in (*CORPORA, *TREEBANKS)
}
PACKAGED = "the small model that comes with the package"
BEAM, ALPHA = 4, 0.6  # the paper's search, unless trees are wanted


def test_split(corpus: Prepared) -> str:
    """Return the split of a prepared corpus that is scored by default."""
    return next((name for name in corpus.reports if name not in ("train", "val")), "val")


def load_split(
    corpus: str, pair: str, split: str, *, mirror: Path | None, size: int | None = None, bar: bool
) -> ParallelText:
    """Load a split of a corpus, downloading it if needed.

    Raises:
        UsageError: There is no such corpus, or it needs no mirror.
        CorpusError: It has no such split, or is not available.
    """
    if corpus not in TEST:
        raise UsageError(f"--corpus {corpus}: choose among {', '.join(TEST)}")
    check_mirror(corpus, mirror)
    if corpus in TREEBANKS:
        return load_treebank(corpus, pair, split, mirror=mirror, size=size, progress=bar)
    return load_corpus(corpus, pair, split, mirror=mirror, size=size, progress=bar)


def check_mirror(corpus: str, mirror: Path | None) -> None:
    """Raise UsageError for a mirror if the corpus needs no download."""
    if mirror is not None and corpus in (*BUILT_IN, "files"):
        raise UsageError(f"--mirror: --corpus {corpus} needs no download; leave it out")


def beam_and_alpha(search: Search, system: System) -> tuple[int, float]:
    """Return the beam and alpha of a search: the paper's where none are given (§6.1, §6.3)."""
    trees = is_parser(system.languages)
    usual = min(parser.BEAM, len(system.tokenizers[1])) if trees else BEAM
    other = parser.ALPHA if trees else ALPHA
    beam, alpha = search.beam, search.alpha
    return usual if beam is None else beam, other if alpha is None else alpha


def open_system(folder: Path, search: Search) -> tuple[System, str]:
    """Load a system for a search; also return the weights file that was used.

    Raises:
        UsageError: The search options or the device are invalid.
        CheckpointError: A file is missing or damaged.
    """
    if search.averaged and search.best:
        raise UsageError("--averaged or --best, not both; leave one of them out")
    device = find_device(search.device)
    weights = AVERAGED if search.averaged else WEIGHTS if search.best else BEST
    system = load_system(folder, weights=weights)
    at_most("--beam", search.beam, system)
    move_to_device(system, device, search.precision)
    return system, checkpoints.best_weights(folder) if weights == BEST else weights


def open_systems(
    folders: Sequence[Path], search: Search, *, parsers: bool = False
) -> tuple[System, str]:
    """Load a system, or several as an ensemble; also return what to call them."""
    found = [open_system(folder, search) for folder in folders]
    if not parsers:
        refuse_parser(found[0][0], folders[0])
    names = [str(folder / weights) for folder, (_, weights) in zip(folders, found, strict=True)]
    if len(found) == 1:
        return found[0][0], names[0]
    joined = join_systems([system for system, _ in found], [str(folder) for folder in folders])
    return joined, f"the mean of {', '.join(names)}"


def refuse_parser(system: System, folder: Path | None) -> None:
    """Raise UsageError for a parser."""
    if is_parser(system.languages):
        raise UsageError(f"{folder}: is a parser; use the command parse, or give another system")


def open_pretrained(search: Search) -> tuple[System, Pretrained]:
    """Load the model that comes with the package, for a search.

    Raises:
        UsageError: The search options or the device are invalid.
        PretrainedError: A file of the package is missing or damaged.
    """
    for name in ("averaged", "best"):
        if getattr(search, name):
            raise UsageError(f"--{name}: needs the folder of a trained system; give one")
    device = find_device(search.device)
    found = load_pretrained()
    system = found.system
    at_most("--beam", search.beam, system)
    move_to_device(system, device, search.precision)
    return system, found


def at_most(option: str, value: int | None, system: System) -> None:
    """Raise UsageError for more hypotheses than the vocabulary has tokens."""
    if (value or 0) > (size := len(system.tokenizers[1])):
        raise UsageError(f"{option} {value}: must be at most {size}, the size of the vocabulary")


def move_to_device(system: System, device: str, precision: DecodingPrecision = "float32") -> None:
    """Move a system to a device, where it decodes in a precision; configure a CPU's products.

    Raises:
        UsageError: The device or the model cannot decode in this precision.
    """
    if precision != "float32" and not can_accelerate(system.model):
        raise UsageError(f"--precision {precision}: is for Transformers; leave it out")
    try:
        check_precision(precision, device)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    system.model.to(device)
    system.precision = precision
    if device == "cpu":
        prepare_cpu()


def corpus_of(system: System) -> str:
    """Return the name of the corpus that a system was trained on."""
    return str(system.training.get("options", {}).get("corpus", "none"))
