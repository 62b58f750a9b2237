"""``sweep``: a grid of runs, several side by side, with one record for all of them."""

import base64
import contextlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from annotated_transformer.cli import output, train
from annotated_transformer.cli.main import error_message, raise_interrupt
from annotated_transformer.cli.options import Sweep, Train
from annotated_transformer.cli.output import log, print_result
from annotated_transformer.cli.systems import ALPHA, BEAM, move_to_device
from annotated_transformer.data.corpora import language_codes
from annotated_transformer.data.files import claim_folder, load_object, lock_folder, write_json
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.engine import parser
from annotated_transformer.engine.checkpoints import best_weights, load_system, load_tensors
from annotated_transformer.engine.config import Options, UsageError
from annotated_transformer.engine.interruption import defer_signals, handle_signals
from annotated_transformer.engine.precision import find_device
from annotated_transformer.engine.records import origin, processor_name, usable_cores
from annotated_transformer.engine.sweep import SAMPLE, Grid, load_grid
from annotated_transformer.engine.system import model_config, translate_lines
from annotated_transformer.engine.trainer import Trainer
from annotated_transformer.engine.treebanks import is_parser
from annotated_transformer.fast.products import prepare_cpu
from annotated_transformer.model.complexity import training_flops
from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.results.machine_translation import judge_claim
from annotated_transformer.translation.evaluation import all_counts, bleu_of_counts

PROBE = 20  # updates of the first run, from which the time of all is estimated
RESULT, LOG = "result.json", "log.txt"
as_json = partial(json.dumps, sort_keys=True)  # where tuples are lists


class SweepError(ValueError):
    """A run of a sweep that failed; the message says which, and where its log is."""


def run(command: Sweep) -> int:
    """Log the plan, train what the record does not have yet, and print the table."""
    grid = customize_grid(command)
    chosen = command.rows or tuple(grid.rows)
    folder = command.out or Path("runs") / grid.name
    path = command.record or folder / f"{grid.name}.json"
    output.check_target("--record", path)
    here = describe_hardware(find_device(grid.rows[chosen[0]].run.device))

    def is_missing(row: str, seed: int) -> bool:
        return str(seed) not in open_record(path, grid, here)["rows"][row]["runs"]

    record = open_record(path, grid, here)
    done = {row: found["runs"] for row, found in record["rows"].items()}
    left = [one for one in grid.runs() if one[0] in chosen and str(one[1]) not in done[one[0]]]
    if left:
        jobs = min(command.jobs or usable_cores(), len(left))
        count = sum(map(len, done.values()))
        log(f"{grid.name}: {len(chosen)} rows, {grid.seeds} seeds; {count} runs are in {path}")
        remedy = "wait until it ends, or give another --out; the --record may be the same"
        busy = SweepError(f"{folder}: another sweep works there; {remedy}")
        with claim_folder(folder / ".sweep", busy):  # the folder's own lock is the record's
            about = plan(record, grid, left, folder, jobs)
            log(f"{len(left)} runs to go, {jobs} at a time: {about}")
            if command.plan:
                return 0
            results = results_as_completed(left, folder, jobs, is_missing, keep=command.keep)
            bar = tqdm(total=len(left), unit="run", disable=command.quiet or sys.stderr is None)
            with contextlib.closing(results), bar:
                for one in results:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with lock_folder(path.parent, wait=True):  # others may have added to the record
                        record = open_record(path, grid, here) if path.exists() else record
                        add_run(record, grid, here, *one)
                        write_json(path, record)
                    bar.update()
    show_table(open_record(path, grid, here))
    return 0


def customize_grid(command: Sweep) -> Grid:
    """Return the grid with what the command line changes."""
    given = {"device": command.device, "mirror": command.mirror}
    grid = load_grid(command.grid, {k: v for k, v in given.items() if v not in ("auto", None)})
    if unknown := [row for row in command.rows if row not in grid.rows]:
        raise UsageError(f"--rows {unknown[0]}: choose among {', '.join(grid.rows)}")
    rows = {}
    for row, options in grid.rows.items():
        try:
            if options.data.prepared is not None:
                corpus = Prepared(options.data.prepared)
                options = train.prepared_options(options, corpus, grid.recipe)
            run_flops(options)
        except ValueError as error:
            if command.rows and row not in command.rows:
                continue
            raise UsageError(f"row {row}: {error}") from None
        rows[row] = options
    return replace(grid, rows=rows, seeds=command.seeds or grid.seeds)


