"""Who may speak on the plane, and how its bytes are protected.

From files, every host its own; where there are none, from an authority of the service. The same
certificates serve gRPC and direct connections.
"""

import secrets
import ssl
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from disagg.config import SecurityConfig
from disagg.errors import ConfigError


@dataclass(frozen=True)
class Security:
    """How the plane is protected; nothing by default.

    token:       shared secret that every call must carry
    ca:          PEM of the authority that peers' certificates are checked against, on both sides
    certificate: PEM of our own certificate, with its `key`; TLS takes all three
    """

    token: str | None = None
    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None

    @property
    def tls(self) -> bool:
        return self.ca is not None


@dataclass(frozen=True)
class Authority:
    """What a service has of its own: the token of all, and PEM of who signs, if it signs."""

    token: str
    certificate: str = ""
    key: str = ""

    @classmethod
    def make(cls) -> Self:
        """A new one that signs."""
        # here, not above: only a cluster pays for the import
        from disagg.transfer.certificates import make_authority

        certificate, key = make_authority()
        return cls(secrets.token_hex(32), certificate.decode(), key.decode())


def protected(
    config: SecurityConfig, authority: Authority | None, host: str
) -> Security:
    """What protects the plane of a process at `host`: files first, then the authority.

    ConfigError for files that cannot be used.
    """
    security = load_security(config, authority.token if authority else None)
    if authority is None or not authority.certificate or security.tls:
        return security
    # here, not above: only a cluster pays for the import
    from disagg.transfer.certificates import issue

    certificate, key = issue(authority.key.encode(), host)
    ca = authority.certificate.encode()
    return replace(security, ca=ca, certificate=certificate, key=key)


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
    if 0 < len(missing) < 3:
        named = ", ".join(f"security.{name}" for name in sorted(missing))
        raise ConfigError(f"TLS needs {named} too")
    if "token_file" in found:
        token = found.pop("token_file").decode(errors="replace").strip()
        if not (token.isascii() and token.isprintable() and token):
            raise ConfigError(
                f"security.token_file {config.token_file} holds no line of ASCII"
            )
    return Security(token=token, **found)


def tls_context(security: Security, server: bool) -> ssl.SSLContext | None:
    """For direct connections: of their server, or of a client, which checks its name.

    None without TLS. ConfigError for what is no certificate, key or authority.
    """
    if not security.tls:
        return None
    context = ssl.SSLContext(
        ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    )
    context.verify_mode = ssl.CERT_REQUIRED
    _load_authority(context, security.ca or b"")
    _load_certificate(
        context, b"%b\n%b" % (security.certificate or b"", security.key or b"")
    )
    return context


def _read(name: str, path: str) -> bytes:
    if not Path(path).is_absolute():
        wanted = "an absolute path is wanted, since every host reads its own file"
        raise ConfigError(f"security.{name} is {path!r}; {wanted}")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read security.{name} {path}: {error.strerror}"
        ) from error


def _load_authority(context: ssl.SSLContext, ca: bytes) -> None:
    try:
        context.load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"the authority of TLS is no PEM of certificates: {error}"
        ) from error


def _load_certificate(context: ssl.SSLContext, papers: bytes) -> None:
    """OpenSSL reads a key from a file only: one that nobody else can read and that is gone then."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(papers)
        file.flush()
        try:
            context.load_cert_chain(
                file.name, password=""
            )  # one for a key would be asked for
        except ssl.SSLError as error:
            raise ConfigError(
                f"the certificate and key of TLS cannot be used: {error}"
            ) from error
