"""A sweep trains every run once, goes on where it stopped, and keeps what BLEU is counted from."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import statistics
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU

from annotated_transformer.cli import sweep
from annotated_transformer.cli.main import main
from annotated_transformer.cli.sweep import (
    SweepError,
    decode_bleu_counts,
    encode_bleu_counts,
    run_flops,
    score_difference,
)
from annotated_transformer.data.files import lock_folder
from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.sweep import list_sweeps, load_grid
from annotated_transformer.translation.evaluation import all_counts, bleu_of_counts
from tests.processes import Command

SIZES = {
    "layers": 1, "d_model": 8, "d_ff": 8, "heads": 2, "vocabulary": 280, "max_len": 64,
    "updates": 6, "warmup": 2, "max_tokens": 64, "average": 2, "average_every": 1,
}  # fmt: skip
GOOD: dict[str, Any] = {
    "recipe": "files", "options": SIZES, "seeds": 2, "rows": {"base": {}, "A1": {"heads": 1}},
}  # fmt: skip
LINES = ("Ein Hund schläft .\n", "A dog sleeps .\n")


def write_grid(folder: Path, **changes: Any) -> Path:
    """Write a grid over two small files; None leaves a key out."""
    data = {**GOOD, **changes}
    if data["options"] is SIZES:
        files = []
        for language, line in zip(("de", "en"), LINES, strict=True):
            path = folder / f"text.{language}"
            path.write_text(line * 12, encoding="utf-8")
            files.append(str(path))
        data["options"] = {**SIZES, "train_files": files, "valid_files": files}
    path = folder / "small.json"
    path.write_text(json.dumps({key: v for key, v in data.items() if v is not None}))
    return path


def test_the_package_has_sweeps_that_can_be_trained() -> None:
    for name in list_sweeps():
        grid = load_grid(name)
        assert len(list(grid.runs())) == len(grid.rows) * grid.seeds
        described = grid.described()
        assert len({json.dumps(options) for options in described.values()}) == len(described)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": None}, "'recipe' is missing"),
        ({"recipe": "soup"}, "--recipe soup: neither a file"),
        ({"seeds": "2"}, "'seeds' is missing or no int"),
        ({"seeds": 0}, "1 to 10000 runs"),
        ({"seeds": True}, "'seeds' is missing or no int"),
        ({"rows": {}}, "1 to 10000 runs"),
        ({"rows": {"a b": {}}}, "row 'a b': must be a name"),
        ({"rows": {"../a": {}}}, "row '../a': must be a name"),
        ({"rows": {"a": 1}}, "row 'a': must be a name with an object"),
        ({"rows": {"a": {"head": 1}}}, "row 'a': --head: there is no such option"),
        ({"rows": {"a": {"heads": "1"}}}, "row 'a': --heads"),
        ({"rows": {"a": {"heads": 0}}}, "row 'a': --heads 0: must be at least 1"),
        ({"rows": {"a": {"seed": 3}}}, "row 'a': 'seed' is up to the sweep; leave it out"),
        ({"options": {"steps": 3}}, "row 'base': 'steps' is up to the sweep; leave it out"),
        ({"salt": 1}, "'salt' is none of"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(
    tmp_path: Path, changes: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        load_grid(write_grid(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run a sweep; return its status, and what it printed to the output and beside it."""
    status = main(["sweep", *map(str, words)])
    return status, *capsys.readouterr()