def describe_hardware(device: str) -> dict[str, str | None]:
    """Return on what the runs of a sweep are made."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {"processor": processor_name(), "gpu": gpu}


def open_record(path: Path, grid: Grid, here: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record that is there, with all rows of the grid in its order, or a new one.

    Raises:
        UsageError: It is no record of these runs.
    """
    trees = any(is_parser(language_codes(each.data.pair)) for each in grid.rows.values())
    beam, alpha = (parser.BEAM, parser.ALPHA) if trees else (BEAM, ALPHA)
    if path.exists():
        try:
            record = load_object(path)
            usual = Options().described()  # of options that are younger than the record
            known = {row: found for row, found in record["rows"].items() if found["runs"]}
            before = {row: {**usual, **found["options"]} for row, found in known.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"--record {path}: is no record of a sweep; name another") from None
        for row, options in grid.described().items():
            if as_json(before.get(row, options)) != as_json(options):
                raise UsageError(f"--record {path}: row {row} has other options; name another file")
    else:
        known, record = {}, {"kind": "sweep", **origin(output.command_line()), "hardware": here,
                  "search": {"beam": beam, "alpha": alpha}, "rows": {}}  # fmt: skip
    rows = {row: {"options": options, "runs": {}} for row, options in grid.described().items()}
    record["rows"] = {**rows, **known}  # first the base, whichever row was run first
    return record


def add_run(
    record: dict[str, Any], grid: Grid, here: Mapping[str, Any], row: str, seed: int,
    result: Mapping[str, Any],
) -> None:  # fmt: skip
    """Add a run to the record.

    Raises:
        SweepError: It was trained on other text than runs that it would be compared with.
    """
    texts = result["texts"]
    for other, found in record["rows"].items():
        same = other in grid.rows and grid.rows[other].data == grid.rows[row].data
        if same and found.get("texts", texts) != texts:
            told = f"row {row}, seed {seed} read other text than row {other} of the record"
            raise SweepError(f"{told}; give back the same text, or name another --record")
    record["rows"][row]["texts"] = texts
    run = {name: value for name, value in result.items() if name != "texts"}
    other = {} if known_hardware(record) == here else {"hardware": here}
    record["rows"][row]["runs"][str(seed)] = run | other


def known_hardware(record: Mapping[str, Any], run: Mapping[str, Any] | None = None) -> Any:
    """Return what a run was made on, or else most runs of the record; some do not name a GPU."""
    return {"gpu": None, **(run or record).get("hardware", record["hardware"])}


def run_flops(options: Options) -> float:
    """Return about how many operations a run's matrix products take."""
    config = model_config(options, shared=options.data.tokenizer != "words")
    optim = options.optim
    tokens = optim.updates * optim.accumulate * optim.max_tokens
    vocab = options.data.vocabulary
    if isinstance(config, ModelConfig):
        return tokens / SAMPLE * training_flops(config, vocab, [SAMPLE], [SAMPLE])
    with torch.device("meta"):  # a multiplication and an addition by each weight, three times
        model = config.build(vocab, vocab)
    return 6.0 * tokens * sum(parameter.numel() for parameter in model.parameters())


