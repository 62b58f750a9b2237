"""Run every measurement that needs a GPU: ``python -m benchmarks.gpu``.

The work is divided into parts. Each writes a record to ``results/`` when it is finished, and is
skipped when the command is given again. A part without a record has not run on a GPU yet.

smoke         every path of the GPU once, against float64 on the processor
step          a training step of ``base`` and ``big`` at 25,000 + 25,000 tokens
profile       what fills such a step: the time of each kernel, in bfloat16
decode        greedy and beam search, 1 to 512 sentences, cached, not cached, by a CUDA graph
ladder        the speed ladder
multi30k-0    Multi30k by the command line, and under the seeds 1 and 2 (multi30k-1, multi30k-2)
iwslt         IWSLT 2014, or a part of it, likewise
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from annotated_transformer.engine.devices import mfu, peak_flops
from annotated_transformer.engine.precision import Name, PreciseLoss, Precision
from annotated_transformer.engine.processes import process_group
from annotated_transformer.engine.records import processor_name
from annotated_transformer.fast.decoding import keep_decoder_weights
from annotated_transformer.fast.search import beam_search, best_continuations, greedy_search
from annotated_transformer.model.architecture import EncoderDecoder, Generator
from annotated_transformer.model.complexity import training_flops
from annotated_transformer.model.transformer import PRESETS, ModelConfig, build_model
from annotated_transformer.notation import EOS
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.distributed import replica_loss
from annotated_transformer.training.loop import LossFunction, World, batch_loss, update
from annotated_transformer.training.optimizer import make_adam
from annotated_transformer.translation import beam_search as readable_beam
from annotated_transformer.translation import greedy as readable_greedy
from benchmarks.graphs import graphed
from benchmarks.machine import seconds_of
from benchmarks.records import keep, origin
from benchmarks.rungs import Work, batch_of, draw_pairs
from benchmarks.workers import ROOT

Record = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """The sizes of the measurements: the real ones, or small ones to rehearse on a CPU."""

    smoke: Work
    steps: dict[str, Work]
    batches: tuple[int, ...]  # sentences that are decoded at a time
    target: int  # tokens of each output
    updates: int  # that are timed
    compiler: str = "inductor"
    rehearsal: bool = False


_LITTLE = ModelConfig(N=2, d_model=32, d_ff=64, h=2, max_len=64)
FULL = Scale(
    smoke=Work(ModelConfig(N=2, d_model=256, d_ff=512, h=4, dropout=0.0, max_len=64), 2_000, 64, 1),
    # about 15.6 tokens a sentence on either side
    steps={
        name: Work(replace(PRESETS[name], max_len=64), 37_000, 1_600, 1) for name in ("base", "big")
    },
    batches=(1, 8, 32, 128, 512),
    target=60,
    updates=20,
)
REHEARSAL = Scale(
    smoke=Work(replace(_LITTLE, dropout=0.0), 50, 8, 1),
    steps={"base": Work(_LITTLE, 50, 8, 1)},
    batches=(1, 3),
    target=5,
    updates=2,
    compiler="eager",
    rehearsal=True,
)


def model_of(work: Work, device: torch.device) -> EncoderDecoder:
    """Return the model for some work, with weights drawn from the work's seed."""
    torch.manual_seed(work.seed)
    return build_model(work.vocabulary, work.vocabulary, work.config).to(device)


# --- smoke: does every path compute the right loss? ------------------------------------------

TOLERANCES = {"float32": 1e-4, "tf32": 5e-3, "bfloat16": 5e-2, "float16": 1e-2}  # relative


def exact_losses(work: Work, batch: Batch, updates: int) -> list[float]:
    """Return the losses per token of some updates, computed by the readable layer in float64."""
    model = model_of(work, torch.device("cpu")).double()
    optimizer = make_adam(model, lr=1e-3)
    steps = [update(model, [batch], optimizer, smoothing=0.1) for _ in range(updates)]
    return [step.nll / step.tokens for step in steps]


