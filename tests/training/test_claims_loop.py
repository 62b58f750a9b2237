"""The check that the schedule counts updates notices a loop that counts something else.

The check stands in the chapter on the optimizer, which has the schedule, and calls the loop of the
package. So it is the module that is broken here, and not a cell.
"""

import inspect
import sys
import types

import pytest

from annotated_transformer.training import loop
from tests.claims import CellError, run_claim


def replace_loop(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Let imports of the loop find a module with another source."""
    source = inspect.getsource(loop)
    assert source.count(old) == 1
    changed = types.ModuleType(loop.__name__)
    monkeypatch.setitem(sys.modules, loop.__name__, changed)
    exec(source.replace(old, new), vars(changed))


def test_the_loop_counts_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_loop(monkeypatch, "    if schedule is not None:", "    if schedule:")
    run_claim("training/optimizer", "5.3b")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        schedule.step()\n", "        [schedule.step() for _ in batches]\n"),
        ("    if schedule is not None:", "    if False:"),
        ("itertools.islice(stream, accumulate)", "itertools.islice(stream, 1)"),
    ],
)
def test_a_loop_that_counts_batches_is_noticed(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    replace_loop(monkeypatch, old, new)
    with pytest.raises(CellError) as refuted:
        run_claim("training/optimizer", "5.3b")
    assert refuted.value.tagged
    assert isinstance(refuted.value.__cause__, AssertionError)
