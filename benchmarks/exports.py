"""Export one system to each target, and compare what they make of real text: tokens, and time.

The comparison is that of the chapter on exports, with its code, on the test split of a corpus in
place of the grammar's. Outputs are cut where ours must end, 50 tokens beyond the source: the
targets have no such limit, and a system that is hardly trained repeats itself without end. Our own
products with 8 and 16 bits are measured, too. Times are of greedy decoding to that length, in
batches of 32 sentences of similar length, by one thread; the best of three rounds, in which all
take turns. The record keeps the command of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import ctranslate2
import torch
import transformers
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence

from annotated_transformer.cli.main import main as command
from annotated_transformer.cli.options import Search
from annotated_transformer.cli.systems import open_pretrained, open_system
from annotated_transformer.data.corpora import load_corpus
from annotated_transformer.engine.records import processor_name
from annotated_transformer.engine.system import System
from annotated_transformer.fast.decoding import keep_decoder_weights
from annotated_transformer.fast.quantized import DecodingPrecision
from annotated_transformer.fast.screen import multiplies_bytes
from annotated_transformer.fast.search import greedy_search
from annotated_transformer.interop.onnx import OnnxTranslator
from annotated_transformer.notation import EOS, PAD
from annotated_transformer.training.batches import make_batch
from benchmarks.chapters import definitions
from benchmarks.machine import seconds_of
from benchmarks.records import keep, origin

CHAPTER = "engineering/export"
TARGETS = {
    "ctranslate2": ("--to", "ctranslate2"),
    "int8": ("--to", "ctranslate2", "--precision", "int8"),
    "huggingface": ("--to", "huggingface"),
    "onnx": ("--to", "onnx"),
}
BATCH, ROUNDS, EXTRA = 32, 3, 50
Decode = Callable[[list[list[int]]], object]


def chapter_code(system: System, source: list[str], target: list[str]) -> dict[str, Any]:
    """Return the chapter's functions, with this system and these sentences in place of its own."""
    one, other = system.tokenizers
    ids, right = [one.encode(line) for line in source], [other.encode(line) for line in target]
    given = make_batch(ids, right)
    real = given.tgt_y != PAD
    with torch.no_grad():
        out = system.model(given.src, given.tgt, given.src_mask, given.tgt_mask)
        log_probs = system.model.generator(out)
    known = log_probs.gather(2, given.tgt_y.unsqueeze(2)).squeeze(2)[real]
    names = definitions(CHAPTER)
    names.update(ids=ids, right=right, given=given, real=real, known=known)
    cased = [line.lower() for line in target] if system.lowercase else target  # for BLEU
    names["text"] = argparse.Namespace(source=source, target=cased)
    names["pretrained"] = argparse.Namespace(tokenizer=other)
    names["tokenizer"] = Tokenizer.from_file("ctranslate2/tokenizer.json")
    names["hf_tokenizer"] = transformers.AutoTokenizer.from_pretrained("huggingface")
    names["model"] = transformers.AutoModelForSeq2SeqLM.from_pretrained("huggingface")
    return names


OWN: dict[str, DecodingPrecision] = {  # our products with weights
    "ours": "float32",
    "ours bfloat16": "bfloat16",
    "ours int8": "int8",
}
Greedy = Callable[[list[list[int]]], list[list[int]]]


def own_decoders(system: System, stack: contextlib.ExitStack) -> dict[str, Greedy]:
    """Return our decoders, each with a model that keeps its weights while the stack is open.

    On processors that multiply no bytes there is none with int8.
    """
    own = {name: kind for name, kind in OWN.items() if kind != "int8" or multiplies_bytes()}
    models = {name: copy.deepcopy(system.model) for name in own}
    for name, precision in own.items():
        stack.enter_context(keep_decoder_weights(models[name], precision))
    return {name: partial(greedy_search, model) for name, model in models.items()}


def longest(batch: list[list[int]]) -> int:
    """Return how many tokens an output of a batch may have."""
    return max(map(len, batch)) + EXTRA