def test_a_sweep_trains_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid, out = write_grid(tmp_path), tmp_path / "runs"
    words = (grid, "--out", out, "--jobs", 2, "--quiet")
    status, _, said = told(capsys, *words, "--plan", "--seeds", 1)
    assert status == 0
    assert "2 rows, 1 seeds; 0 runs are in" in said
    assert re.search(r"2 runs to go, 2 at a time: about 0:\d\d:\d\d without the scoring", said)

    status, table, _ = told(capsys, *words, "--seeds", 1)
    assert status == 0
    path = out / "small.json"
    record = json.loads(path.read_bytes())
    assert [list(row["runs"]) for row in record["rows"].values()] == [["0"], ["0"]]
    assert record["rows"]["A1"]["options"]["heads"] == 1
    assert [path.name for path in out.iterdir()] == ["small.json"]  # the runs are tidied away
    run = record["rows"]["base"]["runs"]["0"]
    counts = decode_bleu_counts(run["counts"])
    assert counts.shape == (12, 10)
    assert round(float(bleu_of_counts(counts.sum(0))), 2) == run["bleu"]
    assert re.search(rf"^base +{run['parameters']:,} ", table, re.MULTILINE)

    path.write_text(json.dumps(record | {"mark": 1}))
    status, _, said = told(capsys, *words, "--seeds", 2, "--rows", "A1", "--keep")
    assert status == 0
    assert "1 runs to go" in said
    again = json.loads(path.read_bytes())
    assert again["mark"] == 1  # what was there has stayed
    assert again["rows"]["base"] == record["rows"]["base"]
    assert list(again["rows"]["A1"]["runs"]) == ["0", "1"]

    other = json.loads(grid.read_bytes())
    other["rows"]["A1"]["heads"] = 4
    grid.write_text(json.dumps(other))
    status, _, said = told(capsys, *words)
    assert status == 2
    assert "row A1 has other options; name another file" in said

    new = ("--record", tmp_path / "new.json", "--seeds", 2, "--rows", "A1")
    status, _, said = told(capsys, *words, *new)  # where the run of the other grid was kept
    assert status == 2
    assert "its run was started with --heads 1, not 4" in (out / "A1-1" / "log.txt").read_text()
    assert (
        not (tmp_path / "new.json").exists()
        or "1" not in json.loads((tmp_path / "new.json").read_bytes())["rows"]["A1"]["runs"]
    )
    (tmp_path / "odd.json").write_text("[]")
    status, _, said = told(capsys, *words, "--record", tmp_path / "odd.json")
    assert status == 2
    assert "is no record of a sweep" in said


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"heads": 3}, "--d-model 8 is not a multiple of --heads 3"),  # before the first run begins
        ({"max_tokens": 2}, "row odd, seed 0 failed: --max-tokens 2: "),
    ],
)
def test_a_run_that_fails_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: dict[str, int], what: str
) -> None:
    rows = {"base": {}, "odd": odd}
    grid, out = write_grid(tmp_path, rows=rows, seeds=1), tmp_path / "runs"
    status, _, said = told(capsys, grid, "--out", out, "--jobs", 1, "--quiet")
    assert status == 2
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert "row odd" in last
    assert what in last
    assert (out / "small.json").exists() == ("heads" not in odd)


def test_two_sweeps_may_share_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first one trains its row, another one trains the other row."""
    (out := tmp_path / "runs").mkdir()
    record, own = out / "both.json", ("--record", out / "both.json", "--quiet", "--seeds", 1)
    grid = write_grid(tmp_path)
    words, others = ((grid, *own, "--out", out / name, "--rows") for name in "12")
    result = {"parameters": 1, "loss": 1.0, "bleu": 1.0, "texts": {}}

    def trained(left: list[tuple[str, int, Any]], *_: Any, keep: bool) -> Iterator[Any]:
        ((row, seed, _),) = left
        if row == "base":
            assert told(capsys, *others, "A1")[0] == 0
            failed, *texts = told(capsys, *words, "base")
            assert failed == 2
            assert "another sweep works there; wait until it ends, or give another" in texts[1]
        yield row, seed, result

    locked: list[Path] = []

    def lock(folder: Path, *, wait: bool) -> contextlib.AbstractContextManager[None]:
        locked.append(folder)
        return lock_folder(folder, wait=wait)

    monkeypatch.setattr(sweep, "lock_folder", lock)
    monkeypatch.setattr(sweep, "results_as_completed", trained)
    monkeypatch.setattr(sweep, "plan", lambda *_: "")
    status, table, _ = told(capsys, *words, "base")
    assert status == 0
    assert locked == [out, out]  # where the record is
    rows = json.loads(record.read_bytes())["rows"]
    assert {row: list(found["runs"]) for row, found in rows.items()} == {"base": ["0"], "A1": ["0"]}
    assert re.search(r"^A1 ", table, re.MULTILINE)


def test_the_base_is_the_grids_first_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever row was trained first; while the base has no run, nothing is compared."""
    words = (write_grid(tmp_path), "--out", tmp_path / "runs", "--quiet")
    status, table, _ = told(capsys, *words, "--rows", "A1")
    assert status == 0
    assert "(" not in table
    status, table, _ = told(capsys, *words)
    assert status == 0
    assert re.search(r"^A1 .* BLEU \(", table, re.MULTILINE)
    assert not re.search(r"^base .*\(", table, re.MULTILINE)


