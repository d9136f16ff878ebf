"""Security from files, and contexts of TLS: what is missing, unreadable or wrong is named."""

import subprocess
from pathlib import Path

import pytest

from disagg.config import SecurityConfig
from disagg.errors import ConfigError
from disagg.transfer.security import Security, client_context, load_security, server_context
from tests.papers import make_papers


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name in ("ca", "certificate", "key", "token_file"):
        (tmp_path / name).write_text(f"the {name}\n")
    return {path.name: str(path) for path in tmp_path.iterdir()}


def test_without_files_there_is_the_given_token_or_nothing() -> None:
    assert load_security(SecurityConfig()) == Security()
    assert load_security(SecurityConfig(), "a token") == Security(token="a token")


def test_files_become_a_token_and_certificates(files: dict[str, str]) -> None:
    found = load_security(SecurityConfig(**files, mutual=True), "another token")
    papers = [f"the {name}\n".encode() for name in ("ca", "certificate", "key")]
    assert found == Security("the token_file", *papers, mutual=True)


@pytest.mark.parametrize("missing", ["ca", "certificate", "key"])
def test_tls_with_a_part_missing_is_refused(missing: str, files: dict[str, str]) -> None:
    del files[missing]
    with pytest.raises(ConfigError, match=rf"TLS needs security\.{missing} too"):
        load_security(SecurityConfig(**files))


def test_mutual_alone_is_no_security() -> None:
    with pytest.raises(ConfigError, match=r"security\.ca, security\.certificate, security\.key"):
        load_security(SecurityConfig(mutual=True))


@pytest.mark.parametrize("content", ["", "\n", "two\nlines", "ein Schl\u00fcssel"])
def test_a_token_file_holds_one_line_of_ascii(content: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(ConfigError, match="holds no line of ASCII"):
        load_security(SecurityConfig(token_file=str(path)))


def test_files_are_absolute_and_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"security\.token_file is 'token'; an absolute path"):
        load_security(SecurityConfig(token_file="token"))
    with pytest.raises(ConfigError, match=r"cannot read security\.token_file .*none: No such file"):
        load_security(SecurityConfig(token_file=str(tmp_path / "none")))


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


def test_without_papers_there_is_no_tls() -> None:
    assert client_context(Security(token="s")) is server_context(Security(token="s")) is None


@pytest.mark.parametrize("ca", [b"no PEM", b"\xff\xfe", b""], ids=["text", "bytes", "nothing"])
def test_an_authority_is_pem(ca: bytes) -> None:
    with pytest.raises(ConfigError, match="authority"):
        client_context(Security(ca=ca))


@pytest.mark.parametrize("key", ["foreign.key", "locked.key", "peer"])
def test_a_certificate_comes_with_its_key_and_nobody_is_asked_for_a_password(
    papers: dict[str, bytes], key: str
) -> None:
    with pytest.raises(ConfigError, match="certificate and key"):
        server_context(Security(certificate=papers["peer"], key=papers[key]))
