"""``ablation`` adds beam search, length penalty and averaging one by one and scores each."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from annotated_transformer.cli.options import Ablation
from annotated_transformer.cli.output import check_target, command_line, print_result
from annotated_transformer.cli.systems import TEST, corpus_of, load_split, move_to_device
from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.data.files import digest_of_lines, write_json
from annotated_transformer.engine.checkpoints import AVERAGED, WEIGHTS, load_system
from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.precision import find_device
from annotated_transformer.engine.records import CHOSEN, hardware, origin
from annotated_transformer.engine.system import System, translate_lines
from annotated_transformer.engine.treebanks import is_parser
from annotated_transformer.translation.evaluation import (
    by_length,
    paired_bootstrap,
    score,
    score_protocols,
)

SEARCHES = (  # name, weights file, beam, alpha
    ("greedy", WEIGHTS, 1, 0.0),
    ("beam 4", WEIGHTS, 4, 0.0),
    ("beam 4, alpha 0.6", WEIGHTS, 4, 0.6),
    ("beam 4, alpha 0.6, averaged", AVERAGED, 4, 0.6),
    ("beam 5, alpha 0.6, averaged", AVERAGED, 5, 0.6),
)
ALPHAS = (0.2, 0.6, 1.0, 1.4)  # to choose from


def run(command: Ablation) -> int:
    """Translate and score with each search, and write the record."""
    path, bar = command.record or command.model / "ablation.json", not command.quiet
    names = ("config", "record", "tokenizer", "source", "target")
    own = [*command.model.glob("*.safetensors"), *(command.model / f"{x}.json" for x in names)]
    check_target("--record", path, *own)
    system = load_system(command.model, weights=WEIGHTS)
    if is_parser(system.languages):
        raise UsageError(f"{command.model}: is a parser; use the command evaluate")
    if (corpus := corpus_of(system)) not in TEST:
        raise UsageError(f"{command.model}: was trained on {corpus}; needs {', '.join(TEST)}")
    averaged = load_system(command.model, weights=AVERAGED)  # loaded early, in case it is missing
    for each in (system, averaged):
        move_to_device(each, find_device())
    split, pair = command.split or TEST[corpus], "-".join(system.languages)
    test = load_split(corpus, pair, split, mirror=command.mirror, bar=bar)
    steps: list[dict[str, Any]] = []
    before: list[str] | None = None
    for name, weights, beam, alpha in SEARCHES:
        chosen = averaged if weights == AVERAGED else system
        step, before = measure_search(chosen, test, beam, alpha, before, bar=bar)
        steps.append({"name": name, **step})
        show_step(steps[-1])
    if split != "val":  # alpha must not be chosen on the text that is scored
        valid = load_split(corpus, pair, "val", mirror=command.mirror, bar=bar)
        found = {alpha: lower_case_bleu(averaged, valid, alpha, bar=bar) for alpha in ALPHAS}
        best = max(ALPHAS, key=found.__getitem__)
        step, _ = measure_search(averaged, test, 5, best, before, bar=bar)
        steps.append({"name": CHOSEN, "alpha": best, "validation": found, **step})
        show_step(steps[-1])
    record = {
        "kind": "ablation",
        **origin(command_line()),
        "training": system.training,
        "corpus": test.name,
        "split": test.split,
        "checksums": dict(test.checksums),
        "hardware": hardware(system),
        "steps": steps,
    }
    write_json(path, record)
    return 0


def measure_search(
    system: System, test: ParallelText, beam: int, alpha: float, before: Sequence[str] | None,
    *, bar: bool,
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """Translate with one search; return its entry for the record, and the translations."""
    start = time.perf_counter()
    found = translate_lines(system, test.source, beam=beam, alpha=alpha, progress=bar)
    step: dict[str, Any] = {
        "seconds": round(time.perf_counter() - start, 1),
        "scores": score(found, test.target, lowercase=system.lowercase),
        "protocols": score_protocols(found, test.target, test.languages[1]),
        "by_length": by_length(found, test.target, test.source, lowercase=system.lowercase),
    }
    step["sha256"] = digest_of_lines(found)
    if before is not None:
        compared = paired_bootstrap(before, found, test.target, lowercase=system.lowercase)
        step["gain"] = round(compared.second - compared.first, 2)
        step["interval"] = [round(compared.low, 2), round(compared.high, 2)]
        step["p"] = round(compared.p, 4)
    return step, found


def lower_case_bleu(system: System, text: ParallelText, alpha: float, *, bar: bool) -> float:
    """Return tokenised lower-case BLEU of a beam of 5 with a length penalty."""
    found = translate_lines(system, text.source, beam=5, alpha=alpha, name=text.split, progress=bar)
    way = score_protocols(found, text.target, text.languages[1])["tokenised lower-case"]
    return float(way["bleu"])


def show_step(step: Mapping[str, Any]) -> None:
    """Print BLEU and its gain over the previous step."""
    gain, chosen = "", f" ({step['alpha']})" if "alpha" in step else ""
    if "gain" in step:
        low, high = step["interval"]
        gain = f"{step['gain']:+.2f} ({low:+.2f} to {high:+.2f}, p = {step['p']:.3f})"
    print_result(f"{step['scores']['bleu']:6.2f}  {step['name'] + chosen:44}{gain}".rstrip())
