"""``sweep``: a grid of runs, several side by side, with one record for all of them."""

import base64
import contextlib
import json
import math
import multiprocessing
import os
import shutil
import sys
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping
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

from annotated_transformer.cli import train
from annotated_transformer.cli.main import error_message, raise_interrupt
from annotated_transformer.cli.options import Sweep, Train
from annotated_transformer.cli.output import (
    check_target,
    command_line,
    log,
    print_error,
    print_result,
)
from annotated_transformer.cli.systems import ALPHA, BEAM, move_to_device
from annotated_transformer.data.corpora import language_codes
from annotated_transformer.data.files import load_object, lock_folder, write_atomically, write_json
from annotated_transformer.engine.checkpoints import best_weights, load_system, load_tensors
from annotated_transformer.engine.config import Options, UsageError
from annotated_transformer.engine.interruption import defer_signals, handle_signals
from annotated_transformer.engine.parser import ALPHA as TREE_ALPHA
from annotated_transformer.engine.parser import BEAM as TREE_BEAM
from annotated_transformer.engine.precision import find_device
from annotated_transformer.engine.records import origin, processor_name, source_commit, usable_cores
from annotated_transformer.engine.sweep import SAMPLE, Grid, load_grid
from annotated_transformer.engine.system import model_config, translate_lines
from annotated_transformer.engine.trainer import Trainer, check_same
from annotated_transformer.engine.treebanks import is_parser
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
    folder = command.out or Path("runs") / grid.name
    path = command.record or folder / f"{grid.name}.json"
    check_target("--record", path)
    here = describe_hardware(find_device(command.device))
    record = open_record(path, grid, here)
    left = [one for one in grid.runs() if str(one[1]) not in record["rows"][one[0]]["runs"]]
    jobs = command.jobs or usable_cores()
    made_by = source_commit()  # another than the record's, if it goes on
    if left:
        done = sum(len(row["runs"]) for row in record["rows"].values())
        log(f"{grid.name}: {len(grid.rows)} rows, {grid.seeds} seeds; {done} runs are in {path}")
        seconds = estimate_seconds(record, left, folder, here) / min(jobs, len(left))
        log(f"{len(left)} runs to go, {jobs} at a time: about {timedelta(seconds=round(seconds))}")
        if command.plan:
            return 0
        with tqdm(total=len(left), unit="run", disable=command.quiet or sys.stderr is None) as bar:
            for row, seed, result in results_as_completed(left, folder, jobs, keep=command.keep):
                with lock_folder(folder, wait=True):  # another sweep may have added to the record
                    record = open_record(path, grid) if path.exists() else record
                    other = {} if here == record["hardware"] else {"hardware": here}
                    made = {**result, "commit": made_by, **other}
                    record["rows"][row]["runs"][str(seed)] = made
                    write_json(path, record)
                bar.update()
    show_table(record)
    return 0


def customize_grid(command: Sweep) -> Grid:
    """Return the grid with what the command line changes."""
    changes: dict[str, Any] = {"device": command.device}
    changes |= {} if command.mirror is None else {"mirror": command.mirror}
    grid = load_grid(command.grid, changes)
    if unknown := [row for row in command.rows if row not in grid.rows]:
        raise UsageError(f"--rows {unknown[0]}: choose among {', '.join(grid.rows)}")
    rows = {row: grid.rows[row] for row in grid.rows if row in (command.rows or grid.rows)}
    for row, options in rows.items():
        try:
            run_flops(options)
        except UsageError as error:
            raise UsageError(f"row {row}: {error}") from None
    return Grid(grid.name, rows, command.seeds or grid.seeds)


