"""The validation loss of a run, for the model in training and for averaged weights."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import nn

from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.data.shards import TokenPairs
from annotated_transformer.engine.checkpoints import AVERAGED, average_system, load_tensors
from annotated_transformer.engine.precision import PreciseLoss, Precision
from annotated_transformer.engine.system import System, translate_lines
from annotated_transformer.engine.texts import Texts
from annotated_transformer.engine.updater import prefetch_items
from annotated_transformer.fast.packing import IndexedBatch
from annotated_transformer.training.batches import Batch, token_batches
from annotated_transformer.training.distributed import (
    DistributedWorld,
    local_validation,
    replica_loss,
    reshard,
)
from annotated_transformer.training.loop import ALONE, Progress, World, evaluate
from annotated_transformer.translation.evaluation import score


class Validator:
    """Measures models on one text, in batches of ``max_tokens`` or its longest sentence."""

    def __init__(
        self, text: TokenPairs, max_tokens: int, world: DistributedWorld, precision: Precision
    ) -> None:
        self.text, self.world, self.precision = text, world, precision
        self.max_tokens = max(max_tokens, int(text.lengths().max()))

    def batches(self, world: World) -> Iterator[Batch]:
        """Make a process's batches; a GPU gets the next one while it computes on one."""
        groups = token_batches(self.text.lengths(), self.max_tokens, shuffle=False)
        device = self.precision.device

        def move(batch: Batch) -> Batch:
            return IndexedBatch(batch).to(device, non_blocking=True)

        made = local_validation(groups, self.text.batch, world)
        return (moved for _, moved in prefetch_items(made, move, device.type != "cpu"))

    def measure(self, replica: nn.Module) -> Progress:
        """Return the loss of the model in training; all processes must call this."""
        batches = self.batches(self.world)
        result = evaluate(replica, batches, loss=replica_loss, world=self.world)
        reshard(replica)
        return result

    def measure_all(
        self, replica: nn.Module, system: System, texts: Texts | None
    ) -> tuple[Progress, float | None]:
        """Return the loss and, if ``texts`` are given, :func:`bleu_of`, the same in all processes.

        The main process translates, and the others wait.
        """
        found, begun = self.measure(replica), time.perf_counter()
        if texts is None:
            return found, None
        (bleu,) = self.world.sum(bleu_of(system, texts) if self.world.main else 0.0)
        return replace(found, seconds=found.seconds + time.perf_counter() - begun), bleu

    def average(self, folder: Path, last: int | None = None, texts: Texts | None = None) -> float:
        """Save the mean of a run's last snapshots (all by default); return its loss (§6.1).

        With texts, :func:`bleu_of` is measured, too. The model of the run does not change, and one
        process is enough.
        """

        def measure(system: System) -> dict[str, float]:
            loss = PreciseLoss(system.model.to(self.precision.device), self.precision)
            found = evaluate(loss, self.batches(ALONE), loss=replica_loss).loss
            bleu = {} if texts is None else {"valid_bleu": bleu_of(system, texts)}
            return {"valid_loss": found, **bleu}

        average_system(folder, last, measure=measure)
        return float(load_tensors(folder / AVERAGED, verify=False)[1]["valid_loss"])


def fitting_pairs(system: System, text: ParallelText) -> list[tuple[str, str]]:
    """Return the pairs of a text whose source the model can take."""
    limit, encode = system.config.max_len, system.tokenizers[0].encode
    return [pair for pair in text if len(encode(pair[0])) < limit]


def bleu_of(system: System, texts: Texts) -> float:
    """Return BLEU of a system's greedy translation of the validation text.

    Random states do not change. Sentences that are too long for the model are left out.
    """
    text = texts.text("val") if isinstance(texts, Prepared) else texts[1]
    pairs = fitting_pairs(system, text)
    system.model.eval()  # the next update sets it to training again
    found = translate_lines(system, [source for source, _ in pairs])
    targets = [target for _, target in pairs]
    return float(score(found, targets, lowercase=system.lowercase)["bleu"]) if pairs else 0.0
