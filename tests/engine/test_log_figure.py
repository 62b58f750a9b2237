"""The picture of a log shows what was logged."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from annotated_transformer.engine import log_figure as module
from annotated_transformer.engine.log_figure import log_figure

ROOT = Path(__file__).resolve().parents[2]

LOG = [
    {"update": 10, "loss": 4.0, "rate": 0.1, "tokens_per_second": 900},
    {"update": 20, "loss": math.nan, "rate": 0.2, "tokens_per_second": 800, "skipped": 1},
    {"update": 30, "loss": 3.0, "tokens_per_second": 1000},
]
CURVE = [
    {"update": 15, "train_loss": 3.9, "valid_loss": 4.1, "tokens_per_second": 850},
    {"update": 30, "train_loss": 3.1, "valid_loss": 3.5, "tokens_per_second": 900},
]


def drawn(figure: Figure) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Return the curves of each panel by its label."""
    return {
        ax.get_ylabel(): {
            str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))  # type: ignore[arg-type]
            for line in ax.get_lines()
        }
        for ax in figure.axes
    }


LOSS, RATE, SPEED = "loss, nats per target token", "learning rate", "target tokens per second"


def test_the_figure_shows_what_was_logged(tmp_path: Path) -> None:
    figure = log_figure(LOG, CURVE, tmp_path / "system" / "small")
    panels = drawn(figure)
    assert list(panels) == [LOSS, RATE, SPEED]
    assert panels[LOSS]["validation"] == ([15, 30], [4.1, 3.5])
    live = [*LOG, {"update": 40, "valid_loss": 3.25}]  # after the last checkpoint
    assert drawn(log_figure(live, CURVE))[LOSS]["validation"] == (
        [15, 30, 40],
        [4.1, 3.5, 3.25],
    )
    updates, losses = panels[LOSS]["training"]
    assert updates == [10, 20, 30]
    assert (losses[0], losses[2]) == (4.0, 3.0)
    assert math.isnan(losses[1])
    assert panels[RATE] == {"rate": ([10, 20], [0.1, 0.2])}
    assert panels[SPEED] == {"speed": ([10, 20, 30], [900, 800, 1000])}
    assert figure.get_suptitle() == "small"
    assert figure.axes[-1].get_xlabel() == "updates"
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["training", "validation"]
    figure.savefig(tmp_path / "figure.png")
    assert plt.get_fignums() == []  # explicit: nothing is left open


def test_without_a_journal_the_curve_is_drawn() -> None:
    figure = log_figure([], CURVE)
    assert figure.get_suptitle() == ""
    panels = drawn(figure)
    assert panels[LOSS]["training"] == ([15, 30], [3.9, 3.1])
    assert panels[SPEED]["speed"] == ([15, 30], [850, 900])
    assert panels[RATE] == {}


@pytest.mark.parametrize(("log", "curve"), [([], []), (LOG[:1], []), ([], CURVE[:1])])
def test_few_points_are_seen(log: Any, curve: Any, tmp_path: Path) -> None:
    figure = log_figure(log, curve)
    figure.savefig(tmp_path / "figure.png")
    for ax in figure.axes:
        assert all(line.get_marker() == "o" for line in ax.get_lines())


def test_this_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert log_figure([], name=".").get_suptitle() == tmp_path.name


def test_many_points_are_a_line() -> None:
    log = [{"update": n, "loss": 1.0} for n in range(50)]
    (line,) = log_figure(log).axes[0].get_lines()
    assert line.get_marker() == ""


def test_importing_draws_nothing() -> None:
    code = f"import sys, {module.__name__}; print('matplotlib' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert result.stdout.strip() == "False"
