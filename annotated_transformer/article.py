"""The names of *The Annotated Transformer*, with its signatures and its defaults.

Code written for it runs once its imports are changed to this module: all of 2018, and of 2022 the
model, tokens, batches, training and decoding, without its downloads for Multi30k and its figures.
Unlike the rest of the package, which follows the paper, this module follows that article: pre-norm
layers with the sample deviation, dropout of attention weights and hidden units, and no shared
matrices. Where the two editions use the same name differently, both ways of calling it work.
Padding is 0 unless said otherwise, as in 2018, and PyTorch has dropped 2018's ``loss.data[0]``:
write ``loss.item()``. The weights in ``.attn`` carry no gradient.
"""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from annotated_transformer.model import architecture, embeddings
from annotated_transformer.model.architecture import EncoderDecoder, Generator, clones
from annotated_transformer.model.attention import attention
from annotated_transformer.model.embeddings import Embeddings
from annotated_transformer.model.feed_forward import PositionwiseFeedForward
from annotated_transformer.model.multi_head import MultiHeadedAttention, subsequent_mask
from annotated_transformer.training import batches
from annotated_transformer.training.optimizer import NoamOpt, rate
from annotated_transformer.training.regularization import LabelSmoothing
from annotated_transformer.translation.greedy import greedy_decode

__all__ = [  # without MyIterator, so that a star import does not need torchtext
    "Batch", "Decoder", "DecoderLayer", "DummyOptimizer", "DummyScheduler", "Embeddings",
    "Encoder", "EncoderDecoder", "EncoderLayer", "Generator", "LabelSmoothing", "LayerNorm",
    "MultiGPULossCompute", "MultiHeadedAttention", "NoamOpt", "PositionalEncoding",
    "PositionwiseFeedForward", "SimpleLossCompute", "SublayerConnection", "TrainState",
    "article_state", "attention", "average", "batch_size_fn", "clones", "collate_batch", "data_gen",
    "get_std_opt", "greedy_decode", "load_tokenizers", "make_model", "rate", "rebatch",
    "run_epoch", "subsequent_mask", "tokenize", "tokenize_de", "tokenize_en", "yield_tokens",
]  # fmt: skip

# --- the model ------------------------------------------------------------------------------


class LayerNorm(nn.Module):
    """The article's layer normalization, with ε added to the sample standard deviation."""

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x (..., features)`` over its last axis; same shape."""
        deviation, mean = torch.std_mean(x, dim=-1, keepdim=True)
        return self.a_2 * (x - mean) / (deviation + self.eps) + self.b_2


class PositionalEncoding(embeddings.PositionalEncoding):
    """The sinusoids, which the article has in the state dict."""

    def __init__(self, d_model: int, dropout: float, max_len: int = 5000) -> None:
        super().__init__(d_model, dropout, max_len)
        self.register_buffer("pe", self.pe)


class SublayerConnection(architecture.SublayerConnection):
    """A pre-norm residual connection."""

    def __init__(self, size: int, dropout: float) -> None:
        super().__init__(size, dropout, norm="pre")
        self.norm = LayerNorm(size)  # type: ignore[assignment]


class EncoderLayer(architecture.EncoderLayer):
    """Self-attention and a feed-forward network, with the article's residual connections."""

    def __init__(
        self, size: int, self_attn: nn.Module, feed_forward: nn.Module, dropout: float
    ) -> None:
        super().__init__(size, self_attn, feed_forward, dropout, norm="pre")
        self.sublayer = clones(SublayerConnection(size, dropout), 2)


class DecoderLayer(architecture.DecoderLayer):
    """The three sub-layers of the decoder, with the article's residual connections."""

    def __init__(
        self,
        size: int,
        self_attn: nn.Module,
        src_attn: nn.Module,
        feed_forward: nn.Module,
        dropout: float,
    ) -> None:
        super().__init__(size, self_attn, src_attn, feed_forward, dropout, norm="pre")
        self.sublayer = clones(SublayerConnection(size, dropout), 3)


class _Stack(nn.Module):
    """``N`` layers and a final norm; a layer only needs the attribute ``size``."""

    def __init__(self, layer: Any, N: int) -> None:
        nn.Module.__init__(self)
        self.layers, self.norm = clones(layer, N), LayerNorm(layer.size)


class Encoder(_Stack, architecture.Encoder):  # type: ignore[misc]
    """A stack of encoder layers, each with the attribute ``size``, and the article's norm."""