def plan(
    record: Mapping[str, Any], grid: Grid, left: list[tuple[str, int, Options]], folder: Path,
    jobs: int,
) -> str:  # fmt: skip
    """Say how long the runs will take.

    Measured on the runs recorded on this hardware; where there are none, on the first updates of
    the first run, which are not lost.
    """
    here = describe_hardware(find_device(left[0][2].run.device))
    pace = [
        (run["seconds"] + run["search_seconds"]) / run_flops(grid.rows[row])
        for row, found in record["rows"].items()
        if row in grid.rows
        for run in found["runs"].values()
        if known_hardware(record, run) == here
    ]
    probed = not pace
    if probed:
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, usable_cores() // jobs))
        try:
            pace = [probe(*left[0], folder) / run_flops(left[0][2])]
        finally:
            torch.set_num_threads(threads)
        jobs = 1 if here["gpu"] else jobs  # they will share it
    seconds = fmean(pace) * sum(run_flops(each) for _, _, each in left) / jobs
    return f"about {timedelta(seconds=round(seconds))}{' without the scoring' * probed}"


def probe(row: str, seed: int, options: Options, folder: Path) -> float:
    """Make the first updates of a run; return about how many seconds all of them take.

    Raises:
        SweepError: The run cannot begin.
    """
    try:
        prepare_cpu()  # as the runs do
        texts = train.load_texts(options.data, bar=False, warn=False)
        trainer = Trainer(options.replace(steps=PROBE), folder / f"{row}-{seed}", texts)
        if trainer.state.updates < options.optim.updates:
            trainer.train(progress=False)
    except Exception as error:
        if (told := error_message(error)) is None:
            raise
        raise SweepError(f"row {row}, seed {seed}: {told}") from None
    if trainer.stopped is not None:
        raise KeyboardInterrupt(trainer.stopped)
    state = trainer.state
    return options.optim.updates * state.update_seconds / max(1, state.updates)


def results_as_completed(
    left: list[tuple[str, int, Options]], folder: Path, jobs: int,
    is_missing: Callable[[str, int], bool], *, keep: bool,
) -> Generator[tuple[str, int, dict[str, Any]]]:  # fmt: skip
    """Train and score, ``jobs`` at a time; go through the results as they come.

    What another sweep has recorded meanwhile is left out.

    Raises:
        SweepError: A run failed. The others are stopped, with all saved.
    """
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload([__name__])  # one process loads the libraries for all runs
    waiting = list(reversed(left))
    running: dict[Any, tuple[BaseProcess, str, int, Path]] = {}
    threads = max(1, usable_cores() // jobs)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes to come
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                row, seed, options = waiting.pop()
                if not is_missing(row, seed):
                    log(f"row {row}, seed {seed}: another sweep has recorded it")
                    continue
                place = folder / f"{row}-{seed}"
                place.mkdir(parents=True, exist_ok=True)
                begun = context.Process(target=train_worker, args=(options, place, threads))
                with defer_signals():  # one that is half started would tell of it
                    begun.start()
                    running[begun.sentinel] = (begun, row, seed, place)
            for sentinel in wait(list(running)) if running else ():
                process, row, seed, place = running.pop(sentinel)
                process.join()
                if process.exitcode or not (place / RESULT).exists():
                    raise SweepError(
                        f"row {row}, seed {seed} failed: {why_failed(process, place / LOG)}; mend "
                        "it, and run the same command again: it goes on from there"
                    )
                yield row, seed, load_object(place / RESULT)
                if not keep:
                    shutil.rmtree(place)
    finally:
        for other, *_ in running.values():
            other.terminate()  # a run saves what it has
        for other, *_ in running.values():
            other.join()


def why_failed(process: BaseProcess, path: Path) -> str:
    """Return the signal that ended a run, or the last line of its log, and where the log is."""
    if process.exitcode is not None and process.exitcode < 0:
        return f"ended by {signal.Signals(-process.exitcode).name}; its log is {path}"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return f"{''.join(lines[-1:]).removeprefix(f'{output.NAME}: ')} ({path})"


def train_worker(options: Options, folder: Path, threads: int) -> None:
    """Train and score one run, in a process of its own; what it says goes to its log.

    A finished run is only scored, if it is one with these options on these texts.
    """
    torch.set_num_threads(threads)
    with (
        handle_signals(raise_interrupt),
        (folder / LOG).open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            groups = (options.data, options.model, options.optim, options.run)
            if status := train.run(Train(*groups, out=folder, quiet=True)):
                raise SystemExit(status)
            write_json(folder / RESULT, result_of_run(options, folder))
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except Exception as error:
            with contextlib.suppress(OSError):  # the disk may be full
                output.print_error(error_message(error) or traceback.format_exc())
            raise SystemExit(2) from None


def result_of_run(options: Options, folder: Path) -> dict[str, Any]:
    """Return what a record keeps of a finished run, scored with the paper's search."""
    record = load_object(folder / "record.json")
    valid = load_tensors(folder / best_weights(folder), verify=False)[1]["valid_loss"]
    kept = {name: record[name] for name in ("commit", "parameters", "updates", "seconds", "flops")}
    training = load_object(folder / "config.json")["training"]
    kept["texts"] = {name: training.get(name) for name in ("checksums", "valid")}
    if is_parser(language_codes(options.data.pair)):  # scored when it was trained
        ((test, scores),) = record["scores"].items()
        seconds = sum(found["seconds"] for found in scores.values())
        return {**kept, "search_seconds": seconds, "loss": valid, "split": test, **scores}
    system = load_system(folder)
    move_to_device(system, find_device(options.run.device))
    texts = train.load_texts(options.data, bar=False, warn=False)
    test = train.fitting(system, train.test_text(options.data, texts, bar=False))
    start = time.perf_counter()
    found = translate_lines(system, test.source, beam=BEAM, alpha=ALPHA)
    counts = all_counts(found, test.target, lowercase=system.lowercase)
    return {
        **kept,
        "search_seconds": round(time.perf_counter() - start, 3),
        "loss": valid,
        "sentences": len(test),
        "bleu": round(float(bleu_of_counts(counts.sum(0))), 2),
        "counts": encode_bleu_counts(counts),
    }


def encode_bleu_counts(counts: np.ndarray) -> str:
    """Return BLEU's counts of all sentences ``(sentences, 10)`` as text."""
    return base64.b85encode(zlib.compress(counts.astype("<u2").tobytes(), 9)).decode()


def decode_bleu_counts(text: str) -> np.ndarray:
    """Return what :func:`encode_bleu_counts` made a text of."""
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), "<u2").reshape(-1, 10)


