"""Handlers of streams, called without a socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest

from disagg.errors import CorruptFrameError
from disagg.transfer.service import rpc_handlers


class Messages:
    """A peer that sends a few messages, and then whatever `end` raises; counts what was taken."""

    def __init__(self, count: int, end: type[BaseException] = StopAsyncIteration):
        self.asked = 0
        self.count = count
        self.end = end
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self.asked += 1
        if self.asked > self.count:
            if self.end is asyncio.CancelledError:
                await self._forever()
            raise self.end
        return bytes([self.asked])

    async def _forever(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def serve(run: Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]], messages: Messages):
    handler = rpc_handlers("a", {}, both_stream={"B": run})
    details = SimpleNamespace(method="/a/B", invocation_metadata=())
    return handler.service(details).stream_stream(messages, SimpleNamespace())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_one_message_is_received_while_another_is_looked_at():
    async def scene():
        messages, seen = Messages(9), []

        async def run(coming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for message in coming:
                await settle()
                seen.append((message[0], messages.asked))
                yield message

        replies = [reply async for reply in serve(run, messages)]
        assert seen == [(number, number + 1) for number in range(1, 10)]
        assert replies == [bytes([number]) for number in range(1, 10)]

    asyncio.run(scene())


def test_a_handler_that_ends_early_gives_up_the_message_that_was_coming():
    async def scene():
        messages = Messages(1, asyncio.CancelledError)

        async def run(coming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for message in coming:
                await settle()
                yield message
                return

        assert [reply async for reply in serve(run, messages)] == [b"\1"]
        assert messages.cancelled

    asyncio.run(scene())


def test_what_breaks_a_stream_is_seen_behind_the_messages_before_it():
    async def scene():
        seen = []

        async def run(coming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for message in coming:
                await settle()
                seen.append(message)
                yield message

        with pytest.raises(ConnectionError):
            async for _ in serve(run, Messages(2, ConnectionError)):
                pass
        assert seen == [b"\1", b"\2"]

    asyncio.run(scene())


def test_a_refused_message_ends_the_stream_with_its_name():
    async def scene():
        said = []

        class Context:
            async def abort(self, code, reason, trailing):
                said.append(reason)
                raise asyncio.CancelledError

        async def run(coming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for _ in coming:
                raise CorruptFrameError("bad")
            yield b""

        handler = rpc_handlers("a", {}, both_stream={"B": run})
        details = SimpleNamespace(method="/a/B", invocation_metadata=())
        with pytest.raises(asyncio.CancelledError):
            async for _ in handler.service(details).stream_stream(Messages(3), Context()):
                pass
        assert said == [CorruptFrameError.reason]

    asyncio.run(scene())