def losses(
    work: Work,
    batch: Batch,
    updates: int,
    precision: Precision,
    way: str,
    world: World,
    compiler: str,
) -> list[float]:
    """Return the same losses, computed as a training run on the device computes them.

    Args:
        work: The sizes of model and batch.
        batch: The batch, on the CPU.
        updates: The number of updates.
        precision: The precision, which also names the device.
        way: ``"fast"``, ``"readable"``, ``"compiled"``, ``"ddp"`` or ``"fsdp"``.
        world: The process group of one process, needed for ``ddp`` and ``fsdp``.
        compiler: The backend of ``torch.compile``.
    """
    model, batch = model_of(work, precision.device), batch.to(precision.device)
    module: nn.Module = PreciseLoss(model, precision, compiler if way == "compiled" else None)
    loss: LossFunction = replica_loss
    if way == "readable":
        module, loss = model, batch_loss
    elif way == "ddp":
        module = nn.parallel.DistributedDataParallel(module)
    elif way == "fsdp":
        for layer in cast(PreciseLoss, module).layers:
            torch.distributed.fsdp.fully_shard(layer)
        torch.distributed.fsdp.fully_shard(module)
    optimizer = make_adam(module, lr=1e-3)
    found: list[float] = []
    while len(found) < updates:
        step = update(
            module, [batch], optimizer, smoothing=0.1, loss=loss, world=world, scale=precision.scale
        )
        if precision.scale is None or step.grad_norm < float("inf"):  # else the scale was halved
            found.append(step.nll / step.tokens)
        elif precision.scale.value <= precision.scale.least:
            raise FloatingPointError("every update overflows")
    return found


def paths(device: torch.device) -> Iterator[tuple[str, Name, str]]:
    """Yield the name, precision and way of each path that a device supports."""
    yield "readable layer", "float32", "readable"
    yield "fast layer", "float32", "fast"
    names: tuple[Name, ...] = ("tf32", "bfloat16", "float16")
    for name in names if device.type == "cuda" else names[1:2]:
        yield name, name, "fast"
    yield "compiled", "bfloat16" if device.type == "cuda" else "float32", "compiled"
    yield "DDP, one process", "float32", "ddp"
    yield "FSDP, one process", "float32", "fsdp"


