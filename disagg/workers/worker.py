"""A worker: one engine thread that computes, one io thread that talks. Plain Python, no Ray.

    main thread     start, stop, wait
    engine thread   the only one that runs the model: engine.run(deliver)
    io thread       one asyncio loop: gRPC server and clients, hand-offs, leases, events
    between them    engine.submit(message)  and  loop.call_soon_threadsafe(StepOutput)

Prefill and decode workers are the same class; a role only says what is admitted.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future

from disagg.config import Config
from disagg.engine.engine import Engine
from disagg.engine.messages import Drain, Load, StepOutput
from disagg.errors import PeerLostError, RequestError, ReservationError
from disagg.model.device import load_runner
from disagg.model.runner import Runner
from disagg.transfer.channel import start_server
from disagg.transfer.control import worker_handler
from disagg.transfer.receiver import Receiver
from disagg.transfer.security import Security
from disagg.transfer.terms import Terms
from disagg.transfer.work import Submit, TokenEvent, Work, WorkerStatus
from disagg.workers.attendance import Attendance
from disagg.workers.decode import DecodeSide
from disagg.workers.events import Events
from disagg.workers.links import Links
from disagg.workers.members import Role, Started
from disagg.workers.prefill import PrefillSide

POLL_S = 0.02


class Worker:
    """One model, one pool, hand-offs in and out. `start` it, `stop` it."""

    def __init__(
        self,
        config: Config,
        role: Role,
        name: str,
        host: str = "127.0.0.1",
        security: Security | None = None,
        runner: Runner | None = None,
    ):
        self.config, self.role, self.name = config, role, name
        self.epoch = time.time_ns() // 1_000_000  # ms: later incarnations are higher
        self._host, self._security = host, security
        self._runner = runner or load_runner(config.model)
        self.engine = Engine(self._runner, config.engine)
        self._started: Future[Started] = Future()
        self._threads = [
            threading.Thread(target=self._run_io, name=f"{name}-io", daemon=True),
            threading.Thread(target=self._run_engine, name=f"{name}-engine", daemon=True),
        ]
        self._failure: BaseException | None = None
        self._load, self._preempted, self._draining = Load(), 0, False
        self._links = Links(security)

    # -- from any thread

    def start(self) -> Started:
        """Serve; returns when it can be reached. ConfigError if its codec does not fit."""
        self._threads[0].start()
        started = self._started.result()
        self._threads[1].start()
        return started

    def stop(self, grace_s: float | None = None) -> None:
        """Take nothing new, finish what is here within the grace, then end."""
        self._on_loop(self._begin_stop, self.config.cluster.grace_s if grace_s is None else grace_s)

    def meet(self, addresses: list[str]) -> list[str]:
        """Connect to decode workers and measure the links; what each can do, in words."""
        return asyncio.run_coroutine_threadsafe(self._links.meet(addresses), self._loop).result()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it has ended (True). Raises what broke it, if something did."""
        for thread in self._threads:
            thread.join(timeout_s)
        if self._failure is not None:
            raise self._failure
        return not any(thread.is_alive() for thread in self._threads)

    # -- what a router can say; on the io loop

    async def submit(self, submit: Submit) -> None:
        """Begin a hand-off."""
        if submit.epoch != self.epoch:
            raise ReservationError(f"epoch {submit.epoch} is over; {self.name} is in {self.epoch}")
        if self._draining:
            raise PeerLostError(f"{self.name} is draining; it takes no new requests")
        if not self.role.prefills or submit.work is Work.LOCAL:
            raise RequestError(f"{self.name} ({self.role}) does not take {submit.work} work")
        await self.prefill.start(submit)

    async def events(self, have: Mapping[str, int]) -> AsyncIterator[Sequence[TokenEvent]]:
        """One list per engine step, and an empty one from time to time."""
        async for events in self._events.subscribe(have):
            yield events

    async def acknowledge(self, have: Mapping[str, int]) -> None:
        """The router has these outputs."""
        self._events.acknowledge(have)

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        """Free whatever an attempt holds here, on either side."""
        self.receiver.abort(rid, attempt, reason)
        await self.prefill.abort(rid, attempt)
        self._events.forget(rid, attempt)

    async def fence(self, epoch: int) -> None:
        """A new epoch: everything of the old one is dropped, and nothing is said about it."""
        self.receiver.fence(epoch)
        self.epoch = epoch
        await self.prefill.abort_all()
        self._events.clear()

    async def status(self) -> WorkerStatus:
        """Who this is and what it holds; only the arena and cached pages are left when idle."""
        gauges: dict[str, float] = {
            "engine_running": self._load.running,
            "engine_waiting": self._load.waiting,
            "engine_held": self._load.held,
            "handoffs_out": self.prefill.running,
            "unacknowledged": self._events.kept,
            **self.engine.pool.gauges(),
            **{f"handoffs_in_{name}": count for name, count in self.receiver.gauges().items()},
        }
        plan, model = self.engine.plan(self.config.codec).fingerprint, self._runner.fingerprint
        links, failures = self._links.as_info(), self.receiver.failures + self.prefill.failures
        counts = {**self.receiver.ledger.counts, "preempted": self._preempted}
        info = {"pid": os.getpid(), "links": links, "counts": counts, "failures": dict(failures)}
        return WorkerStatus(self.epoch, model, plan, gauges, info)

    # -- threads

    def _run_engine(self) -> None:
        try:
            self.engine.run(lambda output: self._on_loop(self._step, output))
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._on_loop(self._begin_stop, 0.0)

    def _run_io(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_asked: asyncio.Future[float] = self._loop.create_future()
        self._make_sides()
        handlers = [worker_handler(self)]
        if self.role.decodes:
            handlers.append(self.receiver.serve(self._host, self._security))
        async with self.receiver:
            server, address = await start_server(handlers, self._host, self._security)
            named = self.name, self.role, address, self.epoch, self._runner.fingerprint
            self._started.set_result(Started(*named))
            grace_s = await self._stop_asked
            self._attendance.close()
            await self._drain(grace_s)
            await server.stop(0)
            await self._links.close()
        await asyncio.to_thread(self._threads[1].join)

    def _make_sides(self) -> None:
        engine, pool, loop = self.engine, self.engine.pool, self._loop
        self._attendance = Attendance(
            loop,
            self.config.transfer.lease_s,
            self.config.cluster.orphan_s,
            lambda: loop.create_task(self._give_up()),
            lambda: self._begin_stop(0.0),
        )
        self._events = Events(self._attendance.routers)
        self.prefill = PrefillSide(
            engine,
            pool.arena,
            self._runner.fingerprint,
            self.config.transfer,
            self._links.get,
            self._events.say,
        )
        self.decode = DecodeSide(
            engine,
            self._events.say,
            lambda rid, attempt: self.receiver.finished(rid, attempt),
            pool.release,
        )
        terms = Terms(
            model=self._runner.fingerprint,
            plan=engine.plan(self.config.codec),
            plan_of=engine.plan,
            epoch=self.epoch,
            capacity_bytes=pool.arena.nbytes,
            lease_s=self.config.transfer.lease_s,
        )
        decode = self.decode
        self.receiver = Receiver(terms, pool, pool.arena, decode.admit, decode.drop, decode.fail)

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _step(self, output: StepOutput) -> None:
        self._load = output.load
        self._preempted += len(output.preempted)
        self.prefill.step([*output.prefilled, *output.failed])
        self.decode.step([*output.tokens, *output.failed])

    # -- the end

    async def _give_up(self) -> None:
        """No router for longer than a lease: free everything; one that comes back hears of it."""
        gone = PeerLostError("no router listened for longer than a lease")
        attempts = {(seat.rid, seat.attempt) for seat in self.decode.seats}
        attempts |= set(self.prefill.attempts)
        for rid, attempt in attempts:
            await self.abort(rid, attempt, str(gone))
        self._events.say([TokenEvent(rid, attempt, 0, error=gone) for rid, attempt in attempts])

    def _begin_stop(self, grace_s: float) -> None:
        if not self._stop_asked.done():
            self._stop_asked.set_result(grace_s)

    async def _drain(self, grace_s: float) -> None:
        """Let what is here end, then cut off the rest; the engine's thread ends last."""
        self._draining = True
        self.receiver.drain()
        until = self._loop.time() + grace_s
        while (self.prefill.running or self.decode.seats) and self._loop.time() < until:
            await asyncio.sleep(POLL_S)
        await self.prefill.abort_all()
        for seat in self.decode.seats:
            self.receiver.abort(seat.rid, seat.attempt, "the worker stops")
        self.engine.submit(Drain())
