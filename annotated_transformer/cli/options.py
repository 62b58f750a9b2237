"""The options of each command as dataclasses. Importing this does not import PyTorch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from tyro.conf import Positional, arg

from annotated_transformer.data.corpora import Preparation
from annotated_transformer.engine.config import Options, list_recipes, option
from annotated_transformer.engine.sweep import list_sweeps

GRID = f"Grid of runs: a JSON file, or a name: {', '.join(list_sweeps())}."
RECIPE = f"Recipe with the defaults: a JSON file, or a name: {', '.join(list_recipes())}."
NoBar: TypeAlias = Annotated[bool, arg(help="Show no progress bar.")]
Quiet: TypeAlias = Annotated[bool, arg(help="Show no progress bar and no messages.")]
Mirror: TypeAlias = Annotated[
    Path | None, arg(help="Folder with the corpora's files, to read instead of downloading.")
]


@dataclass(frozen=True)
class Train(Options):
    """Train a translation system, or resume an interrupted run."""

    recipe: Annotated[str | None, arg(help=f"{RECIPE} Without it, the corpus's own.")] = None
    out: Path | None = None
    """Folder of the run (runs/CORPUS-PAIR-PRESET, or -ARCHITECTURE by default)."""
    record: Path | None = None
    """Where to write the record of the run (record.json in its folder by default)."""
    quiet: NoBar = False

    @property
    def options(self) -> Options:
        """All options of the run."""
        return Options(self.data, self.model, self.optim, self.run)


@dataclass(frozen=True)
class Plot:
    """Plot the learning curves of a run, finished or still running."""

    model: Positional[Annotated[Path, arg(metavar="MODEL")]]
    """Folder of the run."""
    output: Annotated[Path | None, arg(aliases=["-o"])] = None
    """Picture to write: .svg, .png or .pdf (training.svg in the run's folder by default)."""


@dataclass(frozen=True)
class Weights:
    """Which weights to use, and where."""

    averaged: bool = False
    """Use the average of the last snapshots, even if the best checkpoint is better."""
    best: bool = False
    """Use the best checkpoint, even if the average of the last ones is better."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device; auto takes an NVIDIA GPU if there is one, else the CPU; mps is Apple's GPU."""


@dataclass(frozen=True)
class Decoding(Weights):
    """Which weights to decode with, where, and how."""

    precision: Literal["float32", "bfloat16", "int8"] = "float32"
    """Precision of weights: fewer bits are faster, but may change words; int8 needs a CPU."""


@dataclass(frozen=True)
class Sampled:
    """Draw translations from the model's probabilities, instead of searching for the best."""

    sample: bool = False
    """Draw each token from its probabilities; with --n-best, draw that many translations."""
    temperature: float = option(1.0, above=0)
    """Divides the logits: below 1 for safer translations, above 1 for more varied ones."""
    top_k: int = option(0, least=0)
    """Draw only from this many of the most probable tokens; 0 for all."""
    top_p: float = option(1.0, above=0, most=1)
    """Draw only from the fewest tokens whose probabilities sum to at least this."""
    seed: int = option(0, most=2**63 - 1)
    """Random seed of what is drawn."""


@dataclass(frozen=True)
class Search(Decoding):
    """How to decode, and with which weights."""

    beam: int | None = option(None, least=1)
    """Beam size (4 for translation, 21 for parsing); 1 is greedy decoding."""
    alpha: float | None = option(None, least=0, most=10)
    """Length penalty of beam search, 0 to 10; higher favours longer outputs (0.6; parsing: 0.3)."""


@dataclass(frozen=True)
class Translate:
    """Translate a file or the standard input, line by line; blank lines stay blank."""

    model: Positional[Annotated[Path | None, arg(metavar="[MODEL]")]] = None
    """Folder of a trained system (the small model that comes with the package by default)."""
    input: Positional[Annotated[Path, arg(metavar="[INPUT]")]] = Path("-")
    """Text, one sentence per line; - is the standard input. It may be the only argument."""
    output: Annotated[Path, arg(aliases=["-o"])] = Path("-")
    """File for the translation; - is the standard output."""
    ensemble: tuple[Path, ...] = ()
    """More systems with the same tokenizer, named last: decode with the mean probabilities."""
    scores: bool = False
    """Put score and log-probability before each translation, with tabs between."""
    n_best: int | None = None
    """Write this many translations of each line, each after its line number and its scores."""
    sampling: Sampled = field(default_factory=Sampled)
    interactive: bool = False
    """Translate each line as it is entered, after a prompt; an invalid line does not end it."""
    search: Search = field(default_factory=Search)
    quiet: Quiet = False


@dataclass(frozen=True)
class Score:
    """Print the log-probability that a system gives to translations, in total and per token."""

    model: Positional[Annotated[Path, arg(metavar="MODEL")]]
    """Folder of a trained system."""
    source: Positional[Annotated[Path, arg(metavar="SOURCE")]]
    """Source text, one sentence per line."""
    target: Positional[Annotated[Path, arg(metavar="TARGET")]]
    """Its translation, line by line."""
    tokens: bool = False
    """Also print each token with its log-probability."""
    ensemble: tuple[Path, ...] = ()
    """More systems with the same tokenizer, named last: score with the mean probabilities."""
    weights: Weights = field(default_factory=Weights)
    output: Annotated[Path, arg(aliases=["-o"])] = Path("-")
    """File for the scores; - is the standard output."""
    quiet: Quiet = False


@dataclass(frozen=True)
class Diagnose:
    """Report what is wrong with a parallel text, without training."""

    source: Positional[Annotated[Path, arg(metavar="SOURCE")]]
    """Source text, one sentence per line."""
    target: Positional[Annotated[Path, arg(metavar="TARGET")]]
    """Target text; line n must translate line n of the source."""
    valid_files: tuple[Path, Path] | None = None
    """Source and target text for validation, which should share no sentence with the first."""
    max_words: int = option(Preparation.max_words, least=1)
    """Maximum number of words in a sentence."""
    max_ratio: float = option(Preparation.max_ratio, least=1)
    """Maximum ratio of the lengths of a pair, in words."""
    examples: int = option(5, least=0, most=1000)
    """Number of lines to list for each finding."""
    strict: bool = False
    """End with status 1 if anything is found, for scripts."""


@dataclass(frozen=True)
class Serve:
    """Serve a system over HTTP: a page to try it, and a JSON endpoint for programs."""

    model: Positional[Annotated[Path | None, arg(metavar="[MODEL]")]] = None
    """Folder of a trained system (the small model that comes with the package by default)."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections from every network interface."""
    port: int = option(8000, least=0, most=65535)
    """Port; 0 picks a free one."""
    queue: int = option(1024, least=1, most=10**6)
    """Maximum number of sentences waiting for the model; more are refused."""
    timeout: float = option(30.0, least=0.1, most=3600)
    """Maximum seconds to answer a request."""
    decoding: Decoding = field(default_factory=Decoding)


@dataclass(frozen=True)
class Parse:
    """Parse sentences into trees, with a system trained by train --corpus treebank."""

    model: Positional[Annotated[Path | None, arg(metavar="[MODEL]")]] = None
    """Folder of a trained parser (that of train --corpus treebank by default)."""
    input: Positional[Annotated[Path, arg(metavar="[INPUT]")]] = Path("-")
    """Text, one sentence per line; - is the standard input. It may be the only argument."""
    sentence: str | None = None
    """Parse this sentence, instead of a text."""
    tokenized: bool = False
    """The text is already split into words by spaces; plain text is split as in the treebank."""
    free: bool = False
    """Decode without constraints; repair outputs that are not trees over their sentence."""
    extra: int = option(300, least=1, most=2**16)  # as many as a model's positions
    """Maximum number of symbols in a tree beyond the number of words in its sentence."""
    format: Literal["text", "brackets", "svg"] = "text"
    """Trees drawn as text, or in Penn brackets, one per line, or one tree as a picture."""
    output: Annotated[Path, arg(aliases=["-o"])] = Path("-")
    """File for the trees; - is the standard output."""
    search: Search = field(default_factory=Search)
    quiet: Quiet = False


@dataclass(frozen=True)
class Evaluate:
    """Score a system on a split of a corpus, or a file against references, with sacreBLEU.

    A parser is scored by F1 of labelled brackets.
    """

    model: Positional[Annotated[Path | None, arg(metavar="[MODEL]")]] = None
    """Folder of a trained system."""
    corpus: str | None = None
    """Corpus (the one that the system was trained on by default)."""
    prepared: Path | None = None
    """Folder written by the command prepare, instead of a corpus."""
    test_files: tuple[Path, Path] | None = None
    """Source and target text to score the system on, instead of a corpus."""
    split: str | None = None
    """Split of the corpus (test by default, or val if a prepared corpus has no test split)."""
    mirror: Mirror = None
    hypotheses: Path | None = None
    """Score this translation, line by line, instead of a system."""
    references: Path | None = None
    """Reference translations for --hypotheses."""
    ensemble: tuple[Path, ...] = ()
    """More systems with the same tokenizer, named last: decode with the mean probabilities."""
    protocols: bool = False
    """Also score under the other protocols that published numbers use."""
    language: str | None = None
    """Language of the references; needed for --protocols with --hypotheses."""
    search: Search = field(default_factory=Search)
    quiet: NoBar = False


@dataclass(frozen=True)
class Compare:
    """Compare two translations of one text by BLEU, with a test of significance."""

    first: Positional[Annotated[Path, arg(metavar="FIRST")]]
    """The first translation, line by line."""
    second: Positional[Annotated[Path, arg(metavar="SECOND")]]
    """The second translation."""
    references: Path
    """Reference translations."""
    samples: int = option(1000, least=2, most=10**6)
    """Number of bootstrap samples."""
    lowercase: bool = False
    """Capitals do not count, as for systems that write none."""


@dataclass(frozen=True)
class Ablation:
    """Measure what beam, length penalty and averaging add, one after the other."""

    model: Positional[Annotated[Path, arg(metavar="MODEL")]]
    """Folder of a system trained with --average."""
    split: str | None = None
    """Split of its corpus (test by default)."""
    mirror: Mirror = None
    record: Path | None = None
    """Where to write the record (ablation.json in the run's folder by default)."""
    quiet: NoBar = False


@dataclass(frozen=True)
class Average:
    """Average the last snapshots of a run (trained with --average)."""

    model: Positional[Annotated[Path, arg(metavar="MODEL")]]
    """Folder of the run."""
    last: int | None = None
    """Number of snapshots (all by default)."""


@dataclass(frozen=True)
class Export:
    """Write a system as CTranslate2, Hugging Face's transformers or ONNX read it."""

    to: Literal["ctranslate2", "huggingface", "onnx"]
    """Format to write."""
    model: Positional[Annotated[Path | None, arg(metavar="[MODEL]")]] = None
    """Folder of a trained system (the small model that comes with the package by default)."""
    out: Positional[Annotated[Path | None, arg(metavar="[OUT]")]] = None
    """New folder, or one of an earlier export, which is replaced. It may be the only argument."""
    precision: Literal["float32", "bfloat16", "int8"] = "float32"
    """Precision of the stored weights; for ctranslate2 only."""


@dataclass(frozen=True)
class Prepare:
    """Clean a corpus, learn its sub-words and write shards, or resume where it stopped."""

    out: Positional[Annotated[Path, arg(metavar="OUT")]]
    """Folder for the prepared corpus."""
    preparation: Preparation = field(default_factory=Preparation)
    corpus: str = "files"
    """files, grammar, or one to download: multi30k, iwslt2014, iwslt2016, iwslt2017, wmt14."""
    train_files: tuple[Path, ...] = ()
    """Source and target files, in pairs; a path may continue inside a tar or zip archive."""
    valid_files: tuple[Path, Path] | None = None
    """Source and target text for validation."""
    test_files: tuple[Path, Path] | None = None
    """Source and target text for the test."""
    mirror: Mirror = None
    workers: int | None = option(None, least=1, most=1024)
    """Number of encoding processes (one per processor by default)."""
    quiet: NoBar = False


@dataclass(frozen=True)
class Sweep:
    """Train a grid of models with several seeds, side by side, or resume one; print the table."""

    grid: Positional[Annotated[str, arg(help=GRID, metavar="GRID")]]
    out: Path | None = None
    """Folder for the runs (runs/NAME by default)."""
    record: Path | None = None
    """Where to write the record of all runs (NAME.json in that folder by default)."""
    jobs: int | None = option(None, least=1, most=1000)
    """Runs at a time (one per processor core by default); NVIDIA's MPS helps them share a GPU."""
    seeds: int | None = option(None, least=1, most=1000)
    """Number of seeds, in place of the number that the grid gives."""
    rows: tuple[str, ...] = ()
    """Train only these rows."""
    plan: bool = False
    """Count the runs left and estimate their time, if need be from 20 updates, which are kept."""
    keep: bool = False
    """Keep the folders of finished runs; by default only the record is kept."""
    mirror: Mirror = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device of all runs; auto takes an NVIDIA GPU if there is one, else the CPU."""
    quiet: NoBar = False


Command: TypeAlias = (
    Train | Translate | Score | Serve | Parse | Evaluate | Compare | Ablation | Average | Plot
    | Prepare | Diagnose | Export | Sweep
)  # fmt: skip
COMMANDS: tuple[type, ...] = get_args(Command)
