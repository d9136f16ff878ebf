"""The prefill side of a worker: prompts in, their pages out. Lives on the io loop.

    submit ─► engine: layer by layer ─► OutgoingHandoff ─► acknowledged ─► freed
                │ first token ─► router               │
                └───────────── any error ─────────────┴─► freed, and an error event for the router

One task per request. Its records are held until the decode worker has all of them or the request is
given up. An error of one request ends that request and no other.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from disagg.engine.messages import Abort, Prefill, Prefilled, as_disagg_error
from disagg.engine.sequence import Request, SamplingParams, handoff_stats
from disagg.errors import RequestError
from disagg.transfer.messages import Job, Submit, TokenEvent
from disagg.worker.event_log import EventLog
from disagg.worker.handoff import HandoffContext, OutgoingHandoff

log = logging.getLogger(__name__)


def sampling_of(job: Job) -> SamplingParams:
    """How a job samples its answer; RequestError for parameters that no engine can follow."""
    try:
        return SamplingParams(**job.sampling)
    except TypeError as error:
        raise RequestError(f"{job.name}: {error}") from None


def request_of(job: Job, side: str) -> Request:
    """A job as a request of the engine; RequestError for invalid sampling parameters.

    side: "p" or "d", as one engine may have both ends of a request
    """
    rid = f"{job.rid}#{job.attempt}/{side}"
    return Request(
        rid, tuple(job.prompt), sampling_of(job), job.codec, tuple(job.prediction)
    )


@dataclass(eq=False)
class PrefillSide:
    """The prompts that are computed here for decode workers.

    failures: hand-offs that ended in an error, by reason
    """

    context: HandoffContext
    overlap: bool
    tasks: asyncio.TaskGroup
    events: EventLog
    failures: Counter[str] = field(default_factory=Counter)
    _running: dict[str, tuple[int, asyncio.Task[None]]] = field(default_factory=dict)

    @property
    def attempts(self) -> set[tuple[str, int]]:
        """(rid, attempt) of the hand-offs in progress."""
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
        """Give up an attempt and all before it; returns when they are freed."""
        while rid in self._running:
            running_attempt, task = self._running[rid]
            if running_attempt > attempt:
                return
            task.cancel()
            await asyncio.wait([task])

    async def _run(self, submit: Submit) -> None:
        """Run one hand-off; send its error to the router."""
        job = submit.job
        log.debug("%s: prefill begins", job.name)
        try:
            await self._hand_over(submit)
            log.debug("%s: handed over", job.name)
        except Exception as failure:
            error = as_disagg_error(failure)
            log.info("%s: not handed over: %s", job.name, error)
            self.failures[error.reason] += 1
            self.events.publish([TokenEvent(job.rid, job.attempt, 0, error=error)])

    async def _hand_over(self, submit: Submit) -> None:
        job = submit.job
        request = request_of(job, "p")
        handoff = OutgoingHandoff[Prefilled](
            self.context, submit, request.rid, self.overlap
        )
        try:
            async with handoff.sending():
                prefill = Prefill(request, handoff, waited_s=job.waited_s)
                self.context.engine.submit(prefill)
                prefilled = await handoff.engine_result()
                await self._finish(job, handoff, prefilled)
        finally:
            # only now, when its records are not read any more
            self.context.engine.submit(Abort(request.rid))

    async def _finish(
        self, job: Job, handoff: OutgoingHandoff[Prefilled], prefilled: Prefilled
    ) -> None:
        """Send the first token to the router, then the statistics once the hand-off is complete."""
        plan = self.context.engine.plan(job.codec)
        stats = handoff_stats(
            plan, len(job.prompt), prefilled.cached_tokens, prefilled.encode_ms
        )
        stats = replace(stats, attention_error=prefilled.errors)
        logprobs: list[Any] = [*prefilled.logprobs]
        first = TokenEvent(
            rid=job.rid,
            attempt=job.attempt,
            index=0,
            token=prefilled.first_token,
            logprobs=logprobs,
        )
        if prefilled.finish_reason and not job.emitted:  # nothing to decode
            stats = replace(stats, wire_bytes=handoff.sender.wire_bytes)
            last = replace(
                first, finish_reason=prefilled.finish_reason, stats=asdict(stats)
            )
            self.events.publish([last])
            return
        self.events.publish([] if job.emitted else [first])
        handoff.sender.prefill_stats = stats
        extras: dict[str, Any] = {"logprobs": logprobs} if logprobs else {}
        stats = await handoff.commit(prefilled.first_token, extras)
        self.events.publish([TokenEvent(job.rid, job.attempt, 0, stats=asdict(stats))])
