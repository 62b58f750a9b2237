"""Measure our package next to other implementations: ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.workers import Worker, WorkerError, reply, resident

TASKS = ("train small", "train base", "decode small", "decode base")
# with rivals, which must be installed: sentences, and hypotheses of each
RIVALS: dict[str, tuple[int, int]] = {
    "search greedy": (32, 1),
    "search beam": (32, 4),
    "search one": (1, 1),
    "search int8": (32, 1),
}
OTHERS = ("others small", "others base")  # training steps of libraries that must be installed
# the same, all with dropout at every place and with the float32 products that we choose
EQUAL = ("equal small", "equal base")
TURN = 3  # steps that a contender makes before the next one does
LIBRARIES = ("hugging_face", "x_transformers", "opennmt", "fairseq")
REQUIRED = {
    ("train small", "torch.nn.Transformer"): 2.5,
    ("train base", "torch.nn.Transformer"): 2.0,
    ("decode small", "article"): 15.0,
    ("decode base", "article"): 15.0,
    ("search greedy", "hugging_face"): 2.0,
    ("search greedy", "ctranslate2"): 2.0,
    ("search beam", "hugging_face"): 1.6,
    ("search beam", "ctranslate2"): 1.2,
    ("search one", "hugging_face"): 1.0,
    ("search one", "ctranslate2"): 1.0,
    ("search int8", "ctranslate2"): 1.0,
    **{("others small", name): 3.0 for name in LIBRARIES},
    **{("others base", name): 2.4 for name in LIBRARIES},
    ("equal small", "fairseq"): 2.3,
    ("equal base", "fairseq"): 2.1,
}


def contenders(task: str) -> list[str]:
    """Return the names of the contenders in a task."""
    if task == "search int8":
        return ["ours", "ctranslate2"]
    if task in RIVALS:
        return ["ours", "hugging_face", "ctranslate2"]
    if task in (*OTHERS, *EQUAL):
        return ["ours", "torch.nn.Transformer", *LIBRARIES]
    return ["ours", *([] if task.startswith("decode") else ["torch.nn.Transformer"]), "article"]


def work(contender: str, task: str, size: str) -> None:
    """Make a step for each line; answer with its wall time and its processor time in seconds."""
    import torch

    from annotated_transformer.fast.products import prepare_cpu
    from benchmarks import rivals, trainers
    from benchmarks.contenders import CONTENDERS, SIZES, everywhere
    from benchmarks.machine import seconds_of

    if contender != "ours":  # a library is imported before its memory counts
        if f"{task} {size}" in RIVALS:
            rivals.CONTENDERS[contender](trainers.TINY, 1, 1)
        elif f"{task} {size}" in (*OTHERS, *EQUAL):
            trainers.contender(contender, trainers.TINY)
    imported = resident("VmRSS")
    if f"{task} {size}" in RIVALS:
        low: Any = {"precision": size} if size == "int8" else {}
        step = rivals.CONTENDERS[contender](SIZES["base"], *RIVALS[f"{task} {size}"], **low)
    elif f"{task} {size}" in OTHERS:
        step = trainers.contender(contender, SIZES[size])
    elif f"{task} {size}" in EQUAL:
        prepare_cpu()
        step = trainers.contender(contender, everywhere(SIZES[size]))
    else:
        step = CONTENDERS[contender](SIZES[size], task)
    step()  # the first one allocates and warms up
    step()
    with contextlib.suppress(OSError):  # the highest from here on: without what preparing took
        Path("/proc/self/clear_refs").write_text("5")
    reply(torch.get_float32_matmul_precision())
    for line in sys.stdin:
        if line.strip() == "end":
            break
        if line.strip() == "rest":
            give_back()
            reply(None)
            continue
        busy = time.process_time()
        reply([seconds_of(step), time.process_time() - busy])
    reply((resident("VmHWM") - imported) / 2**20)


def give_back() -> None:
    """Return freed memory to the system, which glibc does only in part on its own."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def measure(task: str, contenders: list[str], rounds: int) -> dict[str, dict[str, object]]:
    """Run the contenders in turns of a few steps, and return the median time of each."""
    rest = task in ("others base", "equal base")  # six of them would not fit into 24 GB otherwise
    results: dict[str, dict[str, object]] = {}
    with contextlib.ExitStack() as stack:
        workers, precisions = [], []
        for name in contenders:
            command = ["-m", "benchmarks", "--work", name, *task.split()]
            workers.append(stack.enter_context(Worker(name, command)))
            precisions.append(workers[-1].answer())
            if rest:
                workers[-1].ask("rest")
        steps: list[list[list[float]]] = [[] for _ in workers]
        for _ in range(rounds):
            for worker, found in zip(workers, steps, strict=True):
                found += [worker.ask("step") for _ in range(TURN)]  # only the first is cold
                if rest:
                    worker.ask("rest")
        for worker, found, precision in zip(workers, steps, precisions, strict=True):
            seconds, busy = zip(*found, strict=True)
            results[worker.name] = {
                "median_s": statistics.median(seconds),
                "best_s": min(seconds),
                "busy_s": statistics.median(busy),
                "memory_mb": worker.ask("end"),
                "float32_products": precision,
            }
    return results


def show(task: str, results: dict[str, dict[str, object]]) -> None:
    """Print a table of one task, with ratios to our own time."""
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
    """Parse the options, measure, print a table and write the record."""
    if sys.argv[1:2] == ["before"]:
        from benchmarks import before

        before.main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = (*TASKS, *RIVALS, *OTHERS, *EQUAL)
    parser.add_argument(
        "tasks",
        nargs="*",
        help=f"any of: {', '.join(known)} (the first {len(TASKS)} unless given); "
        "or: before FOLDER, compared with an older commit (before --help)",
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
    if options.rounds < 1:
        parser.error("at least one round is needed")
    from annotated_transformer.engine.records import processor_name
    from benchmarks.records import keep, origin

    found = {}
    for task in options.tasks or TASKS:
        quick = task in ("train small", "others small", "equal small")
        rounds = options.rounds if quick else max(1, options.rounds // 3)
        try:
            found[task] = measure(task, contenders(task), rounds)
        except WorkerError as error:
            raise SystemExit(str(error)) from None
        show(task, found[task])
        if options.record:  # after each: the next may fail, or be interrupted
            start = {**origin("benchmarks"), "hardware": processor_name()}
            keep({**start, "tasks": found}, options.record)


if __name__ == "__main__":
    main()
