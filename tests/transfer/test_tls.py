"""What is no certificate, authority or key is said at once."""

import subprocess

import pytest

from disagg.errors import ConfigError
from disagg.transfer.security import Security
from disagg.transfer.tls import client_context, server_context
from tests.papers import make_papers


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = make_papers(tmp_path_factory.mktemp("papers"))
    subprocess.run(
        "openssl ec -aes256 -passout pass:secret -in peer.key -out locked.key",
        cwd=folder,
        shell=True,
        check=True,
        capture_output=True,
    )
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("ca", [b"no PEM", b"\xff\xfe", b""], ids=["text", "bytes", "nothing"])
def test_an_authority_is_pem(ca):
    with pytest.raises(ConfigError, match="authority"):
        client_context(Security(ca=ca))


@pytest.mark.parametrize("key", ["foreign.key", "locked.key", "peer"])
def test_a_certificate_comes_with_its_key_and_nobody_is_asked_for_a_password(papers, key):
    with pytest.raises(ConfigError, match="certificate and key"):
        server_context(Security(certificate=papers["peer"], key=papers[key]))