class Decoder(_Stack, architecture.Decoder):  # type: ignore[misc]
    """A stack of decoder layers, each with the attribute ``size``, and the article's norm."""


def make_model(
    src_vocab: int,
    tgt_vocab: int,
    N: int = 6,
    d_model: int = 512,
    d_ff: int = 2048,
    h: int = 8,
    dropout: float = 0.1,
) -> EncoderDecoder:
    """Build the article's model, with Glorot initialization of all matrices."""
    c = copy.deepcopy
    attn, ff = MultiHeadedAttention(h, d_model), PositionwiseFeedForward(d_model, d_ff, dropout)
    position = PositionalEncoding(d_model, dropout)
    model = EncoderDecoder(
        Encoder(EncoderLayer(d_model, c(attn), c(ff), dropout), N),
        Decoder(DecoderLayer(d_model, c(attn), c(attn), c(ff), dropout), N),
        nn.Sequential(Embeddings(d_model, src_vocab), c(position)),
        nn.Sequential(Embeddings(d_model, tgt_vocab), c(position)),
        Generator(d_model, tgt_vocab),
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return model


def article_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights of the article's model for ``annotated_transformer.make_model``.

    Load them into ``make_model(..., norm="pre", tie="none")``. Outputs agree to about 1e-4,
    because the article adds its epsilon to the sample deviation, and we add ours to the variance.

    Args:
        state: The article's ``state_dict``; its positional table is dropped.
    """
    ours: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.endswith(".a_2"):  # the sample deviation divides by n - 1, not n
            scale = math.sqrt((value.numel() - 1) / value.numel())
            ours[name.replace("a_2", "weight")] = value * scale
        elif not name.endswith(".pe"):
            ours[name.replace("b_2", "bias")] = value
    return ours


# --- batches and data -----------------------------------------------------------------------

Split = Callable[[str], list[str]]
LookUp = Callable[[list[str]], list[int]]


def _alias(name: str) -> Any:
    """Return a property that is another name of an attribute."""
    return property(attrgetter(name), lambda self, value: setattr(self, name, value))


class Batch(batches.Batch):
    """Our batch, also with the names of 2018: ``trg``, ``trg_y``, ``trg_mask``."""

    def __init__(self, src: Tensor, trg: Tensor | None = None, pad: int = 0, **names: Any) -> None:
        super().__init__(src, names.pop("tgt", trg), pad)
        if names:
            raise TypeError(f"Batch has no argument {next(iter(names))!r}")

    trg, trg_y, trg_mask = _alias("tgt"), _alias("tgt_y"), _alias("tgt_mask")


def data_gen(V: int, batch: int, nbatches: int) -> Iterator[Batch]:
    """Yield batches for the copy task: ten symbols from 1 to ``V - 1``, the first of them 1."""
    for _ in range(nbatches):
        data = torch.randint(1, V, (batch, 10))
        data[:, 0] = 1
        yield Batch(data, data.clone(), 0)


max_src_in_batch = max_tgt_in_batch = 0


def batch_size_fn(new: Any, count: int, sofar: int) -> int:
    """Return the padded tokens of a batch's longer side after adding example ``new``."""
    global max_src_in_batch, max_tgt_in_batch
    if count == 1:
        max_src_in_batch = max_tgt_in_batch = 0
    max_src_in_batch = max(max_src_in_batch, len(new.src))
    max_tgt_in_batch = max(max_tgt_in_batch, len(new.trg) + 2)  # with begin and end symbols
    return count * max(max_src_in_batch, max_tgt_in_batch)


def rebatch(pad_idx: int, batch: Any) -> Batch:
    """Convert a torchtext batch, whose ``src`` and ``trg`` are ``(length, sentences)``."""
    return Batch(batch.src.transpose(0, 1), batch.trg.transpose(0, 1), pad_idx)


def tokenize_de(text: str) -> list[str]:
    """Split a German text into words and punctuation, by spaCy's rules alone."""
    return tokenize(text, load_tokenizers()[0])


def tokenize_en(text: str) -> list[str]:
    """Split an English text into words and punctuation, by spaCy's rules alone."""
    return tokenize(text, load_tokenizers()[1])


def load_tokenizers() -> tuple[Any, Any]:
    """Return spaCy's rules for German and English, which need no download (2022)."""
    from annotated_transformer.translation.tokenizers import spacy_tokenizer

    german, english = (SimpleNamespace(tokenizer=spacy_tokenizer(each)) for each in ("de", "en"))
    return german, english


def tokenize(text: str, tokenizer: Any) -> list[str]:
    """Split a text into words and punctuation with a pipeline's ``tokenizer`` (2022)."""
    return [token.text for token in tokenizer.tokenizer(text)]


def yield_tokens(data_iter: Iterable[Any], tokenizer: Split, index: int) -> Iterator[list[str]]:
    """Yield the words of each pair's sentence ``index``, 0 or 1 (2022)."""
    for pair in data_iter:
        yield tokenizer(pair[index])


def collate_batch(
    batch: Sequence[tuple[str, str]],
    src_pipeline: Split,
    tgt_pipeline: Split,
    src_vocab: LookUp,
    tgt_vocab: LookUp,
    device: int | str | torch.device,
    max_padding: int = 128,
    pad_id: int = 2,
) -> tuple[Tensor, Tensor]:
    """Convert sentence pairs into tokens: source and target ``(batch, max_padding)`` (2022).

    Each sentence stands between 0 and 1. What is longer than ``max_padding`` is cut.
    """

    def row(text: str, split: Split, look_up: LookUp) -> Tensor:
        tokens = torch.tensor([0, *look_up(split(text)), 1], device=device)
        return nn.functional.pad(tokens, (0, max_padding - len(tokens)), value=pad_id)

    src = torch.stack([row(text, src_pipeline, src_vocab) for text, _ in batch])
    return src, torch.stack([row(text, tgt_pipeline, tgt_vocab) for _, text in batch])


@cache
def _my_iterator() -> type:
    from torchtext import data  # 0.6, from the extra "torchtext"

    class MyIterator(data.Iterator):  # type: ignore[misc]
        """Batches of sentences of similar length, from pools of ``100 * batch_size`` sentences."""

        def create_batches(self) -> None:
            """Make the batches of one epoch."""
            if self.train:
                self.batches: Any = self._pooled()
            else:
                cuts = data.batch(self.data(), self.batch_size, self.batch_size_fn)
                self.batches = [sorted(batch, key=self.sort_key) for batch in cuts]

        def _pooled(self) -> Iterator[list[Any]]:
            for pool in data.batch(self.data(), self.batch_size * 100):
                in_order = sorted(pool, key=self.sort_key)
                cuts = list(data.batch(in_order, self.batch_size, self.batch_size_fn))
                yield from self.random_shuffler(cuts)

    return MyIterator


def __getattr__(name: str) -> Any:
    if name == "MyIterator":  # so that torchtext is imported only if needed
        return _my_iterator()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- training -------------------------------------------------------------------------------


def get_std_opt(model: Any) -> NoamOpt:
    """Return Adam with the article's schedule: factor 2, 4,000 updates of warm-up."""
    adam = torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9)
    return NoamOpt(model.src_embed[0].d_model, 2, 4000, adam)


