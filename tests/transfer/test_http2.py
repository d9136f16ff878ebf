"""What the connection does with frames of its peer, byte by byte."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    ExtensionFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from disagg.transfer.http2 import Connection
from disagg.transfer.http2_frames import MAX_CONTROL_BYTES, PREFACE, Data, Headers, Reset
from disagg.transfer.sockets import AsyncSocket

FIELDS = [(":path", "/a"), ("x", "y" * 300)]
LARGE = Encoder().encode([("x", "z" * 4000)] * 20)  # one field, and then its number


class Peer:
    """The other end, in frames. It has said hello; the answer to that is not heard."""

    def __init__(self, raw: socket.socket):
        self._raw = raw
        self._greeted = False
        raw.setblocking(False)

    async def say(self, *frames: Frame) -> None:
        data = b"".join(frame.serialize() for frame in frames)
        await asyncio.get_running_loop().sock_sendall(self._raw, data)

    async def hear(self) -> Frame:
        frame, length = Frame.parse_frame_header(memoryview(await self._read(9)))
        frame.parse_body(memoryview(await self._read(length)))
        if not self._greeted and isinstance(frame, SettingsFrame):
            self._greeted = True
            return await self.hear()
        return frame

    async def _read(self, count: int) -> bytes:
        data, loop = b"", asyncio.get_running_loop()
        while len(data) < count:
            data += await loop.sock_recv(self._raw, count - len(data))
        return data


def run(scene: Callable[[Connection, Peer], Awaitable[None]], *hello: Frame) -> None:
    async def whole() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            connection, peer = Connection(AsyncSocket(ours)), Peer(theirs)
            try:
                async with asyncio.timeout(20.0):
                    await peer.say(*(hello or [SettingsFrame(0)]))
                    await scene(connection, peer)
            finally:
                connection.close()

    asyncio.run(whole())


async def take(connection: Connection, data: Data) -> bytes:
    memory = memoryview(bytearray(data.nbytes))
    assert await connection.read_payload(memory) == data.nbytes
    return bytes(memory)


def test_padding_is_not_payload():
    async def scene(connection: Connection, peer: Peer) -> None:
        padded = DataFrame(1, b"abc", pad_length=9, flags=["PADDED"])
        await peer.say(padded, DataFrame(1, b"de", flags=["END_STREAM"]))
        first = await connection.next_event()
        assert first == Data(1, 3, False)
        assert await take(connection, first) == b"abc"
        assert await connection.next_event() == Data(1, 2, True)

    run(scene)


def test_payload_that_nobody_took_is_skipped():
    async def scene(connection: Connection, peer: Peer) -> None:
        await peer.say(DataFrame(1, bytes(40_000)), RstStreamFrame(1, 8))
        assert await connection.next_event() == Data(1, 40_000, False)
        assert await connection.next_event() == Reset(1, 8)

    run(scene)


def test_headers_may_come_in_pieces():
    async def scene(connection: Connection, peer: Peer) -> None:
        block = Encoder().encode(FIELDS)
        pieces = [HeadersFrame(3, block[:7]), ContinuationFrame(3, block[7:20])]
        await peer.say(*pieces, ContinuationFrame(3, block[20:], flags=["END_HEADERS"]))
        assert await connection.next_event() == Headers(3, dict(FIELDS), False)

    run(scene)


def test_pings_and_settings_are_answered_and_the_rest_passes_by():
    async def scene(connection: Connection, peer: Peer) -> None:
        await peer.say(
            PingFrame(0, b"12345678"),
            PriorityFrame(1),
            ExtensionFrame(type=200, stream_id=1, flag_byte=0),
            SettingsFrame(0, {SettingsFrame.MAX_FRAME_SIZE: 20_000}),
            DataFrame(1, b"x"),
        )
        assert await connection.next_event() == Data(1, 1, False)
        ping = await peer.hear()
        assert (ping.opaque_data, ping.flags) == (b"12345678", {"ACK"})
        settings = await peer.hear()
        assert (type(settings), settings.flags) == (SettingsFrame, {"ACK"})

    run(scene)


def test_a_peer_never_gets_more_than_its_windows_or_larger_frames_than_it_takes():
    async def scene(connection: Connection, peer: Peer) -> None:
        async def listen() -> None:
            while True:
                await connection.next_event()

        await peer.say(SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 100_000}))
        listening = asyncio.create_task(listen())
        assert "ACK" in (await peer.hear()).flags
        await connection.send_headers(1, FIELDS)
        assert isinstance(await peer.hear(), HeadersFrame)
        sent = bytes(range(256)) * 600  # 153,600 bytes; the connection's window has 65,535
        sending = asyncio.create_task(connection.send_data(1, [sent[:1], sent[1:]], ends=True))
        got = [await peer.hear() for _ in range(4)]
        assert [len(frame.data) for frame in got] == [16_384] * 3 + [65_535 - 3 * 16_384]
        await peer.say(WindowUpdateFrame(0, 1 << 20))
        got += [await peer.hear() for _ in range(3)]
        assert sum(len(frame.data) for frame in got) == 100_000  # the stream's window
        await peer.say(WindowUpdateFrame(1, 1 << 20))
        while "END_STREAM" not in got[-1].flags:
            got.append(await peer.hear())
        assert b"".join(frame.data for frame in got) == sent
        await sending
        listening.cancel()

    run(scene)


@pytest.mark.parametrize(
    "frames",
    [
        [HeadersFrame(1, bytes(MAX_CONTROL_BYTES + 1), flags=["END_HEADERS"])],
        [HeadersFrame(1, bytes(9_000)), ContinuationFrame(1, bytes(9_000))],
        [HeadersFrame(1, b"\xff\xff\xff", flags=["END_HEADERS"])],
        [HeadersFrame(1, b""), PingFrame(0, b"12345678")],
        [ExtensionFrame(type=0, stream_id=0, flag_byte=0)],
        [GoAwayFrame(0, 0, 2)],
        [HeadersFrame(1, LARGE, flags=["END_HEADERS"])],
        [SettingsFrame(0, {SettingsFrame.MAX_FRAME_SIZE: 1 << 24})],
        [SettingsFrame(0, {SettingsFrame.MAX_FRAME_SIZE: 0})],
        [SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 1 << 31})],
    ],
    ids=[
        *("long headers", "long pieces", "no hpack", "no pieces", "no stream", "goes away"),
        *("unpacks large", "huge frames", "no frames", "huge windows"),
    ],
)
def test_what_no_peer_may_say_ends_the_connection(frames):
    async def scene(connection: Connection, peer: Peer) -> None:
        await peer.say(*frames)
        with pytest.raises(ConnectionError):
            await connection.next_event()

    run(scene)


def test_whoever_does_not_begin_with_settings_does_not_speak_http2():
    async def scene(connection: Connection, peer: Peer) -> None:
        with pytest.raises(ConnectionError, match="HTTP/2"):
            await connection.next_event()

    run(scene, PingFrame(0, b"12345678"))


def test_a_server_hangs_up_on_whoever_does_not_speak_http2():
    async def scene(connection: Connection, peer: Peer) -> None:
        await asyncio.get_running_loop().sock_sendall(
            peer._raw, b"GET / HTTP/1.1\r\n\r\n" + PREFACE
        )
        with pytest.raises(ConnectionError, match="HTTP/2"):
            await connection.open(client=False)

    run(scene)


def test_others_have_their_turn_however_much_a_peer_sends():
    async def scene(connection: Connection, peer: Peer) -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        working = asyncio.create_task(other())
        await peer.say(*[DataFrame(1)] * 1000, RstStreamFrame(1, 8))
        turns = 0
        while await connection.next_event() != Reset(1, 8):
            pass
        assert turns > 10
        working.cancel()

    run(scene)


def test_a_peer_that_wants_answers_and_reads_none_is_given_up():
    async def scene(connection: Connection, peer: Peer) -> None:
        async def flood() -> None:
            while True:
                await peer.say(*[PingFrame(0, b"12345678")] * 100)

        flooding = asyncio.create_task(flood())
        with pytest.raises(ConnectionError, match="reads none"):
            await connection.next_event()
        assert len(connection._posted) < 20_000
        flooding.cancel()

    run(scene)


def test_a_side_can_be_ended_though_the_peer_took_its_windows_back():
    async def scene(connection: Connection, peer: Peer) -> None:
        await connection.send_headers(1, FIELDS)
        await connection.send_data(1, [bytes(1000)])
        await peer.say(
            SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 10}), RstStreamFrame(3, 8)
        )
        await connection.next_event()
        await connection.send_data(1, [], ends=True)
        while not isinstance(heard := await peer.hear(), DataFrame) or heard.data:
            pass
        assert "END_STREAM" in heard.flags

    run(scene)


def test_closing_wakes_who_reads_and_who_writes():
    async def scene(connection: Connection, peer: Peer) -> None:
        reading = asyncio.create_task(connection.next_event())
        await connection.send_headers(1, FIELDS)
        writing = asyncio.create_task(connection.send_data(1, [bytes(1 << 20)]))
        while not connection._writing.locked():
            await asyncio.sleep(0)
        connection.close()
        for task in (reading, writing):
            with pytest.raises(ConnectionError):
                await task

    run(scene)
