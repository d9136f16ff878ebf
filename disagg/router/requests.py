"""The life of requests as the router sees it: events in, actions out. No clock, no sockets.

           a pair has room            granted           first token from D
    QUEUED ───────────────► RESERVE ─────────► PREFILL ───────────────────► DECODE ──► done
      ▲                        │ D is full        │ refused, P or D dead       │ D dead
      └────────────────────────┴──────────────────┴────────────────────────────┘ next attempt
    local work (a single token, or a worker of both roles) needs no grant
    DECODE at a worker that stops decoding: room at another ─► MOVE ─► DECODE there
    from anywhere: client gone, no token for deadline_s, deaths ─► abort at P and D ─► done

Decisions are pure: each method of `RequestTable` takes one event, changes the table and returns
actions; `router.py` performs them. So the rules can be tested event by event, without a worker.

This is the only queue. A request leaves it when a prefill worker P can start it and a decode worker
D grants room; workers keep no queue, and a full one blocks no other. The request with the least
work left goes first, and waiting makes up for work. A token is identified by (rid, attempt, index)
and delivered once. The table keeps every token it delivered, so that the next attempt can replay
them. A sequence that moves stays the same attempt: both workers may report a token of it.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from disagg.config import AUTO, RouterConfig
from disagg.engine.sequence import urgency
from disagg.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    DisaggError,
    PeerLostError,
    RequestError,
    TransferError,
)
from disagg.router.actions import (
    AbortAttempt,
    Action,
    FailRequest,
    Reserve,
    Start,
    TokenOutput,
)
from disagg.router.codec_policy import CodecPolicy
from disagg.router.placement import Placement
from disagg.router.prefix_index import keys_of, reason_of
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

# tokens that a sequence decodes on while its pages are copied to another worker
MOVE_TOKENS = 24
# pause of a request after a refusal, doubled up to the maximum
RETRY_S = 0.1
MAX_RETRY_S = 1.0
# how long a refusal for want of room keeps requests as long away from a worker
FULL_S = 0.25
# pause of a sequence before it asks another worker for room
MOVE_RETRY_S = 1.0
# within this time a worker reports the sequences that one that left handed over to it
SPEAKS_S = 5.0
# an abort is not repeated sooner
ABORT_AGAIN_S = 1.0
# factor of `WorkerState.recent_tokens` at each tick
FADE = 0.966
# another worker would fail in the same way
PERMANENT = (RequestError, ConfigError)
# these may pass, so only the deadline limits the attempts
PASSING = (TransferError, CapacityError)


Phase = StrEnum("Phase", ["QUEUED", "RESERVE", "PREFILL", "DECODE", "MOVE"])


@dataclass
class RequestState:
    """One request.

    job:             its current attempt, which began at `attempt_began`
    at:              the prefill and decode worker it has to use while they take part; "": any
    prompt_keys, page_keys: of its beginnings, as tokens and as pages of its codec
    cached_tokens:   of the prompt; `prefill` probably need not compute them
    prefill, decode: names of its workers; the same name for local work
    target:          name of the worker it is to move to
    prefill_done:    its prefill worker has nothing more to compute
    sender_left_at:  when the worker that hands it over left
    avoid:           names of the pair that refused it last
    blamed_workers:  every worker that it has counted a failure for
    emitted:         tokens that were delivered
    deaths:          of workers that computed nothing else
    exclusive:       it runs alone on its workers, as it may cost one more death
    codec_reason:    why the service chose its codec, if it did
    """

    job: Job
    arrived: float
    deadline: float
    phase: Phase = Phase.QUEUED
    at: tuple[str, str] = ("", "")
    prompt_keys: tuple[bytes, ...] = ()
    page_keys: tuple[bytes, ...] = ()
    cached_tokens: int = 0
    prefill: str | None = None
    decode: str | None = None
    target: str | None = None
    prefill_done: bool = False
    sender_left_at: float = math.inf
    avoid: frozenset[str] = frozenset()
    blamed_workers: set[str] = field(default_factory=set)
    emitted: list[int] = field(default_factory=list)
    deaths: int = 0
    exclusive: bool = False
    refusals: int = 0
    not_before: float = 0.0
    attempt_began: float = 0.0
    codec_reason: str = ""

    @property
    def rid(self) -> str:
        return self.job.rid

    @property
    def workers(self) -> list[str]:
        """Names of its workers, each once."""
        names = dict.fromkeys([self.prefill, self.decode, self.target])
        return [name for name in names if name is not None]

    @property
    def is_decoding(self) -> bool:
        return self.phase in (Phase.DECODE, Phase.MOVE)

    @property
    def is_single_token(self) -> bool:
        """Whether prefill's first token is the whole answer."""
        return self.job.sampling.get("max_tokens") == 1

    @property
    def computed_by(self) -> str | None:
        """The worker whose engine works on it now."""
        if self.phase is Phase.PREFILL and not self.prefill_done:
            return self.prefill
        return self.decode if self.is_decoding else None

    @property
    def sender(self) -> str | None:
        """The worker that has computed its part and hands it over to another."""
        if self.phase is Phase.PREFILL and self.prefill_done:
            return self.prefill
        return self.decode if self.phase is Phase.MOVE else None

    @property
    def spare_tokens(self) -> int:
        """Room for tokens that the answer had not reached when it asked its target for room."""
        return self.job.moved - len(self.job.prompt) - len(self.job.emitted)

    def urgency(self, now: float) -> float:
        """Lower goes first, by the rule of the engine."""
        return urgency(len(self.job.prompt), now - self.arrived)