def test_what_another_sweep_has_recorded_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is the last that was to be done."""
    grid, runs = write_grid(tmp_path, seeds=1), tmp_path / "runs"
    runs.mkdir()
    run = {"seconds": 1.0, "search_seconds": 1.0, "parameters": 1, "loss": 1.0, "bleu": 1.0}
    rows = {row: {"options": o, "runs": {}} for row, o in load_grid(grid).described().items()}
    record: dict[str, Any] = {"hardware": sweep.describe_hardware("cpu"), "rows": rows}

    def plan(*_: object) -> str:
        """Meanwhile, the other one records all."""
        for found in rows.values():
            found["runs"] = {"0": run}
        (runs / "small.json").write_text(json.dumps(record), encoding="utf-8")
        return ""

    monkeypatch.setattr(sweep, "plan", plan)
    status, table, said = told(capsys, grid, "--out", runs, "--quiet", "--jobs", 1)
    assert status == 0, said
    assert said.count("another sweep has recorded it") == 2
    assert re.search(r"^A1 ", table, re.MULTILINE)
    assert [path.name for path in runs.iterdir()] == ["small.json"]


def test_a_row_that_was_never_run_may_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--out", tmp_path / "runs", "--quiet", "--seeds", 1)
    odd = write_grid(tmp_path, rows={"base": {}, "A1": {"heads": 3}})  # no model can be built
    assert told(capsys, odd, *words, "--rows", "base")[0] == 0
    status, table, _ = told(capsys, write_grid(tmp_path), *words)
    assert status == 0
    assert re.search(r"^A1 ", table, re.MULTILINE)


def test_runs_on_other_text_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in one record, and not where a finished run was kept."""
    grid, out = write_grid(tmp_path, seeds=1), tmp_path / "runs"
    words = (grid, "--out", out, "--quiet", "--keep")
    assert told(capsys, *words, "--rows", "base")[0] == 0
    text = tmp_path / "text.de"
    text.write_text(text.read_text(encoding="utf-8").replace("Hund", "Hase"), encoding="utf-8")
    before = (out / "small.json").read_bytes()
    status, _, said = told(capsys, *words)
    assert status == 2
    assert "row A1, seed 0 read other text than row base of the record; give back" in said
    assert (out / "small.json").read_bytes() == before
    status, _, said = told(capsys, *words, "--record", tmp_path / "new.json")
    assert status == 2
    assert "row base, seed 0: " in said
    assert "its run was started with another text" in said
    only = ("--rows", "A1", "--record", tmp_path / "new.json")
    assert told(capsys, *words, *only)[0] == 0  # nothing was lost


def test_a_grid_takes_what_was_fixed_when_its_corpus_was_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_grid(tmp_path)
    files = [str(tmp_path / f"text.{x}") for x in ("de", "en")]
    made = ["prepare", str(tmp_path / "p"), "--train-files", *files, "--valid-files", *files]
    assert main([*made, "--vocabulary", "280", "--max-len", "64", "--quiet", "--workers", "1"]) == 0
    own = {name: value for name, value in SIZES.items() if name not in ("vocabulary", "max_len")}
    options = {**own, "corpus": "prepared", "prepared": str(tmp_path / "p")}
    grid = write_grid(tmp_path, recipe="paper-base-en-de", options=options, seeds=1)
    words = (grid, "--out", tmp_path / "runs", "--quiet")
    status, _, said = told(capsys, *words)
    assert status == 0, said
    rows = json.loads((tmp_path / "runs" / "small.json").read_bytes())["rows"]
    fixed = [(row["options"]["vocabulary"], row["options"]["pair"]) for row in rows.values()]
    assert fixed == [(280, "de-en")] * 2