def describe_hardware(device: str) -> dict[str, str | None]:
    """Return on what the runs of a sweep are made."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {"processor": processor_name(), "gpu": gpu}


def open_record(path: Path, grid: Grid, here: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the record that is there, with all rows of the grid, or a new one.

    Raises:
        UsageError: It is no record of these runs.
    """
    trees = any(is_parser(language_codes(each.data.pair)) for each in grid.rows.values())
    beam, alpha = (TREE_BEAM, TREE_ALPHA) if trees else (BEAM, ALPHA)
    record: dict[str, Any] = {
        "kind": "sweep",
        **origin(command_line()),
        "hardware": here,
        "search": {"beam": beam, "alpha": alpha},
        "rows": {},
    }
    if path.exists():
        try:
            record = load_object(path)
            usual = Options().described()  # of options that are younger than the record
            before = {row: {**usual, **found["options"]} for row, found in record["rows"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"--record {path}: is no record of a sweep; name another") from None
        for row, options in grid.described().items():
            if as_json(before.get(row, options)) != as_json(options):
                raise UsageError(f"--record {path}: row {row} has other options; name another file")
    for row, options in grid.described().items():
        record["rows"].setdefault(row, {"options": options, "runs": {}})
    return record


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


def estimate_seconds(
    record: Mapping[str, Any], left: list[tuple[str, int, Options]], folder: Path,
    here: Mapping[str, Any],
) -> float:  # fmt: skip
    """Return about how many seconds the runs take, one after the other.

    Measured on the runs recorded on this hardware; where there are none, on the first updates of
    the first run, which are not lost.
    """
    options = {row: options for row, _, options in left}
    pace = [
        (run["seconds"] + run["search_seconds"]) / run_flops(options[row])
        for row, found in record["rows"].items()
        if row in options
        for run in found["runs"].values()
        if run.get("hardware", record["hardware"]) == here
    ]
    if not pace:
        row, seed, first = left[0]
        texts = train.load_texts(first.data, bar=False, warn=False)
        trainer = Trainer(first.replace(steps=PROBE), folder / f"{row}-{seed}", texts)
        if trainer.state.updates < first.optim.updates:
            trainer.train(progress=False)
        each = trainer.state.update_seconds / max(1, trainer.state.updates)
        pace = [each * first.optim.updates / run_flops(first)]
    return fmean(pace) * sum(run_flops(each) for _, _, each in left)


def results_as_completed(
    left: list[tuple[str, int, Options]], folder: Path, jobs: int, *, keep: bool
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Train and score, ``jobs`` at a time; go through the results as they come.

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
                place = folder / f"{row}-{seed}"
                begun = context.Process(target=train_worker, args=(options, place, threads))
                with defer_signals():  # one that is half started would tell of it
                    begun.start()
                    running[begun.sentinel] = (begun, row, seed, place)
            for sentinel in wait(list(running)):
                process, row, seed, place = running.pop(sentinel)
                process.join()
                if process.exitcode or not (place / RESULT).exists():
                    raise SweepError(
                        f"row {row}, seed {seed} failed; see {place / LOG}, mend it, and run the "
                        "same command again: it goes on from there"
                    )
                yield row, seed, load_object(place / RESULT)
                if not keep:
                    shutil.rmtree(place)
    finally:
        for other, *_ in running.values():
            other.terminate()  # a run saves what it has
        for other, *_ in running.values():
            other.join()


def train_worker(options: Options, folder: Path, threads: int) -> None:
    """Train and score one run, in a process of its own; what it says goes to its log."""
    torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        handle_signals(raise_interrupt),
        (folder / LOG).open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            if (folder / "record.json").exists():  # perhaps of another grid
                begun = load_system(folder, weights=None).training
                check_same(begun, {**begun, "options": options.described()}, folder, sys.maxsize)
            else:
                groups = (options.data, options.model, options.optim, options.run)
                if status := train.run(Train(*groups, out=folder, quiet=True)):
                    raise SystemExit(status)
            write_atomically(folder / RESULT, json.dumps(result_of_run(options, folder)).encode())
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except Exception as error:
            print_error(error_message(error) or traceback.format_exc())
            raise SystemExit(2) from None


def result_of_run(options: Options, folder: Path) -> dict[str, Any]:
    """Return what a record keeps of a finished run, scored with the paper's search."""
    record = load_object(folder / "record.json")
    valid = load_tensors(folder / best_weights(folder), verify=False)[1]["valid_loss"]
    kept = {name: record[name] for name in ("parameters", "updates", "seconds", "flops")}
    if is_parser(language_codes(options.data.pair)):  # scored when it was trained
        ((test, scores),) = record["scores"].items()
        seconds = sum(found["seconds"] for found in scores.values())
        return {**kept, "search_seconds": seconds, "loss": valid, "split": test, **scores}
    system = load_system(folder)
    move_to_device(system, find_device(options.run.device))
    texts = train.load_texts(options.data, bar=False, warn=False)
    test = train.test_text(options.data, texts, bar=False)
    start = time.perf_counter()
    found = translate_lines(system, test.source, beam=BEAM, alpha=ALPHA)
    counts = all_counts(found, test.target, lowercase=system.lowercase)
    return {
        **kept,
        "search_seconds": round(time.perf_counter() - start, 3),
        "loss": valid,
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
    rows = {row: found["runs"] for row, found in record["rows"].items() if found["runs"]}
    if not rows:
        return
    base = next(iter(rows.values()))
    name = main_score(next(iter(base.values())))[0]
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
    found = [main_score(runs[seed])[1] - main_score(base[seed])[1] for seed in seeds]
    if len(found) < 2:
        return ""
    told, name = judge_claim(found), main_score(base[seeds[0]])[0]
    return f"{told.mean:+.2f} {name} ({told.low:+.2f} to {told.high:+.2f})"
