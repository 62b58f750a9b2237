"""Measure on real text what the heads of a trained system look at.

Which decoder head finds the verb of a separated German prefix, in the captions of Multi30k?
The system must write German: ``annotated-transformer train --corpus multi30k --pair en-de``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from annotated_transformer.data.corpora import load_corpus
from annotated_transformer.engine.checkpoints import load_system
from annotated_transformer.engine.records import processor
from annotated_transformer.model.transformer import build_model
from annotated_transformer.results.attention_maps import distant_verbs
from benchmarks.records import keep, origin

TESTS = ("test_2016_flickr", "test_2017_flickr")


def main() -> None:
    """Read the options, measure, print, write a record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a training into German")
    parser.add_argument("--mirror", type=Path, help="folder that holds the corpora's files")
    parser.add_argument("--record", type=Path, help="write the figures into this JSON file")
    options = parser.parse_args()
    system = load_system(options.run)
    source, target = (len(tokenizer) for tokenizer in system.tokenizers)
    torch.manual_seed(system.training.get("options", {}).get("seed", 0))
    untrained = build_model(source, target, system.config)
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
            "hardware": processor(),
            "system": system.training.get("options", {}),
            "text": {"choice": ["val"], "measure": list(TESTS)},
            **found,
        }
        keep(record, options.record)


if __name__ == "__main__":
    main()
