"""The life of requests as the router sees it: events in, actions out. No clock, no sockets.

           a pair has room            granted           first token from D
    QUEUED ───────────────► RESERVE ─────────► PREFILL ───────────────────► DECODE ──► done
      ▲                        │ D is full        │ refused, P or D dead       │ D dead
      └────────────────────────┴──────────────────┴────────────────────────────┘ next attempt
    local work (a single token, or a worker of both roles) needs no grant
    DECODE at a worker that stops decoding: room at another ─► MOVE ─► DECODE there
    from anywhere: client gone, no token for deadline_s, deaths ─► abort at P and D ─► done

Each method of `RequestTable` takes one event, changes the table and returns actions; `router.py`
performs them. So the rules can be tested event by event, without a worker. Their details have
files of their own: `placement` (which workers), `starts`, `moves`, `failures`, `mismatches` and
`aborts`.

This is the only queue: workers keep none. A request leaves it when a prefill worker P can start it
and a decode worker D grants room. A full worker holds up only the requests that need it. Clients
take turns. Within a client, short prompts go first, and a prompt counts as shorter the longer it
waits. A token is identified by (rid, attempt, index) and delivered once. The table keeps the
delivered tokens, so that the next attempt can replay them. A move does not end the attempt, so both
of its workers may report a token.

`_alone` takes each step for a request: an exception in it fails this request only.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from disagg.config import RouterConfig
from disagg.errors import (
    CapacityError,
    DeadlineError,
    DisaggError,
    PeerLostError,
    TransferError,
)
from disagg.router.aborts import Aborts
from disagg.router.actions import (
    AbortAttempt,
    Action,
    FailRequest,
    Start,
    TokenOutput,
)
from disagg.router.failures import (
    as_error,
    blame,
    charge_death,
    is_final,
    pause_s,
)
from disagg.router.mismatches import MISMATCHES, Mismatches
from disagg.router.moves import (
    MOVE_RETRY_S,
    has_to_move,
    is_outgrowing,
    reserve_more,
    reserve_target,
)
from disagg.router.placement import Placement
from disagg.router.request_queue import RequestQueue
from disagg.router.request_state import Phase, RequestState, token_array
from disagg.router.starts import Starts
from disagg.router.worker_state import WorkerState
from disagg.transfer.messages import (
    Grant,
    Job,
    Load,
    Role,
    TokenEvent,
    Work,
    WorkerInfo,
    serves,
)

# requests that `place` starts in one call
STARTS_AT_ONCE = 64
# how long a refusal for want of room keeps requests as long away from a worker
FULL_S = 0.25
# within this time a worker reports the sequences that one that left handed over to it
SPEAKS_S = 5.0
# factor of `WorkerState.recent_tokens` at each tick
FADE = 0.966

# what is done with one request
Step = Callable[[RequestState], list[Action]]


class RequestTable:
    """All requests and all workers. Each method takes one event and returns the actions due.

    unequal_tokens: repeated tokens that differ from what was delivered before
    codec_policy, routed: as in `Starts`
    """

    def __init__(self, config: RouterConfig | None = None):
        self.requests: dict[str, RequestState] = {}
        self.workers: dict[str, WorkerState] = {}
        self.unequal_tokens = 0
        self.retries = 0
        self.moves = 0
        self._config = config or RouterConfig()
        self._starts = Starts(self.requests, self.workers, self._config)
        self.codec_policy = self._starts.codec_policy
        self.routed = self._starts.routed
        # whether requests may start, or have to move: `place` is due
        self.needs_placing = False
        self._queue = RequestQueue()
        # the latest, while requests are queued
        self._placement: Placement | None = None
        self._num_submitted = 0
        # names of workers that stopped decoding and may still have sequences
        self._stopped_decoding: set[str] = set()
        self._aborts = Aborts()
        self._mismatches = Mismatches()
        # bytes a token under the smallest codec so far: the least that a prompt takes
        self._token_bytes = 0.0
        # of the states of a sequence, which all codecs keep alike
        self._state_bytes = 0.0
        # since when every request is queued and none can start
        self._stuck_since = math.inf

    def configure(self, config: RouterConfig) -> None:
        """Use these limits from now on."""
        self._config = config
        self._starts.config = config

    # -- events

    def submit(
        self,
        job: Job,
        now: float,
        at: tuple[str, str] = ("", ""),
        client: str = "",
    ) -> list[Action]:
        """A new request, which starts with the next `place` if there is room.

        Tokens that the job has emitted were delivered before: it is replayed through them.
        at, client: as in `RequestState`
        RequestError for a request that cannot be placed among others.
        """
        request = RequestState(
            replace(job, prompt=token_array(job.prompt)),
            serial=self._num_submitted,
            arrived=now - job.waited_s,
            deadline=now + self._config.deadline_s,
            at=at,
            client=client,
            emitted=token_array(tuple(job.emitted)),
        )
        self._num_submitted += 1
        self.requests[job.rid] = request
        self._queue.add(request)
        if self._may_start(request, now):
            self.needs_placing = True
        return []

    def _may_start(self, request: RequestState, now: float) -> bool:
        if self._placement is None:
            return True
        try:
            return self._placement.may_start(request, now)
        except Exception:
            return True  # placing it says what is wrong

    def fail(self, rid: str, error: DisaggError, now: float) -> list[Action]:
        """Fail a request that the router cannot continue."""
        request = self.requests.get(rid)
        return [] if request is None else self._fail(request, error, now)

    def cancel(self, rid: str, now: float) -> list[Action]:
        """The client is gone or has enough; both workers abort the request."""
        request = self.requests.pop(rid, None)
        if request is None:
            return []
        self._leave_queue(request)
        if request.phase is Phase.QUEUED:
            return []  # it leaves no room for another
        self.needs_placing = True
        return self._abort(request, now)

    def worker_up(
        self, info: WorkerInfo, now: float, times_stuck: int = 0
    ) -> list[Action]:
        """A worker takes part. If it did before, it has dropped all requests that it had.

        times_stuck: how often its engine hung lately; its breaker is open then
        """
        actions = self.worker_down(info.name, now, fenced=True)
        worker = WorkerState(info)
        self.workers[info.name] = worker
        if times_stuck:
            worker.distrust(times_stuck, now)
        self._workers_changed()
        return actions

    def worker_down(self, name: str, now: float, fenced: bool = False) -> list[Action]:
        """A worker is dead, or has dropped its requests (fenced): they start again elsewhere.

        A death counts against a request only if the worker computed no other one. One death before
        the limit, the request shares its workers with no other; at the limit it fails.
        The end of a worker with Role.NONE counts against no request: it has handed over everything,
        and the receiving workers are about to report those sequences.
        """
        worker = self.workers.pop(name, None)
        if worker is None:
            return []
        self._mismatches.forget(name)
        self._workers_changed()
        self._stopped_decoding.discard(name)
        has_left = worker.info.role is Role.NONE
        if not has_left:
            charge_death(self.requests.values(), name, self._config.max_attempts)

        def lose(request: RequestState) -> list[Action]:
            if request.phase is Phase.DECODE and name == request.target:
                request.target = None
            if has_left and name == request.sender and not fenced:
                request.sender_left_at = now
            elif request.depends_on(name):
                return self._restart_or_fail(request, now)
            return []

        return self._each_alone(list(self.requests.values()), lose, now)

    def update_load(self, worker: str, load: Load) -> None:
        """A worker reports how much more work it can take."""
        state = self.workers.get(worker)
        if state is None:
            return
        old_role = state.info.role
        if state.update_load(load):
            self.needs_placing = True
        role = state.info.role
        if role is not old_role:
            self._workers_changed()
        if role.decodes:
            self._stopped_decoding.discard(worker)
        elif old_role.decodes:
            self._stopped_decoding.add(worker)

    def on_grant(
        self, worker: str, rid: str, attempt: int, grant: Grant
    ) -> list[Action]:
        """A decode worker has reserved room. If the request is over, it was sent an abort."""
        request = self._current(rid, attempt)
        if request is None:
            return []
        if worker not in request.workers:  # another worker was asked since
            return [AbortAttempt(worker, rid, attempt)]
        if request.phase is Phase.RESERVE and request.prefill:
            request.phase = Phase.PREFILL
            self._queue.end_turn(request)
            return [Start(request.prefill, request.job, Work.PREFILL, worker, grant)]
        is_target = request.phase is Phase.DECODE and worker == request.target
        if is_target and request.decode:
            if is_outgrowing(request):
                return [reserve_more(request, worker)]
            request.phase = Phase.MOVE
            return [Start(request.decode, request.job, Work.MOVE, worker, grant)]
        return []

    def on_event(self, worker: str, event: TokenEvent, now: float) -> list[Action]:
        """A worker reports figures, an error, a token or the end of an attempt."""
        request = self._current(event.rid, event.attempt)
        if event.stats:
            self._learn(worker, request, event)
        if request is None:
            if worker not in self.workers:
                return []
            return [*self._aborts.abort_stale(worker, event, now)]
        if event.error is not None:
            return self._on_error(request, worker, event.error, now)

        num_emitted = len(request.emitted)
        actions: list[Action] = []
        self._progress(request, worker, event.index)
        if event.token is not None:
            actions += self._deliver(request, event, now)
        has_gap = event.index > num_emitted
        ends_early = event.finish_reason and event.index + 1 != len(request.emitted)
        if has_gap or ends_early:
            gap = TransferError(
                f"token {event.index} came when {num_emitted} were known"
            )
            return actions + self._on_refusal(request, worker, gap, now)
        if event.finish_reason:
            actions += self._finish(request, worker, event.finish_reason, now)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Fail requests that are past their deadline; others are tried again."""
        self._aborts.forget_old(now)
        for worker in self.workers.values():
            worker.recent_tokens *= FADE
        self.needs_placing = True
        requests = list(self.requests.values())
        return self._each_alone(requests, lambda x: self._tick(x, now), now)

    def _tick(self, request: RequestState, now: float) -> list[Action]:
        if now >= request.deadline:
            error = DeadlineError(
                f"no token in {self._config.deadline_s:g} s; "
                f"the request was in {request.phase}"
            )
            return self._fail(request, error, now)
        is_silent = now >= request.sender_left_at + SPEAKS_S
        if is_silent and request.sender and request.sender not in self.workers:
            return self._requeue(request, now)
        return []

    # -- queries

    def num_emitted(
        self, worker: str, rids: Iterable[str] | None = None
    ) -> dict[str, int]:
        """rid -> tokens delivered, for the requests of a worker: all of them, or those named."""
        if rids is None:
            requests = list(self.requests.values())
        else:
            requests = [self.requests[rid] for rid in rids if rid in self.requests]
        return {
            request.rid: len(request.emitted)
            for request in requests
            if worker in request.workers
        }

    def decoding_workers(self) -> set[str]:
        """Names of the workers whose engines have a sequence to decode now."""
        return {
            request.decode
            for request in self.requests.values()
            if request.phase is Phase.DECODE and request.decode is not None
        }

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> dict[str, int]:
        """The number of queued requests by client; only clients that have any."""
        return self._queue.waiting

    def ready(self, now: float) -> bool:
        """Whether there are workers for a new request, and queued requests get to them."""
        roles = [x.info.role for x in self.workers.values() if now >= x.open_until]
        stuck_s = now - self._stuck_since
        return serves(roles) and stuck_s <= self._config.silence_s

    # -- placement

    def place(self, now: float) -> list[Action]:
        """Move sequences that have to go elsewhere, then start queued requests.

        Due after events that set `needs_placing`: once for all of them is enough.
        """
        self.needs_placing = False
        self._placement = None
        leaving = self._leaving()
        if not self._queue and not leaving:
            self._stuck_since = math.inf
            return []
        placement = Placement(
            self.workers.values(),
            now,
            self._mismatches,
            self._token_bytes,
            self._state_bytes,
        )

        def count(request: RequestState) -> list[Action]:
            placement.count(request)
            return []

        requests = self.requests.values()
        busy = [request for request in requests if request.phase is not Phase.QUEUED]
        actions = self._each_alone(busy, count, now)
        # moves first: their KV is computed, and their workers wait to leave
        actions += self._each_alone(
            leaving, lambda x: self._move(x, placement, now), now
        )
        actions += self._begin_all(placement, now)
        if self._mismatches.are_final:
            actions += self._refuse_unfit(now)
        if actions or len(self._queue) < len(self.requests):
            self._stuck_since = math.inf
        else:
            self._stuck_since = min(self._stuck_since, now)
        self._placement = placement
        return actions

    def _leaving(self) -> list[RequestState]:
        """The requests at workers that stopped decoding."""
        if not self._stopped_decoding:
            return []
        requests = [
            request
            for request in self.requests.values()
            if request.decode in self._stopped_decoding
        ]
        self._stopped_decoding = {x.decode for x in requests if x.decode is not None}
        return requests

    def _move(
        self, request: RequestState, placement: Placement, now: float
    ) -> list[Action]:
        """Ask another worker for room for a sequence that has to move, if one may have some."""
        if request.decode is None or not has_to_move(request, self.workers, now):
            return []
        source = self.workers[request.decode]
        target = placement.choose_target(request, source)
        if target is None:
            return []
        return [reserve_target(request, target.name, source.info.ranks)]

    def _begin_all(self, placement: Placement, now: float) -> list[Action]:
        """Start the queued requests that can start, in the order of the queue.

        After so many the rest is left to another call, so that none takes long.
        """
        actions: list[Action] = []
        for request in self._queue:
            if len(actions) >= STARTS_AT_ONCE:
                self.needs_placing = True
                break
            if now >= request.not_before:
                actions += self._alone(
                    request, lambda x: self._begin(x, placement, now), now
                )
        return actions

    def _begin(
        self, request: RequestState, placement: Placement, now: float
    ) -> list[Action]:
        """Start a queued request, if a pair of workers may have room for it."""
        pair = placement.choose(request)
        if pair is None:
            return []
        self._queue.start(request)
        action = self._starts.begin(request, *pair, now)
        if request.phase is Phase.PREFILL:
            self._queue.end_turn(request)
        placement.add(request)
        return [action]

    def _workers_changed(self) -> None:
        """Other workers take part now, or in other roles."""
        self.needs_placing = True
        self._mismatches.update(self.workers.values())

    def _refuse_unfit(self, now: float) -> list[Action]:
        """Fail the queued requests that need a hand-off which no pair of workers can do."""
        decodes = [x.info for x in self.workers.values() if x.info.role.decodes]
        shortest_split = max((info.min_tokens for info in decodes), default=0)

        def refuse(request: RequestState) -> list[Action]:
            error = self._mismatches.error_of(request.job.codec)
            is_whole = request.num_prompt_tokens < shortest_split
            if error is None or is_whole or request.is_single_token:
                return []
            return self._fail(request, error, now)

        return self._each_alone(self._queue, refuse, now)

    # -- one request at a time

    def _each_alone(
        self, requests: Iterable[RequestState], step: Step, now: float
    ) -> list[Action]:
        """The actions of a step for each request."""
        actions: list[Action] = []
        for request in requests:
            actions += self._alone(request, step, now)
        return actions

    def _alone(self, request: RequestState, step: Step, now: float) -> list[Action]:
        """The actions of a step for a request, which fails if the step breaks."""
        try:
            return step(request)
        except Exception as failure:
            error = as_error(failure, f"request {request.rid} in {request.phase}")
            return self._fail(request, error, now)

    # -- progress and ends

    def _current(self, rid: str, attempt: int) -> RequestState | None:
        """The request, if this is its attempt and some worker has it."""
        request = self.requests.get(rid)
        if request is None or request.phase is Phase.QUEUED:
            return None
        return request if request.job.attempt == attempt else None

    def _learn(
        self, worker: str, request: RequestState | None, event: TokenEvent
    ) -> None:
        """Bytes a token, errors of codecs and speed of the link, from the figures of a hand-off."""
        stats = event.stats or {}
        tokens = stats.get("tokens")
        if tokens:
            self._state_bytes = stats.get("state_bytes", 0)
            kv_bytes = stats.get("resident_bytes", 0) - self._state_bytes
            token_bytes = kv_bytes / tokens
            self._token_bytes = min(token_bytes, self._token_bytes or token_bytes)
        decode = request.decode if request is not None else None
        self.codec_policy.learn(stats, (worker, decode or ""))

    def _progress(self, request: RequestState, worker: str, index: int) -> None:
        """A worker has done its part of an attempt: other requests may take its place."""
        before = request.phase, request.prefill_done
        request.prefill_done = True
        if worker == request.target and request.phase is Phase.MOVE:
            # an earlier index repeats what the source has reported
            if index >= len(request.job.emitted):
                request.decode = worker
                request.target = None
                request.phase = Phase.DECODE
                self.moves += 1
        elif worker == request.decode and not request.is_decoding:
            request.phase = Phase.DECODE
            for name in request.workers:
                if name in self.workers:
                    self.workers[name].reset_failures()
        if (request.phase, request.prefill_done) != before:
            self.needs_placing = True

    def _deliver(
        self, request: RequestState, event: TokenEvent, now: float
    ) -> list[Action]:
        """The next token goes to the client; one that was delivered before is only compared."""
        assert event.token is not None
        num_emitted = len(request.emitted)
        if event.index < num_emitted:
            if event.token != request.emitted[event.index]:
                self.unequal_tokens += 1
            return []
        if event.index > num_emitted:
            return []
        request.emitted.append(event.token)
        request.deadline = now + self._config.deadline_s
        return [TokenOutput(event.rid, event.token, logprobs=event.logprobs)]

    def _finish(
        self, request: RequestState, worker: str, reason: str, now: float
    ) -> list[Action]:
        """All workers forget it, except the prefill worker of a hand-off.

        That one is aborted later, when it has reported the figures.
        """
        del self.requests[request.rid]
        self.needs_placing = True
        spared = request.prefill if worker != request.prefill else None
        return [
            TokenOutput(request.rid, finish_reason=reason),
            *self._abort(request, now, spared),
        ]

    def _fail(
        self, request: RequestState, error: DisaggError, now: float
    ) -> list[Action]:
        self.requests.pop(request.rid, None)
        self._leave_queue(request)
        self.needs_placing = True
        return [*self._abort(request, now), FailRequest(request.rid, error)]

    def _leave_queue(self, request: RequestState) -> None:
        """It is over. If it has no room yet, its client's turn is still to come."""
        self._queue.discard(request)
        if request.phase is Phase.RESERVE:
            self._queue.give_back(request)

    # -- errors

    def _on_error(
        self, request: RequestState, worker: str, error: DisaggError, now: float
    ) -> list[Action]:
        if worker not in request.workers or worker not in self.workers:
            return []  # the request has left this worker
        if request.is_decoding and worker not in (request.decode, request.target):
            # the hand-off is complete, but the prefill worker got no acknowledgement
            return [AbortAttempt(worker, request.rid, request.job.attempt)]
        return self._on_refusal(request, worker, error, now)

    def _on_refusal(
        self, request: RequestState, worker: str, error: DisaggError, now: float
    ) -> list[Action]:
        """A worker cannot do its part of the attempt."""
        is_full = isinstance(error, CapacityError)
        is_mismatch = isinstance(error, MISMATCHES) and self._is_new_mismatch(request)
        if is_mismatch and request.phase is not Phase.DECODE:
            return self._on_mismatch(request, error, now)
        if request.phase is Phase.DECODE and worker == request.target:
            return self._on_move_refused(request, worker, is_full, now)
        if is_full and request.phase is Phase.RESERVE:
            self._refuse_room(request, worker, now)
            request.not_before = now
            self._enqueue(request)
            return []
        is_moving_away = request.phase is Phase.MOVE and worker == request.decode
        if is_full and is_moving_away and request.target:
            # it outgrew its reservation before the move began
            request.phase = Phase.DECODE
            return [reserve_more(request, request.target)]
        return self._retry_or_fail(request, worker, error, now)

    def _is_new_mismatch(self, request: RequestState) -> bool:
        """Take note that the workers of a hand-off do not fit; whether that was unknown."""
        sender = request.decode if request.is_decoding else request.prefill
        receiver = request.target if request.is_decoding else request.decode
        if sender is None or receiver is None or sender == receiver:
            return False
        return self._mismatches.add(sender, receiver, request.job.codec)

    def _on_mismatch(
        self, request: RequestState, error: DisaggError, now: float
    ) -> list[Action]:
        """Try another pair at once, if there is one; neither worker has failed."""
        codec = request.job.codec
        if self._mismatches.exclude_all(self.workers.values(), codec, error):
            return self._fail(request, error, now)
        return self._requeue(request, now)

    def _on_move_refused(
        self, request: RequestState, worker: str, is_full: bool, now: float
    ) -> list[Action]:
        """The sequence decodes on where it is, and asks for room again later.

        A worker that refused for another reason than lack of room is not asked again.
        """
        request.target = None
        if not is_full:
            request.not_before = now + MOVE_RETRY_S
            request.avoid = frozenset({worker})
            return []
        self._refuse_room(request, worker, now)
        request.not_before = now + FULL_S
        self.needs_placing = True
        return []

    def _refuse_room(self, request: RequestState, worker: str, now: float) -> None:
        self.workers[worker].refuse_room(len(request.job.prompt), now + FULL_S)
        request.target = None

    def _retry_or_fail(
        self, request: RequestState, worker: str, error: DisaggError, now: float
    ) -> list[Action]:
        """Try again elsewhere, unless that can never succeed."""
        request.refusals += 1
        if is_final(error, request.refusals, self._config.max_attempts):
            return self._fail(request, error, now)
        if not isinstance(error, CapacityError):
            blame(request, worker, error, self.workers, now)
        request.avoid = frozenset(request.workers)
        request.not_before = now + pause_s(request.refusals)
        return self._requeue(request, now)

    def _restart_or_fail(self, request: RequestState, now: float) -> list[Action]:
        if request.deaths < self._config.max_attempts:
            return self._requeue(request, now)
        error = PeerLostError(
            f"{request.deaths} workers died under this request; given up"
        )
        return self._fail(request, error, now)

    def _requeue(self, request: RequestState, now: float) -> list[Action]:
        """Back to the queue; the workers that live abort the attempt."""
        if request.phase is not Phase.RESERVE:  # before, no engine has begun
            self.retries += 1
        actions = self._abort(request, now)
        self._enqueue(request)
        return actions

    def _enqueue(self, request: RequestState) -> None:
        if request.phase is Phase.RESERVE:
            self._queue.give_back(request)
        request.phase = Phase.QUEUED
        request.prefill = None
        request.decode = None
        request.target = None
        self._queue.add(request)
        self.needs_placing = True

    def _abort(
        self, request: RequestState, now: float, spared: str | None = None
    ) -> list[Action]:
        """Every living worker of the attempt aborts it, except the spared one."""
        names = [x for x in request.workers if x in self.workers and x != spared]
        return [*self._aborts.abort(request, names, now)]
