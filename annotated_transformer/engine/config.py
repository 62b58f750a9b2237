"""The options of a run in four groups, their limits, and recipes. Does not import PyTorch."""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from annotated_transformer.data.files import not_read, parse_object, regular_file
from annotated_transformer.engine.typed import convert_json, from_dict, type_hints

LANGUAGE = re.compile(r"(?:^|\.)(?!gz|xz)([a-z]{2})(?:(?=\.)|(?<=\..{2})$)")  # in a file's name

T = TypeVar("T")


class UsageError(ValueError):
    """Invalid options; the message names one as it is typed, and says what to change."""


def option(default: T, **metadata: Any) -> T:
    """Return a dataclass field with a default value.

    Args:
        default: The default value.
        metadata: Limits for :func:`check_options` (``least``, ``above``, ``most``, ``below``);
            ``config``, the name in the model's configuration; ``size``, true for
            options that a preset sets; ``aliases``, other names on the command line.
    """
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class DataOptions:
    """The training data."""

    corpus: str = "grammar"
    """grammar (built in), multi30k, iwslt2014, iwslt2016, iwslt2017, files or prepared; for a
    parser: treebank, or grammar-trees (built in). Other defaults depend on it."""
    pair: str = "de-en"
    """Source and target language, such as de-en; en-trees for a parser."""
    tokenizer: Literal["bpe", "bpe-lower", "words"] = "bpe"
    """Byte-pair encoding shared by both languages, cased or lower-cased, or the words of each."""
    vocabulary: int = option(10_000, least=1, most=2**20)
    """Number of sub-words to learn; for a parser, of the most frequent words to keep."""
    max_len: int = option(256, least=2, most=2**16, config="max_len")
    """Maximum number of tokens in a sentence, including special ones."""
    skip_long: bool = False
    """Skip longer sentences instead of stopping with an error."""
    size: int | None = option(None, least=1)
    """Use only this many training pairs."""
    phrases: bool = False
    """Also train the parser on each constituent of two or more words, as if it were a sentence."""
    train_files: tuple[Path, Path] | None = None
    """Source and target text for training; implies --corpus files."""
    valid_files: tuple[Path, Path] | None = None
    """Source and target text for validation, with --train-files."""
    prepared: Path | None = None
    """Folder written by the command prepare; implies --corpus prepared."""
    mirror: Path | None = None
    """Folder with the corpora's files, to read instead of downloading."""


OF_WEIGHTS = "tokenizer vocabulary architecture preset layers dropout".split()  # for fine-tuning
PLACES = "train_files valid_files prepared mirror finetune_from".split()  # not what the data is


@dataclass(frozen=True)
class ModelOptions:
    """The model. Sizes that are not given come from the preset."""

    architecture: Literal["transformer", "rnn", "rnn-attention", "rnn-dot", "convolution"] = option(
        "transformer", aliases=("--model",)
    )
    """rnn has no attention, rnn-attention additive and rnn-dot dot-product (alias --model)."""
    preset: Literal["tiny", "base", "big"] = "tiny"
    """Sizes; base and big are the paper's. The older architectures have tiny only."""
    layers: int | None = option(None, least=1, most=256, config="N", size=True, aliases=("--N",))
    """Layers in each stack (alias --N)."""
    d_model: int | None = option(None, least=1, most=2**16, config="d_model", size=True)
    """Width of the embeddings and layers."""
    d_ff: int | None = option(None, least=1, most=2**18, config="d_ff", size=True)
    """Inner width of the feed-forward networks."""
    heads: int | None = option(None, least=1, most=2**10, config="h", size=True, aliases=("--h",))
    """Number of attention heads (alias --h)."""
    d_k: int | None = option(None, least=1, most=2**16, config="d_k", size=True)
    """Width of a head's queries and keys (d_model / heads by default)."""
    d_v: int | None = option(None, least=1, most=2**16, config="d_v", size=True)
    """Width of a head's values (d_model / heads by default)."""
    dropout: float | None = option(None, least=0, below=1, config="dropout", size=True)
    """Dropout probability of sub-layer outputs and embeddings, as in the paper."""
    attention_dropout: float | None = option(None, least=0, below=1, config="attention_dropout")
    """Dropout probability of attention weights; the paper has it for parsing only."""
    ff_dropout: float | None = option(None, least=0, below=1, config="ff_dropout")
    """Dropout probability of hidden units of the feed-forward networks; not in the paper."""
    norm: Literal["post", "pre"] | None = option(None, config="norm")
    """Layer normalization after each residual sum, as in the paper, or before each sub-layer."""
    positions: Literal["sinusoid", "learned"] | None = option(None, config="positions")
    """The paper's sinusoidal positional encodings, or learned ones."""
    tie: Literal["all", "target", "none"] | None = option(None, config="tie")
    """Which embeddings share the generator's matrix (all with a shared vocabulary by default)."""


