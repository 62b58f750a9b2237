"""Parsing of the command line into a command and its options, without importing PyTorch."""

import contextlib
import difflib
import functools
import importlib.util
import io
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import tyro

from annotated_transformer import __version__
from annotated_transformer.cli.options import (
    COMMANDS,
    Command,
    Evaluate,
    Export,
    Parse,
    Prepare,
    Train,
    Translate,
)
from annotated_transformer.cli.output import NAME, check_target, print_result
from annotated_transformer.data.corpora import CORPORA, Preparation
from annotated_transformer.data.files import load_object
from annotated_transformer.engine.config import (
    ModelOptions,
    Options,
    UsageError,
    check_group,
    check_options,
    check_sources,
    default_options,
    load_recipe,
    option_flag,
    recipe_name,
)

COMPLETION = "--tyro-print-completion"
PLAIN = (  # what tyro says, and what we say
    (r"Missing value for argument '(\S+)'.*", r"\1: needs a value"),
    (r"Error parsing (\S+): .*\{PATH PATH\}.*", r"\1: needs two files"),
    (r"Error parsing (\S+): .*\bINT\b.* from \['(.*)'\]", r"\1 \2: must be a whole number"),
    (r"Error parsing (\S+): .* int\(\) .*: '(.*)'", r"\1 \2: must be a whole number"),
    (r"Error parsing (\S+): .*\bFLOAT\b.* from \['(.*)'\]", r"\1 \2: must be a number"),
    (r"Error parsing (\S+): .* float: '(.*)'", r"\1 \2: must be a number"),
    (r"Unrecognized options: (-\S+).*", r"\1: there is no such option"),
    (r"Unrecognized options: ([^\s,]+).*", r"\1: is one argument too many"),
    (r"invalid choice '(.*)' for argument '(.*)'\. Expected one of .*", r"\2 \1: is no choice"),
)
KINDS: dict[str, Any] = {kind.__name__.lower(): kind for kind in COMMANDS}
ALIASES = {  # other names of options of train
    alias: option_flag(option.name)
    for group in fields(Options())
    for option in fields(getattr(Options(), group.name))
    for alias in option.metadata.get("aliases", ())
}
HINTS = get_type_hints(ModelOptions)
CHOICES = {name: get_args(HINTS[name]) for name in ("preset", "architecture")}
CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
DECIDING = (
    "recipe corpus pair preset architecture prepared train_files valid_files finetune_from".split()
)
OF_WEIGHTS = "tokenizer vocabulary preset architecture".split()  # fine-tuning keeps them
SAMPLING = "temperature top_k top_p seed".split()
MOST_BEST = 1000
# What evaluate does not take for two files
SYSTEM = (
    "ensemble corpus prepared test_files split mirror beam alpha averaged best device precision"
).split()


def parse_command_line(words: Sequence[str]) -> Command:
    """Parse the words of the command line.

    Raises:
        UsageError: There is no such command, or an option is invalid or has no effect.
        SystemExit: Help was requested and printed.
    """
    name = words[0] if words else ""
    if name == COMPLETION:
        print_result(completion_script(words))
        raise SystemExit(0)
    if name == "--version":
        print_result(f"{NAME} {__version__}")
        raise SystemExit(0)
    if name in ("-h", "--help"):
        print_result(commands_help())
        raise SystemExit(0)
    if name not in KINDS:
        what = "option before a command" if name.startswith("-") else "command"
        reason = f"{name}: there is no such {what}" if name else "no command given"
        meant = suggest_word(name, ("--help", "--version", *KINDS))
        raise UsageError(f"{reason}; {meant}choose among {', '.join(KINDS)}")
    plain, said = read_words(name, words[1:])
    if shutil.get_terminal_size().columns < 40:
        os.environ["COLUMNS"] = "40"  # tyro hangs with fewer
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(box):
            command: Command = tyro.cli(
                KINDS[name],
                args=plain,
                prog=f"{NAME} {name}",
                description=command_summary(KINDS[name]),
                default=default_of(KINDS[name], deciding_options(said)),
                config=CONFIG,
            )
    except SystemExit as stop:
        if stop.code:
            told = f"{plain_error(strip_error_box(box.getvalue()))}; see {NAME} {name} --help"
            raise UsageError(told) from None
        print_result(without_none(box.getvalue()).rstrip())
        raise
    check_command(command, said)
    return command


