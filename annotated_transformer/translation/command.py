# Written from book/translation/command.md: edit the chapter instead.
"""The command line, train, translate and evaluate."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import itertools
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import tyro
from tyro.conf import OmitArgPrefixes, Positional

from annotated_transformer.data.archives import locate
from annotated_transformer.data.corpora import (
    CORPORA,
    ParallelText,
    corpus_files,
    language_codes,
    load_corpus,
    read_parallel,
)
from annotated_transformer.data.files import CorpusError, FileError, write_atomically
from annotated_transformer.data.prepare import prepare
from annotated_transformer.data.prepared import Preparation, Prepared
from annotated_transformer.data.shards import Files, check_preparation, remarks
from annotated_transformer.data.text import read_lines, stream_lines
from annotated_transformer.engine.checkpointer import read_state
from annotated_transformer.engine.checkpoints import (
    AVERAGED,
    BEST,
    WEIGHTS,
    average_system,
    load_system,
)
from annotated_transformer.engine.config import Options, UsageError, check, check_sources, defaults
from annotated_transformer.engine.devices import describe_rate
from annotated_transformer.engine.journal import read_journal
from annotated_transformer.engine.log_figure import log_figure
from annotated_transformer.engine.records import commit, make_record, processor, versions
from annotated_transformer.engine.system import System, translate_lines
from annotated_transformer.engine.texts import Texts
from annotated_transformer.engine.trainer import Trainer
from annotated_transformer.fast.products import Products, prepare_cpu
from annotated_transformer.training.distributed import process_group
from annotated_transformer.translation.beam_search import check_search
from annotated_transformer.translation.evaluation import (
    LANGUAGES,
    by_length,
    paired_bootstrap,
    protocols,
    score,
)
from annotated_transformer.translation.tokenizers import TokenizerError

NAME = "annotated-transformer"
ERRORS = (FileError, CorpusError, TokenizerError, UsageError, FloatingPointError)
TEST = {  # the split that is scored by default
    name: "test_2016_flickr" if name == "multi30k" else "test" for name in CORPORA
}


def say(text: str) -> None:
    """Print a message beside the output."""
    print(text, file=sys.stderr)


def show(scores: dict[str, Any], title: str) -> None:
    """Print scores with their signatures."""
    print(f"{title}, {scores['sentences']} sentences")
    print(f"  {scores['bleu_detail']}\n    {scores['bleu_signature']}")
    print(f"  chrF2 = {scores['chrf']}\n    {scores['chrf_signature']}")


def evaluate_system(
    system: System, text: ParallelText, *, progress: bool, beam: int = 1, alpha: float = 0.6
) -> dict[str, Any]:
    """Translate the source side and score it against the target side."""
    name = f"{text.name} {text.split}"
    found = translate_lines(
        system, text.source, beam=beam, alpha=alpha, name=name, progress=progress
    )
    return score(found, text.target, lowercase=system.lowercase)


def prepare_device(system: System) -> None:
    """Move a system to the GPU, where there is one; else choose what is fast on the processor."""
    if torch.cuda.is_available():
        system.model.to("cuda")
    else:
        prepare_cpu()


def check_beam(system: System, beam: int, alpha: float) -> None:
    """Raise UsageError for a search that cannot be meant."""
    try:
        check_search(beam, alpha)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    if beam > (size := len(system.tokenizers[1])):
        raise UsageError(f"--beam {beam}: must be at most {size}, the size of the vocabulary")


def search_name(beam: int, alpha: float) -> str:
    """Name the way of decoding."""
    return "greedy" if beam == 1 else f"beam {beam}, alpha {alpha:g}"


@dataclass(frozen=True)
class Train:
    """Train a translation system, or go on with one that was interrupted."""

    options: Annotated[
        OmitArgPrefixes[Options],
        tyro.conf.arg(help="The defaults are the recipe of the corpus that --corpus names."),
    ] = field(default_factory=Options)
    out: Path | None = None
    """Folder for checkpoints; runs/CORPUS-PAIR-PRESET (or MODEL) unless given."""
    record: Path | None = None
    """Where to write the record of the run; record.json beside the checkpoints unless given."""
    quiet: bool = False
    """Show no progress bar."""

    def load(self, split: str) -> ParallelText:
        """Load a split of the corpus."""
        data = self.options.data
        size = data.size if split == "train" else None
        return load_corpus(
            data.corpus, data.pair, split, mirror=data.mirror, size=size, progress=not self.quiet
        )

    def texts(self) -> Texts:
        """Load training and validation text."""
        data = self.options.data
        if data.prepared is not None:
            return Prepared(data.prepared)
        if data.corpus == "files":
            train, valid = self.own_texts()
        else:
            train, valid = self.load("train"), self.load("val")
        if data.corpus != "grammar":  # its short sentences recur by chance
            for remark in remarks(train, {"val": valid}):
                say(remark)
        return (train if data.size is None else train.head(data.size)), valid

    def own_texts(self) -> tuple[ParallelText, ParallelText]:
        """Read the user's files."""
        data = self.options.data
        assert data.train_files is not None
        assert data.valid_files is not None
        pair = language_codes(data.pair)
        for path in (*data.train_files, *data.valid_files):
            next(stream_lines(path), "")  # is it text at all?
        train = read_parallel(*data.train_files, languages=pair)
        return train, read_parallel(*data.valid_files, languages=pair, split="val")

    def __call__(self) -> int:
        """Train, score, and write the record; under torchrun, in several processes."""
        check(self.options)
        check_sources(self.options.data)
        with process_group() as world:
            texts = world.main_first(self.texts)
            options = self.options
            if isinstance(texts, Prepared):
                options = prepared_options(options, texts)
            model = options.model
            kind = model.preset if model.architecture == "transformer" else model.architecture
            out = self.out or Path("runs") / f"{options.data.corpus}-{options.data.pair}-{kind}"
            products = prepare_cpu()
            run = Trainer(options, out, texts, world)
            if world.main:
                self.introduce(run, texts, products)
            finished = run.train(progress=not self.quiet)
        if not world.main:
            return 0 if run.stopped is None else 128 + run.stopped
        say(pace(run))
        if not finished:
            done, stopped = run.state.updates, run.stopped
            how = "stopped" if stopped is None else "interrupted"
            say(f"{NAME}: {how} after update {done}; the same command goes on from there")
            return 0 if stopped is None else 128 + stopped
        scores = self.score(run, texts)
        record = make_record(
            run.system,
            run.state,
            scores,
            command_line(),
            pairs=len(run.pairs),
            processes=world.size,
        )
        data = (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()
        write_atomically(self.record or out / "record.json", data)
        return 0

    def introduce(self, run: Trainer, texts: Texts, products: Products) -> None:
        """Say what is going to happen."""
        for text in () if isinstance(texts, Prepared) else texts:
            if report := text.report():
                say(f"{text.name} {text.split}: {report}")
        if run.world.device.type == "cpu":
            say(str(products))
        if run.world.size > 1:
            say(f"{run.world.size} processes")
        say(f"{len(run.pairs)} sentence pairs, checkpoints in {run.folder}")

    def score(self, run: Trainer, texts: Texts) -> dict[str, Any]:
        """Score the best weights, and the mean of the last where that was asked for."""
        options = run.options
        if isinstance(texts, Prepared):
            split = test_split(texts)
            test = texts.lines(split)
        else:
            split = TEST.get(options.data.corpus, "val")
            test = self.load(split) if options.data.corpus in TEST else texts[1]
        scores = {}
        for name, file in ((split, WEIGHTS), (f"{split}, averaged", AVERAGED)):
            if file == AVERAGED and not options.optim.average:
                continue
            system = load_system(run.folder, weights=file)
            system.model.to(run.world.device)
            scores[name] = evaluate_system(system, test, progress=not self.quiet)
            show(scores[name], f"{options.data.corpus} {name}, greedy")
        return scores


def test_split(corpus: Prepared) -> str:
    """Return the split of a prepared corpus that is scored by default."""
    return next((name for name in corpus.reports if name not in ("train", "val")), "val")


def pace(run: Trainer) -> str:
    """Say how fast a run is, and how long the whole of it takes at this pace."""
    state, updates = run.state, run.options.optim.updates
    seconds = max(state.update_seconds, 1e-9)
    each = seconds / max(1, state.updates)
    rate = f", {describe_rate(state.flops / seconds, run.learner.peak)}" if state.flops else ""
    return (
        f"{state.updates} updates of {each:.2f} seconds, {state.tokens / seconds:.0f} target "
        f"tokens a second{rate}; {updates} take {timedelta(seconds=round(each * updates))}"
    )


def prepared_options(options: Options, corpus: Prepared) -> Options:
    """Return the options with what was decided when the corpus was prepared."""
    data, usual = options.data, defaults({"corpus": "prepared"}).data
    if data.size is not None:
        raise UsageError("--size: not for a prepared corpus; prepare another")
    names = ("pair", "tokenizer", "vocabulary", "max_len")
    decided = {name: getattr(corpus.options, name) for name in names}
    for name, value in decided.items():
        if (given := getattr(data, name)) not in (value, getattr(usual, name)):
            option = name.replace("_", "-")
            raise UsageError(f"--{option} {given}: {corpus.folder} was prepared with {value}")
    return options.replace(**decided)


def command_line() -> str:
    """Return the command that this process was started with."""
    return shlex.join([NAME, *sys.argv[1:]])


@dataclass(frozen=True)
class Plot:
    """Draw the log of a training, finished or running."""

    model: Positional[Path]
    """Folder of the training."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Picture to write, .svg, .png or .pdf; training.svg in the folder unless given."""

    def __call__(self) -> int:
        """Draw."""
        path = self.output or self.model / "training.svg"
        if path.suffix not in (".svg", ".png", ".pdf"):
            raise UsageError(f"--output {path}: must end with .svg, .png or .pdf")
        try:
            journal = read_journal(self.model / "log.jsonl")
        except FileNotFoundError:
            raise UsageError(f"{self.model}: no log here (log.jsonl is missing)") from None
        except ValueError as error:
            raise UsageError(str(error)) from None
        state = read_state(self.model)
        curve = [] if state is None else [asdict(point) for point in state.curve]
        picture = io.BytesIO()
        figure = log_figure(journal, curve, self.model.name)
        figure.savefig(picture, format=path.suffix[1:])
        write_atomically(path, picture.getvalue())
        say(f"wrote {path}")
        return 0


@dataclass(frozen=True)
class Translate:
    """Translate a file, or what comes in, line by line; blank lines stay blank."""

    model: Positional[Path]
    """Folder of a trained system."""
    input: Positional[Path] = Path("-")
    """Text, one sentence a line; - is the standard input."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Where the translation goes; the standard output unless given."""
    beam: int = 4
    """Hypotheses of each sentence; 1 is greedy decoding."""
    alpha: float = 0.6
    """Length penalty of beam search, from 0 to 10; the higher, the longer the translations."""
    averaged: bool = False
    """Take the mean of the last checkpoints instead of the best one."""
    quiet: bool = False
    """Show no progress bar."""

    def __call__(self) -> int:
        """Translate."""
        system = load_system(self.model, weights=AVERAGED if self.averaged else BEST)
        check_beam(system, self.beam, self.alpha)
        prepare_device(system)
        lines, name = read_text(self.input)
        show_bar = not self.quiet and (self.output is not None or sys.stderr.isatty())
        out = translate_lines(
            system, lines, beam=self.beam, alpha=self.alpha, name=name, progress=show_bar
        )
        text = "".join(f"{line}\n" for line in out)
        if self.output is None:
            print(text, end="")
        else:
            write_atomically(self.output, text.encode())
        return 0


def read_text(path: Path) -> tuple[list[str], str]:
    """Read lines from a file or the standard input, strictly UTF-8; also say its name."""
    if str(path) != "-":
        return read_lines(path), str(path)
    if sys.stdin.isatty():
        say("one sentence a line, please; Ctrl-D ends")
    rows = sys.stdin.buffer.read().removeprefix(codecs.BOM_UTF8).split(b"\n")
    if rows[-1] == b"":  # the last line ended as it should
        rows.pop()
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(row.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"standard input, line {number}: byte {error.start + 1} "
                f"(0x{row[error.start]:02x}) is not valid UTF-8; convert the text to UTF-8"
            ) from None
    return lines, "standard input"


@dataclass(frozen=True)
class Evaluate:
    """Score a system on a split of a corpus, or one file against another, by sacreBLEU."""

    model: Positional[Path | None] = None
    """Folder of a trained system."""
    corpus: str | None = None
    """Corpus; the one of the training unless given."""
    prepared: Path | None = None
    """Folder that the command prepare made, instead of a corpus."""
    split: str | None = None
    """Split of the corpus; its test split unless given, or val where a prepared one has none."""
    mirror: Path | None = None
    """Folder that holds the corpora's files, instead of a download."""
    hypotheses: Path | None = None
    """Score this translation, line by line, instead of a system."""
    references: Path | None = None
    """What it should say."""
    protocols: bool = False
    """Score in the other ways as well, in which published numbers were counted."""
    language: str | None = None
    """Language of the references, for --protocols of two files."""
    beam: int = 4
    """Hypotheses of each sentence; 1 is greedy decoding."""
    alpha: float = 0.6
    """Length penalty of beam search, from 0 to 10; the higher, the longer the translations."""
    averaged: bool = False
    """Take the mean of the last checkpoints instead of the best one."""
    quiet: bool = False
    """Show no progress bar."""

    def __call__(self) -> int:
        """Evaluate."""
        if self.model is None and self.hypotheses is not None and self.references is not None:
            self.check_files()
            text = read_parallel(self.hypotheses, self.references, drop_blank=False)
            self.show(text.source, text.target, self.language, str(self.hypotheses))
            return 0
        if self.model is None or self.hypotheses is not None or self.references is not None:
            raise UsageError("give a trained system's folder, or --hypotheses and --references")
        system = load_system(self.model, weights=AVERAGED if self.averaged else BEST)
        check_beam(system, self.beam, self.alpha)
        prepare_device(system)
        test = self.test(system)
        name = f"{test.name} {test.split}"
        found = translate_lines(
            system,
            test.source,
            beam=self.beam,
            alpha=self.alpha,
            name=name,
            progress=not self.quiet,
        )
        self.show(
            found,
            test.target,
            test.languages[1],
            f"{name}, {search_name(self.beam, self.alpha)}",
            lowercase=system.lowercase,
        )
        return 0

    def check_files(self) -> None:
        """Raise UsageError for options that say nothing about two files, or miss something."""
        usual = Evaluate()
        for name in ("corpus", "prepared", "split", "mirror", "beam", "alpha", "averaged"):
            if getattr(self, name) != getattr(usual, name):
                raise UsageError(f"--{name}: is for a system, not for two files")
        if self.protocols and self.language not in LANGUAGES:
            given = "" if self.language is None else f" {self.language}"
            raise UsageError(
                f"--language{given}: --protocols of two files needs the language of the "
                f"references, among {', '.join(LANGUAGES)}"
            )

    def test(self, system: System) -> ParallelText:
        """Load what the system is to translate."""
        if self.prepared is not None:
            if self.corpus is not None:
                raise UsageError("--corpus or --prepared, not both")
            corpus = Prepared(self.prepared)
            own, its = ("-".join(x.languages) for x in (system, corpus))
            if own != its:
                raise UsageError(f"--prepared {self.prepared}: is {its}, the system {own}")
            return corpus.lines(self.split or test_split(corpus))
        name = self.corpus or system.training.get("options", {}).get("corpus", "none")
        if name == "prepared":
            raise UsageError(f"{self.model}: its corpus was prepared; give --prepared FOLDER")
        if name not in CORPORA:
            raise UsageError(f"--corpus {name}: choose among {', '.join(CORPORA)}")
        split, pair = self.split or TEST[name], "-".join(system.languages)
        return load_corpus(name, pair, split, mirror=self.mirror, progress=not self.quiet)

    def show(
        self,
        found: Sequence[str],
        wanted: Sequence[str],
        language: str | None,
        title: str,
        lowercase: bool = False,
    ) -> None:
        """Print the scores that were asked for."""
        show(score(found, wanted, lowercase=lowercase), title)
        if self.protocols and language is not None:
            for name, way in protocols(found, wanted, language).items():
                print(f"  {way['bleu']:6.2f}  {name}\n    {way['signature']}")


@dataclass(frozen=True)
class Compare:
    """Compare two translations of one text by BLEU, and say whether it may be chance."""

    first: Positional[Path]
    """A translation, line by line."""
    second: Positional[Path]
    """Another one."""
    references: Path
    """What they should say."""
    samples: int = 1000
    """How many times to draw sentences."""

    def __call__(self) -> int:
        """Compare."""
        if self.samples < 2:
            raise UsageError(f"--samples {self.samples}: must be 2 or more")
        first, second = (
            read_parallel(path, self.references, drop_blank=False)
            for path in (self.first, self.second)
        )
        found = paired_bootstrap(first.source, second.source, first.target, samples=self.samples)
        print(f"{self.first}: BLEU {found.first:.2f}\n{self.second}: BLEU {found.second:.2f}")
        print(f"difference {found.second - found.first:+.2f}, 95 % of {self.samples} draws")
        print(f"from {found.low:+.2f} to {found.high:+.2f}, p = {found.p:.3f}")
        return 0


SEARCHES = (  # name, file of weights, beam, alpha
    ("greedy", WEIGHTS, 1, 0.0),
    ("beam 4", WEIGHTS, 4, 0.0),
    ("beam 4, alpha 0.6", WEIGHTS, 4, 0.6),
    ("beam 4, alpha 0.6, averaged", AVERAGED, 4, 0.6),
    ("beam 5, alpha 0.6, averaged", AVERAGED, 5, 0.6),
)
CHOSEN = "beam 5, alpha by validation, averaged"
ALPHAS = (0.2, 0.6, 1.0, 1.4)  # to choose among


@dataclass(frozen=True)
class Ablation:
    """Measure what beam, length penalty and averaging give, one after the other."""

    model: Positional[Path]
    """Folder of a system trained with --average."""
    split: str | None = None
    """Split of its corpus; the test split unless given."""
    mirror: Path | None = None
    """Folder that holds the corpora's files, instead of a download."""
    record: Path | None = None
    """Where to write the record; ablation.json beside the checkpoints unless given."""
    quiet: bool = False
    """Show no progress bar."""

    def __call__(self) -> int:
        """Translate and score in each way."""
        system = load_system(self.model)
        corpus = system.training.get("options", {}).get("corpus", "none")
        if corpus not in TEST:
            raise UsageError(f"{self.model}: was trained on {corpus}; needs {', '.join(TEST)}")
        averaged = load_system(self.model, weights=AVERAGED)  # missing: before the first search
        systems = {WEIGHTS: system, AVERAGED: averaged}
        for each in systems.values():
            prepare_device(each)
        split, pair = self.split or TEST[corpus], "-".join(system.languages)
        test = load_corpus(corpus, pair, split, mirror=self.mirror, progress=not self.quiet)
        steps: list[dict[str, Any]] = []
        before: list[str] | None = None
        for name, weights, beam, alpha in SEARCHES:
            step, before = self.measure(systems[weights], test, beam, alpha, before)
            steps.append({"name": name, **step})
            show_step(steps[-1])
        if split != "val":  # to choose by what is scored would be no choice
            valid = load_corpus(corpus, pair, "val", mirror=self.mirror, progress=not self.quiet)
            found = {alpha: self.lower_case_bleu(averaged, valid, alpha) for alpha in ALPHAS}
            best = max(ALPHAS, key=found.__getitem__)
            step, _ = self.measure(averaged, test, 5, best, before)
            steps.append({"name": CHOSEN, "alpha": best, "validation": found, **step})
            show_step(steps[-1])
        data = {
            "kind": "ablation",
            "command": command_line(),
            "commit": commit(),
            "date": datetime.now(timezone.utc).date().isoformat(),
            "training": system.training,
            "corpus": corpus,
            "split": split,
            "checksums": dict(test.checksums),
            "versions": versions(),
            "hardware": {"processor": processor(), "threads": torch.get_num_threads()},
            "steps": steps,
        }
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
        write_atomically(self.record or self.model / "ablation.json", text.encode())
        return 0

    def measure(
        self,
        system: System,
        test: ParallelText,
        beam: int,
        alpha: float,
        before: Sequence[str] | None,
    ) -> tuple[dict[str, Any], list[str]]:
        """Translate in one way; return what goes into the record, and the translations."""
        start = time.perf_counter()
        found = translate_lines(
            system, test.source, beam=beam, alpha=alpha, progress=not self.quiet
        )
        step: dict[str, Any] = {
            "seconds": round(time.perf_counter() - start, 1),
            "scores": score(found, test.target, lowercase=system.lowercase),
            "protocols": protocols(found, test.target, test.languages[1]),
            "by_length": by_length(found, test.target, test.source, lowercase=system.lowercase),
        }
        step["sha256"] = hashlib.sha256("\n".join(found).encode()).hexdigest()
        if before is not None:
            compared = paired_bootstrap(before, found, test.target, lowercase=system.lowercase)
            step["gain"] = round(compared.second - compared.first, 2)
            step["interval"] = [round(compared.low, 2), round(compared.high, 2)]
            step["p"] = round(compared.p, 4)
        return step, found

    def lower_case_bleu(self, system: System, text: ParallelText, alpha: float) -> float:
        """Return BLEU, tokenised and in lower case, of a beam of 5 with a length penalty."""
        found = translate_lines(
            system, text.source, beam=5, alpha=alpha, name=text.split, progress=not self.quiet
        )
        way = protocols(found, text.target, text.languages[1])["tokenised lower-case"]
        return float(way["bleu"])


def show_step(step: Mapping[str, Any]) -> None:
    """Print BLEU, and what it gained over the step before."""
    gain, chosen = "", f" ({step['alpha']})" if "alpha" in step else ""
    if "gain" in step:
        low, high = step["interval"]
        gain = f"{step['gain']:+.2f} ({low:+.2f} to {high:+.2f}, p = {step['p']:.3f})"
    print(f"{step['scores']['bleu']:6.2f}  {step['name'] + chosen:44}{gain}".rstrip(), flush=True)


@dataclass(frozen=True)
class Average:
    """Average the last checkpoints of a training that kept some (train --average)."""

    model: Positional[Path]
    """Folder of the training."""
    last: int | None = None
    """How many checkpoints; all that were kept unless given."""

    def __call__(self) -> int:
        """Average."""
        average_system(self.model, self.last)
        say(f"wrote {self.model / AVERAGED}; translate and evaluate take it with --averaged")
        return 0


@dataclass(frozen=True)
class Prepare:
    """Clean a corpus, learn its sub-words, write it in shards; or go on where it stopped."""

    out: Positional[Path]
    """Folder for the prepared corpus."""
    preparation: Annotated[
        OmitArgPrefixes[Preparation], tyro.conf.arg(help="What is kept, and in how many pieces.")
    ] = field(default_factory=Preparation)
    corpus: str = "files"
    """files, grammar, multi30k, iwslt2014, iwslt2016, iwslt2017 or wmt14; the last five are
    downloaded."""
    train_files: tuple[Path, ...] = ()
    """Source and target text, pair by pair; a path may go on inside a tar or zip archive."""
    valid_files: tuple[Path, Path] | None = None
    """Source and target text for validation."""
    test_files: tuple[Path, Path] | None = None
    """Source and target text for the test."""
    mirror: Path | None = None
    """Folder that holds the corpora's files, instead of a download."""
    workers: int | None = None
    """Processes that encode; as many as there are processors unless given."""
    quiet: bool = False
    """Show no progress bar."""

    def files(self) -> Files:
        """Find the files of each split, downloading or unpacking them where that is needed."""
        pair = language_codes(self.preparation.pair)
        if self.corpus != "files":
            if self.train_files or self.valid_files or self.test_files:
                raise UsageError(f"--corpus {self.corpus} brings its files: give no others")
            folder = self.out / "corpus" / f"{self.corpus}-{self.preparation.pair}"
            progress = not self.quiet
            return known_files(self.corpus, pair, folder, mirror=self.mirror, progress=progress)
        paths = [locate(path, self.out / "unpacked") for path in self.train_files]
        if not paths or len(paths) % 2 or self.valid_files is None:
            raise UsageError("--corpus files: give --train-files and --valid-files, by two")
        found = {"train": list(zip(paths[::2], paths[1::2], strict=True))}
        for split, files in (("val", self.valid_files), ("test", self.test_files)):
            if files is not None:
                source, target = (locate(path, self.out / "unpacked") for path in files)
                found[split] = [(source, target)]
        return found

    def __call__(self) -> int:
        """Prepare."""
        options = self.preparation
        for name in ("vocabulary", "max_words", "max_ratio"):
            if not 0 < (value := getattr(options, name)) < 1 << 16:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} {value}: must be above 0 and below 65536")
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers {self.workers}: must be greater than 0")
        check_preparation(self.out, options)  # before anything is downloaded
        try:
            corpus = prepare(
                self.out,
                self.files(),
                options,
                workers=self.workers,
                progress=not self.quiet,
                say=say,
            )
        except KeyboardInterrupt:
            say(f"{NAME}: interrupted; the same command goes on from there")
            return 130
        say(f"{len(corpus.text('train'))} sentence pairs in {self.out}; train with --prepared")
        return 0


