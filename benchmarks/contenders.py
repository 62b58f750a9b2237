"""What is compared: the same model and the same sentences, in three formulations."""

# ruff: noqa: D102  the methods of the three models are the same by their names
from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.model.attention import subsequent_mask
from annotated_transformer.model.embeddings import sinusoid
from annotated_transformer.model.transformer import ModelConfig, build_model
from annotated_transformer.notation import BOS, PAD
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.loop import update
from annotated_transformer.training.optimizer import make_adam
from annotated_transformer.training.speed import prepare_cpu
from annotated_transformer.translation.decoding import greedy_decode
from annotated_transformer.translation.steps import packed

Step = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of its batch."""

    config: ModelConfig
    vocabulary: int
    sentences: int


# 64 pairs are about 1,000 target tokens, 133 are about 2,000
SIZES = {
    "small": Size(ModelConfig(N=3, d_model=256, d_ff=1024, h=4, max_len=512), 8_000, 64),
    "base": Size(ModelConfig(max_len=512), 37_000, 133),
}


def make_pairs(size: Size, seed: int = 0) -> Batch:
    """Draw pairs of 15 ± 5 tokens, normally spread within 4 to 25, padded in one batch."""
    chance = torch.Generator().manual_seed(seed)

    def side(extra: int) -> Tensor:
        spread = 15 + 5 * torch.randn(size.sentences, generator=chance)
        lengths = spread.round().long().clamp(4, 25) + extra
        width = int(lengths.max())
        tokens = torch.randint(4, size.vocabulary, (size.sentences, width), generator=chance)
        return tokens.masked_fill(torch.arange(width) >= lengths.unsqueeze(1), PAD)

    src, tgt = side(0), side(1)
    tgt[:, 0] = BOS
    return Batch(src, tgt)


def ours(size: Size, task: str) -> Step:
    """Our package, as its command line runs it."""
    prepare_cpu()
    torch.manual_seed(0)
    model = build_model(size.vocabulary, size.vocabulary, size.config)
    if task == "decode":
        return decoder(model, size, greedy_decode, packed(model))  # as ``translate`` does
    batch, optimizer = make_pairs(size), make_adam(model, lr=1e-4)
    return lambda: update(model, [batch], optimizer, smoothing=0.1)


class LibraryModel(nn.Module):
    """``torch.nn.Transformer`` between embeddings and a projection, as its users write it."""

    pe: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        c = size.config
        self.core = nn.Transformer(c.d_model, c.h, c.N, c.N, c.d_ff, c.dropout, batch_first=True)
        self.source = nn.Embedding(size.vocabulary, c.d_model)
        self.target = nn.Embedding(size.vocabulary, c.d_model)
        self.project = nn.Linear(c.d_model, size.vocabulary)
        self.dropout = nn.Dropout(c.dropout)
        self.register_buffer("pe", sinusoid(c.max_len, c.d_model))

    def embed(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
        x: Tensor = self.dropout(
            table(tokens) * math.sqrt(table.embedding_dim) + self.pe[: tokens.size(1)]
        )
        return x

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        future = ~subsequent_mask(tgt.size(1))[0]
        x = self.core(
            self.embed(self.source, src),
            self.embed(self.target, tgt),
            tgt_mask=future,
            src_key_padding_mask=src == PAD,
            tgt_key_padding_mask=tgt == PAD,
            memory_key_padding_mask=src == PAD,
        )
        y: Tensor = self.project(x)
        return y


def library(size: Size, task: str) -> Step:
    """PyTorch's own modules, with its own loss and Adam, all by default."""
    torch.manual_seed(0)
    model, batch = LibraryModel(size), make_pairs(size)
    loss = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    if task == "decode":
        raise ValueError("torch.nn.Transformer has no decoding of its own")

    def step() -> None:
        optimizer.zero_grad()
        logits = model(batch.src, batch.tgt)
        loss(logits.flatten(0, 1), batch.tgt_y.flatten()).backward()
        optimizer.step()

    return step


