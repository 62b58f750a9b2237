"""The speed ladder: the article's training step, made faster by one change per rung.

The bottom rung is the readable layer on padded batches. Until a rung adds a technique of the fast
layer, a plain implementation takes its place.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.engine.precision import CompiledLoss
from annotated_transformer.fast import attention as fast_attention
from annotated_transformer.fast import model as fast_model
from annotated_transformer.fast.attention import fused_attention, fused_linear
from annotated_transformer.fast.loss import linear_cross_entropy
from annotated_transformer.fast.model import FastModel
from annotated_transformer.fast.packing import PackedMask
from annotated_transformer.fast.products import choose_products, keep_large_blocks, limit_kernels
from annotated_transformer.model import multi_head
from annotated_transformer.model.architecture import EncoderDecoder, Generator, LayerNorm
from annotated_transformer.model.complexity import training_flops
from annotated_transformer.model.multi_head import MultiHeadedAttention, split_heads
from annotated_transformer.model.transformer import ModelConfig, build_model
from annotated_transformer.notation import PAD
from annotated_transformer.training.batches import Batch, make_batch, token_batches
from annotated_transformer.training.optimizer import make_adam
from annotated_transformer.training.regularization import smoothed_target
from benchmarks.machine import counting

SMOOTHING = 0.1

# --- the work -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The work of every rung: a pass over sentence pairs.

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
    "tiny": Work(ModelConfig(N=2, d_model=128, d_ff=512, h=4, max_len=64), 4_000, 20, batches=3),
    "small": Work(ModelConfig(N=3, d_model=256, d_ff=1024, h=4, max_len=64), 8_000, 64),
    "base": Work(ModelConfig(max_len=64), 37_000, 133),
    "paper": Work(ModelConfig(max_len=64), 37_000, 1_600),  # 25,000 target tokens a batch
}

Pair = tuple[list[int], list[int]]


def draw_pairs(work: Work) -> list[Pair]:
    """Draw the sentence pairs of a pass, in random order, without special symbols."""
    rng = random.Random(work.seed)

    def sentence() -> list[int]:
        length = min(25, max(4, round(rng.gauss(15, 5))))
        return [rng.randrange(4, work.vocabulary) for _ in range(length)]

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
    return [batch_of([pairs[i] for i in batch]) for batch in found]


def target_tokens(batches: Sequence[Batch]) -> int:
    """Count the target tokens that are to be predicted."""
    return sum(batch.ntokens for batch in batches)


def needed_flops(work: Work) -> int:
    """Return the operations of all products in a pass without padding, by formula."""
    pairs = draw_pairs(work)
    lengths = [len(s) + 1 for s, _ in pairs], [len(t) + 1 for _, t in pairs]
    return training_flops(work.config, work.vocabulary, *lengths)


# --- a training step ------------------------------------------------------------------------

Forward = Callable[[Batch], tuple[Tensor, Tensor]]  # outputs (rows, d_model), tokens (rows,)
Criterion = Callable[[nn.Linear, Tensor, Tensor, int], Tensor]


def dense_loss(projection: nn.Linear, x: Tensor, gold: Tensor, tokens: int) -> Tensor:
    """Return the loss by log-probabilities and a dense target, both ``(rows, vocabulary)``.

    The divergence lacks the target's entropy, on which no gradient depends: it is added, so that
    losses of all rungs can be compared.
    """
    log_probabilities = F.log_softmax(projection(x), dim=-1)
    size = log_probabilities.size(1)
    target = smoothed_target(gold, size, SMOOTHING, dtype=x.dtype)
    rest = torch.tensor([SMOOTHING / size, 1 - SMOOTHING + SMOOTHING / size], dtype=torch.float64)
    terms = -rest * rest.log() * torch.tensor([size - 1, 1])
    entropy = int((gold != PAD).sum()) * float(terms.sum())
    return (F.kl_div(log_probabilities, target, reduction="sum") + entropy) / tokens


def chunked_loss(projection: nn.Linear, x: Tensor, gold: Tensor, tokens: int) -> Tensor:
    """Return the same loss without dense target, a chunk of logits at a time."""
    return linear_cross_entropy(x, projection, gold, SMOOTHING, 1 / tokens)[0]


class Trainer:
    """A training step in the article's form, of which rungs change one thing after another.

    Args:
        work: What is to be done.
        device: Where.
        dtype: Type of the weights.

    Attributes:
        forward: Maps a batch to the decoder's outputs, and what is to be predicted there.
        criterion: Maps them to the loss.
        patches: What stands in the place of a function or method during the forward pass.
        compiled: Computes the loss instead of them, where there is one.
        half: Whether the forward pass is computed in bfloat16.
    """

    def __init__(self, work: Work, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(work.seed)
        self.work, self.device = work, torch.device(device)
        self.model = build_model(work.vocabulary, work.vocabulary, work.config)
        self.model.to(self.device, dtype)
        self.projection = cast(Generator, self.model.generator).proj
        self.batches = self.placed(random_batches(work))
        self.forward: Forward = self.padded_rows
        self.criterion: Criterion = dense_loss
        self.patches: dict[tuple[Any, str], Callable[..., object]] = {}
        self.compiled: nn.Module | None = None
        self.half = False
        parameters = self.model.parameters()
        self.optimizer = torch.optim.Adam(parameters, lr=1e-4, betas=(0.9, 0.98), eps=1e-9)

    def placed(self, batches: Iterable[Batch]) -> list[Batch]:
        """Return batches on the trainer's device."""
        return [batch.to(self.device) for batch in batches]

    def padded_rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute every position, as the readable layer does."""
        x = self.model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
        return x.flatten(0, 1), batch.tgt_y.flatten()

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Apply all patches within the context."""
        with contextlib.ExitStack() as stack:
            for (owner, name), value in self.patches.items():
                stack.enter_context(patch.object(owner, name, value))
            yield

    def loss(self, batch: Batch, tokens: int | None = None) -> Tensor:
        """Return the smoothed cross-entropy of a batch over ``tokens``, its own unless given."""
        tokens = tokens or batch.ntokens
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half), self.patched():
            if self.compiled is not None:
                loss: Tensor = self.compiled(batch, SMOOTHING, tokens)[0]
                return loss
            x, gold = self.forward(batch)
            return self.criterion(self.projection, x, gold, tokens)

    def step(self, batch: Batch) -> None:
        """Make one update: forward, backward, Adam."""
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self) -> None:
        """Make a pass with one update for each batch, and wait for the device."""
        for batch in self.batches:
            self.step(batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize()


# --- the plain forms of what later rungs add ------------------------------------------------


def fused_norm(norm: LayerNorm, x: Tensor) -> Tensor:
    """Replace ``LayerNorm.forward`` by PyTorch's fused kernel."""
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)


