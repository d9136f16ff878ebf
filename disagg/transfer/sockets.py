"""A connected socket on the event loop: exact reads into memory, gathered writes, TLS or not.

One task reads and one writes at a time. Nothing is buffered here: bytes go from the kernel to where
the reader wants them, and from where the writer has them to the kernel. Whatever ends a connection
is a ConnectionError, and a write that was cut short ends it too: half a frame may be out.
"""

import asyncio
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NoReturn

from disagg.wire import Buffer

MAX_PARTS = 256  # of one gathered write; the kernel takes up to 1024
WAKE_BYTES = 512 << 10  # a reader that wants more is woken when so much has come
MAX_READS = 64  # in a row; then others have their turn, however much a peer sends
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
        self._reads = 0  # since others had their turn
        self._closed = False
        self._why = "it was closed here"
        sock.setblocking(False)
        _tune(sock, congestion)

    async def secure(self, context: ssl.SSLContext, server_name: str | None) -> None:
        """TLS from now on; a server has no `server_name` to check."""
        try:
            self._sock.getpeername()  # wrapping loses a socket whose peer is gone
            self._sock = context.wrap_socket(
                self._sock,
                server_side=server_name is None,
                server_hostname=server_name,
                do_handshake_on_connect=False,
            )
            while not await self._shook_hands(self._sock):
                pass
        except OSError as error:
            _end("no TLS", error)

    async def read_into(self, memory: memoryview) -> None:
        """Fill `memory`."""
        while memory:
            self._check_open()
            try:
                count = self._sock.recv_into(memory)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._want(len(memory))
                await self._wait(reading=True)
                continue
            except OSError as error:
                _end("the connection broke", error)
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            self.moved_at = time.monotonic()
            memory = memory[count:]
            self._reads += 1
            if self._reads >= MAX_READS:
                self._reads = 0
                await asyncio.sleep(0)

    async def write(self, parts: Sequence[Buffer], counts: bool = True) -> None:
        """Hand all parts to the kernel, in order; `counts`: as bytes that moved."""
        self._check_open()
        left = deque(memoryview(part) for part in parts if len(part))
        try:
            while left:
                await self._write_some(left, counts)
        except OSError as error:
            _end("the connection broke", error)  # what the peer said before may still be read
        except BaseException:
            self.close("a write was cut short")
            raise

    @property
    def has_news(self) -> bool:
        """Something can be read, if only the end."""
        if self._closed:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def close(self, why: str = "it was closed here") -> None:
        """Whoever reads or writes, now or later, gets a ConnectionError that says why."""
        if self._closed:
            return
        self._closed, self._why = True, why
        if self._sock.fileno() >= 0:  # a handshake that failed may have lost it
            self._forget(reading=True)
            self._forget(reading=False)
        for future in self._waiting:
            _wake(future)
        self._sock.close()

    async def _shook_hands(self, sock: ssl.SSLSocket) -> bool:
        self._check_open()
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            await self._wait(reading=True)
        except ssl.SSLWantWriteError:
            await self._wait(reading=False)
        else:
            return True
        return False

    async def _write_some(self, left: deque[memoryview], counts: bool) -> None:
        self._check_open()
        try:
            count = self._send(left)
        except (BlockingIOError, ssl.SSLWantWriteError):
            await self._wait(reading=False)
            return
        if counts:
            self.moved_at = time.monotonic()
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionAbortedError(self._why)

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
        self._reads = 0
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
    """A connection to a listening peer, at the first address of its name that answers."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for place, (kind, _, _, _, address) in enumerate(found):
        raw = socket.socket(kind, socket.SOCK_STREAM)
        with ExitStack() as undo:
            undo.callback(raw.close)
            sock = AsyncSocket(raw, congestion)
            undo.callback(sock.close)
            try:
                await loop.sock_connect(raw, address)
            except OSError:
                if place + 1 == len(found):
                    raise
                continue
            if tls is not None:
                await sock.secure(tls, host)
            undo.pop_all()
            return sock
    raise ConnectionAbortedError(f"{host} has no address")


def address_of(host: str, port: int) -> str:
    """ "host:port"; an IPv6 address stands in brackets, whether it came with them or not."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _end(what: str, error: OSError) -> NoReturn:
    """Whatever it was, it ends the connection."""
    if isinstance(error, ConnectionError):
        raise error
    why = getattr(error, "verify_message", "") or getattr(error, "reason", "")
    raise ConnectionAbortedError(f"{what}: {why or error.strerror or error}") from error


def _wake(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _tune(sock: socket.socket, congestion: str | None) -> None:
    """Small messages leave at once, and a peer whose machine is gone is found out."""
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
    options["TCP_USER_TIMEOUT"] = DEAD_MS
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        with suppress(OSError, AttributeError):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if congestion is not None:
        with suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