def _update(opt: Any) -> None:
    opt.step()
    opt.optimizer.zero_grad()


_GIVEN = object()


class SimpleLossCompute:
    """The loss of a batch, summed over its tokens; with ``opt`` (2018) it also updates.

    Call it with the model's output ``x``, the gold tokens ``y`` and the number of tokens ``norm``.
    If constructed with three arguments, as in 2018, it returns the sum (with None as the third it
    computes no gradient, unlike 2018's); with two, as in 2022, the sum and the mean to call
    ``backward`` on.
    """

    def __init__(self, generator: nn.Module, criterion: nn.Module, opt: Any = _GIVEN) -> None:
        self.generator, self.criterion, self.opt = generator, criterion, opt

    def __call__(self, x: Tensor, y: Tensor, norm: int) -> Any:
        """Compute the loss, and update the weights if there is an optimizer."""
        log_probs = self.generator(x)
        loss = self.criterion(log_probs.flatten(0, -2), y.flatten()) / norm
        if self.opt is _GIVEN:
            return loss.detach() * norm, loss
        if self.opt is not None:
            loss.backward()
            _update(self.opt)
        return loss.item() * norm


class MultiGPULossCompute:
    """The loss on several devices, each with a part of the batch, some positions at a time.

    Args:
        generator: Maps the model's output to log-probabilities.
        criterion: The summed loss.
        devices: GPU indices or devices. Without a GPU, everything runs on the output's device.
        opt: The optimizer, if the weights should be updated.
        chunk_size: Number of positions that are projected to the vocabulary at a time.
    """

    def __init__(
        self,
        generator: nn.Module,
        criterion: nn.Module,
        devices: Sequence[int | str | torch.device],
        opt: Any = None,
        chunk_size: int = 5,
    ) -> None:
        self.generator, self.criterion, self.opt = generator, criterion, opt
        self.devices, self.chunk_size = devices, chunk_size

    def __call__(self, out: Tensor, targets: Tensor, normalize: int) -> float:
        """Return the summed loss of ``out (batch, n, d_model)``, and update the weights."""
        learn = self.opt is not None
        there = self.devices if torch.cuda.is_available() else [out.device] * len(self.devices)
        leaf, total = out.detach().requires_grad_(learn), 0.0
        parts = zip(there, leaf.chunk(len(there)), targets.chunk(len(there)), strict=False)
        for device, x, gold in parts:
            own = {name: p.to(device) for name, p in self.generator.named_parameters()}
            columns = zip(x.split(self.chunk_size, 1), gold.split(self.chunk_size, 1), strict=True)
            for column, y in columns:
                log_probs = torch.func.functional_call(self.generator, own, column.to(device))
                loss = self.criterion(log_probs.flatten(0, -2), y.to(device).flatten()) / normalize
                total += loss.item()
                if learn:
                    loss.backward(retain_graph=True)  # all columns share the copied parameters
        if learn:
            out.backward(gradient=leaf.grad)
            _update(self.opt)
        return total * normalize


