"""A certificate for the length of a benchmark, so that TLS can be measured beside no TLS."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from disagg.errors import ConfigError
from disagg.transfer.security import Security


def make_security(hosts: Iterable[str]) -> tuple[Security, Security]:
    """Security of a server at these addresses, and of its clients. Needs the openssl command."""
    if shutil.which("openssl") is None:
        raise ConfigError("measuring TLS needs the openssl command")
    names = ",".join(f"IP:{host}" for host in hosts)
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = Path(folder, "key"), Path(folder, "certificate")
        command = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=benchmark"]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        command += ["-addext", f"subjectAltName={names}"]
        command += ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
        server = Security(certificate=certificate.read_bytes(), key=key.read_bytes())
        return server, Security(ca=certificate.read_bytes())
