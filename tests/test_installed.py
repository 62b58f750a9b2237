"""What a newcomer does, by command, with the installed wheel alone, in a folder of his own.

The tasks are those of the chapter *Using it*. The text is ours, and as small as the model.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import annotated_transformer
from tests.cli.command import write
from tests.serving.servers import serves_until_it_is_stopped

sys.path.insert(0, str(Path(__file__).parent / "house"))

from environments import build, copy_project, install, offline

EXTRAS = "translation,serve,plots,ctranslate2,huggingface,onnx"
WHO = {"Der Hund": "The dog", "Die Katze": "The cat", "Das Kind": "The child", "Er": "He"}
WHAT = {"schläft": "sleeps", "singt": "sings", "lacht": "laughs", "kommt": "comes", "isst": "eats"}
HOW = {"": "", " heute": " today", " hier": " here"}
PAIRS = [
    (f"{who} {what}{how}.", f"{WHO[who]} {WHAT[what]}{HOW[how]}.")
    for who, what, how in product(WHO, WHAT, HOW)
]
FILES = "--train-files train.de train.en --valid-files val.de val.en --max-tokens 512"
TINY = f"train {FILES} --vocabulary 300 --layers 1 --d-model 16 --d-ff 32 --heads 2 --quiet"
ONE = f"{TINY} --updates 12 --warmup 4 --average 2 --average-every 3 --out one"

# Runs commands in one process, which loads PyTorch once, as the console script runs one.
DRIVER = """
import contextlib, io, json, sys
import annotated_transformer
from annotated_transformer.cli.main import main
print(json.dumps(annotated_transformer.__file__), flush=True)
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(json.loads(line))
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""


class Done(NamedTuple):
    """How a command has ended."""

    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """The results: lines of columns."""
        return [line.split("\t") for line in self.out.splitlines()]


