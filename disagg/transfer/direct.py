"""Frames over a plain socket that gRPC negotiated.

    receiver: Attach answers a port and a key ──► sender: connects, says hello with the key
    hello, 24 bytes: magic · version · key │ then frames ► ◄ PushResponses, each after its length

One connection for each pair of workers: TCP, or TLS with the certificates of gRPC. A key opens one
connection and expires soon. A connection without a valid hello is closed after 2 s, or earlier if
too many wait: then the oldest is closed. Everything else of a hand-off stays with gRPC. This file
knows frames, but no hand-off.
"""

import asyncio
import logging
import secrets
import socket
import ssl
import struct
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import islice

from disagg.errors import CorruptFrameError, PeerLostError, VersionError, WireError
from disagg.transfer.messages import FrameAnswer
from disagg.transfer.receiver import PageReceiver
from disagg.transfer.rpc import bind_within, host_of
from disagg.transfer.security import Security, tls_context
from disagg.wire import MAX_FRAME_BYTES, PRELUDE_BYTES, Buffer, frame_bytes

log = logging.getLogger(__name__)

MAGIC = b"dgKD"
VERSION = 1
KEY_BYTES = 16
KEY_S = 10.0  # until a key expires
HELLO_S = 2.0  # until a connection must have sent a valid hello
MAX_STRANGERS = 64  # connections without a hello
REST_S = 0.1  # pause after a connection that could not be accepted
MAX_PARTS = 256  # of one gathered write; the kernel takes up to 1024
MAX_ANSWER_BYTES = 64 << 10
MAX_READS = 64  # reads in a row, until other tasks run
WAKE_BYTES = (
    512 << 10
)  # a reader that waits for more is woken when this much has arrived
# bbr, the default of some hosts, takes the pauses between frames for the rate of the link: 0.88 and
# 0.79 of a TCP stream over 5 and 10 Gb/s, where cubic has 0.99 and 0.98 (November 2026)
CONGESTION = b"cubic"
DEAD_MS = 5000  # a link is dead if sent bytes are not acknowledged for this long

_OPTIONS: dict[str, int | bytes] = {
    "TCP_NODELAY": 1,
    "TCP_CONGESTION": CONGESTION,
    "TCP_KEEPIDLE": 1,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": DEAD_MS,
}
_HELLO = struct.Struct(f"<4sI{KEY_BYTES}s")
_LENGTH = struct.Struct("<I")


