"""HTTP/2 with one call at a time on a connection, for messages of megabytes.

gRPC is messages on HTTP/2, so this speaks with any gRPC peer; but a DATA frame is never held here.
Its payload goes from the kernel to the memory that the reader names, and from the memory that the
writer names to the kernel, where a library for small messages would copy it four times.

Headers are packed by hpack, all frames but DATA by hyperframe. Windows are opened as wide as the
protocol allows, since the credit of a hand-off bounds what is on its way; those of a peer are kept
to. Whatever a peer does wrong ends the connection with a ConnectionError. RFC 9113.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError
from hyperframe.frame import (
    ContinuationFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from disagg.transfer.http2_frames import (
    DATA_TYPE,
    DEFAULT_WINDOW,
    END_STREAM,
    MAX_CONTROL_BYTES,
    NO_HTTP2,
    PREFACE,
    SETTINGS,
    WIDEST,
    Data,
    Event,
    Fields,
    Headers,
    Reset,
    cut,
    data_head,
    parse,
)
from disagg.transfer.http2_windows import Room, Taken
from disagg.transfer.sockets import AsyncSocket
from disagg.wire import Buffer


class Connection:
    """One end. One task reads; whoever writes takes turns, frame by frame."""

    def __init__(self, sock: AsyncSocket):
        self.sock = sock
        self._writing = asyncio.Lock()
        self._posted = bytearray()  # frames of control that wait for their turn
        self._posting: asyncio.Task[None] | None = None
        self._encoder, self._decoder = Encoder(), Decoder(MAX_CONTROL_BYTES)
        self._left = self._padding = 0  # of the payload of the DATA frame that is being read
        self._room, self._taken = Room(), Taken()
        self._opened = asyncio.Event()  # there may be room, or something was posted
        self._greeted = False

    async def open(self, client: bool) -> None:
        """Say hello; a server also reads it."""
        settings = SettingsFrame(0, SETTINGS).serialize()
        wider = WindowUpdateFrame(0, WIDEST - DEFAULT_WINDOW).serialize()
        await self.sock.write([PREFACE if client else b"", settings, wider])
        if not client and await self._read(len(PREFACE)) != PREFACE:
            raise ConnectionAbortedError(NO_HTTP2)

    def close(self, why: str = "it was closed here") -> None:
        """At once; whoever reads or writes gets a ConnectionError that says why."""
        self.sock.close(why)
        self._opened.set()

    @property
    def quiet_s(self) -> float:
        """How long nothing has come and nothing could be sent."""
        return time.monotonic() - self.sock.moved_at

    # -- sending

    async def send_headers(self, stream: int, fields: Fields, ends: bool = False) -> None:
        """Headers of a new stream, or more of the one there is."""
        async with self._turn():
            self._room.begin(stream)
            frame = HeadersFrame(stream, self._encoder.encode(fields), flags=["END_HEADERS"])
            if ends:
                frame.flags.add("END_STREAM")
            await self.sock.write([self._take_posted(), frame.serialize()])

    async def send_data(self, stream: int, parts: Iterable[Buffer], ends: bool = False) -> None:
        """Bytes of a stream, in as few frames as the peer allows."""
        async with self._turn():
            left = [memoryview(part) for part in parts if len(part)]
            size = sum(map(len, left))
            while True:
                count = self._room.take(size)
                if size and not count:
                    await self._wait_for_room()
                    continue
                size -= count
                head = data_head(count, END_STREAM if ends and not size else 0, stream)
                sent, left = cut(left, count)
                await self.sock.write([self._take_posted(), head, *sent])
                if not size:
                    return

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._post(PingFrame(0, b"disagg\0\0"))

    # -- receiving

    async def next_event(self) -> Event:
        """What a stream gets next; what concerns the connection is dealt with here."""
        await self._skip_payload()
        while True:
            head = await self._read(9)
            length, kind = int.from_bytes(head[:3], "big"), head[3]
            if not self._greeted and kind != SettingsFrame.type:
                raise ConnectionAbortedError(NO_HTTP2)
            self._greeted = True
            if kind == DATA_TYPE:
                return await self._begin_data(head, length)
            if length > MAX_CONTROL_BYTES:
                raise ConnectionAbortedError(f"an HTTP/2 frame of type {kind} has {length} bytes")
            event = await self._take(parse(head, await self._read(length)))
            if event is not None:
                return event
            if len(self._posted) > MAX_CONTROL_BYTES:
                raise ConnectionAbortedError("the peer wants answers and reads none")

    async def read_payload(self, memory: memoryview) -> int:
        """Fill `memory` with payload of the DATA frame that began, as far as there is any."""
        count = min(len(memory), self._left)
        await self.sock.read_into(memory[:count])
        self._left -= count
        return count

    async def _begin_data(self, head: bytes, length: int) -> Data:
        flags, stream = head[4], int.from_bytes(head[5:9], "big") & WIDEST
        self._left, self._padding = length, 0
        if flags & 8:  # padded
            self._padding = (await self._read(1))[0]
            self._left -= 1 + self._padding
        if self._left < 0 or not stream:
            raise ConnectionAbortedError("a DATA frame is malformed")
        if frames := self._taken.count(stream, length):
            self._post(*frames)
        return Data(stream, self._left, bool(flags & END_STREAM))

    async def _skip_payload(self) -> None:
        rest, self._left, self._padding = self._left + self._padding, 0, 0
        while rest:
            waste = memoryview(bytearray(min(rest, MAX_CONTROL_BYTES)))
            await self.sock.read_into(waste)
            rest -= len(waste)

    async def _take(self, frame: Frame) -> Headers | Reset | None:
        match frame:
            case HeadersFrame():
                return await self._headers(frame)
            case RstStreamFrame():
                return Reset(frame.stream_id, frame.error_code)
            case SettingsFrame() if "ACK" not in frame.flags:
                self._room.apply(frame.settings)
                if SettingsFrame.HEADER_TABLE_SIZE in frame.settings:
                    size = frame.settings[SettingsFrame.HEADER_TABLE_SIZE]
                    self._encoder.header_table_size = size
                self._post(SettingsFrame(0, flags=["ACK"]))
            case PingFrame() if "ACK" not in frame.flags:
                self._post(PingFrame(0, frame.opaque_data, flags=["ACK"]))
            case WindowUpdateFrame():
                self._room.widen(frame.stream_id, frame.window_increment)
                self._opened.set()
            case GoAwayFrame():
                raise ConnectionResetError(f"the peer goes away: {frame.error_code}")
        return None

    async def _headers(self, first: HeadersFrame) -> Headers:
        block, flags = first.data, set(first.flags)
        while "END_HEADERS" not in flags:
            head = await self._read(9)
            length = int.from_bytes(head[:3], "big")
            if length + len(block) > MAX_CONTROL_BYTES:
                raise ConnectionAbortedError("the headers of a call are too long")
            frame = parse(head, await self._read(length))
            if not isinstance(frame, ContinuationFrame) or frame.stream_id != first.stream_id:
                raise ConnectionAbortedError("headers are not continued")
            block += frame.data
            flags |= set(frame.flags)
        try:
            fields = {str(name): str(value) for name, value in self._decoder.decode(block)}
        except (HPACKError, UnicodeDecodeError) as error:
            raise ConnectionAbortedError(f"headers cannot be read: {error}") from error
        return Headers(first.stream_id, fields, "END_STREAM" in flags)

    # -- below both

    async def _read(self, count: int) -> bytes:
        memory = bytearray(count)
        await self.sock.read_into(memoryview(memory))
        return bytes(memory)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Write frames of a stream; behind them goes what was posted meanwhile."""
        async with self._writing:
            yield
        if self._posted:
            self._post()

    async def _wait_for_room(self) -> None:
        self._opened.clear()
        await self.sock.write([self._take_posted()])
        await self._opened.wait()

    def _post(self, *frames: Frame) -> None:
        """Send these before the next frame, or now; the reader never waits for a writer."""
        self._posted += b"".join(frame.serialize() for frame in frames)
        self._opened.set()
        if not self._writing.locked() and (self._posting is None or self._posting.done()):
            self._posting = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        with suppress(ConnectionError):  # who reads hears of it
            async with self._writing:
                while self._posted:
                    await self.sock.write([self._take_posted()], counts=False)

    def _take_posted(self) -> bytes:
        posted, self._posted = bytes(self._posted), bytearray()
        return posted
