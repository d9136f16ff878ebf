"""The decode side of a worker: complete prompts in, tokens out. Lives on the io loop.

receiver ─ admit ─► engine ─ tokens ─► router
             │ dropped: aborted, fenced, superseded by another attempt

A request that is served whole on this worker comes without a receiver: its prompt too is computed
by this engine.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from disagg.engine.engine import Engine
from disagg.engine.messages import Abort, Admit, Failed, Replay, Token
from disagg.engine.sequence import handoff_stats
from disagg.errors import DisaggError
from disagg.transfer.messages import Job, TokenEvent
from disagg.transfer.reservations import Admission
from disagg.workers.prefill import Say, request_of

LOCAL = "w"  # how the engine's names of requests that are served whole end
log = logging.getLogger(__name__)


@dataclass(eq=False)
class DecodeSide:
    """The requests that decode here. `on_done(rid, attempt)`: the engine has freed one."""

    engine: Engine
    say: Say
    on_done: Callable[[str, int], None]
    _jobs: dict[str, Job] = field(default_factory=dict)  # by the engine's name

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
        said: Any = () if job.emitted else admission.commit.extras.get("logprobs", ())
        self.engine.submit(Admit(request, admission.groups, emitted, tuple(said)))

    def start(self, job: Job) -> None:
        """Serve a request whole, from its prompt on; a higher attempt replaces a lower one."""
        self.drop(job.rid, job.attempt - 1, "another attempt took over")
        request = request_of(job, LOCAL)
        if request.rid not in self._jobs:
            self._jobs[request.rid] = job
            self.engine.submit(Replay(request, job.emitted))

    def drop(self, rid: str, attempt: int, reason: str) -> None:
        """An attempt and all before it are given up: nothing more of them is said."""
        for name, job in list(self._jobs.items()):
            if job.rid == rid and job.attempt <= attempt:
                log.info("%s is dropped: %s", job.name, reason)
                del self._jobs[name]
                self.engine.submit(Abort(name))

    def fail(self, rid: str, attempt: int, error: DisaggError) -> None:
        """A request was dropped, and the router does not know: it may try again."""
        self.say([TokenEvent(rid, attempt, 0, error=error)])

    def step(self, outputs: Iterable[Token | Failed]) -> list[TokenEvent]:
        """What an engine step brought for the router; what is not of this side is left alone."""
        return [self._event(x, job) for x in outputs if (job := self._jobs.get(x.rid))]

    def _event(self, output: Token | Failed, job: Job) -> TokenEvent:
        """The end of a request that was served whole says what its prompt took here."""
        event = TokenEvent(job.rid, job.attempt, 0)
        if isinstance(output, Failed):
            event = replace(event, error=output.error)
        else:
            reason = output.finish_reason or ""
            event = replace(event, index=output.index, token=output.token, finish_reason=reason)
            event = replace(event, logprobs=output.logprobs)
            if reason and output.rid.endswith(LOCAL):
                plan, tokens = self.engine.plan(job.codec), len(job.prompt)
                stats = handoff_stats(plan, tokens, output.cached_tokens)
                event = replace(event, stats=asdict(stats))
        if event.error or event.finish_reason:
            del self._jobs[output.rid]
            self.on_done(job.rid, job.attempt)
        return event