def known_files(
    corpus: str,
    pair: tuple[str, str],
    folder: Path,
    *,
    mirror: Path | None = None,
    progress: bool = True,
) -> Files:
    """Find the files of a corpus that the package knows, split by split.

    A training text of one sentence on each line is read where it lies; all else is written
    into the folder in this form.

    Raises:
        CorpusError: It cannot be had, or not in these languages.
        UsageError: There is no such corpus.
    """
    if corpus not in CORPORA:
        raise UsageError(f"--corpus {corpus}: choose among files, {', '.join(CORPORA)}")
    names = "-".join(pair)
    found: dict[str, list[tuple[Path, Path]]] = {}
    for split in ("train", "val", TEST[corpus]):
        if split == "train" and corpus in ("multi30k", "wmt14"):
            found[split] = corpus_files(corpus, names, split, mirror=mirror, progress=progress)
            continue
        text = load_corpus(corpus, names, split, mirror=mirror, progress=progress)
        first, second = (folder / f"{split}.{language}" for language in pair)
        for path, side in ((first, text.source), (second, text.target)):
            write_atomically(path, "".join(f"{line}\n" for line in side).encode())
        found[split] = [(first, second)]
    return found


Command: TypeAlias = Train | Plot | Translate | Evaluate | Compare | Ablation | Average | Prepare


