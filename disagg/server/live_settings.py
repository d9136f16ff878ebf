"""Which settings of a running service may change, and the certificate of its HTTPS."""

import ssl
from dataclasses import asdict, dataclass
from typing import Any

from disagg.config import Config, changed_keys, replace_keys, settings_by_key
from disagg.errors import ConfigError

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
