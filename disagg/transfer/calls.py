"""The messages of one gRPC call on a connection of its own: five bytes of length, then the message.

A message that comes lies in memory that the next one overwrites.
"""

import asyncio
import struct
from collections.abc import AsyncGenerator, Sequence

from disagg.transfer.http2 import Connection
from disagg.transfer.http2_frames import Data, Fields, Headers, Reset
from disagg.wire import FRAME_BYTES, Buffer

CONTENT_TYPE = "application/grpc"
EAGER_BYTES = 2 * FRAME_BYTES  # a longer message gets memory as it comes
_PREFIX = struct.Struct(">BI")  # compressed, size


class Call:
    """One end of a call.

    headers, trailers: what the peer said before and behind its messages, once it has
    ended:             the peer has no messages
    """

    def __init__(self, connection: Connection, stream: int, max_bytes: int, ended: bool = False):
        self.headers: dict[str, str] = {}
        self.trailers: dict[str, str] | None = None
        self._connection = connection
        self._stream = stream
        self._max_bytes = max_bytes
        self._unread = 0  # of the DATA frame that is being read
        self._ended = ended  # the peer sends no more after that
        self._memory = memoryview(b"")

    async def begin(self, headers: Fields) -> None:
        """Say what comes before the first message."""
        await self._connection.send_headers(self._stream, headers)

    async def send(self, parts: Sequence[Buffer], size: int) -> None:
        """One message of `size` bytes; its parts are not copied."""
        await self._connection.send_data(self._stream, [_PREFIX.pack(0, size), *parts])

    async def end(self, trailers: Fields | None = None) -> None:
        """Send no more; a server ends with trailers."""
        if trailers is None:
            await self._connection.send_data(self._stream, [], ends=True)
        else:
            await self._connection.send_headers(self._stream, trailers, ends=True)

    async def messages(self) -> AsyncGenerator[memoryview, None]:
        """What the peer sends, until it ends its side."""
        while (message := await self._receive()) is not None:
            yield message
            await asyncio.sleep(0)  # there may always be more; others want their turn too

    async def _receive(self) -> memoryview | None:
        prefix = memoryview(bytearray(_PREFIX.size))
        if not await self._fill(prefix):
            return None
        compressed, size = _PREFIX.unpack(prefix)
        if compressed or size > self._max_bytes:
            raise ConnectionAbortedError(
                f"a message of {size} bytes, {'' if compressed else 'not '}compressed; "
                f"{self._max_bytes} are accepted, as they are"
            )
        filled = 0
        while filled < size:
            self._grow(min(size, max(EAGER_BYTES, 2 * filled)), filled)
            part = self._memory[filled:size]
            if not await self._fill(part):
                raise ConnectionAbortedError("a call ended in the middle of a message")
            filled += len(part)
        return self._memory[:size]

    def _grow(self, nbytes: int, filled: int) -> None:
        """Memory for so many bytes, `filled` of which are kept."""
        if len(self._memory) < nbytes:
            memory = memoryview(bytearray(nbytes))
            memory[:filled] = self._memory[:filled]
            self._memory = memory

    async def _fill(self, memory: memoryview) -> bool:
        """False if the peer's side has ended before."""
        while memory:
            if not self._unread:
                if self._ended:
                    return False
                await self._next_frame()
                continue
            count = await self._connection.read_payload(memory)
            self._unread -= count
            memory = memory[count:]
        return True

    async def _next_frame(self) -> None:
        event = await self._connection.next_event()
        if event.stream < self._stream:
            return  # the rest of a call that is over
        match event:
            case Data():
                self._unread, self._ended = event.nbytes, event.ends
            case Headers() if event.stream > self._stream:
                raise ConnectionAbortedError("a second call at a time on a connection")
            case Headers():
                self._ended = event.ends
                if event.ends:
                    self.trailers = event.fields
                else:
                    self.headers = event.fields
            case Reset():
                raise ConnectionResetError(f"the peer gave the call up: {event.code}")
