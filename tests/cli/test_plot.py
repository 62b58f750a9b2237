"""``plot``: the log as a picture."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from annotated_transformer.cli import plot
from annotated_transformer.cli.main import main
from annotated_transformer.engine.checkpointer import checkpoint_paths
from annotated_transformer.engine.checkpoints import load_tensors
from annotated_transformer.engine.log_figure import log_figure
from tests.cli.command import Capture, fails


def test_plot_takes_the_curve_of_the_newest_sound_checkpoint(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "going-on"
    shutil.copytree(trained, folder)
    (folder / "record.json").write_text('{"curve": "of an earlier end"}', encoding="utf-8")
    seen: list[Any] = []
    titles: list[str] = []
    real = log_figure

    def watched(journal: Any, curve: Any, name: Path) -> Any:
        seen.append(curve)
        titles.append(str(name))
        return real(journal, curve, name)

    monkeypatch.setattr(plot, "log_figure", watched)
    assert main(["plot", str(folder)]) == 0
    newest = checkpoint_paths(folder)[-1]
    newest.write_bytes(b"damaged")
    assert main(["plot", str(folder)]) == 0
    shutil.rmtree(folder / "training")
    assert main(["plot", str(folder)]) == 0
    curves = [load_tensors(path)[1]["state"]["curve"] for path in checkpoint_paths(trained)]
    assert seen == [curves[1], curves[0], []]
    assert curves[1]
    monkeypatch.chdir(folder)
    assert main(["plot", "."]) == 0
    assert titles == [str(folder)] * 3 + ["."]  # which log_figure names after the folder


def test_plot_draws_a_log(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    for suffix, start in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        picture = tmp_path / f"picture.{suffix}"
        assert main(["plot", str(trained), "-o", str(picture)]) == 0
        assert picture.read_bytes().startswith(start)
    assert "wrote" in capsys.readouterr().err
    assert "log.jsonl is missing" in fails(capsys, "plot", tmp_path)
    assert "none: no such folder; give the folder of a run" in fails(capsys, "plot", "none")
    assert "picture.svg: is a file; give" in fails(capsys, "plot", tmp_path / "picture.svg")
    assert "must end with .svg" in fails(capsys, "plot", trained, "-o", tmp_path / "picture.gif")
    (tmp_path / "log.jsonl").write_text("{\n{}\n", encoding="utf-8")
    assert "log.jsonl" in fails(capsys, "plot", tmp_path)


def test_a_name_with_dollars_is_no_formula(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a$b_{^$"
    shutil.copytree(trained, folder)
    assert main(["plot", str(folder)]) == 0
    assert "a$b_{^$" in (folder / "training.svg").read_text(encoding="utf-8")
