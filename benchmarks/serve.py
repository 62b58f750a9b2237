"""Load and soak of the server over the loopback interface: ``python -m benchmarks.serve``.

The load is a number of clients that each send one sentence after the other on a connection of their
own. Every answer is compared with ``translate_lines``. The soak is many kinds of clients at once:
sound ones, others that hang up at any point, and others that send rubbish. It watches the server's
memory, and counts requests that were neither aborted nor answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from annotated_transformer.cli.options import Search
from annotated_transformer.cli.systems import open_pretrained
from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.engine.records import processor_name
from annotated_transformer.engine.system import translate_lines
from annotated_transformer.serving.app import Service
from annotated_transformer.serving.requests import Limits
from annotated_transformer.serving.server import address_of_socket, listen, serve
from benchmarks.records import keep, origin

CLIENTS = (1, 8, 64)
PATIENCE = 60.0  # seconds after which an answer counts as lost
THREADS = 1  # of the model; the clients need the rest of a small machine
ALONE = 1  # tokens of a batch: every sentence is one
SETTLED = 0.25  # the part of a soak after which memory should not grow
WORDS = "Der Die Das Bäcker Katze Zeitung schläft wirft weg , weil sie nass ist . " * 4


class SoakError(RuntimeError):
    """The server failed in a soak; the message says how."""


def work(tokens: int) -> None:
    """Serve the package's model with batches of at most this many tokens; 0 is the default."""
    limits = Limits(tokens=tokens) if tokens else Limits()
    system, pretrained = open_pretrained(Search())
    with listen("127.0.0.1", 0) as sock:
        place = address_of_socket(sock)
        service = Service(system, limits, "The model of the book", pretrained)
        serve(service, sock, lambda: print(place, flush=True))


@contextmanager
def server(tokens: int = 0) -> Iterator[tuple[int, int]]:
    """Start a server in a process of its own; yield its port and process id."""
    command = [sys.executable, "-m", "benchmarks.serve", "--work", str(tokens)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(THREADS)},
    ) as process:
        assert process.stdout is not None
        try:
            found = re.search(r":(\d+)$", process.stdout.readline())
            if found is None:
                raise SoakError("the server does not start")
            yield int(found[1]), process.pid
            if process.poll() is not None:
                raise SoakError(f"the server ended with status {process.returncode}")
        finally:
            process.terminate()


