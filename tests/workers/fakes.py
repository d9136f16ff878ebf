"""Workers without a model and without sockets, that answer a prompt with numbers; and clients."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count

from disagg.errors import CapacityError, DisaggError, PeerLostError, ReservationError
from disagg.transfer.messages import (
    Grant,
    Job,
    Load,
    Role,
    Step,
    Submit,
    TokenEvent,
    Work,
    WorkerStatus,
)
from disagg.workers.actions import Action
from disagg.workers.dispatch import Dispatch
from disagg.workers.events import Events
from disagg.workers.members import Started
from disagg.workers.router import Output, Peer

STATS = {"codec": "raw", "wire_bytes": 7}


def answer(index: int) -> int:
    return 100 + index


class Rules(Dispatch):
    """Events of workers, one thing at a time."""

    def token(
        self, worker: str, rid: str, attempt: int, index: int, token: int, now: float
    ) -> list[Action]:
        return self.hear(worker, TokenEvent(rid, attempt, index, token), now)

    def finished(
        self, worker: str, rid: str, attempt: int, count: int, reason: str, now: float
    ) -> list[Action]:
        return self.hear(worker, TokenEvent(rid, attempt, count - 1, None, reason), now)

    def refused(
        self, worker: str, rid: str, attempt: int, error: DisaggError, now: float
    ) -> list[Action]:
        return self.hear(worker, TokenEvent(rid, attempt, 0, error=error), now)


@dataclass
class Network:
    """The fakes by address, as sockets would find them."""

    workers: dict[str, "FakeWorker"] = field(default_factory=dict)

    def add(self, name: str, role: Role) -> "FakeWorker":
        self.workers[name] = FakeWorker(self, name, role)
        return self.workers[name]

    def pair(self) -> tuple["FakeWorker", "FakeWorker"]:
        return self.add("p", Role.PREFILL), self.add("d", Role.DECODE)


class FakeWorker:
    """Both sides in one: `submit` hands over at once, decoding takes a turn of the loop a token.

    pause_at: a decode worker stops before this token until `go` is set
    broken:   calls fail as if nobody were there
    deaf:     event streams stay open and say nothing
    slots:    requests that it has room for
    """

    def __init__(self, network: Network, name: str, role: Role):
        self.started = Started(name, role, name, epoch=1)
        self.network = network
        self.slots = 1000
        self.events_kept = Events(self.load)
        self.jobs: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self.reserved: dict[int, Job] = {}
        self.submitted: list[Submit] = []
        self.fenced: list[int] = []
        self.aborted: list[tuple[str, int]] = []
        self.refuses: Exception | None = None
        self.broken = self.deaf = False
        self.pause_at = 10**9
        self.paused, self.go = asyncio.Event(), asyncio.Event()
        self.gate: asyncio.Event | None = None
        self._nonces = count(1)

    @property
    def peer(self) -> Peer:
        return Peer(self.started, self)

    def load(self) -> Load:
        used = len(self.jobs) + len(self.reserved)
        return Load(1 << 30, max(0, self.slots - used))

    def die(self) -> None:
        self.broken = True
        for _, task in self.jobs.values():
            task.cancel()
        self.events_kept.clear()

    async def reserve(self, job: Job, epoch: int, router: str) -> Grant:
        self._reach()
        if epoch != self.started.epoch:
            raise ReservationError(f"epoch {epoch} is over")
        if not self.load().slots:
            raise CapacityError("full")
        nonce = next(self._nonces)
        self.reserved[nonce] = job
        return Grant(nonce, epoch)

    async def submit(self, submit: Submit) -> None:
        self._reach()
        if self.gate is not None:
            await self.gate.wait()
        if self.refuses is not None:
            raise self.refuses
        self.submitted.append(submit)
        job, local = submit.job, submit.work is Work.LOCAL
        decode = self if local else self.network.workers[submit.decode_address]
        if decode.broken:
            return self._fail(job, PeerLostError("gone"))
        if not local and decode.reserved.pop(submit.nonce, None) is None:
            return self._fail(job, ReservationError("it is over"))
        if not job.emitted and not local:
            self.events_kept.say([TokenEvent(job.rid, job.attempt, 0, answer(0))])
        decode.admit(job)
        if not local:
            self.events_kept.say([TokenEvent(job.rid, job.attempt, 0, stats=STATS)])
        return None

    def admit(self, job: Job) -> None:
        self.jobs[job.rid] = (job.attempt, asyncio.create_task(self._decode(job)))

    async def _decode(self, job: Job) -> None:
        total = job.sampling["max_tokens"]
        for index in range(max(0, len(job.emitted) - 1), total):
            await asyncio.sleep(0)
            if index == self.pause_at:
                self.paused.set()
                await self.go.wait()
            reason = "length" if index == total - 1 else ""
            self.events_kept.say([TokenEvent(job.rid, job.attempt, index, answer(index), reason)])
        del self.jobs[job.rid]

    def _fail(self, job: Job, error: PeerLostError | ReservationError) -> None:
        self.events_kept.say([TokenEvent(job.rid, job.attempt, 0, error=error)])

    async def events(self, have: Mapping[str, int], router: str) -> AsyncIterator[Step]:
        self._reach()
        async for step in self.events_kept.subscribe(have, router):
            while self.deaf:
                await asyncio.sleep(0.01)
            self._reach()
            yield step

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        self._reach()
        self.aborted.append((rid, attempt))
        running, task = self.jobs.pop(rid, (0, None))
        if task is not None and running <= attempt:
            task.cancel()
        known = self.reserved.items()
        self.reserved = {x: job for x, job in known if job.rid != rid or job.attempt > attempt}
        self.events_kept.forget(rid, attempt)

    async def fence(self, epoch: int, router: str) -> None:
        self._reach()
        self.events_kept.check(router)
        self.fenced.append(epoch)
        self.started = replace(self.started, epoch=epoch)
        for _, task in self.jobs.values():
            task.cancel()
        self.jobs.clear()
        self.reserved.clear()
        self.events_kept.clear()

    async def status(self) -> WorkerStatus:
        self._reach()
        return WorkerStatus(self.started.epoch, {"jobs": len(self.jobs)})

    def _reach(self) -> None:
        if self.broken:
            raise PeerLostError(f"{self.started.name} is gone")


async def collect(
    outputs: AsyncGenerator[Output], said: list[int] | None = None
) -> tuple[list[int], Output]:
    """Tokens and end of an answer. said: where tokens are as soon as they come"""
    tokens = [] if said is None else said
    async with aclosing(outputs):
        async for output in outputs:
            if output.token is not None:
                tokens.append(output.token)
    return tokens, output


async def leave(asking: asyncio.Task) -> None:
    """The client of an answer goes away."""
    asking.cancel()
    await asyncio.wait([asking])