def attention_without_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, _: object = None
) -> tuple[Tensor, Tensor]:
    """Replace ``attention`` by the fused kernel, which returns no weights."""
    return fused_attention(query, key, value, mask), query.new_empty(0)


def attend_apart(attn: MultiHeadedAttention, x: Tensor, memory: Tensor, mask: PackedMask) -> Tensor:
    """Replace ``fast.attention.attend_rows``: three products instead of one for q, k and v."""
    w_q, w_k, w_v, w_o = attn.linears
    q = split_heads(mask.queries.unpack(fused_linear(x, w_q)), attn.h)
    k, v = (split_heads(mask.keys.unpack(fused_linear(memory, w)), attn.h) for w in (w_k, w_v))
    y = fused_attention(q, k, v, mask.mask.unsqueeze(1))
    return fused_linear(mask.queries.pack(y.transpose(1, 2).flatten(2)), w_o)


def never(*_: object) -> bool:
    """Answer that packed rows cannot be attended to directly."""
    return False


def plain_dropout(module: nn.Module, x: Tensor) -> Tensor:
    """Replace ``fast.dropout.dropout`` by PyTorch's dropout."""
    y: Tensor = module(x)
    return y


def plain_dropped_relu(module: nn.Module, x: Tensor) -> Tensor:
    """Replace ``fast.dropout.dropped_relu`` by PyTorch's ReLU and dropout."""
    return plain_dropout(module, F.relu_(x))


# --- the rungs ------------------------------------------------------------------------------


def no_change(_: Trainer) -> None:
    """Leave the article's training step unchanged."""


def sort_batches(trainer: Trainer) -> None:
    """Take batches from length-sorted pools."""
    trainer.batches = trainer.placed(sorted_batches(trainer.work))


def fuse_norm(trainer: Trainer) -> None:
    """Compute layer normalization in one kernel."""
    trainer.patches[LayerNorm, "forward"] = fused_norm


def fuse_attention(trainer: Trainer) -> None:
    """Compute attention in one kernel, which keeps no weights."""
    trainer.patches[multi_head, "attention"] = attention_without_weights


def skip_padding(trainer: Trainer) -> None:
    """Compute on packed rows, with the fast layer but without what later rungs add."""
    fast = FastModel(trainer.model)

    def packed_rows(batch: Batch) -> tuple[Tensor, Tensor]:
        keep = batch.tgt_y != batch.pad
        return fast(batch.src, batch.tgt, batch.src_mask[:, 0], keep), batch.tgt_y[keep]

    trainer.forward = packed_rows
    trainer.patches = {(fast_model, "attend_rows"): attend_apart}
    if trainer.device.type == "cpu":  # elsewhere the fast layer has neither device
        trainer.patches[fast_model, "cheap_dropout"] = plain_dropout
        trainer.patches[fast_model, "dropped_relu"] = plain_dropped_relu
        trainer.patches[fast_attention, "_packs"] = never


