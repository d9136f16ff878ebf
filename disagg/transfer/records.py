"""Which items a prompt is made of, where each lies, and which arrived.

Sender and receiver derive the same list from the plan and the length of the prompt, so a manifest
is a list of digests, and no peer ever names an address.
Arithmetic and hashes only: nothing here knows a peer, a reservation or a pool.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from disagg.errors import CorruptFrameError, LayoutError, TransferError
from disagg.kv.arena import Arena, Copies
from disagg.kv.page import ARENA_UNIT, RAW_TOKENS, Item, Kind, items_of
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.prefix_keys import PrefixBlock
from disagg.kv.state import GroupState
from disagg.wire import FRAME_BYTES, Buffer, Commit, PageFrame, digest

KIND_ORDER = (
    Kind.SEGMENT,
    Kind.PAGE,
    Kind.SIDE,
    Kind.RAW,
)  # what a page depends on comes first
HEADER_BYTES = 512  # prelude, names and numbers of a frame; and
ITEM_HEADER_BYTES = 20  # place, size and digest of each item
LONGEST = 2048  # tokens of a prompt that a codec can be expected to make smaller

Span = tuple[int, int]  # bytes: the first, and how many


def message_bytes(payload: int, items: int) -> int:
    """An upper bound of the message that carries a payload."""
    return HEADER_BYTES + items * ITEM_HEADER_BYTES + payload


# -- the items of a prompt


@dataclass(frozen=True)
class Tail:
    """The last raw record of a layer group, partly filled: only its filled rows are sent.

    spans: of one layer page, from its start: K rows, then V rows, head by head
    """

    record: int
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.spans)


class Manifest:
    """The items of a prompt of `tokens` tokens under a plan, in the order of a manifest.

    What no token has touched is no item: the empty rows of the last raw record, and the side record
    of a prompt without pages. Both sides have zeros there.
    """

    def __init__(self, plan: Plan, tokens: int):
        self.plan = plan
        self.tokens = tokens
        self.tails: dict[int, Tail] = {}  # by layer group
        found = list[dict[Kind, int]]()  # how many of each kind, by layer group
        self._nbytes: dict[tuple[int, Kind], int] = {}
        for index, group in enumerate(plan.groups):
            inventory = group.inventory(tokens)
            counts = {kind: inventory[kind] for kind in KIND_ORDER}
            counts[Kind.SIDE] = int(group.is_side_sent(tokens))
            found.append({kind: count for kind, count in counts.items() if count})
            for kind in found[index]:
                self._nbytes[index, kind] = group.layer_bytes(group.layout(kind))
            last, rows = divmod(tokens - group.sealed(tokens), RAW_TOKENS)
            if rows:
                self.tails[index] = Tail(last, tuple(_rows(group, rows)))
        self.num_items = 0
        self.runs: dict[
            tuple[int, Kind], range
        ] = {}  # places by layer and kind, in their order
        for layer, index in enumerate(plan.group_of):
            for kind, count in found[index].items():
                self.runs[layer, kind] = range(self.num_items, self.num_items + count)
                self.num_items += count
        self._names, self._starts = (
            [*self.runs],
            [run.start for run in self.runs.values()],
        )

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """All items: layer by layer, segments, pages, side records, raw pages."""
        return tuple(
            chain.from_iterable(map(self.layer, range(len(self.plan.group_of))))
        )

    def layer(self, layer: int) -> Iterator[Item]:
        """The items of one model layer."""
        for kind in KIND_ORDER:
            count = len(self.runs.get((layer, kind), ()))
            yield from items_of(kind, self.plan.group_of[layer], layer, range(count))

    def place(self, item: Item) -> int:
        """Which of all items it is, in their order."""
        return self.runs[item.layer, item.kind][item.record]

    def item(self, place: int) -> Item:
        """The item at a place; LayoutError where there is none."""
        if place >= self.num_items:
            raise LayoutError(f"item {place} of a prompt that has {self.num_items}")
        run = bisect_right(self._starts, place) - 1
        layer, kind = self._names[run]
        return Item(kind, self.plan.group_of[layer], layer, place - self._starts[run])

    def places(self, unit: "PrefixBlock") -> Iterator[range]:
        """Where the items of a unit are in that order; as many as it has, in the unit's order."""
        for layer in self.plan.groups[unit.group].layers:
            for kind, records in unit.parts.items():
                yield self.runs[layer, kind][records.start : records.stop]

    def nbytes(self, item: Item) -> int:
        """Bytes of an item: one block per KV head, or the rows of a tail."""
        kind, group, _, _ = item
        tail = self.tail(item) if kind is Kind.RAW else None
        return tail.nbytes if tail else self._nbytes[group, kind]

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all items together."""
        return sum(
            len(group.layers) * sum(map(self.nbytes, self.layer(group.layers[0])))
            for group in self.plan.groups
        )

    @cached_property
    def frame_bytes(self) -> int:
        """The largest message with pages: FRAME_BYTES, or that of one item above this size."""
        return max(
            FRAME_BYTES, *(message_bytes(size, 1) for size in self._nbytes.values())
        )

    def match(self, states: Sequence[GroupState]) -> None:
        """TransferError unless a sequence has the records of a prompt: while decoding, some codecs
        seal pages of other layouts or segments, or set tokens aside.
        """
        for group, state in zip(self.plan.groups, states, strict=True):
            inventory, ids = group.inventory(self.tokens), state.ids_by_kind()
            theirs = {kind: len(ids.get(kind, ())) for kind in KIND_ORDER}
            ours = {kind: inventory[kind] for kind in KIND_ORDER}
            joined = len(state.runs) > len(
                {run.segment for run in state.runs}
            )  # the first one
            if group.lead:  # which all others are copies of
                theirs[Kind.SEGMENT], joined = ours[Kind.SEGMENT], False
            if (
                theirs != ours
                or joined
                or any(run.layout != group.page for run in state.runs)
            ):
                raise TransferError(
                    f"{group.codec} leaves {theirs} behind, sealed while decoding; a prompt of "
                    f"{self.tokens} tokens is {ours}"
                )

    def tail(self, item: Item) -> Tail | None:
        """The tail of a layer group, if this item is of one."""
        found = self.tails.get(item.group) if item.kind is Kind.RAW else None
        return found if found and found.record == item.record else None


def least_worth_sending(plan: Plan) -> int:
    """Prompts of so many tokens or more, up to LONGEST, are sent in fewer bytes than fp16 has.

    0 if none are: the plan does not compress, so that no length is better than another.
    """
    for end in range(
        LONGEST, 0, -RAW_TOKENS
    ):  # the most bytes a token has just before a page ends
        checklist = Manifest(plan, end - 1)
        overhead = 2 * len(plan.group_of) * HEADER_BYTES
        overhead += 2 * ITEM_HEADER_BYTES * checklist.num_items
        if checklist.total_bytes + overhead > 2 * plan.numbers(end - 1):
            return end if end < LONGEST else 0
    return RAW_TOKENS


def _rows(group: LayerGroup, rows: int) -> Iterator[Span]:
    """The first `rows` tokens of a raw layer page."""
    for head in range(group.heads):
        for plane in group.raw.planes:
            yield (
                head * group.raw.block_bytes + plane.offset,
                plane.nbytes // RAW_TOKENS * rows,
            )


# -- where they lie, and which arrived


class Addresses:
    """Where the items of one sequence lie in an arena, from the page ids of its groups."""

    def __init__(self, checklist: Manifest, states: Sequence[GroupState]):
        self._checklist = checklist
        self._ids = [state.ids_by_kind() for state in states]
        for group, ids in zip(checklist.plan.groups, self._ids, strict=True):
            if group.lead and (
                known := ids.get(Kind.SEGMENT)
            ):  # of as many as a prompt would have
                missing = group.inventory(checklist.tokens)[Kind.SEGMENT] - len(known)
                ids[Kind.SEGMENT] = known + known[:1] * missing
        self._offsets = {
            (kind, layer): group.layer_offset(group.layout(kind), layer)
            for group, ids in zip(checklist.plan.groups, self._ids, strict=True)
            for kind in ids
            for layer in group.layers
        }

    def spans(self, item: Item) -> list[Span]:
        """The bytes of an item; more than one span only for the rows of a tail."""
        kind, group, layer, record = item
        start = self._ids[group][kind][record] * ARENA_UNIT + self._offsets[kind, layer]
        if kind is Kind.RAW and (tail := self._checklist.tail(item)):
            return [(start + offset, nbytes) for offset, nbytes in tail.spans]
        return [(start, self._checklist.nbytes(item))]

    def unsent(self) -> Iterator[Span]:
        """Records of which not every byte is an item: a receiver fills them with zeros."""
        for index, group in enumerate(self._checklist.plan.groups):
            ids, tail = self._ids[index], self._checklist.tails.get(index)
            records = [(Kind.RAW, tail.record)] if tail else []
            sent = group.is_side_sent(self._checklist.tokens)
            records += [(Kind.SIDE, 0)] if Kind.SIDE in ids and not sent else []
            for kind, record in records:
                yield (
                    ids[kind][record] * ARENA_UNIT,
                    group.record(group.layout(kind)).nbytes,
                )


class ArenaSource:
    """Reads items of a sequence out of an arena: on the host, without a copy but of tails.

    From a device many are copied at once, when staged; others, and those read again, on the spot.
    """

    def __init__(self, arena: Arena, checklist: Manifest, states: Sequence[GroupState]):
        self._arena = arena
        self._addresses = Addresses(checklist, states)
        self._staged: dict[Item, memoryview] = {}

    def read(self, items: Sequence[Item]) -> list[memoryview]:
        """The bytes of items."""
        if not self._staged:
            return self._begin(items)()
        absent = [item for item in items if item not in self._staged]
        found = dict(zip(absent, self._begin(absent)(), strict=True))
        return [found[x] if x in found else self._staged.pop(x) for x in items]

    def stage(self, items: Sequence[Item]) -> Callable[[], None]:
        """Begin to copy what kernels of this thread write; the call waits until it is there."""
        copies = self._begin(items, fresh=True)
        return lambda: self._staged.update(zip(items, copies(), strict=True))

    def _begin(self, items: Sequence[Item], fresh: bool = False) -> Copies:
        spans = [self._addresses.spans(item) for item in items]
        copies = self._arena.stage([span for some in spans for span in some], fresh)

        def wait() -> list[memoryview]:
            parts = iter(copies())
            return [_joined([next(parts) for _ in some]) for some in spans]

        return wait


@dataclass(frozen=True)
class ReceivedItems:
    """Which items of a prompt are verified and in place at a receiver: `here`, digests by place."""

    checklist: Manifest
    addresses: Addresses
    here: dict[int, int]

    def absent(
        self, frame: PageFrame
    ) -> tuple[dict[int, int], list[tuple[int, Buffer]]]:
        """What a frame brings that is not here, verified: digests by place, and bytes with their
        offsets.

        Raises LayoutError for what is no item of this prompt, or not of its size, CorruptFrameError
        for one whose bytes do not have its digest, or that came with another one before.
        """
        new: dict[int, int] = {}
        pieces: list[tuple[int, Buffer]] = []
        for place, expected, data in zip(
            frame.places, frame.digests, frame.payload, strict=True
        ):
            item = self.checklist.item(place)
            if len(data) != (size := self.checklist.nbytes(item)):
                raise LayoutError(
                    f"{item} comes in {len(data)} bytes; here it has {size}"
                )
            known = self.here.get(place, new.get(place))
            if (seen := digest(data) if known is None else known) != expected:
                raise CorruptFrameError(f"{item} is {seen:x}, sent as {expected:x}")
            if known is None:
                new[place], end = expected, 0
                for start, nbytes in self.addresses.spans(item):
                    pieces.append((start, data[end : end + nbytes]))
                    end += nbytes
        return new, pieces

    def check(self, commit: Commit) -> None:
        """LayoutError for a commit of another prompt, CorruptFrameError if an item is here with
        another digest than the commit says, TransferError if one is not here.
        """
        ours = (
            self.checklist.tokens,
            self.checklist.plan.fingerprint,
            self.checklist.num_items,
        )
        if ours != (theirs := (commit.tokens, commit.plan, len(commit.digests))):
            raise LayoutError(
                f"tokens, plan and items are {theirs}; reserved were {ours}"
            )
        for place, seen in self.here.items():
            if seen != (expected := commit.digests[place]):
                item = self.checklist.item(place)
                raise CorruptFrameError(
                    f"{item} came as {seen:x}, committed as {expected:x}"
                )
        if absent := len(commit.digests) - len(self.here):
            first = next(
                place for place in range(len(commit.digests)) if place not in self.here
            )
            item = self.checklist.item(first)
            raise TransferError(
                f"{absent} items of the commit never came, the first is {item}"
            )


def _joined(parts: Sequence[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
