"""One hand-off as its decode worker sees it: state, lease, records, and what has arrived.

           reserve            attach             stream ends
    room ───────────► HELD ───────────► ATTACHED ───────────► BROKEN
                       │                 │  ▲ ▲                 │
                       │                 │  │ └──── attach ─────┘
                       │    frame, renew └──┘
                       │                 │ commit, complete and verified
                       │                 └──────────► ADMITTED ──► FINISHED
                       └─► from HELD, ATTACHED and BROKEN:
                           EXPIRED (lease over) · ABORTED (router, fence) · SUPERSEDED (attempt+1)

Records are freed when the state is terminal and no write is open. Knows no clock and no peer.
"""

from collections.abc import Mapping, Sequence

from disagg.errors import CorruptFrameError, LayoutError, ReservationError
from disagg.page import Kind
from disagg.state import GroupState
from disagg.transfer.items import Checklist, Records, ids_by_kind
from disagg.transfer.messages import Ack, Placement, Request, State, Write
from disagg.transfer.shares import Place, Shares
from disagg.wire import Commit, Item, PageFrame, Ticket


class Handoff:
    """The records of one reservation and the digests of what was verified into them."""

    def __init__(
        self,
        request: Request,
        nonce: int,
        checklist: Checklist,
        groups: Sequence[GroupState],
        shares: Shares,
        offered: Mapping[Item, int],
    ):
        self.request = request
        self.nonce = nonce
        self.checklist = checklist
        self.groups: tuple[GroupState, ...] | None = tuple(groups)  # None: given away or freed
        self.shares = shares
        self.offered = dict(offered)
        self.marks: dict[Item, int] = {}
        self.state = State.HELD
        self.reason = ""
        self.gen = 0
        self.writes = 0
        self.lease_until = 0.0
        self.ended_at = 0.0
        self.commit: Commit | None = None
        self.ack: Ack | None = None
        self.wire_bytes = 0
        self.verify_ms = 0.0
        self.pages: frozenset[int] = frozenset()  # of its units, while the engine has them
        self._records = Records(checklist.plan, groups)
        self._order = checklist.items  # asked for now, while there is time
        self._writing: dict[Item, int] = {}

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"attempt {self.request.attempt} of {self.request.rid}"

    def ended_error(self) -> ReservationError:
        """The refusal of whatever comes after the end."""
        return ReservationError(f"{self.name} is {self.state}: {self.reason}")

    def require(self, ticket: Ticket) -> None:
        """ReservationError unless this is live and the stream of the ticket is its last."""
        if not self.state.live:
            raise self.ended_error()
        if ticket.gen != self.gen or self.state is not State.ATTACHED:
            raise ReservationError(
                f"stream {ticket.gen} of {self.name}, which is {self.state} by stream {self.gen}"
            )

    def begin_write(self, frame: PageFrame) -> Write:
        """Open a write of the items that are neither here nor being written.

        Raises LayoutError for items that are not of this prompt, CorruptFrameError for one that
        came with another digest before.
        """
        self.checklist.check(frame)
        named, starts = frame.items(), self._records.starts(frame)
        items = dict(zip(named, frame.digests, strict=True))
        if len(items) == len(named) and self._are_new(items):
            placements = list(map(Placement, starts, frame.payload))
        else:
            items, placements = self._choose(frame, named, starts)
        self._writing |= items
        self.writes += 1
        return Write(self.nonce, items, tuple(placements))

    def _are_new(self, items: Mapping[Item, int]) -> bool:
        here = self.offered, self.marks, self._writing
        return all(items.keys().isdisjoint(known.keys()) for known in here)

    def _choose(
        self, frame: PageFrame, named: Sequence[Item], starts: Sequence[int]
    ) -> tuple[dict[Item, int], list[Placement]]:
        """What of a frame is neither here nor being written, item by item."""
        items: dict[Item, int] = {}
        placements: list[Placement] = []
        for item, expected, start, data in zip(
            named, frame.digests, starts, frame.payload, strict=True
        ):
            known = self.marks.get(item) or self._writing.get(item) or items.get(item)
            if known is None and self.offered.get(item) != expected:
                items[item] = expected
                placements.append(Placement(start, data))
            elif known not in (None, expected):
                raise CorruptFrameError(
                    f"{item} came as {known:016x} before, as {expected:016x} now"
                )
        for item in items:
            self.offered.pop(item, None)
        return items, placements

    def end_write(self, write: Write, written: bool) -> None:
        """Close a write; `written` only if the bytes matched their digests and are in place."""
        self.writes -= 1
        for item in write.items:
            del self._writing[item]
        if written:
            self.marks |= write.items

    def have(self) -> dict[Item, int]:
        """Items that are here, with their digests."""
        return self.offered | self.marks

    def replace(self, place: Place, page: int) -> None:
        """Another page for a record that others have too."""
        kind, index, record = place
        assert self.groups is not None
        self._records.replace(kind, index, record, page)
        runs = self.groups[index].runs
        if kind is Kind.SEGMENT:
            runs[record].segment = page
            return
        for run in runs:
            if record < len(run.pages):
                run.pages[record] = page
                return
            record -= len(run.pages)

    def unit_pages(self) -> frozenset[int]:
        """The pages of all units: what may be shared now or later."""
        assert self.groups is not None
        ids = [ids_by_kind(state) for state in self.groups]
        units = [unit for units in self.shares.units for unit in units]
        return frozenset(page for unit in units for page in unit.ids(ids[unit.group]))

    def withdraw(self, pages: frozenset[int]) -> None:
        """These pages are not what they were: nothing of their units is offered any more."""
        assert self.groups is not None
        ids = [ids_by_kind(state) for state in self.groups]
        for kind, index, record in self.shares.places:
            if ids[index][kind][record] in pages:
                unit = self.shares.units[index][self.shares.forget((kind, index, record))]
                for item in unit.items(self.checklist.plan.groups[index]):
                    self.offered.pop(item, None)

    def missing(self, commit: Commit) -> tuple[Item, ...]:
        """The items of a commit that are not here.

        Raises LayoutError if it is a commit of another prompt, CorruptFrameError if an item is
        here with another digest than the commit says.
        """
        items, plan = self._order, self.checklist.plan.fingerprint
        if (commit.tokens, commit.plan) != (self.checklist.tokens, plan):
            raise LayoutError(
                f"a commit of {commit.tokens} tokens under plan {commit.plan}; reserved were "
                f"{self.checklist.tokens} under {plan}"
            )
        if len(commit.digests) != len(items):
            raise CorruptFrameError(f"{len(commit.digests)} digests for {len(items)} items")
        if self.marks == dict(zip(items, commit.digests, strict=True)):
            return ()
        absent = []
        for item, expected in zip(items, commit.digests, strict=True):
            if (seen := self.marks.get(item, expected)) != expected:
                raise CorruptFrameError(f"{item} came as {seen:016x}, committed as {expected:016x}")
            if item not in self.marks and self.offered.get(item) != expected:
                absent.append(item)
        return tuple(absent)
