# Written from book/model/complexity.md: edit the chapter instead.
"""Table 1, measured on layers that run (sections 2 and 4)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from annotated_transformer.model.attention import attention
from annotated_transformer.model.multi_head import MultiHeadedAttention
from annotated_transformer.model.transformer import ModelConfig


class SelfAttention(nn.Module):
    """A sequence attends to itself, by the plain equation.

    Args:
        d: Width of input and output.
        h: Number of heads.
    """

    def __init__(self, d: int, h: int = 1) -> None:
        super().__init__()
        self.heads = MultiHeadedAttention(h, d, dropout=0.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Relate the positions: ``(batch, h, n, d / h)`` each, and so the result."""
        return attention(q, k, v, mask)[0]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map ``x (batch, n, d)`` to its like.

        Args:
            x: One vector a position.
            mask: Boolean ``(batch or 1, 1 or n, n)``, true = may attend.
        """
        all_heads = None if mask is None else mask.unsqueeze(1)
        *projections, mix = self.heads.linears
        q, k, v = (w(x).unflatten(-1, (self.heads.h, -1)).transpose(1, 2) for w in projections)
        mixed: Tensor = mix(self.attend(q, k, v, all_heads).transpose(1, 2).flatten(2))
        return mixed


class RecurrentLayer(nn.Module):
    r"""The plain recurrent layer, :math:`h_t = \tanh(W x_t + U h_{t-1} + b)`.

    Args:
        d: Width of input, state and output.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        self.W = nn.Linear(d, d)
        self.U = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """Map ``x (batch, n, d)`` to the states after each position, from ``state (batch, d)``."""
        h = torch.zeros_like(x[:, 0]) if state is None else state
        states = []
        for inner in self.W(x).unbind(dim=1):
            h = torch.tanh(inner + self.U(h))
            states.append(h)
        return torch.stack(states, dim=1)


def check_odd(name: str, size: int) -> None:
    """Raise ``ValueError`` unless ``size`` positions lie evenly around one of them."""
    if size < 1 or size % 2 == 0:
        raise ValueError(f"{name}={size} has no middle: give an odd number")


