"""Client connections: uvicorn, with a timeout for requests that stop arriving."""

import asyncio

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from disagg.config import ServerConfig

GRACE_S = 2  # for responses in progress when the service stops


class Connection(H11Protocol):
    """An HTTP/1.1 connection that is closed if its client is silent for too long.

    uvicorn itself limits the time between two requests; here the same limit applies to a pause
    within one. A client that waits for its response may be silent. This uses h11, because httptools
    does not limit headers.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._start_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_timer()  # the next request may have begun before

    def _start_timer(self) -> None:
        """Start uvicorn's timer, which the next bytes of a request stop."""
        cycle = self.cycle
        is_responding = (
            cycle is not None and not cycle.more_body and not cycle.response_complete
        )
        if not is_responding and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.transport.close
            )


def http_server(app: ASGIApp, config: ServerConfig) -> uvicorn.Server:
    """A server of the application; its `serve` takes the sockets."""
    options = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,  # its lines go where ours go
        log_level="warning",
        access_log=False,
        lifespan="off",
        ssl_certfile=config.tls_certificate,
        ssl_keyfile=config.tls_key,
        timeout_keep_alive=config.silence_s,  # type: ignore[arg-type]  # it takes fractions too
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(options)
