"""What is compared: one model and one set of sentences, in three implementations."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from annotated_transformer.article import greedy_decode
from annotated_transformer.article import make_model as make_article_model
from annotated_transformer.fast.decoding import keep_decoder_weights, start_steps
from annotated_transformer.fast.loss import FastLoss
from annotated_transformer.fast.products import prepare_cpu
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.embeddings import sinusoid
from annotated_transformer.model.multi_head import subsequent_mask
from annotated_transformer.model.transformer import ModelConfig, build_model
from annotated_transformer.notation import BOS, PAD
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.distributed import replica_loss
from annotated_transformer.training.loop import update
from annotated_transformer.training.optimizer import make_adam

Step = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """The sizes of a model and of its batch."""

    config: ModelConfig
    vocabulary: int
    sentences: int


# 64 pairs are about 1,000 target tokens, 133 are about 2,000
SIZES = {
    "small": Size(ModelConfig(N=3, d_model=256, d_ff=1024, h=4, max_len=512), 8_000, 64),
    "base": Size(ModelConfig(max_len=512), 37_000, 133),
}


def everywhere(size: Size) -> Size:
    """Return the same sizes, with dropout on attention weights and hidden units as well."""
    p = size.config.dropout
    return replace(size, config=replace(size.config, attention_dropout=p, ff_dropout=p))


def make_pairs(size: Size, seed: int = 0) -> Batch:
    """Draw pairs with normally distributed lengths (15 ± 5, from 4 to 25), padded in one batch."""
    rng = torch.Generator().manual_seed(seed)

    def side(extra: int) -> Tensor:
        spread = 15 + 5 * torch.randn(size.sentences, generator=rng)
        lengths = spread.round().long().clamp(4, 25) + extra
        width = int(lengths.max())
        tokens = torch.randint(4, size.vocabulary, (size.sentences, width), generator=rng)
        return tokens.masked_fill(torch.arange(width) >= lengths.unsqueeze(1), PAD)

    src, tgt = side(0), side(1)
    tgt[:, 0] = BOS
    return Batch(src, tgt)


def ours(size: Size, task: str) -> Step:
    """Our package, run as its command line runs it."""
    prepare_cpu()
    torch.manual_seed(0)
    model = build_model(size.vocabulary, size.vocabulary, size.config)
    if task == "decode":
        return decoder(model, size, cached_decode, keep_decoder_weights(model))
    batch, optimizer, loss = make_pairs(size), make_adam(model, lr=1e-4), FastLoss(model)
    return lambda: update(loss, [batch], optimizer, smoothing=0.1, loss=replica_loss)


class LibraryModel(nn.Module):
    """``torch.nn.Transformer`` with embeddings and a projection, as its users write it."""

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
        """Return embeddings plus positions."""
        x: Tensor = self.dropout(
            table(tokens) * math.sqrt(table.embedding_dim) + self.pe[: tokens.size(1)]
        )
        return x

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Return the logits at all positions."""
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
    """PyTorch's own modules, loss and Adam, with their default options."""
    torch.manual_seed(0)
    model, batch = LibraryModel(size), make_pairs(size)
    loss = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    if task == "decode":
        raise ValueError("torch.nn.Transformer has no decoding method to compare with")

    def step() -> None:
        optimizer.zero_grad()
        logits = model(batch.src, batch.tgt)
        loss(logits.flatten(0, 1), batch.tgt_y.flatten()).backward()
        optimizer.step()

    return step


def article(size: Size, task: str) -> Step:
    """The model of *The Annotated Transformer*, with its dense target and PyTorch's Adam."""
    torch.manual_seed(0)
    c, batch = size.config, make_pairs(size)
    sizes = (c.N, c.d_model, c.d_ff, c.h, c.dropout)
    model = make_article_model(size.vocabulary, size.vocabulary, *sizes)
    if task == "decode":
        return decoder(model, size, greedy_decode)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    criterion = nn.KLDivLoss(reduction="sum")

    def step() -> None:
        x = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
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
def cached_decode(
    model: EncoderDecoder, src: Tensor, src_mask: Tensor, max_len: int, start_symbol: int
) -> Tensor:
    """Decode like ``greedy_decode``, but with the fast layer and its KV cache."""
    steps, ys = start_steps(model, src, src_mask), [torch.full((len(src),), start_symbol)]
    for _ in range(max_len - 1):
        ys.append(steps.most_probable(ys[-1]))
    return torch.stack(ys, dim=1)


def decoder(
    model: EncoderDecoder,
    size: Size,
    decode: Callable[..., Tensor],
    within: AbstractContextManager[object] | None = None,
) -> Step:
    """Return a step that decodes 32 sentences to 60 tokens; its context manager stays open."""
    model.eval()
    open_now = ExitStack()
    open_now.enter_context(within or nullcontext())
    batch = make_pairs(size)
    src, mask = batch.src[:32], batch.src_mask[:32]

    def step(_: ExitStack = open_now) -> object:  # a context that nobody holds would close
        return decode(model, src, mask, 61, BOS)  # the start symbol counts as one

    return step


CONTENDERS = {"ours": ours, "torch.nn.Transformer": library, "article": article}
