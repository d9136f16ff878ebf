"""Certificates that a service on a cluster issues for itself if it has no files of them, in PEM.

An authority signs certificates of this service alone, so a process that has one belongs to it. How
the authority gets to other hosts is not known here.
"""

import contextlib
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

NAME = "disagg"
SKEW = timedelta(days=1)  # clocks of hosts differ
LIFE = timedelta(days=3650)


def make_authority() -> tuple[bytes, bytes]:
    """The certificate of a new authority, and its key."""
    key = generate_private_key(SECP256R1())
    is_authority = x509.BasicConstraints(ca=True, path_length=0)
    return _sign(NAME, key, key, is_authority), _pem(key)


def issue(authority_key: bytes, host: str) -> tuple[bytes, bytes]:
    """A certificate of a host, which is an address or a name, and its key."""
    name: x509.GeneralName = x509.DNSName(host)
    with contextlib.suppress(ValueError):
        name = x509.IPAddress(ip_address(host))
    key = generate_private_key(SECP256R1())
    signer = load_pem_private_key(authority_key, None)
    assert isinstance(signer, EllipticCurvePrivateKey)
    return _sign(host, key, signer, x509.SubjectAlternativeName([name])), _pem(key)


def _sign(
    subject: str,
    key: EllipticCurvePrivateKey,
    signer: EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> bytes:
    """A certificate of a key, in the name of the authority."""
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    owner = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(issuer, owner, key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + LIFE)
        .add_extension(extension, critical=True)
        .sign(signer, SHA256())
        .public_bytes(Encoding.PEM)
    )


def _pem(key: EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
