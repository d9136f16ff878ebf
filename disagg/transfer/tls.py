"""TLS contexts of the data plane, from the same certificates that gRPC's channels have."""

import ssl
import tempfile

from disagg.errors import ConfigError
from disagg.transfer.security import Security

PROTOCOL = "h2"  # what both ends agree on in the handshake


def client_context(security: Security) -> ssl.SSLContext | None:
    """For connections to a server, whose name is checked; none without TLS."""
    if not security.tls:
        return None
    context = _authority(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), security)
    return _certificate(context, security) if security.certificate else context


def server_context(security: Security) -> ssl.SSLContext | None:
    """For a server; none without TLS. ConfigError without a certificate and its key."""
    if not security.tls:
        return None
    if security.key is None or security.certificate is None:
        raise ConfigError("a server with TLS needs a certificate and its key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if security.mutual:
        _authority(context, security).verify_mode = ssl.CERT_REQUIRED
    return _certificate(context, security)


def _authority(context: ssl.SSLContext, security: Security) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([PROTOCOL])
    if security.ca is not None:
        context.load_verify_locations(cadata=security.ca.decode())
    else:
        context.load_default_certs()
    return context


def _certificate(context: ssl.SSLContext, security: Security) -> ssl.SSLContext:
    """OpenSSL reads a key from a file only: one that nobody else can read and that is gone then."""
    assert security.certificate is not None
    with tempfile.NamedTemporaryFile() as file:
        file.write(security.certificate + b"\n" + (security.key or b""))
        file.flush()
        context.load_cert_chain(file.name)
    return context
