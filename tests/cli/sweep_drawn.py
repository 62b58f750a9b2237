"""Cases of the sweep that hypothesis draws: bytes, options and values that nobody thought of."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from hypothesis import strategies as st

from annotated_transformer.cli.arguments import KINDS
from annotated_transformer.engine.config import Options
from tests.cli.sweep import TRAIN, Case, Make, Outcome, put
from tests.cli.sweep_folders import (
    IN_COPY,
    NEWEST,
    Damage,
    changed_configuration,
    copied,
    overwritten,
)
from tests.cli.sweep_words import COMPLETE, options_of

LINES = {  # what works in a folder with a copy of the run, and quickly
    **{command: line.replace("@run", "run") for command, line in COMPLETE.items()},
    "evaluate": "evaluate run --test-files @text/valid.de @text/valid.en --beam 1 --quiet",
    "compare": "compare @text/is @text/should --references @text/should --samples 9",
}
READ = {  # which files of the run each command reads, besides configuration and tokenizer
    **dict.fromkeys(IN_COPY, ("model.safetensors", "averaged.safetensors")),
    "train": (NEWEST, "log.jsonl"),
    "average": ("snapshots/00000004.safetensors",),
    "plot": ("log.jsonl", NEWEST),
    "export": ("model.safetensors", "record.json"),
}
READ.pop("parse")  # reads another run
NOT_DRAWN = {  # options
    "--host": "asks the network for a name",
    "--compile": "starts a compiler",
    "--workers": "starts so many processes",
    "--jobs": "starts so many processes",
}
ENTRIES = (  # of config.json
    "format architecture languages shared model tokenizers training training.options "
    "training.options.corpus training.checksums model.N model.d_model model.h model.d_ff "
    "model.dropout model.max_len model.tie model.norm model.d_k model.positions"
).split()
SAFE = st.characters(codec="utf-8", exclude_characters="/")  # no value leads out of the folder
TEXT = st.text(SAFE, max_size=9) | st.text('{}[]",:0.e-+ <>@=', max_size=9)
NUMBER = st.integers(-3, 9) | st.integers(-(2**70), 2**70) | st.floats(width=16)
VALUE = st.none() | st.booleans() | NUMBER | TEXT
JSON = VALUE | st.lists(VALUE, max_size=3) | st.dictionaries(TEXT, VALUE, max_size=2)
LONGEST = 0.5  # seconds after which a command that works is stopped
WARNED = "; resuming from "
BEGUN = "checkpoints in run"  # a run that says so may leave its folder, to be resumed


def contents() -> st.SearchStrategy[bytes]:
    """Draw what a file holds: bytes, a text, or JSON."""
    lines = st.lists(TEXT, max_size=9).map(lambda rows: "\n".join(rows).encode())
    return st.binary(max_size=99) | lines | JSON.map(lambda value: json.dumps(value).encode())


def damages() -> st.SearchStrategy[Damage]:
    """Draw what happens to a file: other contents, others in a part of it, or another entry."""

    def patched(where: float, data: bytes) -> Damage:
        def patch(path: Path) -> None:
            old = path.read_bytes()
            start = int(where * len(old))
            path.write_bytes(old[:start] + data + old[start + len(data) :])

        return patch

    def entered(number: int, value: object) -> Damage:
        def enter(path: Path) -> None:
            text = path.read_text() if path.suffix[:5] == ".json" else '{"data": ""}'
            rows = text.splitlines() if path.suffix == ".jsonl" else [text]
            found = [dict(json.loads(row)) for row in rows]
            name = sorted(found[0])[number % len(found[0])]
            path.write_text("".join(json.dumps({**row, name: value}) + "\n" for row in found))

        return enter

    part = st.builds(patched, st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=9))
    return contents().map(overwritten) | part | st.builds(entered, st.integers(0, 99), JSON)


def options(kind: str) -> st.SearchStrategy[list[str]]:
    """Draw an option of a command and a value, or what may be no option."""

    def valued(option: tuple[str, Any]) -> st.SearchStrategy[list[str]]:
        name, hint = option
        known = [str(word) for each in (hint, *get_args(hint)) for word in get_args(each)]
        value = st.sampled_from(known) if "Literal" in str(hint) else NUMBER.map(str)
        return (value | TEXT).map(lambda word: [name] if hint is bool else [name, word])

    drawn = [(name, hint) for name, hint in options_of(KINDS[kind]) if name not in NOT_DRAWN]
    strange = st.tuples(TEXT, VALUE).map(lambda pair: [f"--{pair[0]}", str(pair[1])])
    return st.sampled_from(drawn).flatmap(valued) | strange


def recipes() -> st.SearchStrategy[bytes]:
    """Draw a recipe, or a grid of runs, with one group or row."""
    names = st.sampled_from([name for name, _ in options_of(Options)]).map(
        lambda flag: flag[2:].replace("-", "_")
    )
    group = st.dictionaries(names, VALUE, min_size=1, max_size=2)
    like = st.sampled_from(["grammar", "multi30k"]) | JSON
    recipe = st.tuples(st.sampled_from(["data", "model", "optim", "run"]), group | JSON, like).map(
        lambda parts: {parts[0]: parts[1], "like": parts[2]}
    )
    grid = st.tuples(like, group | JSON, st.just(1) | JSON).map(
        lambda parts: {"recipe": parts[0], "rows": {"a": parts[1]}, "seeds": parts[2]}
    )
    return (recipe | grid).map(lambda data: json.dumps(data).encode()) | contents()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a command with bad bytes in a text, a recipe or a run, or with any options."""
    kind = draw(st.sampled_from(["options", "options", "text", "recipe", "run", "run", "entry"]))
    command = draw(st.sampled_from(sorted(READ if kind in ("run", "entry") else LINES)))
    drawn: object = None
    make = copied(lambda _: None)
    words = (LINES if kind in ("options", "text") else IN_COPY).get(command, "").split()
    if kind == "options":
        words += draw(options(command)) + draw(st.just([]) | options(command))
    elif kind == "text":
        places = [number for number, word in enumerate(words) if word.startswith("@text/")]
        drawn = draw(contents())
        make = both(make, put(drawn, "bad"))
        words[draw(st.sampled_from(places or [0]))] = "bad"
    elif kind == "recipe":
        drawn = draw(recipes())
        make = put(drawn, "bad.json")
        line = draw(st.sampled_from([f"{TRAIN} --recipe bad.json", "sweep bad.json --plan"]))
        words = line.split()
    elif kind == "entry":
        drawn = draw(st.sampled_from(ENTRIES)), draw(JSON)
        make = changed_configuration(*drawn)
    else:
        drawn = draw(st.sampled_from(["config.json", "tokenizer.json", *READ[command]]))
        make = copied(draw(damages()), drawn)
    return Case(
        f"{kind} {drawn!r}",
        tuple(words),
        make,
        status=(0, 2, 128 + signal.SIGTERM),
        logs=True,
        job={"signal": signal.SIGTERM, "delay": LONGEST},
    )


def both(first: Make, second: Make) -> Make:
    """Return what does one thing after the other."""
    return lambda place: (first(place), second(place))


def rules(case: Case, outcome: Outcome) -> tuple[Case, Outcome]:
    """Return what :func:`tests.cli.sweep.judge` takes: only an error must leave nothing."""
    if outcome.status != 2 or BEGUN in outcome.err or case.typed[:1] == ("prepare",):
        kept = [name for name in outcome.changed if name == "what all share"]
        outcome = replace(outcome, changed=kept)
    lines = outcome.err.splitlines(keepends=True)
    if outcome.status not in (0, 2):  # warnings may come before the line that it was interrupted
        outcome = replace(outcome, err="".join(each for each in lines if WARNED not in each))
    return replace(case, partial=outcome.status != 2), outcome
