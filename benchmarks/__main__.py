"""Measure our package beside others: ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

TASKS = ("train small", "train base", "decode small", "decode base")
RIVALS = {"search greedy": 1, "search beam": 4}  # with rivals, which must be installed
OTHERS = ("others small", "others base")  # training beside the libraries, which must be installed
TURN = 3  # steps that a contender makes before the next one does
LIBRARIES = ("hugging_face", "x_transformers", "opennmt", "fairseq")
REQUIRED = {
    ("train small", "torch.nn.Transformer"): 2.5,
    ("train base", "torch.nn.Transformer"): 2.0,
    ("decode small", "article"): 15.0,
    ("decode base", "article"): 15.0,
    ("search greedy", "hugging_face"): 2.0,
    ("search greedy", "ctranslate2"): 1.5,
    ("search beam", "hugging_face"): 1.6,
    ("search beam", "ctranslate2"): 0.85,
    **{("others small", name): 3.0 for name in LIBRARIES},
    **{("others base", name): 2.4 for name in LIBRARIES},
}


def contenders(task: str) -> list[str]:
    """Name who takes part in a task."""
    if task in RIVALS:
        return ["ours", "hugging_face", "ctranslate2"]
    if task in OTHERS:
        return ["ours", "torch.nn.Transformer", *LIBRARIES]
    return ["ours", *([] if task.startswith("decode") else ["torch.nn.Transformer"]), "article"]


def work(contender: str, task: str, size: str) -> None:
    """Do a step for each line that comes in; answer with seconds, at the end with memory."""
    import torch

    from benchmarks import rivals, trainers
    from benchmarks.contenders import CONTENDERS, SIZES

    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if f"{task} {size}" in RIVALS:
        step = rivals.CONTENDERS[contender](SIZES["base"], RIVALS[f"{task} {size}"])
    elif f"{task} {size}" in OTHERS:
        step = trainers.contender(contender, SIZES[size])
    else:
        step = CONTENDERS[contender](SIZES[size], task)
    step()  # the first one allocates and warms up
    step()
    print("ready", torch.get_float32_matmul_precision(), flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        if line.strip() == "rest":
            give_back()
            print(flush=True)
            continue
        start, busy = time.perf_counter(), time.process_time()
        step()
        print(time.perf_counter() - start, time.process_time() - busy, flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scale = 1024 if sys.platform == "darwin" else 1  # bytes there, KiB elsewhere
    print((peak - imported) / scale / 1024, flush=True)


def give_back() -> None:
    """Return what was freed to the system, which glibc does by itself only in part."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class Worker:
    """One contender in a process of its own, so that its memory and settings are its own."""

    def __init__(self, contender: str, task: str) -> None:
        self.name = contender
        command = [sys.executable, "-m", "benchmarks", "--work", contender, *task.split()]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.precision = self.answer().split()[1]
        self.seconds: list[float] = []
        self.busy: list[float] = []  # seconds of all processor cores that it used

    def answer(self) -> str:
        """Read a line of the worker."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} failed")
        return line

    def ask(self, line: str) -> list[float]:
        """Send a line, return the numbers that come back."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return [float(number) for number in self.answer().split()]

    def step(self) -> None:
        """Let it make a step."""
        seconds, busy = self.ask("step")
        self.seconds.append(seconds)
        self.busy.append(busy)


def measure(task: str, contenders: list[str], rounds: int) -> dict[str, dict[str, object]]:
    """Let the contenders take turns of a few steps, and return the median of each."""
    rest = task == "others base"  # six of them would not fit into 24 GB otherwise
    workers = []
    for name in contenders:
        workers.append(Worker(name, task))
        if rest:
            workers[-1].ask("rest")
    for _ in range(rounds):
        for worker in workers:  # a few steps in a row: only the first finds cold caches
            for _ in range(TURN):
                worker.step()
            if rest:
                worker.ask("rest")
    results = {}
    for worker in workers:
        results[worker.name] = {
            "median_s": statistics.median(worker.seconds),
            "best_s": min(worker.seconds),
            "busy_s": statistics.median(worker.busy),
            "memory_mb": worker.ask("end")[0],
            "float32_products": worker.precision,
        }
        worker.process.wait()
    return results


def show(task: str, results: dict[str, dict[str, object]]) -> None:
    """Print a table of one task, as ratios to ours."""
    ours = results["ours"]
    columns = "".join(f"{name:>9}" for name in ("median s", "best s", "MB", "time", "busy"))
    print(f"\n{task}\n{'':24}{columns}   memory")
    for name, row in results.items():
        time_ratio = row["median_s"] / ours["median_s"]  # type: ignore[operator]
        busy_ratio = row["busy_s"] / ours["busy_s"]  # type: ignore[operator]
        memory_ratio = ours["memory_mb"] / row["memory_mb"]  # type: ignore[operator]
        need = REQUIRED.get((task, name))
        print(
            f"{name:24}{row['median_s']:9.3f}{row['best_s']:9.3f}{row['memory_mb']:9.0f}"
            f"{time_ratio:8.2f}x{busy_ratio:8.2f}x{memory_ratio:9.2f}"
            + (f"   (at least {need}x)" if need else "")
        )


def main() -> None:
    """Read the options, measure, print, write a record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = (*TASKS, *RIVALS, *OTHERS)
    parser.add_argument(
        "tasks",
        nargs="*",
        help=f"any of: {', '.join(known)} (the first {len(TASKS)} unless given)",
    )
    parser.add_argument("--install", action="store_true", help="install the other libraries")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contender")
    parser.add_argument("--record", type=Path, help="write the figures into this JSON file")
    parser.add_argument("--work", nargs=3, metavar=("WHO", "TASK", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    if options.install:
        from benchmarks import rivals, trainers

        rivals.install()
        trainers.install()
        return
    unknown = set(options.tasks) - set(known)
    if unknown:
        parser.error(f"unknown task {sorted(unknown)[0]!r}; choose among {', '.join(known)}")
    found = {}
    for task in options.tasks or TASKS:
        quick = task in ("train small", "others small")
        rounds = options.rounds if quick else max(1, options.rounds // 3)
        found[task] = measure(task, contenders(task), rounds)
        show(task, found[task])
    if options.record:
        from annotated_transformer.translation.system import processor
        from benchmarks.records import keep, origin

        keep(
            {**origin("benchmarks"), "hardware": processor(), "tasks": found},
            options.record,
        )


if __name__ == "__main__":
    main()
