"""The other ranks of a worker as Ray actors, one in each bundle of its placement group.

    rank 0 (WorkerActor)   RankActors ── makes ──► RankActor, on this host or another
                           LinkListener ◄── dials, then `follow`s orders ── RankActor

They belong to the actor of rank 0, and end with it.
"""

import faulthandler
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import ray

from disagg.config import Config
from disagg.errors import RanksLostError
from disagg.launch import rank_bundles
from disagg.launch.ray_connection import LOCAL
from disagg.launch.start_protocol import Message, config_of, settings_message
from disagg.log import configure
from disagg.transfer.security import Authority, Security, protected
from disagg.worker.rank_link import Dialled, Dialling, LinkListener, OrderLink, dial
from disagg.worker.rank_start import RankPlace, RankStart, StartedRank
from disagg.worker.ranks import follow

ACCEPT_S = 0.2  # between two checks that the actors live


class RankActor:
    """A follower in a process of its own."""

    def follow(
        self, dialling: Dialling, settings: Message, authority: dict[str, str] | None
    ) -> None:
        """Obey rank 0 until it ends, and end then; without it, nothing of the worker stays.

        Raises what keeps it from reaching rank 0, which then ends this process.
        """
        faulthandler.enable()
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors are reported by name
        link, place = _reach(dialling, config_of(settings), authority)
        try:
            was_ended = follow(link, place)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # not after torch's threads, which may wait for other ranks
        if not was_ended:
            rank_bundles.leave()
        os._exit(0)


def _reach(
    dialling: Dialling, config: Config, authority: dict[str, str] | None
) -> tuple[OrderLink, RankPlace]:
    """The link to rank 0, and where this rank runs."""
    configure(config.server.log_level, config.server.log_format)
    is_private = config.cluster.address == LOCAL
    host = "127.0.0.1" if is_private else ray.util.get_node_ip_address()
    issuer = Authority(**authority) if authority else None
    security = protected(config.security, issuer, host)
    link = dial(dialling, security, os.getpid())
    return link, RankPlace(host, security, gpu=0)


class StartedActor:
    """A `StartedRank` of Ray."""

    def __init__(self, handle: Any, call: Any, dialled: Dialled):
        self.link: OrderLink = dialled.link
        self.pid = dialled.pid
        self._host = dialled.host
        self._handle = handle
        self._call = call

    def wait(self, timeout_s: float) -> str:
        has_ended, _ = ray.wait([self._call], timeout=timeout_s)
        return f"process {self.pid} at {self._host}" if has_ended else ""

    def kill(self) -> None:
        ray.kill(self._handle)


class RankActors:
    """A `RankStarter` whose followers are actors in the placement group of rank 0's.

    config:   as the front end has it
    security: of rank 0
    """

    def __init__(
        self,
        config: Config,
        role: str,
        host: str,
        authority: Authority | None,
        security: Security,
    ):
        self.host = host
        self.ports: Sequence[int] | None = config.cluster.ports
        self._config = config
        self._role = role
        self._authority = authority
        self._security = security

    def start(self, starts: Sequence[RankStart]) -> list[StartedRank]:
        timeout_s = self._config.cluster.rank_timeout_s
        listener = LinkListener(self.host, self.ports, self._security, timeout_s)
        actors = _Actors()
        with listener:
            try:
                for start in starts:
                    self._start(start, listener, actors)
                return actors.until_dialled(listener)
            except BaseException:
                actors.kill()
                raise

    def _start(
        self, start: RankStart, listener: LinkListener, actors: "_Actors"
    ) -> None:
        # the class has its name in Ray's lists
        kind = type(f"{self._role.title()}Rank", (RankActor,), {})
        options = rank_bundles.in_bundle(rank_bundles.own_group(), start.rank)
        actor = ray.remote(kind).options(max_restarts=0, **options)
        handle = actor.remote()
        key = listener.make_key(start.rank)
        dialling = Dialling(listener.address, key, start.timeout_s)
        secrets = asdict(self._authority) if self._authority else None
        settings = settings_message(self._config)
        call = handle.follow.remote(dialling, settings, secrets)
        actors.add(start.rank, handle, call)


class _Actors:
    """The followers of a group that have not all said hello."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}  # by rank
        self._calls: dict[int, Any] = {}

    def add(self, rank: int, handle: Any, call: Any) -> None:
        self._handles[rank] = handle
        self._calls[rank] = call

    def until_dialled(self, listener: LinkListener) -> list[StartedRank]:
        """All of them, by rank; RanksLostError if one ends before."""
        dialled: dict[int, Dialled] = {}
        while len(dialled) < len(self._calls):
            arrival = listener.accept(ACCEPT_S)
            if arrival is not None:
                dialled[arrival.rank] = arrival
                continue
            self._check_alive()
        return [
            StartedActor(self._handles[rank], self._calls[rank], dialled[rank])
            for rank in sorted(dialled)
        ]

    def _check_alive(self) -> None:
        for rank, call in self._calls.items():
            ended, _ = ray.wait([call], timeout=0)
            if not ended:
                continue
            try:
                ray.get(call)
            except ray.exceptions.RayError as error:
                last_line = str(error).strip().rpartition("\n")[2]
                raise RanksLostError(
                    f"rank {rank} did not start: {last_line}"
                ) from error

    def kill(self) -> None:
        for handle in self._handles.values():
            ray.kill(handle)
