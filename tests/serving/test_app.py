"""The server's answers: equal to ``translate_lines``, limited, and clear where it refuses."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.engine.system import translate_lines
from annotated_transformer.pretrained import RUNNING, load_pretrained
from annotated_transformer.serving import server as module
from annotated_transformer.serving.app import DRAINED, Service
from annotated_transformer.serving.requests import Limits
from annotated_transformer.translation.beam_search import beam_search
from tests.serving.servers import Running, ask, running, until

GERMAN, ENGLISH = RUNNING.text("de"), RUNNING.text("en")
LIMITS = Limits()


@pytest.fixture(scope="module")
def usual() -> Iterator[Running]:
    """Run a server with the limits that it has by default."""
    with running() as found:
        yield found


def sentences(count: int) -> list[str]:
    """Return sentences of both languages and of many lengths."""
    pairs = grammar_pairs("test", count, seed=4)
    texts = [pair.text(language) for pair in pairs for language in ("de", "en")]
    return [
        " ".join(text.split()[: 1 + i % 5]) if i % 5 == 0 else text for i, text in enumerate(texts)
    ]


def test_translations_together_are_those_of_translate_lines(usual: Running) -> None:
    lines = sentences(35)
    wanted = {beam: translate_lines(usual.service.system, lines, beam=beam) for beam in (1, 4)}
    usual.busy()
    answers = [
        (usual.asked(line, **({} if beam == 1 else {"beam": beam})), wanted[beam][i])
        for i, line in enumerate(lines)
        for beam in (1 + 3 * (i % 2),)
    ]
    until(lambda: usual.waiting() >= 63)  # threads of the pool
    usual.batches.clear()
    usual.gate.set()
    for answer, translation in answers:
        status, found, _ = answer()
        assert (status, found["translations"]) == (200, [translation])
    assert max(usual.batches) > 20  # they were translated together


def test_a_request_of_many_sentences(usual: Running) -> None:
    lines = [GERMAN, "", ENGLISH, "  ", *sentences(10)[:20]]
    status, found, _ = usual.ask(data={"sentences": lines, "beam": 4, "alpha": 0.2})
    assert status == 200
    assert found["translations"] == translate_lines(usual.service.system, lines, beam=4, alpha=0.2)
    model, tokenizer = usual.service.system.model, usual.service.system.tokenizers[0]
    for i in (0, 2, 5):
        (alone,) = beam_search(model, [tokenizer.encode(lines[i])], beam=4, alpha=0.2)
        assert found["tokens"][i] == tokenizer.tokens(alone[0].tokens)
        assert found["scores"][i] == pytest.approx(alone[0].log_probability, abs=1e-3)
    assert (found["tokens"][1], found["scores"][1]) == ([], None)


def test_only_line_feeds_are_line_breaks(usual: Running) -> None:
    """As for ``translate``, so that a text with other separators is not refused here alone."""
    lines = [GERMAN.replace(" ", sign, 1) for sign in ("\u2028", "\x85", "\x0b", "\f")]
    status, found, _ = usual.ask(data={"sentences": lines})
    assert status == 200
    assert found["translations"] == translate_lines(usual.service.system, lines)


@pytest.mark.parametrize(("source", "target"), [(GERMAN, ENGLISH), (ENGLISH, GERMAN)])
def test_attention_is_that_of_the_readable_model(usual: Running, source: str, target: str) -> None:
    status, found, _ = usual.ask("/attention", {"sentence": source})
    assert (status, found["texts"][-1]) == (200, target)
    assert found["languages"] == (["de", "en"] if source == GERMAN else ["en", "de"])
    pretrained = load_pretrained()
    assert found["source"] == pretrained.labels(source)
    assert found["read"] == pretrained.labels(target, target=True)
    trace = pretrained.trace(source, target)
    for name, part in (
        ("encoder", "encoder.layers.{}.self_attn"),
        ("self", "decoder.layers.{}.self_attn"),
        ("cross", "decoder.layers.{}.src_attn"),
    ):
        wanted = torch.cat([trace[f"{part.format(i)}.attn"] for i in range(2)])
        torch.testing.assert_close(torch.tensor(found[name]), wanted, atol=6e-5, rtol=0.0)
    chances = trace["generator.proj"][0].softmax(-1).amax(-1)  # it is decoded greedily
    torch.testing.assert_close(torch.tensor(found["probabilities"]), chances, atol=6e-5, rtol=0.0)


def test_the_page_says_which_words_the_model_does_not_know(usual: Running) -> None:
    _, found, _ = usual.ask("/attention", {"sentence": "The baker sees a unicorn."})
    assert found["note"] == "The model does not know unicorn."
    _, found, _ = usual.ask("/attention", {"sentence": GERMAN})
    assert found["note"] == ""


BAD = {  # bodies, and what the error names
    "not JSON": (b"{", "body"),
    "no object": (b"[1]", "body"),
    "nothing but a blank": (b" ", "body"),
    "nested deeply": (b"[" * 200_000, "body"),
    "objects nested deeply": (b'{"a":' * 40_000, "body"),
    "no UTF-8": (b'{"sentences": ["\xff"]}', "body: is not valid UTF-8"),
    "UTF-16": ('{"sentences": ["a"]}'.encode("utf-16"), "body: is not valid UTF-8"),
    "a byte order mark": (b'\xef\xbb\xbf{"sentences": ["a"]}', "body"),
    "NaN": (b'{"sentences": ["a"], "beam": 4, "alpha": NaN}', "NaN"),
    "infinity": (b'{"sentences": ["a"], "beam": 4, "alpha": -Infinity}', "-Infinity"),
    "a number that is infinite": (b'{"sentences": ["a"], "beam": 4, "alpha": 1e999}', "alpha"),
    "a huge integer": (b'{"sentences": ["a"], "beam": ' + b"9" * 5000 + b"}", "body"),
    "a large integer": (b'{"sentences": ["a"], "beam": ' + b"9" * 400 + b"}", "beam"),
    "a large alpha": (b'{"sentences": ["a"], "beam": 2, "alpha": ' + b"9" * 400 + b"}", "alpha"),
    "a name given twice": (b'{"sentences": ["a"], "sentences": ["b"]}', "'sentences': is given"),
    "a name given twice among many": (
        json.dumps(dict.fromkeys(map(str, range(20_000)), 0))[:-1].encode() + b', "7": 0}',
        "'7': is given",
    ),
    "another name": (b'{"sentences": ["a"], "bean": 4}', "'bean'"),
    "a strange name": (b'{"sentences": ["a"], "\\n\\ud800": 4}', "'\\n\\ud800'"),
    "no sentences": (b"{}", "sentences: is missing"),
    "sentences that are none": (b'{"sentences": "a"}', "sentences"),
    "an empty list": (b'{"sentences": []}', "sentences"),
    "too many": (json.dumps({"sentences": ["a"] * 65}).encode(), "sentences"),
    "a number": (b'{"sentences": ["a", 1]}', "sentences[1]: must be a string"),
    "null": (b'{"sentences": [null]}', "sentences[0]: must be a string"),
    "a lone surrogate": (b'{"sentences": ["\\ud800"]}', "sentences[0]"),
    "a line break": (b'{"sentences": ["a", "a\\nb"]}', "sentences[1]: holds a line break"),
    "too long": (json.dumps({"sentences": ["a" * 2001]}).encode(), "sentences[0]: has 2001"),
    "too many tokens": (json.dumps({"sentences": ["a, " * 600]}).encode(), "sentences[0]: has"),
    "a beam of 0": (b'{"sentences": ["a"], "beam": 0}', "beam"),
    "a beam of 9": (b'{"sentences": ["a"], "beam": 9}', "beam"),
    "a beam of true": (b'{"sentences": ["a"], "beam": true}', "beam"),
    "a beam of 2.0": (b'{"sentences": ["a"], "beam": 2.0}', "beam"),
    "no alpha": (b'{"sentences": ["a"], "beam": 4, "alpha": null}', "alpha"),
    "a negative alpha": (b'{"sentences": ["a"], "beam": 4, "alpha": -1}', "alpha"),
    "an alpha that has no effect": (b'{"sentences": ["a"], "alpha": 1}', "alpha: has no effect"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_name_the_field(usual: Running, name: str) -> None:
    body, names = BAD[name]
    status, found, headers = usual.ask(body=body)
    assert status == 422
    assert list(found) == ["error"]
    assert names in found["error"]
    assert found["error"].isprintable()
    assert len(found["error"]) < 150
    assert headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"sentence": ["a"]}, "sentence: must be a string"),
        ({"sentences": ["a"]}, "'sentences': is unknown"),
        ({"sentence": " "}, "sentence: is blank"),
        ({"sentence": "der Hund " * 60}, "sentence: has"),
    ],
)
def test_bad_requests_for_attention(usual: Running, data: object, names: str) -> None:
    status, found, _ = usual.ask("/attention", data)
    assert status == 422
    assert names in found["error"]


def test_a_recurrent_system_is_shown_without_attention() -> None:
    with running(shown=300) as server:
        server.give_recurrent()
        status, found, _ = server.ask("/attention", {"sentence": GERMAN})
        (wanted,) = server.ask(data={"sentences": [GERMAN]})[1]["translations"]
        page = Service(server.service.system, LIMITS)
        page.batcher.stop()
    assert (status, found["texts"][-1]) == (200, wanted)
    assert found["encoder"] == found["self"] == found["cross"] == []
    assert len(found["probabilities"]) == len(found["target"]) == len(found["texts"])
    assert "each head" in server.service.start_page
    assert "each head" not in page.start_page


def test_no_request_holds_more_than_may_wait() -> None:
    """It could never be answered, so it is not told to try again."""
    with running(queue=2) as server:
        status, found, _ = server.ask(data={"sentences": ["a"] * 3})
        assert (status, found["error"]) == (422, "sentences: must hold 1 to 2 sentences, not 3")


def test_a_body_that_is_too_large(usual: Running) -> None:
    for size in (LIMITS.body + 1, (DRAINED - 1) * LIMITS.body):
        status, found, _ = usual.ask(body=b" " * size)
        assert (status, "body: more than 262144 bytes" in found["error"]) == (413, True)
    fits = b'{"sentences": ["a"]}'
    assert usual.ask(body=fits + b" " * (LIMITS.body - len(fits)))[0] == 200


@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("/nothing", {}, 404),
        ("/static/../requests.py", {}, 404),
        ("/static/%2e%2e%2frequests.py", {}, 404),
        ("/static/index.html", {}, 404),
        ("/translate", {}, 405),
        ("/health", {"method": "DELETE"}, 405),
        ("/translate", {"body": b"{}", "headers": {}}, 415),
        ("/translate", {"body": b"{}", "headers": {"content-type": "Application/JSON"}}, 422),
        ("/translate", {"body": b"a=b", "headers": {"content-type": "text/plain"}}, 415),
    ],
)
def test_other_addresses(usual: Running, path: str, options: dict[str, bytes], status: int) -> None:
    found, body, _ = ask(usual.port, path, **options)  # type: ignore[arg-type]
    assert (found, list(body)) == (status, ["error"])


def test_the_page_loads_nothing_from_elsewhere(usual: Running) -> None:
    status, page, headers = usual.ask("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert GERMAN in page.decode()
    assert b"@" not in page
    assert f"http://127.0.0.1:{usual.port}/translate" in page.decode()
    assert b"<b>" not in usual.ask("/", headers={"host": "<b>"})[1]
    assert "'unsafe" not in headers["content-security-policy"]
    names = re.findall(r'(?:src|href)="([^"]*)"', page.decode())
    assert names == ["data:,", "static/page.css", "static/widget.css", "static/widget.js"]
    for name in names[1:]:
        status, text, _ = usual.ask(f"/{name}")
        assert status == 200
        assert b"http://" not in text.replace(b"http://www.w3.org/2000/svg", b"")


def test_too_many_waiting_sentences_are_refused() -> None:
    with running(queue=3) as server:
        first = server.busy()
        others = [server.asked("Der Hund."), server.asked("Der Hund.", "Die Katze.")]
        until(lambda: server.waiting() == 3)
        status, found, headers = server.ask(data={"sentences": ["Die Katze."]})
        assert (status, headers["retry-after"]) == (503, "1")
        assert found["error"] == "too many sentences are waiting; try again later"
        server.gate.set()
        assert [answer()[0] for answer in (first, *others)] == [200, 200, 200]
        assert server.ask(data={"sentences": ["Die Katze."]})[0] == 200


def test_a_client_that_goes_away_costs_no_place() -> None:
    with running(queue=2) as server:
        first = server.busy()
        body = b'{"sentences": ["Der Hund.", "Die Katze."]}'
        head = "POST /translate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: server.waiting() == 2)
            assert server.ask(data={"sentences": ["Die Frau."]})[0] == 503
        until(lambda: all(job.found.cancelled() for job in server.service.batcher.queue))
        others = server.asked("Die Frau.", "Der Mann.")
        until(lambda: not any(job.found.cancelled() for job in server.service.batcher.queue))
        server.gate.set()
        assert (first()[0], others()[0]) == (200, 200)
        assert sum(server.batches) == 3  # what nobody waits for was not translated


def test_an_answer_that_takes_too_long() -> None:
    with running(seconds=0.3) as server:
        first = server.busy()
        status, found, _ = server.ask(data={"sentences": ["Die Katze."]})
        assert (status, "within 0.3 s" in found["error"]) == (504, True)
        assert first()[0] == 504
        server.gate.set()
        assert server.ask("/health")[0] == 200
        with socket.create_connection(("127.0.0.1", server.port)) as slow:  # half a body
            slow.sendall(
                b"POST /translate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                b"content-length: 99\r\n\r\n{"
            )
            assert slow.recv(12) == b"HTTP/1.1 504"


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"])
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: a\r\n"])
def test_who_never_ends_a_head_is_disconnected(
    before: bytes, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if he goes on with a header every now and then, and after a request that was whole."""
    monkeypatch.setattr(module, "IDLE", 0.5)
    with running() as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(0.1)
        client.sendall(before)
        if before:
            while b'"waiting"' not in client.recv(9999):
                pass
        client.sendall(sent)
        begin, closed = time.monotonic(), False
        while not closed and time.monotonic() < begin + 10:
            try:
                closed = not client.recv(9999)
                time.sleep(0.01)
            except TimeoutError:
                client.sendall(b"x: y\r\n" if sent else b"")
            except ConnectionError:
                closed = True
        assert closed
        assert server.ask("/health")[0] == 200


