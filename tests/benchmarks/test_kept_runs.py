"""A record that goes on has runs of one setting; a trial overwrites nothing that is shipped."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import pretrained
from benchmarks.records import kept_runs

PARSER = argparse.ArgumentParser()


def test_runs_of_other_settings_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    assert kept_runs(PARSER, path, 100) == kept_runs(PARSER, None, 100) == {}
    path.write_text(json.dumps({"updates": 100, "runs": {"0": {"exact": 1.0}}}), encoding="utf-8")
    assert kept_runs(PARSER, path, 100) == {"0": {"exact": 1.0}}
    with pytest.raises(SystemExit):
        kept_runs(PARSER, path, 2000)
    assert f"--record {path}: has 100 updates; name another" in capsys.readouterr().err


def test_a_trial_does_not_overwrite_the_model_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["--package", str(tmp_path)], ["--record", str(tmp_path / "r.json")]):
        monkeypatch.setattr(sys, "argv", ["pretrained", "--updates", "1", *words])
        with pytest.raises(SystemExit):
            pretrained.main()
        assert "give --package and --record, too" in capsys.readouterr().err