def decoders(names: dict[str, Any]) -> dict[str, Decode]:
    """Return for each target what decodes a batch of token ids greedily."""
    tokenizer, model, onnx = names["tokenizer"], names["model"], OnnxTranslator("onnx", threads=1)

    def by_ctranslate2(folder: str) -> Decode:
        translator = ctranslate2.Translator(folder, intra_threads=1)

        def decode(batch: list[list[int]]) -> object:
            words = [[tokenizer.id_to_token(n) for n in [*one, EOS]] for one in batch]
            limits = {"min_decoding_length": 0, "max_decoding_length": longest(batch)}
            return translator.translate_batch(words, beam_size=1, **limits)

        return decode

    def by_huggingface(batch: list[list[int]]) -> object:
        rows = [torch.tensor([*one, EOS]) for one in batch]
        padded = pad_sequence(rows, batch_first=True, padding_value=PAD)
        real = (padded != PAD).long()
        return model.generate(
            input_ids=padded, attention_mask=real, max_length=None, max_new_tokens=longest(batch)
        )

    return {
        "ctranslate2": by_ctranslate2("ctranslate2"),
        "int8": by_ctranslate2("int8"),
        "huggingface": by_huggingface,
        "onnx": lambda batch: onnx.greedy([[*one, EOS] for one in batch]),
    }


def seconds(decode: dict[str, Decode], ids: list[list[int]]) -> dict[str, float]:
    """Return how long each takes for all sentences, in its best round."""
    ordered = sorted(ids, key=len)
    batches = [ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH)]
    best = dict.fromkeys(decode, float("inf"))
    for _ in range(ROUNDS):
        for name, one in decode.items():
            best[name] = min(best[name], seconds_of(partial(list, map(one, batches))))
    return best


def system_of(run: Path | None) -> System:
    """Load a run's system, or the one that comes with the package."""
    search = Search(device="cpu")
    return open_pretrained(search)[0] if run is None else open_system(run, search)[0]


def measure(run: Path | None, source: list[str], target: list[str]) -> dict[str, dict[str, float]]:
    """Export a run into this folder; return what becomes of these sentences, by targets."""
    for name, words in TARGETS.items():
        if status := command(["export", *([] if run is None else [str(run)]), name, *words]):
            raise SystemExit(status)
    system = system_of(run)
    names = chapter_code(system, source, target)
    with contextlib.ExitStack() as stack:
        own = own_decoders(system, stack)
        took = seconds({**own, **decoders(names)}, names["ids"])
        outputs = {name: decode(names["ids"]) for name, decode in own.items()}
    apart = {}
    for name in TARGETS:
        to = TARGETS[name][1]
        whole, scores = names[f"by_{to}"](*([name] if to == "ctranslate2" else []))
        outputs[name] = [
            one[: len(ids) + EXTRA] for one, ids in zip(whole, names["ids"], strict=True)
        ]
        apart[name] = {"apart": float((scores - names["known"]).abs().max())}
    return {
        name: {
            "identical": sum(map(eq, found, outputs["ours"])),
            "bleu": names["bleu"](found),
            **apart.get(name, {}),
            "seconds": took[name],
        }
        for name, found in outputs.items()
    }


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Work in a folder that is deleted afterwards."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def main() -> None:
    """Parse the options, measure, print, and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exports", description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="folder of a system; else the package's")
    parser.add_argument("--corpus", default="multi30k")
    parser.add_argument("--split", default="test_2016_flickr", help="what is translated")
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--mirror", help="folder with the corpus's files")
    parser.add_argument("--record", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = options.run and options.run.resolve()
    pair = "-".join(system_of(run).languages)
    corpus = load_corpus(options.corpus, pair, options.split, mirror=options.mirror)
    text = corpus.head(options.sentences)
    with elsewhere():
        rows = measure(run, list(text.source), list(text.target))
    for name, row in rows.items():
        print(f"{name:12}", {key: round(value, 6) for key, value in row.items()})
    if options.record:
        place = {"hardware": processor_name(), "corpus": options.corpus, "split": options.split}
        if run:
            place["run"] = json.loads((run / "record.json").read_text(encoding="utf-8"))["command"]
        place["load_average"] = round(os.getloadavg()[0], 2)
        record = {**origin("benchmarks.exports"), "kind": "exports", **place}
        record |= {"sentences": len(text), "rows": rows}
        keep(record, options.record)


if __name__ == "__main__":
    main()
