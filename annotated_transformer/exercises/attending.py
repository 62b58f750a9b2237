"""Exercises on attention, masks and heads, restricted attention and the cost of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from annotated_transformer.exercises.declare import Case, Draw, Exercise, draw_examples
from annotated_transformer.model.attention import attention
from annotated_transformer.model.complexity import neighbourhood_mask
from annotated_transformer.model.multi_head import padding_mask, split_heads, subsequent_mask

Mask = Tensor | None
Scale = Callable[[Tensor, Tensor], float]


def wrong_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask = None, *,
    scale: Scale = lambda q, v: math.sqrt(q.size(-1)), axis: int = -1, invert: bool = False,
    late: bool = False, fill: float = -math.inf, empty: bool = True,
    weigh: Callable[[Tensor, int], Tensor] = torch.softmax,
) -> Tensor:  # fmt: skip
    """Compute attention with one of the known mistakes."""
    scores = query @ key.mT / scale(query, value)
    if mask is None:
        return weigh(scores, axis) @ value
    hidden = mask != 0 if invert else mask == 0
    if late:
        return weigh(scores, axis).masked_fill(hidden, 0.0) @ value
    weights = weigh(scores.masked_fill(hidden, fill), axis)
    return (weights.masked_fill(hidden, 0.0) if empty else weights) @ value


def _attention_case(draw: Draw) -> Case:
    n, m, d_k = draw.integer(1, 4), draw.integer(2, 5), draw.integer(2, 6)
    lead = [draw.integer(1, 2) for _ in range(draw.integer(0, 2))]
    q, k, v = draw.normal(*lead, n, d_k), draw.normal(*lead, m, d_k), draw.normal(*lead, m, 3)
    mask = draw.mask(*lead, n, m)
    mask[..., 0, :] = draw.integer(0, 2) > 0  # sometimes a fully masked query
    return q, k, v, mask if draw.integer(0, 2) else None


def _attention_examples() -> list[Case]:
    draw = Draw(3)
    eye, values = 4 * torch.eye(3, dtype=torch.float64), draw.normal(3, 4)
    x = draw.normal(4, 3)
    part = torch.tensor([[True, False, False], [True, True, False], [False, False, False]])
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    return [(eye, eye, values, None), (x, x, x, causal), (eye, eye, values, part)]


ATTENTION: Final = Exercise(
    attention,
    _attention_examples(),
    _attention_case,
    {
        "scale missing: divide the scores by √d_k": partial(wrong_attention, scale=lambda q, v: 1),
        "divided by d_k, not by its root": partial(wrong_attention, scale=lambda q, v: q.size(-1)),
        "multiplied by √d_k": partial(wrong_attention, scale=lambda q, v: q.size(-1) ** -0.5),
        "scaled by the width of the values, not of the keys":
            partial(wrong_attention, scale=lambda q, v: v.size(-1) ** 0.5),
        "softmax along the wrong axis: it is over the keys": partial(wrong_attention, axis=-2),
        "mask inverted: true means that a query may attend": partial(wrong_attention, invert=True),
        "mask inverted, and NaN where all is hidden":
            partial(wrong_attention, invert=True, empty=False),
        "mask ignored": lambda q, k, v, mask=None: attention(q, k, v)[0],
        "mask applied after the softmax: the sum is below one": partial(wrong_attention, late=True),
        "masked scores set to 0, not to −∞": partial(wrong_attention, fill=0.0, empty=False),
        "a fully masked query gives NaN, not zeros": partial(wrong_attention, empty=False),
        "a fully masked query gives the mean of all values; it should give zeros":
            partial(wrong_attention, empty=False, fill=-1e9),
        "softmax missing": partial(wrong_attention, weigh=lambda scores, axis: scores),
    },
    first=True,
    tolerance=1e-6,  # a root may be taken in float32
)  # fmt: skip


def window_mask(n: int, r: int, *, edge: int = 0, causal: bool = True) -> Tensor:
    """Let each position attend to the last ``r``, including itself: ``(1, n, n)``."""
    behind = torch.arange(n).unsqueeze(1) - torch.arange(n)
    near = behind < r + edge
    return (near & (behind >= 0) if causal else near & (behind > -r - edge)).unsqueeze(0)


WINDOW_MASK: Final = Exercise(
    window_mask,
    [(5, 2), (6, 3), (4, 1)],
    lambda draw: ((n := draw.integer(1, 9)), draw.integer(1, n)),
    {
        "off by one: the r positions include the position itself": partial(window_mask, edge=1),
        "off by one: too narrow": partial(window_mask, edge=-1),
        "not causal: later positions are visible": partial(window_mask, causal=False),
        "mask inverted: true means that a query may attend": lambda n, r: ~window_mask(n, r),
        "rows and columns swapped: a row is a query": lambda n, r: window_mask(n, r).mT,
        "leading axis missing: (1, n, n)": lambda n, r: window_mask(n, r)[0],
        "window missing: all earlier positions are visible": lambda n, r: window_mask(n, n),
    },
)


def _square(size: int, diagonal: int = 0) -> Tensor:
    return torch.ones(1, size, size, dtype=torch.bool).tril(diagonal)


SUBSEQUENT_MASK: Final = Exercise(
    subsequent_mask,
    [(3,), (5,), (1,)],
    lambda draw: (draw.integer(1, 9),),
    {
        "off by one: a position may attend to itself": partial(_square, diagonal=-1),
        "off by one: the next position is visible": partial(_square, diagonal=1),
        "mask inverted: true means that a query may attend": lambda n: ~_square(n),
        "upper triangle: rows are queries, columns are keys": lambda n: _square(n).mT,
        "leading axis missing: (1, size, size)": lambda n: _square(n)[0],
        "all positions are visible": lambda n: _square(n, n),
    },
)


def _tokens(*rows: list[int]) -> Case:
    return torch.tensor(rows), 0


def _padding_case(draw: Draw) -> Case:
    pad = draw.integer(0, 3)
    return draw.integers(0, 4, draw.integer(1, 4), draw.integer(1, 6)), pad


PADDING_MASK: Final = Exercise(
    padding_mask,
    [_tokens([5, 7, 2, 0, 0]), _tokens([4, 2, 0], [4, 5, 2]), _tokens([3, 0], [0, 0], [1, 2])],
    _padding_case,
    {
        "mask inverted: true means that a key may be read": lambda x, pad: (x == pad)[:, None],
        "axis for the queries missing: (batch, 1, length)": lambda x, pad: x != pad,
        "axis in the wrong place: keys are the last axis": lambda x, pad: (x != pad)[:, :, None],
        "pad ignored: padding does not always have id 0": lambda x, pad: (x != 0)[:, None],
        "larger than pad: other tokens may have smaller ids": lambda x, pad: (x > pad)[:, None],
    },
)


def _heads_case(draw: Draw) -> Case:
    h, d = draw.integer(1, 3), draw.integer(2, 4)
    return draw.normal(draw.integer(1, 2), draw.integer(2, 4), h * d), h


def _viewed(x: Tensor, h: int) -> Tensor:
    return x.reshape(len(x), h, x.size(1), -1)


def _interleaved(x: Tensor, h: int) -> Tensor:
    y: Tensor = x.unflatten(-1, (-1, h)).permute(0, 3, 1, 2)
    return y


SPLIT_HEADS: Final = Exercise(
    split_heads,
    [(torch.arange(8.0).double().view(1, 2, 4), 2), (torch.arange(18.0).double().view(1, 3, 6), 3),
     (torch.arange(4.0).double().view(1, 1, 4), 1)],
    _heads_case,
    {
        "positions mixed with heads: split the last axis first, then transpose": _viewed,
        "transpose missing: (batch, h, length, d)": lambda x, h: x.unflatten(-1, (h, -1)),
        "heads interleaved: a head consists of adjacent features": _interleaved,
        "batch and heads swapped": lambda x, h: split_heads(x, h).transpose(0, 1),
        "positions and features swapped": lambda x, h: split_heads(x, h).mT,
    },
)  # fmt: skip


def join_heads(x: Tensor) -> Tensor:
    """Concatenate heads ``(batch, h, length, d)``: ``(batch, length, h * d)``."""
    y: Tensor = x.transpose(1, 2).flatten(2)
    return y


JOIN_HEADS: Final = Exercise(
    join_heads,
    [(torch.arange(8.0).double().view(1, 2, 2, 2),),
     (torch.arange(18.0).double().view(1, 3, 3, 2),),
     (torch.arange(4.0).double().view(1, 1, 2, 2),)],
    lambda draw: (draw.normal(draw.integer(1, 2), draw.integer(1, 3), draw.integer(2, 4), 2),),
    {
        "no transpose: positions are mixed with heads": lambda x: x.reshape(len(x), x.size(2), -1),
        "heads interleaved: a head stays together": lambda x: x.permute(0, 2, 3, 1).flatten(2),
        "heads added, not concatenated": lambda x: x.sum(1),
        "heads concatenated along the length": lambda x: x.flatten(1, 2),
    },
)  # fmt: skip


def multi_head(
    query: Tensor, key: Tensor, value: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor,
    h: int, mask: Mask = None, *,
    split: Any = split_heads, join: Any = join_heads, scale: Any = None,
) -> Tensor:  # fmt: skip
    """Attend with ``h`` heads and given projections; the options make the known mistakes."""
    q, k, v = (split(x @ w, h) for x, w in ((query, w_q), (key, w_k), (value, w_v)))
    q = q if scale is None else q * scale(query, h)
    heads = attention(q, k, v, None if mask is None else mask.unsqueeze(1))[0]
    y: Tensor = join(heads) @ w_o
    return y


def _multi_head_case(draw: Draw) -> Case:
    h, d, b, n, m = (draw.integer(*ends) for ends in ((1, 3), (2, 3), (2, 3), (1, 3), (2, 4)))
    x = draw.normal(b, n, h * d), draw.normal(b, m, h * d), draw.normal(b, m, h * d)
    rows = draw.random.choice([1, n])
    mask = draw.mask(b, rows, m) | (torch.arange(m) == 0) if draw.integer(0, 1) else None
    return *x, *(draw.normal(h * d, h * d) for _ in range(4)), h, mask


MULTI_HEAD_ATTENTION: Final = Exercise(
    multi_head,
    *draw_examples(_multi_head_case, 1, 2, 5),
    {
        "scaled by the width of the model, not of a head":
            partial(multi_head, scale=lambda q, h: h**-0.5),  # from √d_k to √d_model
        "scale missing: divide by the root of a head's width":
            partial(multi_head, scale=lambda q, h: (q.size(-1) / h) ** 0.5),
        "one wide head: the projections are not split": lambda *a: multi_head(*[*a[:7], 1, *a[8:]]),
        "heads split wrongly: positions are mixed with heads": partial(multi_head, split=_viewed),
        "heads interleaved": partial(multi_head, split=_interleaved),
        "heads joined wrongly: the transpose before the concatenation is missing":
            partial(multi_head, join=lambda x: x.reshape(len(x), x.size(2), -1)),
        "W^O missing": lambda *a: multi_head(*[*a[:6], torch.eye(len(a[6])).to(a[6]), *a[7:]]),
        "mask ignored": lambda *a: multi_head(*a[:8]),
        "mask inverted: true means that a query may attend":
            lambda *a: multi_head(*a[:8], *(None if m is None else ~m for m in a[8:])),
        "keys and values swapped": lambda q, k, v, a, b, c, *r: multi_head(q, v, k, a, b, c, *r),
        "matrices transposed: x @ W": lambda *a: multi_head(*a[:3], *(w.T for w in a[3:7]), *a[7:]),
    },
    tolerance=1e-6,
    first=True,
)  # fmt: skip


def narrow_heads(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, h: int, *,
    width: Callable[[int, int, int], float] | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Attend from ``x`` to itself with heads of any widths; ``width`` is a wrong scale."""
    d, keys, values = (w.size(1) // h for w in (w_o, w_q, w_v))
    factor = 1.0 if width is None else (keys / width(d * h, keys, values)) ** 0.5
    return multi_head(x, x, x, factor * w_q, w_k, w_v, w_o, h, **options)


def _narrow_case(draw: Draw) -> Case:
    h, d, keys, values = (draw.integer(*ends) for ends in ((2, 3), (5, 9), (1, 2), (3, 4)))
    x = draw.normal(draw.integer(1, 2), draw.integer(2, 4), d)
    return x, *(draw.normal(d, h * n) for n in (keys, keys, values)), draw.normal(h * values, d), h


NARROW_HEADS: Final = Exercise(
    narrow_heads,
    *draw_examples(_narrow_case),
    {
        "scaled by √d_v: divide by √d_k": partial(narrow_heads, width=lambda d, keys, v: v),
        "scaled by √d_model: divide by √d_k": partial(narrow_heads, width=lambda d, keys, v: d),
        "scale missing: divide by √d_k": partial(narrow_heads, width=lambda *_: 1),
        "divided by d_k, not by its root": partial(narrow_heads, width=lambda d, keys, v: keys**2),
        "positions mixed with heads": partial(narrow_heads, split=_viewed),
        "heads interleaved": partial(narrow_heads, split=_interleaved),
        "heads joined wrongly: the transpose before the concatenation is missing":
            partial(narrow_heads, join=lambda x: x.reshape(len(x), x.size(2), -1)),
        "queries and keys swapped": lambda x, q, k, *rest: narrow_heads(x, k, q, *rest),
    },
    tolerance=1e-6,
)  # fmt: skip


def head_map(
    x: Tensor, w_q: Tensor, w_k: Tensor, h: int, head: int, *,
    split: Callable[[Tensor, int], Tensor] = split_heads, power: float = 0.5, axis: int = -1,
) -> Tensor:  # fmt: skip
    """Return the weights ``(n, n)`` of one head of self-attention for ``x (n, d_model)``."""
    q, k = (split((x @ w).unsqueeze(0), h)[0, head] for w in (w_q, w_k))
    return torch.softmax(q @ k.mT / q.size(-1) ** power, axis)


def _map_case(draw: Draw) -> Case:
    h, d, n = draw.integer(2, 3), draw.integer(2, 3), draw.integer(2, 5)
    return draw.normal(n, h * d), *(draw.normal(h * d, h * d) for _ in "qk"), h, draw.integer(0, 1)


HEAD_MAP: Final = Exercise(
    head_map,
    *draw_examples(_map_case),
    {
        "softmax along the wrong axis: those of a row add up to one": partial(head_map, axis=-2),
        "rows and columns swapped: a row is a query": lambda *case: head_map(*case).mT,
        "the matrices of queries and keys swapped": lambda x, q, k, *rest: head_map(x, k, q, *rest),
        "scale missing: divide by the root of a head's width": partial(head_map, power=0),
        "scaled by the width of the model, not of a head":
            lambda x, q, k, h, head: head_map(x, q / h**0.5, k, h, head),
        "heads counted from 1, not from 0": lambda x, q, k, h, head: head_map(x, q, k, h, head - 1),
        "heads interleaved": partial(head_map, split=_interleaved),
        "positions mixed with heads": partial(head_map, split=_viewed),
        "mean of all heads":
            lambda x, q, k, h, _: torch.stack([head_map(x, q, k, h, i) for i in range(h)]).mean(0),
    },
    tolerance=1e-6,
)  # fmt: skip


def encoder_decoder(
    src: Tensor, tgt: Tensor, pad: int, embed: Any, encoder: Any, decoder: Any, generate: Any, *,
    read: Callable[..., Tensor] = lambda states, depth: states[-1], causal: bool = True,
    hide: tuple[int, int] = (0, 0),
) -> Tensor:  # fmt: skip
    """Run a model of the given parts on tokens ``(batch, length)`` of source and target."""
    src_mask, tgt_mask = padding_mask(src, pad + hide[0]), padding_mask(tgt, pad + hide[1])
    tgt_mask = tgt_mask & subsequent_mask(tgt.size(1)) if causal else tgt_mask
    states, y = [embed(src)], embed(tgt)
    for layer in encoder:
        states.append(layer(states[-1], src_mask))
    for depth, layer in enumerate(decoder, 1):
        y = layer(y, read(states, depth), src_mask, tgt_mask)
    logits: Tensor = generate(y)
    return logits


def _encode(w: Tensor) -> Any:
    return lambda x, mask: x + attention(x @ w, x, x, mask)[0]


def _decode(w: Tensor) -> Any:
    def layer(y: Tensor, memory: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        y = y + attention(y @ w, y, y, tgt_mask)[0]
        return y + attention(y @ w, memory, memory, src_mask)[0]

    return layer


def _model_case(draw: Draw) -> Case:
    pad, b, N, table = draw.integer(0, 3), draw.integer(1, 2), draw.integer(2, 3), draw.normal(6, 3)
    src, tgt = (draw.integers(0, 5, b, draw.integer(2, 4)) for _ in range(2))
    src[:, 0] = tgt[:, 0] = 4  # no padding
    layers = ([make(draw.normal(3, 3)) for _ in range(N)] for make in (_encode, _decode))
    return src, tgt, pad, lambda tokens: table[tokens], *layers, lambda y: y @ table.mT


ENCODER_DECODER: Final = Exercise(
    encoder_decoder,
    *draw_examples(_model_case),
    {
        "each layer of the decoder reads the encoder's layer of its depth: all read the last":
            partial(encoder_decoder, read=lambda states, depth: states[depth]),
        "the decoder reads the embedded source, not the encoder's output":
            partial(encoder_decoder, read=lambda states, depth: states[0]),
        "causal mask missing: a position sees later tokens": partial(encoder_decoder, causal=False),
        "padding of the source is visible": partial(encoder_decoder, hide=(99, 0)),
        "padding of the target is visible": partial(encoder_decoder, hide=(0, 99)),
        "source and target swapped": lambda src, tgt, *rest: encoder_decoder(tgt, src, *rest),
        "the target embedded anew for each layer: only the decoder's last one counts":
            lambda *case: encoder_decoder(*[*case[:5], case[5][-1:], case[6]]),
        "only the first layer of each stack":
            lambda *case: encoder_decoder(*[*case[:4], case[4][:1], case[5][:1], case[6]]),
        "generator missing": lambda *case: encoder_decoder(*[*case[:-1], lambda y: y]),
    },
)  # fmt: skip


NEIGHBOURHOOD_MASK: Final = Exercise(
    neighbourhood_mask,
    [(5, 3), (6, 5), (4, 1)],
    lambda draw: (draw.integer(1, 9), 2 * draw.integer(0, 4) + 1),
    {
        "off by one: r // 2 positions to each side": lambda n, r: neighbourhood_mask(n, r + 2),
        "r positions to each side, not in all": lambda n, r: neighbourhood_mask(n, 2 * r + 1),
        "off by one: both ends are missing": lambda n, r: neighbourhood_mask(n, max(1, r - 2)),
        "causal: the window reaches to both sides": window_mask,
        "mask inverted: true means that a query may attend": lambda n, r: ~neighbourhood_mask(n, r),
        "leading axis missing: (1, n, n)": lambda n, r: neighbourhood_mask(n, r)[0],
    },
)  # fmt: skip


def layer_products(n: int, d: int, *, projections: int = 4, own: int = 2, each: int = 1) -> int:
    """Count the multiplications of a self-attention layer's matrix products."""
    return each * (projections * n * d**2 + own * n**2 * d)


ATTENTION_PRODUCTS: Final = Exercise(
    layer_products,
    [(10, 4), (25, 512), (512, 512)],
    lambda draw: (draw.integer(1, 900), draw.integer(1, 900)),
    {
        "projections not counted": partial(layer_products, projections=0),
        "W^O not counted": partial(layer_products, projections=3),
        "one of the products QKᵀ and weights times V is missing": partial(layer_products, own=1),
        "the products QKᵀ and weights times V are missing": partial(layer_products, own=0),
        "additions counted as well: count only multiplications": partial(layer_products, each=2),
        "n and d swapped": lambda n, d: layer_products(d, n),
    },
)  # fmt: skip
