"""API keys and certificates: read from the configuration, and checked."""

import hmac
import ssl
from collections.abc import Collection
from hashlib import blake2b
from pathlib import Path

from disagg.config import ServerConfig
from disagg.errors import ConfigError

METRICS_PATH = "/metrics"
PUBLIC_PATHS = {"/", "/health", "/ready", "/version"}  # for probes and dashboards


class KeyRing:
    """The keys that a service accepts now; they may be replaced while it serves.

    keys:    API keys of clients; empty: no request needs a key
    owner:   the owner's secret, accepted like an API key
    metrics: a key for GET /metrics, where API keys are accepted too; None: it needs no key
    """

    def __init__(
        self,
        keys: Collection[str] = (),
        owner: str | None = None,
        metrics: str | None = None,
    ):
        self._owner = owner
        self.replace(keys, metrics)

    def replace(self, keys: Collection[str], metrics: str | None = None) -> None:
        """Accept other keys from the next request on."""
        owner = [self._owner] if self._owner else []
        self.is_open = not keys
        self._api_keys = [*keys, *owner]
        self._metrics_keys = [metrics, *self._api_keys] if metrics else []

    def allows(self, path: str, authorization: bytes) -> bool:
        """Whether a request for a path may be served with this Authorization header."""
        if path == METRICS_PATH:
            keys = self._metrics_keys
            return not keys or has_key(authorization, keys)
        if self.is_open or path in PUBLIC_PATHS:
            return True
        return has_key(authorization, self._api_keys)

    def client_of(self, authorization: bytes) -> str:
        """A name that stands for the API key of an allowed request; "" if no keys are set.

        It is the same in every process, also after a restart, and does not disclose the key.
        """
        if self.is_open:
            return ""
        _, _, token = authorization.partition(b" ")
        return blake2b(token, digest_size=8, person=b"disagg client").hexdigest()


def has_key(authorization: bytes, keys: Collection[str]) -> bool:
    """Whether an Authorization header carries one of these keys."""
    scheme, _, token = authorization.partition(b" ")
    is_bearer = scheme.lower() == b"bearer"
    return is_bearer and any(hmac.compare_digest(token, key.encode()) for key in keys)


def read_keys(config: ServerConfig) -> frozenset[str]:
    """The keys of a service; ConfigError for an empty one, and for a file without any."""
    for name in ("api_key", "metrics_key"):
        if getattr(config, name) == "":
            # probably an unset variable, which must not make the service open to everybody
            raise ConfigError(
                f"server.{name} is empty; expected a key, or no setting at all"
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
