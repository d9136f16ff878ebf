"""A gRPC service from plain functions over bytes; typed errors become statuses with names.

Requests and answers are not touched here: control messages are parsed by whoever handles them,
and frames are never copied into a protobuf message.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from disagg.errors import DisaggError, RequestError
from disagg.transfer.status import refuse

Unary = Callable[[bytes], Awaitable[bytes]]
ServerStream = Callable[[bytes], AsyncIterator[bytes]]
BothStream = Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]
Parsed = TypeVar("Parsed", bound=Message)


def rpc_handlers(
    service: str,
    unary: Mapping[str, Unary],
    server_stream: Mapping[str, ServerStream] | None = None,
    both_stream: Mapping[str, BothStream] | None = None,
    on_refusal: Callable[[DisaggError], None] = lambda error: None,
) -> grpc.GenericRpcHandler:
    """The handler of a service by method name, for `channel.start_server`.

    both_stream: methods whose messages are received one ahead of what they look at
    on_refusal:  hears of every error that a peer is told
    """
    handlers = {}
    for name, run in unary.items():
        handlers[name] = grpc.unary_unary_rpc_method_handler(_guard_call(run, on_refusal))
    for name, stream in (server_stream or {}).items():
        handlers[name] = grpc.unary_stream_rpc_method_handler(_guard_stream(stream, on_refusal))
    for name, both in (both_stream or {}).items():
        ahead = _guard_stream(_read_ahead(both), on_refusal)
        handlers[name] = grpc.stream_stream_rpc_method_handler(ahead)
    return grpc.method_handlers_generic_handler(service, handlers)


def parse(message: type[Parsed], data: bytes) -> Parsed:
    """A protobuf message from a peer; RequestError if the bytes are none."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise RequestError(f"{len(data)} bytes are no {message.DESCRIPTOR.name}") from error


def _read_ahead(run: BothStream) -> BothStream:
    """The next message is being received while one is looked at."""

    async def stream(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async with aclosing(_ahead(messages)) as coming:
            async for reply in run(coming):
                yield reply

    return stream


async def _ahead(messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    coming = asyncio.ensure_future(anext(messages))
    try:
        while True:
            message = await coming
            coming = asyncio.ensure_future(anext(messages))
            yield message
    except StopAsyncIteration:
        return
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)


def _guard_call(run: Unary, on_refusal: Callable[[DisaggError], None]) -> Callable:
    async def call(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            return await run(request)
        except DisaggError as error:
            on_refusal(error)
            await refuse(context, error)

    return call


def _guard_stream(run: Callable, on_refusal: Callable[[DisaggError], None]) -> Callable:
    async def stream(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            async for reply in run(request):
                yield reply
        except DisaggError as error:
            on_refusal(error)
            await refuse(context, error)

    return stream