class AsyncSocket:
    """A connected socket with exact reads and gathered writes. It raises OSError when it ends.

    One task reads and one writes at a time. Cancel them before closing it.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._wake_bytes = 1
        self._reads = 0
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS.items():
            with suppress(OSError, AttributeError):  # some systems lack some of them
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    async def secure(self, context: ssl.SSLContext, server_name: str | None) -> None:
        """Switch to TLS. A client checks `server_name`; None: this is the server."""
        self._sock = context.wrap_socket(
            self._sock,
            server_side=server_name is None,
            server_hostname=server_name,
            do_handshake_on_connect=False,
        )
        while True:
            try:
                return self._sock.do_handshake()
            except ssl.SSLWantReadError:
                await self._ready(reading=True)
            except ssl.SSLWantWriteError:
                await self._ready(reading=False)

    async def read_into(self, memory: memoryview) -> None:
        """Fill the memory; ConnectionError if the peer ends before."""
        while len(memory):
            try:
                count = self._sock.recv_into(memory)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._set_wake_bytes(len(memory))
                await self._ready(reading=True)
                continue
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            memory = memory[count:]
            self._reads += 1
            if self._reads % MAX_READS == 0:
                await asyncio.sleep(0)

    async def read(self, nbytes: int) -> bytearray:
        """The next bytes."""
        data = bytearray(nbytes)
        await self.read_into(memoryview(data))
        return data

    async def write(self, parts: Iterable[Buffer]) -> None:
        """Pass all parts to the kernel, in their order."""
        unsent = deque(memoryview(part) for part in parts if len(part))
        while unsent:
            try:
                _drop_sent(unsent, self._send(unsent))
            except (BlockingIOError, ssl.SSLWantWriteError):
                await self._ready(reading=False)

    def close(self) -> None:
        """End the connection."""
        self._sock.close()

    def _send(self, unsent: deque[memoryview]) -> int:
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.send(unsent[0])
        return self._sock.sendmsg(list(islice(unsent, MAX_PARTS)))

    def _set_wake_bytes(self, nbytes: int) -> None:
        """Wake once for many bytes, not often for few. TLS records are small anyway."""
        wake_bytes = min(nbytes, WAKE_BYTES)
        if wake_bytes != self._wake_bytes and not isinstance(self._sock, ssl.SSLSocket):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._wake_bytes = wake_bytes

    async def _ready(self, reading: bool) -> None:
        """Wait until the socket can be read or written."""
        fd = self._sock.fileno()
        ready = self._loop.create_future()

        def set_ready() -> None:
            if not ready.done():
                ready.set_result(None)

        if reading:
            self._loop.add_reader(fd, set_ready)
        else:
            self._loop.add_writer(fd, set_ready)
        try:
            await ready
        finally:
            if reading:
                self._loop.remove_reader(fd)
            else:
                self._loop.remove_writer(fd)


def _drop_sent(unsent: deque[memoryview], count: int) -> None:
    """Remove the first `count` bytes."""
    while unsent and count >= len(unsent[0]):
        count -= len(unsent.popleft())
    if count:
        unsent[0] = unsent[0][count:]


# -- the sender's end


class DirectStream:
    """A `channel.FrameStream` over a socket. Frames are not copied on the way to the kernel."""

    is_direct = True

    def __init__(self, sock: AsyncSocket, peer: str):
        self._sock = sock
        self._peer = peer

    async def send(self, parts: Sequence[Buffer]) -> int:
        try:
            await self._sock.write(parts)
        except OSError:
            return 0
        return sum(map(len, parts))

    async def answers(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                (size,) = _LENGTH.unpack(await self._sock.read(_LENGTH.size))
                if size > MAX_ANSWER_BYTES:
                    raise CorruptFrameError(
                        f"{self._peer} announced an answer of {size} bytes"
                    )
                yield bytes(await self._sock.read(size))
        except OSError as error:
            raise PeerLostError(
                f"the direct connection to {self._peer} broke: {error}"
            ) from error

    def close(self) -> None:
        self._sock.close()


async def dial(
    address: str, port: int, key: bytes, security: Security | None = None
) -> DirectStream:
    """A direct connection to the host of "host:port", at the port that Attach answered."""
    host = host_of(address)
    loop = asyncio.get_running_loop()
    with ExitStack() as on_failure:
        try:
            async with asyncio.timeout(HELLO_S):
                resolved = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                family, _, _, _, socket_address = resolved[0]
                raw = socket.socket(family, socket.SOCK_STREAM)
                sock = AsyncSocket(raw)
                on_failure.callback(sock.close)
                await loop.sock_connect(raw, socket_address)
                context = tls_context(security or Security(), server=False)
                if context is not None:
                    await sock.secure(context, host)
                await sock.write([_HELLO.pack(MAGIC, VERSION, key)])
        except OSError as error:  # TimeoutError is one
            raise PeerLostError(
                f"no direct connection to {address}: {error}"
            ) from error
        on_failure.pop_all()
        return DirectStream(sock, address)


# -- the receiver's end


class DirectServer:
    """Takes the frames of direct connections to a receiver. Lives on the io loop."""

    def __init__(self, receiver: PageReceiver, security: Security | None = None):
        self._receiver = receiver
        self._context = tls_context(security or Security(), server=True)
        self._keys: dict[bytes, float] = {}  # when each expires; oldest first
        # connections without a hello, oldest first
        self._strangers: OrderedDict[asyncio.Task[None], None] = OrderedDict()
        self._socket: socket.socket | None = None

    def listen(self, host: str, ports: Sequence[int] | None = None) -> int:
        """Bind to a free port of `host`, within a range if `ports` is one. Attach answers it."""
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def bind(port: int) -> int:
            self._socket = socket.create_server(
                (host, port), family=family, backlog=MAX_STRANGERS
            )
            self._socket.setblocking(False)
            return int(self._socket.getsockname()[1])

        port = bind_within(ports, bind)
        self._receiver.direct = lambda: (port, self.make_key())
        return port

    def make_key(self) -> bytes:
        """A key that opens one connection, until it expires."""
        now = time.monotonic()
        while self._keys:
            oldest, expires_at = next(iter(self._keys.items()))
            if expires_at >= now:
                break
            del self._keys[oldest]
        key = secrets.token_bytes(KEY_BYTES)
        self._keys[key] = now + KEY_S
        return key

    async def run(self) -> None:
        """Serve until cancelled; closes what it opened."""
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        with self._socket:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        raw, _ = await loop.sock_accept(self._socket)
                    except OSError as error:  # also of too many open files
                        log.warning("no direct connection can be taken: %s", error)
                        await asyncio.sleep(REST_S)
                        continue
                    while len(self._strangers) >= MAX_STRANGERS:
                        self._strangers.popitem(last=False)[0].cancel()
                    task = group.create_task(self._connection(raw))
                    self._strangers[task] = None

    async def _connection(self, raw: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        with raw:
            try:
                with closing(AsyncSocket(raw)) as sock:
                    async with asyncio.timeout(HELLO_S):
                        await self._hello(sock)
                    self._strangers.pop(task, None)
                    try:
                        await self._frames(sock)
                    except WireError as error:
                        # over gRPC this is a status, here it is an answer
                        async with asyncio.timeout(HELLO_S):
                            await self._answer(sock, FrameAnswer(0, 0, error))
                        raise
            except (OSError, WireError) as error:
                log.info("a direct connection ended: %s", error)
            except Exception:
                log.exception("a direct connection failed")
            finally:
                self._strangers.pop(task, None)

    async def _hello(self, sock: AsyncSocket) -> None:
        if self._context is not None:
            await sock.secure(self._context, None)
        magic, version, key = _HELLO.unpack(await sock.read(_HELLO.size))
        if (magic, version) != (MAGIC, VERSION):
            raise VersionError(f"a hello of {magic!r} version {version}")
        if self._keys.pop(key, 0.0) < time.monotonic():
            raise CorruptFrameError("a hello with a key that opens nothing")

    async def _frames(self, sock: AsyncSocket) -> None:
        """Answer one frame at a time; the next one waits in the kernel."""
        memory = memoryview(bytearray(MAX_FRAME_BYTES))
        try:
            while True:
                await sock.read_into(memory[:PRELUDE_BYTES])
                size = frame_bytes(memory)
                await sock.read_into(memory[PRELUDE_BYTES:size])
                await self._answer(sock, self._receiver.take(memory[:size], sock))
        finally:
            self._receiver.channel_ended(sock)

    async def _answer(self, sock: AsyncSocket, frame_answer: FrameAnswer) -> None:
        answer = frame_answer.to_proto().SerializeToString()
        await sock.write([_LENGTH.pack(len(answer)), answer])
