"""Client connections: how many there may be, and how long a client may take.

    connected ──► header ──► body ──► response ──► idle ──► header ──► ...
       │ silence_s: header  │ silence_s per pause │ any  │ idle_s
       ▼ within that time   ▼ and BODY_RATE       time   ▼
       closed               closed                       closed

uvicorn serves HTTP/1.1 with httptools, which takes an eighth less time for a token than h11, but
does not limit headers: that is done here.
"""

import asyncio
import errno
import json
import logging
import random
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from disagg.config import ServerConfig
from disagg.errors import RequestError
from disagg.server.pace import Pace, PacedRequests
from disagg.server.process import max_connections
from disagg.server.responses import error_body

GRACE_S = 2  # for responses in progress when the service stops
BACKLOG = 128  # connections that the system accepts for us
ACCEPTS_A_TURN = 16  # of the event loop; their requests begin in the following turns
MAX_HEADER_BYTES = 16 << 10
BODY_RATE = 8 << 10  # bytes per second that a client has to send of a long request
MAX_REFUSALS = 100  # connections that are told at once that there are too many
LINGER_S = (
    1.0  # before such a connection is closed, so that its client reads the answer
)
RETRY_S = (1, 5)  # when such a client may come again
UPGRADE = b"upgrade:"
UPGRADE_LINE = re.compile(rb"(?<=\n)" + UPGRADE, re.IGNORECASE)
IGNORED = b"ignored:"  # of the same length
HEADER_END = b"\r\n\r\n"
LOG_PAUSE_S = 10.0  # between two lines about too many open files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of client connections: their number, silence in a request, time between two."""

    max_connections: int
    silence_s: float
    idle_s: float

    @classmethod
    def of(cls, config: ServerConfig) -> "ConnectionLimits":
        """The configured limits; the number of connections depends on the limit of open files."""
        return cls(max_connections(config), config.silence_s, config.idle_s)


class ConnectionPool:
    """The open connections of a server, those that it serves and those that it refuses.

    pace: at which their requests begin, and end when clients leave
    """

    def __init__(self, limits: ConnectionLimits):
        self.limits = limits
        self.pace = Pace()
        self._num_served = 0
        self._num_refused = 0

    def open(self) -> bool:
        """Count one more connection; False if there are too many."""
        if self._num_served >= self.limits.max_connections:
            return False
        self._num_served += 1
        return True

    def close(self) -> None:
        """A connection that was counted is gone."""
        self._num_served -= 1

    def refuse(self, transport: asyncio.Transport) -> None:
        """Answer 503 and close; in a flood of connections, close without an answer."""
        self._num_refused += 1
        transport.set_protocol(Refusal(self._end_refusal))
        if self._num_refused > MAX_REFUSALS:
            transport.abort()
            return
        transport.write(busy_response())
        asyncio.get_running_loop().call_later(LINGER_S, transport.close)

    def _end_refusal(self) -> None:
        self._num_refused -= 1


class Refusal(asyncio.Protocol):
    """A refused connection until it is closed; what the client sends is dropped."""

    def __init__(self, on_close: Callable[[], None]):
        self._on_close = on_close

    def connection_lost(self, error: Exception | None) -> None:
        self._on_close()


def busy_response() -> bytes:
    """The whole HTTP response to a client for which there is no connection."""
    body = error_body("too many connections; try again later", "capacity", 503)
    content = json.dumps(body).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n"
        f"Retry-After: {random.randint(*RETRY_S)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + content


class HeaderFilter:
    """Renames the Upgrade header of a request, wherever its bytes are cut.

    Java's clients offer HTTP/2 with their first request (h2c). A server may ignore the offer, but
    the parser would stop after the header and lose the body.
    """

    def __init__(self) -> None:
        self._passed = b""  # the last bytes that were passed on
        self._held = b""  # the begin of a line that may become an Upgrade header

    @property
    def is_inside(self) -> bool:
        """Whether a part of a header has arrived."""
        return bool(self._passed or self._held)

    def split(self, data: bytes) -> tuple[bytes, bytes]:
        """The next bytes of the header for the parser, and what is behind the header."""
        known = len(self._passed)
        text = self._passed + self._held + data
        header, end, rest = text.partition(HEADER_END)
        header = UPGRADE_LINE.sub(IGNORED, header + end)
        if end:
            self._passed = self._held = b""
            return header[known:], rest
        _, line_end, line = header.rpartition(b"\n")
        is_cut = line_end and UPGRADE.startswith(line.lower())
        self._held = line if is_cut else b""
        header = header.removesuffix(self._held)
        self._passed = header[1 - len(HEADER_END) :]
        return header[known:], b""


@dataclass
class Arrival:
    """How much of a request has arrived, in header and body. Times are those of the event loop."""

    began: float
    heard_at: float
    nbytes: int = 0

    def add(self, nbytes: int, now: float) -> None:
        """More of the request has arrived."""
        self.nbytes += nbytes
        self.heard_at = now

    def deadline(self, silence_s: float, in_body: bool) -> float:
        """When to close the connection unless more arrives: a header has to be whole by then."""
        if not in_body:
            return self.began + silence_s
        slowest = self.began + silence_s + self.nbytes / BODY_RATE
        return min(self.heard_at + silence_s, slowest)


