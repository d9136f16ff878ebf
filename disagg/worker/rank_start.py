"""What a follower is started with, and what rank 0 holds of it, wherever it runs.

RankStarter.start ─► StartedRank: its link, its end     ChildRanks, or the actors of Ray
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from disagg.transfer.security import Security
from disagg.worker.rank_link import OrderLink


@dataclass(frozen=True)
class RankStart:
    """What a rank is started with; the model as of `Runner.load`.

    host, port: where the ranks meet
    processes:  of this host that load the model
    """

    rank: int
    ranks: int
    host: str
    port: int
    timeout_s: float
    threads: int
    model: str | None
    dtype: str
    device: str
    context: int | None
    processes: int


@dataclass(frozen=True)
class RankPlace:
    """Where a follower runs.

    host:     its own address, for all that it listens on
    security: of its connections with other workers, for this address
    gpu:      its number among those that its process can use
    """

    host: str
    security: Security | None
    gpu: int


class StartedRank(Protocol):
    """A follower that was started.

    link: to it; its end is readable within a second of the end of its process
    pid:  of its process, on its host
    """

    link: OrderLink
    pid: int

    def wait(self, timeout_s: float) -> str:
        """Its process and how it ended, in words; "" if it still runs after the timeout."""

    def kill(self) -> None:
        """End it at once."""


class RankStarter(Protocol):
    """Starts the followers of a group.

    host:  address of rank 0 for them
    ports: the first and the last for rank 0 to listen on; None: any
    """

    host: str
    ports: Sequence[int] | None

    def start(self, starts: Sequence[RankStart]) -> list[StartedRank]:
        """Followers that wait for their start from their link. RanksLostError if one does not come.

        It leaves none behind where it raises.
        """
