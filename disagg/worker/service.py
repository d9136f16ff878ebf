"""What a router may call of a worker, and the state behind the calls. Lives on the io loop.

    reserve ──► Reservations ◄── Receiver: frames of other workers
                    │ admitted
    submit ──► PrefillSide, DecodeSide ──► engine ──► on_step ──► EventLog ──► events

A call is checked here (router, epoch, role); then the part that it belongs to does the work.
Prefill and decode workers are the same class: a role only says what is admitted.
"""

import os
import socket
import time
from asyncio import TaskGroup
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from disagg.config import Config
from disagg.engine.engine import Engine
from disagg.engine.messages import StepOutput
from disagg.errors import (
    AbortedError,
    DisaggError,
    PeerLostError,
    ReservationError,
)
from disagg.kernels.cpu.library import describe_backend
from disagg.kv.plan import Plan
from disagg.model.capacity import Room, tokens_that_fit
from disagg.model.runner import Runner
from disagg.transfer.channel import Peers
from disagg.transfer.follower_calls import Followers
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
    spoken,
)
from disagg.transfer.receiver import Receiver
from disagg.transfer.records import Manifest, least_worth_sending
from disagg.transfer.reservations import ReceiverPolicy, Reservations
from disagg.transfer.rpc import host_of
from disagg.transfer.security import Security
from disagg.worker.decode import DecodeSide
from disagg.worker.event_log import EventLog
from disagg.worker.handoff import HandoffContext
from disagg.worker.prefill import PrefillSide, sampling_of

# lengths of prompts whose bytes are in `WorkerInfo`
SIZES = (1024, 4096)


