"""What the README says of results is what the records say."""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def record(path: str) -> Any:
    """Return a record."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def row(start: str) -> str:
    """Return the result in the row of the README's first table that begins like this."""
    (found,) = re.findall(rf"^\| {re.escape(start)}.*\| (.*) \|$", README, re.MULTILINE)
    return str(found)


def test_translation() -> None:
    """BLEU as the published figure is counted, with its search: beam 5, α 0.6, averaged."""
    found = []
    for seed in range(3):
        (step,) = [
            step
            for step in record(f"results/ablation-multi30k-en-de-tiny-lower-{seed}.json")["steps"]
            if step["name"] == "beam 5, alpha 0.6, averaged"
        ]
        found.append(step["protocols"]["tokenised lower-case"]["bleu"])
    assert row("English to German").startswith(f"{fmean(found):.1f} BLEU")
    runs = [record(f"results/multi30k-en-de-tiny-lower-{seed}.json") for seed in range(3)]
    minutes = round(fmean(run["seconds"] for run in runs) / 60)
    assert f"three runs of {minutes} minutes each" in README
    assert all(run["hardware"]["processes"] == 2 for run in runs)


def test_the_model_that_comes_with_the_package() -> None:
    made = record("results/pretrained/model.json")
    right = [made["scores"]["stored"][pair]["exact"]["right"] for pair in ("de-en", "en-de")]
    assert row("The small model") == "{} exactly right from German, {} into German".format(*right)
    assert f"{sum(made['bytes'].values()) / 1e6:.1f} MB" in README


def test_greedy_decoding() -> None:
    task = record("benchmarks/searches.json")["tasks"]["search greedy"]
    others = ("hugging_face", "ctranslate2")
    ratios = {f"{task[name]['median_s'] / task['ours']['median_s']:.1f}" for name in others}
    assert {f"{ratio} times as fast as either, same tokens" for ratio in ratios} == {
        row("Greedy decoding")
    }
