"""The connection between rank 0 and a follower: whole messages, in order, either way.

    on one host      a pair of sockets, which the follower inherits
    between hosts    LinkListener of rank 0 ◄── dial() of a follower: TCP, or TLS as between workers

A follower that dials says hello with a key of its own, which it got where it was started. The end
of either process closes its sockets, which the other end sees at once; the end of a host is seen
after `timeout_s`.
"""

import hmac
import logging
import secrets
import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import NamedTuple, Protocol, Self

from disagg import __version__
from disagg.errors import RanksLostError, VersionError
from disagg.transfer.rpc import address_of, bind_within, host_of
from disagg.transfer.security import Security, tls_context

HELLO_S = 5.0  # for the hello of a connection
KEY_BYTES = 16
MAX_VERSION_BYTES = 64
MAGIC = b"dgRK"
PROBE_S = 1  # between two questions whether the other host is still there
_LENGTH = struct.Struct("<Q")
# magic, process id, key, version of the package
_HELLO = struct.Struct(f"<4sI{KEY_BYTES}s{MAX_VERSION_BYTES}s")

log = logging.getLogger(__name__)


class OrderLink(Protocol):
    """One end of a connection; `multiprocessing.connection.Connection` is one.

    Its methods raise OSError once the other end has ended.
    """

    def send_bytes(self, data: bytes, /) -> None:
        """BlockingIOError if the other end has not read for the timeout."""

    def recv_bytes(self) -> bytes:
        """The next message. EOFError if the other end was closed."""

    def poll(self, timeout: float = 0.0, /) -> bool:
        """Whether a message or the end is there, after so many seconds at most."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class SocketLink:
    """An `OrderLink` over a connected socket, TLS or not."""

    def __init__(self, sock: socket.socket):
        self._sock = sock

    def send_bytes(self, data: bytes, /) -> None:
        try:
            self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except TimeoutError as error:
            raise BlockingIOError from error

    def recv_bytes(self) -> bytes:
        (nbytes,) = _LENGTH.unpack(_read(self._sock, _LENGTH.size))
        return bytes(_read(self._sock, nbytes))

    def poll(self, timeout: float = 0.0, /) -> bool:
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        return bool(wait([self._sock], timeout))

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


def _read(sock: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    memory = memoryview(data)
    while memory:
        count = sock.recv_into(memory)
        if not count:
            raise EOFError
        memory = memory[count:]
    return data


def limit_sending(sock: socket.socket, timeout_s: float) -> None:
    """Let writes fail that have waited this long for a peer to read: it is frozen."""
    whole_s, part_s = divmod(timeout_s, 1.0)
    limit = struct.pack("ll", int(whole_s), int(1e6 * part_s))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _tune(sock: socket.socket, timeout_s: float) -> None:
    """Send at once, and fail after the timeout if the other host is gone."""
    sock.settimeout(None)
    limit_sending(sock, timeout_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": PROBE_S,
        "TCP_KEEPINTVL": PROBE_S,
        "TCP_KEEPCNT": max(1, round(timeout_s / PROBE_S)),
        "TCP_USER_TIMEOUT": max(1, round(1000 * timeout_s)),
    }
    for name, value in options.items():
        with suppress(OSError, AttributeError):  # some systems lack some of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Dialled(NamedTuple):
    """A follower that has said hello."""

    rank: int
    link: OrderLink
    pid: int
    host: str


class LinkListener:
    """Takes the connections of followers, at rank 0. A context manager.

    address: "host:port" for `dial`
    """

    def __init__(
        self,
        host: str,
        ports: Sequence[int] | None,
        security: Security | None,
        timeout_s: float,
    ):
        self._context = tls_context(security or Security(), server=True)
        self._timeout_s = timeout_s
        self._keys: dict[int, bytes] = {}  # by rank
        self._socket = listen(host, ports)
        self.address = address_of(host, self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def make_key(self, rank: int) -> bytes:
        """What this rank says hello with, once."""
        key = secrets.token_bytes(KEY_BYTES)
        self._keys[rank] = key
        return key

    def accept(self, wait_s: float) -> Dialled | None:
        """The next follower; None if none came. VersionError for one of another version."""
        self._socket.settimeout(wait_s)
        try:
            sock, peer = self._socket.accept()
        except TimeoutError:
            return None
        try:
            sock.settimeout(HELLO_S)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
            return self._greet(sock, peer[0])
        except (OSError, EOFError) as error:
            log.warning("a connection to rank 0 from %s ended: %r", peer[0], error)
            sock.close()
            return None

    def _greet(self, sock: socket.socket, host: str) -> Dialled:
        hello = _read(sock, _HELLO.size)
        magic, pid, key, version = _HELLO.unpack(hello)
        ranks = [x for x, own in self._keys.items() if hmac.compare_digest(own, key)]
        if magic != MAGIC or not ranks:
            raise ConnectionRefusedError("a hello of no rank of this group")
        (rank,) = ranks
        other = version.rstrip(b"\0").decode(errors="replace")
        if other != __version__:
            raise VersionError(
                f"rank {rank} at {host} has version {other}; expected {__version__}"
            )
        del self._keys[rank]
        _tune(sock, self._timeout_s)
        return Dialled(rank, SocketLink(sock), pid, host)


@dataclass(frozen=True)
class Dialling:
    """What a follower needs to reach rank 0: the address of its listener, and a key."""

    address: str
    key: bytes
    timeout_s: float


def dial(dialling: Dialling, security: Security | None, pid: int) -> OrderLink:
    """A connection to rank 0, which greets one rank at a time; RanksLostError if there is none."""
    host = host_of(dialling.address)
    port = dialling.address.rpartition(":")[2]
    context = tls_context(security or Security(), server=False)
    version = __version__.encode()
    try:
        sock = socket.create_connection((host, int(port)), dialling.timeout_s)
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=host)
        sock.sendall(_HELLO.pack(MAGIC, pid, dialling.key, version))
    except OSError as error:
        raise RanksLostError(f"rank 0 at {dialling.address}: {error}") from error
    _tune(sock, dialling.timeout_s)
    return SocketLink(sock)


def listen(host: str, ports: Sequence[int] | None) -> socket.socket:
    """A socket that listens at this address alone, on a free port, in a range if there is one."""
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return bind_within(
        ports, lambda port: socket.create_server((host, port), family=family)
    )