class Installed:
    """The command as it is installed, and the folder in which it is given."""

    def __init__(self, python: Path, folder: Path, stack: ExitStack) -> None:
        self.folder, self.env = folder, offline(folder)
        self.env["PATH"] = f"{python.parent}:{self.env['PATH']}"
        self.script = str(python.parent / "annotated-transformer")
        command = [str(python), "-I", "-c", DRIVER]  # neither folder nor variables lead elsewhere
        self.driver = stack.enter_context(
            subprocess.Popen(command, stdin=-1, stdout=-1, cwd=folder, env=self.env, text=True)
        )
        self.file = Path(str(self.answer()))

    def answer(self) -> object:
        """Return what the process prints next."""
        assert self.driver.stdout is not None
        line = self.driver.stdout.readline()
        assert line, "it has ended with an error of its own"
        found: object = json.loads(line)
        return found

    def run(self, line: str, status: int = 0) -> Done:
        """Give a command that ends with this status."""
        assert self.driver.stdin is not None
        self.driver.stdin.write(f"{json.dumps(shlex.split(line))}\n")
        self.driver.stdin.flush()
        done = Done(*self.answer())  # type: ignore[misc]
        assert done.status == status, done
        return done

    def shell(self, line: str, text: str = "", status: int = 0) -> Done:
        """Give a line to the shell, which finds the console script; see how it ends."""
        streams: dict[str, Any] = {"input": text, "capture_output": True, "text": True}
        done = subprocess.run(["bash", "-c", line], cwd=self.folder, env=self.env, **streams)
        assert done.returncode == status, done
        return Done(done.returncode, done.stdout, done.stderr)

    def lines(self, name: str) -> list[str]:
        """Return the lines of a file."""
        return self.bytes(name).decode().splitlines()

    def bytes(self, name: str) -> bytes:
        """Return what is in a file."""
        return (self.folder / name).read_bytes()


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Install the wheel of the project, and write a text into an empty folder."""
    folder = tmp_path_factory.mktemp("newcomer")
    wheel = build(copy_project(folder / "project"), folder)
    python = install(folder / "venv", wheel, f"annotated-transformer[{EXTRAS}]")
    (own := folder / "own").mkdir()
    valid = PAIRS[::6]
    for name, pairs in (("train", [p for p in PAIRS if p not in valid]), ("val", valid)):
        for side, language in enumerate(("de", "en")):
            write(own / f"{name}.{language}", [pair[side] for pair in pairs])
    write(own / "in.de", ["Der Hund schläft.", "", "Das Kind singt."])
    with ExitStack() as stack:
        yield Installed(python, own, stack)


@pytest.fixture(scope="module")
def trained(newcomer: Installed) -> Done:
    """Return what a run says that was stopped and resumed; it is in the folder ``one``."""
    stopped = newcomer.run(f"{ONE} --steps 5")
    assert "stopped after update 5; run the same command to resume" in stopped.err
    return newcomer.run(ONE)


def test_package_is_the_installed_one(newcomer: Installed) -> None:
    assert newcomer.file.is_relative_to(newcomer.folder.parent / "venv")
    where = "import annotated_transformer as a; print(a.__file__)"
    assert newcomer.shell(f"python -c '{where}'").out == f"{newcomer.file}\n"
    version = f"annotated-transformer {annotated_transformer.__version__}\n"
    assert newcomer.shell("annotated-transformer --version").out == version


# --- the model that comes with the package ----------------------------------------------


def test_translates_with_scores_and_samples(newcomer: Installed) -> None:
    done = newcomer.run("translate in.de")
    assert done.out == "The dog sleeps.\n\nThe child sings.\n"
    assert done.err.startswith("translated 3 lines by the small model")
    best = newcomer.run("translate in.de --n-best 3").rows
    assert [row[0] for row in best] == ["1", "1", "1", "2", "3", "3", "3"]
    scored = newcomer.run("translate in.de --scores").rows
    assert scored == [row[1:] for row in (best[0], best[3], best[4])]
    assert [row[2] for row in scored] == done.out.splitlines()
    sample = "translate in.de --sample --temperature 2 --seed"
    first, again, other = (newcomer.run(f"{sample} {seed}").out for seed in (1, 1, 2))
    assert first == again != other


def test_answers_line_by_line(newcomer: Installed) -> None:
    text = "Der Hund singt.\nHallo\n"
    done = newcomer.shell("annotated-transformer translate --interactive", text)
    assert (done.out.splitlines()[0], done.out.count("\n")) == ("The dog sings.", 2)
    assert "standard input, line 2: the model does not know Hallo" in done.err
    assert "translated 2 lines" in done.err


def test_serves(newcomer: Installed) -> None:
    serves_until_it_is_stopped([newcomer.script], newcomer.folder, newcomer.env)


# --- runs of one's own ------------------------------------------------------------------


def test_trains_resumes_and_says_that_it_is_done(newcomer: Installed, trained: Done) -> None:
    assert trained.out.startswith(f"files val, greedy, {len(PAIRS[::6])} sentences\n  BLEU = ")
    assert trained.err.endswith("next: annotated-transformer translate one FILE\n")
    log, weights = newcomer.lines("one/log.jsonl"), newcomer.bytes("one/model.safetensors")
    again = newcomer.run(ONE)
    assert again.out == trained.out
    assert again.err.splitlines()[1:] == trained.err.splitlines()[1:]  # with the run's own times
    assert newcomer.lines("one/log.jsonl") == log
    assert newcomer.bytes("one/model.safetensors") == weights


def test_fine_tunes(newcomer: Installed, trained: Done) -> None:
    gentle = "--finetune-from one --peak 0.0005 --warmup 2 --updates 4 --out tuned"
    done = newcomer.run(f"train {FILES} --quiet {gentle}")
    assert "kept from one/model.safetensors: " in done.err
    per_token = []
    for run in ("one", "tuned"):
        done = newcomer.run(f"score {run} val.de val.en --best")
        per_token += re.findall(r"(-[\d.]+) per token", done.err)
    before, after = map(float, per_token)
    assert 0 < abs(after - before) < 0.3  # a new model would be worse by more


def test_stops_early_and_decodes_with_two(newcomer: Installed, trained: Done) -> None:
    patient = "--eval-bleu --best-metric bleu --patience 1 --updates 400 --seed 1 --out two"
    done = newcomer.run(f"{TINY} {patient}")
    assert re.search(r"stopped after update \d+: 1 validation without a better BLEU", done.err)
    assert '"valid_bleu"' in "".join(newcomer.lines("two/log.jsonl"))
    done = newcomer.run("translate one in.de --ensemble two -o out.en")
    assert (done.out, len(newcomer.lines("out.en"))) == ("", 3)
    assert "the mean of one/" in done.err
    assert "two/model.safetensors" in done.err


def test_scores_evaluates_and_diagnoses(newcomer: Installed, trained: Done) -> None:
    valid = newcomer.lines("val.en")
    done = newcomer.run("score one val.de val.en --tokens")
    assert [row[-1].split()[0] for row in done.rows] == ["</s>"] * len(valid)
    assert f"{len(valid)} pairs, log-probability -" in done.err
    done = newcomer.run("evaluate one --test-files val.de val.en --beam 1 --best --quiet")
    assert done.out.splitlines()[1:] == trained.out.splitlines()[1:5]
    done = newcomer.run("evaluate --hypotheses val.en --references val.en")
    assert "BLEU = 100.00 100.0/100.0/100.0/100.0" in done.out
    write(newcomer.folder / "bad.en", [*newcomer.lines("train.en")[:-1], ""])
    done = newcomer.run("diagnose train.de bad.en")
    assert re.search(rf"blank +1 +[\d.]+% +line {len(newcomer.lines('train.de'))}\n", done.out)


def test_plots_and_averages(newcomer: Installed, trained: Done) -> None:
    assert newcomer.run("plot one -o run.svg").err == "wrote run.svg\n"
    assert newcomer.bytes("run.svg").count(b"<path") > 20
    newcomer.shell("cp -r one last")
    done = newcomer.run("average last --last 1")
    assert done.err.startswith("wrote last/averaged.safetensors; ")
    two, one = (newcomer.run(f"score {name} val.de val.en --averaged") for name in ("one", "last"))
    assert one.out != two.out
    assert one.err.endswith("by last/averaged.safetensors\n")


@pytest.mark.parametrize(  # to onnx: tests/house/test_packaging.py, also from the wheel
    ("to", "weights"), [("ctranslate2", "model.bin"), ("huggingface", "model.safetensors")]
)
def test_exports(newcomer: Installed, trained: Done, to: str, weights: str) -> None:
    assert newcomer.run(f"export one {to} --to {to}").err.startswith(f"wrote {to}; {to}/README.md")
    assert "# A Transformer from de to en" in newcomer.lines(f"{to}/README.md")
    assert len(newcomer.bytes(f"{to}/{weights}")) > 4 * 10_000  # numbers, four bytes each


# --- help -------------------------------------------------------------------------------


def test_completes_and_suggests(newcomer: Installed) -> None:
    told = newcomer.shell("annotated-transformer --help").out
    (source,) = re.findall(r"completion in bash \(or zsh\): (.*)", told)
    done = newcomer.shell(f"{source} && complete -p annotated-transformer")
    assert done.out.startswith("complete -o default -F ")
    done = newcomer.shell("annotated-transformer train --udpates 3", status=2)
    assert "--udpates: there is no such option; did you mean --updates?" in done.err
    assert done.err.count("\n") == 1
