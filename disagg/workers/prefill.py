"""The prefill side of a worker: prompts in, their pages out. Lives on the io loop.

    submit ─► engine: layer by layer ─► offering ─► sender ─► acknowledged ─► freed
                │ first token ─► router               │
                └───────────── any error ─────────────┴─► freed, and the router is told

One task per request. Its records here are held until the decode worker has them all or it is given
up; whatever goes wrong with one request ends that request, and nothing else.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from disagg.config import TransferConfig
from disagg.engine.engine import Engine
from disagg.engine.failures import named
from disagg.engine.messages import Abort, Failed, Prefill, Prefilled
from disagg.engine.sequence import Request, SamplingParams, handoff_stats
from disagg.errors import DeadlineError, RequestError
from disagg.metrics import HandoffStats
from disagg.plan import Plan
from disagg.pool import Arena
from disagg.state import GroupState
from disagg.transfer.channel import Peers
from disagg.transfer.messages import Attach, Job, Submit, TokenEvent
from disagg.transfer.records import ArenaSource, Checklist
from disagg.transfer.sender import Sender
from disagg.wire import Item, Ticket

OF_THE_CODEC = ("codec", "fp16_bytes", "fp8_bytes", "resident_bytes", "encode_ms", "cached_tokens")

Say = Callable[[Iterable[TokenEvent]], None]


def request_of(job: Job, side: str) -> Request:
    """A job as the engine knows it; RequestError for sampling that cannot be.

    side: "p" or "d": one engine may have both ends of a request
    """
    try:
        params = SamplingParams(**job.sampling)
    except TypeError as error:
        raise RequestError(f"{job.name}: {error}") from None
    return Request(f"{job.rid}#{job.attempt}/{side}", job.prompt, params, job.codec)


def check_job(job: Job) -> None:
    """RequestError for a job that no engine can ever serve."""
    request_of(job, "d")


@dataclass(eq=False)
class PrefillSide:
    """The hand-offs that leave this worker. `failures`: those that ended in an error, by reason."""

    engine: Engine
    model: str
    config: TransferConfig
    peers: Peers
    tasks: asyncio.TaskGroup
    say: Say
    failures: Counter[str] = field(default_factory=Counter)
    _running: dict[str, tuple[int, asyncio.Task[None]]] = field(default_factory=dict)
    _computed: dict[str, asyncio.Future[Prefilled]] = field(default_factory=dict)
    # in order; idle if pages are on the host
    _copies: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "copies"))

    @property
    def attempts(self) -> set[tuple[str, int]]:
        """(rid, attempt) of the hand-offs that are not over."""
        return {(rid, attempt) for rid, (attempt, _) in self._running.items()}

    async def start(self, submit: Submit) -> None:
        """Begin a hand-off; a higher attempt replaces a lower one of the same request."""
        job = submit.job
        await self.abort(job.rid, job.attempt - 1)
        if job.rid in self._running:
            return  # this attempt or a later one is on its way already
        task = self.tasks.create_task(self._run(submit))
        self._running[job.rid] = (job.attempt, task)
        task.add_done_callback(lambda _: self._running.pop(job.rid))

    async def abort(self, rid: str, attempt: int) -> None:
        """Give up an attempt and all before it; returns when everything of it is freed."""
        known, task = self._running.get(rid, (0, None))
        if task is not None and known <= attempt:
            task.cancel()
            await asyncio.wait([task])

    def step(self, outputs: Iterable[Prefilled | Failed]) -> None:
        """What an engine step brought; entries that are not of this side are left alone."""
        for output in outputs:
            future = self._computed.get(output.rid)
            if future is None or future.done():
                continue
            if isinstance(output, Failed):
                future.set_exception(output.error)
            else:
                future.set_result(output)

    async def _run(self, submit: Submit) -> None:
        """One hand-off from begin to end; its error goes to the router."""
        job = submit.job
        try:
            async with asyncio.timeout(job.deadline_s):
                await self._hand_over(submit)
        except Exception as failure:
            error = named(failure)
            if isinstance(failure, TimeoutError):
                error = DeadlineError(f"{job.name} was not handed over in {job.deadline_s:.0f} s")
            self.failures[error.reason] += 1
            self.say([TokenEvent(job.rid, job.attempt, 0, error=error)])

    async def _hand_over(self, submit: Submit) -> None:
        job, request = submit.job, request_of(submit.job, "p")
        plan, tokens = self.engine.plan(job.codec), len(job.prompt)
        offering = Offering(
            self.engine.pool.arena, Checklist(plan, tokens), self.config.overlap, self._copies
        )
        ticket = Ticket(submit.nonce, submit.decode_epoch, 0)
        attach = Attach(ticket, self.model, plan.fingerprint, tokens)
        channel = self.peers.get(submit.decode_address)
        sender = offering.sender = Sender(channel, attach, plan, offering, job.deadline_s)
        sending = asyncio.create_task(sender.run())
        try:
            done = await self._compute(request, offering, sending)
            stats = handoff_stats(plan, tokens, done.cached_tokens, done.encode_ms)
            said: list[Any] = [*done.logprobs]
            first = TokenEvent(job.rid, job.attempt, 0, done.first_token, logprobs=said)
            if done.finish_reason and not job.emitted:  # nothing is left to decode, so to hand over
                figures = asdict(replace(stats, wire_bytes=sender.wire_bytes))
                self.say([replace(first, finish_reason=done.finish_reason, stats=figures)])
                return
            self.say([] if job.emitted else [first])
            sender.finish(done.first_token, extras={"logprobs": said} if said else None)
            sent = await sending
            kept = {name: getattr(stats, name) for name in OF_THE_CODEC}
            figures = asdict(replace(sent, **kept))
            self.say([TokenEvent(job.rid, job.attempt, 0, stats=figures)])
        finally:
            sending.cancel()
            try:
                await asyncio.gather(sending, return_exceptions=True)
            finally:
                self.engine.submit(Abort(request.rid))  # only now: nobody reads its records

    async def _compute(
        self, request: Request, offering: "Offering", sending: asyncio.Task[HandoffStats]
    ) -> Prefilled:
        """The first token, when the engine has it; the error that came in between."""
        computed: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()
        self._computed[request.rid] = computed
        try:
            self.engine.submit(Prefill(request, offering))
            both: list[asyncio.Future] = [computed, sending]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not computed.done():
                sending.result()  # raises: without a commit it cannot end well
            offering.computed()
            return computed.result()
        finally:
            del self._computed[request.rid]


class Offering:
    """The engine's end of a hand-off: called on its thread, passed on to the io loop.

    From a device pages come by way of the host: copied beside the kernels, waited for by a thread.
    """

    def __init__(self, arena: Arena, checklist: Checklist, overlap: bool, copies: Executor):
        self.sender: Sender | None = None
        self._source: ArenaSource | None = None
        self._loop = asyncio.get_running_loop()
        self.arena = arena
        self.checklist = checklist
        self._overlap = overlap
        self._copies = copies
        self._kept: list[Item] = []

    # -- on the engine's thread

    def begin(self, plan: Plan, groups: Sequence[GroupState]) -> None:
        """The records are there; from now on they can be read."""
        self._source = ArenaSource(self.arena, self.checklist, groups)

    def offer(self, items: Sequence[Item]) -> None:
        """Bytes are final: they may leave, unless nothing shall leave before all is computed."""
        assert self._source is not None
        if not self._overlap:
            self._kept.extend(items)
        elif self.arena.on_host:
            self._loop.call_soon_threadsafe(self._pass, items)
        else:
            self._copies.submit(self._land, items, self._source.stage(items))

    # -- on the thread that waits for copies

    def _land(self, items: Sequence[Item], copied: Callable[[], None]) -> None:
        try:
            copied()
            self._loop.call_soon_threadsafe(self._pass, items)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._break, error)

    # -- on the io loop

    def read(self, items: Sequence[Item]) -> list[memoryview]:
        """The bytes of items of one kind, layer group and size that were offered."""
        assert self._source is not None
        return self._source.read(items)

    def computed(self) -> None:
        """The prompt is done: what was kept back goes out."""
        if self._kept:
            self._pass(self._kept)

    def _pass(self, items: Sequence[Item]) -> None:
        assert self.sender is not None
        try:
            self.sender.offer(items)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        assert self.sender is not None
        self.sender.end(named(error))
