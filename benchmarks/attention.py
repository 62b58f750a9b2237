"""Measure on real text which tokens the heads of a trained system attend to.

Which decoder head finds the verb of a separated German prefix, in the captions of Multi30k?
The system must write German: ``annotated-transformer train --corpus multi30k --pair en-de``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from annotated_transformer.data.corpora import load_corpus
from annotated_transformer.engine.checkpoints import load_system
from annotated_transformer.engine.records import processor_name
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.results.attention_maps import (
    Links,
    at_distances,
    best_head,
    capture_attention,
    chance_rates,
)
from annotated_transformer.translation.tokenizers import Tokenizer
from benchmarks.chapters import definitions
from benchmarks.records import keep, origin

TESTS = ("test_2016_flickr", "test_2017_flickr")


def at_places(n: int, m: int, places: int) -> Tensor:
    """Return maps ``(1, places, n, m)`` in which all queries attend to one fixed position."""
    keys = torch.arange(places).clamp(max=m - 1)
    return F.one_hot(keys, m).float().unsqueeze(1).expand(-1, n, -1).unsqueeze(0)


def distant_verbs(
    model: EncoderDecoder,
    untrained: EncoderDecoder,
    tokenizers: tuple[Tokenizer, Tokenizer],
    texts: Mapping[Literal["val", "test"], Sequence[tuple[str, str]]],
) -> dict[str, Any]:
    """Measure how well one decoder head finds the verb of a separated prefix.

    Args:
        model: A model that translates into German.
        untrained: The same model before training, for comparison.
        tokenizers: The tokenizers of source and target.
        texts: Sentences with German translations; one split chooses the head, one measures it.

    Returns:
        The head, counted from zero; the number of verbs in each text; and the shares of verbs
        found in ``test`` by the head, by chance, at the best distance, at the best position from
        the left, and before training.

    Raises:
        ValueError: If a text has no such verb.
    """
    verb_links = definitions("results/attention_maps")["verb_links"]
    links: dict[str, dict[tuple[str, str], Links]] = {
        split: {pair: found for pair in pairs if (found := verb_links(pair[1], tokenizers[1]))}
        for split, pairs in texts.items()
    }
    wanted = {split: list(found.values()) for split, found in links.items()}
    for split, there in wanted.items():
        if not there:
            raise ValueError(f"{split}: has no German verb in two parts")
    seen, before = (
        {
            s: [m.weights["decoder"] for m in capture_attention(of, tokenizers, list(p))]
            for s, p in links.items()
        }
        for of in (model, untrained)
    )
    sizes = {split: [(w.size(2), w.size(3)) for w in maps] for split, maps in seen.items()}
    back = {s: [at_distances(*size, range(1, 25)) for size in of] for s, of in sizes.items()}
    left = {s: [at_places(*size, 24) for size in of] for s, of in sizes.items()}
    head, found = best_head(seen, wanted)
    shares = {
        "head": found["test"],
        "chance": chance_rates(seen["test"], wanted["test"], "decoder"),
    }
    others = {"one distance": back, "one place": left, "untrained": before}
    shares |= {name: best_head(maps, wanted)[1]["test"] for name, maps in others.items()}
    verbs = {split: len(found) for split, found in links.items()}
    return {"head": head, "verbs": verbs, "shares": shares}


def main() -> None:
    """Parse the options, measure, print and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run that translates into German")
    parser.add_argument("--mirror", type=Path, help="folder that holds the corpora's files")
    parser.add_argument("--record", type=Path, help="write the figures into this JSON file")
    options = parser.parse_args()
    system = load_system(options.run)
    source, target = (len(tokenizer) for tokenizer in system.tokenizers)
    torch.manual_seed(system.training.get("options", {}).get("seed", 0))
    untrained = system.config.build(source, target)
    pair = "-".join(system.languages)
    texts = {
        split: list(load_corpus("multi30k", pair, split, mirror=options.mirror))
        for split in ("val", *TESTS)
    }
    found = distant_verbs(
        system.model,
        untrained,
        system.tokenizers,
        {"val": texts["val"], "test": [pair for split in TESTS for pair in texts[split]]},
    )
    print(json.dumps(found, indent=1))
    if options.record:
        record = {
            **origin("benchmarks.attention"),
            "hardware": processor_name(),
            "system": system.training.get("options", {}),
            "text": {"choice": ["val"], "measure": list(TESTS)},
            **found,
        }
        keep(record, options.record)


if __name__ == "__main__":
    main()
