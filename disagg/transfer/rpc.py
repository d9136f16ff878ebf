"""gRPC as this plane uses it: links, servers, handlers of bytes, and errors that keep their names.

Calls carry bytes: frames are never copied into a protobuf message. A typed error becomes a status
with its reason and message in the trailing metadata, and the same error again at the other end. Any
other exception is a bug: it is logged and answered INTERNAL. Knows no service and no frame.

The grpc package bounds a message to a server by 4 MiB, the streams of a connection, and what a
connection may send before a call is read, by the window of HTTP/2. A call without the token is
refused before any message of it is read. grpc cannot bound the number of connections, nor how long
one stays without a call: keep the ports of workers in a private network, or use mutual TLS.
"""

import asyncio
import ctypes
import hmac
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

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
from disagg.transfer.security import Security
from disagg.wire import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

TOKEN_KEY = "authorization"
REASON_KEY = "disagg-reason"
MESSAGE_KEY = "disagg-message-bin"
MAX_TEXT_BYTES = 2048  # of an error's message in a status
MAX_STREAMS = 256  # calls at once on one connection
MAX_ANSWER_BYTES = 16 << 20  # digests of the longest prompt that a commit can carry
M_TRIM_THRESHOLD = -1  # names and numbers of glibc
M_MMAP_THRESHOLD = -3

# pings find a frozen peer in about 2 s; without the last line 60 s of gRPC's own pass first
_LIMITS = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
]
CLIENT_OPTIONS = [
    *_LIMITS,
    ("grpc.max_send_message_length", MAX_FRAME_BYTES + 16),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 500),
    # widened by probing, the window holds seconds of events that a busy router has yet to read
    ("grpc.http2.bdp_probe", 0),
    ("grpc.client_idle_timeout_ms", 60_000),  # a link without calls is closed
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES + 16),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),
    # the window before a call is looked at; probing would widen it to what a stranger can send:
    # 200 of them took 517 MB. Over 10 Gb/s half of it costs a fifth of the rate (November 2026)
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.so_reuseport", 0),
]

RpcHandler = grpc.GenericRpcHandler
RpcServer = grpc.aio.Server
Unary = Callable[[bytes], Awaitable[bytes]]
Stream = Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes, None]]
Bound = TypeVar("Bound")


def tune_malloc() -> None:
    """Keep big buffers in the heap, not mapped anew for each message. No effect without glibc.

    Call it before the first message: 1.2 to 1.5 times the throughput.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


# -- clients


@contextmanager
def failures_of(address: str) -> Iterator[None]:
    """Turn failures of a call into the peer's refusal, or PeerLostError.

    A call that gRPC or the peer cancels is a lost peer too; it does not cancel the task that waits.
    """
    try:
        yield
    except grpc.aio.AioRpcError as failure:
        raise error_of(failure, address) from failure
    except (asyncio.CancelledError, grpc.aio.UsageError) as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PeerLostError(f"the link to {address} was closed") from error


@dataclass(frozen=True)
class Link:
    """A channel to one peer, with the metadata of every call and the name of its transport."""

    address: str
    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...] = ()
    transport: str = "gRPC over TCP"

    async def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """The answer of "/service/method"; raises the peer's refusal, or PeerLostError."""
        run = self.channel.unary_unary(method)
        with failures_of(self.address):
            answer: bytes = await run(
                request, timeout=timeout_s, metadata=self.metadata
            )
        return answer

    async def close(self) -> None:
        """End every call on it."""
        await self.channel.close()


def connect(address: str, security: Security | None = None) -> Link:
    """A link to "host:port"; it connects when first used. Needs a running event loop."""
    security = security or Security()
    metadata: tuple[tuple[str, str], ...] = ()
    if security.token is not None:
        metadata = ((TOKEN_KEY, f"Bearer {security.token}"),)
    if not security.tls:
        return Link(
            address, grpc.aio.insecure_channel(address, CLIENT_OPTIONS), metadata
        )
    credentials = grpc.ssl_channel_credentials(
        security.ca, security.key, security.certificate
    )
    channel = grpc.aio.secure_channel(address, credentials, CLIENT_OPTIONS)
    return Link(address, channel, metadata, "gRPC over TLS")


def error_of(failure: grpc.aio.AioRpcError, peer: str) -> DisaggError:
    """The error that a peer named; for a failure without a name, that of its status code."""
    # iter, as keys() gives pairs in grpcio 1.76
    trailing = dict(iter(failure.trailing_metadata() or ()))
    if reason := trailing.get(REASON_KEY):
        message = bytes(trailing.get(MESSAGE_KEY, b"")).decode(errors="replace")
        return error_from(str(reason), message)
    kind = _TRANSPORT.get(failure.code(), PeerLostError)
    return kind(f"{peer}: {failure.code().name}: {failure.details()}")


