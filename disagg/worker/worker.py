"""A worker: one engine thread that computes, one io thread that talks. Plain Python, no Ray.

    main thread     start, stop, wait
    engine thread   the only one that runs the model: engine.run(deliver)
    io thread       one asyncio loop: gRPC server and clients, hand-offs, leases, events
    between them    engine.submit(message)  and  loop.call_soon_threadsafe(StepOutput)

Prefill and decode workers are the same class; a role only says what is admitted. Every task of the
io thread lives in one group: one that ends before its time ends the worker, which is replaced.
"""

import asyncio
import atexit
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from disagg.config import Config
from disagg.engine.arena import check_slabs
from disagg.engine.engine import Engine
from disagg.engine.messages import Drain, StepOutput
from disagg.engine.warm import warm_up
from disagg.errors import (
    AbortedError,
    CapacityError,
    DisaggError,
    PeerLostError,
    ReservationError,
)
from disagg.kernels.cpu.library import describe_backend
from disagg.model.capacity import tokens_that_fit
from disagg.model.runner import Runner
from disagg.paged.doctor import check_plans
from disagg.transfer.channel import Peers
from disagg.transfer.control import worker_handler
from disagg.transfer.direct import DirectServer
from disagg.transfer.messages import (
    Grant,
    Job,
    Load,
    Role,
    StepEvents,
    Submit,
    TokenEvent,
    Work,
    WorkerInfo,
    WorkerStatus,
)
from disagg.transfer.receiver import Receiver
from disagg.transfer.records import least_worth_sending
from disagg.transfer.reservations import ReceiverPolicy, Reservations
from disagg.transfer.rpc import start_server, tune_malloc
from disagg.transfer.security import Security
from disagg.worker.decode import DecodeSide
from disagg.worker.event_log import EventLog
from disagg.worker.handoff import HandoffContext
from disagg.worker.prefill import PrefillSide, request_of

POLL_S = 0.02
LOOK_S = (
    0.25  # whether a router follows: each look takes the interpreter from the engine
)
SIZES = (1024, 4096)  # of prompts, whose bytes routers are told
FIRST_ROUTER_S = 60.0  # a worker that no router ever visits waits this long

