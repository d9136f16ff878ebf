"""Tokens and certificates of the connections between processes.

They come from files that each host has; without files, an authority of the service issues them. The
same certificates serve gRPC and direct connections.
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
    """How connections are protected; not at all by default.

    token:       shared secret that every call must carry
    ca:          PEM of the authority that both sides check certificates against
    certificate: PEM of our own certificate, with its `key`; TLS needs all three
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
    """The token of a service, and the PEM of its signing certificate and key if it has them."""

    token: str
    certificate: str = ""
    key: str = ""

    @classmethod
    def make(cls) -> Self:
        """A new authority that signs certificates."""
        # imported here, so that only a cluster pays for it
        from disagg.transfer.certificates import make_authority

        certificate, key = make_authority()
        return cls(secrets.token_hex(32), certificate.decode(), key.decode())


def protected(
    config: SecurityConfig, authority: Authority | None, host: str
) -> Security:
    """The security of a process at `host`: from files, else from the authority.

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
    """The security of this process, from files; `token` if the configuration names no file of one.

    ConfigError for a file that cannot be read, and for incomplete TLS: a process that serves and
    connects needs a certificate, its key and the authority of its peers.
    """
    token_data = None
    if config.token_file is not None:
        token_data = _read("token_file", config.token_file)
    tls_files = {"ca": config.ca, "certificate": config.certificate, "key": config.key}
    pems = {
        name: _read(name, path) for name, path in tls_files.items() if path is not None
    }
    missing = tls_files.keys() - pems.keys()
    if 0 < len(missing) < 3:
        names = ", ".join(f"security.{name}" for name in sorted(missing))
        raise ConfigError(f"TLS needs {names} too")
    if token_data is not None:
        token = token_data.decode(errors="replace").strip()
        if not (token.isascii() and token.isprintable() and token):
            raise ConfigError(
                f"security.token_file {config.token_file} holds no line of ASCII"
            )
    return Security(token=token, **pems)


def tls_context(security: Security, server: bool) -> ssl.SSLContext | None:
    """The TLS context of direct connections: of a server, or of a client, which checks its name.

    None without TLS. ConfigError for an invalid certificate, key or authority.
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
        raise ConfigError(
            f"security.{name} is {path!r}; expected an absolute path, since every host reads its "
            "own file"
        )
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
            f"the authority of TLS is not a PEM file of certificates: {error}"
        ) from error


def _load_certificate(context: ssl.SSLContext, papers: bytes) -> None:
    """Load it from a temporary file that only we can read: OpenSSL reads keys from files alone."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(papers)
        file.flush()
        try:
            # without a password OpenSSL would ask for one of an encrypted key
            context.load_cert_chain(file.name, password="")
        except ssl.SSLError as error:
            raise ConfigError(
                f"the certificate and key of TLS cannot be used: {error}"
            ) from error
