# Written from book/background/recurrent.md: edit the chapter instead.
"""Recurrent networks (RNN, LSTM, GRU) and a language model made of them (section 1)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.notation import PAD
from annotated_transformer.training.loop import evaluation_mode

State = tuple[Tensor, ...]  # (h,) or, for the LSTM, (h, c)


class Cell(nn.Module, ABC):
    """One position of a recurrent network: a new state from an input and the old state.

    Args:
        input_size: Width of the input.
        hidden_size: Width of the state.
    """

    gates: ClassVar[int] = 1  #: Vectors that each product gives.
    states: ClassVar[int] = 1  #: Vectors that are carried along.

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.from_input = nn.Linear(input_size, self.gates * hidden_size)
        self.from_state = nn.Linear(hidden_size, self.gates * hidden_size)
        bound = hidden_size**-0.5  # as in PyTorch
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @abstractmethod
    def step(self, product: Tensor, state: State) -> State:
        """Return the new state, from ``from_input(x)`` and the old state.

        Args:
            product: Shape ``(batch, gates * hidden_size)``.
            state: One or two tensors ``(batch, hidden_size)``.
        """

    def forward(self, x: Tensor, state: State) -> State:
        """Return the new state for the input ``x (batch, input_size)``."""
        return self.step(self.from_input(x), state)


class RNNCell(Cell):
    """``h' = tanh(W_x x + b_x + W_h h + b_h)``."""

    def step(self, product: Tensor, state: State) -> State:
        """Return ``(h',)``."""
        (h,) = state
        return (torch.tanh(product + self.from_state(h)),)


class LSTMCell(Cell):
    """Long short-term memory with a forget gate; its state is ``(h, c)``."""

    gates = 4
    states = 2

    def step(self, product: Tensor, state: State) -> State:
        """Return ``(h', c')``."""
        h, c = state
        i, f, g, o = (product + self.from_state(h)).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


def gru_step(from_input: Tensor, from_state: Tensor, h: Tensor) -> Tensor:
    """Take one step of a GRU whose products are known.

    Args:
        from_input: The input's product for r, z and n, ``(batch, 3 * hidden)``.
        from_state: The state's product for them, likewise.
        h: The state ``(batch, hidden)``.
    """
    r_x, z_x, n_x = from_input.chunk(3, dim=-1)
    r_h, z_h, n_h = from_state.chunk(3, dim=-1)
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    n = torch.addcmul(n_x, r, n_h).tanh()  # n_x + r * n_h
    return torch.lerp(n, h.to(n.dtype), z)  # (1 - z) * n + z * h


class GRUCell(Cell):
    """Gated recurrent unit; the reset gate acts after the product with the state."""

    gates = 3

    def step(self, product: Tensor, state: State) -> State:
        """Return ``(h',)``."""
        (h,) = state
        return (gru_step(product, self.from_state(h), h),)


def run_cell(
    cell: Cell, x: Tensor, state: State, keep: Tensor | None, *, backward: bool = False
) -> tuple[Tensor, State]:
    """Run a cell along all positions of a batch.

    Where there is padding, the old state is carried on. So the state after the last position is
    that after the last word, and a backward sweep reaches the last word in its initial state.

    Args:
        cell: Makes a new state from an old one.
        x: Shape ``(batch, n, input_size)``, finite at padding.
        state: Where to start, one or two tensors ``(batch, hidden_size)``.
        keep: Boolean ``(batch, n, 1)``, true at words; ``None`` where all are.
        backward: Go from the last position to the first.

    Returns:
        The states ``h`` at all positions, ``(batch, n, hidden_size)``, zero at padding, and the
        state after the last step.
    """
    products = cell.from_input(x).unbind(1)  # one product for all positions
    real = [None] * len(products) if keep is None else keep.unbind(1)
    steps = list(zip(products, real, strict=True))
    outputs = []
    for product, here in reversed(steps) if backward else steps:
        new = cell.step(product, state)
        if here is not None:
            pairs = zip(new, state, strict=True)
            new = tuple(torch.where(here, one, other) for one, other in pairs)
        state = new
        outputs.append(state[0])
    y = torch.stack(outputs[::-1] if backward else outputs, dim=1)
    return (y if keep is None else y.masked_fill(~keep, 0.0)), state


