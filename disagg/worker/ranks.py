"""The ranks of a worker: processes that rank 0 starts, on any host, and the links to them.

    rank 0      RankProcesses ── orders, over a link ──► follow(): the process of another rank
    all ranks   ◄──────── collectives of each forward pass, by a RankGroup ────────►

A follower waits for orders without a timeout. If a rank ends, its sockets close: the others see it
at once. If one hangs, the next collective fails after `rank_timeout_s`, and so does an order that
fills the socket; if its host is gone, its link does. Each is the end of the group; there is no part
of one.

How a follower starts is the business of a `RankStarter`.
"""

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from threading import Lock, Thread

import torch

from disagg.engine.follower import Follower
from disagg.engine.orders import (
    ArenaOrder,
    BeginOrder,
    CopyOrder,
    Order,
    StepOrder,
    StepOrders,
    pack_order,
    unpack_order,
)
from disagg.errors import RanksLostError
from disagg.model.rank_group import LOAD_S, RankGroup, join_store, open_store
from disagg.model.runner import Runner, pick_device
from disagg.worker.child_ranks import ChildRanks
from disagg.worker.rank_endpoint import RankEndpoint, ServeOrder
from disagg.worker.rank_link import OrderLink, listen
from disagg.worker.rank_start import RankPlace, RankStart, RankStarter

READY = b"ready"
ADDRESS = b"address "  # before the "host:port" of a follower
END = b""  # rank 0 ends the group; without it, its process broke
START_S = 300.0  # for the process of a follower to be there
END_S = 2.0  # for a follower whose link was closed
BROKEN_S = 0.2  # in which all sockets of a process that broke are closed