@contextmanager
def alone() -> Iterator[World]:
    """Join a process group of size one, as torchrun would create it."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        with process_group() as world:
            yield world
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def searches_agree(work: Work, device: torch.device, target: int) -> dict[str, bool]:
    """Whether searches on the device find what the readable layer finds there, in float64."""
    model = model_of(work, device).double().eval()
    sources = [source for source, _ in draw_pairs(work)]
    greedy = readable_greedy.greedy_search(model, sources, target)
    beams = readable_beam.beam_search(model, sources, beam=4, max_len=target)
    by_graph = graphed(target)
    found: dict[str, tuple[list[Any], list[Any]]] = {
        "greedy": (greedy_search(model, sources, target), greedy),
        "greedy, graph": (
            readable_greedy.greedy_search(model, sources, target, start=by_graph),
            greedy,
        ),
        "beam": (beam_search(model, sources, beam=4, max_len=target), beams),
        "beam, graph": (
            readable_beam.beam_search(model, sources, beam=4, max_len=target, start=by_graph),
            beams,
        ),
    }
    return {name: tokens_of(ours) == tokens_of(theirs) for name, (ours, theirs) in found.items()}


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    """Return the tokens of outputs of either search."""
    return [one[0].tokens if one and not isinstance(one[0], int) else one for one in outputs]


def smoke(scale: Scale, device: torch.device) -> Record:
    """Run every path once: training against float64, searches token by token."""
    work, updates, found = scale.smoke, 3, {}
    batch = batch_of(draw_pairs(work))
    exact = exact_losses(work, batch, updates)
    with alone() as world:
        for name, precision, way in paths(device):
            ours = losses(
                work, batch, updates, Precision(precision, device), way, world, scale.compiler
            )
            error = max(abs(a / b - 1) for a, b in zip(ours, exact, strict=True))
            found[name] = {"error": error, "passed": error <= TOLERANCES[precision]}
            print(f"{name:20} relative error of the loss {error:.1e}", flush=True)
    searches = searches_agree(work, device, scale.target)
    return {"updates": updates, "paths": found, "searches": searches}


# --- step: B1 ---------------------------------------------------------------------------------


def time_step(work: Work, precision: Precision, compiler: str | None, updates: int) -> Record:
    """Measure updates on one batch: seconds, tokens a second, share of the peak, memory."""
    device, pairs = precision.device, draw_pairs(work)
    cuda = device.type == "cuda"
    model, batch = model_of(work, device), batch_of(pairs).to(device)
    module, optimizer = PreciseLoss(model, precision, compiler), make_adam(model, lr=1e-5)
    given: Record = {"smoothing": 0.1, "loss": replica_loss, "scale": precision.scale}
    one = partial(update, module, [batch], optimizer, **given)
    seconds = []
    for number in range(updates + 3):
        if cuda and number == 3:  # the first ones compile and allocate
            torch.cuda.reset_peak_memory_stats()
        seconds.append(seconds_of(one, device))
    median = statistics.median(seconds[3:])
    lengths = [len(s) + 1 for s, _ in pairs], [len(t) + 1 for _, t in pairs]
    flops = training_flops(work.config, work.vocabulary, *lengths)
    peak = peak_flops(torch.cuda.get_device_name(), precision.name) if cuda else None
    return {
        "source_tokens": sum(lengths[0]),
        "target_tokens": batch.ntokens,
        "seconds": median,
        "first_seconds": seconds[0],  # with compilation
        "tokens_per_s": batch.ntokens / median,
        "flops_per_s": flops / median,
        "mfu": mfu(flops, median, peak),
        "memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }


def step(scale: Scale, device: torch.device) -> Record:
    """Measure the training steps of all sizes, in each precision, compiled and not."""
    names: tuple[Name, ...] = ("float32", "tf32", "bfloat16", "float16")
    if device.type != "cuda":
        names = ("float32", "bfloat16")
    found = []
    for size, work in scale.steps.items():
        for name in names:
            for compiler in (None, scale.compiler) if name == "bfloat16" else (None,):
                one = time_step(work, Precision(name, device), compiler, scale.updates)
                row = {"size": size, "precision": name, "compiled": compiler is not None, **one}
                found.append(row)
                print(
                    f"{size} {name}{', compiled' * row['compiled']}: "
                    f"{row['tokens_per_s']:,.0f} tokens/s",
                    flush=True,
                )
    return {"sizes": {k: work_fields(v) for k, v in scale.steps.items()}, "steps": found}


def profile(scale: Scale, device: torch.device) -> Record:
    """Measure what fills a training step in bfloat16: seconds and calls of each kernel."""
    precision, kind, found = Precision("bfloat16", device), device.type, {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    if kind == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    for size, work in scale.steps.items():
        model, batch = model_of(work, device), batch_of(draw_pairs(work)).to(device)
        module, optimizer = PreciseLoss(model, precision), make_adam(model, lr=1e-5)
        one = partial(update, module, [batch], optimizer, smoothing=0.1, loss=replica_loss)
        for _ in range(3):
            one()
        with torch.profiler.profile(activities=activities) as seen:
            seconds = seconds_of(one, device)  # the profiler's own start is not counted
        key = "self_device_time_total" if kind == "cuda" else "self_cpu_time_total"
        kernels = [
            {"name": event.key[:120], "calls": event.count, "seconds": getattr(event, key) / 1e6}
            for event in seen.key_averages()
        ]
        kernels.sort(key=lambda row: -row["seconds"])
        found[size] = {"seconds": seconds, "kernels": kernels}
        for row in kernels[:20]:
            print(f"{size} {row['seconds']:.4f} s, {row['calls']:5} x {row['name']}", flush=True)
    return {"precision": precision.name, "steps": found}


def work_fields(work: Work) -> Record:
    """Return some work as the fields of a record."""
    return {"vocabulary": work.vocabulary, "sentences": work.sentences, **vars(work.config)}


# --- decode: B2 -------------------------------------------------------------------------------


def searches(model: EncoderDecoder, target: int) -> dict[str, Callable[[list[list[int]]], object]]:
    """Return the searches that are compared, by name."""
    by_graph = graphed(target)
    return {
        "greedy": lambda x: greedy_search(model, x, target),
        "greedy, not cached": lambda x: readable_greedy.greedy_search(model, x, target),
        "greedy, graph": lambda x: readable_greedy.greedy_search(model, x, target, start=by_graph),
        "beam": lambda x: beam_search(model, x, beam=4, max_len=target),
        "beam, not cached": lambda x: readable_beam.beam_search(model, x, beam=4, max_len=target),
        "beam, graph": lambda x: readable_beam.beam_search(
            model, x, beam=4, max_len=target, start=by_graph, continuations=best_continuations
        ),
    }


def decode(scale: Scale, device: torch.device) -> Record:
    """Measure the searches of ``base`` at all sizes of a batch, in float32 and bfloat16."""
    work, found = scale.steps["base"], []
    model = model_of(work, device).eval()
    cast(Generator, model.generator).proj.bias.detach()[EOS] = -1e4  # all outputs equally long
    sources = [source for source, _ in draw_pairs(replace(work, sentences=max(scale.batches)))]
    for kind in (torch.float32, torch.bfloat16):
        own = copy.deepcopy(model).to(kind)
        with keep_decoder_weights(own):
            for name, search in searches(own, scale.target).items():
                for size in scale.batches:
                    seconds = timed(partial(search, sources[:size]), device)
                    row: Record = {"search": name, "precision": str(kind).removeprefix("torch.")}
                    row |= {"sentences": size, "seconds": seconds}
                    found.append({**row, "tokens_per_s": size * scale.target / seconds})
                    print(f"{name}, {kind}, {size}: {seconds:.3f} s", flush=True)
    return {"size": work_fields(work), "target": scale.target, "searches": found}


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of three calls, after one; of none more where that took 2 s."""
    if (first := seconds_of(run, device)) > 2:
        return first
    return statistics.median(seconds_of(run, device) for _ in range(3))