_TRANSPORT: dict[grpc.StatusCode, type[DisaggError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNIMPLEMENTED: VersionError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: WireError,  # a message above the limit
    grpc.StatusCode.UNAUTHENTICATED: ConfigError,
}


# -- servers


async def start_server(
    handlers: Sequence[grpc.GenericRpcHandler],
    host: str,
    security: Security | None = None,
    ports: Sequence[int] | None = None,
) -> tuple[grpc.aio.Server, str]:
    """Start a server on a free port of `host`; the server and its "host:port".

    ports: the first and the last to choose from; ConfigError if none is free
    """
    security = security or Security()
    server = _server_of(handlers, security)
    credentials = security.tls and grpc.ssl_server_credentials(
        [(security.key, security.certificate)], security.ca, require_client_auth=True
    )

    def bind(port: int) -> int:
        address = address_of(host, port)
        if credentials:
            return int(server.add_secure_port(address, credentials))
        return int(server.add_insecure_port(address))

    port = bind_within(ports, bind)
    await server.start()
    return server, address_of(host, port)


async def start_local_server(
    handlers: Sequence[grpc.GenericRpcHandler], path: Path, security: Security
) -> tuple[grpc.aio.Server, str]:
    """Start a server on a Unix socket, in place of one that is dead; the server and its address.

    ConfigError where the path is too long, or its folder is missing.
    """
    server = _server_of(handlers, security)
    address = f"unix:{path}"
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    await server.start()
    return server, address


def _server_of(
    handlers: Sequence[grpc.GenericRpcHandler], security: Security
) -> grpc.aio.Server:
    interceptors = [] if security.token is None else [_RequireToken(security.token)]
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers(tuple(handlers))
    return server


def bind_within(ports: Sequence[int] | None, bind: Callable[[int], Bound]) -> Bound:
    """Bind to the first free port of a range; the result of `bind`.

    ConfigError if no port is free, or the address is not of this host.

    ports: the first and the last; None: port 0, which means any
    """
    for port in range(ports[0], ports[1] + 1) if ports else (0,):
        with suppress(OSError, RuntimeError):
            return bind(port)
    where = f"on a port of cluster.ports {list(ports)}" if ports else "on any port"
    raise ConfigError(
        f"cannot listen {where}: none is free on this host, or not for its address"
    )


def address_of(host: str, port: int) -> str:
    """The text "host:port", with an IPv6 address in brackets."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host of "host:port", without brackets."""
    return address.rpartition(":")[0].strip("[]")


def rpc_handlers(
    service: str,
    unary: Mapping[str, Unary],
    streams: Mapping[str, Stream] | None = None,
    on_refusal: Callable[[DisaggError], None] = lambda error: None,
) -> grpc.GenericRpcHandler:
    """The handler of a service by method name, for `start_server`.

    streams:    their next message is received while one is handled
    on_refusal: called with every error that is sent to a peer
    """
    guard = _Guard(on_refusal)
    handlers = {}
    for name, run in unary.items():
        handlers[name] = grpc.unary_unary_rpc_method_handler(guard.unary(run))
    for name, stream in (streams or {}).items():
        handlers[name] = grpc.stream_stream_rpc_method_handler(guard.stream(stream))
    return grpc.method_handlers_generic_handler(service, handlers)


@dataclass(frozen=True)
class _Guard:
    """Wraps methods so that an error ends the call with a status, never with OK."""

    on_refusal: Callable[[DisaggError], None]

    def unary(self, run: Unary) -> Callable[..., Awaitable[bytes]]:
        async def call(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            try:
                return await run(request)
            except Exception as error:
                await self._refuse(context, error)

        return call

    def stream(self, run: Stream) -> Callable[..., Awaitable[None]]:
        """It writes the replies itself, so that the end of a call ends `run` at once."""

        async def call(
            messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
        ) -> None:
            try:
                async with _ahead(messages) as ahead, aclosing(run(ahead)) as replies:
                    async for reply in replies:
                        await context.write(reply)
            except Exception as error:
                await self._refuse(context, error)

        return call

    async def _refuse(
        self, context: grpc.aio.ServicerContext, error: Exception
    ) -> NoReturn:
        if not isinstance(error, DisaggError):
            log.error("a method failed", exc_info=error)
            error = DisaggError("the method failed; its worker has logged why")
        self.on_refusal(error)
        text = str(error).encode()[:MAX_TEXT_BYTES]
        trailing = ((REASON_KEY, error.reason), (MESSAGE_KEY, text))
        await context.abort(grpc.StatusCode[error.grpc_status], error.reason, trailing)
        raise AssertionError("abort always raises")


def _ahead(
    messages: AsyncIterator[bytes],
) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
    """The messages; the next one is received while one is handled."""

    async def read() -> AsyncGenerator[bytes, None]:
        next_message = asyncio.ensure_future(anext(messages))
        try:
            while True:
                message = await next_message
                next_message = asyncio.ensure_future(anext(messages))
                yield message
        except StopAsyncIteration:
            return
        finally:
            next_message.cancel()
            await asyncio.gather(next_message, return_exceptions=True)

    return aclosing(read())


class _RequireToken(grpc.aio.ServerInterceptor):
    """Refuses every call without the shared token, as a stream, so that no message is read."""

    def __init__(self, token: str):
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        metadata = dict(handler_call_details.invocation_metadata or ())
        token = metadata.get(TOKEN_KEY, "")
        token_bytes = token if isinstance(token, bytes) else token.encode()
        if hmac.compare_digest(token_bytes, self._expected):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse_stranger)


async def _refuse_stranger(messages: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "the shared token is missing or wrong"
    )
