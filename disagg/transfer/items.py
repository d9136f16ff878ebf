"""Which items a prompt is made of, in which order, and where each lies. Arithmetic only.

Sender and receiver derive the same list from the plan and the length of the prompt, so a manifest
is a list of digests, and no peer ever names an address.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from disagg.errors import LayoutError
from disagg.page import ARENA_UNIT, Kind
from disagg.plan import Plan
from disagg.pool import Arena
from disagg.state import GroupState
from disagg.wire import FRAME_BYTES, MAX_ITEMS, Item, PageFrame

KIND_ORDER = (Kind.SEGMENT, Kind.PAGE, Kind.SIDE, Kind.RAW)  # what a page depends on comes first


HEADER_BYTES = 512  # prelude, names and numbers of a frame; and
ITEM_HEADER_BYTES = 20  # layer, record and digest of each item


def message_bytes(payload: int, items: int) -> int:
    """An upper bound of the message that carries a payload."""
    return HEADER_BYTES + items * ITEM_HEADER_BYTES + payload


def items_in_frame(frame_bytes: int, nbytes: int) -> int:
    """How many items of `nbytes` a message of `frame_bytes` carries; a larger one goes alone."""
    fitting = (frame_bytes - HEADER_BYTES) // (ITEM_HEADER_BYTES + nbytes)
    return min(MAX_ITEMS, max(1, fitting))


class Checklist:
    """The items of a prompt of `tokens` tokens under a plan, in the order of a manifest."""

    def __init__(self, plan: Plan, tokens: int):
        self.plan = plan
        self.tokens = tokens
        self._counts = [group.inventory(tokens) for group in plan.groups]
        self._nbytes = {
            (index, kind): group.layer_bytes(group.layout(kind))
            for index, group in enumerate(plan.groups)
            for kind in Kind
            if self._counts[index].count(kind)
        }

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """All items: layer by layer, segments, pages, side records, raw pages."""
        return tuple(x for layer in range(len(self.plan.group_of)) for x in self.layer(layer))

    def layer(self, layer: int) -> Iterator[Item]:
        """The items of one model layer."""
        group = self.plan.group_of[layer]
        for kind in KIND_ORDER:
            for record in range(self._counts[group].count(kind)):
                yield Item(kind, group, layer, record)

    def select(self, layer: int, kind: Kind, first: int, count: int) -> list[Item]:
        """The items of records `first` .. `first + count - 1` of one layer."""
        group = self.plan.group_of[layer]
        return [Item(kind, group, layer, record) for record in range(first, first + count)]

    def nbytes(self, item: Item) -> int:
        """Size of an item of this prompt: one block per KV head."""
        return self._nbytes[item.group, item.kind]

    @cached_property
    def num_items(self) -> int:
        """How many items there are."""
        return sum(count for count, _ in self._sizes())

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all items together."""
        return sum(count * nbytes for count, nbytes in self._sizes())

    @cached_property
    def frame_bytes(self) -> int:
        """The largest message with pages: FRAME_BYTES, or that of one item above this size."""
        return max(FRAME_BYTES, *(message_bytes(size, 1) for size in self._nbytes.values()))

    @property
    def window_bytes(self) -> int:
        """What may be on the way in one stream: two frames."""
        return 2 * self.frame_bytes

    def check(self, frame: PageFrame) -> None:
        """LayoutError unless every item of a frame is one of ours, of our layout and size."""
        if frame.group >= len(self.plan.groups):
            raise LayoutError(f"no layer group {frame.group}; there are {len(self.plan.groups)}")
        group = self.plan.groups[frame.group]
        layout = group.layout(frame.kind)
        if frame.layout != layout.fingerprint:
            raise LayoutError(
                f"{frame.kind} frames of layout {frame.layout}; here they have "
                f"{layout.fingerprint} ({layout.spec})"
            )
        count, nbytes = self._counts[frame.group].count(frame.kind), group.layer_bytes(layout)
        inside = {*frame.layers} <= {*group.layers} and max(frame.records) < count
        if not inside or {*map(len, frame.payload)} != {nbytes}:
            raise LayoutError(
                f"{frame.kind} records {min(frame.records)} to {max(frame.records)} of layers "
                f"{sorted({*frame.layers})}, {len(frame.payload[0])} bytes; group {frame.group} "
                f"has {count} of {nbytes} bytes in layers {group.layers}"
            )

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Count and size of the items of each group and kind."""
        for (index, kind), nbytes in self._nbytes.items():
            yield len(self.plan.groups[index].layers) * self._counts[index].count(kind), nbytes


class Records:
    """Where the items of one sequence lie in an arena, from the page ids of its groups."""

    def __init__(self, plan: Plan, states: Sequence[GroupState]):
        self._places: dict[tuple[int, Kind], tuple[list[int], dict[int, int]]] = {}
        for index, (group, state) in enumerate(zip(plan.groups, states, strict=True)):
            for kind, ids in ids_by_kind(state).items():
                if ids:
                    layout = group.layout(kind)
                    offsets = {layer: group.layer_offset(layout, layer) for layer in group.layers}
                    self._places[index, kind] = ids, offsets

    def start(self, item: Item) -> int:
        """Byte offset of an item in the arena."""
        ids, offsets = self._places[item.group, item.kind]
        return ids[item.record] * ARENA_UNIT + offsets[item.layer]

    def starts_of(self, items: Sequence[Item]) -> list[int]:
        """Byte offsets of items of one kind and layer group."""
        ids, offsets = self._places[items[0].group, items[0].kind]
        return [ids[record] * ARENA_UNIT + offsets[layer] for _, _, layer, record in items]

    def starts(self, frame: PageFrame) -> list[int]:
        """Byte offsets of the items of a frame that `Checklist.check` accepted."""
        ids, offsets = self._places[frame.group, frame.kind]
        places = zip(frame.layers, frame.records, strict=True)
        return [ids[record] * ARENA_UNIT + offsets[layer] for layer, record in places]

    def replace(self, kind: Kind, group: int, record: int, page: int) -> None:
        """From now on a record is another page."""
        self._places[group, kind][0][record] = page


class ArenaSource:
    """Reads items of a sequence out of an arena: on the host, without a copy.

    From a device many are copied at once, when they are staged; an item that was not, or is read
    a second time, is copied by itself.
    """

    def __init__(self, arena: Arena, checklist: Checklist, states: Sequence[GroupState]):
        self._arena = arena
        self._checklist = checklist
        self._records = Records(checklist.plan, states)
        self._staged: dict[Item, memoryview] = {}

    def __call__(self, item: Item) -> memoryview:
        """The bytes of one item."""
        data = self._staged.pop(item, None)
        return self._arena.read(*self._span(item)) if data is None else data

    def read(self, items: Sequence[Item]) -> list[memoryview]:
        """The bytes of items of one kind and layer group."""
        if self._staged or not items:
            return list(map(self, items))
        nbytes, read = self._checklist.nbytes(items[0]), self._arena.read
        return [read(start, nbytes) for start in self._records.starts_of(items)]

    def stage(self, items: Sequence[Item]) -> Callable[[], None]:
        """Begin to copy items to the host, as they are now; the call waits until they are there."""
        copies = self._arena.stage([self._span(item) for item in items])

        def wait() -> None:
            self._staged.update(zip(items, copies(), strict=True))

        return wait

    def _span(self, item: Item) -> tuple[int, int]:
        return self._records.start(item), self._checklist.nbytes(item)


def ids_by_kind(state: GroupState) -> dict[Kind, list[int]]:
    """The page ids of the records of a prompt, in their order."""
    segments = dict.fromkeys(run.segment for run in state.runs if run.segment is not None)
    return {
        Kind.PAGE: state.page_ids(),
        Kind.SEGMENT: list(segments),
        Kind.RAW: state.tail + state.kept,
        Kind.SIDE: [] if state.side is None else [state.side],
    }
