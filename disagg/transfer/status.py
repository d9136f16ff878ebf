"""Typed errors as gRPC statuses and back, so that a refusal keeps its name on the way.

Either by way of the grpc package, or as the trailing headers of a call.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
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


_STATUS, _DETAILS = "grpc-status", "grpc-message"
_CODES = {str(code.value[0]): code for code in grpc.StatusCode}
REFUSED_TOKEN = [(_STATUS, "16"), (_DETAILS, "the shared token is missing or wrong")]
UNKNOWN_METHOD = [(_STATUS, "12"), (_DETAILS, "there is no such method")]
FAILED = [(_STATUS, "2"), (_DETAILS, "the method failed; its worker has logged why")]
DONE = [(_STATUS, "0")]


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


def refusal_fields(error: DisaggError) -> Sequence[tuple[str, str]]:
    """The trailing headers that tell an error."""
    message = base64.b64encode(str(error).encode()[:MAX_MESSAGE_BYTES]).decode()
    code = grpc.StatusCode[error.grpc_status].value[0]
    named = [(REASON_KEY, error.reason), (MESSAGE_KEY, message)]
    return [(_STATUS, str(code)), (_DETAILS, error.reason), *named]


def error_in(fields: Mapping[str, str], peer: str) -> DisaggError | None:
    """What trailing headers tell: an error that the peer named, or what its status means."""
    code = _CODES.get(fields.get(_STATUS, ""), grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.OK:
        return None
    if reason := fields.get(REASON_KEY):
        try:
            message = base64.b64decode(fields.get(MESSAGE_KEY, "") + "==").decode(errors="replace")
        except binascii.Error:
            message = ""
        return error_from(reason, message)
    kind = _TRANSPORT.get(code, PeerLostError)
    return kind(f"{peer}: {code.name}: {fields.get(_DETAILS, '')}")
