"""API keys, request ids and HTTPS: what is checked before a request is read."""

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
from disagg.server.responses import error_body

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
PUBLIC_PATHS = {"/", "/health", "/ready", "/version", "/metrics"}  # probes, dashboards


class AuthMiddleware:
    """Checks API keys; gives every response the X-Request-Id of its request, or a new one.

    keys: requests must send one of them as "Authorization: Bearer KEY", except for PUBLIC_PATHS.
          Empty: no request needs a key
    """

    def __init__(self, app: ASGIApp, keys: Collection[str] = ()):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        headers = dict(scope.get("headers", ()))
        request_id = headers.get(b"x-request-id", b"")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                id_header = (b"x-request-id", request_id)
                message["headers"] = [*message.get("headers", ()), id_header]
            await send(message)

        app = self._refusal(scope, headers) or self._app
        await app(scope, receive, send_with_id)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ASGIApp | None:
        is_public = not self._keys or scope.get("path") in PUBLIC_PATHS
        authorization = headers.get(b"authorization", b"")
        if not is_public and not has_key(authorization, self._keys):
            message = (
                "the API key is missing or wrong; send 'Authorization: Bearer KEY'"
            )
            return JSONResponse(error_body(message, "auth", 401), 401)
        encoding = headers.get(b"content-encoding", b"").lower()
        if encoding not in (b"", b"identity"):
            message = "the body is compressed; send it uncompressed"
            return JSONResponse(
                error_body(message, "request", 415),
                415,
                {"Accept-Encoding": "identity"},
            )
        return None


def has_key(authorization: bytes, keys: Collection[str]) -> bool:
    """Whether an Authorization header carries one of these keys."""
    scheme, _, token = authorization.partition(b" ")
    is_bearer = scheme.lower() == b"bearer"
    return is_bearer and any(hmac.compare_digest(token, key.encode()) for key in keys)


def read_keys(config: ServerConfig) -> frozenset[str]:
    """The keys of a service; ConfigError for an empty one, and for a file without any."""
    if config.api_key == "":
        # probably an unset variable, which must not make the service open to everybody
        raise ConfigError(
            "server.api_key is empty; expected a key, or no setting at all"
        )
    keys = set()
    if config.api_key:
        keys.add(config.api_key)
    if config.api_key_file:
        keys |= _keys_in(Path(config.api_key_file))
    return frozenset(keys)


def _keys_in(file: Path) -> set[str]:
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys in {file}: {error}") from error
    keys = {line.strip() for line in text.splitlines()} - {""}
    if not keys:
        raise ConfigError(f"no key in {file}; expected one per line")
    return keys


def check_tls(config: ServerConfig) -> None:
    """ConfigError for a certificate and a key that cannot serve HTTPS together."""
    certificate = config.tls_certificate
    key = config.tls_key
    if (certificate is None) != (key is None):
        raise ConfigError(
            "server.tls_certificate and server.tls_key go together; one is missing"
        )
    if certificate is None:
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"no HTTPS with {certificate} and {key}: {error}") from error
