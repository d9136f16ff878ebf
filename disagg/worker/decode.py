"""The decode side of a worker: complete prompts in, tokens out. Lives on the io loop.

receiver ─ admit ─► engine ─ tokens ─► router
             │ dropped: aborted, fenced, superseded by another attempt
             └ move: its pages leave while it decodes, the rest when it stops ─► another worker

A request that is served whole on this worker comes without a receiver: its prompt too is computed
by this engine. One task per sequence that moves; one that cannot move ends here with an error, so
that it starts again elsewhere.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from disagg.engine.messages import (
    Abort,
    Admit,
    Failed,
    Move,
    Moved,
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
from disagg.kv.page import FinalAt, Item, Kind
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.state import GroupState
from disagg.transfer.messages import Job, Submit, TokenEvent
from disagg.transfer.reservations import Admission
from disagg.wire import Commit
from disagg.worker.event_log import EventLog
from disagg.worker.handoff import HandoffContext, OutgoingHandoff
from disagg.worker.prefill import request_of

LOCAL = "w"  # how the engine's names of requests that are served whole end
PART_ITEMS, PART_S = 64, 0.005  # of a sequence that decodes on while it moves
STEPS = 2  # that the engine may be ahead of what was said
EMITTED = "emitted"  # what a commit calls the tokens of a sequence that moves
Made = TypeVar("Made")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class DecodeSide:
    """The requests that decode here.

    on_done: called with (rid, attempt) when the engine has freed one
    counts:  sequences that moved away, bytes and milliseconds of their hand-offs
    """

    way: HandoffContext
    tasks: asyncio.TaskGroup
    events: EventLog
    on_done: Callable[[str, int], None]
    counts: Counter[str] = field(default_factory=Counter)
    _jobs: dict[str, Job] = field(
        default_factory=dict
    )  # by the engine's name, as all below
    _moves: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def attempts(self) -> set[tuple[str, int]]:
        """(rid, attempt) of who decodes here."""
        return {(job.rid, job.attempt) for job in self._jobs.values()}

    def admit(self, admission: Admission) -> None:
        """A prompt is here, complete and verified: the engine goes on from its first token.

        Of a sequence that moved here, what the router may not have heard is said again.
        """
        job, commit = admission.job, admission.commit
        request = request_of(job, "d")
        emitted = job.emitted or (commit.first_token,)
        if job.moved:
            emitted = _plain(commit, EMITTED, _token)
            if len(job.prompt) + len(emitted) - 1 != job.moved:
                raise CorruptFrameError(
                    f"{job.moved} tokens, with an answer of {len(emitted)}"
                )
            known = len(job.emitted)
            again = enumerate(emitted[known:-1], known)
            self.events.say(TokenEvent(job.rid, job.attempt, *each) for each in again)
        said = () if job.emitted else _plain(commit, "logprobs", _score)
        self._jobs[request.rid] = job
        self.way.engine.submit(
            Admit(request, admission.groups, emitted, job.moved, said)
        )

    def start(self, job: Job) -> None:
        """Serve a request whole, from its prompt on; a higher attempt replaces a lower one."""
        self.drop(job.rid, job.attempt - 1, "another attempt took over")
        request = request_of(job, LOCAL)
        if request.rid not in self._jobs:
            self._jobs[request.rid] = job
            self.way.engine.submit(Prefill(request, None, job.emitted, job.waited_s))

    def move(self, submit: Submit) -> None:
        """Begin to hand a sequence over; it decodes on for as long as it can.

        One that has ended meanwhile stays: the router is about to hear its last tokens. One that
        has outgrown the room that waits for it decodes on; CapacityError says so.
        """
        asked, room = (submit.job.rid, submit.job.attempt), submit.job.tokens
        last = self.events.last(*asked)
        for name, job in self._jobs.items():
            if (job.rid, job.attempt) == asked and name not in self._moves:
                tokens = len(job.prompt) + (
                    last.index + 1 if last else len(job.emitted)
                )
                if tokens + STEPS > room:
                    raise CapacityError(
                        f"{job.name} has {tokens} tokens; room waits for {room}"
                    )
                task = self._moves[name] = self.tasks.create_task(
                    self._move(name, submit)
                )
                task.add_done_callback(partial(self._free, name, *asked))
                return
        if last is None or not last.finish_reason:
            raise ReservationError(
                f"{submit.job.name} does not decode here, or moves already"
            )

    def drop(self, rid: str, attempt: int, reason: str) -> None:
        """An attempt and all before it are given up: nothing more of them is said."""
        for name, job in list(self._jobs.items()):
            if job.rid == rid and job.attempt <= attempt:
                log.info("%s is dropped: %s", job.name, reason)
                del self._jobs[name]
                if task := self._moves.get(name):
                    task.cancel()  # frees it when nobody reads its records
                else:
                    self.way.engine.submit(Abort(name))

    def fail(self, rid: str, attempt: int, error: DisaggError) -> None:
        """A request was dropped, and the router does not know: it may try again."""
        self.events.say([TokenEvent(rid, attempt, 0, error=error)])

    def step(self, outputs: Iterable[Token | Failed]) -> list[TokenEvent]:
        """What an engine step brought for the router; what is not of this side is left alone."""
        return [self._event(x, job) for x in outputs if (job := self._jobs.get(x.rid))]

    def _event(self, output: Token | Failed, job: Job) -> TokenEvent:
        """Of a request that is served whole the first token says what its prompt took here, for
        who stops early, and so does the last."""
        if isinstance(output, Failed):
            error = output.error
            if (
                output.rid in self._moves
            ):  # it is here no more: not one that outgrew its room
                error = TransferError(f"it ended before it had moved: {error}")
            event = TokenEvent(job.rid, job.attempt, 0, error=error)
        else:
            reason, stats = output.finish_reason or "", None
            begins = output.index <= len(job.emitted)
            if (begins or reason) and output.rid.endswith(LOCAL):
                plan, tokens = self.way.engine.plan(job.codec), len(job.prompt)
                stats = asdict(handoff_stats(plan, tokens, output.cached_tokens))
            said = output.index, output.token, reason, None, stats, output.logprobs
            event = TokenEvent(job.rid, job.attempt, *said)
        if event.error or event.finish_reason:
            del self._jobs[output.rid]
            self.on_done(job.rid, job.attempt)
            if task := self._moves.get(output.rid):
                task.cancel()  # it ended before it could leave
        return event

    # -- sequences that leave

    async def _move(self, name: str, submit: Submit) -> None:
        """One hand-off from begin to end."""
        rid, attempt = submit.job.rid, submit.job.attempt
        try:
            async with MigrationHandoff(self.way, submit, name).sending() as departure:
                self.way.engine.submit(Move(name, submit.job.tokens, departure))
                emitted = (await departure.computed()).emitted
                stats = await departure.commit(emitted[0], {EMITTED: list(emitted)})
            self.counts.update(
                moved=1, moved_bytes=stats.wire_bytes, moved_ms=round(stats.exposed_ms)
            )
            self.events.forget(rid, attempt)  # it says there what nobody heard
        except Exception as failure:
            self.fail(rid, attempt, as_disagg_error(failure))

    def _free(self, name: str, rid: str, attempt: int, _: object) -> None:
        """However its hand-off ended, and if it never began: nothing of the sequence is here."""
        del self._moves[name]
        self._jobs.pop(name, None)
        self.way.engine.submit(Abort(name))
        self.on_done(rid, attempt)


class MigrationHandoff(OutgoingHandoff[Moved]):
    """The engine's end of a sequence that moves. It begins twice: sealed pages are final already,
    and where it stops everything is.

    What is sealed leaves in small parts: packing it all at once would hold up the next token.
    """

    _later: tuple[Item, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it has stopped, and all of it was offered."""
        return len(self._offered) == self.checklist.num_items

    def begin(self, plan: Plan, groups: Sequence[GroupState]) -> None:
        stops = self._source is not None
        super().begin(plan, groups)
        if stops:
            self.checklist.match(groups)
        tokens = self.checklist.tokens
        sealed = [
            _sealed(*each, tokens) for each in zip(plan.groups, groups, strict=True)
        ]
        final = [
            x
            for x in self._items
            if x not in self._offered
            and (stops or x.record < sealed[x.group].get(x.kind, 0))
        ]
        self.offer(final)

    def _pass(self, items: Sequence[Item]) -> None:
        trickles = bool(self._later)
        self._later = (*self._later, *items)
        if not trickles or self.whole:
            self._trickle()

    def _trickle(self) -> None:
        count = len(self._later) if self.whole else PART_ITEMS
        part, self._later = self._later[:count], self._later[count:]
        if part:
            super()._pass(part)
            self._loop.call_later(PART_S, self._trickle)


