"""What the READMEs say of results is what the records say, and what they name is there."""

import json
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import annotated_transformer
from annotated_transformer.engine.precision import find_device
from benchmarks import tables

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def record(path: str) -> Any:
    """Return a record."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def row(start: str) -> list[str]:
    """Return what stands in the row of the README's first table that begins like this."""
    (found,) = re.findall(rf"^\| {re.escape(start)}.* \|$", README, re.MULTILINE)
    return [cell.strip() for cell in found.split("|")[1:-1]]


def test_tables_are_those_of_the_records() -> None:
    """Where this fails: ``python -m benchmarks.tables``."""
    assert tables.run(check=True) == []
    found = [name for page in tables.PAGES for _, name, _ in tables.BLOCK.findall(
        (ROOT / page).read_text(encoding="utf-8"))]  # fmt: skip
    assert sorted(found) == sorted(tables.TABLES)


def test_stale_table_is_noticed(tmp_path: Path) -> None:
    for page in tables.PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    path = tmp_path / "README.md"
    path.write_text(README.replace("41.1 BLEU", "41.2 BLEU"), encoding="utf-8")
    assert tables.run(check=True, root=tmp_path) == ["README.md"]
    assert path.read_text(encoding="utf-8") != README
    assert tables.run(check=False, root=tmp_path) == ["README.md"]
    assert path.read_text(encoding="utf-8") == README


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
    what, ours, published = row("English to German, Multi30k")
    assert ours == f"{fmean(found):.1f} BLEU"
    assert published.startswith("[41.0]")  # 41.02, as the chapter cites it
    runs = [record(f"results/multi30k-en-de-tiny-lower-{seed}.json") for seed in range(3)]
    minutes = round(fmean(run["seconds"] for run in runs) / 60)
    assert f"three runs of {minutes} minutes on two processor cores" in what
    assert all(run["hardware"]["processes"] == 2 for run in runs)


def test_what_is_not_run_yet_is_called_so() -> None:
    """A record of the paper's task needs its figures in the table."""
    files = (ROOT / "results").glob("*.json")
    corpora = {record(f"results/{path.name}").get("options", {}).get("corpus") for path in files}
    assert "multi30k" in corpora
    assert "wmt14" not in corpora
    assert row("English to German, WMT 2014")[1].startswith("[not run yet]")


@pytest.mark.parametrize("page", ["README.md", "book/engineering/using.md"])
def test_gpu_that_is_not_taken_by_itself_is_named(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that it is not yet run, as long as no record is of one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert (find_device("auto"), find_device("mps")) == ("cpu", "mps")
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert "NVIDIA GPU" in text
    assert "`--device mps`, which we have not run yet" in text
    records = [path.read_text(encoding="utf-8") for path in (ROOT / "results").rglob("*.json")]
    assert not [text for text in records if re.search(r'"device": "mps|--device mps', text)]


def test_recipes_of_five_lines() -> None:
    """Each is told in Python, in cells of at most five lines."""
    text = (ROOT / "book" / "engineering" / "using.md").read_text(encoding="utf-8")
    recipes = re.findall(r"(?ms)^## \d+\. [^\n]+\n(.*?)(?=^## )", text)
    assert len(recipes) == 11
    for recipe in recipes:
        found = re.findall(r"(?s)```\{code-cell\}\n((?::tags:[^\n]+\n\n)?)(.*?)```", recipe)
        lengths = [len(code.splitlines()) for tags, code in found if "checked" not in tags]
        assert 1 <= max(lengths) <= 5


def test_the_model_that_comes_with_the_package() -> None:
    made = record("results/pretrained/model.json")
    right = [made["scores"]["stored"][pair]["exact"]["right"] for pair in ("de-en", "en-de")]
    what, ours, _ = row("The model that comes")
    assert ours == "{} exactly right from German, {} into German".format(*right)
    assert f"{sum(made['bytes'].values()) / 1e6:.1f} MB" in what


def test_times() -> None:
    tasks = [
        record(f"benchmarks/{n}.json")["tasks"]["search greedy"] for n in ("searches", "record")
    ]
    for name, title in (("hugging_face", "Hugging Face"), ("ctranslate2", "CTranslate2")):
        ratios = [f"{task[name]['median_s'] / task['ours']['median_s']:.1f}" for task in tasks]
        assert f"{' and '.join(ratios)} ({title})" in row("Time of greedy decoding")[2]
    task = record("benchmarks/trainers.json")["tasks"]["others base"]
    ratios = sorted(task[n]["median_s"] / task["ours"]["median_s"] for n in task if n != "ours")
    told = re.findall(r"[\d.]+", row("Time of a training step")[2].split(";")[0])
    assert told == [f"{ratios[0]:.1f}", f"{ratios[-1]:.1f}"]


def test_words_and_minutes_in_the_text() -> None:
    words = record("annotated_transformer/pretrained/words.json")
    count = f"{round(sum(map(len, words.values())), -2):,} words of"
    using = (ROOT / "book/engineering/using.md").read_text(encoding="utf-8")
    assert count in README
    assert count in using
    minutes = re.findall(r"three runs of (\d+) minutes", row("English to German, Multi30k")[0])
    assert re.findall(r"about (\d+) minutes on two cores", README) == minutes


# --- what is named is there -------------------------------------------------------------


PAGES = "README.md SECURITY.md CONTRIBUTING.md CHANGELOG.md benchmarks/README.md".split()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [one for one in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) if "://" not in one]
    assert [one for one in links if not (ROOT / page).parent.joinpath(one).exists()] == []


def test_names_that_the_readme_imports_are_there() -> None:
    (names,) = re.findall(r"from annotated_transformer import (\w.*)", README)
    assert {name.strip() for name in names.split(",")} <= set(annotated_transformer.__all__)


def test_security_note_names_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    files = re.findall(r"`(tests/[\w/.]+\.py)`", text)
    assert len(files) >= 5
    assert [file for file in files if not (ROOT / file).exists()] == []
