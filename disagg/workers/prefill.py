"""The prefill side of a worker: prompts in, their pages out. Lives on the io loop.

    WAIT ─ reserve ─► SENDING ─ commit ─► ACKED        one task per request
      ▲       │ no room there: back to the queue, holding nothing

Room at the decode worker is reserved just before the engine gets the prompt; its records here are
held until the hand-off is acknowledged or given up.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Protocol

from disagg.config import TransferConfig
from disagg.engine.messages import Abort, Failed, Message, Prefill, Prefilled, Release
from disagg.engine.sequence import Request as EngineRequest
from disagg.engine.sequence import SamplingParams
from disagg.errors import CapacityError, DeadlineError, DisaggError
from disagg.plan import Plan
from disagg.pool import Arena
from disagg.transfer.channel import Link
from disagg.transfer.messages import Request
from disagg.transfer.pace import Pace
from disagg.transfer.sender import Sender
from disagg.transfer.sending import Options, Receipt
from disagg.transfer.units import content_keys
from disagg.transfer.work import Submit, TokenEvent
from disagg.wire import PlainValue
from disagg.workers.holding import Holding
from disagg.workers.mishaps import as_error
from disagg.workers.offering import ENCODE_MS, Offering, handoff_stats

AT_ONCE = 2  # prompts in the engine: one computes, one is ready behind it
ROOM_WAIT_S = 1.0  # how long one call waits for room before others may try
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0  # between calls that are refused at once; each is doubled


class EngineDoor(Protocol):
    """What this side needs of an engine."""

    @property
    def plan(self) -> Callable[[str], Plan]:
        """The plan of a codec spec."""

    def submit(self, message: Message) -> None:
        """Put a message into its inbox."""


class PrefillSide:
    """The hand-offs that leave this worker."""

    def __init__(
        self,
        engine: EngineDoor,
        arena: Arena,
        model: str,
        config: TransferConfig,
        link: Callable[[str], Link],
        say: Callable[[Iterable[TokenEvent]], None],
    ):
        self._engine = engine
        self._arena = arena
        self._model = model
        self._config = config
        self._link = link
        self._say = say
        self._pace = None
        if config.link_mbps is not None:
            self._pace = Pace(config.link_mbps * 1e6 / 8, config.burst_bytes)
        self.failures: Counter[str] = Counter()  # hand-offs that ended in an error, by reason
        self._tasks: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self._computed: dict[str, asyncio.Future[Prefilled | Failed]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._holding = Holding(arena.nbytes)
        self._copies = ThreadPoolExecutor(1, "copies")  # in order; idle if pages are on the host

    @property
    def running(self) -> int:
        """Hand-offs that are not over."""
        return len(self._tasks)

    @property
    def attempts(self) -> list[tuple[str, int]]:
        """(rid, attempt) of each."""
        return [(rid, attempt) for rid, (attempt, _) in self._tasks.items()]

    async def start(self, work: Submit) -> None:
        """Begin a hand-off; a higher attempt replaces a lower one of the same request."""
        await self.abort(work.rid, work.attempt - 1)
        if work.rid in self._tasks:
            return  # this attempt or a later one is on its way already
        task = asyncio.create_task(self._run(work))
        self._tasks[work.rid] = (work.attempt, task)
        task.add_done_callback(lambda _: self._tasks.pop(work.rid))

    async def abort(self, rid: str, attempt: int) -> None:
        """Give up an attempt and all before it; returns when everything of it is freed."""
        known, task = self._tasks.get(rid, (0, None))
        if task is not None and known <= attempt:
            task.cancel()
            await asyncio.wait([task])

    async def abort_all(self) -> None:
        """Give up everything."""
        for rid, attempt in self.attempts:
            await self.abort(rid, attempt)

    def step(self, outputs: Iterable[Prefilled | Failed]) -> None:
        """What an engine step brought; entries that are not of this side are left alone."""
        for output in outputs:
            if (future := self._computed.get(output.rid)) and not future.done():
                future.set_result(output)

    async def _run(self, work: Submit) -> None:
        """One hand-off from begin to end; its error goes to the router."""
        rid, attempt = work.rid, work.attempt
        try:
            async with asyncio.timeout(work.deadline_s):
                await self._hand_over(work)
        except TimeoutError:
            late = DeadlineError(f"the hand-off took longer than {work.deadline_s:.0f} s")
            self._fail(rid, attempt, late)
        except Exception as failure:
            self._fail(rid, attempt, as_error(failure, f"attempt {attempt} of {rid}"))

    def _fail(self, rid: str, attempt: int, error: DisaggError) -> None:
        self.failures[error.reason] += 1
        self._say([TokenEvent(rid, attempt, 0, None, error=error)])

    async def _hand_over(self, work: Submit) -> None:
        plan, loop = self._engine.plan(work.codec), asyncio.get_running_loop()
        name, params = f"{work.rid}#{work.attempt}/p", SamplingParams(**work.sampling)
        request = EngineRequest(name, work.prompt, params, work.codec)
        tokens, overlap = len(request.tokens), self._config.overlap
        offering = Offering(loop, self._arena, tokens, overlap, self._copies)
        sender = offering.sender = self._sender(work, plan, offering)
        holding = self._holding.hold(work.decode_address, sender.nbytes)
        async with holding, AsyncExitStack() as slot:
            await self._reserve(sender, slot)
            sending = asyncio.create_task(sender.run())
            try:
                done = await self._compute(request, offering, sending)
                await slot.aclose()  # the next prompt may compute while this one is still sent
                self._commit(work, sender, done)
                stats = handoff_stats(done, plan, await sending)
            except BaseException:
                sending.cancel()
                with suppress(asyncio.CancelledError, DisaggError):
                    await sending
                self._engine.submit(Abort(name))  # only now: nobody reads its records any more
                raise
        self._engine.submit(Release(name))
        self._say([TokenEvent(work.rid, work.attempt, 0, stats=stats)])

    async def _reserve(self, sender: Sender, slot: AsyncExitStack) -> None:
        """A slot and room at the decode worker; while there is no room, the next has the slot.

        A receiver that lets nobody wait, as it drains or its queue is full, is asked less often.
        """
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        while True:
            await slot.enter_async_context(self._slots)
            asked = loop.time()
            try:
                await sender.reserve()
                return
            except CapacityError:
                await slot.aclose()
            if loop.time() - asked < sender.request.wait_s / 2:
                await asyncio.sleep(pause_s)
                pause_s = min(LAST_PAUSE_S, 2 * pause_s)
            else:
                await asyncio.sleep(0)
                pause_s = FIRST_PAUSE_S

    async def _compute(
        self, request: EngineRequest, offering: Offering, sending: asyncio.Task[Receipt]
    ) -> Prefilled:
        """The first token, when the engine has it; the error that came in between."""
        computed = asyncio.get_running_loop().create_future()
        self._computed[request.rid] = computed
        try:
            self._engine.submit(Prefill(request, offering))
            await asyncio.wait([computed, sending], return_when=asyncio.FIRST_COMPLETED)
            if not computed.done():
                sending.result()  # raises: without a commit it cannot end well
            output = computed.result()
        finally:
            del self._computed[request.rid]
        if isinstance(output, Failed):
            raise output.error
        offering.computed()
        return output

    def _commit(self, work: Submit, sender: Sender, done: Prefilled) -> None:
        """The first token goes to the router at once, and with all that decode must know along."""
        if not work.emitted:
            self._say([TokenEvent(work.rid, work.attempt, 0, done.first_token)])
        extras: dict[str, PlainValue] = {
            "prompt": list(work.prompt),
            "emitted": list(work.emitted or [done.first_token]),
            "sampling": dict(work.sampling),
            "codec": work.codec,
        }
        sender.finish(done.first_token, extras, {ENCODE_MS: done.usage.encode_ms})

    def _sender(self, work: Submit, plan: Plan, offering: Offering) -> Sender:
        request = Request(
            rid=work.rid,
            attempt=work.attempt,
            epoch=work.decode_epoch,
            tokens=len(work.prompt),
            model=self._model,
            plan=plan.fingerprint,
            spec=work.codec,
            wait_s=min(ROOM_WAIT_S, work.deadline_s),
        )
        if self._config.dedup:
            keys = content_keys(self._model, plan, work.prompt)
            request = replace(request, keys=keys)
        frame_bytes = self._config.frame_bytes
        if self._pace is not None:
            frame_bytes = min(frame_bytes, self._pace.burst_bytes)
        options = Options(deadline_s=work.deadline_s, frame_bytes=frame_bytes, pace=self._pace)
        return Sender(self._link(work.decode_address), request, plan, offering, options)
