"""Serves streaming calls of megabytes: gRPC on HTTP/2, from the socket to memory in one copy.

Any gRPC client can call; one call at a time on a connection. Control calls have the server of the
grpc package (`channel.py`), whose Python copies every message four times.
"""

import asyncio
import contextlib
import hmac
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from functools import partial

from disagg.errors import ConfigError, DisaggError
from disagg.transfer.calls import CONTENT_TYPE, Call
from disagg.transfer.http2 import Connection
from disagg.transfer.http2_frames import Fields, Headers
from disagg.transfer.security import TOKEN_KEY, Security
from disagg.transfer.sockets import AsyncSocket
from disagg.transfer.status import DONE, FAILED, REFUSED_TOKEN, UNKNOWN_METHOD, refusal_fields
from disagg.transfer.tls import server_context
from disagg.wire import MAX_FRAME_BYTES

HELLO_S = 5.0  # how long it may take until a client calls with the token
ANSWER_S = 5.0  # and until it takes an answer
RETRY_S = 1.0  # to wait where no connection can be accepted
log = logging.getLogger(__name__)

Method = Callable[[AsyncIterator[memoryview]], AsyncGenerator[bytes, None]]


class PushServer:
    """Streaming methods by path, on a port of its own.

    A method gets messages that are overwritten by the next one, and ends when they do; a
    DisaggError from it is told to the client, and to `on_refusal`. Answers are small: while one
    waits for the client to take it, no message is read.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        on_refusal: Callable[[DisaggError], None] = lambda error: None,
    ):
        self.port = 0
        self._methods = methods
        self._token: str | None = None
        self._tls: ssl.SSLContext | None = None
        self._on_refusal = on_refusal
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None

    def start(self, host: str, security: Security | None = None) -> None:
        """Listen on a free port of `host`; ConfigError if that cannot be. Needs an event loop."""
        security = security or Security()
        self._token, self._tls = security.token, server_context(security)
        self._socket = _listen(host.strip("[]"))
        self._socket.setblocking(False)
        self._spawn(self._accept(self._socket))
        self.port = self._socket.getsockname()[1]

    async def stop(self) -> None:
        """End every call at once and listen no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a connection of the data plane failed", exc_info=error)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                raw, _ = await loop.sock_accept(listening)
            except OSError as error:  # too many files are open, or the client has left again
                log.warning("the data plane cannot accept a connection: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            sock = AsyncSocket(raw)
            task = self._spawn(self._serve(sock))
            task.add_done_callback(partial(_close, sock))  # it may be cancelled before it begins

    async def _serve(self, sock: AsyncSocket) -> None:
        """The calls of one connection, until the client is gone."""
        connection, last = Connection(sock), 0
        try:
            async with asyncio.timeout(HELLO_S) as patience:
                if self._tls is not None:
                    await sock.secure(self._tls, None)
                await connection.open(client=False)
                while True:
                    event = await connection.next_event()
                    if isinstance(event, Headers) and event.stream > last:
                        last = event.stream
                        call = Call(connection, last, MAX_FRAME_BYTES, event.ends)
                        await self._call(call, event.fields, patience)
        except OSError as error:
            log.debug("a client of the data plane is gone, or is none: %s", error)
        finally:
            connection.close()

    async def _call(self, call: Call, fields: Mapping[str, str], patience: asyncio.Timeout) -> None:
        """Answer one call; whoever has the token may take any time for the next one."""
        path = fields.get(":path", "")
        await call.begin([(":status", "200"), ("content-type", CONTENT_TYPE)])
        if not self._is_welcome(fields.get(TOKEN_KEY, "")):
            await call.end(REFUSED_TOKEN)
            return
        patience.reschedule(None)
        await call.end(await self._run(path, call) if path in self._methods else UNKNOWN_METHOD)

    async def _run(self, path: str, call: Call) -> Fields:
        """Answer until the method ends; the trailers."""
        try:
            async with (
                contextlib.aclosing(_until_lost(call)) as messages,
                contextlib.aclosing(self._methods[path](messages)) as replies,
            ):
                async for reply in replies:
                    await _answer(call, reply)
        except DisaggError as error:
            self._on_refusal(error)
            return refusal_fields(error)
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s failed", path)
            return FAILED
        return DONE

    def _is_welcome(self, given: str) -> bool:
        if self._token is None:
            return True
        return hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode())


async def _answer(call: Call, reply: bytes) -> None:
    try:
        async with asyncio.timeout(ANSWER_S):
            await call.send([reply], len(reply))
    except TimeoutError as error:
        raise ConnectionAbortedError("the client takes no answers") from error


async def _until_lost(call: Call) -> AsyncGenerator[memoryview, None]:
    """The messages of a call; one that breaks ends, as the end of a stream says nothing."""
    with contextlib.suppress(OSError):
        async with contextlib.aclosing(call.messages()) as messages:
            async for message in messages:
                yield message


def _listen(host: str) -> socket.socket:
    """A socket on a free port; on "::" it also takes IPv4, as gRPC's does."""
    try:
        kind = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        both = kind == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server((host, 0), family=kind, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error}") from error


def _close(sock: AsyncSocket, task: asyncio.Task[None]) -> None:
    sock.close()
