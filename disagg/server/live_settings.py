"""Which settings of a running service may change."""

import logging
import ssl
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from disagg.config import Config, changed_keys, replace_keys, settings_by_key
from disagg.errors import ConfigError
from disagg.log import fields
from disagg.server.auth import KeyRing, check_tls, read_keys

if TYPE_CHECKING:
    from disagg.server.connections import HttpServer
    from disagg.server.reader import RequestReader

log = logging.getLogger(__name__)

LIVE_KEYS = frozenset(
    {
        "router.deadline_s",
        "router.max_attempts",
        "router.silence_s",
        "router.max_queue",
        "router.error_budget",
        "router.first_decode_s",
        "server.api_key",
        "server.api_key_file",
        "server.metrics_key",
        "server.max_body_bytes",
        "server.silence_s",
        "server.idle_s",
        "server.max_connections",
    }
)


@dataclass(frozen=True)
class SettingsUpdate:
    """A configuration that was read again, and what of it a running service can use.

    config:  the old configuration with the new values of LIVE_KEYS
    applied: changed keys that take effect at once
    fixed:   changed keys that need a restart
    """

    config: Config
    applied: tuple[str, ...]
    fixed: tuple[str, ...]


def plan_update(old: Config, new: Config) -> SettingsUpdate:
    """Split the changes between two configurations by whether a running service can use them."""
    new_values = settings_by_key(asdict(new))
    changed = changed_keys(settings_by_key(asdict(old)), new_values)
    applied = tuple(key for key in changed if key in LIVE_KEYS)
    fixed = tuple(key for key in changed if key not in LIVE_KEYS)
    changes: dict[str, dict[str, Any]] = {}
    for key in applied:
        group, _, name = key.partition(".")
        changes.setdefault(group, {})[name] = new_values[key]
    return SettingsUpdate(replace_keys(old, changes), applied, fixed)


def load_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Use a certificate for new connections; ConfigError for files that cannot be used."""
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"no HTTPS with {certificate} and {key}: {error}") from error


def reload_http(
    update: SettingsUpdate, keys: KeyRing, http: "HttpServer", reader: "RequestReader"
) -> None:
    """Use the keys, the certificate and the limits of an update; their files are read again.

    ConfigError, and nothing changes, for files that cannot be used.
    """
    server = update.config.server
    api_keys = read_keys(server)
    check_tls(server)
    if server.tls_certificate and server.tls_key:
        assert http.config.ssl is not None
        load_certificate(http.config.ssl, server.tls_certificate, server.tls_key)
    keys.replace(api_keys, server.metrics_key)
    http.limit(server)
    reader.max_body_bytes = server.max_body_bytes
    applied = ",".join(update.applied) or None
    log.info("settings read again", extra=fields(keys=len(api_keys), changed=applied))


def warn_of_fixed(update: SettingsUpdate) -> None:
    """Log which settings of an update need a restart."""
    if update.fixed:
        names = ", ".join(update.fixed)
        log.warning("these settings need a restart to change: %s", names)
