# Written from book/engineering/speed.md: edit the chapter instead.
"""The ladder from the article's training step to the fastest, and how its cost grows."""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from annotated_transformer.model.complexity import training_flops
from annotated_transformer.model.layers import Dropout
from annotated_transformer.model.multi_head import MultiHeadedAttention, PackedMask
from annotated_transformer.model.transformer import EncoderDecoder, ModelConfig, build_model
from annotated_transformer.notation import PAD
from annotated_transformer.results.machine_translation import read_record
from annotated_transformer.training.batches import Batch, make_batch, token_batches
from annotated_transformer.training.optimizer import make_adam
from annotated_transformer.training.regularization import linear_cross_entropy, smoothed_target
from annotated_transformer.training.speed import (
    choose_products,
    keep_large_blocks,
    limit_kernels,
)


@dataclass(frozen=True)
class Work:
    """What every rung has to do: a pass over sentence pairs.

    Attributes:
        config: Sizes of the model.
        vocabulary: Tokens of the vocabulary that both languages share.
        sentences: Pairs in a batch, on average.
        batches: Batches in a pass.
        seed: Chooses weights, sentences and their order.
    """

    config: ModelConfig
    vocabulary: int
    sentences: int
    batches: int = 4
    seed: int = 0


WORKS: Mapping[str, Work] = {
    "page": Work(ModelConfig(N=2, d_model=128, d_ff=512, h=4, max_len=64), 4_000, 20, batches=3),
    "small": Work(ModelConfig(N=3, d_model=256, d_ff=1024, h=4, max_len=64), 8_000, 64),
    "base": Work(ModelConfig(max_len=64), 37_000, 133),
    "paper": Work(ModelConfig(max_len=64), 37_000, 1_600),  # 25,000 target tokens a batch
}

Pair = tuple[list[int], list[int]]


def draw_pairs(work: Work) -> list[Pair]:
    """Draw the sentence pairs of a pass, in random order, without special symbols."""
    chance = random.Random(work.seed)

    def sentence() -> list[int]:
        length = min(25, max(4, round(chance.gauss(15, 5))))
        return [chance.randrange(4, work.vocabulary) for _ in range(length)]

    return [(sentence(), sentence()) for _ in range(work.sentences * work.batches)]


def batch_of(pairs: Sequence[Pair]) -> Batch:
    """Make one batch of sentence pairs."""
    return make_batch([s for s, _ in pairs], [t for _, t in pairs])


def random_batches(work: Work) -> list[Batch]:
    """Cut the pairs into batches as they come, equally many in each."""
    pairs, size = draw_pairs(work), work.sentences
    return [batch_of(pairs[i : i + size]) for i in range(0, len(pairs), size)]


