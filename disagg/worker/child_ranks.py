"""Followers as child processes of rank 0, on its host: see `rank_process.py`."""

import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from socket import socketpair

from disagg.engine.orders import pack_order
from disagg.transfer.security import Security
from disagg.worker.rank_link import OrderLink, limit_sending
from disagg.worker.rank_start import RankPlace, RankStart, StartedRank


class ChildRank:
    """A `StartedRank` on this host."""

    def __init__(self, start: RankStart, place: RankPlace):
        own, other = socketpair()
        limit_sending(own, start.timeout_s)
        command = [sys.executable, "-P", "-m", "disagg.worker.rank_process"]
        with other:
            self._process = subprocess.Popen(
                [*command, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.link: OrderLink = Connection(own.detach())
        self.pid = self._process.pid
        self.link.send_bytes(pack_order(place))

    def wait(self, timeout_s: float) -> str:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return ""
        return f"process {self.pid}, exit code {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


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
        return [ChildRank(start, self._place(start.rank)) for start in starts]

    def _place(self, rank: int) -> RankPlace:
        return RankPlace(self.host, self._security, gpu=rank)
