"""The server: its socket, its signals and its end."""

import asyncio
import contextlib
import errno
import math
import os
import socket
from collections.abc import Callable, Iterator

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from annotated_transformer.engine.config import UsageError
from annotated_transformer.engine.interruption import handle_signals
from annotated_transformer.serving.app import Service

CONNECTIONS = 512  # at a time; uvicorn answers 503 beyond
IDLE = 15  #: Seconds after which a connection without the whole head of a request is closed.
GRACE = 10  # seconds for what was accepted, once the server is told to stop


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a name or address; port 0 takes any that is free.

    Raises:
        UsageError: The address cannot be used.
    """
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host}: is unknown; give an address as 127.0.0.1") from None
    try:
        server = socket.create_server((host, port), family=family)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or a body waits for an ACK
        return server
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--host {host}: is no address of this machine; give one") from None
        reason = os.strerror(error.errno) if error.errno else error
        what = f"--host {host} --port {port}: cannot be used: {reason}"
        raise UsageError(f"{what}; choose another port, or 0 for any that is free") from None


def address_of_socket(sock: socket.socket) -> str:
    """Return the address of a listening socket, as typed into a browser."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Protocol(H11Protocol):
    """HTTP for clients that go on within ``IDLE`` seconds.

    They send the whole head of a request in this time, and the rest of a body that was answered
    before it came; they read some of a long answer. Uvicorn itself waits for as long as the client
    likes.
    """

    watch: asyncio.TimerHandle | None = None
    stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the first head."""
        super().connection_made(transport)
        self.time_head()

    def data_received(self, data: bytes) -> None:
        """Take some bytes; more of the same head get no more time."""
        super().data_received(data)
        self.time_head()

    def time_head(self) -> None:
        """Start the time for a head, unless it runs; end it when the head is whole."""
        ours, theirs = self.conn.our_state, self.conn.their_state
        waits = theirs is h11.IDLE or (ours is h11.DONE and theirs is h11.SEND_BODY)
        if not waits and self.watch is not None:
            self.watch.cancel()
            self.watch = None
        elif waits and self.watch is None:
            self.watch = self.loop.call_later(IDLE, self.timeout_keep_alive_handler)

    def pause_writing(self) -> None:
        """Start the time for reading."""
        super().pause_writing()
        self.expect_reading()

    def resume_writing(self) -> None:
        """End it."""
        super().resume_writing()
        if self.stuck is not None:
            self.stuck.cancel()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, also for a client that leaves the end of an answer unread."""
        super().timeout_keep_alive_handler()
        self.expect_reading()

    def expect_reading(self, before: float = math.inf) -> None:
        """Disconnect a client that has read nothing since the last time."""
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.transport.abort()
        elif left:
            self.stuck = self.loop.call_later(IDLE, self.expect_reading, left)


class Server(uvicorn.Server):
    """Uvicorn with our signals, and our way to stop. It logs nothing of a request.

    It calls ``started`` when connections are accepted.
    """

    def __init__(self, service: Service, started: Callable[[], object]) -> None:
        config = uvicorn.Config(
            service.app(), loop="asyncio", http=Protocol, ws="none", lifespan="off",
            log_config=None, log_level="critical", access_log=False, server_header=False,
            proxy_headers=False, limit_concurrency=CONNECTIONS, timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=GRACE + 2,
        )  # fmt: skip
        super().__init__(config)
        self.service, self.tell_started = service, started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on the signals that end our commands; after a second one, once the batch is done."""
        with handle_signals(self.handle_exit):
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        self.tell_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, and answer what was accepted: towards the end, by refusing it."""
        refuse = asyncio.get_running_loop().call_later(GRACE, self.service.batcher.stop)
        await super().shutdown(sockets)
        refuse.cancel()

    def handle_exit(self, sig: int, frame: object) -> None:
        """Note a signal."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._captured_signals.append(sig)

    @property
    def signal(self) -> int:
        """The signal that ended the server; 0 if none."""
        return self._captured_signals[0] if self._captured_signals else 0


def serve(service: Service, sock: socket.socket, started: Callable[[], object]) -> None:
    """Answer requests until a signal comes.

    Then no connection is accepted any more, and what was accepted is answered.

    Raises:
        KeyboardInterrupt: At the end, with the signal's number.
    """
    server = Server(service, started)
    try:
        server.run([sock])
    finally:
        service.batcher.stop()
        service.batcher.thread.join()
    if server.signal:
        raise KeyboardInterrupt(server.signal)