R = TypeVar("R", bound="Recurrent")


def _real(x: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Check the input of a layer; return where words are, ``(batch, n, 1)``, if lengths say."""
    if x.dim() != 3 or x.size(1) == 0:
        raise ValueError(f"the input must be (batch, n, input) with n > 0, not {tuple(x.shape)}")
    if lengths is None:
        return None
    batch, n, _ = x.shape
    lengths = lengths.to(x.device)
    if lengths.shape != (batch,):
        raise ValueError(f"{batch} sentences, but lengths of shape {tuple(lengths.shape)}")
    if bool((lengths < 0).any() | (lengths > n).any()):
        raise ValueError(f"lengths must lie between 0 and {n}: {lengths.tolist()}")
    return (torch.arange(n, device=x.device) < lengths.unsqueeze(1)).unsqueeze(-1)


class Recurrent(nn.Module):
    """A stack of layers of one kind of cell, in one direction or in both.

    Args:
        input_size: Width of the input.
        hidden_size: Width of the state, in each direction.
        num_layers: How many layers; each reads the outputs of the one below.
        bidirectional: Whether a second cell in each layer reads from the right.
        dropout: Share of a layer's outputs that is dropped before the next layer, in training.
    """

    cell: ClassVar[type[Cell]]
    twin: ClassVar[type[nn.RNNBase]]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bidirectional: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, not {num_layers}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must lie between 0 and 1, not {dropout}")
        self.input_size, self.hidden_size = input_size, hidden_size
        self.num_layers, self.dropout = num_layers, dropout
        self.bidirectional, self.ways = bidirectional, 2 if bidirectional else 1
        widths = [input_size] + [self.ways * hidden_size] * (num_layers - 1)
        # Layer by layer, and in a layer first the cell that reads from the left.
        cells = [self.cell(width, hidden_size) for width in widths for _ in range(self.ways)]
        self.cells = nn.ModuleList(cells)

    def forward(
        self, x: Tensor, lengths: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State]:
        """Read a batch.

        Args:
            x: Shape ``(batch, n, input_size)``.
            lengths: Words of each sentence, ``(batch,)``; ``n`` for all if not given.
            state: Where to start; zero if not given. A tuple of one tensor
                ``(num_layers * ways, batch, hidden_size)``, of two for the LSTM: h and c.

        Returns:
            The last layer's states at all positions, ``(batch, n, ways * hidden_size)``, zero at
            padding; and the state after the last word, shaped as ``state``.

        Raises:
            ValueError: If ``x`` has not three axes or is empty, or a length is not in 0 to ``n``.
        """
        keep = _real(x, lengths)
        x = x if keep is None else x.masked_fill(~keep, 0.0)
        cells, begins, ends = self._typed_cells(), self._begin(x, state), []
        for layer in range(self.num_layers):
            outputs = []
            for way in range(self.ways):
                y, end = run_cell(next(cells), x, next(begins), keep, backward=way == 1)
                outputs.append(y)
                ends.append(end)
            x = torch.cat(outputs, dim=-1) if self.bidirectional else outputs[0]
            if layer + 1 < self.num_layers:
                x = F.dropout(x, self.dropout, self.training)
        return x, tuple(torch.stack(part) for part in zip(*ends, strict=True))

    def _typed_cells(self) -> Iterator[Cell]:
        """Yield the cells, with their type."""
        for cell in self.cells:
            assert isinstance(cell, Cell)
            yield cell

    def _begin(self, x: Tensor, state: State | None) -> Iterator[State]:
        """Yield the state in which each cell starts."""
        shape = (len(self.cells), x.size(0), self.hidden_size)
        if state is None:
            state = (x.new_zeros(shape),) * self.cell.states
        if [part.shape for part in state] != [shape] * self.cell.states:
            shapes = [tuple(part.shape) for part in state]
            raise ValueError(f"the state must be {self.cell.states} of {shape}, not {shapes}")
        return zip(*(part.unbind(0) for part in state), strict=True)

    def _pairs(self, other: nn.RNNBase) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield our parameters, each with its counterpart in PyTorch's layer."""
        for number, cell in enumerate(self._typed_cells()):
            layer, way = divmod(number, self.ways)
            end = f"_l{layer}" + ("_reverse" if way else "")
            for ours, theirs in ((cell.from_input, "ih"), (cell.from_state, "hh")):
                yield ours.weight, getattr(other, f"weight_{theirs}{end}")
                yield ours.bias, getattr(other, f"bias_{theirs}{end}")

    def to_torch(self) -> nn.RNNBase:
        """Return PyTorch's layer (batch first) with a copy of the weights."""
        twin: Any = self.twin  # whose subclasses take other arguments than itself
        other: nn.RNNBase = twin(
            self.input_size,
            self.hidden_size,
            self.num_layers,
            batch_first=True,
            bidirectional=self.bidirectional,
            dropout=self.dropout,
        ).to(next(self.parameters()))
        with torch.no_grad():
            for mine, theirs in self._pairs(other):
                theirs.copy_(mine)
        return other.train(self.training)

    @classmethod
    def from_torch(cls: type[R], other: nn.RNNBase) -> R:
        """Return our layer with a copy of the weights of PyTorch's.

        Raises:
            ValueError: If ``other`` is of another kind, lacks biases, projects its state, or
                uses another function than tanh.
        """
        plain = other.bias and other.proj_size == 0
        if not isinstance(other, cls.twin) or not plain or "RELU" in other.mode:
            raise ValueError(f"{cls.__name__} has no counterpart of {other}")
        layer = cls(
            other.input_size,
            other.hidden_size,
            other.num_layers,
            bidirectional=other.bidirectional,
            dropout=other.dropout,
        ).to(other.all_weights[0][0])
        with torch.no_grad():
            for mine, theirs in layer._pairs(other):
                mine.copy_(theirs)
        return layer.train(other.training)


class RNN(Recurrent):
    """Layers of ``RNNCell``; arguments and results as in ``Recurrent``."""

    cell = RNNCell
    twin = nn.RNN


class LSTM(Recurrent):
    """Layers of ``LSTMCell``; arguments and results as in ``Recurrent``."""

    cell = LSTMCell
    twin = nn.LSTM


class GRU(Recurrent):
    """Layers of ``GRUCell``; arguments and results as in ``Recurrent``."""

    cell = GRUCell
    twin = nn.GRU


class LanguageModel(nn.Module):
    """Predict each next token from those before it.

    Args:
        vocab: Size of the vocabulary.
        layer: A recurrent layer, ours or PyTorch's (batch first), in one direction.

    Raises:
        ValueError: If the layer reads from both sides, or does not take the batch first.
    """

    def __init__(self, vocab: int, layer: Recurrent | nn.RNNBase) -> None:
        super().__init__()
        if layer.bidirectional:
            raise ValueError("a language model must not see the words that it predicts")
        if isinstance(layer, nn.RNNBase) and not layer.batch_first:
            raise ValueError("the layer must take the batch first: batch_first=True")
        self.embedding = nn.Embedding(vocab, layer.input_size, padding_idx=PAD)
        self.layer = layer
        self.project = nn.Linear(getattr(layer, "proj_size", 0) or layer.hidden_size, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities ``(batch, n, vocab)`` of what follows ``tokens (batch, n)``.

        Padding needs no lengths: it is on the right, and the network is causal.
        """
        y, _ = self.layer(self.embedding(tokens))
        log_probs: Tensor = self.project(y).log_softmax(dim=-1)
        return log_probs

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean of ``-log p`` of the tokens after the first, without padding."""
        log_probs = self(tokens[:, :-1])
        return F.nll_loss(log_probs.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)


def perplexity(model: LanguageModel, tokens: Tensor) -> float:
    """Return ``exp(mean of -log p)`` of ``tokens (sentences, n)`` after the first of each."""
    with evaluation_mode(model), torch.no_grad():
        return math.exp(model.loss(tokens).item())
