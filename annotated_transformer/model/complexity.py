# Written from book/model/complexity.md: edit the chapter instead.
"""Table 1, measured on layers that run (sections 2 and 4)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.model.attention import attention
from annotated_transformer.model.multi_head import MultiHeadedAttention
from annotated_transformer.model.transformer import ModelConfig


class SelfAttention(nn.Module):
    """Self-attention of width ``d`` with ``h`` heads, by the plain equation."""

    def __init__(self, d: int, h: int = 1) -> None:
        super().__init__()
        self.heads = MultiHeadedAttention(h, d, dropout=0.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend, by head: arguments and result are ``(batch, h, n, d / h)``."""
        return attention(q, k, v, mask)[0]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map ``x (batch, n, d)`` to the same shape; ``mask (batch or 1, 1 or n, n)``."""
        all_heads = None if mask is None else mask.unsqueeze(1)
        *projections, mix = self.heads.linears
        q, k, v = (w(x).unflatten(-1, (self.heads.h, -1)).transpose(1, 2) for w in projections)
        mixed: Tensor = mix(self.attend(q, k, v, all_heads).transpose(1, 2).flatten(2))
        return mixed


class RecurrentLayer(nn.Module):
    r"""The plain recurrent layer of width ``d``, :math:`h_t = \tanh(W x_t + U h_{t-1} + b)`."""

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
    """Raise ``ValueError``, which names the argument, unless ``size`` is odd and positive."""
    if size < 1 or size % 2 == 0:
        raise ValueError(f"{name}={size} has no middle: give an odd number")


class Convolution(nn.Module):
    """A convolution of width ``d`` over ``k`` positions, ``dilation`` apart.

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
        """Map ``x (batch, n, d)`` to the same shape."""
        y: Tensor = self.conv(F.pad(x.transpose(1, 2), self.padding)).transpose(1, 2)
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
    """Return which keys each query sees, ``(blocks, b, b + 2 * reach)``."""
    start = torch.arange(0, n, b, device=device).view(-1, 1, 1)
    row = torch.arange(b, device=device).view(-1, 1)
    column = torch.arange(b + 2 * reach, device=device)
    place = start + column - reach  # of a key in the sequence
    return ((column - row - reach).abs() <= reach) & (place >= 0) & (place < n)


class RestrictedSelfAttention(SelfAttention):
    """Self-attention within a neighbourhood of ``r`` positions, an odd number (§4).

    Raises:
        ValueError: ``r`` is even.
    """

    def __init__(self, d: int, r: int, h: int = 1, *, block: int | None = None) -> None:
        super().__init__(d, h)
        check_odd("r", r)
        self.r, self.block = r, block

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to neighbours, by head: arguments and result are ``(batch, h, n, d / h)``.

        Raises:
            ValueError: The mask differs from query to query.
        """
        if mask is not None and mask.size(-2) != 1:
            raise ValueError(f"mask {tuple(mask.shape)}: give one for all queries, (..., 1, n)")
        return windowed_attention(q, k, v, self.r, self.block, mask=mask)


class DilatedStack(nn.Sequential):
    """Convolutions with dilations 1, base, base² …, with the largest base that leaves no gap."""

    def __init__(self, d: int, k: int, layers: int, *, causal: bool = False) -> None:
        base = k if causal else k // 2 + 1
        rates = (base**i for i in range(layers))
        super().__init__(*(Convolution(d, k, rate, causal=causal) for rate in rates))


def training_flops(
    config: ModelConfig, vocab: int, sources: Sequence[int], targets: Sequence[int]
) -> int:
    """Count the operations of all matrix products in a training step, forward and backward.

    All pairs of target tokens count, though a causal mask hides nearly half of them. Padding and
    what is recomputed to save memory do not count.

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