class Convolution(nn.Module):
    """A convolution along the sequence.

    Args:
        d: Width of input and output.
        k: Positions that the kernel looks at; an odd number, unless it is causal.
        dilation: Distance between them.
        causal: The kernel ends at each position, and is not centred on it.

    Raises:
        ValueError: A centred kernel is even.
    """

    def __init__(self, d: int, k: int, dilation: int = 1, *, causal: bool = False) -> None:
        super().__init__()
        if not causal:
            check_odd("k", k)
        reach = dilation * (k - 1)
        self.padding = (reach, 0) if causal else (reach // 2, reach // 2)
        self.conv = nn.Conv1d(d, d, k, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x (batch, n, d)`` to its like."""
        y: Tensor = self.conv(F.pad(x.transpose(1, 2), self.padding)).transpose(1, 2)
        return y


class DilatedStack(nn.Sequential):
    """Convolutions whose dilations grow by the same factor, as fast as leaves no gap.

    Args:
        d: Width of input and output.
        k: Positions that each kernel looks at.
        layers: Number of convolutions.
        causal: The kernels end at each position, and are not centred on it.
    """

    def __init__(self, d: int, k: int, layers: int, *, causal: bool = False) -> None:
        base = k if causal else k // 2 + 1
        rates = (base**i for i in range(layers))
        super().__init__(*(Convolution(d, k, rate, causal=causal) for rate in rates))


class SeparableConvolution(nn.Module):
    """A convolution of each component alone, then a mix of components at each position.

    Args:
        d: Width of input and output.
        k: Positions that the kernel looks at, an odd number.

    Raises:
        ValueError: ``k`` is even.
    """

    def __init__(self, d: int, k: int) -> None:
        super().__init__()
        check_odd("k", k)
        self.along = nn.Conv1d(d, d, k, padding=k // 2, groups=d)
        self.across = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x (batch, n, d)`` to its like."""
        y: Tensor = self.across(self.along(x.transpose(1, 2)).transpose(1, 2))
        return y


def neighbourhood_mask(n: int, r: int) -> Tensor:
    """Return the mask ``(1, n, n)``, true where two positions are at most ``r // 2`` apart.

    Raises:
        ValueError: ``r`` is even.
    """
    check_odd("r", r)
    place = torch.arange(n)
    return ((place.unsqueeze(1) - place).abs() <= r // 2).unsqueeze(0)


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: int,
    block: int | None = None,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend to the ``r`` positions around each query, without an ``n`` by ``n`` matrix (§4).

    Equal to ``attention(query, key, value, mask & neighbourhood_mask(n, r))[0]``: ``query`` and
    ``key (..., n, d_k)``, ``value (..., n, d_v)`` and the result ``(..., n, d_v)``, zeros where a
    query may see nothing. ``block`` queries share a window of ``r + block - 1`` keys. ``mask``
    says which keys may be seen by all queries, ``(..., 1, n)``.

    Raises:
        ValueError: ``r`` is even.
    """
    check_odd("r", r)
    reach, n, b = r // 2, query.size(-2), block or max(1, r // 2)
    lacking = -n % b  # the last block is filled up
    q = F.pad(query, (0, 0, 0, lacking)).unflatten(-2, (-1, b))  # (..., blocks, b, d_k)
    k, v = (
        F.pad(x, (0, 0, reach, reach + lacking)).unfold(-2, b + 2 * reach, b).transpose(-2, -1)
        for x in (key, value)
    )  # (..., blocks, r + b - 1, d): windows overlap
    seen = _near(n, reach, b, query.device)
    if mask is not None:
        ends = (reach, reach + lacking)
        seen = seen & F.pad(mask, ends).unfold(-1, b + 2 * reach, b).transpose(-3, -2)
    return attention(q, k, v, seen)[0].flatten(-3, -2)[..., :n, :]


def _near(n: int, reach: int, b: int, device: torch.device) -> Tensor:
    """Return who sees whom in each block, ``(blocks, b, b + 2 * reach)``."""
    start = torch.arange(0, n, b, device=device).view(-1, 1, 1)
    row = torch.arange(b, device=device).view(-1, 1)
    column = torch.arange(b + 2 * reach, device=device)
    place = start + column - reach  # of a key in the sequence
    return ((column - row - reach).abs() <= reach) & (place >= 0) & (place < n)


class RestrictedSelfAttention(SelfAttention):
    """Self-attention within a neighbourhood of ``r`` positions, section 4.

    Args:
        d: Width of input and output.
        r: Positions of a neighbourhood, an odd number.
        h: Number of heads.
        block: See :func:`windowed_attention`.

    Raises:
        ValueError: ``r`` is even.
    """

    def __init__(self, d: int, r: int, h: int = 1, *, block: int | None = None) -> None:
        super().__init__(d, h)
        check_odd("r", r)
        self.r, self.block = r, block

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Relate neighbours: ``(batch, h, n, d / h)`` each, and so the result.

        Raises:
            ValueError: The mask differs from query to query.
        """
        if mask is not None and mask.size(-2) != 1:
            raise ValueError("the neighbourhood is the mask of pairs: give one of keys alone")
        return windowed_attention(q, k, v, self.r, self.block, mask=mask)


KINDS = {"mm": "projections", "addmm": "projections", "bmm": "pairs", "convolution": "kernels"}


def operations(layer: nn.Module, x: Tensor) -> dict[str, int]:
    """Count the operations of the products in ``layer(x)``, as they run.

    Args:
        layer: Any layer. Fused kernels of a CPU are not counted: PyTorch does not know them.
        x: Its input; on the device ``meta`` nothing is computed but shapes.

    Returns:
        Operations in ``"projections"``, in products of ``"pairs"`` of positions, and in
        ``"kernels"`` of convolutions, as far as there are any.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    found: dict[str, int] = {}
    for packet, count in counter.get_flop_counts().get("Global", {}).items():
        name = str(packet).rpartition(".")[2]
        kind = KINDS.get(name, name)
        found[kind] = found.get(kind, 0) + int(count)
    return found


def fit_exponents(
    sizes: Sequence[Mapping[str, float]], values: Sequence[float]
) -> tuple[dict[str, float], float]:
    """Fit values by a product of powers, least squares on logarithms.

    Args:
        sizes: For each value its sizes by name, all positive.
        values: Positive numbers.

    Returns:
        The exponent of each size, and the largest error of the fit, relative to the value.

    Raises:
        ValueError: There are too few different sizes to tell the exponents apart.
    """
    names = list(sizes[0])
    x = torch.tensor([[s[name] for name in names] for s in sizes], dtype=torch.float64).log()
    x = torch.cat([x, torch.ones(len(sizes), 1, dtype=x.dtype)], dim=1)
    if torch.linalg.matrix_rank(x) <= len(names):
        raise ValueError(f"these sizes do not tell the exponents of {', '.join(names)} apart")
    y = torch.tensor(values, dtype=torch.float64).log()
    solution = torch.linalg.lstsq(x, y.unsqueeze(1), driver="gelsd").solution
    error = ((x @ solution)[:, 0] - y).abs().max().exp() - 1
    return dict(zip(names, solution[:-1, 0].tolist(), strict=True)), float(error)


PRODUCTS = {
    "Mm": 1, "Addmm": 1, "Bmm": 1, "Baddbmm": 1, "Mv": 1, "Addmv": 1, "Convolution": 1,
    "ScaledDotProduct": 2,  # scores, weighted sums
}  # fmt: skip


def _own_steps(node: Any) -> int:
    """Return how many products a node of the graph stands for."""
    name: str = node.name()
    return next((steps for key, steps in PRODUCTS.items() if name.startswith(key)), 0)


def dependent_steps(y: Tensor) -> int:
    """Count the products on the longest chain of dependent ones that led to ``y``.

    Args:
        y: A result whose graph was kept.

    Returns:
        Products of matrices and convolutions of which each needs the one before.
    """
    steps: dict[Any, int] = {}
    waiting = [(y.grad_fn, False)]
    while waiting:
        node, ready = waiting.pop()
        before = [] if node is None else [one for one, _ in node.next_functions if one is not None]
        if ready:
            steps[node] = _own_steps(node) + max((steps[one] for one in before), default=0)
        elif node is not None and node not in steps:
            waiting += [(node, True), *((one, False) for one in before)]
    return steps.get(y.grad_fn, 0)


def connected(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Find out by derivatives which outputs depend on which inputs.

    Args:
        layer: Maps ``(batch, n, d)`` to its like, each sequence alone.
        x: An input ``(n, d)``; take ``float64``, lest small derivatives vanish.

    Returns:
        Boolean ``(n, n)``, true where output ``i`` (row) depends on input ``j`` (column).
    """
    n, d = x.shape
    copies = x.detach().expand(n, n, d).clone().requires_grad_()
    own = layer(copies).diagonal(dim1=0, dim2=1)  # (d, n): output i of copy i
    steering = torch.arange(1, d + 1, dtype=x.dtype).sin()  # no sum that a norm keeps constant
    (slope,) = torch.autograd.grad((steering @ own).sum(), copies)
    return (slope != 0).any(dim=-1)


def layers_to_connect(make: Callable[[int], nn.Module], x: Tensor) -> int:
    """Return the fewest layers whose last output depends on the first input.

    Args:
        make: Gives a stack of so many layers; more of them connect whatever fewer do.
        x: An input ``(n, d)``, as for :func:`connected`.

    Raises:
        ValueError: ``n`` layers do not suffice.
    """
    n, d = x.shape
    steering = torch.arange(1, d + 1, dtype=x.dtype).sin()

    def enough(depth: int) -> bool:
        first = x.detach().clone().requires_grad_()
        last = make(depth).to(x.dtype)(first.unsqueeze(0))[0, -1]
        (slope,) = torch.autograd.grad(last @ steering, first)
        return bool((slope[0] != 0).any())

    most = 1
    while not enough(most):
        if most >= n:
            raise ValueError(f"{n} layers do not connect {n} positions")
        most = min(2 * most, n)
    return bisect_left(range(most), True, lo=max(1, most // 2), key=enough)


def saved_bytes(layer: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Count the bytes that are kept for the backward pass of ``layer(*inputs)``.

    Each block of memory counts once; parameters, where the layer has any, do not count.
    """
    parameters = layer.parameters() if isinstance(layer, nn.Module) else ()
    weights = {one.untyped_storage().data_ptr() for one in parameters}
    sizes: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        block = saved.untyped_storage()
        sizes[block.data_ptr()] = block.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        y = layer(*inputs)
    found = sum(size for address, size in sizes.items() if address not in weights)
    del y  # until here, no block was used again
    return found


def training_flops(
    config: ModelConfig, vocab: int, sources: Sequence[int], targets: Sequence[int]
) -> int:
    """Count the operations of all matrix products in a training step, forward and backward.

    A causal mask is not subtracted, though it hides nearly half of the pairs; padding, and what is
    computed a second time to save memory, is not counted.

    Args:
        config: Sizes of the model.
        vocab: Tokens in the target vocabulary.
        sources: Tokens of each source sentence, the end symbol included.
        targets: Tokens to be predicted of each target sentence, likewise.

    Returns:
        Operations; a multiplication and an addition are two.

    Raises:
        ValueError: There are not as many sources as targets.
    """
    d, h = config.d_model, config.h
    heads = h * (config.d_k or d // h) + h * (config.d_v or d // h)  # keys and values
    pairs = sum(m * m + n * n + m * n for m, n in zip(sources, targets, strict=True))
    # Self-attention has four projections. The attention between source and target has four as
    # well: keys and values on the one side, queries and outputs on the other.
    token = 2 * d * heads + d * heads + 2 * d * config.d_ff
    layers = config.N * ((sum(sources) + sum(targets)) * token + pairs * heads)
    return (layers + sum(targets) * d * vocab) * 2 * 3
