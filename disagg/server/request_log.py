"""One line in the log for each finished request."""

import logging
import time
from typing import TYPE_CHECKING

from disagg.log import fields

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# of probes, dashboards and `disagg status`: their requests are logged at level debug
QUIET_PATHS = {"/", "/health", "/ready", "/version", "/metrics", "/status"}
MAX_PATH_CHARS = 100

log = logging.getLogger(__name__)


class RequestLog:
    """Logs one line for each finished request. It surrounds all other middleware.

    The application may set `request.state.log_fields`, a function that returns more fields of the
    line; it is called when the response is complete.
    """

    def __init__(self, app: "ASGIApp"):
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        state = scope.setdefault("state", {})
        status = 500
        request_id: str | None = None

        async def send_and_note(message: "Message") -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = dict(message.get("headers", ()))
                request_id = headers.get(b"x-request-id", b"").decode() or None
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            log_fields = state.get("log_fields")
            more = log_fields() if log_fields else {}
            log.log(
                _level(scope["path"], status),
                "request",
                extra=fields(
                    id=request_id,
                    method=scope["method"],
                    route=scope["path"][:MAX_PATH_CHARS],
                    status=status,
                    **more,
                    seconds=round(time.monotonic() - began, 3),
                ),
            )


def _level(path: str, status: int) -> int:
    if status >= 500 and status != 503:  # 503: starting or stopping
        return logging.ERROR
    return logging.DEBUG if path in QUIET_PATHS else logging.INFO