@dataclass(frozen=True)
class OptimOptions:
    """Everything in training that changes the resulting weights."""

    updates: int = option(3000, least=1)
    """Total number of updates."""
    max_tokens: int = option(4096, least=1)
    """Maximum source tokens in a batch, and maximum target tokens, including padding."""
    accumulate: int = option(1, least=1)
    """Batches per update (gradient accumulation)."""
    warmup: int = option(1000, least=1)
    """Updates until the learning rate reaches its peak."""
    peak: float | None = option(5e-3, above=0)
    """Peak learning rate; in a recipe, null is the paper's, 1 / sqrt(d_model · warmup)."""
    smoothing: float = option(0.1, least=0, below=1)
    """Label smoothing ε."""
    clip: float | None = option(None, above=0)
    """Clip the gradient norm to this (no clipping by default)."""
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    """Precision of matrix products; tf32 needs a GPU, and float16 is meant for GPUs."""
    seed: int = option(0, least=0, most=2**63 - 1)
    """Random seed of initial weights, data order and dropout."""
    average: int = option(0, least=0)
    """At the end, average the weights of the last snapshots, this many; 0 for no averaging."""
    average_every: int | None = option(None, least=1)
    """Updates between those snapshots (one epoch by default)."""
    finetune_from: Path | None = None
    """Start from this run's weights, with its tokenizer and sizes, and train on another text."""
    validate_every: int | None = option(None, least=1)
    """Updates between validations (one epoch by default)."""
    eval_bleu: bool = False
    """At each validation, also translate the text greedily and log BLEU."""
    best_metric: Literal["loss", "bleu"] = "loss"
    """Metric that decides which weights are best, and that --patience watches."""
    patience: int | None = option(None, least=1)
    """Stop after this many validations without better weights (never by default)."""


@dataclass(frozen=True)
class RunOptions:
    """How the run is carried out. These may change when it resumes.

    The weights stay the same, but for rounding, unless --device or --non-finite changes, or, with
    dropout, --compile.
    """

    save_every: float = option(60.0, least=0)
    """Seconds between checkpoints; more if saving takes long. With 0, one after each update."""
    keep: int = option(2, least=1)
    """Number of checkpoints to keep for resuming."""
    log_every: int = option(50, least=1)
    """Updates between lines of the log."""
    steps: int | None = option(None, least=1)
    """Stop this call after this many updates, and estimate how long the whole run takes."""
    tensorboard: Path | None = None
    """Also log to this TensorBoard folder (needs the package tensorboard)."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What to do when a loss or a gradient becomes NaN or infinite."""
    compile: bool = False
    """Compile with torch.compile, once for each bucket of lengths; starting takes longer."""
    sharded: bool = option(False, aliases=("--pieces",))
    """Shard weights and optimizer state over the processes (FSDP2)."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device; auto takes an NVIDIA GPU if there is one, else the CPU; mps is Apple's GPU."""


