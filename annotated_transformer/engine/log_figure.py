"""The log of a run as a figure."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a run that draws nothing needs no matplotlib
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, float]]


def _points(rows: Rows, key: str) -> tuple[list[float], list[float]]:
    """Return the updates and values of the rows that have this key."""
    having = [row for row in rows if key in row]
    return [row["update"] for row in having], [row[key] for row in having]


def log_figure(journal: Rows, curve: Rows = (), name: str | Path = "") -> "Figure":
    """Plot the loss, learning rate and speed of a run over its updates.

    Args:
        journal: Lines from ``read_journal``.
        curve: Points of the learning curve, with ``update``, ``train_loss``, ``valid_loss`` and
            ``tokens_per_second``; plotted where the journal has no values.
        name: Folder of the run; its last part is the title.

    Returns:
        A matplotlib figure, for ``show`` or ``savefig``.

    Raises:
        ImportError: The plotting packages are not installed.
    """
    from annotated_transformer.figures import canvas, lines

    def either(key: str, other: str = "") -> tuple[list[float], list[float]]:
        return _points(journal, key) if _points(journal, key)[0] else _points(curve, other or key)

    points = [zip(*_points(rows, "valid_loss"), strict=True) for rows in (curve, journal)]
    valid = sorted(dict(itertools.chain(*points)).items())  # a journal may have begun anew
    losses = {
        "training": either("loss", "train_loss"),
        "validation": ([x for x, _ in valid], [y for _, y in valid]),
    }
    panels = {
        "loss, nats per target token": losses,
        "learning rate": {"rate": _points(journal, "rate")},
        "target tokens per second": {"speed": either("tokens_per_second")},
    }
    figure, axes = canvas(len(panels), size=(6.0, 7.0), sharex=True)
    for ax, (label, series) in zip(axes[:, 0], panels.items(), strict=True):
        drawn = {key: points for key, points in series.items() if points[0]}
        lines(drawn, x_label="updates", y_label=label, ax=ax)
        for line in ax.get_lines():
            line.set(marker="o" if len(line.get_xdata()) < 20 else "", markersize=3)
        ax.label_outer()
    title = Path(name).resolve().name if str(name) else ""
    figure.suptitle(title, parse_math=False)  # dollar signs in a name are not math
    return figure
