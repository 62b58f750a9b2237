"""Load and soak of the server, for seconds; and that both notice what they are to notice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from annotated_transformer.serving.requests import Refusal
from benchmarks import serve
from tests.processes import needs_proc
from tests.serving.servers import running


@needs_proc
def test_ten_seconds_of_misuse_lose_no_request() -> None:
    found = serve.soak(10 / 60, clients=8)
    assert (found["lost"], found["wrong"]) == (0, 0)
    assert found["answered"] > 20
    assert found["aborted"] > 5
    assert {"200", "422"} <= set(found["answers"])
    assert found["open_files"] < 20  # of 8 clients that are gone
    assert found["memory_mb"][-1] < 1000


@needs_proc
def test_load_is_measured_and_compared() -> None:
    expected = serve.expectations(2)
    with running() as server:
        found = asyncio.run(serve.load(server.port, 3, 0.5, expected))
        assert found["clients"] == 3
        assert found["requests"] >= 3
        assert 0 < found["p50_ms"] <= found["p99_ms"]
        wrong = dict.fromkeys(expected, "nonsense")
        with pytest.raises(serve.SoakError, match="answered with status 200"):
            asyncio.run(serve.load(server.port, 1, 0.5, wrong))


def test_memory_that_grows_is_noticed() -> None:
    assert serve.growth([100, 200, 200, 200, 200, 200, 200, 200]) == 0
    assert serve.growth([100, 200, 200, 200, 200, 200, 220, 220]) == pytest.approx(0.1)


def test_a_soak_notices_lost_and_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Counter[str] = Counter()
    monkeypatch.setattr(serve, "PATIENCE", 0.2)

    def misuse(port: int) -> None:
        end = time.monotonic() + 1
        asyncio.run(serve.soak_client(port, 1, end, found))

    with running() as server:
        server.service._answer = refuse  # type: ignore[method-assign]
        misuse(server.port)
        assert found["wrong"] > 0
        assert not any(name.startswith("lost") for name in found)
        del server.service._answer
        server.busy()
        misuse(server.port)
    assert found["lost: TimeoutError"] > 0


async def refuse(request: object, do: object) -> bytes:
    """Answer nobody as they expect."""
    raise Refusal(418, "no")