class RankProcesses:
    """The other ranks of this process's group, started and watched.

    group: of this process, rank 0
    """

    def __init__(
        self,
        ranks: int,
        timeout_s: float,
        model: str | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        context: int | None = None,
        processes: int = 1,
        threads: int | None = None,
        starter: RankStarter | None = None,
    ):
        """
        processes: of this host that load the model, besides the ranks of others
        threads:   of each rank; None: as many as this process has
        starter:   None: the others are child processes
        The others as of `Runner.load`.
        """
        device = pick_device(device)
        starter = starter or ChildRanks()
        host = starter.host
        store = open_store(listen(host, starter.ports))
        self._num_engines = 0
        self._closed = False
        self._asking = Lock()
        self._cause = ""
        starts = [
            RankStart(
                rank=rank,
                ranks=ranks,
                host=host,
                port=store.port,
                timeout_s=timeout_s,
                threads=threads or torch.get_num_threads(),
                model=model,
                dtype=dtype,
                device=device,
                context=context,
                processes=max(processes, ranks),
            )
            for rank in range(1, ranks)
        ]
        self._ranks = starter.start(starts)
        self._links: list[OrderLink] = [started.link for started in self._ranks]
        atexit.register(self.close)
        with self.loading():
            self._begin(starts)
            self.group = RankGroup(store, 0, ranks, timeout_s, device, host)

    @property
    def pids(self) -> list[int]:
        """The process of each follower, on its host."""
        return [started.pid for started in self._ranks]

    def orders(self) -> StepOrders:
        """The orders of one more engine of this process."""
        number = self._num_engines
        self._num_engines += 1
        return StepOrders(partial(self.send, number))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around what this rank loads: any error ends the group.

        RanksLostError says why a follower has ended, where one has.
        """
        try:
            yield
        except RanksLostError as error:
            cause = self.cause()
            self.close()
            if not cause:
                raise
            raise RanksLostError(f"a rank did not start: {cause}") from error
        except BaseException:
            self.close()
            raise

    def serve(self, order: ServeOrder) -> list[str]:
        """Let the followers hand over what engine 0 computes; the address of each."""
        self.send(0, order)
        answers = self._receive_all(ADDRESS, LOAD_S)
        return [answer.decode() for answer in answers]

    def send(self, engine: int, order: Order | ServeOrder) -> None:
        """Bring an order to all followers; RanksLostError if one has ended, or reads nothing."""
        data = pack_order((engine, order))
        try:
            for link in self._links:
                link.send_bytes(data)
        except BlockingIOError as error:
            raise RanksLostError("a rank has read no order for too long") from error
        except OSError as error:
            raise RanksLostError(
                f"a rank has ended: {self.cause() or error}"
            ) from error

    def begin_serving(self) -> None:
        """All is compiled and recorded: from now on no rank waits longer than the timeout."""
        self.send(0, BeginOrder())
        self.group.begin_serving()

    def watch(self, on_end: Callable[[RanksLostError], None]) -> None:
        """Call on_end, on a thread, when a follower has ended."""

        def until_one_ends() -> None:
            wait([link.fileno() for link in self._links])
            if not self._closed:
                self.group.abandon()
                cause = self.cause() or "no rank said why"
                on_end(RanksLostError(f"a rank has ended: {cause}"))

        Thread(target=until_one_ends, name="ranks", daemon=True).start()

    def cause(self) -> str:
        """What a follower said before it ended, else how its process ended; "" if none has.

        From any thread.
        """
        with self._asking:
            with suppress(OSError, ValueError):  # closed already
                wait([link.fileno() for link in self._links], BROKEN_S)
            for rank in range(1, 1 + len(self._links)):
                self._cause = self._cause or self._cause_at(rank)
            return self._cause

    def _cause_at(self, rank: int) -> str:
        started = self._ranks[rank - 1]
        try:
            if started.link.poll():
                return f"rank {rank}: {started.link.recv_bytes().decode()}"
        except (OSError, EOFError):
            if end := started.wait(END_S):
                return f"rank {rank}, {end}"
        return ""

    def kill(self) -> None:
        """End all followers by force, as a frozen one needs; `close` is still to come."""
        self._closed = True
        for started in self._ranks:
            started.kill()

    def close(self) -> None:
        """End all followers."""
        self._closed = True
        atexit.unregister(self.close)
        for link in self._links:
            with suppress(OSError):
                link.send_bytes(END)
            link.close()
        for started in self._ranks:
            if not started.wait(END_S):
                started.kill()

    def _begin(self, starts: Sequence[RankStart]) -> None:
        """Return when all followers are about to join; RanksLostError if one does not."""
        for start, link in zip(starts, self._links, strict=True):
            with suppress(OSError):  # it has ended, as its answer says
                link.send_bytes(pack_order(start))
        self._receive_all(READY, START_S)

    def _receive_all(self, prefix: bytes, timeout_s: float) -> list[bytes]:
        """What each follower answers, behind a prefix; RanksLostError if one ends instead."""
        return [
            self._receive(rank, link, prefix, timeout_s)
            for rank, link in enumerate(self._links, 1)
        ]

    def _receive(
        self, rank: int, link: OrderLink, prefix: bytes, timeout_s: float
    ) -> bytes:
        try:
            if not link.poll(timeout_s):
                raise RanksLostError(f"rank {rank} has not started in {timeout_s:g} s")
            answer = link.recv_bytes()
        except (OSError, EOFError) as error:
            end = self._ranks[rank - 1].wait(END_S) or repr(error)
            self._cause = f"rank {rank}, {end}"
        else:
            if answer.startswith(prefix):
                return answer.removeprefix(prefix)
            self._cause = f"rank {rank}: {answer.decode()}"
        raise RanksLostError(f"a rank did not start: {self._cause}")


class _LinkEndedError(Exception):
    """The process of rank 0 broke, or its host is gone."""


def follow(link: OrderLink, place: RankPlace) -> bool:
    """The life of a follower: load, then do what rank 0 orders, until the link ends.

    Returns whether rank 0 ended the group; else its process broke. Raises what broke this rank,
    after it told rank 0.
    """
    try:
        start: RankStart = unpack_order(_receive(link))
        link.send_bytes(READY)
        runner = _load(start, place)
        _obey(link, _Followers(runner, RankEndpoint(start.rank, start.ranks, place)))
    except _LinkEndedError:
        return False
    except Exception as error:
        with suppress(OSError):
            link.send_bytes(f"{type(error).__name__}: {error}".encode())
        if _rank_0_broke(link):
            return False
        raise
    return True


def _obey(link: OrderLink, followers: "_Followers") -> None:
    """Do what rank 0 orders, until it ends the group."""
    while data := _receive(link):
        engine, order = unpack_order(data)
        if isinstance(order, ServeOrder):
            link.send_bytes(ADDRESS + followers.serve(engine, order).encode())
        else:
            followers.obey(engine, order)


def _receive(link: OrderLink) -> bytes:
    """The next message; _LinkEndedError if there is none any more."""
    try:
        return link.recv_bytes()
    except (OSError, EOFError) as error:
        raise _LinkEndedError from error


def _rank_0_broke(link: OrderLink) -> bool:
    """Whether the process of rank 0 has broken just now; else it goes on, or ends the group."""
    try:
        while link.poll(BROKEN_S):
            if link.recv_bytes() == END:
                return False
    except (OSError, EOFError):
        return True
    return False


def _load(start: RankStart, place: RankPlace) -> Runner:
    torch.set_num_threads(start.threads)
    if start.device == "cuda":
        torch.cuda.set_device(place.gpu)
    store = join_store(start.host, start.port)
    group = RankGroup(
        store, start.rank, start.ranks, start.timeout_s, start.device, place.host
    )
    return Runner.load(
        start.model,
        start.dtype,
        start.device,
        start.context,
        start.processes,
        group=group,
    )


class _Followers:
    """The followers of all engines of rank 0's process, which share a model."""

    def __init__(self, runner: Runner, endpoint: RankEndpoint):
        self._runner = runner
        self._endpoint = endpoint
        self._engines: dict[int, Follower] = {}

    def obey(self, engine: int, order: Order) -> None:
        match order:
            case ArenaOrder():
                handoffs = self._endpoint.in_flight
                self._engines[engine] = Follower(self._runner, order, handoffs)
            case BeginOrder():
                assert self._runner.group is not None
                self._runner.group.begin_serving()
            case CopyOrder():
                target = self._engines[engine].arena
                source = self._engines[order.source].arena
                for read, written, nbytes in order.spans:
                    copied = source[read : read + nbytes]
                    target[written : written + nbytes] = copied
            case StepOrder():
                self._engines[engine].step(order)

    def serve(self, engine: int, order: ServeOrder) -> str:
        """Let the follower of an engine hand over; its address."""
        return self._endpoint.start(order, self._engines[engine])


def share_threads(ranks: int) -> Callable[[], None]:
    """Divide the threads of this process between the ranks that it is about to start.

    Returns what gives them back.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // ranks))
    return partial(torch.set_num_threads, threads)