class WorkerService:
    """The calls of a router (`WorkerHandler`), and what runs here because of them.

    role:      what is admitted now
    epoch:     the incarnation; work of an earlier one is refused
    event_log: events that the router may still lack
    """

    def __init__(
        self,
        name: str,
        role: Role,
        config: Config,
        engine: Engine,
        runner: Runner,
        security: Security | None,
        tasks: TaskGroup,
        followers: Followers | None = None,
        host: str = "127.0.0.1",
        rank_pids: Sequence[int] = (),
    ):
        """
        followers: of the group whose rank 0 this is
        host:      of rank 0
        rank_pids: the processes of the followers, on their hosts
        """
        followers = followers or Followers()
        self.name = name
        self.role = role
        self.epoch = time.time_ns() // 1_000_000  # ms: later incarnations are higher
        self._config = config
        self._engine = engine
        self._runner = runner
        self._codec = config.listed[0]  # of jobs that name none
        self.event_log = EventLog(self._load)
        self.peers = Peers(security, config.transfer)
        self._ranks = 1 + len(followers.addresses)
        self._rank_hosts = [host, *map(host_of, followers.addresses)]
        self._rank_pids = [os.getpid(), *rank_pids]
        context = HandoffContext(
            engine=engine,
            model=runner.fingerprint,
            plan_of=engine.plan,
            arena=engine.pool.arena,
            peers=self.peers,
            ranks=self._ranks,
            followers=followers.handlers,
        )
        self.prefill = PrefillSide(
            context, config.transfer.overlap, tasks, self.event_log
        )
        self.decode = DecodeSide(
            context,
            tasks,
            self.event_log,
            on_done=lambda rid, attempt: self.reservations.finished(rid, attempt),
        )
        self.reservations = Reservations(
            self._receiver_policy(),
            engine.pool,
            self.decode.admit,
            self.decode.drop,
            on_close=followers.close,
        )
        self.receiver = Receiver(self.reservations, self.decode.fail, followers)

    def _receiver_policy(self) -> ReceiverPolicy:
        config = self._config
        arena_bytes = self._engine.pool.arena.nbytes
        return ReceiverPolicy(
            model=self._runner.fingerprint,
            plan_of=self._engine.plan,
            epoch=self.epoch,
            lease_s=config.transfer.lease_s,
            decode_slots=self._engine.decode_slots,
            watermark_bytes=int(arena_bytes * config.engine.watermark),
            may_reserve=self._engine.may_reserve,
            share=config.transfer.dedup,
            ranks=self._ranks,
        )

    # -- calls of a router

    async def reserve(self, job: Job, epoch: int, router: str = "") -> Grant:
        """Reserve room for a job, at once; CapacityError if there is none."""
        job = self._accept(job, epoch, router)
        if not self.role.decodes:
            raise PeerLostError(
                f"{self.name} ({self.role}) decodes nothing of others now"
            )
        params = sampling_of(job)  # RequestError before room is reserved
        if params.grammar:
            self._engine.grammar_compiler.prepare(params.grammar)  # while KV travels
        return await self.receiver.reserve(job, epoch)

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
        self.event_log.check(router)
        if router != self.event_log.router:
            await self.drop_all("another router took over")
            self.event_log.clear()
        async with aclosing(self.event_log.subscribe(have, router)) as steps:
            async for step in steps:
                yield step

    async def acknowledge(self, have: Mapping[str, int], router: str) -> None:
        """Drop outputs that the router has: by rid, those below an index."""
        self.event_log.check(router)
        self.event_log.acknowledge(have)

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        """Free everything that an attempt holds, on either side."""
        self.reservations.abort(rid, attempt, reason)
        self.decode.drop(rid, attempt, reason)
        await self.prefill.abort(rid, attempt)
        self.event_log.forget(rid, attempt)
        self.event_log.publish()  # there may be room

    async def fence(self, epoch: int, router: str) -> None:
        """Begin the next epoch: drop everything of the old one, without any event."""
        self.event_log.check(router)
        self.reservations.fence(epoch)
        self.epoch = epoch
        await self.drop_all(f"fenced: epoch {epoch} has begun")
        self.event_log.clear()

    async def status(self) -> WorkerStatus:
        """What it is and what it holds; only the arena and cached pages are left when idle."""
        gauges = self._gauges()
        failures = self.receiver.failures + self.prefill.failures
        del failures[AbortedError.reason]
        info = {
            "pid": os.getpid(),
            "links": self.peers.as_info(),
            "counts": {
                **self.reservations.counts,
                **self.decode.counts,
                **self._engine.counts,
            },
            "failures": dict(failures),
            "node": socket.gethostname(),
            "backend": backend_of(self._runner),
            "ranks": self._ranks,
            "rank_hosts": self._rank_hosts,
            "rank_pids": self._rank_pids,
            "dtype": self._runner.info.dtype,
            "weights": self._runner.weights,
            "tokens_fit": self._tokens_that_fit(self._engine.pool),
        }
        return WorkerStatus(self.epoch, gauges, info, self._speaks())

    # -- calls of the worker that owns it

    def info(self, address: str) -> WorkerInfo:
        """How the worker can be reached, at its address, and what it holds."""
        plans = self._listed_plans()
        pool = self._engine.pool
        return WorkerInfo(
            self.name,
            self.role,
            address,
            self.epoch,
            model=self._runner.fingerprint,
            min_tokens=self._min_tokens(),
            ranks=self._ranks,
            room=self._tokens_that_fit(pool.empty()),
            step_tokens=self._config.engine.max_batch_tokens,
            snapshots=self._engine.most_snapshots,
            sizes={
                plan.spec: {x: pool.bytes_of(plan.resident_records(x)) for x in SIZES}
                for plan in plans
            },
            wire_sizes={
                plan.spec: {
                    x: self._ranks * Manifest(plan, x).total_bytes for x in SIZES
                }
                for plan in plans
            },
            speaks=self._speaks(),
        )

    def on_step(self, output: StepOutput) -> None:
        """Pass the results of an engine step on, to hand-offs and to the router."""
        self.prefill.context.deliver([*output.prefilled, *output.moved, *output.failed])
        self.event_log.publish(self.decode.step([*output.tokens, *output.failed]))

    def assume(self, role: Role) -> None:
        """Change the role. Requests that run here go on, until the router moves them."""
        self.role = role
        self.event_log.publish()

    async def give_up(self, error: DisaggError) -> None:
        """Free everything, and report the error for each attempt."""
        attempts = await self.drop_all(str(error))
        self.event_log.publish(
            TokenEvent(rid, attempt, 0, error=error) for rid, attempt in attempts
        )

    async def drop_all(self, reason: str) -> set[tuple[str, int]]:
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

    def is_busy(self) -> bool:
        """Whether requests run here, or the router lacks some of their events."""
        return bool(
            self.prefill.attempts
            or self.decode.attempts
            or self.reservations.gauges()["reservations"]
            or (self.event_log.is_followed and self.event_log.num_requests)
        )

    # -- inside

    def _gauges(self) -> dict[str, float]:
        load = self._engine.load
        gauges: dict[str, float] = {
            "engine_running": load.running,
            "engine_waiting": load.waiting,
            "engine_held": load.held,
            "handoffs_out": len(self.prefill.attempts),
            "outputs_kept": self.event_log.num_requests,
            **self._engine.pool.gauges(),
        }
        for name, count in self.reservations.gauges().items():
            gauges[f"handoffs_in_{name}"] = count
        return gauges

    def _accept(self, job: Job, epoch: int, router: str) -> Job:
        """Check the sender of a job and its epoch; the job, with its codec named."""
        self.event_log.check(router)
        if epoch != self.epoch:
            raise ReservationError(
                f"epoch {epoch} is over; {self.name} is in {self.epoch}"
            )
        return replace(job, codec=job.codec or self._codec)

    def _listed_plans(self) -> list[Plan]:
        return [self._engine.plan(codec) for codec in self._config.listed]

    def _speaks(self) -> tuple[str, ...]:
        plans = []
        for plan in self._listed_plans():
            group_plan = plan.of_group(self._ranks)
            plans.append((plan.spec, group_plan.fingerprint))
        return spoken(self._runner.fingerprint, plans)

    def _load(self) -> Load:
        """What it could take now; something waits whenever it may not reserve."""
        engine = self._engine.load
        waiting = 0 if self._engine.may_reserve() else max(1, engine.waiting)
        return Load(
            free_bytes=engine.free_bytes,
            slots=engine.slots,
            waiting=waiting,
            role=self.role,
            step=self._engine.progress.num_steps,
            stalled_s=self._engine.progress.stalled_s,
        )

    def _tokens_that_fit(self, room: Room) -> int:
        """Tokens of its own codec, in prompts as long as the context."""
        context = self._runner.info.context_length
        return tokens_that_fit(self._engine.plan(self._codec), room, context)

    def _min_tokens(self) -> int:
        """Shorter prompts are computed where they decode."""
        min_tokens = self._config.transfer.min_disagg_tokens
        if min_tokens is not None:
            return min_tokens
        return least_worth_sending(self._engine.plan(self._codec))


def backend_of(runner: Runner) -> str:
    """What computes a model, in words."""
    return "triton" if runner.device.type == "cuda" else describe_backend()
