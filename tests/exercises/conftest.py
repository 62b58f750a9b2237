"""A busy machine does not change what a check finds."""

import pytest

from annotated_transformer.exercises import machinery


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each check as much time as it needs."""
    for name in ("SECONDS", "LIMIT", "NAMING"):
        monkeypatch.setattr(machinery, name, 120.0)
