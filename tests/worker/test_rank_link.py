"""The connection of a follower to rank 0 across hosts: who may open it, and how it ends."""

import fcntl
import resource
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from disagg.config import SecurityConfig
from disagg.errors import RanksLostError, VersionError
from disagg.transfer.security import Authority, Security, protected
from disagg.worker import rank_link
from disagg.worker.rank_link import (
    Dialled,
    Dialling,
    LinkListener,
    OrderLink,
    SocketLink,
    dial,
)

HOST = "127.0.0.1"
PID = 4711
WAIT_S = 10.0
TIMEOUT_S = 60.0
LARGE = bytes(range(256)) * 5000
MORE_THAN_FITS = bytes(64 << 20)
SELECT_FILES = 1024  # the numbers that select(2) knows


@pytest.fixture(scope="module")
def certified() -> Security:
    """What a worker of a cluster has."""
    return protected(SecurityConfig(), Authority.make(), HOST)


def connect(
    security: Security | None, key: bytes | None = None, timeout_s: float = TIMEOUT_S
) -> tuple[Dialled | None, OrderLink]:
    """What rank 0 and rank 1 have after a hello; with a key of its own, or the true one."""
    with (
        LinkListener(HOST, None, security, timeout_s) as listener,
        ThreadPoolExecutor() as pool,
    ):
        key = key or listener.make_key(1)
        dialling = Dialling(listener.address, key, TIMEOUT_S)
        dialled = pool.submit(dial, dialling, security, PID)
        return listener.accept(WAIT_S), dialled.result()


@pytest.mark.parametrize("plane", ["token", "tls"])
def test_messages_arrive_whole_and_in_order(certified, plane):
    dialled, link = connect(certified if plane == "tls" else None)
    own = dialled.link

    with ThreadPoolExecutor() as pool:
        messages = [b"a", LARGE, b"", b"b"]
        pool.submit(lambda: [own.send_bytes(x) for x in messages])
        received = [link.recv_bytes() for _ in messages]
    link.send_bytes(b"answer")

    assert received == messages
    assert own.recv_bytes() == b"answer"
    assert (dialled.rank, dialled.pid, dialled.host) == (1, PID, HOST)


def test_the_end_of_one_side_is_seen_by_the_other():
    dialled, link = connect(None)
    link.send_bytes(b"last words")
    link.close()

    assert dialled.link.recv_bytes() == b"last words"
    assert dialled.link.poll(WAIT_S)
    with pytest.raises(EOFError):
        dialled.link.recv_bytes()


def test_a_link_without_a_message_has_nothing_to_read():
    dialled, _ = connect(None)

    assert not dialled.link.poll()


def test_a_link_that_the_other_side_does_not_read_fails_after_the_timeout():
    dialled, _ = connect(None, timeout_s=0.2)

    with pytest.raises(BlockingIOError):
        dialled.link.send_bytes(MORE_THAN_FITS)


def test_a_tls_link_that_the_other_side_does_not_read_fails_too(certified):
    dialled, _ = connect(certified, timeout_s=0.2)

    with pytest.raises(OSError):  # noqa: PT011 - OpenSSL does not say why
        dialled.link.send_bytes(MORE_THAN_FITS)


def test_a_link_of_a_process_with_many_files_can_be_polled():
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most <= 2 * SELECT_FILES:
        pytest.skip("this system allows too few open files")
    own, other = socket.socketpair()
    with own, other:
        number = fcntl.fcntl(own.fileno(), fcntl.F_DUPFD_CLOEXEC, 2 * SELECT_FILES)
        link = SocketLink(socket.socket(fileno=number))

        assert not link.poll()
        other.sendall(b"x")
        assert link.poll()
        link.close()


def test_a_hello_with_another_key_is_refused():
    dialled, link = connect(None, key=bytes(rank_link.KEY_BYTES))

    assert dialled is None
    assert link.poll(WAIT_S)


def test_a_rank_without_a_certificate_is_refused(certified):
    with LinkListener(HOST, None, certified, TIMEOUT_S) as listener:
        dialling = Dialling(listener.address, listener.make_key(1), TIMEOUT_S)
        dial(dialling, None, PID)

        assert listener.accept(WAIT_S) is None


def test_a_rank_of_another_version_is_an_error(monkeypatch):
    with LinkListener(HOST, None, None, TIMEOUT_S) as listener:
        dialling = Dialling(listener.address, listener.make_key(1), TIMEOUT_S)
        monkeypatch.setattr(rank_link, "__version__", "9.9")
        dial(dialling, None, PID)
        monkeypatch.undo()

        with pytest.raises(VersionError, match=r"rank 1 at 127.0.0.1 has version 9.9"):
            listener.accept(WAIT_S)


def test_a_rank_0_that_is_gone_is_an_error():
    with LinkListener(HOST, None, None, TIMEOUT_S) as listener:
        dialling = Dialling(listener.address, listener.make_key(1), TIMEOUT_S)

    with pytest.raises(RanksLostError, match="rank 0 at 127"):
        dial(dialling, None, PID)
