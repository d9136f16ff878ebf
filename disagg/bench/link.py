"""What lies between two processes of a benchmark: a link of a chosen rate, TLS, a raw TCP socket.

The link is two network namespaces, a veth pair and the kernel's token bucket. The namespaces have
no names. A waiting process holds each, and ends when its standard input closes, that is when the
benchmark ends, killed or not; with the last process in a namespace the kernel removes it, its
devices and its queues. Wants root on Linux, iproute2 and util-linux.

The raw socket is what the data plane is compared with: the same bytes, memory to memory. One
connection, `sendall` of 2 MiB at a time from one arena, `recv_into` another; nothing is checked.
"""

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from disagg.errors import ConfigError
from disagg.transfer.security import Security

LOOPBACK = "127.0.0.1"
HOSTS = ("10.78.0.1", "10.78.0.2")
DEVICES = ("near", "far")
TOOLS = ("ip", "tc", "unshare", "nsenter")
BURST, QUEUE = "1mb", "20ms"
HOLD = ["sh", "-c", "echo; exec cat >/dev/null"]
FRAME_BYTES = 2 << 20
CONGESTION = "cubic"
_COUNT = struct.Struct("<Q")


def available() -> bool:
    """Whether this process may make such a link here."""
    if not _permitted():
        return False
    return not subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode


def _permitted() -> bool:
    tools = all(map(shutil.which, TOOLS))
    return sys.platform.startswith("linux") and os.geteuid() == 0 and tools


class Namespaces:
    """Two ends of one link; use it as a context, around the processes that run in it."""

    def __init__(self) -> None:
        if not _permitted():
            needs = f"root on Linux and {', '.join(TOOLS)}"
            raise ConfigError(f"a link between network namespaces needs {needs}")
        self._holders: list[subprocess.Popen[str]] = []

    def prefix(self, end: int) -> list[str]:
        """What to put before a command so that it runs at end 0 or 1."""
        return ["nsenter", f"--net={self._namespace(end)}"]

    def shape(self, gbps: float) -> None:
        """Let at most so much pass, in both directions."""
        bucket = ["rate", f"{round(1e6 * gbps)}kbit", "burst", BURST, "latency", QUEUE]
        for end, device in enumerate(DEVICES):
            self._run(end, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *bucket)

    def __enter__(self) -> Self:
        try:
            for _ in HOSTS:
                self._hold()
            ends = [["name", device, "netns", str(x.pid)] for device, x in self._pairs()]
            command = ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]]
            subprocess.run(command, check=True)
            for end, (host, device) in enumerate(zip(HOSTS, DEVICES, strict=True)):
                self._run(end, "ip", "addr", "add", f"{host}/24", "dev", device)
                for name in (device, "lo"):
                    self._run(end, "ip", "link", "set", name, "up")
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def _pairs(self) -> list[tuple[str, subprocess.Popen[str]]]:
        return list(zip(DEVICES, self._holders, strict=True))

    def _namespace(self, end: int) -> Path:
        return Path(f"/proc/{self._holders[end].pid}/ns/net")

    def _hold(self) -> None:
        pipe = subprocess.PIPE
        command = ["unshare", "--net", *HOLD]
        holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._holders.append(holder)
        assert holder.stdout is not None
        if not holder.stdout.readline():  # it speaks once it is in its namespace
            raise ConfigError("this host lets nobody make a network namespace")

    def _run(self, end: int, *command: str) -> None:
        subprocess.run([*self.prefix(end), *command], check=True)

    def _release(self) -> None:
        for holder in self._holders:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.close()
            holder.stdout.close()
            holder.wait()
        self._holders.clear()


class StreamServer:
    """Reads each connection into memory of its own and says the count when it ends."""

    def __init__(self, host: str, nbytes: int):
        self._memory = memoryview(np.full(nbytes, 0, np.uint8).data)
        self._socket = socket.create_server((host, 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listening socket was closed
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    connection.sendall(_COUNT.pack(self._read(connection)))

    def _read(self, connection: socket.socket) -> int:
        set_cubic(connection)
        total = 0
        while total < len(self._memory):
            count = connection.recv_into(self._memory[total : total + FRAME_BYTES])
            if not count:
                break
            total += count
        return total


def push_stream(host: str, port: int, data: memoryview) -> int:
    """Send bytes and wait until they have all been read; the count that the server says."""
    with socket.create_connection((host, port)) as connection:
        set_cubic(connection)
        for start in range(0, len(data), FRAME_BYTES):
            connection.sendall(data[start : start + FRAME_BYTES])
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(_COUNT.size, socket.MSG_WAITALL)
    (count,) = _COUNT.unpack(answer)
    return int(count)


def set_cubic(connection: socket.socket) -> None:
    """The same congestion control everywhere, whatever the host's default is."""
    with contextlib.suppress(OSError):  # a kernel without it has its own
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION.encode())


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
