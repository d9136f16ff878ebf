"""The life of requests as the router sees it: events in, actions out. No clock, no sockets.

           a pair has room            granted           first token from D
    QUEUED ───────────────► RESERVE ─────────► PREFILL ───────────────────► DECODE ──► done
      ▲                        │ D is full        │ refused, P or D dead       │ D dead
      └────────────────────────┴──────────────────┴────────────────────────────┘ next attempt
    local work (a single token, or a worker of both roles) needs no grant
    DECODE at a worker that shall decode no longer: room at another ─► MOVE ─► DECODE there
    from anywhere: client gone, no token for deadline_s, deaths ─► Forget at P and D ─► done

This is the one queue. A request leaves it when a prefill worker P can start it and a decode worker
D promises room, so that workers keep no queue and one that is full holds up nobody. Those with the
least work left go first; waiting makes up for work. A token has the name (rid, attempt, index) and
is delivered once; what was delivered is kept here, so that the next attempt replays it. A sequence
that moves stays the same attempt: what both workers say of it is delivered once, as anything else.
"""

import math
from collections import Counter
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
from disagg.router.actions import AbortAttempt, Action, EmitToken, Reserve, Start
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

MOVE_TOKENS = (
    24  # that a sequence decodes on while its pages are copied to another worker
)
RETRY_S, FULL_S = (
    0.1,
    0.25,
)  # pause after a refusal, doubled up to 1 s; after one for want of room
STAYS_S = 1.0  # before a sequence that was refused asks another worker for room
SPEAKS_S = 5.0  # a worker speaks sooner of what it has from one that left
TOLD_S = 1.0  # an abort is not repeated sooner
FADE = (
    0.966  # what is left at each tick of the weight of tokens given to a worker lately
)
PERMANENT = (RequestError, ConfigError)  # another worker would say the same
PASSING = (TransferError, CapacityError)  # may be over soon; the deadline decides


Phase = StrEnum("Phase", ["QUEUED", "RESERVE", "PREFILL", "DECODE", "MOVE"])


@dataclass
class RequestState:
    """One request.

    job:      its attempt of now, from `began` on · emitted: what was delivered
    prefill, decode: its workers, one for local work · target: where it is to go on
    at:       its prefill and its decode worker, while they take part; "": any
    exact, pages: keys of its beginnings · cached: tokens that `prefill` need not compute, probably
    avoid:    the pair that refused it last · blamed: whoever failed it ever
    computed: its prefill worker has no more to compute · handed: when its giver left
    choice:   why it has its codec, where that was left to the service
    deaths:   of workers that computed nothing else · alone: it may cost one more
    """

    job: Job
    arrived: float
    deadline: float
    phase: Phase = Phase.QUEUED
    at: tuple[str, str] = ("", "")
    exact: tuple[bytes, ...] = ()
    pages: tuple[bytes, ...] = ()
    cached: int = 0
    prefill: str | None = None
    decode: str | None = None
    target: str | None = None
    handed: float = math.inf
    avoid: frozenset[str] = frozenset()
    blamed: set[str] = field(default_factory=set)
    computed: bool = False
    emitted: list[int] = field(default_factory=list)
    deaths: int = 0
    alone: bool = False
    refusals: int = 0
    not_before: float = 0.0
    began: float = 0.0
    choice: str = ""

    @property
    def workers(self) -> list[str]:
        return list(
            dict.fromkeys(filter(None, (self.prefill, self.decode, self.target)))
        )

    @property
    def decodes(self) -> bool:
        """Whether its prompt is done with."""
        return self.phase in (Phase.DECODE, Phase.MOVE)

    @property
    def computed_by(self) -> str | None:
        """Whose engine works on it now."""
        if self.phase is Phase.PREFILL and not self.computed:
            return self.prefill
        return self.decode if self.decodes else None

    @property
    def giver(self) -> str | None:
        """Who has computed what it had to, and hands it to another worker."""
        if self.phase is Phase.PREFILL and self.computed:
            return self.prefill
        return self.decode if self.phase is Phase.MOVE else None

    @property
    def ahead(self) -> int:
        """Tokens of its answer that it was promised room for before they were known."""
        return self.job.moved - len(self.job.prompt) - len(self.job.emitted)

    @property
    def single(self) -> bool:
        """Whether prefill's first token is the whole answer."""
        return self.job.sampling.get("max_tokens") == 1

    def urgency(self, now: float) -> float:
        """Lower goes first, by the rule of the engine."""
        return urgency(len(self.job.prompt), now - self.arrived)


