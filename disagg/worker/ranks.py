"""The ranks of a worker on one host: processes that rank 0 starts, and the links to them.

    rank 0      RankProcesses ── orders, over a socket ──► follow(): the process of another rank
    all ranks   ◄──────── collectives of each forward pass, by a RankGroup ────────►

A follower waits for orders without a timeout. If a rank ends, its sockets close: the others see it
at once. If one hangs, the next collective fails after `rank_timeout_s`, and so does an order that
fills the socket. Either is the end of the group; there is no part of one.
"""

import atexit
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from socket import SO_SNDTIMEO, SOL_SOCKET, socket, socketpair
from threading import Thread
from typing import Any

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
from disagg.errors import DisaggError, RanksLostError
from disagg.model.rank_group import RankGroup, join_store, open_store
from disagg.model.runner import Runner, pick_device
from disagg.worker.rank_endpoint import RankEndpoint, ServeOrder

READY = b"ready"
ADDRESS = b"address "  # before the "host:port" of a follower
END_S = 2.0  # for a follower whose socket was closed


@dataclass(frozen=True)
class RankStart:
    """What a rank is started with; the model as of `Runner.load`.

    processes: of this host that load the model
    """

    rank: int
    ranks: int
    port: int
    timeout_s: float
    threads: int
    model: str | None
    dtype: str
    device: str
    context: int | None
    processes: int


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
    ):
        """
        processes: of this host that load the model, besides the ranks of others
        threads:   of each rank; None: as many as this process has
        The others as of `Runner.load`.
        """
        device = pick_device(device)
        store = open_store()
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._num_engines = 0
        self._closed = False
        atexit.register(self.close)
        for rank in range(1, ranks):
            start = RankStart(
                rank=rank,
                ranks=ranks,
                port=store.port,
                timeout_s=timeout_s,
                threads=threads or torch.get_num_threads(),
                model=model,
                dtype=dtype,
                device=device,
                context=context,
                processes=max(processes, ranks),
            )
            self._start(start)
        try:
            self._wait_for_processes()
            self.group = RankGroup(store, 0, ranks, timeout_s, device)
        except DisaggError:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process of each follower."""
        return [process.pid for process in self._processes]

    def orders(self) -> StepOrders:
        """The orders of one more engine of this process."""
        number = self._num_engines
        self._num_engines += 1
        return StepOrders(partial(self.send, number))

    def serve(self, order: ServeOrder) -> list[str]:
        """Let the followers hand over what engine 0 computes; the address of each."""
        self.send(0, order)
        return [self._receive(link, ADDRESS).decode() for link in self._links]

    def send(self, engine: int, order: Order | ServeOrder) -> None:
        """Bring an order to all followers; RanksLostError if one has ended, or reads nothing."""
        data = pack_order((engine, order))
        try:
            for link in self._links:
                link.send_bytes(data)
        except BlockingIOError as error:
            raise RanksLostError("a rank has read no order for too long") from error
        except OSError as error:
            raise RanksLostError(f"a rank has ended: {self.cause()}") from error

    def begin_serving(self) -> None:
        """All is compiled and recorded: from now on no rank waits longer than the timeout."""
        self.send(0, BeginOrder())
        self.group.begin_serving()

    def watch(self, on_end: Callable[[RanksLostError], None]) -> None:
        """Call on_end, on a thread, when a follower has ended."""

        def until_one_ends() -> None:
            wait(self._links)
            if not self._closed:
                self.group.abandon()
                on_end(RanksLostError(f"a rank has ended: {self.cause()}"))

        Thread(target=until_one_ends, name="ranks", daemon=True).start()

    def cause(self) -> str:
        """What a follower said before it ended, else how its process ended."""
        for rank, link in enumerate(self._links, 1):
            try:
                if link.poll():
                    return f"rank {rank}: {pickle.loads(link.recv_bytes())}"
            except (OSError, EOFError):
                process = self._processes[rank - 1]
                try:
                    code = process.wait(END_S)
                except subprocess.TimeoutExpired:
                    continue
                return f"rank {rank}, process {process.pid}, exit code {code}"
        return "no rank said why"

    def kill(self) -> None:
        """End all followers by force, as a frozen one needs; `close` is still to come."""
        self._closed = True
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End all followers."""
        self._closed = True
        atexit.unregister(self.close)
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _wait_for_processes(self) -> None:
        """Return when all followers are about to join; RanksLostError if one ends instead."""
        for link in self._links:
            self._receive(link, READY)

    def _receive(self, link: Connection, prefix: bytes) -> bytes:
        """What a follower answers at its start, behind a prefix; RanksLostError if it ends."""
        try:
            answer = link.recv_bytes()
        except (OSError, EOFError):
            raise RanksLostError(f"a rank did not start: {self.cause()}") from None
        if not answer.startswith(prefix):
            raise RanksLostError(f"a rank did not start: {pickle.loads(answer)}")
        return answer.removeprefix(prefix)

    def _start(self, start: RankStart) -> None:
        own, other = socketpair()
        limit_sending(own, start.timeout_s)
        command = [sys.executable, "-P", "-m", "disagg.worker.rank_process"]
        with other:
            process = subprocess.Popen(
                [*command, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
            )
        link = Connection(own.detach())
        link.send_bytes(pack_order(start))
        self._links.append(link)
        self._processes.append(process)


def limit_sending(link: socket, timeout_s: float) -> None:
    """Let writes fail that have waited this long for a peer to read: it is frozen."""
    whole_s, part_s = divmod(timeout_s, 1.0)
    timeval = struct.pack("ll", int(whole_s), int(1e6 * part_s))
    link.setsockopt(SOL_SOCKET, SO_SNDTIMEO, timeval)


def follow(link: Connection) -> None:
    """The life of a follower: load, then do what rank 0 orders, until it closes the link."""
    try:
        start: RankStart = unpack_order(link.recv_bytes())
        link.send_bytes(READY)
        followers = _Followers(_load(start), RankEndpoint(start.rank, start.ranks))
        for engine, order in _orders(link):
            if isinstance(order, ServeOrder):
                link.send_bytes(ADDRESS + followers.serve(engine, order).encode())
            else:
                followers.obey(engine, order)
    except DisaggError as error:
        link.send_bytes(pickle.dumps(f"{type(error).__name__}: {error}"))
        raise


def _orders(link: Connection) -> Iterator[tuple[int, Any]]:
    """Each order with the number of its engine, until rank 0 closes the link."""
    while True:
        try:
            data = link.recv_bytes()
        except EOFError:
            return
        yield unpack_order(data)


def _load(start: RankStart) -> Runner:
    torch.set_num_threads(start.threads)
    if start.device == "cuda":
        torch.cuda.set_device(start.rank)
    store = join_store("127.0.0.1", start.port)
    group = RankGroup(store, start.rank, start.ranks, start.timeout_s, start.device)
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


def share_threads(ranks: int) -> None:
    """Divide the threads of this process between the ranks that it is about to start."""
    if ranks > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