class Client:
    """A connection that is kept between requests; at the end, what is on its way is lost."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Client:
        """Connect."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Hang up."""
        self.writer.transport.abort()
        await asyncio.sleep(0)

    async def ask(self, body: bytes, path: str = "/translate") -> tuple[int, bytes]:
        """Send a body, and return status and body of the answer."""
        self.writer.write(request(body, path))
        return await self.answer()

    async def answer(self) -> tuple[int, bytes]:
        """Read an answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        found = re.search(r"content-length: (\d+)", head)
        body = await (self.reader.readexactly(int(found[1])) if found else self.reader.read())
        return int(head.split()[1]), body


def request(body: bytes, path: str = "/translate") -> bytes:
    """Return a request in HTTP."""
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def as_json(data: object) -> bytes:
    """Return data as JSON."""
    return json.dumps(data, ensure_ascii=False).encode()


# --- load ------------------------------------------------------------------------------------


def expectations(count: int) -> dict[str, str]:
    """Return sentences of both languages with their translations by ``translate_lines``."""
    pairs = grammar_pairs("test", count, seed=23)
    lines = [pair.text(language) for pair in pairs for language in ("de", "en")]
    system, _ = open_pretrained(Search())
    return dict(zip(lines, translate_lines(system, lines), strict=True))


async def load(
    port: int, clients: int, seconds: float, expected: dict[str, str], process: int = 0
) -> dict[str, float]:
    """Let clients send sentences, and return rate and times, and the server's processor time.

    Raises:
        SoakError: An answer differs from ``translate_lines``.
    """
    lines, spent = list(expected), []
    end = time.perf_counter() + seconds

    async def send(number: int) -> None:
        rng = random.Random(number)
        async with Client(port) as client:
            while (start := time.perf_counter()) < end:
                line = rng.choice(lines)
                status, body = await client.ask(as_json({"sentences": [line]}))
                spent.append(time.perf_counter() - start)
                if status != 200 or json.loads(body)["translations"] != [expected[line]]:
                    raise SoakError(f"{line!r}: answered with status {status}: {body[:200]!r}")

    begun, busy = time.perf_counter(), busy_seconds(process)
    await asyncio.gather(*map(send, range(clients)))
    cuts = statistics.quantiles(spent, n=100)
    return {
        "clients": clients,
        "requests": len(spent),
        "sentences_per_s": round(len(spent) / (time.perf_counter() - begun), 1),
        "busy_ms_per_sentence": round(1000 * (busy_seconds(process) - busy) / len(spent), 2),
        "p50_ms": round(1000 * cuts[49], 1),
        "p99_ms": round(1000 * cuts[98], 1),
    }


def measure_load(tokens: int, seconds: float, expected: dict[str, str]) -> list[dict[str, float]]:
    """Measure a server at each number of clients, the first seconds of each not counted."""
    found = []
    with server(tokens) as (port, process):
        for clients in CLIENTS:
            asyncio.run(load(port, clients, seconds / 5, expected))
            found.append(asyncio.run(load(port, clients, seconds, expected, process)))
            print(found[-1], flush=True)
    return found


def busy_seconds(process: int) -> float:
    """Return the processor time of a process, or of this one."""
    fields = Path(f"/proc/{process or os.getpid()}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


# --- soak ------------------------------------------------------------------------------------


def sound(rng: random.Random) -> tuple[bytes, str, set[int]]:
    """Return a request that must be answered with 200, or 503 when too many wait."""
    sentences = [" ".join(rng.choices(WORDS.split(), k=rng.randint(1, 20))) for _ in range(8)]
    beam = rng.choice((1, 1, 4))
    if rng.random() < 0.1:
        return as_json({"sentence": sentences[0], "beam": beam}), "/attention", {200, 422, 503}
    return (
        as_json({"sentences": sentences[: rng.randint(1, 8)], "beam": beam}),
        "/translate",
        {200, 503},
    )


def rubbish(rng: random.Random) -> tuple[bytes, str, set[int]]:
    """Return a request that must be refused."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.randint(0, 2000)), "/translate", {422}
    if kind == 1:
        return b"[" * rng.randint(1, 100_000), "/translate", {422}
    if kind == 2:
        return b'{"sentences": ["' + b"a" * 300_000 + b'"]}', "/translate", {413}
    if kind == 3:
        return as_json({"sentences": ["x" * 5000]}), "/translate", {422}
    if kind == 4:
        return as_json({"sentences": ["Hund"] * 65}), "/attention", {422}
    if kind == 5:
        return b'{"sentences": ["a"], "beam": ' + b"9" * 5000 + b"}", "/translate", {422}
    if kind == 6:
        odd = rng.choice((b"1", b"null", b"[]", b"{}", b'"\\ud800"', b"NaN"))
        return b'{"sentences": [' + odd + b"]}", "/translate", {422}
    return b"", f"/{rng.randrange(10**9)}", {404}


async def soak_client(port: int, seed: int, end: float, counts: Counter[str]) -> None:
    """Be a sound client, one that hangs up, or one that sends rubbish, in turn."""
    rng = random.Random(seed)
    while time.monotonic() < end:
        async with Client(port) as client:
            try:
                for _ in range(rng.randint(1, 20)):
                    if not await soak_step(client, rng, counts):
                        break
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
                counts[f"lost: {type(error).__name__}"] += 1