def test_why_a_run_failed(tmp_path: Path) -> None:
    log: Any = tmp_path / "log.txt"
    killed, failed = SimpleNamespace(exitcode=-9), SimpleNamespace(exitcode=2)
    assert sweep.why_failed(killed, log) == f"ended by SIGKILL; its log is {log}"  # type: ignore[arg-type]
    assert sweep.why_failed(failed, log) == f" ({log})"  # type: ignore[arg-type]
    log.write_text("one\nannotated-transformer: two\n")
    assert sweep.why_failed(failed, log) == f"two ({log})"  # type: ignore[arg-type]


def test_what_the_user_sets_is_not_blamed_on_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, said = told(capsys, write_grid(tmp_path), "--mirror", tmp_path)
    assert status == 2
    assert said.rstrip().endswith("--mirror: --corpus files needs no download; leave it out")
    grid = write_grid(tmp_path, options={"device": "cpu"}, recipe="grammar")
    assert load_grid(grid, {}).rows["base"].run.device == "cpu"


def test_an_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    grid = write_grid(tmp_path)
    words = ["sweep", str(grid), "--out", str(tmp_path / "runs"), "--jobs", "2", "--quiet"]
    first = Command(words, tmp_path / "first.err")
    record = tmp_path / "runs" / "small.json"
    while not record.exists() and first.running():
        time.sleep(0.05)
    first.signal(signal.SIGTERM)
    status, said = first.end()
    assert status == 143
    assert said.splitlines()[-1].endswith("interrupted; run the same command to resume")
    assert "Traceback" not in said
    before = json.loads(record.read_bytes())
    assert Command(words, tmp_path / "again.err").end()[0] == 0
    after = json.loads(record.read_bytes())
    for row, found in before["rows"].items():
        for seed, run in found["runs"].items():
            assert after["rows"][row]["runs"][seed] == run
    assert all(len(found["runs"]) == 2 for found in after["rows"].values())


def test_a_sweep_of_parsers_measures_f1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for language, line in (("en", "a dog sleeps .\n"), ("trees", "(S DT NN (VP VBZ )VP . )S\n")):
        path = tmp_path / f"dogs.{language}"
        path.write_text(line * 12, encoding="utf-8")
        files.append(str(path))
    options = {**SIZES, "pair": "en-trees", "train_files": files, "valid_files": files}
    grid = write_grid(tmp_path, options={**options, "vocabulary": 265})
    out = tmp_path / "runs"
    status, table, _ = told(capsys, grid, "--out", out, "--jobs", 2, "--quiet", "--seeds", 2)
    assert status == 0
    record = json.loads((out / "small.json").read_bytes())
    assert record["search"] == {"beam": 21, "alpha": 0.3}
    for row in record["rows"].values():
        for run in row["runs"].values():
            assert "bleu" not in run
            assert run["split"] == "val"
            for name in ("free", "constrained"):
                found = run[name]
                gold, test, matched = (
                    sum(map(int, found[key].split())) for key in ("gold", "test", "matched")
                )
                assert gold == 12 * 2
                assert found["f1"] == pytest.approx(200 * matched / (gold + test), abs=0.01)
            assert run["search_seconds"] > 0
    f1 = [run["constrained"]["f1"] for run in record["rows"]["A1"]["runs"].values()]
    assert re.search(rf"^A1 .* {statistics.fmean(f1):.2f}   .*F1 \(", table, re.MULTILINE)
    assert "BLEU" not in table