def completion_script(words: Sequence[str]) -> str:
    """Return the completion script for a shell.

    Raises:
        UsageError: The shell is not supported.
    """
    if list(words[1:]) not in (["bash"], ["zsh"]):
        raise UsageError(f"{COMPLETION}: give bash or zsh")
    config = (*CONFIG, tyro.conf.OmitSubcommandPrefixes)
    box = io.StringIO()
    with contextlib.redirect_stdout(box), contextlib.suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(KINDS, args=words, prog=NAME, config=config)
    return box.getvalue().replace("complete -F", "complete -o default -F")  # else files


def read_words(name: str, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command's words without aliases, and the options with their values.

    Raises:
        UsageError: An option does not exist, or a word is empty or not valid UTF-8.
    """
    aliases = ALIASES if name == "train" else {}
    types = {option_flag(option): hint for option, hint in types_of(KINDS[name]).items()}
    known = {"--help", *types, *aliases}
    known |= {"-o"} if "--output" in known else set()
    plain, said = [], {}
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if not word or (word[0] == "-" and equals and not value):
            place = next((each for each in (option, before) if each.startswith("-")), "an argument")
            raise UsageError(f"{place}: is empty; give a value, or leave it out")
        if any("\ud800" <= sign <= "\udfff" for sign in word):
            raise UsageError(f"{word!a}: is not valid UTF-8; use another name")
        if re.match(r"--.|-(?!h$|inf$)[a-z]", option):
            option = option.replace("_", "-")
            if option not in known:
                meant = f"{suggest_word(option, known)}see {NAME} {name} --help"
                raise UsageError(f"{option}: there is no such option; {meant}")
            option = aliases.get(option, option)
            if equals and types.get(option) is bool:
                raise UsageError(f"{option}: takes no value; leave out ={value}")
            if (field := option.strip("-").replace("-", "_")) in said and field.endswith("_files"):
                raise UsageError(f"{option}: given twice; name all files after one {option}")
            said[field] = value if equals else after
        plain.append(option + equals + value)
    return plain, said


@functools.cache
def types_of(kind: Any) -> dict[str, Any]:
    """Return a command's options and their types, without arguments that have a place instead."""
    types: dict[str, Any] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if tyro.conf.Positional not in getattr(hint, "__metadata__", ()):
            group = isinstance(hint, type) and is_dataclass(hint)
            types |= types_of(hint) if group else {name: getattr(hint, "__origin__", hint)}
    return types


def suggest_word(word: str, known: Collection[str]) -> str:
    """Return a question with the known word that is meant, begins alike or is closest, if any."""
    own = {name.strip("-"): name for name in known}
    same = load_object(Path(__file__).with_name("synonyms.json"))  # what other programs call it
    ours = {x.strip("-"): name for name in same.keys() & known for x in same[name].split()} | own
    bare = word.strip("-")
    if f"--{bare}" in same[""].split():  # nothing here is like it
        return ""
    begun = [name for name in own if name.startswith(bare) or bare.startswith(f"{name}-")]
    sure = [bare] if bare in ours else begun if len(begun) == 1 else []
    swaps = {f"{bare[:i]}{bare[i + 1]}{bare[i]}{bare[i + 2 :]}" for i in range(len(bare) - 1)}
    found = sure or sorted(swaps & ours.keys()) or difflib.get_close_matches(bare, ours, 1, 0.75)
    return f"did you mean {ours[found[0]]}? " if found else ""


def check_command(command: Command, said: Mapping[str, str]) -> None:
    """Raise UsageError for options that are invalid or have no effect."""

    def refuse(reason: str, *names: str) -> None:
        for name in names:
            if name in said:
                raise UsageError(f"{option_flag(name)}: {reason}")

    if isinstance(command, Train):
        if command.optim.finetune_from is not None:
            refuse("comes with the weights of --finetune-from; leave it out", *OF_WEIGHTS)
            if not {"corpus", "recipe", "prepared", "train_files"} & said.keys():
                refuse("needs a text, too; give --train-files and --valid-files", "finetune_from")
        if command.run.tensorboard and importlib.util.find_spec("tensorboard") is None:
            refuse("needs the package tensorboard: pip install tensorboard", "tensorboard")
        if (board := command.run.tensorboard) is not None:
            check_target("--tensorboard", board / "events")
        check_options(command.options)
        check_sources(command.data)
        if not command.optim.average:
            refuse("has no effect without --average; give both", "average_every")
        if command.data.tokenizer == "words":
            refuse("has no effect with --tokenizer words; leave it out", "vocabulary")
    elif isinstance(command, Evaluate) and command.model is None and command.hypotheses:
        refuse("is for a system, not for two files", *SYSTEM)
    elif isinstance(command, Export) and command.to != "ctranslate2":
        refuse(f"has no effect with --to {command.to}; leave it out", "precision")
    if getattr(command, "ensemble", None) == ():
        refuse("give the folders of more systems", "ensemble")
    check_group(command)
    if isinstance(command, Translate):
        if not command.sampling.sample:
            refuse("has no effect without --sample; give both", *SAMPLING)
        else:
            refuse("is for a search, not for --sample; leave one of them out", "beam", "alpha")
        if (count := command.n_best) is not None:
            refuse("--n-best writes them anyway; leave it out", "scores")
            beam = command.search.beam if not command.sampling.sample else None
            most = min(beam or MOST_BEST, MOST_BEST)
            if not 1 <= count <= most:
                why = ", the size of --beam" if most < MOST_BEST else ""
                raise UsageError(f"--n-best {count}: must be at least 1 and at most {most}{why}")
    if isinstance(command, Evaluate | Parse | Translate) and command.search.beam == 1:
        refuse("has no effect with --beam 1; leave one of them out", "alpha")


def deciding_options(said: Mapping[str, str]) -> dict[str, str]:
    """Return the options that determine other defaults, if their values are valid."""
    found = {
        name: said[name]
        for name in DECIDING
        if said.get(name, "--")[:2] != "--" and said[name] in CHOICES.get(name, (said[name],))
    }
    if "prepared" in found and "pair" not in found:  # its recipe depends on the languages, too
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            plan = load_object(Path(found["prepared"]) / "prepared.json")["plan"]
            found["pair"] = str(plan["options"]["pair"])
    return found


def default_of(kind: type, said: Mapping[str, str]) -> Any:
    """Return a command with the defaults that follow from the user's options, if any."""
    if kind is Train:
        return Train(*vars(default_options(said)).values())
    if kind is Prepare:
        corpus = said.get("corpus", "files")
        small = corpus in CORPORA and corpus != "wmt14"
        name = recipe_name(corpus if small else "prepared", said.get("pair", ""))
        vocabulary = load_recipe(name).data.vocabulary
        return Prepare(tyro.MISSING, Preparation(vocabulary=vocabulary))
    return tyro.MISSING_NONPROP


def command_summary(kind: type) -> str:
    """Return a command's description, the first line of its docstring."""
    return (kind.__doc__ or "").strip().split("\n")[0]


def commands_help() -> str:
    """Return the list of commands."""
    rows = "\n".join(f"  {name:10} {command_summary(kind)}" for name, kind in KINDS.items())
    return (
        f"usage: {NAME} COMMAND [OPTIONS]\n\nTrain and use translation systems, as in "
        f"'Attention Is All You Need'.\n\ncommands:\n{rows}\n\n"
        f"{NAME} COMMAND --help lists the options of a command.\n"
        f'For completion in bash (or zsh): eval "$({NAME} {COMPLETION} bash)"'
    )


def without_none(text: str) -> str:
    """Return tyro's help without defaults of None and False, even where they are wrapped."""
    pattern = r"\(default:[\s│|]+(?:None|False)?\)"
    text = re.sub(pattern, lambda found: re.sub(r"[^\s│|]", " ", found[0]), text)
    text = re.sub(r"\boptim options( ───)?", lambda x: "training options" + " " * bool(x[1]), text)
    return re.sub(r"^[│|] +[│|]\n| +$", "", text, flags=re.MULTILINE)


def plain_error(text: str) -> str:
    """Return an error of tyro's in words like those of all other errors."""
    if missing := re.fullmatch(r"Missing from \S+ \S+: (.*)", text):
        names = [each.split()[0] for each in missing[1].split("(required)") if each.strip()]
        return f"{', '.join(names)}: missing; give {'it' if len(names) == 1 else 'them'}"
    choices = re.search(r"Expected one of \((.*?),?\)$", text)
    for pattern, ours in PLAIN:
        text = re.sub(f"^{pattern}$", ours, text)
    if choices:
        every = choices[1].replace("'", "").split(", ")
        names = sorted({*every} - {"None"}) if "None" in every else every  # tyro's is then a set
        text = text.replace("is no choice", f"choose among {', '.join(names)}")
    return text


def strip_error_box(box: str) -> str:
    """Return the first section of tyro's error box in one line."""
    words: list[str] = []
    for line in box.splitlines()[1:]:
        text = line.strip("│| ")
        rule = len(text) > 2 and not text.strip("─╰╯-+")  # of hyphens in an ASCII terminal
        if text.startswith("Got errors") or (rule and words):
            break
        words.extend([] if rule else text.split())
    return " ".join(words).rstrip(".") or "these options are not understood"