async def soak_step(client: Client, rng: random.Random, counts: Counter[str]) -> bool:
    """Make one request; return whether the connection can be used again."""
    kind = rng.random()
    body, path, wanted = (rubbish if kind < 0.2 else sound)(rng)
    if kind > 0.7:  # hang up, anywhere
        whole = request(body, path)
        part = rng.choice((rng.randrange(len(whole)), len(whole)))
        client.writer.write(whole[:part])
        await asyncio.sleep(rng.choice((0, 0.01, 0.1)) * rng.random())
        counts["aborted"] += 1
        return False
    if 0.2 <= kind < 0.22:  # this is not even HTTP
        client.writer.write(rng.randbytes(100) + b"\r\n\r\n")
        status, _ = await asyncio.wait_for(client.answer(), PATIENCE)
        counts[f"{status}, no HTTP"] += 1
        return False
    status, answer = await asyncio.wait_for(client.ask(body, path), PATIENCE)
    counts[str(status)] += 1
    if status not in wanted:
        counts["wrong"] += 1
        print(f"status {status} for {body[:200]!r}: {answer[:200]!r}", flush=True)
    json.loads(answer)
    return status != 413


def resident_mb(process: int) -> float:
    """Return the resident memory of a process in MB."""
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) / 1024


async def watch(process: int, end: float) -> list[float]:
    """Return the memory of a process in MB, over time."""
    found = []
    while time.monotonic() < end:
        found.append(resident_mb(process))
        await asyncio.sleep(0.5)
    return found


def growth(memory: Sequence[float]) -> float:
    """Return by what share memory grew from the second quarter of a soak to the last."""
    quarter = max(1, int(SETTLED * len(memory)))
    before = statistics.median(memory[quarter : 2 * quarter])
    return statistics.median(memory[-quarter:]) / before - 1


def soak(minutes: float, clients: int = 16, seed: int = 0) -> dict[str, Any]:
    """Put up a server, let clients misuse it, and return what came of it."""
    counts: Counter[str] = Counter()

    async def run(port: int, process: int) -> list[float]:
        end = time.monotonic() + 60 * minutes
        watching = asyncio.ensure_future(watch(process, end))
        await asyncio.gather(
            *(soak_client(port, 1000 * seed + i, end, counts) for i in range(clients))
        )
        memory = await watching
        expected = expectations(1)
        async with Client(port) as client:
            status, body = await client.ask(as_json({"sentences": list(expected)}))
        if status != 200 or json.loads(body)["translations"] != list(expected.values()):
            raise SoakError(f"after the soak: status {status}: {body[:200]!r}")
        return memory

    with server() as (port, process):
        memory = asyncio.run(run(port, process))
        files = len(os.listdir(f"/proc/{process}/fd"))
    lost = sum(count for name, count in counts.items() if name.startswith("lost"))
    return {
        "minutes": minutes,
        "clients": clients,
        "answers": dict(sorted(counts.items())),
        "answered": sum(count for name, count in counts.items() if name[0].isdigit()),
        "aborted": counts["aborted"],
        "lost": lost,
        "wrong": counts["wrong"],
        "memory_mb": [round(one, 1) for one in memory[:: max(1, len(memory) // 60)]],
        "growth": round(growth(memory), 4),
        "open_files": files,
    }


def main() -> None:
    """Parse the options, measure, print and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("--seconds", type=float, default=15, help="of each measurement")
    parser.add_argument("--minutes", type=float, default=10, help="of the soak; 0: none")
    parser.add_argument("--record", type=Path, help="write the figures into this JSON file")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work)
        return
    others = os.getloadavg()[0]  # what ran in the minute before
    expected = expectations(200)
    found: dict[str, Any] = {}
    if options.seconds:
        found["load"] = measure_load(0, options.seconds, expected)
        found["one_by_one"] = measure_load(ALONE, options.seconds, expected)
    if options.minutes:
        found["soak"] = soak(options.minutes)
        print({name: value for name, value in found["soak"].items() if name != "memory_mb"})
    if options.record:
        start = {"kind": "serving", **origin("benchmarks.serve"), "hardware": processor_name()}
        start["threads"] = THREADS
        start["load_average"] = others
        keep({**start, **found}, options.record)


if __name__ == "__main__":
    main()
