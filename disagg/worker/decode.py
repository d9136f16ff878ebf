"""The decode side of a worker: complete prompts in, tokens out. Lives on the io loop.

receiver ─ admit ─► engine ─ tokens ─► router
             │ dropped: aborted, fenced, superseded by another attempt
             └ move: its pages leave while it decodes, the rest when it stops ─► another worker

A request that is served whole on this worker comes without a receiver: this engine computes its
prompt, too. One task per sequence that moves; one that cannot move ends here with an error, so that
it starts again elsewhere.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from disagg.engine.messages import (
    Abort,
    Admit,
    Failed,
    Move,
    Prefill,
    Token,
    as_disagg_error,
)
from disagg.engine.sequence import Logprobs, handoff_stats
from disagg.errors import (
    CapacityError,
    CorruptFrameError,
    DisaggError,
    ReservationError,
    TransferError,
)
from disagg.transfer.messages import Job, Submit, TokenEvent
from disagg.transfer.reservations import Admission
from disagg.wire import Commit
from disagg.worker.event_log import EventLog
from disagg.worker.handoff import HandoffContext, MigrationHandoff
from disagg.worker.prefill import request_of

LOCAL = "w"  # suffix of the engine's name of a request that is served whole
STEPS_AHEAD = 2  # of the engine, before the events that were published
EMITTED = "emitted"  # key of a commit for the tokens of a sequence that moves
Value = TypeVar("Value")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class DecodeSide:
    """The sequences that decode on this worker.

    on_done: called with (rid, attempt) when the engine has freed one
    counts:  sequences that moved away, bytes and milliseconds of their hand-offs
    """

    context: HandoffContext
    tasks: asyncio.TaskGroup
    events: EventLog
    on_done: Callable[[str, int], None]
    counts: Counter[str] = field(default_factory=Counter)
    # both by the engine's name of the sequence
    _jobs: dict[str, Job] = field(default_factory=dict)
    _moves: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def attempts(self) -> set[tuple[str, int]]:
        """(rid, attempt) of the sequences that decode here."""
        return {(job.rid, job.attempt) for job in self._jobs.values()}

    def admit(self, admission: Admission) -> None:
        """A prompt has arrived, complete and verified: the engine goes on from its first token."""
        job = admission.job
        commit = admission.commit
        request = request_of(job, "d")
        if job.moved:
            emitted = self._emitted_elsewhere(job, commit)
        else:
            emitted = tuple(job.emitted) or (commit.first_token,)
        log.debug("%s: decode begins", job.name)
        logprobs = () if job.emitted else _read_extras(commit, "logprobs", _logprobs)
        self._jobs[request.rid] = job
        self.context.engine.submit(
            Admit(request, admission.groups, emitted, job.moved, logprobs)
        )

    def _emitted_elsewhere(self, job: Job, commit: Commit) -> tuple[int, ...]:
        """The answer so far of a sequence that moved here.

        Tokens that the router may have missed are published again.
        """
        emitted = _read_extras(commit, EMITTED, _token)
        if len(job.prompt) + len(emitted) - 1 != job.moved:
            raise CorruptFrameError(
                f"{job.moved} tokens, with an answer of {len(emitted)}"
            )
        start = len(job.emitted)
        self.events.publish(
            TokenEvent(job.rid, job.attempt, index, token)
            for index, token in enumerate(emitted[start:-1], start)
        )
        return emitted

    def start(self, job: Job) -> None:
        """Serve a request whole, from its prompt on; a higher attempt replaces a lower one."""
        self.drop(job.rid, job.attempt - 1, "another attempt took over")
        request = request_of(job, LOCAL)
        if request.rid not in self._jobs:
            log.debug("%s: served whole", job.name)
            self._jobs[request.rid] = job
            self.context.engine.submit(
                Prefill(request, None, tuple(job.emitted), job.waited_s)
            )

    def move(self, submit: Submit) -> None:
        """Begin to hand a sequence over; it decodes on for as long as it can.

        One that has ended meanwhile stays: the router is about to get its last tokens. One that
        has outgrown its reservation decodes on here; CapacityError says so.
        """
        rid, attempt = submit.job.rid, submit.job.attempt
        last_event = self.events.last_event(rid, attempt)
        name = self._name_of(rid, attempt)
        if name is None or name in self._moves:
            if last_event is None or not last_event.finish_reason:
                raise ReservationError(
                    f"{submit.job.name} does not decode here, or moves already"
                )
            return
        job = self._jobs[name]
        num_emitted = last_event.index + 1 if last_event else len(job.emitted)
        tokens = len(job.prompt) + num_emitted
        room = submit.job.tokens
        if tokens + STEPS_AHEAD > room:
            raise CapacityError(
                f"{job.name} has {tokens} tokens; room waits for {room}"
            )
        task = self.tasks.create_task(self._move(name, submit))
        self._moves[name] = task
        task.add_done_callback(partial(self._free, name, rid, attempt))

    def drop(self, rid: str, attempt: int, reason: str) -> None:
        """Give up an attempt and all before it; no more events of them are published."""
        for name, job in list(self._jobs.items()):
            if job.rid == rid and job.attempt <= attempt:
                log.info("%s is dropped: %s", job.name, reason)
                del self._jobs[name]
                if name in self._moves:
                    # frees the sequence when its records are not read any more
                    self._moves[name].cancel()
                else:
                    self.context.engine.submit(Abort(name))

    def fail(self, rid: str, attempt: int, error: DisaggError) -> None:
        """Report that a request was dropped, so that the router may try again."""
        self.events.publish([TokenEvent(rid, attempt, 0, error=error)])

    def step(self, outputs: Iterable[Token | Failed]) -> list[TokenEvent]:
        """Events of an engine step for the router, of the sequences that decode here."""
        events = []
        for output in outputs:
            job = self._jobs.get(output.rid)
            if job is None:
                continue
            try:
                event = self._event_of(output, job)
            except Exception as failure:  # ends this sequence and no other
                self.context.engine.submit(Abort(output.rid))
                error = as_disagg_error(failure)
                event = TokenEvent(job.rid, job.attempt, 0, error=error)
            if event.error or event.finish_reason:
                _log_end(job, event)
                self._end(output.rid, job)
            events.append(event)
        return events

    def _event_of(self, output: Token | Failed, job: Job) -> TokenEvent:
        if isinstance(output, Failed):
            return self._failed_event(output, job)
        return self._token_event(output, job)

    def _token_event(self, output: Token, job: Job) -> TokenEvent:
        """A token. For a request that is served whole, the first and the last carry figures.

        (The first too, as the client may stop before the last.)
        """
        stats = None
        is_first_or_last = output.finish_reason or output.index <= len(job.emitted)
        if is_first_or_last and output.rid.endswith(LOCAL):
            plan = self.context.engine.plan(job.codec)
            tokens = len(job.prompt)
            stats = asdict(handoff_stats(plan, tokens, output.cached_tokens))
        return TokenEvent(
            job.rid,
            job.attempt,
            output.index,
            output.token,
            finish_reason=output.finish_reason or "",
            stats=stats,
            logprobs=output.logprobs,
        )

    def _failed_event(self, output: Failed, job: Job) -> TokenEvent:
        error = output.error
        if output.rid in self._moves:
            # a CapacityError would mean that it outgrew its reservation and decodes on here
            error = TransferError(f"it ended before it had moved: {error}")
        return TokenEvent(job.rid, job.attempt, 0, error=error)

    def _end(self, name: str, job: Job) -> None:
        del self._jobs[name]
        self.on_done(job.rid, job.attempt)
        if name in self._moves:
            self._moves[name].cancel()  # it ended before it could leave

    def _name_of(self, rid: str, attempt: int) -> str | None:
        """The engine's name of a sequence that decodes here."""
        for name, job in self._jobs.items():
            if job.rid == rid and job.attempt == attempt:
                return name
        return None

    # -- sequences that leave

    async def _move(self, name: str, submit: Submit) -> None:
        """One hand-off from begin to end."""
        rid, attempt = submit.job.rid, submit.job.attempt
        try:
            handoff = MigrationHandoff(self.context, submit, name)
            async with handoff.sending():
                self.context.engine.submit(Move(name, submit.job.tokens, handoff))
                moved = await handoff.engine_result()
                stats = await handoff.commit(
                    first_token=moved.emitted[0],
                    extras={EMITTED: list(moved.emitted)},
                )
            self.counts.update(
                moved=1, moved_bytes=stats.wire_bytes, moved_ms=round(stats.exposed_ms)
            )
            # the other worker publishes the tokens that the router may have missed
            self.events.forget(rid, attempt)
        except Exception as failure:
            error = as_disagg_error(failure)
            log.info("%s: not moved: %s", submit.job.name, error)
            self.fail(rid, attempt, error)

    def _free(self, name: str, rid: str, attempt: int, _: object) -> None:
        """Free the sequence, however its hand-off ended, and even if it never began."""
        del self._moves[name]
        self._jobs.pop(name, None)
        self.context.engine.submit(Abort(name))
        self.on_done(rid, attempt)


def _log_end(job: Job, event: TokenEvent) -> None:
    if event.error is not None:
        log.info("%s: decode failed: %s", job.name, event.error)
    else:
        log.debug("%s: decode ends, %s", job.name, event.finish_reason)


def _read_extras(
    commit: Commit, name: str, read: Callable[[Any], Value]
) -> tuple[Value, ...]:
    """The values of a commit under a name; CorruptFrameError for what no worker sends."""
    try:
        values: Any = commit.extras.get(name, ())
        return tuple(map(read, values))
    except (TypeError, ValueError, RecursionError) as error:
        raise CorruptFrameError(f"{name} of a commit: {error}") from error


def _token(value: Any) -> int:
    if type(value) is int and 0 <= value < 1 << 31:
        return value
    raise ValueError(f"{value!r:.40} is no token")


def _logprobs(value: Any) -> Logprobs:
    own, likeliest = value
    pairs = tuple((_token(token), score) for token, score in likeliest)
    scores = [own, *(score for _, score in pairs)]
    if not all(type(score) is float and score <= 1.0 for score in scores):
        raise ValueError(f"{value!r:.40} is no log-probability")
    return own, pairs
