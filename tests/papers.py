"""Certificates for tests."""

import subprocess
from pathlib import Path


def make_papers(folder: Path) -> Path:
    """A throw-away authority, a certificate of 127.0.0.1, and a foreign authority, as files.

    ca, ca.key, foreign, foreign.key, peer, peer.key: PEM
    """
    for authority in ("ca", "foreign"):
        openssl(folder, "req -x509 -nodes -days 2 -subj /CN=test", f"{authority}.key", authority)
    openssl(folder, "req -nodes -subj /CN=127.0.0.1", "peer.key", "peer.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    subprocess.run(
        "openssl x509 -req -days 2 -in peer.csr -CA ca -CAkey ca.key -CAcreateserial "
        "-extfile names -out peer",
        cwd=folder,
        shell=True,
        check=True,
        capture_output=True,
    )
    return folder


def openssl(folder: Path, command: str, key: str, out: str) -> None:
    subprocess.run(
        f"openssl {command} -newkey ec -pkeyopt ec_paramgen_curve:P-256 -keyout {key} -out {out}",
        cwd=folder,
        shell=True,
        check=True,
        capture_output=True,
    )
