"""Exercises on paths, on one query, on the cost of training, and on counting parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from torch import Tensor

from annotated_transformer.exercises.declare import Case, Draw, Exercise, draw_examples

Gap = Callable[[int, int], int]  # from the layer, counted from 0, and the width to the dilation


def layers_to_reach(
    network: str, distance: int, k: int, *,
    gap: Gap = lambda layer, k: k**layer, own: int = 1, short: int = 0,
) -> int:  # fmt: skip
    """Return the fewest steps in which information crosses a distance."""
    if network == "chain":
        return distance
    if network == "clique":
        return 1
    layers = reach = 0
    while reach < distance:
        reach += (k - own) * (gap(layers, k) if network == "tree" else 1)
        layers += 1
    return layers - short if network in ("windows", "tree") and reach > distance else layers


def _path_case(draw: Draw) -> Case:
    network = draw.random.choice(["chain", "windows", "tree", "tree", "clique"])
    return network, draw.integer(1, 60), draw.integer(2, 4)


LAYERS_TO_REACH: Final = Exercise(
    layers_to_reach,
    [("windows", 4, 3), ("tree", 8, 2), ("clique", 1000, 3)],
    _path_case,
    {
        "a window of k tokens holds the token itself: a layer adds k - 1 positions":
            partial(layers_to_reach, own=0),
        "rounded down: a layer used in part is needed as well": partial(layers_to_reach, short=1),
        "the gaps of the tree double: they grow by the factor k":
            partial(layers_to_reach, gap=lambda layer, k: 2**layer),
        "off by one: L layers of the tree reach k ** L - 1 positions back, not k ** L":
            lambda net, far, k: layers_to_reach(net, far - (net == "tree" and far > 1), k),
        "the tree is counted like plain windows": partial(layers_to_reach, gap=lambda *_: 1),
        "the clique needs one step, however far apart the words are":
            lambda net, far, k: layers_to_reach("chain" if net == "clique" else net, far, k),
        "the chain has no windows: it takes a step for each position":
            lambda net, far, k: layers_to_reach("windows" if net == "chain" else net, far, k),
    },
)  # fmt: skip


def one_query(
    query: Tensor, keys: Tensor, values: Tensor, *,
    power: float = 0.5, softmax: bool = True, size: int | None = None,
) -> Tensor:  # fmt: skip
    """Attend with one ``query (d,)`` to ``keys (m, d)``: the mean of ``values (m, d_v)``."""
    scores = keys @ query / (size or len(query)) ** power
    weights: Tensor = scores.softmax(0) if softmax else scores
    return weights @ values


def _query_case(draw: Draw) -> Case:
    d, m = draw.integer(2, 5), draw.integer(2, 5)
    return draw.normal(d), draw.normal(m, d), draw.normal(m, draw.integer(1, 4))


ONE_QUERY: Final = Exercise(
    one_query,
    *draw_examples(_query_case),
    {
        "scale missing: divide the scores by the root of d": partial(one_query, power=0.0),
        "divided by d, not by its root": partial(one_query, power=1.0),
        "divided by the root of the number of keys, not of the width d":
            lambda q, k, v: one_query(q, k, v, size=len(k)),
        "softmax missing": partial(one_query, softmax=False),
        "sum, not mean: the softmax turns scores into weights that add up to one":
            lambda q, k, v: (k @ q / len(q) ** 0.5).exp() @ v,
        "the values weighted in proportion to the scores, without the exponential":
            lambda q, k, v: one_query(q, k, v, softmax=False) / (k @ q / len(q) ** 0.5).sum(),
    }, tolerance=1e-6,  # a root may be taken in float32
)  # fmt: skip


def training_cost(
    days: float, gpus: int, teraflops: float, *, hours: float = 24, unit: float = 1e12
) -> float:
    """Return time × GPUs × sustained operations per second, as in Table 2."""
    return days * hours * 3600 * gpus * teraflops * unit


def _cost_case(draw: Draw) -> Case:
    return draw.integer(1, 80) / 2, draw.integer(2, 96), draw.random.choice([2.8, 3.7, 6.0, 9.5])


TRAINING_COST: Final = Exercise(
    training_cost,
    [(3.5, 8, 9.5), (1.0, 96, 2.8), (37.0, 8, 6.0)],
    _cost_case,
    {
        "days taken for hours: a day has 24 of them": partial(training_cost, hours=1),
        "minutes, not seconds: an hour has 3,600 seconds": partial(training_cost, hours=24 / 60),
        "gigaflops: a teraflop is 1e12 operations": partial(training_cost, unit=1e9),
        "teraflops not turned into operations: a teraflop is 1e12": partial(training_cost, unit=1),
        "the cost of a single GPU": lambda days, gpus, rate: training_cost(days, 1, rate),
    },
)  # fmt: skip


def model_parameters(
    N: int, d_model: int, d_ff: int, h: int, d_k: int, d_v: int, vocab: int, *,
    attentions: int = 3, networks: int = 2, norms: int = 5, biases: int = 1, matrices: int = 1,
) -> int:  # fmt: skip
    """Count the parameters of a row of Table 3: post-norm, and one matrix for the vocabulary."""
    d, keys, values = d_model, h * d_k, h * d_v
    attention = 2 * (d + biases) * keys + (d + biases) * values + (values + biases) * d
    network = (d + biases) * d_ff + (d_ff + biases) * d
    layers = N * (attentions * attention + networks * network + norms * 2 * d)
    return layers + matrices * vocab * d + biases * vocab


def _row_case(draw: Draw) -> Case:
    integer = draw.integer
    sizes = integer(1, 8), integer(2, 600), integer(2, 3000), integer(1, 16)
    return *sizes, integer(1, 64), integer(1, 64), integer(5, 40_000)


MODEL_PARAMETERS: Final = Exercise(
    model_parameters,
    [(6, 512, 2048, 8, 64, 64, 37_000), (6, 512, 2048, 8, 16, 64, 37_000), (2, 4, 3, 2, 1, 5, 7)],
    _row_case,
    {
        "the decoder's attention to the source not counted":
            partial(model_parameters, attentions=2, norms=4),
        "no layers of the decoder: N counts those of the encoder, and of the decoder once more":
            partial(model_parameters, attentions=1, networks=1, norms=2),
        "three matrices for the vocabulary: they are one": partial(model_parameters, matrices=3),
        "biases not counted": partial(model_parameters, biases=0),
        "layer norms not counted": partial(model_parameters, norms=0),
        "values as narrow as keys: only queries and keys have the width d_k":
            lambda N, d, f, h, k, v, V: model_parameters(N, d, f, h, k, k, V),
        "heads of width d_model / h, whatever d_k and d_v are":
            lambda N, d, f, h, k, v, V: model_parameters(N, d, f, 1, d, d, V),
        "one head, not h of them":
            lambda N, d, f, h, k, v, V: model_parameters(N, d, f, 1, k, v, V),
    },
)  # fmt: skip
