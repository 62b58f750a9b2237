"""``ablation`` and its record."""

import hashlib
from pathlib import Path

import pytest
import sacrebleu

from annotated_transformer.cli import ablation, systems
from annotated_transformer.cli.main import main
from annotated_transformer.data.corpora import ParallelText, load_corpus
from annotated_transformer.data.records import ABLATION, read_records
from annotated_transformer.engine.checkpoints import load_system
from annotated_transformer.engine.records import CHOSEN
from annotated_transformer.engine.system import System, translate_lines
from annotated_transformer.translation.evaluation import by_length
from tests.cli.command import SIZES, Capture, fails, of_grammar


def test_ablation_leaves_a_record(
    trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "was trained on files" in fails(capsys, "ablation", trained)
    of_grammar(trained, tmp_path / "copy")
    monkeypatch.setattr(systems, "load_corpus", lambda *a, **_: load_corpus(*a, size=4))
    averaged = tmp_path / "copy" / "averaged.safetensors"
    whole = averaged.read_bytes()
    averaged.unlink()
    assert "averaged.safetensors: missing; train with --average" in fails(
        capsys, "ablation", tmp_path / "copy"
    )  # and nothing was printed: no search was made in vain
    averaged.write_bytes(whole)
    for own in ("config.json", "model.safetensors"):
        words = ("ablation", tmp_path / "copy", "--record", tmp_path / "copy" / own)
        assert "is also the input" in fails(capsys, *words)
    assert main(["ablation", str(tmp_path / "copy"), "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(ablation.SEARCHES) + 1
    records = read_records(tmp_path / "copy", ABLATION)
    assert set(records["ablation"]["hardware"]) == {"processor", "threads", "gpu"}
    steps = records["ablation"]["steps"]
    names = [*(name for name, *_ in ablation.SEARCHES), CHOSEN]
    assert [step["name"] for step in steps] == names
    assert sorted(steps[-1]["validation"]) == sorted(map(str, ablation.ALPHAS))
    best = max(steps[-1]["validation"].values())
    assert steps[-1]["validation"][str(steps[-1]["alpha"])] == best
    assert all(step["scores"]["sentences"] == 4 for step in steps)
    assert all(set(step) >= {"p", "gain", "interval", "sha256"} for step in steps[1:])
    text = (tmp_path / "copy" / "ablation.json").read_text(encoding="utf-8")
    assert not any(line in text for line in load_corpus("grammar", split="test", size=4).target)


def test_capitals_do_not_count_for_a_system_that_writes_none(
    texts: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*SIZES.split(), *texts, "--tokenizer", "bpe-lower", "--out", str(tmp_path / "t")]
    assert main(["train", *words]) == 0
    told = capsys.readouterr().out
    assert "case:lc" in told
    assert "case:mixed" not in told
    folder = of_grammar(tmp_path / "t", tmp_path / "copy")
    monkeypatch.setattr(systems, "load_corpus", lambda *a, **_: load_corpus(*a, size=4))
    assert main(["evaluate", str(folder), "--beam", "1", "--quiet"]) == 0
    assert "case:lc" in capsys.readouterr().out
    system, test = load_system(folder), load_corpus("grammar", split="test", size=4)
    step, found = ablation.measure_search(system, test, 1, 0.0, test.target, bar=False)
    bleu = sacrebleu.BLEU(lowercase=True).corpus_score(found, [list(test.target)]).score
    assert step["scores"]["bleu"] == round(bleu, 2)
    assert step["gain"] == round(bleu - 100, 2)  # over the references, which are perfect
    assert step["by_length"] == by_length(found, test.target, test.source, lowercase=True)


def test_ablation_takes_the_penalty_of_the_validation_text(
    trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = of_grammar(trained, tmp_path / "copy")
    monkeypatch.setattr(systems, "load_corpus", lambda *a, **_: load_corpus(*a, size=3))
    test = load_corpus("grammar", split="test", size=3)
    seen: list[tuple[str, float]] = []

    def best_at_one(system: System, text: ParallelText, alpha: float, **_: object) -> float:
        seen.append((text.split, alpha))
        return -abs(alpha - 1.0)

    monkeypatch.setattr(ablation, "lower_case_bleu", best_at_one)
    assert main(["ablation", str(folder), "--quiet"]) == 0
    assert "by validation, averaged (1.0)" in capsys.readouterr().out
    assert seen == [("val", alpha) for alpha in ablation.ALPHAS]
    last = read_records(folder, ABLATION)["ablation"]["steps"][-1]
    system = load_system(folder, weights="averaged.safetensors")
    expected = translate_lines(system, test.source, beam=5, alpha=1.0)
    assert last["sha256"] == hashlib.sha256("\n".join(expected).encode()).hexdigest()
    assert main(["ablation", str(folder), "--split", "val", "--quiet"]) == 0
    steps = read_records(folder, ABLATION)["ablation"]["steps"]
    assert [step["name"] for step in steps] == [name for name, *_ in ablation.SEARCHES]
