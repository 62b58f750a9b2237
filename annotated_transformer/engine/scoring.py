"""The log-probability that a system gives to translations that are already there."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from annotated_transformer.data.files import CorpusError
from annotated_transformer.engine.system import System
from annotated_transformer.fast.ensemble import Ensemble, mean_probability
from annotated_transformer.fast.model import FastModel, can_accelerate
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.notation import EOS
from annotated_transformer.training.batches import Batch, make_batch, token_batches
from annotated_transformer.training.loop import evaluation_mode


@dataclass(frozen=True)
class PairScore:
    """How probable a translation is, given its source."""

    tokens: list[str]  #: The target's tokens as text; the last is the end symbol.
    #: Natural logarithm of the probability of each, given those before it.
    log_probabilities: list[float]

    @property
    def total(self) -> float:
        """Log-probability of the whole target, its end symbol included."""
        return math.fsum(self.log_probabilities)

    @property
    def per_token(self) -> float:
        """Mean log-probability of a token; its negative is the loss in nats."""
        return self.total / len(self.log_probabilities)


def score_pairs(
    system: System,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    max_tokens: int = 4096,
    name: str = "input",
    progress: bool = False,
) -> list[PairScore]:
    """Return how probable each target is as a translation of its source.

    Args:
        system: A trained system, or an ensemble.
        sources: Sentences.
        targets: As many translations, without blank lines on either side.
        max_tokens: Maximum tokens of a batch, padding included.
        name: Name of the input in errors.
        progress: Show a progress bar.

    Raises:
        CorpusError: A side is blank, or longer than the model's limit.
        ValueError: The two sides have different numbers of lines.
    """
    if isinstance(sources, str) or isinstance(targets, str):
        raise TypeError("sources and targets: give two lists of strings, not a string")
    if len(sources) != len(targets):
        raise ValueError(f"{name}: {len(sources)} sources, but {len(targets)} targets")
    limit, ids = system.config.max_len - 1, []
    for number, pair in enumerate(zip(sources, targets, strict=True), 1):
        sides = [t.encode(line) for t, line in zip(system.tokenizers, pair, strict=True)]
        for side, tokens, line in zip(("source", "target"), sides, pair, strict=True):
            reason = "is blank; remove the pair from both texts" if not line.strip() else ""
            reason = "holds a line break; strip or split it" if "\n" in line else reason
            if len(tokens) > limit:
                reason = f"has {len(tokens)} tokens, but {limit} fit the model; split or remove it"
            if reason:
                raise CorpusError(f"{name}, line {number}: the {side} {reason}")
        ids.append(sides)
    lengths = [[len(side) + 1 for side in sides] for sides in ids]
    order = token_batches(lengths, max([max_tokens, *map(max, lengths)]), shuffle=False)
    out: dict[int, PairScore] = {}
    hidden = not progress or sys.stderr is None  # closed by the parent process
    with tqdm(total=len(ids), unit="line", disable=hidden, file=sys.stderr) as bar:
        for batch in order:
            chosen = [int(i) for i in batch]
            found = score_tokens(system.model, *zip(*(ids[i] for i in chosen), strict=True))
            for i, values in zip(chosen, found, strict=True):
                out[i] = PairScore(system.tokenizers[1].tokens([*ids[i][1], EOS]), values)
            bar.update(len(chosen))
    return [out[i] for i in range(len(ids))]


@torch.no_grad()
def score_tokens(
    model: EncoderDecoder, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the log-probability of each target token and of the end symbol after them.

    Both sides are without special symbols. The model is in evaluation mode meanwhile.
    """
    device = next(model.parameters()).device
    batch = make_batch([list(s) for s in sources], [list(t) for t in targets]).to(device)
    with evaluation_mode(model):
        found = _log_probs(model, batch).cpu().double().tolist()
    return [row[: len(target) + 1] for row, target in zip(found, targets, strict=True)]


def _log_probs(model: EncoderDecoder, batch: Batch) -> Tensor:
    """Return the log-probabilities of the target's tokens ``(batch, n)``; 0 at padding."""
    if isinstance(model, Ensemble):
        return mean_probability([_log_probs(each, batch) for each in model.members])
    keep = batch.tgt_y != batch.pad
    wanted = batch.tgt_y[keep].unsqueeze(1)
    if can_accelerate(model):
        rows = FastModel(model).eval()(batch.src, batch.tgt, batch.src != batch.pad, keep)
    else:
        rows = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)[keep]
    found = torch.zeros(keep.shape, device=keep.device, dtype=rows.dtype)
    found[keep] = model.generator(rows).gather(1, wanted)[:, 0]
    return found