def show_table(record: Mapping[str, Any]) -> None:
    """Print a line for each row: perplexity and BLEU, with the paired difference from the base."""
    base = next(iter(record["rows"].values()))["runs"]
    rows = {row: found["runs"] for row, found in record["rows"].items() if found["runs"]}
    if not rows:
        return
    name = main_score(next(iter(next(iter(rows.values())).values())))[0]
    print_result(f"{'row':12} {'parameters':>12} {'perplexity':>12} {name:>7}   against the base")
    for row, runs in rows.items():
        loss = fmean(one["loss"] for one in runs.values())
        score = fmean(main_score(one)[1] for one in runs.values())
        size = next(iter(runs.values()))["parameters"]
        both = [seed for seed in runs if seed in base]
        told = "" if runs is base else score_difference(base, runs, both)
        print_result(f"{row:12} {size:12,} {math.exp(loss):12.3f} {score:7.2f}   {told}".rstrip())


def main_score(result: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name of a run's score and its value: BLEU, or F1 of constrained decoding."""
    return ("F1", result["constrained"]["f1"]) if "free" in result else ("BLEU", result["bleu"])


def score_difference(base: Mapping[str, Any], runs: Mapping[str, Any], seeds: list[str]) -> str:
    """Return the mean difference in BLEU or F1 over paired seeds, with its 95 % interval."""
    sizes = {run[seed].get("sentences") for run in (base, runs) for seed in seeds}
    if len(sizes - {None}) > 1:  # without those that are too long for a model
        return "scored on other sentences"
    found = [main_score(runs[seed])[1] - main_score(base[seed])[1] for seed in seeds]
    if len(found) < 2:
        return ""
    told, name = judge_claim(found), main_score(base[seeds[0]])[0]
    return f"{told.mean:+.2f} {name} ({told.low:+.2f} to {told.high:+.2f})"
