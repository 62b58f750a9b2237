"""Jobs that this commit and an older one both can do; ``benchmarks.before`` measures them.

Run as a script, with the checkout to be measured first on ``PYTHONPATH``, so nothing of
``benchmarks`` is imported here: the older checkout has another one.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import annotated_transformer
from annotated_transformer.model.transformer import make_model
from annotated_transformer.notation import EOS
from annotated_transformer.training.batches import make_batch
from annotated_transformer.training.loop import update
from annotated_transformer.training.optimizer import make_adam

Job = Callable[[], object]
# Before the two layers were separate. An editable install would find this commit's module there.
OLD = not (Path(annotated_transformer.__file__).parent / "fast").exists()
SEARCHES = {"greedy": (32, 1), "beam": (32, 4), "one": (1, 1)}  # sentences, hypotheses of each
TARGET = 60  # tokens of each output: the end symbol is made impossible


def imported(old: str, new: str, name: str) -> Any:
    """Return a name that has moved from one module to another."""
    module = __import__(f"annotated_transformer.{old if OLD else new}", fromlist=[name])
    return getattr(module, name)


def sentences(count: int, mean: int, vocabulary: int) -> list[list[int]]:
    """Draw sentences of about ``mean`` tokens."""
    lengths = [max(3, int(random.gauss(mean, mean / 4))) for _ in range(count)]
    return [[random.randrange(4, vocabulary) for _ in range(length)] for length in lengths]


def training(vocabulary: int, count: int, mean: int, **sizes: int) -> Job:
    """Return a training step on one batch."""
    model = make_model(vocabulary, vocabulary, **sizes)
    pairs = (sentences(count, mean, vocabulary), sentences(count, mean, vocabulary))
    batch, optimizer = make_batch(*pairs), make_adam(model, 1e-4)
    if OLD:
        return lambda: update(model, [batch], optimizer, None, 0.1)
    from annotated_transformer.fast.loss import FastLoss
    from annotated_transformer.training.distributed import replica_loss

    loss = FastLoss(model)
    return lambda: update(loss, [batch], optimizer, None, 0.1, loss=replica_loss)


def search(count: int, beam: int) -> Job:
    """Return a search with the base model, one batch after another as in ``translate``."""
    greedy_search = imported("translation.decoding", "fast.search", "greedy_search")
    beam_search = imported("translation.beam_search", "fast.search", "beam_search")
    model = make_model(37_000, 37_000).eval()
    model.generator.get_parameter("proj.bias").detach()[EOS] = -1e4
    keeping = "packed" if OLD else "keep_decoder_weights"
    keep = imported("translation.steps", "fast.decoding", keeping)
    texts, kept = sentences(count, 30, 37_000), ExitStack()
    kept.enter_context(keep(model))

    def job(_: ExitStack = kept) -> None:  # a context that nobody holds would close
        if beam == 1:
            greedy_search(model, texts, TARGET)
        else:
            beam_search(model, texts, beam=beam, max_len=TARGET)

    return job


def make_job(name: str) -> Job:
    """Return a job: two training steps, or three searches."""
    if name == "small":
        return training(8_000, 64, 26, N=3, d_model=256, d_ff=1024, h=4)
    if name == "base":
        return training(37_000, 74, 27)
    return search(*SEARCHES[name])


def serve(name: str) -> None:
    """Run the job once for each line, and answer with its time in seconds."""
    print(json.dumps(annotated_transformer.__file__), flush=True)
    products = imported("training.speed", "fast.products", "prepare_cpu")()
    torch.manual_seed(0)
    random.seed(0)
    job = make_job(name)
    job()
    print(json.dumps(str(products)), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        job()
        print(json.dumps(time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