class Phase(Enum):
    """What a client sends next."""

    HEADER = "header"
    BODY = "body"


class Connection(HttpToolsProtocol):
    """An HTTP/1.1 connection that is closed if a request arrives too slowly.

    uvicorn's own timer closes idle connections. A client that waits for its response may be silent.
    """

    def __init__(self, pool: ConnectionPool, **options: Any):
        super().__init__(**options)
        self.timeout_keep_alive = pool.limits.idle_s  # type: ignore[assignment]
        self._pool = pool
        self._phase = Phase.HEADER
        self._header = HeaderFilter()
        self._has_begun = False  # a request, as far as the parser has read
        self._header_bytes = 0  # of the parts that are whole
        self._has_whole_request = False  # since the latest bytes arrived
        self._arrival: Arrival | None = None  # of the request that is incomplete
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if not self._pool.open():
            self._pool.refuse(transport)
            return
        super().connection_made(transport)
        self._begin_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.close()
        if self._timer is not None:
            self._timer.cancel()
        end = partial(super().connection_lost, exc)
        if self.cycle is None or self.cycle.response_complete:
            end()
        else:
            self.cycle.disconnected = True  # nothing more is written
            self._pool.pace.call(end)

    def data_received(self, data: bytes) -> None:
        if self._arrival is None:
            self._begin_request()
        assert self._arrival is not None
        self._arrival.add(len(data), self.loop.time())
        self._has_whole_request = False
        self._parse(data)
        if self._has_whole_request:
            self._arrival = None
            if self._has_begun or self._header.is_inside:  # the request behind it
                self._begin_request()
        elif self._phase is Phase.HEADER and self._arrival.nbytes > MAX_HEADER_BYTES:
            self._refuse_header()

    def _parse(self, data: bytes) -> None:
        """Give bytes to the parser, header by header."""
        while data and not self.transport.is_closing():
            rest = b""
            if self._phase is Phase.HEADER:
                data, rest = self._header.split(data)
            if data:
                super().data_received(data)
            data = rest

    # -- called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_header(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(name + value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._phase = Phase.BODY

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._phase = Phase.HEADER
        self._header = HeaderFilter()
        self._has_begun = False
        self._has_whole_request = True

    # -- limits

    def _count_header(self, part: bytes) -> None:
        """RequestError, which the parser turns into a status of 400, for a header that is long."""
        self._header_bytes += len(part)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise RequestError("the header is too long")

    def _refuse_header(self) -> None:
        if not self.transport.is_closing():
            self.send_400_response(f"a header has at most {MAX_HEADER_BYTES:,} bytes")

    def _begin_request(self) -> None:
        now = self.loop.time()
        self._arrival = Arrival(began=now, heard_at=now)
        if self._timer is None:
            self._check()

    def _check(self) -> None:
        """Close the connection if the client is too slow, else look again later."""
        self._timer = None
        if self._arrival is None or self.transport.is_closing():
            return
        in_body = self._phase is Phase.BODY
        deadline = self._arrival.deadline(self._pool.limits.silence_s, in_body)
        if self.loop.time() >= deadline:
            self.transport.close()
        else:
            self._timer = self.loop.call_at(deadline, self._check)


class HttpServer(uvicorn.Server):
    """A server of an application. Its limits can change while it serves."""

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self.pool = ConnectionPool(ConnectionLimits.of(config))
        options = uvicorn.Config(
            PacedRequests(app, self.pool.pace),
            http=partial(Connection, self.pool),  # type: ignore[arg-type]
            ws="none",
            backlog=ACCEPTS_A_TURN,
            log_config=None,  # its lines go where ours go
            log_level="error",  # a client cannot cause lines
            access_log=False,
            lifespan="off",
            ssl_certfile=config.tls_certificate,
            ssl_keyfile=config.tls_key,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(options)

    async def serve(self, sockets: Any = None) -> None:
        """Serve on bound sockets until `should_exit` is set."""
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections.

        asyncio uses one number both for connections that wait and for those accepted in a turn.
        """
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)

    def end(self) -> None:
        """End with the responses in progress; from any thread."""
        self.should_exit = True

    def limit(self, config: ServerConfig) -> None:
        """Apply other limits; the time between two requests, to new connections."""
        self.pool.limits = ConnectionLimits.of(config)


class LoopErrors:
    """The event loop's exception handler: asyncio reports each failed accept with a traceback."""

    def __init__(self) -> None:
        self._silent_until = 0.0

    def __call__(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (
            errno.EMFILE,
            errno.ENFILE,
        ):
            loop.default_exception_handler(context)
        elif loop.time() >= self._silent_until:
            self._silent_until = loop.time() + LOG_PAUSE_S
            log.error("too many open files: connections wait until others are closed")


def http_server(app: ASGIApp, config: ServerConfig) -> HttpServer:
    """A server of the application; its `serve` takes the sockets."""
    return HttpServer(app, config)
