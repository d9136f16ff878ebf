"""TLS contexts of the data plane, from the same certificates that gRPC's channels have."""

import ssl
import tempfile

from disagg.errors import ConfigError
from disagg.transfer.security import Security

PROTOCOL = "h2"  # what both ends agree on in the handshake


def client_context(security: Security) -> ssl.SSLContext | None:
    """For connections to a server, whose name is checked; none without TLS.

    ConfigError for what is no certificate or key.
    """
    if not security.tls:
        return None
    context = _authority(_context(ssl.PROTOCOL_TLS_CLIENT), security)
    return _certificate(context, security) if security.certificate else context


def server_context(security: Security) -> ssl.SSLContext | None:
    """For a server; none without TLS. ConfigError without a certificate and its key of its own."""
    if not security.tls:
        return None
    if security.key is None or security.certificate is None:
        raise ConfigError("a server with TLS needs a certificate and its key")
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    if security.mutual:
        _authority(context, security).verify_mode = ssl.CERT_REQUIRED
    return _certificate(context, security)


def _context(kind: int) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([PROTOCOL])
    return context


def _authority(context: ssl.SSLContext, security: Security) -> ssl.SSLContext:
    if security.ca is None:
        context.load_default_certs()
        return context
    try:
        context.load_verify_locations(cadata=security.ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"the authority of TLS is no PEM of certificates: {error}") from error
    return context


def _certificate(context: ssl.SSLContext, security: Security) -> ssl.SSLContext:
    """OpenSSL reads a key from a file only: one that nobody else can read and that is gone then."""
    assert security.certificate is not None
    with tempfile.NamedTemporaryFile() as file:
        file.write(security.certificate + b"\n" + (security.key or b""))
        file.flush()
        try:
            context.load_cert_chain(file.name, password="")  # one for a key would be asked for
        except ssl.SSLError as error:
            raise ConfigError(f"the certificate and key of TLS cannot be used: {error}") from error
    return context