def chunk_loss(trainer: Trainer) -> None:
    """Compute the loss without a dense target, on a few logits at a time."""
    trainer.criterion = chunked_loss


def project_once(trainer: Trainer) -> None:
    """Compute queries, keys and values by one product."""
    del trainer.patches[fast_model, "attend_rows"]


def draw_few_bits(trainer: Trainer) -> None:
    """Draw dropout masks from 16 random bits an element."""
    del trainer.patches[fast_model, "cheap_dropout"], trainer.patches[fast_model, "dropped_relu"]


def fuse_adam(trainer: Trainer) -> None:
    """Update all weights in one pass over them."""
    trainer.optimizer = make_adam(trainer.model, lr=1e-4)


def attend_rows(trainer: Trainer) -> None:
    """Go from packed rows to heads in one step, with a backward pass written by hand."""
    del trainer.patches[fast_attention, "_packs"]


def keep_memory(_: Trainer) -> None:
    """Keep freed memory in the process."""
    keep_large_blocks()


def choose_library(_: Trainer) -> None:
    """Choose the faster of two libraries for products, if it is accurate."""
    limit_kernels()
    choose_products()


def allow_tf32(_: Trainer) -> None:
    """Round the factors of products to TF32."""
    torch.set_float32_matmul_precision("high")


def use_bfloat16(trainer: Trainer) -> None:
    """Compute products by autocast in bfloat16."""
    trainer.half = True


def compile_loss(trainer: Trainer, backend: str = "inductor") -> None:
    """Compile the forward pass, one program for each of a few lengths."""
    trainer.compiled = CompiledLoss(trainer.model, backend)


@dataclass(frozen=True)
class Rung:
    """One row of the ladder.

    Attributes:
        name: Name, in a few words.
        what: The difference from the rung below.
        change: Function that changes a trainer of the rung below.
        device: The device on which the change has an effect.
        exact: Whether the precision stays the same, so that only the order of sums differs.
    """

    name: str
    what: str
    change: Callable[[Trainer], None]
    device: Literal["any", "cpu", "cuda"] = "any"
    exact: bool = True


LADDER: Sequence[Rung] = (
    Rung("the article's form", "the readable layer, padding computed", no_change),
    Rung("sorted batches", "batches from length-sorted pools", sort_batches),
    Rung("fused norm", "normalization in one kernel", fuse_norm),
    Rung("fused attention", "no weights kept", fuse_attention),
    Rung("packed rows", "padding is not computed", skip_padding),
    Rung("loss in chunks", "no dense target, few logits at a time", chunk_loss),
    Rung("one projection", "queries, keys and values in one product", project_once),
    Rung("few random bits", "dropout masks from 16 bits an element", draw_few_bits, "cpu"),
    Rung("fused Adam", "one pass over the weights", fuse_adam),
    Rung("attention of rows", "from rows to heads in one move", attend_rows, "cpu"),
    Rung("memory kept", "freed blocks stay with the process", keep_memory, "cpu"),
    Rung("chosen products", "the faster library multiplies", choose_library, "cpu"),
    Rung("TF32", "factors of products in TF32", allow_tf32, "cuda", exact=False),
    Rung("bfloat16", "products by autocast in bfloat16", use_bfloat16, "cuda", exact=False),
    Rung("compiled", "forward pass by torch.compile", compile_loss, "cuda", exact=False),
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


# --- what they compute ----------------------------------------------------------------------


def attentions(model: EncoderDecoder) -> list[MultiHeadedAttention]:
    """Return all attention layers of a model."""
    return [part for part in model.modules() if isinstance(part, MultiHeadedAttention)]


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

    A gradient's difference is taken relative to its largest element, and those of queries, keys
    and values to the largest of the three: a bias of keys adds the same to all scores of a query,
    softmax does not see it, and its true gradient is zero.
    """
    (loss, gradients), (other_loss, others) = pass_gradients(one), pass_gradients(other)
    if gradients.keys() != others.keys():
        return float("inf")
    scales: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        largest = gradient.abs().max().clamp(min=1e-30)
        scales[scale_of(name)] = torch.maximum(scales.get(scale_of(name), largest), largest)
    found = [abs(loss - other_loss)]
    for name, gradient in gradients.items():
        apart = float((gradient - others[name]).abs().max() / scales[scale_of(name)])
        found.append(apart if apart == apart else float("inf"))
    return max(found)


def scale_of(name: str) -> str:
    """Return the name that a parameter shares with those on whose scale it is compared."""
    return re.sub(r"linears\.[012]\.", "linears.", name)


def counted_flops(trainer: Trainer) -> int:
    """Count the operations of all products in a pass, as they run."""
    compiled, trainer.compiled = trainer.compiled, None
    with counting() as counter:
        trainer.run()
    trainer.compiled = compiled
    return int(counter.get_total_flops())
