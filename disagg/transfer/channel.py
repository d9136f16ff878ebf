"""Links to peers, and servers of control calls, with the options that these need.

Pings find a frozen peer in about 2 s; a commit may be as long as wire.py lets it be.
"""

import ctypes
import hmac
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from disagg.errors import ConfigError
from disagg.transfer.security import TOKEN_KEY, Security
from disagg.transfer.sockets import address_of
from disagg.transfer.streams import Streams
from disagg.transfer.tls import client_context
from disagg.wire import MAX_FRAME_BYTES

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

_LIMITS = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
]
CLIENT_OPTIONS = [
    *_LIMITS,
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.min_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]


def tune_malloc() -> bool:
    """Keep big buffers in the heap, not mapped anew each time. False without glibc."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 1 << 30) and mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1))


@dataclass(frozen=True)
class Link:
    """One peer: a channel for control, streams for frames, and what every call carries."""

    address: str
    channel: grpc.aio.Channel
    streams: Streams
    metadata: tuple[tuple[str, str], ...] = ()
    transport: str = "gRPC over TCP"

    async def close(self) -> None:
        """End every call on it."""
        self.streams.close()
        await self.channel.close()


def connect(address: str, security: Security | None = None, congestion: str | None = None) -> Link:
    """A link to "host:port"; it connects when first used. Needs a running event loop.

    congestion: the kernel's control of streams, such as "cubic"; by default the host's
    """
    security = security or Security()
    metadata: tuple[tuple[str, str], ...] = ()
    if security.token is not None:
        metadata = ((TOKEN_KEY, f"Bearer {security.token}"),)
    host = address.rpartition(":")[0].strip("[]")
    streams = Streams(host, metadata, client_context(security), congestion)
    if not security.tls:
        channel = grpc.aio.insecure_channel(address, CLIENT_OPTIONS)
        return Link(address, channel, streams, metadata)
    credentials = grpc.ssl_channel_credentials(security.ca, security.key, security.certificate)
    channel = grpc.aio.secure_channel(address, credentials, CLIENT_OPTIONS)
    return Link(address, channel, streams, metadata, "gRPC over TLS")


async def start_server(
    handlers: Sequence[grpc.GenericRpcHandler], host: str, security: Security | None = None
) -> tuple[grpc.aio.Server, str]:
    """A started server on a free port of `host`, and its "host:port". Stop it with a grace."""
    security, anywhere = security or Security(), address_of(host, 0)
    interceptors = [] if security.token is None else [_RequireToken(security.token)]
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers(tuple(handlers))
    if security.tls:
        if security.key is None or security.certificate is None:
            raise ConfigError("a server with TLS needs a certificate and its key")
        credentials = grpc.ssl_server_credentials(
            [(security.key, security.certificate)], security.ca, security.mutual
        )
        port = server.add_secure_port(anywhere, credentials)
    else:
        port = server.add_insecure_port(anywhere)
    await server.start()
    return server, address_of(host, port)


class _RequireToken(grpc.aio.ServerInterceptor):
    """Refuses every call without the shared token, before any of its bytes are read."""

    def __init__(self, token: str):
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        seen = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY, "")
        given = seen if isinstance(seen, bytes) else seen.encode()
        if hmac.compare_digest(given, self._expected):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the shared token is missing or wrong")
    raise AssertionError("abort always raises")
