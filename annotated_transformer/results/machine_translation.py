# Written from book/results/machine_translation.md: edit the chapter instead.
"""Costs of training, and tables made from records (Section 6.1)."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

#: Sustained operations per second by type of GPU, as the paper estimates them.
SUSTAINED = {"K80": 2.8e12, "K40": 3.7e12, "M40": 6.0e12, "P100": 9.5e12}


def training_cost(days: float, gpus: int, gpu: str) -> float:
    """Return time × GPUs × sustained operations per second, the cost of Table 2.

    Args:
        days: Training time in days.
        gpus: Number of GPUs.
        gpu: Their type, a key of ``SUSTAINED`` (footnote of Section 6.1).

    Raises:
        KeyError: The paper has no estimate for that type.
    """
    return days * 24 * 3600 * gpus * SUSTAINED[gpu]


def mean_and_std(values: Iterable[float]) -> str:
    """Return, as text, the mean of results ± their standard deviation if there are several."""
    found = list(values)
    mean = statistics.mean(found)
    return f"{mean:.2f} " + (f"± {statistics.stdev(found):.2f}" if found[1:] else "(one seed)")


@dataclass(frozen=True)
class Verdict:
    """The evidence of several runs for a claim, which predicts a positive difference.

    Attributes:
        runs: Number of runs.
        mean: Mean of their differences.
        low: Lower end of the mean's 95 % interval.
        high: Upper end of that interval.
    """

    runs: int
    mean: float
    low: float
    high: float

    @property
    def status(self) -> str:
        """The status, as the scoreboard has it, such as ``holds at our scale``."""
        if not self.runs:
            return "not yet run"
        if self.low > 0:
            return "holds at our scale"
        return "does not hold at our scale" if self.high < 0 else "not resolved"

    def __str__(self) -> str:
        """Return the line from which the scoreboard takes the status."""
        interval = f"95 % interval {self.low:+.2f} to {self.high:+.2f}"
        evidence = f"; mean {self.mean:+.2f}, {interval}, n = {self.runs}" if self.runs else ""
        return f"status: {self.status}{evidence}"


def judge_claim(differences: Iterable[float], level: float = 0.95) -> Verdict:
    """Judge a claim by the difference of each run, which the claim predicts to be positive."""
    found = list(differences)
    if not found:
        return Verdict(0, math.nan, -math.inf, math.inf)
    mean, reach = statistics.mean(found), math.inf
    if len(found) > 1:
        reach = student_t(len(found) - 1, level) * statistics.stdev(found) / len(found) ** 0.5
    return Verdict(len(found), mean, mean - reach, mean + reach)


@cache
def student_t(freedom: int, level: float = 0.95) -> float:
    """Return the bound t of which Student's distribution has ``level`` within -t and t."""
    logs = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    height = math.exp(logs) / (freedom * math.pi) ** 0.5
    t, step, inside = 0.0, 1e-4, 0.0
    while inside < level / 2:  # on one side; the middle of each strip is its mean height
        middle = t + step / 2
        inside += step * height * (1 + middle**2 / freedom) ** (-(freedom + 1) / 2)
        t += step
    return t
