"""Who may ask, and how a request is called: API keys and request ids, before anything is read."""

import hmac
import re
import ssl
import uuid
from collections.abc import Collection
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disagg.config import ServerConfig
from disagg.errors import ConfigError
from disagg.server.answers import error_body

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
OPEN = {"/", "/health", "/ready", "/version", "/metrics"}  # for probes and dashboards


class AuthMiddleware:
    """Every response carries the X-Request-Id of its request, or a new one.

    keys: one of them is wanted as "Authorization: Bearer KEY", but for what is open; none: for all
    """

    def __init__(self, app: ASGIApp, keys: Collection[str] = ()):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        headers = dict(scope.get("headers", ()))
        given = headers.get(b"x-request-id", b"")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", name),
                ]
            await send(message)

        free = not self._keys or scope.get("path") in OPEN
        if not (free or bears(headers.get(b"authorization", b""), self._keys)):
            told = "no key of this service; send one as 'Authorization: Bearer KEY'"
            await JSONResponse(error_body(told, "auth", 401), 401)(
                scope, receive, named
            )
        elif headers.get(b"content-encoding", b"").lower() not in (b"", b"identity"):
            told, taken = (
                "the body is compressed; send it plain",
                {"Accept-Encoding": "identity"},
            )
            await JSONResponse(error_body(told, "request", 415), 415, taken)(
                scope, receive, named
            )
        else:
            await self._app(scope, receive, named)


def bears(header: bytes, keys: Collection[str]) -> bool:
    """Whether an Authorization header carries one of these keys."""
    scheme, _, given = header.partition(b" ")
    return scheme.lower() == b"bearer" and any(
        hmac.compare_digest(given, x.encode()) for x in keys
    )


def read_keys(config: ServerConfig) -> frozenset[str]:
    """The keys of a service; ConfigError for an empty one and for a file without any."""
    if (
        config.api_key == ""
    ):  # of a variable that is not set; who means it is not open to all
        raise ConfigError("server.api_key is empty; a key is wanted, or none given")
    keys = {config.api_key} if config.api_key else set()
    if config.api_key_file:
        file = Path(config.api_key_file)
        try:
            found = {
                line.strip() for line in file.read_text("utf-8-sig").splitlines()
            } - {""}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the keys in {file}: {error}") from error
        if not found:
            raise ConfigError(f"no key in {file}; one in a line is wanted")
        keys |= found
    return frozenset(keys)


def check_tls(config: ServerConfig) -> None:
    """ConfigError for a certificate and a key that cannot serve HTTPS together."""
    certificate, key = config.tls_certificate, config.tls_key
    if (certificate is None) != (key is None):
        raise ConfigError(
            "server.tls_certificate and server.tls_key go together; one is missing"
        )
    if certificate is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                certificate, key
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"no HTTPS with {certificate} and {key}: {error}"
            ) from error
