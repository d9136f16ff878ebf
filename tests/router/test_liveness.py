"""Workers that hang or fall silent: the rules, and a router with fake workers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import pytest

from disagg.config import RouterConfig
from disagg.errors import ConfigError, PeerLostError
from disagg.router.liveness import SLOW, Liveness, Pulse, liveness_of
from disagg.router.router import Router, WorkerConnection
from disagg.transfer.messages import (
    Grant,
    Job,
    Load,
    Role,
    StepEvents,
    Submit,
    TokenEvent,
    WorkerInfo,
    WorkerStatus,
)

CONFIG = RouterConfig(silence_s=5.0, stuck_s=10.0, deadline_s=1e6)
LEASE_S = 20.0


def liveness(now: float, pulse: Pulse, *others: Pulse) -> Liveness:
    return liveness_of(pulse, [pulse, *others], CONFIG, LEASE_S, now)


def heard(*loads: tuple[float, Load]) -> Pulse:
    """A worker that reported these loads, by time."""
    pulse = Pulse(0.0)
    for now, load in loads:
        pulse.hear(load, now)
    return pulse


# -- the rules
@pytest.mark.parametrize(
    ("stalled_s", "expected"), [(9.9, Liveness.ALIVE), (10.0, Liveness.STUCK)]
)
def test_a_step_that_stands_still_is_stuck(stalled_s, expected):
    pulse = heard((1.0, Load(step=7, stalled_s=0.5)))

    pulse.hear(Load(step=7, stalled_s=stalled_s), 0.5 + stalled_s)

    assert liveness(0.5 + stalled_s, pulse) is expected


def test_a_long_step_that_goes_on_layer_by_layer_is_not_stuck():
    pulse = Pulse(0.0)

    for second in range(60):
        pulse.hear(Load(step=7, stalled_s=1.0 + second % 3), float(second))

    assert liveness(60.0, pulse) is Liveness.ALIVE


def test_sequences_and_no_step_is_stuck():
    pulse = heard((1.0, Load(step=7)), (11.0, Load(step=7)))

    assert liveness(11.0, pulse) is Liveness.STUCK


def test_an_engine_without_work_is_not_stuck():
    pulse = heard((1.0, Load(step=7)), (11.0, Load(step=7)))

    pulse.rest(11.0)

    assert liveness(11.0, pulse) is Liveness.ALIVE


def test_a_running_step_counts_without_sequences_too():
    pulse = heard((1.0, Load(step=7, stalled_s=1.0)))
    pulse.hear(Load(step=7, stalled_s=11.0), 11.0)

    pulse.rest(11.0)

    assert liveness(11.0, pulse) is Liveness.STUCK


def test_a_worker_that_counts_no_steps_is_not_judged_by_them():
    pulse = heard((1.0, Load()), (100.0, Load()))

    assert liveness(100.0, pulse) is Liveness.ALIVE


def test_an_engine_that_was_slow_may_be_slow_again():
    pulse = heard((0.0, Load(step=1)), (30.0, Load(step=2, stalled_s=30.0)))
    pulse.hear(Load(step=3), 31.0)
    assert pulse.longest_stall_s == 30.0

    pulse.hear(Load(step=3, stalled_s=60.0), 100.0)

    assert liveness(100.0, pulse) is Liveness.ALIVE
    pulse.hear(Load(step=3, stalled_s=SLOW * 30), 130.0)
    assert liveness(130.0, pulse) is Liveness.STUCK


def test_a_loop_that_was_late_stops_no_engine():
    pulse = heard((1.0, Load(step=7)))

    pulse.delay(30.0)

    assert liveness(32.0, pulse) is Liveness.ALIVE


@pytest.mark.parametrize(
    ("num_silent", "expected"), [(1, Liveness.SILENT), (3, Liveness.LINK_DOWN)]
)
def test_most_silent_at_once_is_our_own_network(num_silent, expected):
    pulses = [heard((10.0 + i / 10, Load())) for i in range(num_silent)]
    pulses += [heard((15.5, Load())) for _ in range(5 - num_silent)]

    assert liveness(15.0 + 0.5, *pulses) is expected


def test_the_network_is_waited_for_as_long_as_a_lease():
    pulses = [heard((10.0, Load())) for _ in range(3)]

    assert liveness(10.0 + LEASE_S - 0.1, *pulses) is Liveness.LINK_DOWN
    assert liveness(10.0 + LEASE_S, *pulses) is Liveness.SILENT


def test_the_only_worker_is_silent_alone():
    assert liveness(15.0, heard((10.0, Load()))) is Liveness.SILENT


# -- a router with fake workers
class FakeWorker:
    """Does what a test says. `error`: why its calls fail, if they do."""

    def __init__(self, name: str, role: Role):
        self.info = WorkerInfo(name, role, name, 1)
        self.error: Exception | None = None
        self.load = Load(1 << 40, 100, role=role)
        self.epoch = 1
        self.fences = 0
        self.started: list[Job] = []
        self.subscriptions: list[dict[str, int]] = []
        self.acknowledged: list[dict[str, int]] = []
        self.steps = asyncio.Queue[StepEvents]()

    def report(self, *events: TokenEvent) -> None:
        self.steps.put_nowait(StepEvents(events, self.load))

    def token(self, index: int) -> None:
        """The next token of the job that it has."""
        job = self.started[-1]
        self.report(TokenEvent(job.rid, job.attempt, index, 100 + index))

    async def _answer(self) -> None:
        if self.error is not None:
            raise self.error

    async def status(self) -> WorkerStatus:
        await self._answer()
        return WorkerStatus(self.epoch)

    async def reserve(self, job: Job, epoch: int, router: str) -> Grant:
        await self._answer()
        self.started.append(job)
        return Grant(1, epoch)

    async def submit(self, submit: Submit) -> None:
        await self._answer()

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        await self._answer()

    async def fence(self, epoch: int, router: str) -> None:
        await self._answer()
        self.epoch = epoch
        self.fences += 1

    async def acknowledge(self, have: Mapping[str, int], router: str) -> None:
        self.acknowledged.append(dict(have))

    async def events(
        self, have: Mapping[str, int], router: str
    ) -> AsyncGenerator[StepEvents]:
        await self._answer()
        self.subscriptions.append(dict(have))
        self.steps = asyncio.Queue()
        self.report()
        while True:
            yield await self.steps.get()


class Scene:
    """A router whose clock a test moves, and its workers."""

    def __init__(self, *names: str):
        self.now = 100.0
        self.router = Router(CONFIG, clock=lambda: self.now, lease_s=LEASE_S)
        self.router._ensure_ticker = lambda: None  # type: ignore[method-assign]
        self.workers: dict[str, FakeWorker] = {}
        for name in names:
            role = Role.PREFILL if name[0] == "p" else Role.DECODE
            self.workers[name] = FakeWorker(name, role)
            info = self.workers[name].info
            self.router.add(WorkerConnection(info, self.workers[name]))
        self.answers: list[asyncio.Task[list[int]]] = []

    async def settle(self) -> None:
        """Let everything happen that is due."""
        for _ in range(30):
            await asyncio.sleep(0)

    async def pass_time(self, seconds: float, *reporting: str) -> None:
        """One tick after this time; these workers report at its end."""
        self.now += seconds
        for name in reporting:
            self.workers[name].report()
        await self.settle()
        self.router._check_peers(self.now)
        self.router._perform(self.router.table.tick(self.now))
        await self.settle()

    async def ask(self) -> str:
        """A request begins to decode; the name of its decode worker."""

        async def answer() -> list[int]:
            outputs = self.router.generate((1, 2, 3), {"max_tokens": 100}, "raw")
            return [output.token async for output in outputs]

        self.answers.append(asyncio.create_task(answer()))
        await self.settle()
        (rid,) = list(self.router.table.requests)[-1:]
        name = self.router.table.requests[rid].decode
        self.workers[name].token(0)
        await self.settle()
        return name

    @property
    def members(self) -> set[str]:
        return set(self.router.table.workers)


@asynccontextmanager
async def scene(*names: str) -> AsyncIterator[Scene]:
    stage = Scene(*names)
    await stage.settle()
    try:
        yield stage
    finally:
        for answer in stage.answers:
            answer.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*stage.answers, return_exceptions=True)
        await stage.router.close()


@pytest.fixture(autouse=True)
def reopens_at_once(monkeypatch):
    monkeypatch.setattr("disagg.router.router.REOPEN_S", 0.0)


async def test_requests_of_a_hung_engine_go_elsewhere():
    async with scene("p", "d", "d2") as stage:
        hung = await stage.ask()
        (other,) = {"d", "d2"} - {hung}
        stage.workers[hung].load = Load(1 << 40, 100, step=7, stalled_s=10.0)

        await stage.pass_time(10.0, "p", "d", "d2")

        assert stage.members == {"p", other}
        assert stage.workers[hung].fences == 1
        job = stage.workers[other].started[-1]
        assert (job.attempt, list(job.emitted)) == (2, [100])


async def test_a_hung_engine_gets_work_again_after_its_step():
    async with scene("p", "d", "d2") as stage:
        hung = await stage.ask()
        worker = stage.workers[hung]
        worker.load = Load(1 << 40, 100, step=7, stalled_s=10.0)
        await stage.pass_time(10.0, "p", "d", "d2")
        worker.load = Load(1 << 40, 100, step=7, stalled_s=14.0)
        await stage.pass_time(4.0, "p", "d", "d2")
        assert hung not in stage.members
        assert stage.router.silent_s()[hung] == pytest.approx(14.0)

        worker.load = Load(1 << 40, 100, step=8)
        await stage.pass_time(1.0, "p", "d", "d2")

        assert hung in stage.members
        assert stage.router.silent_s()[hung] == 0.0


async def test_an_engine_that_hung_between_steps_is_not_trusted():
    async with scene("p", "d", "d2") as stage:
        hung = await stage.ask()
        stage.workers[hung].load = Load(1 << 40, 100, step=7)
        await stage.pass_time(0.1, "p", "d", "d2")

        for _ in range(10):
            await stage.pass_time(1.0, "p", "d", "d2")

        state = stage.router.table.workers[hung]
        assert state.open_until > stage.now
        assert stage.router.silent_s()[hung] == pytest.approx(10.0)


async def test_a_network_that_was_away_costs_no_attempt():
    async with scene("p", "d", "d2") as stage:
        decode = await stage.ask()
        worker = stage.workers[decode]
        for each in stage.workers.values():
            each.error = PeerLostError("nobody answers")
        await stage.pass_time(9.0)
        assert stage.members == {"p", "d", "d2"}

        for each in stage.workers.values():
            each.error = None
        await stage.pass_time(0.1)
        worker.token(1)
        await stage.settle()

        (request,) = stage.router.table.requests.values()
        assert list(request.emitted) == [100, 101]
        assert worker.subscriptions[-1] == {request.rid: 1}
        assert stage.router.table.retries == 0
        assert not any(each.fences for each in stage.workers.values())


async def test_who_stays_silent_after_it_is_fenced_alone():
    async with scene("p", "d", "d2") as stage:
        silent = await stage.ask()
        (other,) = {"d", "d2"} - {silent}
        for worker in stage.workers.values():
            worker.error = PeerLostError("nobody answers")
        await stage.pass_time(5.5)
        for name in ("p", other):
            stage.workers[name].error = None
        await stage.settle()

        await stage.pass_time(0.5)
        assert stage.members == {"p", other}
        stage.workers[silent].error = None
        await stage.settle()

        assert stage.workers[silent].fences == 1
        assert stage.workers[other].fences == stage.workers["p"].fences == 0
        assert stage.router.table.retries == 1


async def test_a_network_away_for_a_lease_is_a_silence():
    async with scene("p", "d", "d2") as stage:
        for each in stage.workers.values():
            each.error = PeerLostError("nobody answers")

        await stage.pass_time(LEASE_S)

        assert not stage.members
        assert set(stage.router.silent_s().values()) == {LEASE_S}


async def test_a_worker_that_refuses_this_router_is_not_silent():
    async with scene("p", "d") as stage:
        stage.workers["d"].error = ConfigError("this worker follows router x")

        await stage.pass_time(100.0, "p")
        await stage.pass_time(100.0, "p")

        assert stage.router.silent_s()["d"] == 0.0


async def test_delivered_tokens_are_acknowledged_once_a_second():
    async with scene("p", "d") as stage:
        await stage.ask()
        worker = stage.workers["d"]
        (rid,) = stage.router.table.requests
        for index in range(1, 9):
            worker.token(index)
        await stage.settle()
        worker.acknowledged.clear()
        assert stage.now < 101.0

        await stage.pass_time(1.0, "d")
        await stage.pass_time(1.0, "d")

        assert worker.acknowledged == [{rid: 9}]


async def test_requests_of_one_turn_are_placed_together(monkeypatch):
    async with scene("p", "d") as stage:
        await stage.settle()
        calls = []
        place = stage.router.table.place
        monkeypatch.setattr(
            stage.router.table, "place", lambda now: calls.append(now) or place(now)
        )
        asking = [stage.router.generate((1,), {}, "raw") for _ in range(20)]
        stage.answers = [asyncio.create_task(anext(x)) for x in asking]

        await asyncio.sleep(0)
        await asyncio.sleep(0)

        assert len(calls) == 1
        assert stage.router.waiting < 20


async def test_a_router_that_closes_is_not_ready():
    async with scene("p", "d") as stage:
        await stage.ask()
        assert stage.router.ready
        closing = asyncio.create_task(stage.router.close(grace_s=30.0))
        await asyncio.sleep(0)

        assert not stage.router.ready
        closing.cancel()
