"""What every request has to pass before a route reads it: framing, origin, key, encoding."""

import ipaddress
import re
import uuid
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disagg.server.auth import KeyRing
from disagg.server.client import Client
from disagg.server.responses import error_body
from disagg.server.trace import RequestTrace, SpanWriter, carrier_of, is_traced

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
ABSOLUTE_FORM = re.compile(r"https?://[^/]*", re.IGNORECASE)

Headers = dict[bytes, bytes]


class Gate:
    """Refuses requests that no route should see; gives every response an X-Request-Id.

    While the service stops, each response closes its connection, so that clients go elsewhere.

    Routes find the `Client` of a request in `request.state.client`.

    origins: web origins whose pages may use a service without keys; "*": all. A browser sends the
             cookies and the network position of its user, so that other pages would get access
    spans:   where requests for answers are traced; None: nowhere
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        origins: Collection[str] = (),
        is_stopping: Callable[[], bool] = lambda: False,
        spans: SpanWriter | None = None,
    ):
        self._app = app
        self._keys = keys
        self._origins = origins
        self._is_stopping = is_stopping
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        headers = dict(scope.get("headers", ()))
        request_id = headers.get(b"x-request-id", b"")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()

        use_origin_form(scope)
        client = Client(
            self._keys.client_of(headers.get(b"authorization", b"")),
            request_id.decode(),
            self._trace_of(scope),
        )
        scope.setdefault("state", {})["client"] = client

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._complete_head(message, client)
            await send(message)

        app = self._refusal(scope, headers) or self._app
        try:
            await app(scope, receive, send_with_id)
        finally:
            if self._spans is not None and client.trace is not None:
                client.trace.end()
                self._spans.write(client)

    def _complete_head(self, message: Message, client: Client) -> None:
        """Add to the head of a response what every response has."""
        message.setdefault("headers", [])
        headers = MutableHeaders(scope=message)
        headers["x-request-id"] = client.request_id
        if self._is_stopping():
            headers["connection"] = "close"
        if client.trace is not None:
            client.trace.status = message["status"]

    def _trace_of(self, scope: Scope) -> RequestTrace | None:
        """A trace for a request for answers, if there are spans."""
        if self._spans is None or not is_traced(scope):
            return None
        return RequestTrace(scope["path"], carrier_of(scope["headers"]))

    def _refusal(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # a proxy and this server could disagree on where the next request begins
            return _refuse(
                400,
                "request",
                "Content-Length and Transfer-Encoding exclude each other",
                {"Connection": "close"},
            )
        origin = headers.get(b"origin")
        if origin is not None and not self._is_allowed(origin.decode("latin-1"), scope):
            return _refuse(
                403,
                "auth",
                f"origin {origin.decode('latin-1')!r} is not in server.allowed_origins",
            )
        authorization = headers.get(b"authorization", b"")
        if not self._keys.allows(scope["path"], authorization):
            return _refuse(
                401,
                "auth",
                "the API key is missing or wrong; send 'Authorization: Bearer KEY'",
            )
        if headers.get(b"content-encoding", b"").lower() not in (b"", b"identity"):
            return _refuse(
                415,
                "request",
                "the body is compressed; send it uncompressed",
                {"Accept-Encoding": "identity"},
            )
        return None

    def _is_allowed(self, origin: str, scope: Scope) -> bool:
        """Whether pages of an origin may use the service; a key is permission enough."""
        if not self._keys.is_open or {"*", origin} & {*self._origins}:
            return True
        return is_same_origin(origin, scope)


def is_same_origin(origin: str, scope: Scope) -> bool:
    """Whether a page was loaded from this service.

    At a loopback address its name has to be one of this host: any name may be made to point there.
    """
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if not host or urlsplit(origin).netloc.lower() != host:
        return False
    address, _ = scope.get("server") or ("", 0)
    if not _is_loopback(address):
        return True
    name = urlsplit(f"//{host}").hostname or ""
    return name == "localhost" or _is_address(name)


def use_origin_form(scope: Scope) -> None:
    """Change `GET http://host/path`, which clients send to proxies, to `GET /path`."""
    prefix = ABSOLUTE_FORM.match(scope.get("path", ""))
    if prefix is None:
        return
    scope["path"] = scope["path"][prefix.end() :] or "/"
    raw_path = scope.get("raw_path") or b""
    scope["raw_path"] = re.sub(rb"(?i)^https?://[^/]*", b"", raw_path) or b"/"


def _refuse(
    status: int, reason: str, message: str, headers: dict[str, str] | None = None
) -> ASGIApp:
    return JSONResponse(error_body(message, reason, status), status, headers)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return _is_address(address) and ipaddress.ip_address(address).is_loopback
