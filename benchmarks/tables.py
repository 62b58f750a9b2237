"""Write the tables of ``README.md`` and ``benchmarks/README.md`` from the records.

``python -m benchmarks.tables`` puts each table between its marks; with ``--check`` it lists what is
stale, and changes nothing. The tests do the latter.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "benchmarks/README.md")
NAMES = {
    "article": "The Annotated Transformer (2018)",
    "torch.nn.Transformer": "torch.nn.Transformer",
    "hugging_face": "Hugging Face",
    "x_transformers": "x-transformers",
    "opennmt": "OpenNMT-py",
    "fairseq": "fairseq",
    "ctranslate2": "CTranslate2",
}
BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = Sequence[str]


def record(path: str) -> dict[str, Any]:
    """Return a record."""
    data: dict[str, Any] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return data


def table(head: Row, rows: Iterable[Row]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def ratio(task: dict[str, Any], name: str, figure: str = "median_s") -> str:
    """Return a contender's figure, with ours as 1, or a dash if it was not measured."""
    return f"{task[name][figure] / task['ours'][figure]:.2f}" if name in task else "–"


def peers() -> str:
    """Every other library in one row: its time, with ours as 1."""
    trained = record("benchmarks/trainers.json")["tasks"]
    basic = record("benchmarks/record.json")["tasks"]
    first, second = basic, record("benchmarks/searches.json")["tasks"]
    rows = []
    for name, title in NAMES.items():
        steps = [trained["others base"], trained["equal base"]]
        if name == "article":
            steps = [basic["train base"], {}]
        found = [ratio(step, name) for step in steps]
        for kind in ("greedy", "beam", "one"):
            task = f"search {kind}"
            both = [ratio(tasks[task], name) for tasks in (first, second) if task in tasks]
            found.append("–" if {*both} == {"–"} else " and ".join(both))
        if name == "article":
            found[2] = ratio(basic["decode base"], name)
        rows.append([title, *found])
    head = [
        "its time, ours = 1", "training step, as it comes", "training step, all alike",
        "greedy, 32 sentences", "beam 4, 32 sentences", "greedy, one sentence",
    ]  # fmt: skip
    return table(head, rows)


def trainers(kind: str) -> str:
    """Training steps compared with those of other libraries, at both sizes, by both clocks."""
    tasks = [record("benchmarks/trainers.json")["tasks"][f"{kind} {n}"] for n in ("small", "base")]
    rows = [
        [NAMES[name], *(ratio(t, name, figure) for t in tasks for figure in ("median_s", "busy_s"))]
        for name in tasks[0]
        if name != "ours"
    ]
    head = ["its time, ours = 1", "small", "small, processor time", "base", "base, processor time"]
    return table(head, rows)


def beside(path: str) -> str:
    """Every task of a record: the times of others, and the memory of ours."""
    rows = []
    for name, task in record(path)["tasks"].items():
        for other in task:
            if other != "ours":
                memory = task["ours"]["memory_mb"] / task[other]["memory_mb"]
                rows.append([name, NAMES[other], ratio(task, other), f"{memory:.2f}"])
    return table(["task", "compared with", "its time, ours = 1", "our memory, its = 1"], rows)


def processes() -> str:
    """One process compared with two."""
    small, base = (record("benchmarks/processes.json")["seconds"][n] for n in ("small", "base"))
    rows = [[name, f"{small[name]:.3f}", f"{base[name]:.3f}"] for name in small]
    return table(["seconds of an update", "small", "base"], rows)


def _spread(task: dict[str, Any]) -> str:
    """Return the lowest and the highest ratio of a task, with their names."""
    ratios = sorted((float(ratio(task, name)), NAMES[name]) for name in task if name != "ours")
    (low, one), (high, other) = ratios[0], ratios[-1]
    return f"{low:.1f} ({one}) to {high:.1f} ({other})"


