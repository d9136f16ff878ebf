"""Certificates for tests."""

import subprocess
from pathlib import Path

NEW = "-newkey ec -pkeyopt ec_paramgen_curve:P-256"


def make_papers(folder: Path) -> Path:
    """A throw-away authority, a certificate of 127.0.0.1, and a foreign authority, as files.

    ca, ca.key, foreign, foreign.key, peer, peer.key: PEM
    """
    for name in ("ca", "foreign"):
        files = f"-keyout {name}.key -out {name}"
        openssl(folder, f"req -x509 -nodes -days 2 -subj /CN=test {NEW} {files}")
    files = "-keyout peer.key -out peer.csr"
    openssl(folder, f"req -nodes -subj /CN=127.0.0.1 {NEW} {files}")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    authority = "-CA ca -CAkey ca.key -CAcreateserial -extfile names"
    openssl(folder, f"x509 -req -days 2 -in peer.csr {authority} -out peer")
    return folder


def openssl(folder: Path, command: str) -> None:
    subprocess.run(
        ["openssl", *command.split()], cwd=folder, check=True, capture_output=True
    )