def parse(args: Sequence[str]) -> Command:
    """Make a command of the words on the command line.

    Raises:
        UsageError: They are no command.
        SystemExit: Help was asked for, and given.
    """
    known: dict[str, str] = {}  # their recipe gives the defaults
    for word, following in itertools.pairwise([*args, ""]):
        name, given, value = word.partition("=")
        if name == "--prepared":
            known["corpus"] = "prepared"
        elif name in ("--corpus", "--preset", "--architecture", "--pair"):
            known[name[2:]] = value if given else following
    recipe = defaults(known)
    corpus = known.get("corpus", "files")
    large = corpus not in CORPORA or corpus == "wmt14"  # wmt14, and who knows what files
    preparation = Preparation(
        vocabulary=defaults({"corpus": "prepared" if large else corpus}).data.vocabulary
    )
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                Annotated[Train, _command(Train, default=Train(recipe))]
                | Annotated[Plot, _command(Plot)]
                | Annotated[Translate, _command(Translate)]
                | Annotated[Evaluate, _command(Evaluate)]
                | Annotated[Compare, _command(Compare)]
                | Annotated[Ablation, _command(Ablation)]
                | Annotated[Average, _command(Average)]
                | Annotated[Prepare, _command(Prepare, default=Prepare(tyro.MISSING, preparation))],
                args=list(args),
                prog=NAME,
                description="Train and use translation systems, as in 'Attention Is All You Need'.",
                config=(
                    tyro.conf.OmitSubcommandPrefixes,
                    tyro.conf.DisallowNone,
                    tyro.conf.FlagCreatePairsOff,
                ),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(unboxed(box.getvalue())) from None


