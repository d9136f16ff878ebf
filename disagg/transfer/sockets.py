"""A connected socket on the event loop: exact reads into memory, gathered writes, TLS or not.

One task reads and one writes at a time. Nothing is buffered here: bytes go from the kernel to where
the reader wants them, and from where the writer has them to the kernel. Whatever ends a connection
is a ConnectionError.
"""

import asyncio
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from disagg.wire import Buffer

MAX_PARTS = 256  # of one gathered write; the kernel takes up to 1024
WAKE_BYTES = 512 << 10  # a reader that wants more is woken when so much has come
DEAD_MS = 5000  # sent bytes that no kernel acknowledges so long mean a dead link

_LOWAT = getattr(socket, "SO_RCVLOWAT", None)


class AsyncSocket:
    """See the module. `moved_at`: when bytes last moved, on the monotonic clock."""

    def __init__(self, sock: socket.socket, congestion: str | None = None):
        self.moved_at = time.monotonic()
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[None]] = set()
        self._wake_bytes = 1
        self._closed = False
        sock.setblocking(False)
        _tune(sock, congestion)

    async def secure(self, context: ssl.SSLContext, server_name: str | None) -> None:
        """TLS from now on; a server has no `server_name` to check."""
        self._sock = context.wrap_socket(
            self._sock,
            server_side=server_name is None,
            server_hostname=server_name,
            do_handshake_on_connect=False,
        )
        while True:
            try:
                self._sock.do_handshake()
                return
            except ssl.SSLWantReadError:
                await self._wait(reading=True)
            except ssl.SSLWantWriteError:
                await self._wait(reading=False)
            except ssl.SSLError as error:
                raise ConnectionAbortedError(f"no TLS: {error.reason or error}") from error

    async def read_into(self, memory: memoryview) -> None:
        """Fill `memory`."""
        while memory:
            try:
                count = self._sock.recv_into(memory)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._want(len(memory))
                await self._wait(reading=True)
                continue
            except ssl.SSLError as error:
                raise ConnectionAbortedError(f"TLS broke: {error.reason or error}") from error
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            self.moved_at = time.monotonic()
            memory = memory[count:]

    async def write(self, parts: Sequence[Buffer], counts: bool = True) -> None:
        """Hand all parts to the kernel, in order; `counts`: as bytes that moved.

        If this is cancelled the connection is of no use any more.
        """
        if self._closed:
            raise ConnectionAbortedError("the connection was closed here")
        left = deque(memoryview(part) for part in parts if len(part))
        while left:
            try:
                count = self._send(left)
            except (BlockingIOError, ssl.SSLWantWriteError):
                await self._wait(reading=False)
                continue
            except ssl.SSLError as error:
                raise ConnectionAbortedError(f"TLS broke: {error.reason or error}") from error
            if counts:
                self.moved_at = time.monotonic()
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]

    @property
    def has_news(self) -> bool:
        """Something can be read, if only the end."""
        return self._closed or bool(select.select([self._sock], [], [], 0)[0])

    def close(self) -> None:
        """Whoever waits gets a ConnectionError."""
        if self._closed:
            return
        self._closed = True
        for reading in (True, False):
            self._forget(reading)
        for future in self._waiting:
            if not future.done():
                future.set_exception(ConnectionAbortedError("the connection was closed here"))
        self._sock.close()

    def _send(self, left: deque[memoryview]) -> int:
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.send(left[0])
        return self._sock.sendmsg([left[i] for i in range(min(len(left), MAX_PARTS))])

    def _want(self, nbytes: int) -> None:
        """Be woken once for much, not often for little; TLS records are small anyway."""
        wanted = min(nbytes, WAKE_BYTES)
        if wanted != self._wake_bytes and _LOWAT and not isinstance(self._sock, ssl.SSLSocket):
            self._sock.setsockopt(socket.SOL_SOCKET, _LOWAT, wanted)
            self._wake_bytes = wanted

    async def _wait(self, reading: bool) -> None:
        if self._closed:
            raise ConnectionAbortedError("the connection was closed here")
        ready: asyncio.Future[None] = self._loop.create_future()
        add = self._loop.add_reader if reading else self._loop.add_writer
        add(self._sock.fileno(), _wake, ready)
        self._waiting.add(ready)
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if not self._closed:
                self._forget(reading)

    def _forget(self, reading: bool) -> None:
        remove = self._loop.remove_reader if reading else self._loop.remove_writer
        remove(self._sock.fileno())


async def dial(
    host: str, port: int, tls: ssl.SSLContext | None, congestion: str | None = None
) -> AsyncSocket:
    """A connection to a listening peer."""
    loop = asyncio.get_running_loop()
    kind, _, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    raw = socket.socket(kind, socket.SOCK_STREAM)
    with ExitStack() as undo:
        sock = AsyncSocket(raw, congestion)
        undo.callback(sock.close)
        await loop.sock_connect(raw, address)
        if tls is not None:
            await sock.secure(tls, host)
        undo.pop_all()
    return sock


def _wake(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _tune(sock: socket.socket, congestion: str | None) -> None:
    """Small messages leave at once, and a peer whose machine is gone is found out."""
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
    options["TCP_USER_TIMEOUT"] = DEAD_MS
    with suppress(OSError):  # not every kernel has all of them
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if congestion is not None and hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