log = logging.getLogger(__name__)


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
        model = config.model
        self._runner = runner or Runner.load(model.name, model.dtype, model.device)
        self._listed = config.listed
        self._codec = self._listed[0]  # of who names none
        compiled = self._listed if self._runner.graphs else ()
        self.engine = Engine(
            self._runner, config.engine, codecs=compiled, guarded=self._listed
        )
        pool, plans = self.engine.pool, map(self.engine.plan, self._listed)
        context = self._runner.info.context_length
        check_slabs(pool.arena.nbytes, pool.slab_bytes, plans, context)
        self._started: Future[WorkerInfo] = Future()
        self._threads = [
            threading.Thread(target=self._run_io, name=f"{name}-io", daemon=True),
            threading.Thread(
                target=self._run_engine, name=f"{name}-engine", daemon=True
            ),
        ]
        self.doing = ""  # what takes long before it serves, in words
        self._failure: BaseException | None = None

    # -- from any thread

    def start(self) -> WorkerInfo:
        """Serve; returns when it can be reached.

        ConfigError if its codec does not fit, or is not sound on its GPU.
        """
        missing = self.backend.startswith("torch")  # the C library
        log.log(
            logging.WARNING if missing else logging.INFO,
            "%s: %s",
            self.name,
            self.backend,
        )
        if self._runner.graphs:
            query_heads = self._runner.info.query_heads
            check_plans(list(self.engine.listed), query_heads, self._runner.device)
            given = (
                self.engine,
                self._runner,
                self._listed,
                self.config.engine.max_sequences,
            )
            warm_up(*given, tell=partial(setattr, self, "doing"))
        self._threads[0].start()
        self._started.result()
        self._threads[1].start()
        return self.started

    @property
    def backend(self) -> str:
        """What computes here, in words."""
        return "triton" if self._runner.device.type == "cuda" else describe_backend()

    @property
    def started(self) -> WorkerInfo:
        """How it can be reached now, and what it does: both may have changed since it began."""
        return replace(self._started.result(), epoch=self.epoch, role=self.role)

    def assume(self, role: Role) -> None:
        """Admit something else from now on; what is here goes on, until the router moves it."""
        self._on_loop(self._assume, role)

    def stop(self, grace_s: float | None = None) -> None:
        """Take nothing new, finish or move what is here within the grace, then end."""
        self._on_loop(
            self._begin_stop,
            self.config.cluster.grace_s if grace_s is None else grace_s,
        )

    def wait_alone(self, timeout_s: float) -> bool:
        """Whether no router follows, soon."""
        until = time.monotonic() + timeout_s
        while (followed := self._events.followed) and time.monotonic() < until:
            time.sleep(POLL_S)
        return not followed

    def meet(self, addresses: list[str]) -> list[str]:
        """Connect to decode workers and measure the links; what each can do, in words."""
        meeting = self._peers.meet(addresses)
        return asyncio.run_coroutine_threadsafe(meeting, self._loop).result()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it has ended (True). Raises what broke it, if something did."""
        for thread in self._threads:
            thread.join(timeout_s)
            if self._failure is not None:
                raise self._failure
        return not any(thread.is_alive() for thread in self._threads)

    # -- what a router can say; on the io loop

    async def reserve(self, job: Job, epoch: int, router: str = "") -> Grant:
        """Room for a job, at once; CapacityError where there is none."""
        job = self._accept(job, epoch, router)
        if not self.role.decodes:
            raise PeerLostError(
                f"{self.name} ({self.role}) decodes nothing of others now"
            )
        request_of(job, "d")  # RequestError for what no engine can serve
        return self.reservations.reserve(job, epoch)

    async def submit(self, submit: Submit) -> None:
        """Begin a hand-off, or a request that is served whole."""
        submit = replace(
            submit, job=self._accept(submit.job, submit.epoch, submit.router)
        )
        if submit.work is Work.MOVE:
            return self.decode.move(submit)
        local = submit.work is Work.LOCAL
        if not (self.role.prefills or (local and self.role.decodes)):
            raise PeerLostError(f"{self.name} ({self.role}) takes no prompts now")
        if local:
            return self.decode.start(submit.job)
        return await self.prefill.start(submit)

    async def events(
        self, have: Mapping[str, int], router: str
    ) -> AsyncGenerator[StepEvents]:
        """What happens here; everything of another router that was here before is dropped."""
        self._events.check(router)
        if router != self._events.router:
            await self._drop_all("another router took over")
            self._events.clear()
        async with aclosing(self._events.subscribe(have, router)) as steps:
            async for step in steps:
                yield step

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        """Free whatever an attempt holds here, on either side."""
        self.reservations.abort(rid, attempt, reason)
        self.decode.drop(rid, attempt, reason)
        await self.prefill.abort(rid, attempt)
        self._events.forget(rid, attempt)
        self._events.say([])  # there may be room

    async def fence(self, epoch: int, router: str) -> None:
        """The next epoch: everything of the old one is dropped, and nothing is said about it."""
        self._events.check(router)
        self.reservations.fence(epoch)
        self.epoch = epoch
        await self._drop_all(f"fenced: epoch {epoch} has begun")
        self._events.clear()

    async def status(self) -> WorkerStatus:
        """Who this is and what it holds; only the arena and cached pages are left when idle."""
        load = self.engine.load
        gauges: dict[str, float] = {
            "engine_running": load.running,
            "engine_waiting": load.waiting,
            "engine_held": load.held,
            "handoffs_out": len(self.prefill.attempts),
            "outputs_kept": self._events.kept,
            **self.engine.pool.gauges(),
            **{
                f"handoffs_in_{name}": count
                for name, count in self.reservations.gauges().items()
            },
        }
        counts = {
            **self.reservations.counts,
            **self.decode.counts,
            **self.engine.counts,
        }
        info = {"pid": os.getpid(), "links": self._peers.as_info(), "counts": counts}
        failures = self.receiver.failures + self.prefill.failures
        info["failures"] = {
            x: n for x, n in failures.items() if x != AbortedError.reason
        }
        info |= {"node": socket.gethostname(), "backend": self.backend}
        info["tokens_fit"] = self._fit(
            int(gauges["arena_bytes"] - gauges["used_bytes"])
        )
        return WorkerStatus(self.epoch, gauges, info)

    def _accept(self, job: Job, epoch: int, router: str) -> Job:
        """A job for the worker as it is now, with the codec that it means."""
        self._events.check(router)
        if epoch != self.epoch:
            raise ReservationError(
                f"epoch {epoch} is over; {self.name} is in {self.epoch}"
            )
        return replace(job, codec=job.codec or self._codec)

    def _room(self) -> Load:
        """What it could take now."""
        engine = self.engine.load
        waiting = 0 if self.engine.may_reserve() else max(1, engine.waiting)
        return Load(engine.free_bytes, engine.slots, waiting, self.role)

    # -- threads

    def _run_engine(self) -> None:
        """Alone with more than one thread: OpenMP would not spin beside the team of another."""
        try:
            if self.config.engine.torch_threads is not None:
                torch.set_num_threads(self.config.engine.torch_threads)
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
            while isinstance(error, BaseExceptionGroup):  # one is enough to say why
                error = error.exceptions[0]
            self._failure = self._failure or error
            if self._started.done():
                self.engine.submit(Drain())
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_asked: asyncio.Future[float] = self._loop.create_future()
        async with asyncio.TaskGroup() as tasks:
            self._make_sides(tasks)
            watched = [self.receiver.run(), self._attend(), *self._make_direct()]
            handlers = [worker_handler(self), self.receiver.handlers()]
            ports = self.config.cluster.ports
            kept = [tasks.create_task(self._supervise(each)) for each in watched]
            server, address = await start_server(
                handlers, self._host, self._security, ports
            )
            named = self.name, self.role, address, self.epoch, self._runner.fingerprint
            room = self._fit(self.engine.pool.arena.nbytes)
            plans = list(map(self.engine.plan, self._listed))
            sizes = {plan.spec: {n: plan.nbytes(n) for n in SIZES} for plan in plans}
            at_once = self.config.engine.max_batch_tokens
            self._started.set_result(
                WorkerInfo(*named, self._min_tokens(), room, at_once, sizes)
            )
            try:
                await self._drain(await self._stop_asked)
            finally:
                for task in kept:
                    task.cancel()
                await server.stop(0)
                await self._peers.close()
        await asyncio.to_thread(self._threads[1].join)

    def _fit(self, nbytes: int) -> int:
        """Tokens of its own codec, in prompts as long as the context."""
        context = self._runner.info.context_length
        return tokens_that_fit(self.engine.plan(self._codec), nbytes, context)

    def _min_tokens(self) -> int:
        """Shorter prompts stay whole where they decode."""
        plan, least = (
            self.engine.plan(self._codec),
            self.config.transfer.min_disagg_tokens,
        )
        return least_worth_sending(plan) if least is None else least

    async def _supervise(self, work: Coroutine[Any, Any, None]) -> None:
        await work
        raise RuntimeError(f"a part of {self.name} that never ends has ended: {work}")

    def _make_sides(self, tasks: asyncio.TaskGroup) -> None:
        engine, pool, transfer = self.engine, self.engine.pool, self.config.transfer
        model = self._runner.fingerprint
        self._events = events = EventLog(self._room)
        self._peers = Peers(self._security, transfer)
        context = HandoffContext(engine, model, self._peers)
        self.prefill = PrefillSide(context, transfer.overlap, tasks, events)
        self.decode = decode = DecodeSide(
            context,
            tasks,
            events,
            on_done=lambda *which: self.reservations.finished(*which),
        )
        terms = ReceiverPolicy(
            model=model,
            plan_of=engine.plan,
            epoch=self.epoch,
            lease_s=transfer.lease_s,
            rows=engine.rows,
            watermark_bytes=int(pool.arena.nbytes * self.config.engine.watermark),
            may_reserve=engine.may_reserve,
            share=transfer.dedup,
        )
        self.reservations = Reservations(terms, pool, decode.admit, decode.drop)
        self.receiver = Receiver(self.reservations, decode.fail)

    def _make_direct(self) -> list[Coroutine[Any, Any, None]]:
        """What takes direct connections, if they are wanted."""
        if self.config.transfer.channel != "direct":
            return []
        direct = DirectServer(self.receiver, self._security)
        direct.listen(self._host, self.config.cluster.ports)
        return [direct.run()]

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _step(self, output: StepOutput) -> None:
        self.prefill.context.deliver([*output.prefilled, *output.moved, *output.failed])
        self._events.say(self.decode.step([*output.tokens, *output.failed]))

    # -- the end

    async def _attend(self) -> None:
        """Is a router listening? Without one for a lease nobody waits; in the end, nobody owns."""
        lease_s, orphan_s = self.config.transfer.lease_s, self.config.cluster.orphan_s
        left = self._loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            if self._events.followed:
                left = self._loop.time()
                continue
            alone_s = self._loop.time() - left
            if self._events.router and alone_s >= lease_s:
                await self._give_up(
                    PeerLostError("no router listened for longer than a lease")
                )
            if alone_s >= (
                orphan_s if self._events.router else max(FIRST_ROUTER_S, orphan_s)
            ):
                self._begin_stop(0.0)

    async def _give_up(self, error: DisaggError) -> None:
        """Free everything, and say so."""
        attempts = await self._drop_all(str(error))
        self._events.say(TokenEvent(*attempt, 0, error=error) for attempt in attempts)

    async def _drop_all(self, reason: str) -> set[tuple[str, int]]:
        """Free everything; (rid, attempt) of what it was.

        A submit that waited for an older attempt to end begins when that one is dropped here.
        """
        attempts = set[tuple[str, int]]()
        while here := self.decode.attempts | self.prefill.attempts:
            for rid, attempt in here:
                await self.abort(rid, attempt, reason)
            attempts |= here
        return attempts

    def _assume(self, role: Role) -> None:
        self.role = role
        self._events.say([])

    def _begin_stop(self, grace_s: float) -> None:
        if not self._stop_asked.done():
            self._stop_asked.set_result(grace_s)

    async def _drain(self, grace_s: float) -> None:
        """Let what is here end or move, then cut off the rest; the engine's thread ends last."""
        if self._failure is None:  # else it dies, and does not leave
            self._assume(Role.NONE)
        until = self._loop.time() + grace_s
        while self._loop.time() < until and (
            self.prefill.attempts
            or self.decode.attempts
            or self.reservations.gauges()["reservations"]
            or (
                self._events.followed and self._events.kept
            )  # the router has not heard all
        ):
            await asyncio.sleep(POLL_S)
        if self._failure is None:
            await self._give_up(
                CapacityError(f"{self.name} leaves, and had no time for it")
            )
            await asyncio.sleep(
                POLL_S
            )  # the router hears it: else it would wait for the others
        await self._drop_all("the worker stops")
        self.engine.submit(Drain())


def settle_memory() -> None:
    """What was loaded stays: glibc keeps large buffers, the garbage collector looks at it no more.

    A full collection of all that torch and transformers made stops every thread for 0.2 s, in the
    middle of a decode step.
    """
    tune_malloc()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries look for what is left at the end
