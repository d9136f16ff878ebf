"""Which hand-offs exist and who owns their records. The memory behind the ledger's rules.

Every record is owned by a live hand-off, an ended one with an open write, or the engine: by one of
them, or shared as `sharing.py` says. A hand-off is remembered after its end, so that late messages
are refused by name.
"""

from collections import deque
from collections.abc import Callable

from disagg.errors import ReservationError
from disagg.state import Allocator
from disagg.transfer.handoff import Handoff
from disagg.transfer.items import Checklist
from disagg.transfer.messages import Admission, Request, State
from disagg.transfer.shares import Manifest
from disagg.transfer.sharing import Damage, Library
from disagg.transfer.terms import Terms
from disagg.wire import Commit, Ticket

MAX_TOMBSTONES = 1 << 16


class Book:
    """Hand-offs by nonce and by rid, and the tombstones of aborted attempts."""

    def __init__(self, terms: Terms, allocator: Allocator, nonces: Callable[[], int]):
        self.terms = terms
        self.live: dict[str, Handoff] = {}  # by rid: waiting for pages
        self.running: dict[str, Handoff] = {}  # by rid: the engine has it
        self.library = Library(allocator)
        self._nonces = nonces
        self._by_nonce: dict[int, Handoff] = {}
        self._ended: deque[Handoff] = deque()  # oldest first
        self._tombstones: dict[str, tuple[int, float]] = {}

    def find(self, ticket: Ticket, epoch: int) -> Handoff:
        """The hand-off of a ticket; ReservationError for another epoch or an unknown nonce."""
        if ticket.epoch != epoch:
            raise ReservationError(f"epoch {ticket.epoch} is over; this worker is in {epoch}")
        handoff = self._by_nonce.get(ticket.nonce)
        if handoff is None:
            raise ReservationError(f"no reservation {ticket.nonce:016x} is known here")
        return handoff

    def get(self, nonce: int) -> Handoff | None:
        """The hand-off of a nonce, live or remembered."""
        return self._by_nonce.get(nonce)

    def of(self, rid: str | None = None) -> list[Handoff]:
        """The live and the running hand-offs of one request, or of all."""
        found = [*self.running.values(), *self.live.values()]
        return [x for x in found if rid in (None, x.request.rid)]

    def struck(self, damage: Damage) -> list[Handoff]:
        """Running hand-offs with damaged pages; live ones are not offered them any more."""
        for handoff in self.live.values():
            handoff.withdraw(damage.pages)
        found = [x for x in self.running.values() if not damage.pages.isdisjoint(x.pages)]
        damage.requests.extend((x.request.rid, x.request.attempt) for x in found)
        return found

    def check(self, request: Request) -> None:
        """ReservationError for an attempt that was admitted, aborted or superseded;
        PromptTooLongError for what an empty pool could not hold.
        """
        self.library.check(self.terms.plan_for(request), request.tokens)
        running = self.running.get(request.rid)
        if running and running.request.attempt >= request.attempt:
            raise ReservationError(f"{running.name} is admitted already")
        if request.attempt <= self._tombstones.get(request.rid, (-1, 0.0))[0]:
            raise ReservationError(
                f"attempt {request.attempt} of {request.rid} was aborted or superseded"
            )

    def hold(self, request: Request, now: float) -> Handoff:
        """A new hand-off with its records; CapacityError and nothing taken if no room."""
        plan = self.terms.plan_for(request)
        groups, shares = self.library.hold(plan, request)
        checklist = Checklist(plan, request.tokens)
        handoff = Handoff(request, self._nonces(), checklist, groups, shares, shares.offered)
        return self._enter(handoff, now)

    def adopt(self, old: Handoff, request: Request, now: float) -> Handoff:
        """A new hand-off that takes over records and verified items of a lower attempt."""
        groups, offered = old.groups, old.have()
        assert groups is not None
        assert not old.writes
        old.groups = None
        self.end(old, State.SUPERSEDED, f"attempt {request.attempt} took over", now)
        handoff = Handoff(request, self._nonces(), old.checklist, groups, old.shares, offered)
        return self._enter(handoff, now)

    def admit(self, handoff: Handoff, commit: Commit, now: float) -> Admission:
        """Give the records of a complete hand-off away, to the engine; keep what can be shared."""
        assert handoff.groups is not None
        manifest, request = Manifest(handoff.checklist, commit.digests), handoff.request
        self.library.keep(handoff.shares, manifest, handoff.groups)
        handoff.pages = handoff.unit_pages()
        groups, handoff.groups = handoff.groups, None
        self.end(handoff, State.ADMITTED, "", now)
        self.running[request.rid] = handoff
        return Admission(request.rid, request.attempt, request.tokens, groups, commit)

    def finish(self, rid: str, attempt: int) -> None:
        """The engine has freed what it was given."""
        handoff = self.running.get(rid)
        if handoff and handoff.request.attempt == attempt:
            handoff.state, handoff.pages = State.FINISHED, frozenset()
            del self.running[rid]

    def renew(self, handoff: Handoff, now: float) -> None:
        """A sign of life: the lease begins anew."""
        handoff.lease_until = now + self.terms.lease_s

    def leases(self) -> list[float]:
        """When the leases of live hand-offs end."""
        return [handoff.lease_until for handoff in self.live.values()]

    def overdue(self, now: float) -> list[Handoff]:
        """Live hand-offs whose lease is over."""
        return [handoff for handoff in self.live.values() if handoff.lease_until <= now]

    def gauges(self) -> dict[str, int]:
        """How much is held."""
        streams = sum(handoff.state is State.ATTACHED for handoff in self.live.values())
        held = {"reservations": len(self.live), "streams": streams}
        return held | {"running": len(self.running)}

    def end(self, handoff: Handoff, state: State, reason: str, now: float) -> None:
        """No longer live. Its records are freed now or when its last write closes."""
        handoff.state, handoff.reason, handoff.ended_at = state, reason, now
        for table in (self.live, self.running):
            if table.get(handoff.request.rid) is handoff:
                del table[handoff.request.rid]
        self._ended.append(handoff)
        self.free(handoff)

    def free(self, handoff: Handoff) -> None:
        """Release the records of a hand-off that is over and has no open write."""
        if handoff.groups is not None and not handoff.state.live and not handoff.writes:
            groups, handoff.groups = handoff.groups, None
            self.library.release(groups)

    def bury(self, rid: str, attempt: int, now: float) -> None:
        """No attempt up to this one may reserve any more."""
        if attempt < 0:
            return
        known, _ = self._tombstones.pop(rid, (attempt, now))
        if len(self._tombstones) >= MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        self._tombstones[rid] = (max(known, attempt), now)

    def forget(self, now: float) -> None:
        """Drop what ended longer ago than `memory_s`; what still runs stays."""
        before = now - self.terms.memory_s
        while self._ended and self._ended[0].ended_at < before:
            handoff = self._ended.popleft()
            if handoff.state is State.ADMITTED or handoff.writes:
                handoff.ended_at = now
                self._ended.append(handoff)
            else:
                self._by_nonce.pop(handoff.nonce, None)
        for rid, (_, since) in list(self._tombstones.items()):
            if since >= before:
                break
            del self._tombstones[rid]

    def _enter(self, handoff: Handoff, now: float) -> Handoff:
        assert handoff.request.rid not in self.live
        self._by_nonce[handoff.nonce] = handoff
        self.live[handoff.request.rid] = handoff
        self.renew(handoff, now)
        return handoff