def _command(kind: type, **options: Any) -> Any:
    """Configure a command: its help is the first line of its docstring."""
    description = (kind.__doc__ or "").strip().split("\n")[0]
    return tyro.conf.subcommand(kind.__name__.lower(), description=description, **options)


def unboxed(box: str) -> str:
    """Return the first section of tyro's error box as one line."""
    words: list[str] = []
    for line in box.splitlines()[1:]:
        text = line.strip("│ ")
        rule = len(text) > 2 and not text.strip("─╰╯-")  # of hyphens where a terminal has no more
        if text.startswith("Got errors") or (rule and words):
            break
        words.extend([] if rule else text.split())
    message = " ".join(words).rstrip(".") or "these options are not understood"
    return f"{message}; see {NAME} --help"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its status: 0, 2 for an error, 130 or 143 if interrupted."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: say(f"{NAME}: {message}")
            status = parse(sys.argv[1:] if arguments is None else arguments)()
        sys.stdout.flush()
        return status
    except SystemExit as end:  # after --help, or where the main process has failed
        return int(end.code or 0)
    except ERRORS as error:
        say(f"{NAME}: {error}")
        return 2
    except BrokenPipeError:  # nobody reads on
        _drop_output()
        return 0
    except OSError as error:
        say(f"{NAME}: {error.filename or 'output'}: {error.strerror or error}")
        _drop_output()
        return 2
    except KeyboardInterrupt:
        say(f"{NAME}: interrupted")
        return 130


def _drop_output() -> None:
    """Send what is still to be printed nowhere, or Python complains at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
