"""A worker: one engine thread that computes, one io thread that talks. Plain Python, no Ray.

    main thread     start, stop, wait
    engine thread   the only one that runs the model: engine.run(deliver)
    io thread       one asyncio loop: gRPC server and clients, hand-offs, leases, events
    between them    engine.submit(message)  and  loop.call_soon_threadsafe(StepOutput)

Prefill and decode workers are the same class; a role only says what is admitted. All tasks of the
io thread are in one group: if one ends early, the worker ends and is replaced.
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
# between two checks that a router follows: each takes the interpreter from the engine
CHECK_S = 0.25
# lengths of prompts whose bytes are in `WorkerInfo.sizes`
SIZES = (1024, 4096)
# a worker that no router has ever followed waits at least this long
FIRST_ROUTER_S = 60.0

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
        self.config = config
        self.role = role
        self.name = name
        self.epoch = time.time_ns() // 1_000_000  # ms: later incarnations are higher
        self.doing = ""  # what delays its start, in words
        self._host = host
        self._security = security
        model = config.model
        self._runner = runner or Runner.load(model.name, model.dtype, model.device)
        self._listed = config.listed
        self._codec = self._listed[0]  # of jobs that name none
        compiled = self._listed if self._runner.graphs else ()
        self.engine = Engine(
            self._runner, config.engine, codecs=compiled, probed=self._listed
        )
        check_slabs(
            self.engine.pool.arena.nbytes,
            self.engine.pool.slab_bytes,
            map(self.engine.plan, self._listed),
            self._runner.info.context_length,
        )
        self._started: Future[WorkerInfo] = Future()
        self._io_thread = threading.Thread(
            target=self._run_io, name=f"{name}-io", daemon=True
        )
        self._engine_thread = threading.Thread(
            target=self._run_engine, name=f"{name}-engine", daemon=True
        )
        self._failure: BaseException | None = None

    # -- from any thread

    def start(self) -> WorkerInfo:
        """Serve; returns when it can be reached.

        ConfigError if its codec does not fit, or is not sound on its GPU.
        """
        has_no_library = self.backend.startswith("torch")
        level = logging.WARNING if has_no_library else logging.INFO
        log.log(level, "%s: %s", self.name, self.backend)
        if self._runner.graphs:
            query_heads = self._runner.info.query_heads
            check_plans(list(self.engine.listed), query_heads, self._runner.device)
            warm_up(
                self.engine,
                self._runner,
                self._listed,
                self.config.engine.max_sequences,
                report=partial(setattr, self, "doing"),
            )
        self._io_thread.start()
        self._started.result()
        self._engine_thread.start()
        return self.started

    @property
    def backend(self) -> str:
        """What computes here, in words."""
        return "triton" if self._runner.device.type == "cuda" else describe_backend()

    @property
    def started(self) -> WorkerInfo:
        """How it can be reached, with its epoch and role of now."""
        return replace(self._started.result(), epoch=self.epoch, role=self.role)

    def assume(self, role: Role) -> None:
        """Change the role. Requests that run here go on, until the router moves them."""
        self._on_loop(self._assume, role)

    def stop(self, grace_s: float | None = None) -> None:
        """Take nothing new, finish or move what runs here within the grace, then end."""
        if grace_s is None:
            grace_s = self.config.cluster.grace_s
        self._on_loop(self._begin_stop, grace_s)

    def wait_alone(self, timeout_s: float) -> bool:
        """Wait until no router follows; False if one still does in the end."""
        until = time.monotonic() + timeout_s
        while self._events.is_followed:
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
        return True

    def meet(self, addresses: list[str]) -> list[str]:
        """Connect to decode workers and measure the links; what each can do, in words."""
        meeting = self._peers.meet(addresses)
        return asyncio.run_coroutine_threadsafe(meeting, self._loop).result()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended (True). Raises the error that broke it, if any."""
        threads = [self._io_thread, self._engine_thread]
        for thread in threads:
            thread.join(timeout_s)
            if self._failure is not None:
                raise self._failure
        return not any(thread.is_alive() for thread in threads)

    # -- calls of a router (`WorkerHandler`); on the io loop

    async def reserve(self, job: Job, epoch: int, router: str = "") -> Grant:
        """Reserve room for a job, at once; CapacityError if there is none."""
        job = self._accept(job, epoch, router)
        if not self.role.decodes:
            raise PeerLostError(
                f"{self.name} ({self.role}) decodes nothing of others now"
            )
        request_of(job, "d")  # raises RequestError if no engine can serve it
        return self.reservations.reserve(job, epoch)

    async def submit(self, submit: Submit) -> None:
        """Begin a hand-off, or a request that is served whole."""
        job = self._accept(submit.job, submit.epoch, submit.router)
        submit = replace(submit, job=job)
        if submit.work is Work.MOVE:
            self.decode.move(submit)
            return
        is_local = submit.work is Work.LOCAL
        if not self.role.prefills and not (is_local and self.role.decodes):
            raise PeerLostError(f"{self.name} ({self.role}) takes no prompts now")
        if is_local:
            self.decode.start(job)
        else:
            await self.prefill.start(submit)

    async def events(
        self, have: Mapping[str, int], router: str
    ) -> AsyncGenerator[StepEvents]:
        """The events for a router; everything of the router before it is dropped."""
        self._events.check(router)
        if router != self._events.router:
            await self._drop_all("another router took over")
            self._events.clear()
        async with aclosing(self._events.subscribe(have, router)) as steps:
            async for step in steps:
                yield step

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        """Free everything that an attempt holds, on either side."""
        self.reservations.abort(rid, attempt, reason)
        self.decode.drop(rid, attempt, reason)
        await self.prefill.abort(rid, attempt)
        self._events.forget(rid, attempt)
        self._events.publish()  # there may be room

    async def fence(self, epoch: int, router: str) -> None:
        """Begin the next epoch: drop everything of the old one, without any event."""
        self._events.check(router)
        self.reservations.fence(epoch)
        self.epoch = epoch
        await self._drop_all(f"fenced: epoch {epoch} has begun")
        self._events.clear()

    async def status(self) -> WorkerStatus:
        """What it is and what it holds; only the arena and cached pages are left when idle."""
        gauges = self._gauges()
        failures = self.receiver.failures + self.prefill.failures
        del failures[AbortedError.reason]
        free_bytes = int(gauges["arena_bytes"] - gauges["used_bytes"])
        info = {
            "pid": os.getpid(),
            "links": self._peers.as_info(),
            "counts": {
                **self.reservations.counts,
                **self.decode.counts,
                **self.engine.counts,
            },
            "failures": dict(failures),
            "node": socket.gethostname(),
            "backend": self.backend,
            "tokens_fit": self._tokens_that_fit(free_bytes),
        }
        return WorkerStatus(self.epoch, gauges, info)

    def _gauges(self) -> dict[str, float]:
        load = self.engine.load
        gauges: dict[str, float] = {
            "engine_running": load.running,
            "engine_waiting": load.waiting,
            "engine_held": load.held,
            "handoffs_out": len(self.prefill.attempts),
            "outputs_kept": self._events.num_requests,
            **self.engine.pool.gauges(),
        }
        for name, count in self.reservations.gauges().items():
            gauges[f"handoffs_in_{name}"] = count
        return gauges

    def _accept(self, job: Job, epoch: int, router: str) -> Job:
        """Check the sender of a job and its epoch; the job, with its codec named."""
        self._events.check(router)
        if epoch != self.epoch:
            raise ReservationError(
                f"epoch {epoch} is over; {self.name} is in {self.epoch}"
            )
        return replace(job, codec=job.codec or self._codec)

    def _load(self) -> Load:
        """What it could take now; something waits whenever it may not reserve."""
        engine = self.engine.load
        waiting = 0 if self.engine.may_reserve() else max(1, engine.waiting)
        return Load(engine.free_bytes, engine.slots, waiting, self.role)

    # -- threads

    def _run_engine(self) -> None:
        """The only thread with a team of OpenMP: beside another team it would not spin."""
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
            while isinstance(error, BaseExceptionGroup):  # the first one is reported
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
            services = [self.receiver.run(), self._watch_router(), *self._make_direct()]
            service_tasks = [tasks.create_task(self._supervise(x)) for x in services]
            server, address = await start_server(
                [worker_handler(self), self.receiver.handlers()],
                self._host,
                self._security,
                self.config.cluster.ports,
            )
            self._started.set_result(self._describe(address))
            try:
                await self._drain(await self._stop_asked)
            finally:
                for task in service_tasks:
                    task.cancel()
                await server.stop(0)
                await self._peers.close()
        await asyncio.to_thread(self._engine_thread.join)

    def _describe(self, address: str) -> WorkerInfo:
        plans = map(self.engine.plan, self._listed)
        return WorkerInfo(
            self.name,
            self.role,
            address,
            self.epoch,
            model=self._runner.fingerprint,
            min_tokens=self._min_tokens(),
            room=self._tokens_that_fit(self.engine.pool.arena.nbytes),
            step_tokens=self.config.engine.max_batch_tokens,
            sizes={
                plan.spec: {tokens: plan.nbytes(tokens) for tokens in SIZES}
                for plan in plans
            },
        )

    def _tokens_that_fit(self, nbytes: int) -> int:
        """Tokens of its own codec, in prompts as long as the context."""
        context = self._runner.info.context_length
        return tokens_that_fit(self.engine.plan(self._codec), nbytes, context)

    def _min_tokens(self) -> int:
        """Shorter prompts are computed where they decode."""
        min_tokens = self.config.transfer.min_disagg_tokens
        if min_tokens is not None:
            return min_tokens
        return least_worth_sending(self.engine.plan(self._codec))

    async def _supervise(self, work: Coroutine[Any, Any, None]) -> None:
        await work
        raise RuntimeError(f"a part of {self.name} that never ends has ended: {work}")

    def _make_sides(self, tasks: asyncio.TaskGroup) -> None:
        engine = self.engine
        pool = engine.pool
        transfer = self.config.transfer
        model = self._runner.fingerprint
        self._events = EventLog(self._load)
        self._peers = Peers(self._security, transfer)
        context = HandoffContext(engine, model, self._peers)
        self.prefill = PrefillSide(context, transfer.overlap, tasks, self._events)
        self.decode = DecodeSide(
            context,
            tasks,
            self._events,
            on_done=lambda rid, attempt: self.reservations.finished(rid, attempt),
        )
        policy = ReceiverPolicy(
            model=model,
            plan_of=engine.plan,
            epoch=self.epoch,
            lease_s=transfer.lease_s,
            rows=engine.rows,
            watermark_bytes=int(pool.arena.nbytes * self.config.engine.watermark),
            may_reserve=engine.may_reserve,
            share=transfer.dedup,
        )
        self.reservations = Reservations(
            policy, pool, self.decode.admit, self.decode.drop
        )
        self.receiver = Receiver(self.reservations, self.decode.fail)

    def _make_direct(self) -> list[Coroutine[Any, Any, None]]:
        """The server of direct connections, if the settings ask for one."""
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
        self._events.publish(self.decode.step([*output.tokens, *output.failed]))

    # -- the end

    async def _watch_router(self) -> None:
        """Without a router for a lease, free everything; for longer, stop."""
        lease_s = self.config.transfer.lease_s
        followed_at = self._loop.time()
        while True:
            await asyncio.sleep(CHECK_S)
            if self._events.is_followed:
                followed_at = self._loop.time()
                continue
            alone_s = self._loop.time() - followed_at
            orphan_s = self.config.cluster.orphan_s
            if not self._events.router:
                orphan_s = max(FIRST_ROUTER_S, orphan_s)
            elif alone_s >= lease_s:
                error = PeerLostError("no router listened for longer than a lease")
                await self._give_up(error)
            if alone_s >= orphan_s:
                self._begin_stop(0.0)

    async def _give_up(self, error: DisaggError) -> None:
        """Free everything, and report the error for each attempt."""
        attempts = await self._drop_all(str(error))
        self._events.publish(
            TokenEvent(rid, attempt, 0, error=error) for rid, attempt in attempts
        )

    async def _drop_all(self, reason: str) -> set[tuple[str, int]]:
        """Free everything; returns the (rid, attempt) of each.

        Again until nothing runs: a submit that waited for an older attempt to end begins when
        that one is dropped.
        """
        dropped = set[tuple[str, int]]()
        while True:
            attempts = self.decode.attempts | self.prefill.attempts
            if not attempts:
                return dropped
            for rid, attempt in attempts:
                await self.abort(rid, attempt, reason)
            dropped |= attempts

    def _assume(self, role: Role) -> None:
        self.role = role
        self._events.publish()

    def _begin_stop(self, grace_s: float) -> None:
        if not self._stop_asked.done():
            self._stop_asked.set_result(grace_s)

    async def _drain(self, grace_s: float) -> None:
        """Let requests end or move, then drop the rest; the engine's thread ends last."""
        if self._failure is None:  # else it dies, and does not leave
            self._assume(Role.NONE)
        until = self._loop.time() + grace_s
        while self._loop.time() < until and self._is_busy():
            await asyncio.sleep(POLL_S)
        if self._failure is None:
            error = CapacityError(f"{self.name} leaves, and had no time for it")
            await self._give_up(error)
            # until the router has these events: else it would wait for other workers' reports
            await asyncio.sleep(POLL_S)
        await self._drop_all("the worker stops")
        self.engine.submit(Drain())

    def _is_busy(self) -> bool:
        """Whether requests run here, or the router lacks some of their events."""
        return bool(
            self.prefill.attempts
            or self.decode.attempts
            or self.reservations.gauges()["reservations"]
            or (self._events.is_followed and self._events.num_requests)
        )


def settle_memory() -> None:
    """Keep what was loaded: glibc keeps large buffers, the garbage collector skips old objects.

    A full collection of the objects of torch and transformers stops every thread for 0.2 s, in the
    middle of a decode step.
    """
    tune_malloc()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries expect a collection at the end
