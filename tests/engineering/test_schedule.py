"""The paper's run: its settings as a command, tried at its width on a made-up corpus."""

import re
from pathlib import Path

import pytest

from annotated_transformer.cli.arguments import parse_command_line
from annotated_transformer.cli.main import main
from annotated_transformer.cli.options import Train
from annotated_transformer.engine.checkpointer import checkpoint_paths
from annotated_transformer.engine.config import load_recipe
from annotated_transformer.engine.journal import read_journal
from annotated_transformer.model.transformer import PRESETS
from annotated_transformer.training.optimizer import rate
from benchmarks.prepare import write_corpus


@pytest.mark.parametrize("preset", ["base", "big"])
def test_the_command_has_the_settings_of_the_paper(preset: str) -> None:
    command = parse_command_line(["train", "--prepared", "wmt14", "--preset", preset])
    assert isinstance(command, Train)
    options = command.options.replace(prepared=None)
    assert options == load_recipe(f"paper-{preset}-en-de").replace(pair=options.data.pair)
    width = {"base": 512, "big": 1024}[preset]
    optim = options.optim
    assert optim.peak is None  # that of the formula
    assert optim.max_tokens * optim.accumulate == 25_000
    assert (optim.warmup, optim.smoothing) == (4000, 0.1)
    assert optim.updates == {"base": 100_000, "big": 300_000}[preset]
    config = PRESETS[preset]
    assert (config.N, config.d_model, config.d_ff, config.h) == (6, width, 4 * width, width // 64)
    assert config.dropout == {"base": 0.1, "big": 0.3}[preset]


def test_a_dry_run_at_the_width_of_the_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path, 4000)
    files = ["--train-files", "train.de", "train.en", "--valid-files", "valid.de", "valid.en"]
    words = ["prepare", "wmt", *files, "--vocabulary", "8000", "--workers", "1", "--quiet"]
    assert main(words) == 0
    # Everything is the paper's but the number of layers and the size of the micro-batches.
    smaller = ["--layers", "1", "--max-tokens", "160", "--skip-long", "--average", "0"]
    train = ["train", "--prepared", "wmt", *smaller, "--out", "base", "--quiet", "--steps", "4"]
    assert main([*train, "--log-every", "2"]) == 0
    error = capsys.readouterr().err
    assert re.search(r"\b4 updates of [\d.]+ seconds, \d+ target tokens per second, ", error)
    assert re.search(r"; 100000 take (\d+ days?, )?[\d:]+\n", error)
    assert "stopped after update 4; run the same command to resume" in error
    assert int(checkpoint_paths(tmp_path / "base")[-1].stem) == 4  # a slow machine saves between
    rows = [row for row in read_journal(tmp_path / "base/log.jsonl") if "loss" in row]
    assert [row["update"] for row in rows] == [2, 4]
    assert rows[1]["rate"] == pytest.approx(rate(4, 512, 1.0, 4000))
    assert all(500 < row["tokens"] / 2 <= 8 * 160 for row in rows)  # eight micro-batches
