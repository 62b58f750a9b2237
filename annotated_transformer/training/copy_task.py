# Written from book/training/copy_task.md: edit the chapter instead.
"""Learning to copy, the smallest task that exercises everything."""

from collections.abc import Iterator

import torch
from torch.optim.lr_scheduler import LambdaLR

from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.transformer import make_model
from annotated_transformer.notation import UNK
from annotated_transformer.training.batches import Batch, make_batch
from annotated_transformer.training.loop import LossFunction, Progress, batch_loss, fit


def data_gen(
    V: int, batch: int, nbatches: int, *, length: int = 10, generator: torch.Generator | None = None
) -> Iterator[Batch]:
    """Yield batches of random sequences to be copied, as in *The Annotated Transformer*.

    Symbols are the numbers after the special tokens. A source ends with ``EOS``, and a
    target stands between ``BOS`` and ``EOS``; short ones are filled with ``PAD``.

    Args:
        V: Size of the vocabulary, special tokens included.
        batch: Sequences in a batch.
        nbatches: Number of batches.
        length: Maximum symbols of a sequence; the minimum is one.
        generator: Draws the sequences; PyTorch's global generator unless given.

    Raises:
        ValueError: The vocabulary has no symbol besides the special tokens.
    """
    first = UNK + 1  # the first number that is an ordinary symbol
    if first >= V:
        raise ValueError(f"a vocabulary of {V} has only special tokens: copying needs {first + 1}")
    for _ in range(nbatches):
        sizes = torch.randint(1, length + 1, (batch,), generator=generator).tolist()
        rows = [torch.randint(first, V, (n,), generator=generator).tolist() for n in sizes]
        yield make_batch(rows, rows)


def train_copy_task(
    seed: int = 0,
    *,
    V: int = 11,
    length: int = 10,
    updates: int = 500,
    batch_size: int = 64,
    smoothing: float = 0.0,
    loss: LossFunction = batch_loss,
) -> tuple[EncoderDecoder, list[Progress]]:
    """Train a small model to copy; the defaults take less than half a minute on one core.

    Sequences of at most ``length`` symbols come from :func:`data_gen`; ``seed`` chooses them and
    the first weights. The global random generator is left unchanged.

    Returns:
        The model in evaluation mode, and the progress of each update.
    """
    data = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(V, V, N=1, d_model=32, d_ff=128, h=4, dropout=0.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005, fused=True)
        warmup = updates / 5

        def factor(done: int) -> float:
            return min((done + 1) / warmup, (updates - done) / (updates - warmup))

        batches = data_gen(V, batch_size, updates, length=length, generator=data)
        schedule = LambdaLR(optimizer, factor)
        history = list(fit(model, batches, optimizer, schedule, smoothing=smoothing, loss=loss))
    return model.eval(), history
