"""Workers without a model and without sockets: they answer a prompt with numbers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from disagg.errors import PeerLostError, ReservationError
from disagg.transfer.work import Submit, TokenEvent, WorkerStatus
from disagg.workers.events import Events
from disagg.workers.members import Peer, Role, Started

STATS = {"codec": "raw", "wire_bytes": 7}


def answer(index: int) -> int:
    return 100 + index


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
    """

    def __init__(self, network: Network, name: str, role: Role):
        self.started = Started(name, role, name, epoch=1)
        self.network = network
        self.events_kept = Events()
        self.jobs: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self.submitted: list[Submit] = []
        self.fenced: list[int] = []
        self.aborted: list[tuple[str, int]] = []
        self.refuses: Exception | None = None
        self.broken = self.deaf = False
        self.pause_at = 10**9
        self.paused, self.go = asyncio.Event(), asyncio.Event()
        self.gate: asyncio.Event | None = None

    @property
    def peer(self) -> Peer:
        return Peer(self.started, self)

    def die(self) -> None:
        self.broken = True
        for _, task in self.jobs.values():
            task.cancel()
        self.events_kept.clear()

    async def submit(self, submit: Submit) -> None:
        self._reach()
        if self.gate is not None:
            await self.gate.wait()
        if self.refuses is not None:
            raise self.refuses
        self.submitted.append(submit)
        decode = self.network.workers[submit.decode_address]
        rid, attempt = submit.rid, submit.attempt
        if decode.broken:
            self.events_kept.say([TokenEvent(rid, attempt, 0, error=PeerLostError("gone"))])
            return
        if submit.decode_epoch != decode.started.epoch:
            stale = ReservationError("the epoch is over")
            self.events_kept.say([TokenEvent(rid, attempt, 0, error=stale)])
            return
        if not submit.emitted:
            self.events_kept.say([TokenEvent(rid, attempt, 0, answer(0))])
        decode.admit(submit)
        self.events_kept.say([TokenEvent(rid, attempt, 0, stats=STATS)])

    def admit(self, submit: Submit) -> None:
        self.jobs[submit.rid] = (submit.attempt, asyncio.create_task(self._decode(submit)))

    async def _decode(self, submit: Submit) -> None:
        count = submit.sampling["max_tokens"]
        for index in range(max(0, len(submit.emitted) - 1), count):
            await asyncio.sleep(0)
            if index == self.pause_at:
                self.paused.set()
                await self.go.wait()
            reason = "length" if index == count - 1 else ""
            event = TokenEvent(submit.rid, submit.attempt, index, answer(index), reason)
            self.events_kept.say([event])
        del self.jobs[submit.rid]

    async def events(self, have: Mapping[str, int]) -> AsyncIterator[Sequence[TokenEvent]]:
        self._reach()
        if self.deaf:
            await asyncio.Event().wait()
        async for events in self.events_kept.subscribe(have):
            self._reach()
            yield events

    async def acknowledge(self, have: Mapping[str, int]) -> None:
        self._reach()
        self.events_kept.acknowledge(have)

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        self._reach()
        self.aborted.append((rid, attempt))
        known, task = self.jobs.pop(rid, (0, None))
        if task is not None and known <= attempt:
            task.cancel()
        self.events_kept.forget(rid, attempt)

    async def fence(self, epoch: int) -> None:
        self._reach()
        self.fenced.append(epoch)
        self.started = Started(self.started.name, self.started.role, self.started.address, epoch)
        for _, task in self.jobs.values():
            task.cancel()
        self.jobs.clear()
        self.events_kept.clear()

    async def status(self) -> WorkerStatus:
        self._reach()
        return WorkerStatus(self.started.epoch, "model", "plan", {"jobs": len(self.jobs)})

    def _reach(self) -> None:
        if self.broken:
            raise PeerLostError(f"{self.started.name} is gone")


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something to become true; 30 s at most."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)
