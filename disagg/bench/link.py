"""Connections between two processes of a benchmark: a paced link, a raw socket, a proxy.

The link is a veth pair between the network namespaces of the two processes, paced by the kernel's
token bucket. It disappears with the processes, however the benchmark ends. It needs root on Linux,
iproute2 and util-linux.

The raw socket is the baseline of hand-offs: the same bytes, memory to memory, over one connection,
`sendall` of 2 MiB at a time from one arena and `recv_into` another; nothing is checked.

The proxy is a port in front of a process's own; closing it cuts the process off.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import numpy as np

from disagg.errors import ConfigError
from disagg.wire import FRAME_BYTES

LOOPBACK = "127.0.0.1"
HOSTS = ("10.78.0.1", "10.78.0.2")
DEVICES = ("near", "far")
BURST = "1mb"
QUEUE = "20ms"
# for sockets that can choose and namespaces that may; bbr mistakes pauses between frames for a
# slow link
CONGESTION = "cubic"
CONGESTION_FILE = "/proc/sys/net/ipv4/tcp_congestion_control"
PROXY_BYTES = 1 << 18  # that a proxy passes on at once


def available() -> bool:
    """Whether this process can create a link."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return False
    if not all(shutil.which(tool) for tool in ("ip", "tc", "unshare", "nsenter")):
        return False
    attempt = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    return attempt.returncode == 0


def check_available() -> None:
    """ConfigError if no link can be created."""
    if not available():
        raise ConfigError(
            "a link between network namespaces needs root on Linux, where these may be made, and "
            "ip, tc, unshare and nsenter"
        )


def join(pids: Sequence[int]) -> None:
    """Link two isolated processes, which get the addresses HOSTS."""
    near, far = (
        ["name", device, "netns", str(pid)]
        for device, pid in zip(DEVICES, pids, strict=True)
    )
    command = ["ip", "link", "add", *near, "type", "veth", "peer", *far]
    subprocess.run(command, check=True)
    choose = f"(echo {CONGESTION} || echo reno) > {CONGESTION_FILE} 2>/dev/null || :"
    for pid, host, device in zip(pids, HOSTS, DEVICES, strict=True):
        _run_at(pid, "ip", "addr", "add", f"{host}/24", "dev", device)
        for name in (device, "lo"):
            _run_at(pid, "ip", "link", "set", name, "up")
        _run_at(pid, "sh", "-c", choose)


def limit(pids: Sequence[int], gbps: float) -> None:
    """Set the rate of the link, in both directions."""
    rate = f"{round(1e6 * gbps)}kbit"
    bucket = ["rate", rate, "burst", BURST, "latency", QUEUE]
    for pid, device in zip(pids, DEVICES, strict=True):
        _run_at(pid, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def _run_at(pid: int, *command: str) -> None:
    """Run a command in the network namespace of a process."""
    subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", *command], check=True)


def congestion() -> str:
    """The default TCP congestion control of this process, which gRPC uses."""
    return Path(CONGESTION_FILE).read_text().strip()


def serve_raw(host: str, nbytes: int) -> int:
    """The port of a socket that reads connections into the same memory and answers the count."""
    # written to here: no page faults later
    memory = memoryview(np.full(nbytes, 0, np.uint8).data)
    server = socket.create_server((host, 0))

    def receive(connection: socket.socket) -> int:
        total = 0
        while total < nbytes:
            count = connection.recv_into(memory[total : total + FRAME_BYTES])
            if count == 0:
                break
            total += count
        return total

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(receive(connection).to_bytes(8))

    Thread(target=accept, daemon=True).start()
    return int(server.getsockname()[1])


def send_raw(host: str, port: int, data: memoryview) -> int:
    """Send bytes and wait until all have been read; returns the server's count."""
    with socket.create_connection((host, port)) as connection:
        with contextlib.suppress(OSError):  # a kernel without it has its own
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION.encode()
            )
        for start in range(0, len(data), FRAME_BYTES):
            connection.sendall(data[start : start + FRAME_BYTES])
        connection.shutdown(socket.SHUT_WR)
        return int.from_bytes(connection.recv(8, socket.MSG_WAITALL))


class TcpProxy:
    """A port in front of another one. `passed_bytes`: in both directions."""

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        self.passed_bytes = 0

    async def open(self) -> str:
        """Let connections through; the address to use."""
        self._server = await asyncio.start_server(self._accept, LOOPBACK, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return f"{LOOPBACK}:{self.port}"

    def close(self) -> None:
        """Break the connections, and refuse new ones."""
        self._server.close()
        for connection in self._connections:
            connection.cancel()

    def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connection = asyncio.create_task(self._forward(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Copy both ways until one way ends."""
        writers = [writer]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            target = await asyncio.open_connection(*self._target)
            target_reader, target_writer = target
            writers.append(target_writer)
            copies = [
                asyncio.create_task(self._copy(reader, target_writer)),
                asyncio.create_task(self._copy(target_reader, writer)),
            ]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
        for each in writers:
            each.transport.abort()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(PROXY_BYTES):
            self.passed_bytes += len(data)
            writer.write(data)
            await writer.drain()