def sorted_batches(work: Work) -> list[Batch]:
    """Cut the same pairs into at most as many batches, of sentences of similar length."""
    pairs = draw_pairs(work)
    lengths = [(len(s) + 1, len(t) + 1) for s, t in pairs]
    budget = max(map(sum, lengths)) + sum(map(max, lengths)) // work.batches
    while len(found := token_batches(lengths, budget, seed=work.seed)) > work.batches:
        budget += max(1, budget // 50)
    return [batch_of([pairs[i] for i in batch.tolist()]) for batch in found]


def target_tokens(batches: Sequence[Batch]) -> int:
    """Count the target tokens that are to be predicted."""
    return sum(batch.ntokens for batch in batches)


class PlainNorm(nn.Module):
    """Layer normalisation in single operations, with the weights of a ``torch.nn.LayerNorm``."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.fused = [norm]  # in a list, so that its weights count once

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x (..., d_model)``; same shape."""
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return self.weight * (x - mean) / torch.sqrt(variance + self.eps) + self.bias


def project_apart(
    self: MultiHeadedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | PackedMask | None = None,
    cache: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what ``MultiHeadedAttention.project`` does, by three products."""
    found = []
    weights, biases = self.in_proj.weight.split(self.sizes), self.in_proj.bias.split(self.sizes)
    for x, weight, bias, place in zip((query, key, value), weights, biases, "qkv", strict=True):
        y = F.linear(x, weight, bias)
        if isinstance(mask, PackedMask):
            y = (mask.queries if place == "q" else mask.keys).unpack(y)
        found.append(self.heads(y, self.d_v if place == "v" else self.d_k))
    return found[0], found[1], found[2]


def _never(_: PackedMask) -> bool:
    """Answer ``MultiHeadedAttention.at_once`` for the rungs below that change."""
    return False


SMOOTHING = 0.1


def padded_rows(model: EncoderDecoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute every position: ``(batch * n, d_model)``, and what is to be predicted there."""
    x = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    return x.flatten(0, 1), batch.tgt_y.flatten()


def packed_rows(model: EncoderDecoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute the positions that are no padding: ``(rows, d_model)``, and what to predict."""
    x = model.forward_packed(batch.src, batch.tgt, batch.src_keep, batch.tgt_keep)
    return x, batch.tgt_y[batch.tgt_keep]


def dense_loss(model: EncoderDecoder, x: Tensor, gold: Tensor, tokens: int) -> Tensor:
    """Return the loss by log-probabilities and a dense target, both ``(rows, vocabulary)``."""
    log_probabilities = model.generator(x)
    size = log_probabilities.size(1)
    target = smoothed_target(gold, size, SMOOTHING, dtype=x.dtype)
    rest = torch.tensor([SMOOTHING / size, 1 - SMOOTHING + SMOOTHING / size], dtype=torch.float64)
    terms = -rest * rest.log() * torch.tensor([size - 1, 1])
    entropy = int((gold != PAD).sum()) * float(terms.sum())
    return (F.kl_div(log_probabilities, target, reduction="sum") + entropy) / tokens


def chunked_loss(model: EncoderDecoder, x: Tensor, gold: Tensor, tokens: int) -> Tensor:
    """Return the same loss without dense target, a chunk of logits at a time."""
    return linear_cross_entropy(x, model.generator.proj, gold, SMOOTHING, 1 / tokens)[0]


Forward = Callable[[EncoderDecoder, Batch], tuple[Tensor, Tensor]]
Criterion = Callable[[EncoderDecoder, Tensor, Tensor, int], Tensor]


def exchange(model: nn.Module, kind: type[nn.Module], make: Callable[[Any], nn.Module]) -> None:
    """Put ``make(part)`` in the place of each part of exactly that kind."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is kind:
                setattr(module, name, make(child))


def attentions(model: nn.Module) -> list[MultiHeadedAttention]:
    """Return all attention layers of a model."""
    return [part for part in model.modules() if isinstance(part, MultiHeadedAttention)]


class Trainer:
    """A training step in the article's form, of which rungs change one thing after another.

    Args:
        work: What is to be done.
        device: Where.
        dtype: Type of the weights.
    """

    def __init__(self, work: Work, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(work.seed)
        self.work, self.device = work, torch.device(device)
        self.model = build_model(work.vocabulary, work.vocabulary, work.config)
        self.model.to(self.device, dtype)
        self.batches = self.placed(random_batches(work))
        self.forward: Forward = padded_rows
        self.criterion: Criterion = dense_loss
        self.compiled: Forward | None = None
        self.half = False
        exchange(self.model, nn.LayerNorm, PlainNorm)
        exchange(self.model, Dropout, lambda part: nn.Dropout(part.p))
        for layer in attentions(self.model):
            layer.keep_weights = True  # which spells them out
            vars(layer).update(project=partial(project_apart, layer), at_once=_never)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.Adam(parameters, lr=1e-4, betas=(0.9, 0.98), eps=1e-9)

    def placed(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return batches on the trainer's device."""
        return [batch.to(self.device) for batch in batches]

    def loss(self, batch: Batch, tokens: int | None = None) -> Tensor:
        """Return the smoothed cross-entropy of a batch over ``tokens``, its own unless given."""
        forward = self.compiled or self.forward
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            x, gold = forward(self.model, batch)
        x = x.to(self.model.generator.proj.weight.dtype)
        return self.criterion(self.model, x, gold, tokens or batch.ntokens)

    def step(self, batch: Batch) -> None:
        """Make one update: forward, backward, Adam."""
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self) -> None:
        """Make a pass, one update for each batch, and wait until it is done."""
        for batch in self.batches:
            self.step(batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def no_change(_: Trainer) -> None:
    """Leave the article's form as it is."""


def sort_batches(trainer: Trainer) -> None:
    """Take batches from length-sorted pools."""
    trainer.batches = trainer.placed(sorted_batches(trainer.work))


def fuse_norm(trainer: Trainer) -> None:
    """Normalise by PyTorch's own function."""
    exchange(trainer.model, PlainNorm, lambda part: part.fused[0])


def fuse_attention(trainer: Trainer) -> None:
    """Let PyTorch's fused attention work, which keeps no weights."""
    for layer in attentions(trainer.model):
        layer.keep_weights = False


def skip_padding(trainer: Trainer) -> None:
    """Compute only rows that are no padding."""
    trainer.forward = packed_rows


def chunk_loss(trainer: Trainer) -> None:
    """Compute the loss without dense target, with few logits at a time."""
    trainer.criterion = chunked_loss


def project_once(trainer: Trainer) -> None:
    """Compute queries, keys and values by one product."""
    for layer in attentions(trainer.model):
        del vars(layer)["project"]


def draw_few_bits(trainer: Trainer) -> None:
    """Draw dropout masks from 16 random bits an element."""
    exchange(trainer.model, nn.Dropout, lambda part: Dropout(part.p))
    for layer in attentions(trainer.model):
        layer.dropout = nn.Dropout(layer.dropout.p)


def fuse_adam(trainer: Trainer) -> None:
    """Update all weights in one pass over them."""
    trainer.optimizer = make_adam(trainer.model, lr=1e-4)


def attend_rows(trainer: Trainer) -> None:
    """Go from packed rows to heads in one move, with the derivative written out."""
    for layer in attentions(trainer.model):
        del vars(layer)["at_once"]


def keep_memory(_: Trainer) -> None:
    """Keep freed blocks in the process."""
    keep_large_blocks()


def choose_library(_: Trainer) -> None:
    """Let the faster of two libraries multiply, if it is accurate."""
    limit_kernels()
    choose_products()


def allow_tf32(_: Trainer) -> None:
    """Round the factors of products to TF32."""
    torch.set_float32_matmul_precision("high")


def use_bfloat16(trainer: Trainer) -> None:
    """Compute the forward pass, but for the loss, by autocast to bfloat16."""
    trainer.half = True


def compile_forward(trainer: Trainer, backend: str = "inductor") -> None:
    """Compile the forward pass, but for the loss."""
    trainer.compiled = torch.compile(trainer.forward, dynamic=True, backend=backend)


@dataclass(frozen=True)
class Rung:
    """One row of the ladder.

    Attributes:
        name: A few words.
        what: What is other than on the rung below.
        change: Changes a trainer of the rung below.
        device: Where the change has an effect.
        exact: Whether it leaves the arithmetic as it is, but for the order of sums.
    """

    name: str
    what: str
    change: Callable[[Trainer], None]
    device: Literal["any", "cpu", "cuda"] = "any"
    exact: bool = True


LADDER: Sequence[Rung] = (
    Rung("the article's form", "all spelled out, padding computed, random batches", no_change),
    Rung("sorted batches", "batches from length-sorted pools", sort_batches),
    Rung("fused norm", "normalisation in one kernel", fuse_norm),
    Rung("fused attention", "no weights kept", fuse_attention),
    Rung("no padding", "padding rows are not computed", skip_padding),
    Rung("loss in chunks", "no dense target, few logits at a time", chunk_loss),
    Rung("one projection", "queries, keys and values in one product", project_once),
    Rung("few random bits", "dropout masks from 16 bits an element", draw_few_bits, "cpu"),
    Rung("fused Adam", "one pass over the weights", fuse_adam),
    Rung("attention of rows", "from rows to heads in one move", attend_rows, "cpu"),
    Rung("memory kept", "freed blocks stay with the process", keep_memory, "cpu"),
    Rung("chosen products", "the faster library multiplies", choose_library, "cpu"),
    Rung("TF32", "factors of products in TF32", allow_tf32, "cuda", exact=False),
    Rung("bfloat16", "forward pass by autocast", use_bfloat16, "cuda", exact=False),
    Rung("compiled", "forward pass by torch.compile", compile_forward, "cuda", exact=False),
)


def rungs_for(device: str) -> list[Rung]:
    """Return the rungs that have an effect on a device, ``"cpu"`` or ``"cuda"``."""
    return [rung for rung in LADDER if rung.device in ("any", device)]


def climb(
    rungs: Sequence[Rung], work: Work, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Trainer:
    """Return a trainer with the changes of all ``rungs``, from the bottom up."""
    trainer = Trainer(work, device, dtype)
    for rung in rungs:
        rung.change(trainer)
    return trainer


def pass_gradients(trainer: Trainer) -> tuple[float, dict[str, Tensor]]:
    """Return the loss per token of a whole pass, and the gradient of every parameter."""
    tokens, total = target_tokens(trainer.batches), 0.0
    trainer.optimizer.zero_grad()
    for batch in trainer.batches:
        loss = trainer.loss(batch, tokens)
        loss.backward()
        total += float(loss.detach())
    found = {}
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
    trainer.optimizer.zero_grad()
    return total, found


def difference(one: Trainer, other: Trainer) -> float:
    """Return the largest difference of two trainers, over the loss and all gradients.

    A gradient's difference is taken relative to its largest element.
    """
    (loss, gradients), (other_loss, others) = pass_gradients(one), pass_gradients(other)
    if gradients.keys() != others.keys():
        return float("inf")
    found = [abs(loss - other_loss)]
    for name, gradient in gradients.items():
        apart = (gradient - others[name]).abs().max() / gradient.abs().max().clamp(min=1e-30)
        found.append(float(apart) if apart.isfinite() else float("inf"))
    return max(found)


def best_seconds(run: Callable[[], object], device: str = "cpu", least: float = 0.1) -> float:
    """Return the shortest time of a call, among at least three and ``least`` seconds of them.

    With one thread it is that of the processor, which other programs do not lengthen.
    """
    one = device == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if one else time.perf_counter
    run()
    found: list[float] = []
    while len(found) < 3 or sum(found) < least:
        if device == "cuda":
            torch.cuda.synchronize()
        start = clock()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(clock() - start)
    return min(found)


def matmul_peak(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[int] = (256, 512, 1024, 2048),
) -> float:
    """Return the most operations a second that products of square matrices reach.

    A multiplication and an addition are two. Under the settings of the process, such as
    ``torch.set_float32_matmul_precision``.
    """
    rates = []
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        rates.append(2 * size**3 / best_seconds(partial(torch.mm, a, b, out=out), device))
    return max(rates)


def memory_bandwidth(device: str = "cpu", megabytes: int = 128) -> float:
    """Return the most bytes a second that simple passes over blocks beyond the caches move.

    They are a copy, which moves two blocks, a scaling in place, likewise, and a triad
    ``a = b + 2 c``, which moves three.
    """
    a, b, c = (torch.ones(megabytes * 2**18, device=device) for _ in range(3))
    passes: list[tuple[int, Callable[[], object]]] = [
        (2, lambda: a.copy_(b)),
        (2, lambda: a.mul_(0.5)),
        (3, lambda: torch.add(b, c, alpha=2, out=a)),
    ]
    return max(n * 4 * a.numel() / best_seconds(run, device, 0.4) for n, run in passes)


@dataclass(frozen=True)
class Operation:
    """An operation of a training step, with its counts.

    Attributes:
        name: What it is.
        flops: Operations that it needs.
        bytes: Bytes that it must read and write.
        run: Does it once.
    """

    name: str
    flops: float
    bytes: float
    run: Callable[[], object]


def operations(width: int = 512, rows: int = 65_536, device: str = "cpu") -> list[Operation]:
    """Return main operations of a training step, in float32, for blocks beyond the caches."""
    x = torch.randn(rows, width, device=device)
    few, size = x[:2048], rows * width  # a product of them all would take seconds
    layer, norm = nn.Linear(width, 4 * width, device=device), nn.LayerNorm(width, device=device)
    weight = nn.Parameter(torch.randn(size // 2, device=device))
    weight.grad = torch.randn_like(weight)
    adam = torch.optim.Adam([weight], lr=1e-6, fused=True)
    dropout = Dropout(0.1)
    product = 2.0 * len(few) * width * 4 * width
    moved = 4.0 * (len(few) * 5 * width + 4 * width * width)

    @torch.no_grad()
    def without(run: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        return run(y)

    return [
        Operation("product", product, moved, partial(without, layer, few)),
        Operation("layer norm", 8.0 * size, 8.0 * size, partial(without, norm, x)),
        Operation("softmax", 5.0 * size, 8.0 * size, partial(torch.softmax, x, -1)),
        Operation("dropout", 2.0 * size, 8.0 * size, partial(dropout, x)),
        Operation("Adam", 12.0 * len(weight), 28.0 * len(weight), adam.step),
    ]


def roofline(device: str = "cpu") -> list[dict[str, Any]]:
    """Measure ``operations``: for each its name, its intensity, and its operations a second."""
    return [
        {
            "name": one.name,
            "intensity": one.flops / one.bytes,
            "flops_per_s": one.flops / best_seconds(one.run, device),
        }
        for one in operations(device=device)
    ]


Shape = Sequence[int]


def _added_flops(_: Shape, a: Shape, b: Shape, *__: Any, **___: Any) -> int:
    """Count ``addmm_``."""
    return 2 * a[0] * a[1] * b[1]


def _fused_flops(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Count the fused attention of a CPU: scores, and weighted values."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


def _fused_flops_backward(_: Shape, q: Shape, k: Shape, v: Shape, *__: Any, **___: Any) -> int:
    """Count its derivative: the scores again, and four products for the gradients."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (3 * q[3] + 2 * v[3])


def counting() -> FlopCounterMode:
    """Return a counter of the operations in products, our kinds included."""
    aten = torch.ops.aten
    kinds = {
        aten.addmm_: _added_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: _fused_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_flops_backward,
    }
    return FlopCounterMode(display=False, custom_mapping=kinds)


def counted_flops(trainer: Trainer) -> int:
    """Count the operations of all products in a pass, as they run."""
    compiled, trainer.compiled = trainer.compiled, None
    with counting() as counter:
        trainer.run()
    trainer.compiled = compiled
    return int(counter.get_total_flops())


def needed_flops(work: Work) -> int:
    """Return the operations of all products in a pass without padding, by formula."""
    pairs = draw_pairs(work)
    lengths = [len(s) + 1 for s, _ in pairs], [len(t) + 1 for _, t in pairs]
    return training_flops(work.config, work.vocabulary, *lengths)


def resident(key: Literal["VmRSS", "VmHWM"]) -> int:
    """Return bytes of this process: now (``VmRSS``), or at its peak (``VmHWM``)."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024
    except (OSError, StopIteration):  # not Linux: the peak so far stands for both
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def serve(argument: str) -> None:
    """Be one rung: make a pass for each line that comes in, answer in JSON.

    Args:
        argument: JSON with the height, the work, the device and the threads.
    """
    told = json.loads(argument)
    work = Work(**{**told["work"], "config": ModelConfig(**told["work"]["config"])})
    device, cuda = told["device"], told["device"] == "cuda"
    torch.set_num_threads(told["threads"])
    before = resident("VmRSS")
    trainer = climb(rungs_for(device)[: told["height"] + 1], work, device)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        if cuda:  # memory goes back to the other rungs after each turn, so it must warm up
            trainer.run()
        start = time.perf_counter()
        trainer.run()
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
        if cuda:
            torch.cuda.empty_cache()
    memory = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM") - before
    answer = {"memory_bytes": memory, "tokens": target_tokens(trainer.batches)}
    torch.set_num_threads(1)  # all rungs count at once
    answer |= {"flops": counted_flops(trainer)}  # last, since counting takes memory
    print(json.dumps(answer), flush=True)


class Runner:
    """A rung in a process of its own.

    Args:
        height: Number of the rung among those of the device.
        work: What it has to do.
        device: Where.
    """

    def __init__(self, height: int, work: Work, device: str) -> None:
        self.rung = rungs_for(device)[height]
        told = {"height": height, "work": asdict(work), "device": device}
        told["threads"] = torch.get_num_threads()
        code = "from annotated_transformer.engineering import speed; import sys; "
        code += "speed.serve(sys.argv[1])"
        path = os.pathsep.join(part for part in sys.path if part)
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in ``close``)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.seconds: list[float] = []

    def answer(self) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            RuntimeError: The process ended; with the end of what it said.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"rung {self.rung.name!r} failed: {self.errors.read()[-2000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def send(self, word: str) -> None:
        """Send a word; where nobody hears it, ``answer`` says why."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(OSError):  # a word that was never heard
                if stream is not None:
                    stream.close()


@dataclass(frozen=True)
class Measured:
    """What was measured of one rung.

    Attributes:
        name: The rung's.
        what: What it changes.
        seconds: Time of each pass, in the order of the rounds.
        tokens: Target tokens in a pass.
        memory_bytes: Peak of memory, without the imports.
        flops: Operations in the products of a pass, as they ran.
    """

    name: str
    what: str
    seconds: list[float] = field(repr=False)
    tokens: int
    memory_bytes: int
    flops: int

    @property
    def speed(self) -> float:
        """Target tokens per second, by the median of the passes."""
        return self.tokens / statistics.median(self.seconds)

    def ratio(self, other: Measured) -> float:
        """Return how many times as fast as ``other`` it is: the median over the rounds."""
        pairs = zip(other.seconds, self.seconds, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def measure_ladder(
    work: Work,
    *,
    rounds: int = 5,
    device: str = "cpu",
    heights: Sequence[int] | None = None,
) -> list[Measured]:
    """Measure rungs of a device, in turns of one pass each.

    Args:
        work: What each rung has to do.
        rounds: Passes of each rung.
        device: ``"cpu"`` or ``"cuda"``.
        heights: Numbers of the rungs among those of the device; all unless given.

    Raises:
        RuntimeError: A rung failed.
    """
    runners: list[Runner] = []
    found = []
    try:
        for height in range(len(rungs_for(device))) if heights is None else heights:
            runners.append(Runner(height, work, device))
        for runner in runners:
            runner.answer()
        for number in range(rounds + 1):
            for runner in runners:
                runner.send("pass")
                seconds = runner.answer()["seconds"]
                runner.seconds += [seconds] if number else []  # the first round warms up
        for runner in runners:
            runner.send("end")
        for runner in runners:
            rung, rest = runner.rung, runner.answer()
            found.append(Measured(rung.name, rung.what, runner.seconds, **rest))
    finally:
        for runner in runners:
            runner.close()
    return found


LADDER_FIELDS = ("kind", "command", "commit", "date", "hardware", "versions", "size", "work",
                 "rounds", "threads", "device", "peaks", "bandwidth", "roofline", "needed_flops",
                 "rungs")  # fmt: skip


def make_ladder_record(size: str, *, rounds: int = 5, device: str = "cpu") -> dict[str, Any]:
    """Measure the ladder and the machine; return what a record says about them.

    Args:
        size: A key of ``WORKS``.
        rounds: Passes of each rung.
        device: ``"cpu"`` or ``"cuda"``.

    Returns:
        ``LADDER_FIELDS`` without those that say where it comes from.
    """
    work = WORKS[size]
    rungs = [asdict(one) for one in measure_ladder(work, rounds=rounds, device=device)]
    if device == "cpu":
        choose_products()
        peaks = {"float32": matmul_peak(device)}
    else:
        sizes = (2048, 4096, 8192)
        peaks = {"float32": matmul_peak(device, sizes=sizes)}
        torch.set_float32_matmul_precision("high")
        peaks["TF32"] = matmul_peak(device, sizes=sizes)
        peaks["bfloat16"] = matmul_peak(device, torch.bfloat16, sizes)
    return {
        "kind": "ladder",
        "size": size,
        "work": asdict(work),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "device": device,
        "peaks": peaks,
        "bandwidth": memory_bandwidth(device, 128 if device == "cpu" else 2048),
        "roofline": roofline(device),
        "needed_flops": needed_flops(work),
        "rungs": rungs,
    }


def read_ladders(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Read the records ``ladder-*.json`` of a folder, by the names of their files.

    Args:
        folder: Where they are; None for none.

    Raises:
        RecordError: A file is no JSON object, or lacks a field.
    """
    paths = sorted(folder.glob("ladder-*.json")) if folder else []
    return {path.stem: read_record(path, LADDER_FIELDS) for path in paths}


def measured_rungs(record: Mapping[str, Any]) -> list[Measured]:
    """Return the rungs of a record."""
    return [Measured(**rung) for rung in record["rungs"]]


def fit(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Fit ``values`` by a sum of columns with factors, the relative errors least squares.

    Args:
        columns: Each of the length of ``values``.
        values: Positive numbers.

    Returns:
        A factor for each column.
    """
    y = torch.tensor(values, dtype=torch.float64)
    x = torch.tensor(columns, dtype=torch.float64).T / y.unsqueeze(1)
    solution = torch.linalg.lstsq(x, torch.ones(len(y), 1, dtype=y.dtype)).solution
    found: list[float] = solution[:, 0].tolist()
    return found


def saved_bytes(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Return the bytes that autograd keeps for the backward pass, without the parameters.

    Args:
        model: Its parameters are not counted.
        loss: Computes the loss.
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    held: list[Tensor] = []  # as long as they live, no other block has their address

    def keep(x: Tensor) -> Tensor:
        block = x.untyped_storage()
        if block.data_ptr() not in own:
            kept[block.data_ptr()] = block.nbytes()
            held.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss()
    return sum(kept.values())
