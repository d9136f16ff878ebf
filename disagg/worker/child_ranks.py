"""Followers as child processes of rank 0, on its host: see `rank_process.py`."""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from socket import socketpair
from threading import Thread

from disagg.engine.orders import pack_order
from disagg.errors import RanksLostError
from disagg.transfer.security import Security
from disagg.worker.rank_link import OrderLink, limit_sending
from disagg.worker.rank_start import RankPlace, RankStart, StartedRank

KILL_S = 2.0  # a process that waits for a broken device does not end


class ChildRank:
    """A `StartedRank` on this host."""

    def __init__(self, start: RankStart, place: RankPlace):
        own, other = socketpair()
        limit_sending(own, start.timeout_s)
        command = [sys.executable, "-P", "-m", "disagg.worker.rank_process"]
        self.link: OrderLink = Connection(own.detach())
        with other:
            self._process = _child([*command, str(other.fileno())], other.fileno())
        self.pid = self._process.pid
        with suppress(OSError):  # it has ended, as it will turn out
            self.link.send_bytes(pack_order(place))

    def wait(self, timeout_s: float) -> str:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return ""
        return f"process {self.pid}, exit code {code}"

    def kill(self) -> None:
        self._process.kill()
        self.wait(KILL_S)


def _child(command: Sequence[str], fd: int) -> "subprocess.Popen[bytes]":
    """A process that inherits a socket, started by a thread that lives as long as it does.

    The system ends the process with the thread that started it (`rank_process.py`), and a user's
    thread may end before.
    """
    started: Future[subprocess.Popen[bytes]] = Future()

    def start_and_stay() -> None:
        try:
            process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        with suppress(ChildProcessError):  # another thread has read its exit code
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    Thread(target=start_and_stay, name="rank-parent", daemon=True).start()
    return started.result()


class ChildRanks:
    """A `RankStarter` whose followers end with this process, or before."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        security: Security | None = None,
        ports: Sequence[int] | None = None,
    ):
        self.host = host
        self.ports = ports
        self._security = security

    def start(self, starts: Sequence[RankStart]) -> list[StartedRank]:
        children: list[StartedRank] = []
        for start in starts:
            try:
                children.append(ChildRank(start, self._place(start.rank)))
            except OSError as error:
                for child in children:
                    child.kill()
                raise RanksLostError(
                    f"rank {start.rank} did not start: {error}"
                ) from error
        return children

    def _place(self, rank: int) -> RankPlace:
        return RankPlace(self.host, self._security, gpu=rank)
