"""Servers for the tests: in a thread with any limits, and requests to them."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from annotated_transformer.background.seq2seq import RecurrentConfig
from annotated_transformer.cli.options import Search
from annotated_transformer.cli.systems import open_pretrained
from annotated_transformer.serving.app import Service
from annotated_transformer.serving.batching import Found, Job
from annotated_transformer.serving.requests import Limits
from annotated_transformer.serving.server import Server, listen

JSON = {"content-type": "application/json"}
Answer = tuple[int, Any, dict[str, str]]  # status, body, headers in small letters


class Running:
    """A server in a thread, whose model waits at a gate.

    Attributes:
        gate: Open unless a test closes it; a batch passes when it is open.
        batches: How many sentences each batch had.
    """

    def __init__(self, limits: Limits) -> None:
        system, pretrained = open_pretrained(Search())
        self.service = Service(system, limits, "The model", pretrained)
        self.gate, self.started = threading.Event(), threading.Event()
        self.gate.set()
        self.batches: list[int] = []
        self._translate = self.service.batcher._translate
        self.service.batcher._translate = self.translate  # type: ignore[method-assign]
        self.sock = listen("127.0.0.1", 0)
        self.port = self.sock.getsockname()[1]
        self.server = Server(self.service, self.started.set)
        self.thread = threading.Thread(target=self.server.run, args=([self.sock],))
        self.pool = ThreadPoolExecutor(64)

    def give_recurrent(self) -> None:
        """Serve a recurrent model in place of the other; it has learned nothing."""
        config = RecurrentConfig("additive", width=8, hidden=8)
        torch.manual_seed(0)
        size = len(self.service.system.tokenizers[0])
        model = config.build(size, size).eval()
        system = replace(self.service.system, model=model, config=config)
        self.service.system = self.service.batcher.system = system

    def translate(self, batch: list[Job]) -> list[Found]:
        """Wait for the gate, and translate."""
        self.batches.append(len(batch))
        assert self.gate.wait(60)
        return self._translate(batch)

    def ask(self, path: str = "/translate", data: object = None, **options: Any) -> Answer:
        """Ask the server, see ``ask``."""
        return ask(self.port, path, data, **options)

    def asked(self, *sentences: str, **more: Any) -> Callable[[], Answer]:
        """Ask for translations beside others; return what waits for the answer."""
        data = {"sentences": list(sentences), **more}
        return self.pool.submit(self.ask, "/translate", data).result

    def busy(self) -> Callable[[], Answer]:
        """Close the gate, and have a sentence wait there."""
        self.gate.clear()
        before = len(self.batches)
        answer = self.asked("Der Hund schläft.")
        until(lambda: len(self.batches) > before)
        return answer

    def waiting(self) -> int:
        """Return how many sentences wait, as the server says."""
        return int(self.ask("/health")[1]["waiting"])


@contextmanager
def running(**limits: Any) -> Iterator[Running]:
    """Run a server with these limits."""
    found = Running(Limits(**limits))
    found.thread.start()
    assert found.started.wait(60)
    yield found
    found.gate.set()
    found.server.should_exit = True
    found.thread.join(60)
    assert not found.thread.is_alive()
    found.service.batcher.stop()
    found.pool.shutdown()


def ask(
    port: int,
    path: str,
    data: object = None,
    *,
    body: bytes = b"",
    method: str = "",
    headers: dict[str, str] = JSON,
) -> Answer:
    """Send a request, and return the answer; its body is parsed if it is JSON.

    Args:
        port: Of the server on the loopback interface.
        path: What to ask.
        data: To send as JSON, if any.
        body: To send, if there are no data.
        method: POST if anything is sent, else GET, unless given.
        headers: To send.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps(data).encode() if data is not None else body
    connection.request(method or ("POST" if body else "GET"), path, body or None, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    found = {name.lower(): value for name, value in answer.getheaders()}
    parsed = json.loads(content) if found["content-type"] == "application/json" else content
    return answer.status, parsed, found


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.01)


@contextmanager
def started(
    program: Sequence[str],
    *words: str,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start ``serve`` in a process; yield it with its port when it says that it is ready."""
    command = [*program, "serve", "--port", "0", *words]
    options: dict[str, Any] = {"cwd": folder, "env": env, "text": True}
    with subprocess.Popen(command, stdout=-1, stderr=-1, **options) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)\n", line)
            assert found, (line, process.stderr and process.stderr.read())
            yield process, int(found[1])
        finally:
            process.kill()


def serves_until_it_is_stopped(
    program: Sequence[str], folder: Path, env: Mapping[str, str]
) -> None:
    """See that the command answers with the package's model, and how SIGTERM ends it."""
    with started(program, folder=folder, env=env) as (process, port):
        assert ask(port, "/health")[0] == 200
        status, found, _ = ask(port, "/translate", {"sentences": ["Der Hund schläft."]})
        assert (status, found["translations"]) == (200, ["The dog sleeps."])
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (143, "")
        assert err.endswith("annotated-transformer: interrupted\n")