@pytest.mark.parametrize("asked", ["POST /translate", "GET /health"])
def test_who_was_answered_and_never_ends_a_body_is_disconnected(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes before the body, of the wrong kind or not wanted; one byte follows."""
    monkeypatch.setattr(module, "IDLE", 0.5)
    head = f"{asked} HTTP/1.1\r\nhost: a\r\ncontent-type: text/plain\r\n"
    with running() as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(10)
        client.sendall(f"{head}content-length: 1000000\r\n\r\n".encode())
        assert client.recv(9999).startswith(b"HTTP/1.1")
        client.sendall(b"x")
        while client.recv(9999):  # until the server closes, or the time is up
            pass


def test_who_never_reads_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE", 0.3)
    with running() as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET /static/widget.js HTTP/1.1\r\nhost: a\r\n\r\n" * 400)
        connections = server.server.server_state.connections
        until(lambda: server.server.server_state.total_requests)
        until(lambda: not connections)
        assert server.ask("/health")[0] == 200


@pytest.mark.parametrize(("sizes", "aborted"), [([90, 60, 60], True), ([90, 60, 0], False)])
def test_who_reads_slowly_is_not_disconnected(sizes: list[int], *, aborted: bool) -> None:
    """Only who has read nothing since the last time."""
    left, ended, later = iter(sizes), list[bool](), list[tuple[Any, ...]]()
    transport = SimpleNamespace(
        get_write_buffer_size=lambda: next(left), abort=lambda: ended.append(True)
    )
    loop = SimpleNamespace(call_later=lambda _, *call: later.append(call))
    client: Any = SimpleNamespace(transport=transport, loop=loop)
    client.expect_reading = partial(module.Protocol.expect_reading, client)
    client.expect_reading()
    while later:
        again, *arguments = later.pop()
        again(*arguments)
    assert list(left) == []
    assert bool(ended) == aborted


def test_a_body_may_take_longer_than_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE", 0.2)
    head = "POST /translate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    body = b'{"sentences": ["Der Hund."]}'
    with running() as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:9])
        time.sleep(0.6)
        client.sendall(body[9:])
        assert client.recv(12) == b"HTTP/1.1 200"


def test_the_end_does_not_wait_for_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", -1.5)  # seconds; half a second is left
    head = "POST /translate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    with running() as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(20)
        client.sendall(f"{head}content-length: 99\r\n\r\n{{".encode())
        time.sleep(0.2)
        server.server.should_exit = True
        answer = b""
        while more := client.recv(9999):
            answer += more
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'{"error": "the server is stopping; try again later"}' in answer


def test_a_failure_is_told_without_what_was_asked() -> None:
    with running() as server:
        server._translate = lambda batch: 1 / 0  # type: ignore[assignment,return-value]
        status, found, _ = server.ask(data={"sentences": ["geheim"]})
        assert (status, found) == (500, {"error": "the server failed: ZeroDivisionError"})
        server._translate = type(server.service.batcher)._translate.__get__(server.service.batcher)
        assert server.ask(data={"sentences": ["Der Hund."]})[0] == 200


def test_what_was_accepted_is_answered_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.2)
    with running() as server:
        first = server.busy()
        second = server.asked("Die Katze.")
        until(lambda: server.waiting() == 1)
        server.server.should_exit = True
        status, found, headers = second()  # there was no time for it
        assert (status, headers["retry-after"]) == (503, "5")
        assert "stopping" in found["error"]
        server.gate.set()
        assert first()[0] == 200
        with pytest.raises(ConnectionRefusedError):
            server.ask("/health")
