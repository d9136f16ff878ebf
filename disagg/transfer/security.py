"""Who may speak on the plane, and how its bytes are protected."""

from dataclasses import dataclass

TOKEN_KEY = "authorization"


@dataclass(frozen=True)
class Security:
    """How the plane is protected; nothing by default.

    token:       shared secret that every call must carry
    ca:          PEM of the authority that peers' certificates are checked against
    certificate: PEM of our own certificate, with its `key`; a server needs both for TLS
    mutual:      a server asks its clients for certificates of the same authority
    """

    token: str | None = None
    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    mutual: bool = False

    @property
    def tls(self) -> bool:
        return self.ca is not None or self.certificate is not None
