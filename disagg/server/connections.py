"""Connections of clients: uvicorn, and the end of those on which a request does not go on."""

import asyncio

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from disagg.config import ServerConfig

GRACE_S = 2  # for answers on their way when the service stops


class Connection(H11Protocol):
    """HTTP/1.1 on a connection that is closed once its client was silent for too long.

    uvicorn itself bounds the time between two requests; here the same time bounds a pause within
    one. A client that waits for its answer may be silent. Of h11, since httptools bounds no header.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()  # the next request may have begun before

    def _wait(self) -> None:
        """Set uvicorn's timer, which the next piece of a request unsets."""
        cycle = self.cycle
        answers = (
            cycle is not None and not cycle.more_body and not cycle.response_complete
        )
        if not answers and self.timeout_keep_alive_task is None:
            late = self.loop.call_later(self.timeout_keep_alive, self.transport.close)
            self.timeout_keep_alive_task = late


def http_server(app: ASGIApp, config: ServerConfig) -> uvicorn.Server:
    """A server of the application, for the sockets that it is given."""
    options = uvicorn.Config(
        app,
        http=Connection,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ssl_certfile=config.tls_certificate,
        ssl_keyfile=config.tls_key,
        timeout_keep_alive=config.silence_s,  # type: ignore[arg-type]  # of whole seconds or not
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(options)
