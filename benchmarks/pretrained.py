"""Train the small model that comes with the package, and write the record of the run.

One Transformer learns both directions of the book's own grammar: each pair is in the training text
twice, once from German to English and once the other way, and the source language decides.
The recipe is benchmarks/pretrained.json. The package's trainer does the work in a folder, and goes
on from there if it was interrupted. Then the weights are stored with 8 bits each, in
annotated_transformer/pretrained/, and the stored model is tested against the one that was trained.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from annotated_transformer.data.corpora import ParallelText, load_corpus
from annotated_transformer.data.files import digest_of_lines, write_atomically
from annotated_transformer.engine.checkpoints import best_weights, load_system, weights_of
from annotated_transformer.engine.config import Options, load_recipe
from annotated_transformer.engine.records import make_record
from annotated_transformer.engine.system import System, translate_lines
from annotated_transformer.engine.trainer import Trainer
from annotated_transformer.fast.products import prepare_cpu
from annotated_transformer.pretrained import (
    FILES,
    FOLDER,
    FORMAT,
    RUNNING,
    SUMS,
    WORD,
    load_pretrained,
)
from annotated_transformer.translation.evaluation import score
from benchmarks.records import keep, origin

RECIPE = Path(__file__).with_suffix(".json")
PAIRS = 100_000  # each is read in both directions
RECORD = Path("results/pretrained/model.json")
DIRECTIONS = ("de-en", "en-de")


def both_directions(split: str, size: int | None = None) -> ParallelText:
    """Return pairs of the grammar from German to English, then the same the other way."""
    one = load_corpus("grammar", DIRECTIONS[0], split, size=size)
    sides = one.source + one.target, one.target + one.source
    digests = map(digest_of_lines, sides)
    sums = tuple(zip((f"{split}.source", f"{split}.target"), digests, strict=True))
    return ParallelText("files", split, ("de", "en"), *sides, one.origin, sums)


def seen_words(text: ParallelText) -> dict[str, list[str]]:
    """Return the words of a text of both directions, by language, in alphabetical order."""
    half = len(text) // 2
    sides = {"de": text.source[:half], "en": text.source[half:]}
    return {
        language: sorted({word for line in lines for word in WORD.findall(line)})
        for language, lines in sides.items()
    }


def wilson(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % confidence interval (Wilson's) of a share of correct answers."""
    share, square = right / total, z * z / total
    middle = share + square / 2
    half = z * math.sqrt(share * (1 - share) / total + square / (4 * total))
    return (middle - half) / (1 + square), (middle + half) / (1 + square)


def tested(system: System) -> dict[str, Any]:
    """Return the scores of greedy decoding on the test split, by direction."""
    found = {}
    for pair in DIRECTIONS:
        text = load_corpus("grammar", pair, "test")
        lines = translate_lines(system, text.source)
        right = sum(line == wanted for line, wanted in zip(lines, text.target, strict=True))
        exact = {"right": right, "share": right / len(text), "interval": wilson(right, len(text))}
        source, target = (RUNNING.text(language) for language in pair.split("-"))
        running = translate_lines(system, [source])[0] == target
        found[pair] = {**score(lines, text.target), "exact": exact, "running": running}
    return found


def quantize(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices as 8-bit integers with a scale for each row; vectors stay in float32."""
    found = {}
    for name, tensor in weights.items():
        if tensor.dim() < 2:
            found[name] = tensor.detach().float().clone()
            continue
        scale = tensor.detach().float().abs().amax(dim=1).clamp_min(1e-12) / 127
        found[name] = (tensor.detach().float() / scale.unsqueeze(1)).round().to(torch.int8)
        found[f"{name}.scale"] = scale
    return found


def store(system: System, words: dict[str, list[str]], folder: Path) -> None:
    """Write the files that ``load_pretrained`` reads."""
    from safetensors.torch import save

    config = {
        "format": FORMAT,
        "about": "German to English and back, in the words of the book's own grammar.",
        "model": asdict(system.config),
        "vocabulary": len(system.tokenizers[0]),
        "special": {"pad": 0, "bos": 1, "eos": 2, "unk": 3},
    }
    tokenizer = json.loads(system.tokenizers[0].to_json())
    merges = ",\n".join(json.dumps(pair, ensure_ascii=False) for pair in tokenizer.pop("merges"))
    head = json.dumps(tokenizer)[:-1]
    texts = {
        "config.json": json.dumps(config, indent=1),
        "tokenizer.json": f'{head}, "merges": [\n{merges}\n]}}',
        "words.json": json.dumps(words, indent=0, ensure_ascii=False),
    }
    data = {name: f"{text}\n".encode() for name, text in texts.items()}
    data["model.safetensors"] = save(quantize(weights_of(system.model)))
    sums = [f"{hashlib.sha256(data[name]).hexdigest()}  {name}\n" for name in FILES]
    for name, content in {**data, SUMS: "".join(sums).encode()}.items():
        write_atomically(folder / name, content)


def stored_system(folder: Path = FOLDER) -> System:
    """Return the stored model as the package's commands use it."""
    found = load_pretrained(folder)
    return System(found.model, found.config, ("de", "en"), found.tokenizers, {})


def first_losses(log: Path, updates: int = 50) -> list[tuple[int, float]]:
    """Return the losses of the first updates from the run's log."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    found = [(line["update"], line["loss"]) for line in lines if "loss" in line]
    return [point for point in found if point[0] <= updates]


def make(options: Options, folder: Path, place: Path, record: Path, pairs: int) -> bool:
    """Train or resume; store and test the model, write the record. False if interrupted."""
    source = origin("benchmarks.pretrained")  # before its own files change the checkout
    texts = both_directions("train", pairs), both_directions("val")
    trainer = Trainer(options, folder, texts)
    if not trainer.train():
        print(f"stopped after update {trainer.state.updates}; the same command goes on")
        return False
    trained = load_system(folder)
    store(trained, seen_words(texts[0]), place)
    scores = {"trained": tested(trained), "stored": tested(stored_system(place))}
    state = trainer.state
    found = make_record(trainer.system, state, scores, "", pairs=2 * pairs)
    files = {name: (place / name).read_bytes() for name in FILES}
    more = {
        "weights": best_weights(folder),
        "grammar_pairs": pairs,
        "bytes": {name: len(data) for name, data in files.items()},
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        "first_losses": first_losses(folder / "log.jsonl"),
    }
    keep({"kind": "pretrained", **found, **source, **more}, record)
    for name, by_pair in scores.items():
        for pair, one in by_pair.items():
            count = f"{one['exact']['right']} of {one['sentences']} right"
            running = f"the running sentence {'right' if one['running'] else 'WRONG'}"
            print(f"{name}, {pair}: BLEU {one['bleu']}, {count}, {running}")
    return True


def main() -> int:
    """Parse the options, and make the model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretrained", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/pretrained"), help="folder of the run"
    )
    parser.add_argument("--package", type=Path, default=FOLDER, help="folder for the stored model")
    parser.add_argument("--record", type=Path, default=RECORD, help="file for the record")
    parser.add_argument("--updates", type=int, help="number of updates, if not the recipe's")
    chosen = parser.parse_args()
    options = load_recipe(RECIPE)
    if chosen.updates is not None:
        if chosen.package == FOLDER or chosen.record == RECORD:
            parser.error("--updates: not the recipe's model; give --package and --record, too")
        options = options.replace(updates=chosen.updates)
    torch.set_num_threads(1)
    prepare_cpu()
    return 0 if make(options, chosen.out, chosen.package, chosen.record, PAIRS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
