"""The prefill side of a worker: prompts in, their pages out. Lives on the io loop.

    submit ─► engine: layer by layer ─► offering ─► sender ─► acknowledged ─► freed
                │ first token ─► router               │
                └───────────── any error ─────────────┴─► freed, and the router is told

One task per request. Its records here are held until the decode worker has them all or it is given
up; whatever goes wrong with one request ends that request, and nothing else.
"""

import asyncio
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from disagg.engine.messages import Abort, Prefill, Prefilled, as_disagg_error
from disagg.engine.sequence import Request, SamplingParams, handoff_stats
from disagg.errors import RequestError
from disagg.transfer.messages import Job, Submit, TokenEvent
from disagg.worker.event_log import EventLog
from disagg.worker.handoff import HandoffContext, OutgoingHandoff


def request_of(job: Job, side: str) -> Request:
    """A job as the engine knows it; RequestError for sampling that cannot be.

    side: "p" or "d": one engine may have both ends of a request
    """
    try:
        params = SamplingParams(**job.sampling)
    except TypeError as error:
        raise RequestError(f"{job.name}: {error}") from None
    return Request(f"{job.rid}#{job.attempt}/{side}", job.prompt, params, job.codec)


@dataclass(eq=False)
class PrefillSide:
    """The hand-offs that leave this worker. `failures`: those that ended in an error, by reason."""

    way: HandoffContext
    overlap: bool
    tasks: asyncio.TaskGroup
    events: EventLog
    failures: Counter[str] = field(default_factory=Counter)
    _running: dict[str, tuple[int, asyncio.Task[None]]] = field(default_factory=dict)

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
        while (known := self._running.get(rid)) and known[0] <= attempt:
            known[1].cancel()
            await asyncio.wait([known[1]])

    async def _run(self, submit: Submit) -> None:
        """One hand-off from begin to end; its error goes to the router."""
        job = submit.job
        try:
            await self._hand_over(submit)
        except Exception as failure:
            error = as_disagg_error(failure)
            self.failures[error.reason] += 1
            self.events.say([TokenEvent(job.rid, job.attempt, 0, error=error)])

    async def _hand_over(self, submit: Submit) -> None:
        job, request = submit.job, request_of(submit.job, "p")
        offering = OutgoingHandoff[Prefilled](
            self.way, submit, request.rid, self.overlap
        )
        try:
            async with offering.sending():
                self.way.engine.submit(
                    Prefill(request, offering, waited_s=job.waited_s)
                )
                await self._tell(job, offering, await offering.computed())
        finally:
            self.way.engine.submit(
                Abort(request.rid)
            )  # only now: nobody reads its records

    async def _tell(
        self, job: Job, offering: OutgoingHandoff[Prefilled], done: Prefilled
    ) -> None:
        """The first token, then the figures when the decode worker has it all."""
        plan = self.way.engine.plan(job.codec)
        stats = handoff_stats(plan, len(job.prompt), done.cached_tokens, done.encode_ms)
        stats = replace(stats, attention_error=done.errors)
        said: list[Any] = [*done.logprobs]
        first = TokenEvent(job.rid, job.attempt, 0, done.first_token, logprobs=said)
        if (
            done.finish_reason and not job.emitted
        ):  # nothing is left to decode, so to hand over
            figures = asdict(replace(stats, wire_bytes=offering.sender.wire_bytes))
            self.events.say(
                [replace(first, finish_reason=done.finish_reason, stats=figures)]
            )
            return
        self.events.say([] if job.emitted else [first])
        offering.sender.figures = stats
        stats = await offering.commit(
            done.first_token, {"logprobs": said} if said else {}
        )
        self.events.say([TokenEvent(job.rid, job.attempt, 0, stats=asdict(stats))])
