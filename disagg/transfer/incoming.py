"""One part of a hand-off at the rank that stores it, and the parts that a follower stores.

           open              attach              channel ends
    room ─────────► HELD ───────────► ATTACHED ──────────────► BROKEN
                                       │  ▲ ▲                    │
                                 frame └──┘ └────── attach ──────┘

A frame is checked, verified and copied within one call. There are no leases here and no pool: rank
0 has them. It opens the parts of a follower with the reservation, and closes them before it gives
their pages to anyone else, so that a late frame is written nowhere.
"""

import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum

from disagg.errors import ReservationError
from disagg.kv.arena import Arena
from disagg.kv.plan import Plan
from disagg.kv.state import lay_out
from disagg.transfer.follower_calls import Opening
from disagg.transfer.partition import Partition, part_nonce
from disagg.transfer.records import Addresses, Manifest, ReceivedItems
from disagg.wire import Commit, PageFrame, Ticket

MAX_CLOSED = 256  # reservations that ended last


class State(StrEnum):
    """The state of a part, or of a reservation: then see `reservations.py` too."""

    HELD = "held"
    ATTACHED = "attached"
    BROKEN = "broken"
    ADMITTED = "admitted"  # the engine owns its pages, or has freed them
    EXPIRED = "expired"
    ABORTED = "aborted"


class IncomingPart:
    """One part of a hand-off, on its way in.

    name:      for messages: of its attempt at rank 0, of the part at a follower
    received:  the items that have arrived, at first those of cached blocks
    gen:       of the last attachment
    channel:   on which its frames come
    verify_ms: spent on digests and copies
    """

    def __init__(self, name: str, received: ReceivedItems):
        self.name = name
        self.received = received
        self.state = State.HELD
        self.gen = 0
        self.channel: object = None
        self.verify_ms = 0.0

    def attach(self, gen: int) -> None:
        """A sender takes over, with a gen above those of all before."""
        if gen <= self.gen:
            raise ReservationError(f"stream {gen} attaches after stream {self.gen} did")
        self.gen = gen
        self.state = State.ATTACHED
        self.channel = None

    def check_attached(self, ticket: Ticket, *states: State) -> None:
        """ReservationError unless the ticket is of the last attachment."""
        if ticket.gen != self.gen or self.state not in states:
            raise ReservationError(
                f"stream {ticket.gen} of {self.name}, "
                f"which is {self.state} by stream {self.gen}"
            )

    def take_channel(self, frame: PageFrame, channel: object) -> None:
        """The channel of the first frame of an attachment is that of all."""
        self.check_attached(frame.ticket, State.ATTACHED)
        if self.channel not in (None, channel):
            raise ReservationError(f"frames of {self.name} come on another channel")
        self.channel = channel

    def store(
        self,
        frame: PageFrame,
        arena: Arena,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Verify a frame and copy its items to their addresses."""
        began = clock()
        new_digests, pieces = self.received.verify(frame)
        arena.write(pieces)
        self.verify_ms += 1000 * (clock() - began)
        self.received.digests.update(new_digests)

    def channel_ended(self, channel: object) -> None:
        """A channel ended, for any reason. Nothing is complete without a commit."""
        if self.channel is channel:
            self.state = State.BROKEN


class FollowerParts:
    """The parts of all hand-offs that a follower stores.

    plan_of: the plan of a codec spec, with the heads of this rank
    """

    def __init__(
        self, rank: int, ranks: int, arena: Arena, plan_of: Callable[[str], Plan]
    ):
        self._rank = rank
        self._ranks = ranks
        self._arena = arena
        self._plan_of = plan_of
        self._open: dict[int, dict[int, IncomingPart]] = {}  # by reservation and part
        self._by_nonce: dict[int, IncomingPart] = {}
        self._closed = deque[int](maxlen=MAX_CLOSED)  # their openings come too late

    @property
    def num_open(self) -> int:
        """Reservations with parts here."""
        return len(self._open)

    # -- events of rank 0

    def open(self, opening: Opening) -> None:
        """A prompt may arrive. The same opening again changes nothing."""
        if opening.nonce in self._open or opening.nonce in self._closed:
            return
        plan = self._plan_of(opening.codec)
        if opening.moves:
            plan = plan.moving
        groups = tuple(
            lay_out(group, opening.tokens, records)
            for group, records in zip(plan.groups, opening.records, strict=True)
        )
        whole = Addresses(Manifest(plan, opening.tokens), groups)
        self._arena.zero(list(whole.unsent()))
        partition = Partition(opening.senders, self._ranks)
        manifest = Manifest(partition.received_plan(plan), opening.tokens)
        parts = {}
        for part in partition.received_by(self._rank):
            addresses = Addresses(manifest, groups, partition.received_slice(part))
            digests = dict(opening.cached.get(part, {}))
            received = ReceivedItems(manifest, addresses, digests)
            parts[part] = IncomingPart(f"part {part}", received)
        self._open[opening.nonce] = parts
        for part, incoming in parts.items():
            self._by_nonce[part_nonce(opening.nonce, part)] = incoming

    def attach(self, ticket: Ticket) -> dict[int, int]:
        """A sender takes a part over; the digests of the items that are here, by index."""
        part = self._find(ticket)
        part.attach(ticket.gen)
        return part.received.digests

    def check(self, commit: Commit) -> float:
        """The milliseconds of a part that is complete; raises as `ReceivedItems.check` does."""
        part = self._find(commit.ticket)
        part.check_attached(commit.ticket, State.ATTACHED, State.BROKEN)
        part.received.check(commit)
        return part.verify_ms

    def close(self, nonce: int) -> None:
        """Forget the parts of a reservation; from now on nothing of them is written."""
        self._closed.append(nonce)
        for part in self._open.pop(nonce, {}):
            del self._by_nonce[part_nonce(nonce, part)]

    # -- events of the senders

    def store(self, frame: PageFrame, channel: object) -> None:
        """Verify a frame and copy its items to their addresses."""
        part = self._find(frame.ticket)
        part.take_channel(frame, channel)
        part.store(frame, self._arena)

    def channel_ended(self, channel: object) -> None:
        """A channel ended, for any reason."""
        for part in self._by_nonce.values():
            part.channel_ended(channel)

    def _find(self, ticket: Ticket) -> IncomingPart:
        if part := self._by_nonce.get(ticket.nonce):
            return part
        raise ReservationError(
            f"no part {ticket.nonce:016x} is open at rank {self._rank}"
        )
