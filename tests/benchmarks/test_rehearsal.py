"""The rehearsal of WMT's runs: its commands exist, it kills all of a run, and it reckons right."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from annotated_transformer.cli.arguments import parse_command_line
from annotated_transformer.cli.main import main
from annotated_transformer.engine.config import load_recipe
from benchmarks import rehearsal
from benchmarks.workers import ROOT
from tests import claims
from tests.processes import needs_proc

OPTIONS = argparse.Namespace(updates=50, max_tokens=512, vocabulary=37_000, preset="base")
# A process that starts one with a session of its own, as torchrun does, which writes a log.
LAUNCHER = """
import pathlib, subprocess, sys
code = '''
import pathlib, sys, time
for update in range(1000):
    with pathlib.Path(sys.argv[1]).open("a") as file:
        file.write('{"update": %d}\\\\n' % update)
    time.sleep(0.01)
'''
worker = subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], start_new_session=True)
worker.wait()
"""


def test_every_command_exists(tmp_path: Path) -> None:
    commands = rehearsal.commands(tmp_path, OPTIONS)
    assert list(commands) == ["prepare", "train", "average", "translate", "evaluate"]
    for words in commands.values():
        parse_command_line(words[words.index("annotated_transformer") + 1 :])


@needs_proc
def test_all_processes_of_a_run_are_killed(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rehearsal.kill_at([sys.executable, "-c", LAUNCHER, str(log)], tmp_path, 5, patience=30)
    size = log.stat().st_size
    time.sleep(0.1)
    assert log.stat().st_size == size
    assert 5 <= rehearsal.updates_made(tmp_path) < 900  # of 1,000


def test_a_log_may_be_torn_and_a_run_may_have_nothing_to_resume_from(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"update": 7}\n{"upda')
    assert rehearsal.updates_made(tmp_path) == 7
    with pytest.raises(rehearsal.RehearsalError, match="before its first checkpoint"):
        rehearsal.updates_saved(tmp_path)
    (tmp_path / "training").mkdir()
    for number in (4, 12):
        (tmp_path / "training" / f"{number:08d}.safetensors").touch()
    assert rehearsal.updates_saved(tmp_path) == 12


def test_a_run_that_ends_too_soon_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('annotated-transformer: no such thing')"]
    with pytest.raises(rehearsal.RehearsalError, match="no such thing"):
        rehearsal.kill_at(command, tmp_path, 5, patience=30)
    with pytest.raises(rehearsal.RehearsalError, match="prepare: exit status 1"):
        rehearsal.run(command, "prepare")


def test_the_score_is_that_of_the_authors_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {"found": "a rich-coloured dog sleeps", "wanted": "a dark-coloured dog sleeps"}
    for name, line in lines.items():
        (tmp_path / name).write_text(line + "\n", encoding="utf-8")
    words = ["--hypotheses", str(tmp_path / "found"), "--references", str(tmp_path / "wanted")]
    assert main(["evaluate", *words, "--language", "en", "--protocols"]) == 0
    # 5 of 6 tokens, then those after the wrong one: the compound is split
    share = (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert rehearsal.score_of(capsys.readouterr().out) == pytest.approx(100 * share, abs=0.01)
    with pytest.raises(rehearsal.RehearsalError, match="no score"):
        rehearsal.score_of("nothing")


@needs_proc
def test_a_family_has_children_and_theirs() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        while len(found := rehearsal.family(parent.pid)) < 2:
            time.sleep(0.01)
        assert found[0] == parent.pid
        assert all(os.getpgid(pid) for pid in found)
        parent.communicate(b"\n")


@pytest.mark.parametrize("name", rehearsal.RECIPES)
def test_hours_are_operations_over_rate(name: str) -> None:
    """Six operations for each weight of a token's products: within a quarter of ours."""
    found, options = rehearsal.expected(name), load_recipe(name)
    optim = options.optim
    tokens = optim.updates * optim.accumulate * optim.max_tokens
    big = options.model.preset == "big"
    d, ff = (1024, 4096) if big else (512, 2048)
    encoder, decoder = 6 * (4 * d * d + 2 * d * ff), 6 * (8 * d * d + 2 * d * ff)
    weights = encoder + decoder + options.data.vocabulary * d
    assert found["flops"] == pytest.approx(6 * weights * tokens, rel=0.25)
    hours = found["gpu_hours"]["A100 80GB SXM"]
    assert hours * 3600 * (0.21 if big else 0.1) * 312e12 == pytest.approx(found["flops"], rel=0.05)


def test_shares_of_the_peak_are_those_of_the_record() -> None:
    """Here, and in the chapter that counts hours with them."""
    steps = json.loads((ROOT / "results" / "step-gpu.json").read_text())["steps"]
    plain = [one for one in steps if one["precision"] == "bfloat16" and not one["compiled"]]
    found = {one["size"]: round(one["mfu"], 2) for one in plain}
    assert found == rehearsal.SHARES
    (told,) = (
        re.findall(r"^GPUS, SHARE = .*(\{.*\})$", cell.source, re.MULTILINE)
        for cell in claims.cells("results/machine_translation")
        if "GPUS, SHARE =" in cell.source
    )
    assert [ast.literal_eval(one) for one in told] == [found]
