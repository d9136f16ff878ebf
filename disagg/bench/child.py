"""Child processes of a benchmark, and what lies between two: a link, a raw socket, a door.

A child holds one object, whose methods the parent calls over a pipe. It is forked from a process
that has imported the module of the first one, and has nothing that its parent has. It ends when its
parent does, however that ended and whatever it is doing: its end of the pipe closes.

The link has a chosen rate: a veth pair with the kernel's token bucket between the network
namespaces of the two processes themselves, so it is gone when they are, however the benchmark
ended. Wants root on Linux, iproute2 and util-linux.

The raw socket is what hand-offs are compared with: the same bytes, memory to memory. One
connection, `sendall` of 2 MiB at a time from one arena, `recv_into` another; nothing is checked.

A door is a port in front of a child's own: shut, it cuts off whoever is behind.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe, get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any, Self

import numpy as np

from disagg.errors import ConfigError, DeadlineError, DisaggError, PeerLostError
from disagg.transfer.rpc import tune_malloc
from disagg.wire import FRAME_BYTES

LOOPBACK = "127.0.0.1"
HOSTS = ("10.78.0.1", "10.78.0.2")
DEVICES = ("near", "far")
CLONE_NEWNET = 0x40000000  # of linux/sched.h
BURST, QUEUE = "1mb", "20ms"
# of what can choose, and of namespaces that may; bbr takes pauses between frames for a slow link
CONGESTION, SETTING = "cubic", "/proc/sys/net/ipv4/tcp_congestion_control"
CHUNK_BYTES = 1 << 18  # that a door lets through at once


# -- children

ANSWER_S, END_S = 300.0, 10.0  # for one call; for a process to end by itself


class Child:
    """A process that holds one object of a class; use it as a context.

    role:     a class with async methods, made without arguments
    isolated: it has a network namespace of its own, for `join`
    """

    def __init__(self, role: type, isolated: bool = False):
        self._pipe, theirs = Pipe()
        context = get_context("forkserver")
        context.set_forkserver_preload([role.__module__])
        with theirs:
            given = role, theirs, isolated
            self._process = context.Process(target=_live, args=given, daemon=True)
            resource_tracker.ensure_running()  # it would let all signals through again
            heard = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            self._process.start()  # its server and it inherit that: Ctrl-C is for the parent alone
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        self.pid = self._process.pid or 0

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method there; raises the DisaggError it raised, PeerLostError if it died.

        DeadlineError after ANSWER_S: it answers no call any more.
        """
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(ANSWER_S):
                raise DeadlineError(
                    f"process {self.pid}: no answer to {method} in {ANSWER_S:g} s"
                )
            answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise PeerLostError(
                f"process {self.pid} ended with {self._wait()}"
            ) from error
        if isinstance(answer, DisaggError):
            raise answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Returns when the process has ended."""
        self._pipe.close()
        if self._wait(END_S) is None:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()

    def _wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code; None: it still runs."""
        self._process.join(timeout_s)
        return self._process.exitcode


async def _serve(role: type, pipe: Connection) -> None:
    """Answer the parent's calls, one after another."""
    calls: asyncio.Queue[tuple[str, tuple[Any, ...]]] = asyncio.Queue()
    loop, there = asyncio.get_running_loop(), role()

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(calls.put_nowait, pipe.recv())
        except (EOFError, OSError):
            os._exit(0)

    Thread(target=read, daemon=True).start()
    while True:
        method, arguments = await calls.get()
        try:
            answer = await getattr(there, method)(*arguments)
        except DisaggError as error:
            answer = error
        pipe.send(answer)


def _live(role: type, pipe: Connection, isolated: bool) -> None:
    """The garbage collector never looks at what was imported."""
    if isolated and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        os._exit(ctypes.get_errno())
    tune_malloc()
    gc.freeze()
    asyncio.run(_serve(role, pipe))


# -- what lies between


def available() -> bool:
    """Whether this process may make such a link here."""
    tools = all(map(shutil.which, ("ip", "tc", "unshare", "nsenter")))
    if not (sys.platform.startswith("linux") and os.geteuid() == 0 and tools):
        return False
    return not subprocess.run(
        ["unshare", "--net", "true"], capture_output=True
    ).returncode


def check_available() -> None:
    """ConfigError where no such link can be made."""
    if not available():
        raise ConfigError(
            "a link between network namespaces needs root on Linux, where these may be made, and "
            "ip, tc, unshare and nsenter"
        )


def join(pids: Sequence[int]) -> None:
    """Link two isolated processes: they have the addresses HOSTS."""
    ends = [
        ["name", device, "netns", str(pid)]
        for device, pid in zip(DEVICES, pids, strict=True)
    ]
    subprocess.run(
        ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True
    )
    for pid, host, device in zip(pids, HOSTS, DEVICES, strict=True):
        _run_at(pid, "ip", "addr", "add", f"{host}/24", "dev", device)
        for name in (device, "lo"):
            _run_at(pid, "ip", "link", "set", name, "up")
        _run_at(
            pid,
            "sh",
            "-c",
            f"(echo {CONGESTION} || echo reno) > {SETTING} 2>/dev/null || :",
        )


def limit(pids: Sequence[int], gbps: float) -> None:
    """Let at most so much pass, in both directions."""
    bucket = ["rate", f"{round(1e6 * gbps)}kbit", "burst", BURST, "latency", QUEUE]
    for pid, device in zip(pids, DEVICES, strict=True):
        _run_at(pid, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def _run_at(pid: int, *command: str) -> None:
    subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", *command], check=True)


def congestion() -> str:
    """What TCP of this process does that asks for nothing, as gRPC does not."""
    return Path(SETTING).read_text().strip()


def serve_raw(host: str, nbytes: int) -> int:
    """The port of a socket: each connection is read into the same memory, and told the count."""
    memory = memoryview(
        np.full(nbytes, 0, np.uint8).data
    )  # touched: no page faults later
    server = socket.create_server((host, 0))

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            with connection:
                total, count = 0, 1
                while count and total < nbytes:
                    count = connection.recv_into(memory[total : total + FRAME_BYTES])
                    total += count
                connection.sendall(total.to_bytes(8))

    Thread(target=accept, daemon=True).start()
    return int(server.getsockname()[1])


def send_raw(host: str, port: int, data: memoryview) -> int:
    """Send bytes and wait until they have all been read; the count that the server says."""
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
    """A port in front of another one."""

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self._there = host, int(port)
        self._guests: set[asyncio.Task[None]] = set()
        self.port = 0

    async def open(self) -> str:
        """Let connections through; the address to use."""
        self._server = await asyncio.start_server(self._enter, LOOPBACK, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return f"{LOOPBACK}:{self.port}"

    def shut(self) -> None:
        """Break what is through, and refuse the rest."""
        self._server.close()
        for guest in self._guests:
            guest.cancel()

    def _enter(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        guest = asyncio.create_task(self._carry(reader, writer))
        self._guests.add(guest)
        guest.add_done_callback(self._guests.discard)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        ends = [writer]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            back, forth = await asyncio.open_connection(*self._there)
            ends.append(forth)
            ways = [
                asyncio.create_task(x)
                for x in (_copy(reader, forth), _copy(back, writer))
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        for end in ends:
            end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
