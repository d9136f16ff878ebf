"""Security from files, and contexts of TLS: what is missing, unreadable or wrong is named."""

import ssl
import subprocess
from pathlib import Path

import pytest

from disagg.config import SecurityConfig
from disagg.errors import ConfigError
from disagg.transfer.security import (
    Authority,
    Security,
    load_security,
    protected,
    tls_context,
)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name in ("ca", "certificate", "key", "token_file"):
        (tmp_path / name).write_text(f"the {name}\n")
    return {path.name: str(path) for path in tmp_path.iterdir()}


def test_without_files_there_is_the_given_token_or_nothing():
    assert load_security(SecurityConfig()) == Security()
    assert load_security(SecurityConfig(), "a token") == Security(token="a token")


def test_files_become_a_token_and_certificates(files):
    security = load_security(SecurityConfig(**files), "another token")
    papers = [f"the {name}\n".encode() for name in ("ca", "certificate", "key")]
    assert security == Security("the token_file", *papers)


WRONG = {
    "no authority": ({"ca": None}, r"TLS needs security\.ca too"),
    "no certificate": ({"certificate": None}, r"TLS needs security\.certificate too"),
    "no key": ({"key": None}, r"TLS needs security\.key too"),
    "a key alone": (
        {"ca": None, "certificate": None},
        r"TLS needs security\.ca, security\.certificate too",
    ),
    "no absolute path": (
        {"token_file": "token"},
        r"security\.token_file is 'token'; expected an absolute",
    ),
    "no such file": (
        {"key": "/none"},
        r"cannot read security\.key /none: No such file",
    ),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_files_that_are_missing_are_named(files, change, words):
    with pytest.raises(ConfigError, match=words):
        load_security(SecurityConfig(**(files | change)))


@pytest.mark.parametrize("content", ["", "\n", "two\nlines", "ein Schl\u00fcssel"])
def test_a_token_file_holds_one_line_of_ascii(content, files):
    Path(files["token_file"]).write_text(content)
    with pytest.raises(ConfigError, match="holds no line of ASCII"):
        load_security(SecurityConfig(**files))


def test_without_papers_there_is_no_tls():
    assert tls_context(Security("s"), False) is tls_context(Security("s"), True) is None


@pytest.mark.parametrize(
    "ca", [b"no PEM", b"\xff\xfe", b""], ids=["text", "bytes", "nothing"]
)
def test_an_authority_is_pem(ca):
    with pytest.raises(ConfigError, match="authority"):
        tls_context(Security(ca=ca), server=False)


@pytest.mark.parametrize("key", ["foreign.key", "locked.key", "peer"])
def test_a_key_that_does_not_fit_its_certificate_is_refused(papers, key):
    lock = ["openssl", "ec", "-aes256", "-passout", "pass:secret"]
    locked = subprocess.run(
        lock, input=papers["peer.key"], check=True, capture_output=True
    )
    papers = papers | {"locked.key": locked.stdout}
    security = Security(None, papers["ca"], papers["peer"], papers[key])
    with pytest.raises(ConfigError, match="certificate and key"):
        tls_context(security, server=True)


def test_an_authority_gives_what_files_do_not(files):
    authority = Authority.make()
    assert protected(SecurityConfig(), None, "127.0.0.1") == Security()
    assert protected(SecurityConfig(), Authority("t"), "127.0.0.1") == Security(
        token="t"
    )
    issued = protected(SecurityConfig(), authority, "127.0.0.1")
    assert (issued.token, issued.tls) == (authority.token, True)
    token_file = {"token_file": files.pop("token_file")}
    mixed = protected(SecurityConfig(**token_file), authority, "127.0.0.1")
    assert (mixed.token, mixed.tls) == ("the token_file", True)
    from_files = protected(SecurityConfig(**files), authority, "127.0.0.1")
    assert (from_files.token, from_files.ca) == (authority.token, b"the ca\n")


HOSTS = [
    ("127.0.0.1", "127.0.0.1", "same", True),
    ("::1", "::1", "same", True),
    ("host.example", "host.example", "same", True),
    ("127.0.0.2", "127.0.0.1", "same", False),
    ("127.0.0.1", "127.0.0.1", "foreign", False),
]


@pytest.mark.parametrize(("issued", "called", "peers", "well"), HOSTS)
def test_hosts_of_one_authority_know_each_other_by_address(issued, called, peers, well):
    ours = Authority.make()
    theirs = ours if peers == "same" else Authority.make()
    server = protected(SecurityConfig(), ours, issued)
    client = protected(SecurityConfig(), theirs, "10.0.0.9")
    assert handshake(client, server, called) is well


def handshake(client: Security, server: Security, name: str) -> bool:
    """Whether a connection of both comes about, in memory."""
    pipes = [ssl.MemoryBIO() for _ in range(4)]
    contexts = tls_context(client, False), tls_context(server, True)
    asking = contexts[0].wrap_bio(*pipes[:2], server_hostname=name)
    ends = [asking, contexts[1].wrap_bio(*pipes[2:], server_side=True)]
    done = [False, False]
    for _ in range(6):
        for i, end in enumerate(ends):
            try:
                end.do_handshake()
                done[i] = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
            pipes[2 - 2 * i].write(pipes[2 * i + 1].read())
    return all(done)