def _plain(commit: Commit, name: str, read: Callable[[Any], Made]) -> tuple[Made, ...]:
    """What a commit carries along under a name; CorruptFrameError for what no worker says."""
    try:
        return tuple(map(read, commit.extras.get(name, ())))  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError) as error:
        raise CorruptFrameError(f"{name} of a commit: {error}") from error


def _token(value: Any) -> int:
    if type(value) is int and 0 <= value < 1 << 31:
        return value
    raise ValueError(f"{value!r:.40} is no token")


def _score(value: Any) -> Logprobs:
    own, likeliest = value
    found = own, tuple((_token(token), score) for token, score in likeliest)
    if all(
        type(x) is float and x <= 1.0 for x in (own, *(score for _, score in likeliest))
    ):
        return found
    raise ValueError(f"{value!r:.40} is no log-probability")


def _sealed(group: LayerGroup, state: GroupState, tokens: int) -> dict[Kind, int]:
    """How many records of each kind stay as they are, and under their numbers, up to a length."""
    drops = group.dropped(tokens) > state.dropped * group.page.tokens
    if drops or group.flush_page or group.final_at is FinalAt.PROMPT:
        return {}
    ids = state.ids_by_kind()
    return {kind: len(ids.get(kind, ())) for kind in (Kind.SEGMENT, Kind.PAGE)}
