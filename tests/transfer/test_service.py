"""Handlers of calls, called without a socket."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from disagg.errors import CorruptFrameError
from disagg.transfer.service import rpc_handlers


def test_an_error_of_a_handler_ends_its_stream_with_its_name():
    async def scene():
        said = []

        class Context:
            async def abort(self, code, reason, trailing):
                said.append(reason)
                raise asyncio.CancelledError

        async def run(request: bytes) -> AsyncIterator[bytes]:
            yield request
            raise CorruptFrameError("bad")

        handler = rpc_handlers("a", {}, {"B": run})
        details = SimpleNamespace(method="/a/B", invocation_metadata=())
        with pytest.raises(asyncio.CancelledError):
            async for _ in handler.service(details).unary_stream(b"a", Context()):
                pass
        assert said == [CorruptFrameError.reason]

    asyncio.run(scene())