class PlainNorm(nn.Module):
    """Layer normalisation written out, with the sample deviation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        spread = x.std(-1, keepdim=True) + 1e-6
        return self.gain * (x - x.mean(-1, keepdim=True)) / spread + self.bias


class PlainAttention(nn.Module):
    """Heads, written out: four projections, weights kept, dropout on them."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.h, self.dropout = c.h, nn.Dropout(c.dropout)
        self.linears = nn.ModuleList(nn.Linear(c.d_model, c.d_model) for _ in range(4))

    def forward(self, query: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        inputs = zip(self.linears, (query, memory, memory), strict=False)
        q, k, v = (
            linear(x).view(len(x), -1, self.h, x.size(-1) // self.h).transpose(1, 2)
            for linear, x in inputs
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        self.weights = self.dropout(scores.softmax(-1))
        x = (self.weights @ v).transpose(1, 2).contiguous().view(*query.shape)
        y: Tensor = self.linears[3](x)
        return y


class PlainLayer(nn.Module):
    """A pre-norm layer of the encoder, or with ``cross`` of the decoder."""

    def __init__(self, c: ModelConfig, cross: bool) -> None:
        super().__init__()
        self.attention = nn.ModuleList(PlainAttention(c) for _ in range(1 + cross))
        self.network = nn.Sequential(
            nn.Linear(c.d_model, c.d_ff),
            nn.ReLU(),
            nn.Dropout(c.dropout),
            nn.Linear(c.d_ff, c.d_model),
        )
        self.norms = nn.ModuleList(PlainNorm(c.d_model) for _ in range(2 + cross))
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.dropout(self.attention[0](y, y, mask))
        if len(self.attention) == 2:
            y = self.norms[1](x)
            x = x + self.dropout(self.attention[1](y, memory, memory_mask))
        return x + self.dropout(self.network(self.norms[-1](x)))


class PlainModel(nn.Module):
    """The explicit formulation of the well-known article: padding is computed like the rest."""

    pe: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        c = size.config
        self.width = c.d_model
        layers = PlainLayer(c, cross=False), PlainLayer(c, cross=True)
        self.encoder, self.decoder = (
            nn.ModuleList(copy.deepcopy(layer) for _ in range(c.N)) for layer in layers
        )
        self.norms = nn.ModuleList(PlainNorm(c.d_model) for _ in range(2))
        self.tables = nn.ModuleList(nn.Embedding(size.vocabulary, c.d_model) for _ in range(2))
        self.project = nn.Linear(c.d_model, size.vocabulary)
        self.dropout = nn.Dropout(c.dropout)
        self.register_buffer("pe", sinusoid(c.max_len, c.d_model))

    def embed(self, which: int, tokens: Tensor) -> Tensor:
        x: Tensor = self.tables[which](tokens) * math.sqrt(self.width)
        y: Tensor = self.dropout(x + self.pe[: tokens.size(1)])
        return y

    def encode(self, src: Tensor, src_mask: Tensor) -> Tensor:
        x = self.embed(0, src)
        for layer in self.encoder:
            x = layer(x, src_mask, x, src_mask)
        y: Tensor = self.norms[0](x)
        return y

    def decode(self, memory: Tensor, src_mask: Tensor, tgt: Tensor, tgt_mask: Tensor) -> Tensor:
        x = self.embed(1, tgt)
        for layer in self.decoder:
            x = layer(x, tgt_mask, memory, src_mask)
        y: Tensor = self.norms[1](x)
        return y

    def generator(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.project(x), dim=-1)


def article(size: Size, task: str) -> Step:
    """The explicit formulation, with its dense target and PyTorch's Adam."""
    torch.manual_seed(0)
    model, batch = PlainModel(size), make_pairs(size)
    if task == "decode":
        return decoder(model, size, plain_greedy_decode)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    criterion = nn.KLDivLoss(reduction="sum")

    def step() -> None:
        memory = model.encode(batch.src, batch.src_mask)
        x = model.decode(memory, batch.src_mask, batch.tgt, batch.tgt_mask)
        predicted = model.generator(x).flatten(0, 1)
        gold = batch.tgt_y.flatten()
        dense = torch.full_like(predicted.detach(), 0.1 / (size.vocabulary - 2))
        dense.scatter_(1, gold.unsqueeze(1), 0.9)
        dense[:, PAD] = 0
        dense[gold == PAD] = 0
        (criterion(predicted, dense) / batch.ntokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@torch.no_grad()
def plain_greedy_decode(
    model: PlainModel, src: Tensor, src_mask: Tensor, max_len: int, start_symbol: int
) -> Tensor:
    """Decode as the article does: the whole prefix again at each step."""
    memory = model.encode(src, src_mask)
    ys = torch.full((len(src), 1), start_symbol)
    for _ in range(max_len - 1):
        out = model.decode(memory, src_mask, ys, subsequent_mask(ys.size(1)))
        ys = torch.cat([ys, model.generator(out[:, -1]).argmax(-1, keepdim=True)], dim=1)
    return ys


def decoder(
    model: nn.Module,
    size: Size,
    decode: Callable[..., Tensor],
    within: AbstractContextManager[object] | None = None,
) -> Step:
    """Return a step that decodes 32 sentences to 60 tokens, in a context that stays open."""
    model.eval()
    open_now = ExitStack()
    open_now.enter_context(within or nullcontext())
    batch = make_pairs(size)
    src, mask = batch.src[:32], batch.src_mask[:32]

    def step(_: ExitStack = open_now) -> object:  # a context that nobody holds would close
        return decode(model, src, mask, 61, BOS)  # the start symbol counts as one

    return step


CONTENDERS = {"ours": ours, "torch.nn.Transformer": library, "article": article}