class RequestTable:
    """All requests and all workers. Every method takes one event and says what is to be done."""

    def __init__(self, config: RouterConfig | None = None):
        self.entries: dict[str, RequestState] = {}
        self.members: dict[str, WorkerState] = {}
        self.unequal_tokens = (
            0  # repeated tokens that were not what was delivered before
        )
        self.retries = self.moves = 0
        self.routed: Counter[tuple[str, str]] = (
            Counter()
        )  # (role, why a worker of it was chosen)
        self.choices = CodecPolicy()
        self._config = config or RouterConfig()
        self._told: dict[
            tuple[str, str], float
        ] = {}  # (worker, rid) -> when it was told to forget
        self._token_bytes = (
            0.0  # of the smallest codec seen: what a prompt takes at least
        )
        self._stuck_since = math.inf  # all that is here waits since

    def submit(
        self, job: Job, now: float, at: tuple[str, str] = ("", "")
    ) -> list[Action]:
        """A new request; it starts at once if there is room. at: as in `RequestState`."""
        deadline = now + self._config.deadline_s
        keys = keys_of(job.prompt), keys_of(job.prompt, job.codec or "default")
        self.entries[job.rid] = RequestState(
            job, now, deadline, at=at, exact=keys[0], pages=keys[1]
        )
        return self._place(now)

    def cancel(self, rid: str, now: float) -> list[Action]:
        """The client is gone or has enough; both sides forget the request."""
        entry = self.entries.pop(rid, None)
        return [*self._forget(entry, now), *self._place(now)] if entry else []

    def worker_up(self, started: WorkerInfo, now: float) -> list[Action]:
        """A worker is ready, as a new incarnation if it was before; waiting requests may start."""
        actions = self.worker_down(started.name, now, fenced=True)
        self.members[started.name] = WorkerState(started)
        return actions + self._place(now)

    def worker_down(self, name: str, now: float, fenced: bool = False) -> list[Action]:
        """A worker is dead, or drops what it has (fenced): that starts again elsewhere.

        A request is charged with a death where nothing else was computed there and the worker had
        not said that it leaves: before the last that it may cost it runs alone, after it it is
        refused. Who leaves does so when all is handed over: the other worker speaks of it soon.
        """
        actions: list[Action] = []
        if not (member := self.members.pop(name, None)):
            return actions
        leaves = member.started.role is Role.NONE
        computed = [
            entry for entry in self.entries.values() if entry.computed_by == name
        ]
        for entry in computed if len(computed) == 1 and not leaves else ():
            entry.deaths += 1
            entry.alone = entry.deaths >= self._config.max_attempts - 1
        for entry in list(self.entries.values()):
            if entry.phase is Phase.DECODE and name == entry.target:
                entry.target = None
            if leaves and name == entry.giver and not fenced:
                entry.handed = now
                continue
            lives = entry.decodes and name not in (entry.decode, entry.target)
            if lives or name not in entry.workers:
                continue
            if entry.deaths < self._config.max_attempts:
                actions += self._requeue(entry, now)
            else:
                died = PeerLostError(
                    f"{entry.deaths} workers died under this request; given up"
                )
                actions += self._fail(entry, died, now)
        return actions + self._place(now)

    def load(self, worker: str, load: Load, now: float) -> list[Action]:
        """A worker says what it could take."""
        member = self.members.get(worker)
        return self._place(now) if member and member.says(load) else []

    def granted(
        self, worker: str, rid: str, attempt: int, grant: Grant
    ) -> list[Action]:
        """A decode worker has room; if the request is over, it was told to forget it."""
        entry = self._current(rid, attempt)
        if entry and worker not in entry.workers:  # another was asked since
            return [AbortAttempt(worker, rid, attempt)]
        if entry and entry.prefill and entry.phase is Phase.RESERVE:
            entry.phase = Phase.PREFILL
            return [Start(entry.prefill, entry.job, Work.PREFILL, worker, grant)]
        if (
            entry
            and entry.decode
            and worker == entry.target
            and entry.phase is Phase.DECODE
        ):
            if (
                2 * (len(entry.emitted) - len(entry.job.emitted)) > entry.ahead
            ):  # while it waited
                return [self._move(entry, self.members[worker], 2 * entry.ahead)]
            entry.phase = Phase.MOVE
            return [Start(entry.decode, entry.job, Work.MOVE, worker, grant)]
        return []

    def hear(self, worker: str, event: TokenEvent, now: float) -> list[Action]:
        """A worker says something about an attempt: figures, an error, a token, the end."""
        rid, token, index = event.rid, event.token, event.index
        if event.stats and (tokens := event.stats.get("tokens")):
            seen = event.stats.get("resident_bytes", 0) / tokens
            self._token_bytes = min(seen, self._token_bytes or seen)
        entry = self._current(rid, event.attempt)
        self.choices.learn(event.stats or {}, (worker, (entry and entry.decode) or ""))
        if (
            entry is None
        ):  # where it is more than figures, what told it to stop was lost
            more = token is not None or event.error or event.finish_reason
            return self._tell(worker, rid, event.attempt, now) if more else []
        if event.error is not None:
            if worker not in entry.workers or worker not in self.members:
                return []  # it was given up when that worker died
            if entry.decodes and worker not in (entry.decode, entry.target):
                return [
                    AbortAttempt(worker, rid, event.attempt)
                ]  # it did its part, and never heard so
            return self._refuse(entry, worker, event.error, now)
        known, actions = len(entry.emitted), self._progress(entry, worker, index, now)
        if token is not None and index < known:
            self.unequal_tokens += entry.emitted[index] != token
        elif token is not None and index == known:
            entry.emitted.append(token)
            entry.deadline = now + self._config.deadline_s
            actions.insert(0, EmitToken(rid, token, event.logprobs))
        if index > known or (event.finish_reason and index + 1 != len(entry.emitted)):
            gap = TransferError(f"token {index} came when {known} were known")
            return actions + self._refuse(entry, worker, gap, now)
        return actions + (
            self._finish(entry, worker, event, now) if event.finish_reason else []
        )

    def tick(self, now: float) -> list[Action]:
        """Give up what is too late, start what can start."""
        self._told = {
            key: told for key, told in self._told.items() if now < told + TOLD_S
        }
        for member in self.members.values():
            member.recent *= FADE
        actions: list[Action] = []
        for entry in [x for x in self.entries.values() if now >= x.handed + SPEAKS_S]:
            if entry.giver not in {None, *self.members}:
                actions += self._requeue(entry, now)
        for entry in [x for x in self.entries.values() if now >= x.deadline]:
            late = f"no token in {self._config.deadline_s:g} s; the request was in {entry.phase}"
            actions += self._fail(entry, DeadlineError(late), now)
        return actions + self._place(now)

    def known(self, worker: str) -> dict[str, int]:
        """rid -> tokens delivered, of what a worker may have to say."""
        return {
            x.job.rid: len(x.emitted)
            for x in self.entries.values()
            if worker in x.workers
        }

    def ready(self, now: float) -> bool:
        """Whether a request that came now could hope for an answer."""
        roles = [x.started.role for x in self.members.values() if now >= x.open_until]
        return serves(roles) and now - self._stuck_since <= self._config.silence_s

    def _place(self, now: float) -> list[Action]:
        """Move what has to go on elsewhere, then start what can start, the most urgent first."""
        queued = [x for x in self.entries.values() if x.phase is Phase.QUEUED]
        leaving = [x for x in self.entries.values() if self._leaves(x, now)]
        if not queued and not leaving:
            self._stuck_since = math.inf
            return []
        waiting = [x for x in queued if now >= x.not_before]
        board = Placement(self.entries.values(), self.members.values(), now)
        actions: list[Action] = []
        for (
            entry
        ) in leaving:  # first: what it has is computed, and its worker waits to leave
            length = len(entry.job.prompt) + len(entry.emitted)
            if target := board.successor(entry, length * self._token_bytes):
                actions.append(self._move(entry, target))
        for entry in sorted(waiting, key=lambda x: (not x.alone, x.urgency(now))):
            if pair := board.choose(entry, len(entry.job.prompt) * self._token_bytes):
                actions.append(self._begin(entry, *pair, now))
                board.add(entry)
        stuck = queued and not actions and len(queued) == len(self.entries)
        self._stuck_since = min(self._stuck_since, now) if stuck else math.inf
        return actions

    def _begin(
        self, entry: RequestState, prefill: WorkerState, decode: WorkerState, now: float
    ) -> Action:
        """The next attempt, on this pair."""
        if entry.job.codec == AUTO:
            self._choose(entry, prefill, decode, now)
        self._count(entry, prefill, decode)
        prefill.recent += len(entry.job.prompt) - entry.cached
        for member in (prefill, decode):
            member.pause(now)
        entry.prefill, entry.decode = prefill.name, decode.name
        entry.computed, entry.began = False, now
        job, emitted, left_s = entry.job, tuple(entry.emitted), entry.deadline - now
        job = replace(job, attempt=job.attempt + 1, emitted=emitted, deadline_s=left_s)
        entry.job = replace(job, moved=0, waited_s=now - entry.arrived)
        entry.phase = Phase.PREFILL if prefill is decode else Phase.RESERVE
        if prefill is decode:
            return Start(prefill.name, entry.job, Work.LOCAL)
        return Reserve(decode.name, entry.job)

    def _choose(
        self, entry: RequestState, prefill: WorkerState, decode: WorkerState, now: float
    ) -> None:
        """Its codec, for life: of those that the decode worker lists."""
        prompt, config, bytes_of = (
            entry.job.prompt,
            self._config,
            decode.started.bytes_of,
        )
        sizes = {x: bytes_of(x, len(prompt)) for x in decode.started.sizes}
        here = [
            x
            for x in self.entries.values()
            if x.prefill == prefill.name and not x.decodes
        ]
        ahead = sum(bytes_of(x.job.codec, len(x.job.prompt)) for x in here)
        left_s = entry.arrived + config.first_decode_s - now
        facts = config.error_budget, decode.load.free_bytes, (prefill.name, decode.name)
        codec, entry.choice = self.choices.choose(sizes, *facts, left_s, ahead)
        entry.job, entry.pages = replace(entry.job, codec=codec), keys_of(prompt, codec)

    def _leaves(self, entry: RequestState, now: float) -> bool:
        """Whether a sequence has to go on elsewhere, and has not so little left that it may end.

        What is said of it twice has to be the same: one that says log-probabilities stays.
        """
        if entry.phase is not Phase.DECODE or entry.target or now < entry.not_before:
            return False
        left = entry.job.sampling.get("max_tokens", 0) - len(entry.emitted)
        stays = entry.decode is None or self.members[entry.decode].started.role.decodes
        scored = entry.job.sampling.get("logprobs") is not None
        return left > MOVE_TOKENS and not stays and not scored

    def _move(
        self, entry: RequestState, target: WorkerState, more: int = MOVE_TOKENS
    ) -> Action:
        """Ask for room for the sequence as it will be when its pages are there."""
        entry.target, emitted = target.name, tuple(entry.emitted)
        length = len(entry.job.prompt) + len(emitted) + more
        entry.job = replace(entry.job, emitted=emitted, moved=length)
        return Reserve(target.name, entry.job)

    def _count(
        self, entry: RequestState, prefill: WorkerState, decode: WorkerState
    ) -> None:
        """Why a request goes to these workers, and what they have of it from now on."""
        everyone = self.members.values()
        sides = [
            (Role.PREFILL, prefill, entry.exact),
            (Role.DECODE, decode, entry.pages),
        ]
        entry.cached = min(prefill.known.tokens(entry.exact), len(entry.job.prompt) - 1)
        for role, chosen, keys in sides[: 1 if prefill is decode else 2]:
            most = max(member.known.tokens(keys) for member in everyone)
            self.routed[role.value, reason_of(chosen.known.tokens(keys), most)] += 1
            chosen.known.add(keys)

    def _current(self, rid: str, attempt: int) -> RequestState | None:
        entry = self.entries.get(rid)
        stale = (
            entry is None or entry.job.attempt != attempt or entry.phase is Phase.QUEUED
        )
        return None if stale else entry

    def _progress(
        self, entry: RequestState, worker: str, index: int, now: float
    ) -> list[Action]:
        """A worker did its part of an attempt: the next prompt may have its place."""
        before = entry.phase, entry.computed
        entry.computed = True
        if worker == entry.target and entry.phase is Phase.MOVE:
            if index >= len(
                entry.job.emitted
            ):  # else it says what it did before, as another
                entry.decode, entry.target, entry.phase = worker, None, Phase.DECODE
                self.moves += 1
        elif worker == entry.decode and entry.phase not in (Phase.DECODE, Phase.MOVE):
            entry.phase = Phase.DECODE
            for name in filter(self.members.__contains__, entry.workers):
                self.members[name].failures, self.members[name].open_until = (
                    0,
                    -math.inf,
                )
        return self._place(now) if before != (entry.phase, entry.computed) else []

    def _finish(
        self, entry: RequestState, worker: str, event: TokenEvent, now: float
    ) -> list[Action]:
        """All forget it, but the prefill worker of a hand-off: when it has said its figures."""
        del self.entries[event.rid]
        told = self._forget(
            entry, now, None if worker == entry.prefill else entry.prefill
        )
        return [EmitToken(event.rid, event.finish_reason), *told, *self._place(now)]

    def _refuse(
        self, entry: RequestState, worker: str, error: DisaggError, now: float
    ) -> list[Action]:
        """A worker could not do its part. Tried again elsewhere, unless it can never succeed."""
        full = isinstance(error, CapacityError)
        if (
            full
            and entry.phase is Phase.MOVE
            and worker == entry.decode
            and entry.target
        ):
            entry.phase = Phase.DECODE  # it had outgrown its room before it heard of it
            return [self._move(entry, self.members[entry.target], 2 * entry.ahead)]
        stays = (
            entry.phase is Phase.DECODE and worker == entry.target
        )  # it decodes on as it did
        if stays and not full:
            entry.target, entry.not_before, entry.avoid = (
                None,
                now + STAYS_S,
                frozenset({worker}),
            )
            return []  # told to forget this attempt, it could never take it
        if full and (stays or entry.phase is Phase.RESERVE):
            self.members[worker].bound = (len(entry.job.prompt), now + FULL_S)
            entry.target, entry.not_before = None, now + FULL_S * stays
            if not stays:
                entry.phase, entry.prefill, entry.decode = Phase.QUEUED, None, None
            return self._place(now)
        entry.refusals += 1
        hopeless = entry.refusals >= self._config.max_attempts and not isinstance(
            error, PASSING
        )
        if hopeless or isinstance(error, PERMANENT):
            return self._fail(entry, error, now) + self._place(now)
        both = (
            worker == entry.prefill
            and not entry.decodes
            and isinstance(error, TransferError)
        )
        blamed = (
            set() if full else set(entry.workers if both else [worker]) - entry.blamed
        )
        for name in blamed & self.members.keys():
            self.members[name].fails(entry.began, now)
        entry.blamed |= (
            blamed  # whatever is wrong with a request is no more failures of a worker
        )
        entry.avoid = frozenset(entry.workers)
        entry.not_before = now + min(1.0, RETRY_S * 2 ** min(10, entry.refusals - 1))
        return self._requeue(entry, now) + self._place(now)

    def _requeue(self, entry: RequestState, now: float) -> list[Action]:
        """Back to the queue; whoever lives forgets the attempt."""
        self.retries += (
            entry.phase is not Phase.RESERVE
        )  # until then nobody computes anything
        actions = self._forget(entry, now)
        entry.phase, entry.prefill, entry.decode, entry.target = (
            Phase.QUEUED,
            None,
            None,
            None,
        )
        return actions

    def _fail(
        self, entry: RequestState, error: DisaggError, now: float
    ) -> list[Action]:
        del self.entries[entry.job.rid]
        return [*self._forget(entry, now), EmitToken(entry.job.rid, error)]

    def _forget(
        self, entry: RequestState, now: float, spared: str | None = None
    ) -> list[Action]:
        """Every living worker of the attempt forgets it, but one."""
        rid, names = (
            entry.job.rid,
            [x for x in entry.workers if x in self.members and x != spared],
        )
        self._told |= {(name, rid): now for name in names}
        return [AbortAttempt(name, rid, entry.job.attempt) for name in names]

    def _tell(self, worker: str, rid: str, attempt: int, now: float) -> list[Action]:
        """An abort, unless the worker is gone or heard one a moment ago."""
        heard = now < self._told.get((worker, rid), -math.inf) + TOLD_S
        if heard or worker not in self.members:
            return []
        self._told[worker, rid] = now
        return [AbortAttempt(worker, rid, attempt)]