class RequestTable:
    """All requests and all workers. Each method takes one event and returns the actions due.

    unequal_tokens: repeated tokens that differ from what was delivered before
    routed:         times by (role, reason why a worker of this role was chosen)
    """

    def __init__(self, config: RouterConfig | None = None):
        self.requests: dict[str, RequestState] = {}
        self.workers: dict[str, WorkerState] = {}
        self.codec_policy = CodecPolicy()
        self.unequal_tokens = 0
        self.retries = 0
        self.moves = 0
        self.routed: Counter[tuple[str, str]] = Counter()
        self._config = config or RouterConfig()
        # (worker, rid) -> when the worker was last asked to abort the request
        self._aborted_at: dict[tuple[str, str], float] = {}
        # bytes a token under the smallest codec so far: the least that a prompt takes
        self._token_bytes = 0.0
        # since when every request is queued and none can start
        self._stuck_since = math.inf

    # -- events

    def submit(
        self, job: Job, now: float, at: tuple[str, str] = ("", "")
    ) -> list[Action]:
        """A new request; it starts at once if there is room. at: as in `RequestState`.

        Tokens that the job has emitted were delivered before: it is replayed through them.
        """
        self.requests[job.rid] = RequestState(
            job,
            arrived=now - job.waited_s,
            deadline=now + self._config.deadline_s,
            at=at,
            prompt_keys=keys_of(job.prompt),
            page_keys=keys_of(job.prompt, job.codec or "default"),
            emitted=list(job.emitted),
        )
        return self._place(now)

    def cancel(self, rid: str, now: float) -> list[Action]:
        """The client is gone or has enough; both workers abort the request."""
        request = self.requests.pop(rid, None)
        if request is None:
            return []
        return self._abort(request, now) + self._place(now)

    def worker_up(self, info: WorkerInfo, now: float) -> list[Action]:
        """A worker is ready, as a new incarnation if it was before; waiting requests may start."""
        actions = self.worker_down(info.name, now, fenced=True)
        self.workers[info.name] = WorkerState(info)
        return actions + self._place(now)

    def worker_down(self, name: str, now: float, fenced: bool = False) -> list[Action]:
        """A worker is dead, or drops its requests (fenced): they start again elsewhere.

        If it died while it computed a single request, that request is charged with the death.
        Before the last death that a request may cost it runs alone; after it, it fails.
        A worker that announced that it leaves is charged to no request: it ends when it has handed
        over everything, and the receiving workers are about to report those sequences.
        """
        worker = self.workers.pop(name, None)
        if worker is None:
            return []
        has_left = worker.info.role is Role.NONE
        if not has_left:
            self._charge_death(name)
        actions: list[Action] = []
        for request in list(self.requests.values()):
            if request.phase is Phase.DECODE and name == request.target:
                request.target = None
            if has_left and name == request.sender and not fenced:
                request.sender_left_at = now
            elif self._depends_on(request, name):
                actions += self._restart_or_fail(request, now)
        return actions + self._place(now)

    def update_load(self, worker: str, load: Load, now: float) -> list[Action]:
        """A worker reports what it could take."""
        state = self.workers.get(worker)
        if state is None or not state.update_load(load):
            return []
        return self._place(now)

    def on_grant(
        self, worker: str, rid: str, attempt: int, grant: Grant
    ) -> list[Action]:
        """A decode worker has reserved room. (If the request is over, an abort is on its way.)"""
        request = self._current(rid, attempt)
        if request is None:
            return []
        if worker not in request.workers:  # another worker was asked since
            return [AbortAttempt(worker, rid, attempt)]
        if request.phase is Phase.RESERVE and request.prefill:
            request.phase = Phase.PREFILL
            return [Start(request.prefill, request.job, Work.PREFILL, worker, grant)]
        if (
            request.phase is Phase.DECODE
            and request.decode
            and worker == request.target
        ):
            emitted_since = len(request.emitted) - len(request.job.emitted)
            if 2 * emitted_since > request.spare_tokens:
                return [self._reserve_more(request, self.workers[worker])]
            request.phase = Phase.MOVE
            return [Start(request.decode, request.job, Work.MOVE, worker, grant)]
        return []

    def on_event(self, worker: str, event: TokenEvent, now: float) -> list[Action]:
        """A worker reports figures, an error, a token or the end of an attempt."""
        request = self._current(event.rid, event.attempt)
        if event.stats:
            self._learn(worker, request, event)
        if request is None:
            return self._abort_stale(worker, event, now)
        if event.error is not None:
            return self._on_error(request, worker, event.error, now)

        num_emitted = len(request.emitted)
        actions = self._progress(request, worker, event.index, now)
        if event.token is not None:
            actions = self._deliver(request, event, now) + actions
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
        """Give up what is too late, start what can start."""
        self._aborted_at = {
            key: aborted_at
            for key, aborted_at in self._aborted_at.items()
            if now < aborted_at + ABORT_AGAIN_S
        }
        for worker in self.workers.values():
            worker.recent_tokens *= FADE
        actions: list[Action] = []
        for request in list(self.requests.values()):
            is_silent = now >= request.sender_left_at + SPEAKS_S
            if is_silent and request.sender and request.sender not in self.workers:
                actions += self._requeue(request, now)
        for request in list(self.requests.values()):
            if now >= request.deadline:
                error = DeadlineError(
                    f"no token in {self._config.deadline_s:g} s; "
                    f"the request was in {request.phase}"
                )
                actions += self._fail(request, error, now)
        return actions + self._place(now)

    # -- queries

    def num_emitted(self, worker: str) -> dict[str, int]:
        """rid -> tokens delivered, for the requests of a worker."""
        return {
            request.rid: len(request.emitted)
            for request in self.requests.values()
            if worker in request.workers
        }

    def ready(self, now: float) -> bool:
        """Whether a request that came now could hope for an answer."""
        roles = [x.info.role for x in self.workers.values() if now >= x.open_until]
        stuck_s = now - self._stuck_since
        return serves(roles) and stuck_s <= self._config.silence_s

    # -- placement

    def _place(self, now: float) -> list[Action]:
        """Move sequences that have to go elsewhere, then start queued requests."""
        requests = self.requests.values()
        queued = [x for x in requests if x.phase is Phase.QUEUED]
        leaving = [x for x in requests if self._has_to_move(x, now)]
        if not queued and not leaving:
            self._stuck_since = math.inf
            return []
        placement = Placement(requests, self.workers.values(), now)
        # moves first: their KV is computed, and their workers wait to leave
        actions = self._move_all(leaving, placement)
        actions += self._begin_all(queued, placement, now)
        if actions or len(queued) < len(self.requests):
            self._stuck_since = math.inf
        else:
            self._stuck_since = min(self._stuck_since, now)
        return actions

    def _move_all(
        self, requests: Iterable[RequestState], placement: Placement
    ) -> list[Action]:
        actions: list[Action] = []
        for request in requests:
            tokens = len(request.job.prompt) + len(request.emitted)
            target = placement.choose_target(request, tokens * self._token_bytes)
            if target is not None:
                actions.append(self._reserve_target(request, target))
        return actions

    def _begin_all(
        self, queued: Iterable[RequestState], placement: Placement, now: float
    ) -> list[Action]:
        """Start what can start, the most urgent first."""
        actions: list[Action] = []
        waiting = [request for request in queued if now >= request.not_before]
        waiting.sort(key=lambda request: (not request.exclusive, request.urgency(now)))
        for request in waiting:
            nbytes = len(request.job.prompt) * self._token_bytes
            pair = placement.choose(request, nbytes)
            if pair is not None:
                prefill, decode = pair
                actions.append(self._begin(request, prefill, decode, now))
                placement.add(request)
        return actions

    def _begin(
        self,
        request: RequestState,
        prefill: WorkerState,
        decode: WorkerState,
        now: float,
    ) -> Action:
        """The next attempt, on this pair."""
        if request.job.codec == AUTO:
            self._choose_codec(request, prefill, decode, now)
        self._count_prefixes(request, prefill, decode)
        prefill.recent_tokens += len(request.job.prompt) - request.cached_tokens
        prefill.pause(now)
        decode.pause(now)
        request.prefill = prefill.name
        request.decode = decode.name
        request.prefill_done = False
        request.attempt_began = now
        request.job = replace(
            request.job,
            attempt=request.job.attempt + 1,
            emitted=tuple(request.emitted),
            deadline_s=request.deadline - now,
            moved=0,
            waited_s=now - request.arrived,
        )
        if prefill is decode:
            request.phase = Phase.PREFILL
            return Start(prefill.name, request.job, Work.LOCAL)
        request.phase = Phase.RESERVE
        return Reserve(decode.name, request.job)

    def _choose_codec(
        self,
        request: RequestState,
        prefill: WorkerState,
        decode: WorkerState,
        now: float,
    ) -> None:
        """Its codec, for life: one of those that the decode worker lists."""
        prompt = request.job.prompt
        bytes_of = decode.info.bytes_of
        bytes_ahead = sum(
            bytes_of(other.job.codec, len(other.job.prompt))
            for other in self.requests.values()
            if other.prefill == prefill.name and not other.is_decoding
        )
        codec, reason = self.codec_policy.choose(
            {name: bytes_of(name, len(prompt)) for name in decode.info.sizes},
            budget=self._config.error_budget,
            free_bytes=decode.load.free_bytes,
            pair=(prefill.name, decode.name),
            left_s=request.arrived + self._config.first_decode_s - now,
            ahead_bytes=bytes_ahead,
        )
        request.codec_reason = reason
        request.job = replace(request.job, codec=codec)
        request.page_keys = keys_of(prompt, codec)

    def _count_prefixes(
        self, request: RequestState, prefill: WorkerState, decode: WorkerState
    ) -> None:
        """Count why a request goes to these workers, and what they hold of it from now on."""
        prefill_tokens = prefill.prefixes.tokens(request.prompt_keys)
        request.cached_tokens = min(prefill_tokens, len(request.job.prompt) - 1)
        self._count_prefix(Role.PREFILL, prefill, request.prompt_keys)
        if decode is not prefill:
            self._count_prefix(Role.DECODE, decode, request.page_keys)

    def _count_prefix(
        self, role: Role, worker: WorkerState, keys: tuple[bytes, ...]
    ) -> None:
        longest = max(x.prefixes.tokens(keys) for x in self.workers.values())
        reason = reason_of(worker.prefixes.tokens(keys), longest)
        self.routed[role.value, reason] += 1
        worker.prefixes.add(keys)

    # -- moves

    def _has_to_move(self, request: RequestState, now: float) -> bool:
        """Whether a sequence has to go elsewhere, and has more than a few tokens left.

        A sequence with log-probabilities stays: both workers would have to report equal ones.
        """
        if request.phase is not Phase.DECODE or request.decode is None:
            return False
        if request.target or now < request.not_before:
            return False
        if self.workers[request.decode].info.role.decodes:
            return False
        sampling = request.job.sampling
        tokens_left = sampling.get("max_tokens", 0) - len(request.emitted)
        return tokens_left > MOVE_TOKENS and sampling.get("logprobs") is None

    def _reserve_target(
        self,
        request: RequestState,
        target: WorkerState,
        spare_tokens: int = MOVE_TOKENS,
    ) -> Action:
        """Ask for room for the sequence as it will be when its pages have arrived."""
        tokens = len(request.job.prompt) + len(request.emitted) + spare_tokens
        request.target = target.name
        request.job = replace(request.job, emitted=tuple(request.emitted), moved=tokens)
        return Reserve(target.name, request.job)

    def _reserve_more(self, request: RequestState, target: WorkerState) -> Action:
        """The sequence outgrew its reservation, or is about to: ask for one twice as spacious."""
        return self._reserve_target(request, target, 2 * request.spare_tokens)

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
            token_bytes = stats.get("resident_bytes", 0) / tokens
            self._token_bytes = min(token_bytes, self._token_bytes or token_bytes)
        decode = request.decode if request is not None else None
        self.codec_policy.learn(stats, (worker, decode or ""))

    def _progress(
        self, request: RequestState, worker: str, index: int, now: float
    ) -> list[Action]:
        """A worker did its part of an attempt: the next prompt may take its place."""
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
        if (request.phase, request.prefill_done) == before:
            return []
        return self._place(now)

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
        spared = request.prefill if worker != request.prefill else None
        return [
            TokenOutput(request.rid, finish_reason=reason),
            *self._abort(request, now, spared),
            *self._place(now),
        ]

    def _fail(
        self, request: RequestState, error: DisaggError, now: float
    ) -> list[Action]:
        del self.requests[request.rid]
        return [*self._abort(request, now), FailRequest(request.rid, error)]

    # -- errors

    def _on_error(
        self, request: RequestState, worker: str, error: DisaggError, now: float
    ) -> list[Action]:
        if worker not in request.workers or worker not in self.workers:
            return []  # the request was taken from it when it died
        if request.is_decoding and worker not in (request.decode, request.target):
            # it did its part, but the acknowledgement was lost
            return [AbortAttempt(worker, request.rid, request.job.attempt)]
        return self._on_refusal(request, worker, error, now)

    def _on_refusal(
        self, request: RequestState, worker: str, error: DisaggError, now: float
    ) -> list[Action]:
        """A worker could not do its part."""
        is_full = isinstance(error, CapacityError)
        if request.phase is Phase.DECODE and worker == request.target:
            return self._on_move_refused(request, worker, is_full, now)
        if is_full and request.phase is Phase.RESERVE:
            self._refuse_room(request, worker, now)
            request.phase = Phase.QUEUED
            request.prefill = None
            request.decode = None
            request.not_before = now
            return self._place(now)
        is_moving_away = request.phase is Phase.MOVE and worker == request.decode
        if is_full and is_moving_away and request.target:
            # it outgrew its reservation before the move began
            request.phase = Phase.DECODE
            return [self._reserve_more(request, self.workers[request.target])]
        return self._retry_or_fail(request, worker, error, now)

    def _on_move_refused(
        self, request: RequestState, worker: str, is_full: bool, now: float
    ) -> list[Action]:
        """The sequence decodes on where it is, and asks for room again later.

        A worker that refused for another reason than room is asked no more: it was told to abort
        the attempt, so it could never take it.
        """
        request.target = None
        if not is_full:
            request.not_before = now + MOVE_RETRY_S
            request.avoid = frozenset({worker})
            return []
        self._refuse_room(request, worker, now)
        request.not_before = now + FULL_S
        return self._place(now)

    def _refuse_room(self, request: RequestState, worker: str, now: float) -> None:
        self.workers[worker].refuse_room(len(request.job.prompt), now + FULL_S)
        request.target = None

    def _retry_or_fail(
        self, request: RequestState, worker: str, error: DisaggError, now: float
    ) -> list[Action]:
        """Try again elsewhere, unless that can never succeed."""
        request.refusals += 1
        is_hopeless = request.refusals >= self._config.max_attempts
        if isinstance(error, PASSING):
            is_hopeless = False
        if is_hopeless or isinstance(error, PERMANENT):
            return self._fail(request, error, now) + self._place(now)

        if not isinstance(error, CapacityError):
            self._blame(request, worker, error, now)
        request.avoid = frozenset(request.workers)
        doublings = min(10, request.refusals - 1)
        request.not_before = now + min(MAX_RETRY_S, RETRY_S * 2**doublings)
        return self._requeue(request, now) + self._place(now)

    def _blame(
        self, request: RequestState, worker: str, error: DisaggError, now: float
    ) -> None:
        """Count a failure of the worker; of both, if a hand-off broke.

        A worker is blamed once for a request, so that a bad request opens no breaker.
        """
        is_prefilling = worker == request.prefill and not request.is_decoding
        if is_prefilling and isinstance(error, TransferError):
            names = set(request.workers)
        else:
            names = {worker}
        names -= request.blamed_workers
        request.blamed_workers |= names
        for name in names:
            if name in self.workers:
                self.workers[name].add_failure(request.attempt_began, now)

    def _charge_death(self, name: str) -> None:
        """Charge the request that a dead worker computed, if it was the only one."""
        computed = [x for x in self.requests.values() if x.computed_by == name]
        if len(computed) == 1:
            (request,) = computed
            request.deaths += 1
            request.exclusive = request.deaths >= self._config.max_attempts - 1

    def _depends_on(self, request: RequestState, name: str) -> bool:
        """Whether an attempt cannot go on without this worker."""
        if request.is_decoding:
            return name in (request.decode, request.target)
        return name in request.workers

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
        request.phase = Phase.QUEUED
        request.prefill = None
        request.decode = None
        request.target = None
        return actions

    # -- aborts

    def _abort(
        self, request: RequestState, now: float, spared: str | None = None
    ) -> list[Action]:
        """Every living worker of the attempt aborts it, except the spared one."""
        actions: list[Action] = []
        for name in request.workers:
            if name in self.workers and name != spared:
                self._aborted_at[name, request.rid] = now
                actions.append(AbortAttempt(name, request.rid, request.job.attempt))
        return actions

    def _abort_stale(self, worker: str, event: TokenEvent, now: float) -> list[Action]:
        """A worker reports an attempt that is over: its abort was lost, so repeat it.

        Figures alone are no reason: they may come after the end. A worker that is gone, or was
        sent an abort a moment ago, gets none.
        """
        has_only_figures = (
            event.token is None and not event.error and not event.finish_reason
        )
        if has_only_figures or worker not in self.workers:
            return []
        aborted_at = self._aborted_at.get((worker, event.rid), -math.inf)
        if now < aborted_at + ABORT_AGAIN_S:
            return []
        self._aborted_at[worker, event.rid] = now
        return [AbortAttempt(worker, event.rid, event.attempt)]
