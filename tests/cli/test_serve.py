"""The command ``serve``: its address, its system, and how it ends."""

from __future__ import annotations

import re
import signal
import socket
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from annotated_transformer.cli import serve as module
from annotated_transformer.cli.main import main
from annotated_transformer.data.corpora import load_corpus
from annotated_transformer.engine.checkpoints import load_system
from annotated_transformer.engine.system import translate_lines
from annotated_transformer.pretrained import RUNNING
from annotated_transformer.serving.server import address_of_socket, listen
from tests.cli.command import Capture, fails
from tests.serving.servers import ask, started, until

LINES = load_corpus("grammar", split="val", size=12).source
PROGRAM = [sys.executable, "-m", "annotated_transformer"]


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_what_is_under_way_is_answered_before_the_end(name: str, status: int) -> None:
    with started(PROGRAM) as (process, port), ThreadPoolExecutor(16) as pool:
        data, answers = {"sentences": LINES, "beam": 4}, list[Future[Any]]()

        def more_than_one_waits() -> bool:
            """What came together may all be taken at once, so more is sent."""
            if len(answers) < 16:
                answers.append(pool.submit(ask, port, "/translate", data))
            return bool(ask(port, "/health")[1]["waiting"] > len(LINES))

        until(more_than_one_waits)
        process.send_signal(getattr(signal, name))
        late = [answer for answer in answers[1:] if isinstance(answer.exception(), OSError)]
        found = [answer.result() for answer in answers if answer not in late]
        assert len(late) <= 1  # the last, if it came when nothing was accepted any more
        assert [one[0] for one in found] == [200] * len(found)
        assert len({str(one[1]) for one in found}) == 1
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (status, "")
        told = "serving the small model that comes with the package; Ctrl-C stops"
        assert err.splitlines() == [told, "annotated-transformer: interrupted"]


def test_a_trained_system_translates_as_it_does_elsewhere(trained: Path) -> None:
    system = load_system(trained)
    with started(PROGRAM, str(trained)) as (_, port):
        status, found, _ = ask(port, "/translate", {"sentences": LINES, "beam": 4})
        assert (status, found["translations"]) == (200, translate_lines(system, LINES, beam=4))
        _, page, _ = ask(port, "/")
        assert f"<title>{trained.name}</title>" in page.decode()
        assert 'data-label="A sentence (de)"' in page.decode()
        _, found, _ = ask(port, "/attention", {"sentence": RUNNING.text("de")})
        assert (found["languages"], found["note"]) == (["de", "en"], "")


def test_an_address_that_is_taken(capsys: Capture) -> None:
    with listen("127.0.0.1", 0) as sock:
        port = str(sock.getsockname()[1])
        line = fails(capsys, "serve", "--port", port)
    assert f"--port {port}: cannot be used" in line
    assert "choose another port" in line


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """A head and its body leave at once, where Nagle's algorithm would hold the body for 40 ms."""
    with listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_hosts(capsys: Capture) -> None:
    assert "--host no.such.name.invalid" in fails(capsys, "serve", "--host", "no.such.name.invalid")
    assert "--host 192.0.2.1: is no address of" in fails(capsys, "serve", "--host", "192.0.2.1")
    with listen("localhost", 0) as sock:
        assert re.fullmatch(r"http://(127\.0\.0\.1|\[::1\]):\d+", address_of_socket(sock))


def test_other_hosts_than_this_machine_are_warned_of(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(service: object, sock: socket.socket, started: object) -> None:
        assert callable(started)
        started()

    monkeypatch.setattr(module, "serve", begin)
    for host, warns in (("127.0.0.1", False), ("0.0.0.0", True)):
        assert main(["serve", "--host", host, "--port", "0"]) == 0
        assert ("anyone who can reach this address" in capsys.readouterr().err) == warns