# --- what other commands do -------------------------------------------------------------------


def run(*words: str) -> None:
    """Run a command in this environment and show its output.

    Raises:
        SystemExit: If it failed or was interrupted.
    """
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"python -m {' '.join(words)}: exit status {done.returncode}")


def ladder(out: Path, device: torch.device) -> None:
    """Measure the speed ladder."""
    size = "paper" if device.type == "cuda" else "tiny"
    command = ["benchmarks.ladder", "--size", size, "--device", device.type, "--rounds", "3"]
    run(*command, "--record", str(out))


def precision_of(device: torch.device) -> str:
    """Return the precision of large models."""
    return "bfloat16" if device.type == "cuda" else "float32"


def train(out: Path, device: torch.device, *words: str) -> None:
    """Train by the command line; an interrupted run is resumed."""
    where = ["--device", device.type, "--out", f"runs/gpu/{out.stem}"]
    run("annotated_transformer", "train", *words, *where, "--record", str(out))


def multi30k(seed: int, out: Path, device: torch.device) -> None:
    """Train on Multi30k in lower case, by the recipe of the package's best runs, in float32.

    In one trial, beside other runs, autocast cost this small model more time than bfloat16 saved.
    """
    train(out, device, "--recipe", "multi30k", "--pair", "en-de", "--seed", str(seed))


def iwslt(out: Path, device: torch.device) -> None:
    """Train on IWSLT 2014, or on what ``prepare`` made of a part of it; sizes are those of G3."""
    text = ["--corpus", "iwslt2014"]
    if folder := os.environ.get("IWSLT_PREPARED"):
        text = ["--prepared", folder]
    sizes = "--preset base --d-ff 1024 --heads 4 --dropout 0.3 --norm pre".split()
    budget = "--max-tokens 16384 --accumulate 1 --updates 4000 --warmup 1000 --peak 0.002".split()
    more = ["--average", "10", "--precision", precision_of(device)]
    train(out, device, *text, *sizes, *budget, *more)


MEASURED: dict[str, Callable[[Scale, torch.device], Record]] = {
    "smoke": smoke,
    "step": step,
    "profile": profile,
    "decode": decode,
}
COMMANDS: dict[str, Callable[[Path, torch.device], None]] = {
    "ladder": ladder,
    **{f"multi30k-{seed}": partial(multi30k, seed) for seed in range(3)},
    "iwslt": iwslt,
}


def make(part: str, path: Path, scale: Scale, device: torch.device) -> None:
    """Run a part, and write its record."""
    if part in COMMANDS:
        COMMANDS[part](path, device)
        return
    start = time.perf_counter()
    made = MEASURED[part](scale, device)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    record = {"kind": f"gpu-{part}", "rehearsal": scale.rehearsal, **origin("benchmarks.gpu")}
    record |= {"hardware": {"processor": processor_name(), "gpu": gpu}, **made}
    keep({**record, "wall_seconds": time.perf_counter() - start}, path)


def failed(record: Record) -> list[str]:
    """Return the paths that computed wrong results, from a record of the part ``smoke``."""
    paths = [name for name, one in record["paths"].items() if not one["passed"]]
    return paths + [name for name, agree in record["searches"].items() if not agree]


def main() -> None:
    """Parse the options, and run the parts that have no record yet."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="IWSLT_PREPARED names a folder that `annotated-transformer prepare` made of IWSLT.",
    )
    parser.add_argument("--parts", nargs="+", choices=(*MEASURED, *COMMANDS), help="all of them")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the records")
    parser.add_argument(
        "--rehearse", action="store_true", help="the measured parts, tiny, on the processor"
    )
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here; --rehearse runs small sizes on the CPU")
    device = torch.device("cpu" if options.rehearse else "cuda")
    scale = REHEARSAL if options.rehearse else FULL
    parts = options.parts or (list(MEASURED) if options.rehearse else [*MEASURED, *COMMANDS])
    for part in parts:
        path = options.out / f"{part}-{'rehearsal' if options.rehearse else 'gpu'}.json"
        if path.exists():
            print(f"{part}: {path} is there; remove it to do this part again", flush=True)
        else:
            print(f"{part}: begins", flush=True)
            make(part, path, scale, device)
        if part == "smoke" and (wrong := failed(json.loads(path.read_text()))):
            raise SystemExit(f"{path}: wrong on this device: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
