"""A link of a chosen rate: two network namespaces, a veth pair, and the kernel's token bucket.

The namespaces have no names. A waiting process holds each, and ends when its standard input
closes, that is when the benchmark ends, killed or not; with the last process in a namespace the
kernel removes it, its devices and its queues. Wants root on Linux, iproute2 and util-linux.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from disagg.errors import ConfigError

HOSTS = ("10.78.0.1", "10.78.0.2")
DEVICES = ("near", "far")
TOOLS = ("ip", "tc", "unshare", "nsenter")
BURST, QUEUE = "1mb", "20ms"
HOLD = ["sh", "-c", "echo; exec cat >/dev/null"]


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
