"""The rules of the receiver: events in, actions out, the time handed in.

Who may reserve, attach, write, commit and abort is decided here, without sockets or clocks. One
thread calls it and never awaits between a check and what follows from it; it carries out
`take_actions()` after every call. Refusals are ReservationError, LayoutError, WireError,
RequestError or CapacityError that name what was refused; late bytes of a dead reservation land
nowhere.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from disagg.errors import CapacityError, ReservationError
from disagg.state import Allocator
from disagg.transfer.book import Book
from disagg.transfer.handoff import Handoff
from disagg.transfer.messages import (
    Ack,
    Action,
    Admit,
    Attached,
    Drop,
    Grant,
    Nack,
    Request,
    Settled,
    State,
    Waiter,
    Write,
)
from disagg.transfer.queue import Queue
from disagg.transfer.sharing import Damage
from disagg.transfer.terms import Terms, check_rid
from disagg.wire import CommitFrame, PageFrame, Ticket


class Ledger:
    """All hand-offs of one decode worker."""

    def __init__(self, terms: Terms, allocator: Allocator, nonces: Callable[[], int]):
        self.terms = terms
        self.epoch = terms.epoch
        self.draining = False
        self.counts: Counter[str] = Counter()  # of what went wrong: "expired", "damaged"
        self._book = Book(terms, allocator, nonces)
        self._queue = Queue(terms.max_waiting)
        self._actions: list[Action] = []

    def reserve(self, request: Request, now: float) -> Waiter:
        """Ask for room. The waiter is settled already, or will be by a later call.

        The same request again gets the same answer; a higher attempt takes the place of a lower
        one and is offered the pages that arrived for it.
        """
        self.expire(now)
        self._check(request)
        old = self._book.live.get(request.rid)
        if old and old.request.attempt == request.attempt:
            if not old.request.same_work(request):
                raise ReservationError(f"{old.name} is reserved for another prompt")
            self._book.renew(old, now)
            return Waiter(request, now, grant=self._grant(old))
        if grant := self._supersede(request, now):
            return Waiter(request, now, grant=grant)
        waiter = self._queue.join(request, now)
        self.make_room(now)
        return waiter

    def leave(self, waiter: Waiter, now: float) -> None:
        """One caller of a waiter is gone; with the last one its place in the queue."""
        self._queue.leave(waiter)
        self.make_room(now)

    def make_room(self, now: float) -> None:
        """Serve the queue in order while there is room. Call it when records were freed."""
        served = self._queue.serve(lambda request: self._grant(self._book.hold(request, now)), now)
        self._settled([*served, *self._queue.late(now)])

    def attach(self, ticket: Ticket, now: float) -> Attached:
        """A stream takes over a hand-off; its gen is above those of all streams before."""
        self.expire(now)
        handoff = self._book.find(ticket, self.epoch)
        if handoff.state.admitted or handoff.state is State.EXPIRED:
            return Attached(State.ADMITTED if handoff.state.admitted else State.EXPIRED)
        if not handoff.state.live:
            raise handoff.ended_error()
        if ticket.gen <= handoff.gen:
            raise ReservationError(f"stream {ticket.gen} attaches after stream {handoff.gen} did")
        handoff.gen = ticket.gen
        handoff.state = State.ATTACHED
        self._book.renew(handoff, now)
        return Attached(State.ATTACHED, handoff.have(), self.terms.lease_s)

    def renew(self, ticket: Ticket, now: float) -> None:
        """The sender is alive."""
        self._attached(ticket, now)

    def begin_write(self, frame: PageFrame, now: float) -> Write:
        """Check a frame and open a write; every one is closed by `end_write`."""
        handoff = self._attached(frame.ticket, now)
        self._book.library.own(handoff, frame)
        return handoff.begin_write(frame)

    def end_write(self, write: Write, written: bool) -> None:
        """Close a write; frees the records of a hand-off that ended while it was open."""
        handoff = self._book.get(write.nonce)
        assert handoff is not None
        handoff.end_write(write, written)
        self._book.free(handoff)

    def stream_ended(self, ticket: Ticket) -> None:
        """However a stream ended, cleanly or not: nothing is complete without a commit."""
        handoff = self._book.get(ticket.nonce)
        if handoff and handoff.gen == ticket.gen and handoff.state is State.ATTACHED:
            handoff.state = State.BROKEN

    def commit(self, frame: CommitFrame, now: float) -> Ack | Nack:
        """Admit a hand-off whose items are all here with the digests of the commit.

        The Admit action is carried out before the answer is sent; the same commit again gets the
        same answer and no second action.
        """
        self.expire(now)
        handoff = self._book.find(frame.ticket, self.epoch)
        if handoff.ack is not None and handoff.state.admitted:
            if frame.commit != handoff.commit:
                raise ReservationError(f"{handoff.name} was admitted by another commit")
            return handoff.ack
        handoff = self._attached(frame.ticket, now)
        if missing := handoff.missing(frame.commit):
            return Nack(missing)
        handoff.commit, handoff.ack = frame.commit, Ack(handoff.verify_ms)
        self._actions.append(Admit(handoff.nonce, self._book.admit(handoff, frame.commit, now)))
        return handoff.ack

    def abort(self, rid: str, attempt: int, reason: str, now: float) -> None:
        """No attempt up to this one goes on, whether it is known yet or not."""
        check_rid(rid)
        self._book.bury(rid, attempt, now)
        gone = ReservationError(f"attempt {attempt} of {rid} was aborted: {reason}")
        self._settled(self._queue.refuse(gone, rid, attempt))
        for handoff in self._book.of(rid):
            if handoff.request.attempt <= attempt:
                self._stop(handoff, State.ABORTED, reason, now)
        self.make_room(now)

    def release(self, ticket: Ticket, now: float) -> None:
        """The sender gives a reservation up. It may reserve again; admitted ones stay."""
        handoff = self._book.find(ticket, self.epoch)
        if handoff.state.live:
            self._stop(handoff, State.ABORTED, "released by its sender", now)
            self.make_room(now)

    def finished(self, rid: str, attempt: int) -> None:
        """The engine is done with a sequence and has freed it."""
        self._book.finish(rid, attempt)

    def reject(self, nonce: int, reason: str, now: float) -> None:
        """The engine did not take what was admitted, and freed it: the commit is refused."""
        handoff = self._book.get(nonce)
        assert handoff is not None
        self._book.end(handoff, State.ABORTED, reason, now)
        self.make_room(now)

    def fence(self, epoch: int, now: float) -> None:
        """A new epoch: everything of the old one is over, whatever its state."""
        if epoch < self.epoch:
            raise ReservationError(f"a fence to epoch {epoch}; this worker is in {self.epoch}")
        if epoch == self.epoch:
            return
        self.epoch = epoch
        gone = ReservationError(f"fenced: this worker is in epoch {epoch} now")
        self._settled(self._queue.refuse(gone))
        for handoff in self._book.of():
            self._stop(handoff, State.ABORTED, str(gone), now)

    def handoff(self, nonce: int) -> Handoff | None:
        """A hand-off, live or remembered."""
        return self._book.get(nonce)

    def expire(self, now: float) -> None:
        """End what is over by now: leases, waits, memories. Every event begins with it."""
        over = self._book.overdue(now)
        self.counts["expired"] += len(over)
        for handoff in over:
            self._stop(handoff, State.EXPIRED, f"no sign of life for {self.terms.lease_s} s", now)
        self._settled(self._queue.late(now))
        if over:
            self.make_room(now)
        self._book.forget(now)

    def scrub(self, max_bytes: int, now: float) -> list[Damage]:
        """Verify the next of what is kept; whom damaged pages were offered or given loses them."""
        damages = self._book.library.scrub(max_bytes)
        for damage in damages:
            self.counts["damaged"] += 1
            for handoff in self._book.struck(damage):
                self._stop(handoff, State.ABORTED, str(damage.error), now)
        return damages

    def next_event(self) -> float | None:
        """When `expire` next has something to do, if nothing else happens."""
        return min([*self._book.leases(), *self._queue.deadlines()], default=None)

    def take_actions(self) -> list[Action]:
        """What the worker must do now, in order."""
        actions, self._actions = self._actions, []
        return actions

    def gauges(self) -> dict[str, int]:
        """What is held; all zero when nothing goes on."""
        return self._book.gauges() | {"waiting": len(self._queue)}

    def _check(self, request: Request) -> None:
        self.terms.check(request, self.epoch)
        if self.draining:
            raise CapacityError("this worker is stopping and takes no new work")
        self._book.check(request)

    def _attached(self, ticket: Ticket, now: float) -> Handoff:
        self.expire(now)
        handoff = self._book.find(ticket, self.epoch)
        handoff.require(ticket)
        self._book.renew(handoff, now)
        return handoff

    def _grant(self, handoff: Handoff) -> Grant:
        lease_s, cached = self.terms.lease_s, tuple(handoff.shares.cached)
        return Grant(handoff.nonce, self.epoch, lease_s, handoff.offered, cached)

    def _settled(self, waiters: Iterable[Waiter]) -> None:
        self._actions.extend(map(Settled, waiters))

    def _supersede(self, request: Request, now: float) -> Grant | None:
        """End the lower attempts of a request; a grant if one of them leaves its records to us."""
        rid, lower = request.rid, request.attempt - 1
        reason = f"attempt {request.attempt} took over"
        self._book.bury(rid, lower, now)
        self._settled(self._queue.refuse(ReservationError(reason), rid, lower))
        for old in self._book.of(rid):
            if old.state.live and old.request.same_work(request) and not old.writes:
                return self._grant(self._book.adopt(old, request, now))
            self._stop(old, State.SUPERSEDED, reason, now)
        return None

    def _stop(self, handoff: Handoff, state: State, reason: str, now: float) -> None:
        request, admitted = handoff.request, handoff.state.admitted
        self._book.end(handoff, state, reason, now)
        if admitted:
            self._actions.append(Drop(request.rid, request.attempt, reason))
