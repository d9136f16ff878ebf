"""The decode side of a worker: complete prompts in, tokens out. Lives on the io loop.

receiver ─ admit ─► engine ─ tokens ─► router
             │ dropped: aborted, fenced, superseded by another attempt

A request that is served whole on this worker comes without a receiver: its prompt too is computed
by this engine.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from disagg.engine.messages import Abort, Admit, Failed, Replay, Token
from disagg.engine.sequence import handoff_stats
from disagg.errors import DisaggError
from disagg.transfer.messages import Job, TokenEvent
from disagg.transfer.reservations import Admission
from disagg.workers.prefill import EngineDoor, Say, request_of

log = logging.getLogger(__name__)


class DecodeSide:
    """The requests that decode here. `on_done(rid, attempt)`: the engine has freed one."""

    def __init__(self, engine: EngineDoor, say: Say, on_done: Callable[[str, int], None]):
        self._engine = engine
        self._say = say
        self._on_done = on_done
        self._jobs: dict[str, Job] = {}  # by the engine's name
        self._local: set[str] = set()  # of them, those without a receiver

    @property
    def attempts(self) -> set[tuple[str, int]]:
        """(rid, attempt) of who decodes here."""
        return {(job.rid, job.attempt) for job in self._jobs.values()}

    def admit(self, admission: Admission) -> None:
        """A prompt is here, complete and verified: the engine goes on from its first token."""
        job = admission.job
        request = request_of(job, "d")
        self._jobs[request.rid] = job
        emitted = job.emitted or (admission.commit.first_token,)
        self._engine.submit(Admit(request, admission.groups, emitted))

    def start(self, job: Job) -> None:
        """Serve a request whole, from its prompt on; a higher attempt replaces a lower one."""
        self.abort(job.rid, job.attempt - 1)
        request = request_of(job, "d")
        if request.rid not in self._jobs:
            self._jobs[request.rid] = job
            self._local.add(request.rid)
            self._engine.submit(Replay(request, job.emitted))

    def abort(self, rid: str, attempt: int) -> None:
        """Give up what is served whole here: an attempt and all before it."""
        for name in list(self._local):
            job = self._jobs[name]
            if job.rid == rid and job.attempt <= attempt:
                self._forget(name)
                self._engine.submit(Abort(name))

    def drop(self, rid: str, attempt: int, reason: str) -> None:
        """A request that was admitted is given up: nothing more of it is said."""
        log.info("attempt %d of %s is dropped: %s", attempt, rid, reason)
        for name, job in list(self._jobs.items()):
            if (job.rid, job.attempt) == (rid, attempt):
                self._forget(name)
                self._engine.submit(Abort(name))

    def fail(self, rid: str, attempt: int, error: DisaggError) -> None:
        """A request was dropped, and the router does not know: it may try again."""
        self._say([TokenEvent(rid, attempt, 0, error=error)])

    def step(self, outputs: Iterable[Token | Failed]) -> list[TokenEvent]:
        """What an engine step brought for the router; what is not of this side is left alone."""
        events = []
        for output in outputs:
            job = self._jobs.get(output.rid)
            if job is None:
                continue
            if isinstance(output, Failed):
                events.append(TokenEvent(job.rid, job.attempt, 0, error=output.error))
            else:
                events.append(self._event(job, output))
            if isinstance(output, Failed) or output.finish_reason:
                self._forget(output.rid)
                self._on_done(job.rid, job.attempt)
        return events

    def _event(self, job: Job, token: Token) -> TokenEvent:
        """A token; with the last one of a request served whole, what its prompt takes here."""
        event = TokenEvent(job.rid, job.attempt, token.index, token.token)
        if not token.finish_reason:
            return event
        stats = None
        if token.rid in self._local:
            stats = asdict(handoff_stats(self._engine.plan(job.codec), len(job.prompt)))
        return replace(event, finish_reason=token.finish_reason, stats=stats)

    def _forget(self, name: str) -> None:
        del self._jobs[name]
        self._local.discard(name)