@dataclass(frozen=True)
class Options:
    """All options of a run, in four groups; names are unique across groups."""

    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def replace(self, **changes: Any) -> "Options":
        """Return a copy with some fields changed, in whichever group they are.

        Raises:
            UsageError: There is no such option.
        """
        groups = {}
        for group in fields(self):
            own = {each.name for each in fields(getattr(self, group.name))}
            mine = {name: changes.pop(name) for name in own & changes.keys()}
            groups[group.name] = replace(getattr(self, group.name), **mine)
        if changes:
            raise UsageError(f"{option_flag(min(changes))}: there is no such option")
        return Options(**groups)

    def described(self) -> dict[str, Any]:
        """Return the options that determine the weights, flat; a resumed run needs the same."""
        found = asdict(self.data) | asdict(self.model) | asdict(self.optim)
        return {name: value for name, value in found.items() if name not in PLACES}


def option_flag(name: str) -> str:
    """Return an option's name as typed on the command line."""
    return f"--{name.replace('_', '-')}"


# --- limits ----------------------------------------------------------------------------------

LIMITS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {  # wording, and the test
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
MOST = 2**31 - 1  # of integers, unless an option has its own limit
MOST_WRITTEN = 200_000  # pairs of the grammar, which are generated at each start
CORPORA = (
    *("grammar", "multi30k", "iwslt2014", "iwslt2016", "iwslt2017", "files", "prepared"),
    *("treebank", "grammar-trees"),
)
BUILT_IN = ("grammar", "grammar-trees")


def check_options(options: Options) -> None:
    """Raise UsageError, naming the option, for invalid values, before anything is loaded."""
    check_group(options)
    if options.data.corpus == "wmt14":
        raise UsageError("--corpus wmt14: too large for memory; prepare it for --prepared FOLDER")
    if options.data.corpus not in CORPORA:
        raise UsageError(f"--corpus {options.data.corpus}: choose among {', '.join(CORPORA)}")
    if options.optim.best_metric == "bleu" and not options.optim.eval_bleu:
        raise UsageError("--best-metric bleu: needs --eval-bleu; give both")
    if options.optim.eval_bleu and options.data.pair.endswith("-trees"):
        raise UsageError("--eval-bleu: not for a parser; leave it out")
    if options.data.phrases and not options.data.pair.endswith("-trees"):
        raise UsageError("--phrases: is for a parser; give --pair en-trees, or leave it out")
    if options.data.tokenizer != "bpe" and options.data.pair.endswith("-trees"):
        raise UsageError("--tokenizer: not for a parser, whose words are whole; leave it out")
    if options.optim.eval_bleu and options.run.sharded:
        raise UsageError("--eval-bleu: needs whole weights; leave out --sharded")
    model, usual = options.model, ModelOptions()
    if model.architecture != "transformer":
        shared = ("architecture", "layers", "dropout")  # that other architectures have, too
        for each in fields(model):
            if each.name not in shared and getattr(model, each.name) != getattr(usual, each.name):
                flag = option_flag(each.name)
                raise UsageError(f"{flag}: not for --architecture {model.architecture}")
        if options.run.compile:
            raise UsageError("--compile: works with the Transformer only; leave it out")


def check_group(group: Any) -> None:
    """Raise UsageError for values of a group with a wrong type or outside their limits."""
    for each in fields(group):
        value, name = getattr(group, each.name), option_flag(each.name)
        if is_dataclass(value):  # a group within
            check_group(value)
            continue
        try:
            convert_json(type_hints(type(group))[each.name], value)
        except TypeError as error:
            raise UsageError(f"{name}: {error}") from None
        meta = {"most": MOST, **each.metadata} if type(value) is int else each.metadata
        limits = [(key, meta[key]) for key in LIMITS if key in meta]
        if value is None or not limits:
            continue
        holds = all(LIMITS[key][1](value, limit) for key, limit in limits)
        if not (holds and math.isfinite(value)):
            words = " and ".join(f"{LIMITS[key][0]} {limit}" for key, limit in limits)
            raise UsageError(f"{name} {value}: must be {words}")


def check_sizes(sizes: Mapping[str, Any]) -> None:
    """Check sizes from a model's configuration against the limits of the options."""
    for kind in (DataOptions, ModelOptions):
        names = {x.name: {x.name, x.metadata.get("config", x.name)} for x in fields(kind)}
        found = {name: sizes[key] for name, keys in names.items() for key in keys & sizes.keys()}
        check_group(kind(**found))


def check_order(
    option: str, paths: Sequence[Path] | None, pair: str, remedy: str = "give --pair, or "
) -> None:
    """Raise UsageError if the names of files end in other languages, or in the other order."""
    names = [LANGUAGE.findall(Path(path).name) for path in paths or ()]
    for one, other in zip(names[::2], names[1::2], strict=True):
        if one and other and one[-1] != other[-1] and (found := f"{one[-1]}-{other[-1]}") != pair:
            remedy += "exchange" if found.split("-") == pair.split("-")[::-1] else "rename"
            reason = f"end like --pair {found}, and the pair is {pair}"
            raise UsageError(f"{option}: {reason}; {remedy} the files")


def check_sources(data: DataOptions) -> None:
    """Raise UsageError for a corpus without its files, or files without their corpus."""
    if (data.corpus == "prepared") != (data.prepared is not None):
        raise UsageError("--corpus prepared and --prepared FOLDER go together")
    files = [name for name in ("train_files", "valid_files") if getattr(data, name) is not None]
    if data.corpus == "files" and len(files) < 2:
        missing = "--valid-files" if "train_files" in files else "--train-files"
        raise UsageError(f"{missing} is missing: give two files, source and target")
    if data.corpus != "files" and files:
        raise UsageError(f"{option_flag(files[0])}: only for --corpus files, not {data.corpus}")
    for name in files:
        check_order(option_flag(name), getattr(data, name), data.pair)
    if data.mirror is not None and data.corpus in (*BUILT_IN, "files", "prepared"):
        raise UsageError(f"--mirror: --corpus {data.corpus} needs no download; leave it out")
    if data.corpus in BUILT_IN and (data.size or 0) > MOST_WRITTEN:
        raise UsageError(f"--size: the grammar has at most {MOST_WRITTEN:,} pairs; ask for fewer")


# --- recipes ---------------------------------------------------------------------------------

RECIPES = Path(__file__).with_name("recipes")


def list_recipes() -> dict[str, str]:
    """Return the package's recipes and their descriptions."""
    files = sorted(RECIPES.glob("*.json"))
    found = {path.stem: read_json(path, f"--recipe {path}") for path in files}
    return {name: str(data.get("about", "")) for name, data in found.items()}


def load_recipe(recipe: str | Path) -> Options:
    """Return the options of a recipe, which may be based on another one.

    Args:
        recipe: A name, see :func:`list_recipes`; or a JSON file with the groups ``data``,
            ``model``, ``optim`` and ``run``, and optionally ``like``, the recipe to start from, and
            ``about``, a description.

    Raises:
        UsageError: There is no such recipe, or a value in it is invalid.
    """
    path = RECIPES / f"{recipe}.json"
    if Path(recipe).suffix or not path.exists():
        path = Path(recipe)
    if not path.exists():
        known = ", ".join(list_recipes())
        raise UsageError(f"--recipe {recipe}: neither a file nor one of {known}")
    data = read_json(path, f"--recipe {path}")
    data.pop("about", None)
    like = data.pop("like", None)
    if like is not None and (not isinstance(like, str) or like not in list_recipes()):
        known = ", ".join(list_recipes())
        raise UsageError(f"--recipe {recipe}: like {like!r} is not one of {known}")
    start = Options() if like is None else load_recipe(like)
    try:
        groups = {each.name: vars(getattr(start, each.name)) for each in fields(start)}
        for name in data.keys() & groups.keys():
            if isinstance(data[name], dict):
                data[name] = {**groups[name], **data[name]}
        options = from_dict(Options, {**groups, **data})
        check_options(options)
    except (TypeError, UsageError) as error:
        raise UsageError(f"--recipe {recipe}: {error}; correct the file") from None
    return options


def read_json(path: Path, place: str) -> dict[str, Any]:
    """Read a small JSON file with an object of options.

    Raises:
        UsageError: It cannot be read, or holds something else; the message begins with ``place``.
    """
    try:
        with regular_file(path).open("rb") as file:
            return parse_object(file.read(1 << 20))  # a recipe is smaller
    except OSError as error:
        raise UsageError(not_read(error, place, "give a name or another file")) from None
    except ValueError as error:
        raise UsageError(f"{place}: is {error}; see {RECIPES}") from None


def recipe_name(corpus: str, pair: str = "", preset: str = "") -> str:
    """Return the default recipe for a corpus."""
    if corpus == "prepared" and (preset == "big" or "fr" in pair):
        return f"paper-{'big' if preset == 'big' else 'base'}-en-{'fr' if 'fr' in pair else 'de'}"
    known = {f"iwslt20{year}": f"iwslt{year}" for year in (14, 16, 17)}
    return known.get(corpus, corpus if corpus in CORPORA else "grammar")


def default_options(said: Mapping[str, Any]) -> Options:
    """Return the default options, given the ones that the user has set.

    Args:
        said: The user's options by name. ``recipe`` selects a recipe, otherwise the corpus does.
            Files imply their corpus. A preset other than the recipe's replaces its sizes and
            dropout; another architecture keeps only the recipe's dropout.

    Raises:
        UsageError: There is no such recipe.
    """
    implied = {"prepared": "prepared", "train_files": "files", "valid_files": "files"}
    corpus = said.get("corpus") or next((implied[name] for name in implied if said.get(name)), None)
    name = said.get("recipe")
    if name is None:
        name = recipe_name(*(str(x or "") for x in (corpus, said.get("pair"), said.get("preset"))))
    options = load_recipe(name)
    if corpus is not None:
        options = options.replace(corpus=corpus)
    model = options.model
    if said.get("architecture", model.architecture) != model.architecture:
        model = ModelOptions(said["architecture"], dropout=model.dropout)
    if said.get("preset", model.preset) != model.preset:
        sizes: dict[str, Any] = {x.name: None for x in fields(model) if x.metadata.get("size")}
        model = replace(model, preset=said["preset"], **sizes)
    options = replace(options, model=model)
    if said.get("finetune_from"):
        options = options.replace(**options_of_run(Path(said["finetune_from"])))
    return options


def options_of_run(folder: Path) -> dict[str, Any]:
    """Return the options that a run's weights and tokenizer fix, which fine-tuning starts from.

    Raises:
        UsageError: It is no run, or its description is damaged.
    """
    place = f"--finetune-from {folder}"
    if not (path := folder / "config.json").exists():
        raise UsageError(f"{place}: there is no run; give the folder of one")
    data = read_json(path, place)
    try:
        known, sizes = Options().described(), data["model"]
        trained = data["training"].get("options", {})
        found = {name: trained[name] for name in OF_WEIGHTS if name in trained}
        for each in fields(ModelOptions) if data["architecture"] == "transformer" else ():
            if each.metadata.get("config") in sizes:
                found[each.name] = sizes[each.metadata["config"]]
        found |= {"pair": "-".join(data["languages"]), "max_len": sizes["max_len"]}
        check_options(Options().replace(**{name: found[name] for name in found if name in known}))
    except (LookupError, TypeError, AttributeError, UsageError) as error:
        raise UsageError(f"{place}: config.json is damaged ({error}); give another run") from None
    return found


def build_options(said: Mapping[str, Any]) -> Options:
    """Return checked options, such as ``{"corpus": "grammar"}``, on top of the defaults."""
    own = {name: value for name, value in said.items() if name != "recipe"}
    options = default_options(said).replace(**own)
    check_options(options)
    check_sources(options.data)
    return options
