"""A gRPC service from plain functions over bytes; typed errors become statuses with names.

Requests and answers are not touched here: they are parsed by whoever handles them.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from disagg.errors import DisaggError, RequestError
from disagg.transfer.status import refuse

Unary = Callable[[bytes], Awaitable[bytes]]
ServerStream = Callable[[bytes], AsyncIterator[bytes]]
Parsed = TypeVar("Parsed", bound=Message)


def rpc_handlers(
    service: str,
    unary: Mapping[str, Unary],
    server_stream: Mapping[str, ServerStream] | None = None,
    on_refusal: Callable[[DisaggError], None] = lambda error: None,
) -> grpc.GenericRpcHandler:
    """The handler of a service by method name, for `channel.start_server`.

    on_refusal: hears of every error that a peer is told
    """
    handlers = {}
    for name, run in unary.items():
        handlers[name] = grpc.unary_unary_rpc_method_handler(_guard_call(run, on_refusal))
    for name, stream in (server_stream or {}).items():
        handlers[name] = grpc.unary_stream_rpc_method_handler(_guard_stream(stream, on_refusal))
    return grpc.method_handlers_generic_handler(service, handlers)


def parse(message: type[Parsed], data: bytes) -> Parsed:
    """A protobuf message from a peer; RequestError if the bytes are none."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise RequestError(f"{len(data)} bytes are no {message.DESCRIPTOR.name}") from error


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