@dataclass
class TrainState:
    """The counts of :func:`run_epoch` (2022)."""

    step: int = 0  #: Batches in this epoch.
    accum_step: int = 0  #: Updates in this epoch.
    samples: int = 0  #: Sentence pairs.
    tokens: int = 0  #: Target tokens.


class DummyOptimizer(torch.optim.Optimizer):
    """An optimizer that does nothing, for evaluation (2022)."""

    def __init__(self) -> None:
        self.param_groups = [{"lr": 0}]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing."""


class DummyScheduler:
    """A scheduler that does nothing, for evaluation (2022)."""

    def step(self) -> None:
        """Do nothing."""


def run_epoch(
    data_iter: Iterable[Any],
    model: Any,
    loss_compute: Callable[[Tensor, Tensor, int], Any],
    optimizer: Any = None,
    scheduler: Any = None,
    mode: str = "train",
    accum_iter: int = 1,
    train_state: TrainState | None = None,
) -> Any:
    """Run one epoch over the batches, printing the loss every 50.

    Args:
        data_iter: Batches, with the names of either edition.
        model: Called with source, target and both masks.
        loss_compute: A :class:`SimpleLossCompute` or a callable like it.
        optimizer: Makes the updates (2022); in 2018 ``loss_compute`` makes them.
        scheduler: Sets the learning rate (2022).
        mode: ``"train"`` and ``"train+log"`` update the weights (2022).
        accum_iter: Batches per update (2022).
        train_state: Counts to continue from (2022).

    Returns:
        The loss per token; with an optimizer also the counts.
    """
    state = TrainState() if train_state is None else train_state
    start, tokens, total_tokens, total = time.time(), 0, 0, 0.0
    for i, batch in enumerate(data_iter):
        name = "tgt" if hasattr(batch, "tgt") else "trg"
        tgt, gold, mask = (getattr(batch, f"{name}{end}") for end in ("", "_y", "_mask"))
        loss = loss_compute(model(batch.src, tgt, batch.src_mask, mask), gold, batch.ntokens)
        loss, node = loss if isinstance(loss, tuple) else (loss, None)
        if optimizer is not None and node is not None and mode in ("train", "train+log"):
            node.backward()
            state.step += 1
            if (i + 1) % accum_iter == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                state.accum_step += 1
            if scheduler is not None:
                scheduler.step()
            state.samples += batch.src.size(0)
            state.tokens += batch.ntokens
        total, total_tokens = total + float(loss), total_tokens + batch.ntokens
        tokens += batch.ntokens
        if i % 50 == 1 and mode in ("train", "train+log"):
            speed, mean = tokens / (time.time() - start), float(loss) / batch.ntokens
            print(f"Epoch Step: {i} Loss: {mean:f} Tokens per Sec: {speed:f}")
            start, tokens = time.time(), 0
    return total / total_tokens if optimizer is None else (total / total_tokens, state)


def average(model: nn.Module, models: Sequence[nn.Module]) -> None:
    """Set a model's weights to the mean of other models' (2022, §6.1)."""
    parameters = (each.parameters() for each in (model, *models))
    with torch.no_grad():
        for own, *others in zip(*parameters, strict=True):
            own.copy_(torch.stack(others).mean(0))