def test_a_plan_takes_no_pace_from_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It then measures its own, from twenty updates."""
    grid = load_grid(str(write_grid(tmp_path)))
    options = grid.rows["base"]
    here, theirs = sweep.describe_hardware("cpu"), {"processor": "another", "gpu": "a fast one"}
    runs = {"0": {"seconds": 100.0, "search_seconds": 20.0}}
    record: dict[str, Any] = {"hardware": here, "rows": {"base": {"runs": runs}}}
    left = [("base", 1, options), ("base", 2, options)]
    chosen: list[bool] = []
    monkeypatch.setattr(sweep, "prepare_cpu", lambda: chosen.append(True))

    class Probe:
        state = SimpleNamespace(updates=20, update_seconds=40.0)
        stopped: int | None = None

        def __init__(self, *_: object) -> None:
            assert chosen  # the products that the runs take

        def train(self, *, progress: bool) -> None:
            pass

    monkeypatch.setattr("annotated_transformer.cli.train.load_texts", lambda *_, **__: {})
    monkeypatch.setattr(sweep, "Trainer", Probe)
    assert sweep.plan(record, grid, left, tmp_path, 2) == "about 0:02:00"
    old = {**record, "hardware": {"processor": here["processor"]}}  # before GPUs were noted
    assert sweep.plan(old, grid, left, tmp_path, 1) == "about 0:04:00"
    elsewhere = {"hardware": theirs, "rows": record["rows"]}
    mixed = {"hardware": here, "rows": {"base": {"runs": {"0": {**runs["0"], "hardware": theirs}}}}}
    for other in (elsewhere, mixed):
        found = sweep.plan(other, grid, left, tmp_path, 1)
        told = timedelta(seconds=4 * options.optim.updates)
        assert found == f"about {told} without the scoring"
    Probe.stopped = signal.SIGTERM  # it came during the updates that are measured
    with pytest.raises(KeyboardInterrupt) as caught:
        sweep.plan(elsewhere, grid, left, tmp_path, 1)
    assert caught.value.args == (signal.SIGTERM,)


def test_costs_of_all_architectures_are_of_one_size() -> None:
    """A plan takes the pace of the first run for all rows, whatever their architecture is."""
    for name in ("architectures", "treebank"):
        found = [run_flops(options) for options in load_grid(name).rows.values()]
        assert max(found) < 20 * min(found)


def test_options_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = write_grid(tmp_path)
    for words, message in (
        (("--jobs", 0), "--jobs 0: must be at least 1 and at most 1000"),
        (("--seeds", 0), "--seeds 0: must be at least 1 and at most 1000"),
        (("--rows", "B9"), "--rows B9: choose among base, A1"),
    ):
        status, _, said = told(capsys, grid, *words)
        assert status == 2
        assert message in said
    status, _, said = told(capsys, tmp_path / "none.json")
    assert status == 2
    assert "neither a file nor a grid" in said


@given(st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=10, max_size=10), min_size=1))
def test_counts_are_packed_without_loss(rows: list[list[int]]) -> None:
    assert decode_bleu_counts(encode_bleu_counts(np.array(rows))).tolist() == rows


def test_packed_counts_give_sacrebleus_score() -> None:
    wanted = ["the dog sleeps in the house .", "a cat sees the old man today ."]
    found = ["the dog sleeps in a house .", "a cat sees an old man today ."]
    counts = decode_bleu_counts(encode_bleu_counts(all_counts(found, wanted)))
    assert float(bleu_of_counts(counts.sum(0))) == pytest.approx(
        BLEU().corpus_score(found, [wanted]).score
    )


def test_differences_are_paired() -> None:
    base = {str(seed): {"bleu": bleu} for seed, bleu in enumerate((10.0, 20.0, 30.0))}
    runs = {str(seed): {"bleu": bleu} for seed, bleu in enumerate((11.0, 21.0, 31.5))}
    told = score_difference(base, runs, ["0", "1", "2"])
    mean, deviation = 3.5 / 3, statistics.stdev((1.0, 1.0, 1.5))
    reach = 4.302653 * deviation / 3**0.5  # Student's t for two degrees of freedom
    assert told == f"{mean:+.2f} BLEU ({mean - reach:+.2f} to {mean + reach:+.2f})"
    assert score_difference(base, runs, ["0"]) == ""
    fewer: Any = {seed: {**run, "sentences": 9} for seed, run in runs.items()}
    assert score_difference(base, fewer, ["0", "1", "2"]) == told  # an older one did not say
    whole: Any = {seed: {**run, "sentences": 10} for seed, run in base.items()}
    assert score_difference(whole, fewer, ["0", "1", "2"]) == "scored on other sentences"
    assert issubclass(SweepError, ValueError)
