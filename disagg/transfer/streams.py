"""Streaming calls of megabytes to one peer: gRPC on HTTP/2, from memory to the socket in one copy.

A call has a connection to itself. One that ended well leaves it to the next call; any other closes
it, so nothing of an old call is ever read by a new one.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import ExitStack, aclosing

from disagg.errors import PeerLostError
from disagg.transfer.calls import CONTENT_TYPE, Call
from disagg.transfer.http2 import Connection
from disagg.transfer.http2_frames import Fields
from disagg.transfer.sockets import address_of, dial
from disagg.transfer.status import error_in
from disagg.wire import MAX_FRAME_BYTES, Buffer

DIAL_S = 5.0
PING_S, ANSWER_S = 0.5, 1.5  # a quiet peer is asked for a sign of life, and given up


class Streams:
    """Connections to the data plane of one host."""

    def __init__(
        self,
        host: str,
        metadata: Fields = (),
        tls: ssl.SSLContext | None = None,
        congestion: str | None = None,
    ):
        self._host = host
        self._metadata = metadata
        self._tls = tls
        self._congestion = congestion
        self._free: dict[int, list[tuple[Connection, int]]] = {}  # by port; and the next stream
        self._all: set[Connection] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self._closed = False

    def call(self, port: int, path: str) -> "StreamCall":
        """A new call, which begins to connect."""
        return StreamCall(self, port, path)

    def address(self, port: int) -> str:
        """How messages call a port of the host."""
        return address_of(self._host, port)

    def close(self) -> None:
        """End every call; one that is still connecting ends when it has."""
        self._closed = True
        for task in self._finishing:
            task.cancel()
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._free.clear()

    async def take(self, port: int, path: str) -> tuple[Connection, int]:
        """A connection and the number of a stream on it, with a call begun."""
        scheme = "http" if self._tls is None else "https"
        fields = [(":method", "POST"), (":scheme", scheme), (":path", path)]
        fields += [(":authority", self.address(port)), ("te", "trailers")]
        fields += [("content-type", CONTENT_TYPE), *self._metadata]
        with ExitStack() as undo:
            try:
                async with asyncio.timeout(DIAL_S):
                    connection, stream = self._known(port) or (await self._dial(port), 1)
                    undo.callback(self.drop, connection)
                    await connection.send_headers(stream, fields)
            except TimeoutError as error:
                raise ConnectionAbortedError(f"no connection in {DIAL_S:g} s") from error
            undo.pop_all()
        return connection, stream

    def settle(self, work: Coroutine[None, None, None]) -> None:
        """Let the end of a call take its time."""
        task = asyncio.create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    def give_back(self, port: int, connection: Connection, stream: int) -> None:
        """A call on this stream ended well."""
        if connection in self._all:
            self._free.setdefault(port, []).append((connection, stream + 2))

    def drop(self, connection: Connection) -> None:
        """A call did not end well."""
        self._all.discard(connection)
        connection.close()

    def _known(self, port: int) -> tuple[Connection, int] | None:
        """A free connection whose peer has not hung up."""
        free = self._free.get(port, [])
        while free:
            connection, stream = free.pop()
            if not connection.sock.has_news:
                return connection, stream
            self.drop(connection)
        return None

    async def _dial(self, port: int) -> Connection:
        if not 0 < port < 1 << 16:
            raise ConnectionAbortedError("there is no such port")
        connection = Connection(await dial(self._host, port, self._tls, self._congestion))
        with ExitStack() as undo:
            undo.callback(self.drop, connection)
            if self._closed:
                raise ConnectionAbortedError("the link was closed here")
            self._all.add(connection)
            await connection.open(client=True)
            undo.pop_all()
        return connection


class StreamCall:
    """One call: messages out, answers in."""

    def __init__(self, streams: Streams, port: int, path: str):
        self._streams = streams
        self._port = port
        self._stream = 0
        self._connection: Connection | None = None
        self._opening = asyncio.create_task(self._open(path))
        self._watching: asyncio.Task[None] | None = None

    async def send(self, parts: Sequence[Buffer], size: int) -> bool:
        """Hand one message to the kernel; False if the call is over: then `answers` knows why."""
        try:
            call = await self._opened()
            await call.send(parts, size)
        except OSError:
            return False
        return True

    async def answers(self) -> AsyncGenerator[memoryview, None]:
        """What the peer says, until it ends the call; raises the error that it ended with."""
        peer = f"the data plane at {self._streams.address(self._port)}"
        try:
            call = await self._opened()
            async with aclosing(call.messages()) as messages:
                async for message in messages:
                    yield message
        except OSError as failure:
            raise PeerLostError(f"{peer}: {failure}") from failure
        error = error_in(call.trailers or call.headers, peer)
        if error is not None:
            raise error

    def finish(self) -> None:
        """The peer has said all that matters: leave the connection to the next call."""
        connection, self._connection = self._connection, None
        assert connection is not None
        self._stop_watching()
        self._streams.settle(self._finish(connection))

    async def _finish(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                call = await self._opened()
                await call.end()
                async for _ in call.messages():
                    pass
        except OSError:
            self._streams.drop(connection)
        else:
            self._streams.give_back(self._port, connection, self._stream)

    def cancel(self) -> None:
        """End the call, unless it is finished."""
        self._stop_watching()
        self._opening.cancel()
        if self._connection is not None:
            self._streams.drop(self._connection)
            self._connection = None

    async def _opened(self) -> Call:
        """The call, once it has begun; ConnectionError if it could not, or was given up."""
        if not self._opening.done():
            await asyncio.wait([self._opening])
        if self._opening.cancelled():
            raise ConnectionAbortedError("the call was given up here")
        return self._opening.result()

    async def _open(self, path: str) -> Call:
        connection, self._stream = await self._streams.take(self._port, path)
        self._connection = connection
        self._watching = asyncio.create_task(self._watch(connection))
        return Call(connection, self._stream, MAX_FRAME_BYTES)

    async def _watch(self, connection: Connection) -> None:
        """Close a connection to a peer that shows no sign of life, though it was asked."""
        while True:
            await asyncio.sleep(PING_S)
            if connection.quiet_s < PING_S:
                continue
            connection.ping()
            await asyncio.sleep(ANSWER_S)
            if connection.quiet_s >= ANSWER_S:
                connection.close(f"no sign of life for {ANSWER_S:g} s")
                return

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
