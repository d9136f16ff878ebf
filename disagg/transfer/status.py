"""Typed errors as gRPC statuses and back, so that a refusal keeps its name on the way."""

from typing import NoReturn

import grpc

from disagg.errors import (
    ConfigError,
    DeadlineError,
    DisaggError,
    PeerLostError,
    VersionError,
    WireError,
    error_from,
)

REASON_KEY = "disagg-reason"
MESSAGE_KEY = "disagg-message-bin"
MAX_MESSAGE_BYTES = 2048

_TRANSPORT: dict[grpc.StatusCode, type[DisaggError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerLostError,
    grpc.StatusCode.CANCELLED: PeerLostError,
    grpc.StatusCode.UNKNOWN: PeerLostError,
    grpc.StatusCode.INTERNAL: PeerLostError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNIMPLEMENTED: VersionError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: WireError,
    grpc.StatusCode.UNAUTHENTICATED: ConfigError,
}


async def refuse(context: grpc.aio.ServicerContext, error: DisaggError) -> NoReturn:
    """End a call with the status, reason and message of an error."""
    message = str(error).encode()[:MAX_MESSAGE_BYTES]
    trailing = ((REASON_KEY, error.reason), (MESSAGE_KEY, message))
    code = grpc.StatusCode[error.grpc_status]
    await context.abort(code, error.reason, trailing)
    raise AssertionError("abort always raises")


def error_of(failure: grpc.aio.AioRpcError) -> DisaggError:
    """The error that a peer named; of a failure without a name, what the transport means by it."""
    trailing = dict(failure.trailing_metadata() or ())
    if reason := trailing.get(REASON_KEY):
        message = bytes(trailing.get(MESSAGE_KEY, b"")).decode(errors="replace")
        return error_from(str(reason), message)
    kind = _TRANSPORT.get(failure.code(), PeerLostError)
    return kind(f"{failure.code().name}: {failure.details()}")
