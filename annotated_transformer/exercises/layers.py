"""Exercises on layers: norm and residual, feed-forward, embeddings, parameter counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from annotated_transformer.exercises.declare import Answer, Case, Draw, Exercise, draw_examples
from annotated_transformer.model.embeddings import sinusoid

Map = Callable[[Tensor], Tensor]


def as_function(sizes: Callable[..., tuple[Any, ...]]) -> Callable[[Answer], Answer]:
    """Return an adapter that turns a reader's layer into a function of input and parameters.

    Args:
        sizes: Maps the arguments of a case to those of the layer's constructor. The parameters of
            the case replace the layer's own in order, with matrices transposed if necessary.
    """

    def adapt(answer: Answer) -> Answer:
        if not (isinstance(answer, type) and issubclass(answer, nn.Module)):
            return answer

        def function(x: Tensor, *given: Tensor) -> Any:
            layer = answer(*sizes(x, *given)).eval()
            names = [name for name, _ in layer.named_parameters()]
            if len(names) != len(given):
                text = f"the layer has {len(names)} parameters, but should have {len(given)}"
                raise ValueError(f"{text}: {', '.join(names) or 'none'}")
            own = {}
            for (name, parameter), value in zip(layer.named_parameters(), given, strict=True):
                turn = value.dim() == 2 and parameter.shape == value.T.shape  # nn.Linear's weight
                own[name] = value.T if turn else value
            return functional_call(layer, own, (x,))

        return function

    return adapt


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *,
    axis: int = -1, eps: float = 1e-5, outside: bool = False, less: int = 0, root: bool = True,
    centre: bool = True, affine: tuple[int, int] = (1, 1),
) -> Tensor:  # fmt: skip
    """Normalise ``x (..., features)``; the options make the known mistakes."""
    mean, variance = x.mean(axis, keepdim=True), x.var(axis, correction=less, keepdim=True)
    scale = variance.sqrt() + eps if outside else (variance + eps).sqrt()
    y = (x - mean if centre else x) / (scale if root else variance + eps)
    return (weight if affine[0] else 1) * y + (bias if affine[1] else 0)


def _norm_case(draw: Draw) -> Case:
    shape = *[draw.integer(2, 4) for _ in range(draw.integer(1, 2))], draw.integer(2, 6)
    return 2 * draw.normal(*shape) + 1, draw.normal(shape[-1]), draw.normal(shape[-1])


def _plain_norm(*rows: list[float]) -> Case:
    x = torch.tensor(rows, dtype=torch.float64)
    return x, torch.ones_like(x[0]), torch.zeros_like(x[0])


LAYER_NORM: Final = Exercise(
    layer_norm,
    [
        _plain_norm([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]),
        _plain_norm([0.01, 0.02, 0.03], [5.0, 0.0, -5.0], [1.0, 1.0, 1.0]),
        (_plain_norm([1.0, 3.0], [4.0, 0.0])[0], torch.tensor([2.0, 0.5]).double(),
         torch.tensor([0.0, 1.0]).double()),
    ],
    _norm_case,
    {
        "ε added to the standard deviation, not to the variance": partial(layer_norm, outside=True),
        "variance divided by N − 1, as by x.var(): divide by N": partial(layer_norm, less=1),
        "N − 1 in the standard deviation, and ε added to it, as in The Annotated Transformer":
            partial(layer_norm, less=1, outside=True, eps=1e-6),
        "N − 1 in the standard deviation, and ε added to it, not to the variance":
            partial(layer_norm, less=1, outside=True),
        "ε missing: a constant row gives NaN": partial(layer_norm, eps=0),
        **{f"ε is 1e-5 here, not {eps:g}": partial(layer_norm, eps=eps)
           for eps in (1e-3, 1e-6, 1e-8, 1e-9, 1e-12)},
        "mean and variance over positions, not over features": partial(layer_norm, axis=-2),
        "root missing: divided by the variance": partial(layer_norm, root=False),
        "mean not subtracted": partial(layer_norm, centre=False),
        "gain and bias missing": partial(layer_norm, affine=(0, 0)),
        "gain missing": partial(layer_norm, affine=(0, 1)),
        "bias missing": partial(layer_norm, affine=(1, 0)),
    },
    adapt=as_function(lambda x, *_: (x.size(-1),)),
    tolerance=1e-8,
)  # fmt: skip


def sublayer_connection(x: Tensor, sublayer: Map, norm: Map) -> Tensor:
    """Apply a sub-layer with a post-norm residual connection."""
    return norm(x + sublayer(x))


def plain_norm(x: Tensor) -> Tensor:
    """Normalise the last axis, without parameters."""
    return F.layer_norm(x, x.shape[-1:])


def _maps(kind: int) -> Map:
    def double(x: Tensor) -> Tensor:
        return 2 * x

    def square(x: Tensor) -> Tensor:
        return x * x

    def reverse(x: Tensor) -> Tensor:
        return x.flip(-1) + 1

    return (double, square, reverse)[kind]


def _residual_case(draw: Draw) -> Case:
    x = draw.normal(draw.integer(1, 3), draw.integer(3, 6))
    return x, _maps(draw.integer(1, 2)), plain_norm


RESIDUAL: Final = Exercise(
    sublayer_connection,
    [(torch.tensor([[1.0, 2.0, 4.0]]).double(), _maps(kind), plain_norm) for kind in range(3)],
    _residual_case,
    {
        "pre-norm: the paper normalizes x + sublayer(x)": lambda x, f, norm: x + f(norm(x)),
        "residual missing: x is not added": lambda x, f, norm: norm(f(x)),
        "norm missing": lambda x, f, norm: x + f(x),
        "norm of the sub-layer's output alone, not of the sum": lambda x, f, norm: x + norm(f(x)),
        "both norms: of the input and of the sum": lambda x, f, norm: norm(x + f(norm(x))),
        "x added after the norm": lambda x, f, norm: norm(x + f(x)) + x,
    },
)  # fmt: skip


def feed_forward(
    x: Tensor, w_1: Tensor, b_1: Tensor, w_2: Tensor, b_2: Tensor, *, act: Map = torch.relu
) -> Tensor:
    """Return ``max(0, x W1 + b1) W2 + b2``."""
    return act(x @ w_1 + b_1) @ w_2 + b_2


def _feed_forward_case(draw: Draw) -> Case:
    d, d_ff = draw.integer(2, 4), draw.integer(5, 7)
    x = draw.normal(draw.integer(1, 3), draw.integer(1, 4), d)
    return x, draw.normal(d, d_ff), draw.normal(d_ff), draw.normal(d_ff, d), draw.normal(d)


FEED_FORWARD: Final = Exercise(
    feed_forward,
    *draw_examples(_feed_forward_case),
    {
        "ReLU missing": partial(feed_forward, act=lambda x: x),
        "a second ReLU at the end": lambda *a: feed_forward(*a).relu(),
        "ReLU at the end, not in between": lambda *a: feed_forward(*a, act=lambda x: x).relu(),
        "the first bias missing": lambda x, w, b, w_2, b_2: (x @ w).relu() @ w_2 + b_2,
        "the first bias after the ReLU": lambda x, w, b, w_2, c: ((x @ w).relu() + b) @ w_2 + c,
        "the second bias missing": lambda x, w, b, w_2, _: feed_forward(x, w, b, w_2, 0 * _),
        "x added: the residual is not part of the network": lambda x, *a: x + feed_forward(x, *a),
        "GELU instead of ReLU": partial(feed_forward, act=F.gelu),
    },
    adapt=as_function(lambda x, w_1, *_: tuple(w_1.shape)),
)  # fmt: skip


def waves(
    length: int, d_model: int, *, start: int = 0, step: int = 2, swap: bool = False,
    halves: bool = False, multiply: bool = False, base: float = 10000,
) -> Tensor:  # fmt: skip
    """Return sinusoids; the options make the known mistakes."""
    position = torch.arange(start, start + length, dtype=torch.float64).unsqueeze(1)
    exponent = torch.arange(0, d_model, 2, dtype=torch.float64) * step / 2 / d_model
    angle = position * base**exponent if multiply else position / base**exponent
    pair = (angle.cos(), angle.sin()) if swap else (angle.sin(), angle.cos())
    return torch.cat(pair, dim=1) if halves else torch.stack(pair, dim=-1).flatten(1)


def columns(length: int, d_model: int) -> Tensor:
    """Give each column its own wavelength, which is wrong."""
    place = torch.arange(d_model, dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64).unsqueeze(1) / 10000 ** (place / d_model)
    return torch.where(place % 2 == 0, angle.sin(), angle.cos())


SINUSOID: Final = Exercise(
    lambda length, d_model: sinusoid(length, d_model, torch.float64),
    [(6, 4), (10, 8), (3, 2)],
    lambda draw: (draw.integer(1, 40), 2 * draw.integer(1, 8)),
    {
        "positions off by one: the first is 0": partial(waves, start=1),
        "sine and cosine swapped: sines belong in the even columns": partial(waves, swap=True),
        "sines and cosines in two halves: they alternate in the paper": partial(waves, halves=True),
        "the exponent is i/d_model, not 2i/d_model": partial(waves, step=1),
        "exponent 4i/d_model: arange(0, d_model, 2) holds 2i already": partial(waves, step=4),
        "sine and cosine of a pair have different wavelengths: they should be the same": columns,
        "multiplied by the power of 10000, not divided": partial(waves, multiply=True),
        "1000 instead of 10000": partial(waves, base=1000),
        "rows and columns swapped: a row is a position": lambda n, d: waves(n, d).T,
    },
    tolerance=2e-5,
    any_float=True,
)  # fmt: skip


def scaled_embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Look up tokens ``(batch, length)`` in a table ``(vocab, d_model)``, scaled by √d_model."""
    return table[tokens] * math.sqrt(table.size(1))


def _embedding_case(draw: Draw) -> Case:
    vocab = draw.integer(2, 6)
    shape = draw.integer(1, 3), draw.integer(1, 4)
    return draw.integers(0, vocab - 1, *shape), draw.normal(vocab, draw.integer(2, 6))


SCALED_EMBEDDING: Final = Exercise(
    scaled_embedding,
    *draw_examples(_embedding_case),
    {
        "scale missing: times √d_model": lambda x, table: table[x],
        "times d_model, not its root": lambda x, table: table[x] * table.size(1),
        "divided by √d_model, not multiplied": lambda x, table: table[x] / table.size(1) ** 0.5,
        "times the root of the vocabulary's size": lambda x, table: table[x] * len(table) ** 0.5,
        "times the root of the sequence's length": lambda x, table: table[x] * x.size(-1) ** 0.5,
    }, tolerance=1e-6,  # a root may be taken in float32
)  # fmt: skip