def _multi30k() -> tuple[str, str, str]:
    """Return our BLEU, the minutes of a run, and the published BLEU, counted alike."""
    found, minutes = [], []
    for seed in range(3):
        name = f"multi30k-en-de-tiny-lower-{seed}.json"
        minutes.append(record(f"results/{name}")["seconds"] / 60)
        found += [
            step["protocols"]["tokenised lower-case"]["bleu"]
            for step in record(f"results/ablation-{name}")["steps"]
            if step["name"] == "beam 5, alpha 0.6, averaged"
        ]
    chapter = (ROOT / "book/results/machine_translation.md").read_text(encoding="utf-8")
    (published,) = re.findall(r"^PUBLISHED = ([\d.]+)$", chapter, re.MULTILINE)
    return f"{fmean(found):.1f}", f"{fmean(minutes):.0f}", f"{float(published):.1f}"


def results() -> str:
    """The README's first table: ours next to what was published, or what others take."""
    bleu, minutes, published = _multi30k()
    page = "book/results/machine_translation.md"
    made = record("results/pretrained/model.json")
    right = [made["scores"]["stored"][pair]["exact"]["right"] for pair in ("de-en", "en-de")]
    trained = record("benchmarks/trainers.json")["tasks"]
    both = [record(f"benchmarks/{name}.json") for name in ("searches", "record")]
    found = [one["tasks"]["search greedy"] for one in both]
    greedy = [
        f"{' and '.join(f'{float(ratio(task, name)):.1f}' for task in found)} ({NAMES[name]})"
        for name in ("ctranslate2", "hugging_face")
    ]
    exported = record("results/exports-multi30k.json")["rows"]
    small = "; ".join(
        f"{exported[key]['seconds'] / exported['ours']['seconds']:.1f} ({NAMES[name]})"
        for key, name in (("ctranslate2", "ctranslate2"), ("huggingface", "hugging_face"))
    )
    rows = [
        [f"English to German, Multi30k test 2016, mean of three runs of {minutes} minutes on two "
         "processor cores", f"{bleu} BLEU", f"[{published}]({page}) (Wu et al., 2021, same size)"],
        ["English to German, WMT 2014, the paper's task", f"[not run yet]({page})",
         "27.3 (base), 28.4 (big) BLEU (the paper)"],
        ["The model that comes with the package "
         f"({sum(made['bytes'].values()) / 1e6:.1f} MB), on 1,000 new sentences of its language",
         f"{right[0]} exactly right from German, {right[1]} into German", "–"],
        ["Time of a training step, the paper's base size, two cores", "1",
         f"{_spread(trained['others base'])}; on equal terms (the same matrix products, memory "
         f"settings and dropout for all) {_spread(trained['equal base'])}"],
        ["Time of greedy decoding, the paper's base size with random weights, outputs of 60 "
         "tokens, on two kinds of processor", "1", "; ".join(greedy)],
        ["The same with our small Multi30k system, 500 sentences, one thread", "1", small],
    ]  # fmt: skip
    return table(["What", "Ours", "Published, or others"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "results": results,
    "peers": peers,
    "trainers": lambda: trainers("others"),
    "trainers-alike": lambda: trainers("equal"),
    "record": lambda: beside("benchmarks/record.json"),
    "searches": lambda: beside("benchmarks/searches.json"),
    "int8": lambda: beside("benchmarks/int8.json"),
    "processes": processes,
}


def filled(text: str) -> str:
    """Return a page with every table as the records have it."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def run(*, check: bool, root: Path = ROOT) -> list[str]:
    """Write the tables, or only look; return the pages that were stale."""
    stale = []
    for name in PAGES:
        path = root / name
        before = path.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            stale.append(name)
            if not check:
                path.write_text(after, encoding="utf-8")
    return stale


def main() -> int:
    """Write or check; return the status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; list stale pages")
    check = parser.parse_args().check
    for name in (stale := run(check=check)):
        print(f"{'stale' if check else 'wrote'} {name}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
