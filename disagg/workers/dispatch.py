"""The life of requests as the router sees it: events in, actions out. No clock, no sockets.

              a pair of workers      first token from D
    QUEUED ────────────────► PREFILL ──────────────► DECODE ──────► DONE
      ▲                         │                      │
      └──── attempt + 1 ────────┴─ worker dead, refused┘
    from anywhere: client gone, deadline, poison ─► Abort both ─► DONE

A token has the name (rid, attempt, index) and is delivered once: a worker may say it again, an
older attempt may still talk. What was emitted is kept here, so the next attempt replays it.
"""

from disagg.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    DisaggError,
    PeerLostError,
    RequestError,
    TransferError,
)
from disagg.workers.lifecycle import (
    Abort,
    Action,
    Deliver,
    Entry,
    Fail,
    Finish,
    Member,
    Phase,
    Release,
    Start,
    Work,
)

RETRY_S = 0.1  # pause after a refusal; doubles with each, up to a second
PERMANENT = (RequestError, ConfigError)  # another worker would say the same
PASSING = (TransferError, CapacityError)  # may be over soon; the deadline decides


class Dispatch:
    """All requests and all workers. Every method takes one event and says what is to be done."""

    def __init__(self, max_attempts: int = 3):
        self.entries: dict[str, Entry] = {}
        self.members: dict[str, Member] = {}
        self.unequal_tokens = 0  # repeated tokens that were not what was delivered before
        self.retries = 0
        self._max_attempts = max_attempts

    # -- clients

    def submit(self, work: Work, now: float) -> list[Action]:
        """A new request; it starts at once if there is a worker of each kind."""
        if work.rid in self.entries:
            raise RequestError(f"request {work.rid!r} exists already")
        self.entries[work.rid] = Entry(work)
        return self.tick(now)

    def cancel(self, rid: str) -> list[Action]:
        """The client is gone or has enough; both sides forget the request."""
        entry = self.entries.pop(rid, None)
        return self._abort(entry) if entry else []

    # -- workers

    def worker_up(self, member: Member, now: float) -> list[Action]:
        """A worker is ready; waiting requests may start."""
        self.members[member.name] = member
        return self.tick(now)

    def worker_down(self, name: str, now: float) -> list[Action]:
        """A worker is dead: what it had starts again elsewhere, unless it keeps killing workers."""
        self.members.pop(name, None)
        actions: list[Action] = []
        for entry in [e for e in self.entries.values() if e.uses(name)]:
            entry.deaths += 1
            if entry.deaths < self._max_attempts:
                actions += self._requeue(entry, now)
            else:
                died = PeerLostError(f"{entry.deaths} workers died under this request; given up")
                actions += self._fail(entry, died)
        return actions + self.tick(now)

    def token(
        self, worker: str, rid: str, attempt: int, index: int, token: int, now: float
    ) -> list[Action]:
        """A worker says token `index` of an attempt."""
        entry = self._current(rid, attempt)
        if entry is None:
            return []
        if worker == entry.decode:
            entry.phase = Phase.DECODE
        if index > len(entry.emitted):
            return self._lost_tokens(entry, index, now)
        if index < len(entry.emitted):
            self.unequal_tokens += entry.emitted[index] != token
            return []
        entry.emitted.append(token)
        return [Deliver(rid, token)]

    def finished(self, rid: str, attempt: int, count: int, reason: str, now: float) -> list[Action]:
        """The decode worker said the last of `count` tokens."""
        entry = self._current(rid, attempt)
        if entry is None:
            return []
        if count != len(entry.emitted):
            return self._lost_tokens(entry, count, now)
        del self.entries[rid]
        entry.phase = Phase.DONE
        workers = dict.fromkeys(filter(None, (entry.prefill, entry.decode)))
        released = [Release(name, rid, count) for name in workers if name in self.members]
        return [Finish(rid, reason), *released]

    def refused(self, rid: str, attempt: int, error: DisaggError, now: float) -> list[Action]:
        """A worker could not do its part. Tried again, unless it can never succeed."""
        entry = self._current(rid, attempt)
        if entry is None:
            return []
        entry.refusals += 1
        hopeless = entry.refusals >= self._max_attempts and not isinstance(error, PASSING)
        if hopeless or isinstance(error, PERMANENT):
            return self._fail(entry, error)
        entry.not_before = now + min(1.0, RETRY_S * 2 ** (entry.refusals - 1))
        return self._requeue(entry, now) + self.tick(now)

    # -- time

    def tick(self, now: float) -> list[Action]:
        """Give up what is too late, start what can start."""
        actions: list[Action] = []
        for entry in list(self.entries.values()):
            if now >= entry.work.deadline:
                waited = f"not done at its deadline; it was in {entry.phase}"
                actions += self._fail(entry, DeadlineError(f"the request was {waited}"))
            elif entry.phase is Phase.QUEUED and now >= entry.not_before:
                actions += self._place(entry)
        return actions

    def known(self, worker: str) -> dict[str, int]:
        """rid -> tokens delivered, of what a worker may have to say."""
        return {
            rid: len(entry.emitted)
            for rid, entry in self.entries.items()
            if worker in (entry.prefill, entry.decode) and entry.phase is not Phase.QUEUED
        }

    # -- inside

    def _current(self, rid: str, attempt: int) -> Entry | None:
        entry = self.entries.get(rid)
        stale = entry is None or entry.attempt != attempt or entry.phase is Phase.QUEUED
        return None if stale else entry

    def _place(self, entry: Entry) -> list[Action]:
        """Choose the least loaded pair; a decode worker that has pages already is kept."""
        names = [m.name for m in self.members.values() if m.prefills]
        prefill = min(names, key=self._prefills_of, default=None)
        decode = entry.decode
        if decode not in self.members:
            names = [m.name for m in self.members.values() if m.decodes]
            decode = min(names, key=self._decodes_of, default=None)
        if prefill is None or decode is None:
            return []
        entry.attempt += 1
        entry.phase, entry.prefill, entry.decode = Phase.PREFILL, prefill, decode
        return [Start(prefill, decode, entry.work, entry.attempt, tuple(entry.emitted))]

    def _prefills_of(self, name: str) -> int:
        return sum(e.phase is Phase.PREFILL and e.prefill == name for e in self.entries.values())

    def _decodes_of(self, name: str) -> int:
        return sum(e.phase is not Phase.QUEUED and e.decode == name for e in self.entries.values())

    def _lost_tokens(self, entry: Entry, index: int, now: float) -> list[Action]:
        gap = f"token {index} came when {len(entry.emitted)} were known"
        return self.refused(entry.work.rid, entry.attempt, TransferError(gap), now)

    def _requeue(self, entry: Entry, now: float) -> list[Action]:
        """Back to the queue. A decode worker still waiting for pages keeps what it has of them."""
        self.retries += 1
        actions = self._abort(entry, keep=entry.decode if entry.phase is Phase.PREFILL else None)
        entry.phase, entry.prefill = Phase.QUEUED, None
        return actions

    def _fail(self, entry: Entry, error: DisaggError) -> list[Action]:
        del self.entries[entry.work.rid]
        return [*self._abort(entry), Fail(entry.work.rid, error)]

    def _abort(self, entry: Entry, keep: str | None = None) -> list[Action]:
        """Every living worker of the entry but `keep` forgets it; kept pages in the queue too."""
        workers = dict.fromkeys(filter(None, (entry.prefill, entry.decode)))
        known = [name for name in workers if name in self.members and name != keep]
        return [Abort(name, entry.work.rid, entry.attempt) for name in known]
