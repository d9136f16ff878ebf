"""From the files that a configuration names to `Security`. Every host has its own files."""

from pathlib import Path

from disagg.config import SecurityConfig
from disagg.errors import ConfigError
from disagg.transfer.security import Security


def load_security(config: SecurityConfig, token: str | None = None) -> Security:
    """What protects the plane of this process; `token` where the configuration names none.

    ConfigError for a file that cannot be read, and for TLS of which a part is missing: whoever
    serves and connects needs a certificate, its key and the authority of its peers.
    """
    found = {
        name: _read(name, path)
        for name in ("token_file", "ca", "certificate", "key")
        if (path := getattr(config, name)) is not None
    }
    missing = {"ca", "certificate", "key"} - set(found)
    if missing and (config.mutual or len(missing) < 3):
        named = ", ".join(f"security.{name}" for name in sorted(missing))
        raise ConfigError(f"TLS needs {named} too")
    if "token_file" in found:
        token = found.pop("token_file").decode(errors="replace").strip()
        if not (token.isascii() and token.isprintable() and token):
            raise ConfigError(f"security.token_file {config.token_file} holds no line of ASCII")
    return Security(token=token, mutual=config.mutual, **found)


def _read(name: str, path: str) -> bytes:
    if not Path(path).is_absolute():
        wanted = "an absolute path is wanted, since every host reads its own file"
        raise ConfigError(f"security.{name} is {path!r}; {wanted}")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read security.{name} {path}: {error.strerror}") from error
