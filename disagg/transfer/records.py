"""The items of a prompt, their addresses in an arena, and which of them have arrived.

Sender and receiver derive the same manifest, the list of items, from the plan and the length of the
prompt; the commit adds their digests. So no peer ever names an address.
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
from disagg.transfer.partition import ALL_HEADS, HeadSlice
from disagg.wire import FRAME_BYTES, Buffer, Commit, PageFrame, digest

# what a page depends on comes first
KIND_ORDER = (Kind.SEGMENT, Kind.PAGE, Kind.SIDE, Kind.RAW, Kind.WIRE)
HEADER_BYTES = 512  # upper bound of a frame's prelude and header, without its items
ITEM_HEADER_BYTES = 20  # index, size and digest of each item
LONGEST = 2048  # tokens: a codec should make a prompt of this length smaller, if any

Span = tuple[int, int]  # first byte, number of bytes


def message_bytes(payload: int, items: int) -> int:
    """Upper bound of the size of a message that carries a payload."""
    return HEADER_BYTES + items * ITEM_HEADER_BYTES + payload


# -- the items of a prompt


@dataclass(frozen=True)
class Tail:
    """The last raw record of a layer group, which is partly filled. Only filled rows are sent.

    spans: relative to the start of a layer page: K rows, then V rows, head by head
    """

    record: int
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.spans)


class Manifest:
    """The items of a prompt of `tokens` tokens under a plan, in the order of their indices.

    Records without tokens are no items: the empty rows of the last raw record, and the side record
    of a prompt without pages. Both workers have zeros there.

    tails: partly filled raw records, by layer group
    runs:  indices of the items of one layer and kind, in the order of the items
    """

    def __init__(self, plan: Plan, tokens: int):
        self.plan = plan
        self.tokens = tokens
        self.tails: dict[int, Tail] = {}
        self.runs: dict[tuple[int, Kind], range] = {}
        self.num_items = 0
        self._nbytes: dict[tuple[int, Kind], int] = {}  # by layer group and kind
        group_counts = []
        for group_index, group in enumerate(plan.groups):
            counts = _item_counts(group, tokens)
            group_counts.append(counts)
            for kind in counts:
                layer_bytes = group.layer_bytes(group.layout(kind))
                self._nbytes[group_index, kind] = layer_bytes
            last_record, rows = divmod(tokens - group.sealed(tokens), RAW_TOKENS)
            if rows:
                spans = tuple(_row_spans(group, rows))
                self.tails[group_index] = Tail(last_record, spans)
        for layer, group_index in enumerate(plan.group_of):
            for kind, count in group_counts[group_index].items():
                end = self.num_items + count
                self.runs[layer, kind] = range(self.num_items, end)
                self.num_items = end
        self._run_names = list(self.runs)
        self._run_starts = [run.start for run in self.runs.values()]

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """All items: layer by layer, segments, pages, side records, raw pages."""
        layers = range(len(self.plan.group_of))
        return tuple(chain.from_iterable(map(self.layer, layers)))

    def layer(self, layer: int) -> Iterator[Item]:
        """The items of one model layer."""
        for kind in KIND_ORDER:
            count = len(self.runs.get((layer, kind), ()))
            yield from items_of(kind, self.plan.group_of[layer], layer, range(count))

    def index_of(self, item: Item) -> int:
        """The index of an item in the order of all items."""
        return self.runs[item.layer, item.kind][item.record]

    def item(self, index: int) -> Item:
        """The item at an index; LayoutError for an index beyond the last."""
        if index >= self.num_items:
            raise LayoutError(f"item {index} of a prompt that has {self.num_items}")
        run = bisect_right(self._run_starts, index) - 1
        layer, kind = self._run_names[run]
        record = index - self._run_starts[run]
        return Item(kind, self.plan.group_of[layer], layer, record)

    def indices_of(self, block: "PrefixBlock") -> Iterator[range]:
        """The indices of the items of a prefix block, in the order of `block.items`."""
        for layer in self.plan.groups[block.group].layers:
            for kind, records in block.parts.items():
                yield self.runs[layer, kind][records.start : records.stop]

    def nbytes(self, item: Item) -> int:
        """Bytes of an item: one block per KV head, or the rows of a tail."""
        kind, group, _, _ = item
        tail = self.tail(item) if kind is Kind.RAW else None
        return tail.nbytes if tail else self._nbytes[group, kind]

    def tail(self, item: Item) -> Tail | None:
        """The tail of a layer group, if this item is one."""
        tail = self.tails.get(item.group) if item.kind is Kind.RAW else None
        return tail if tail and tail.record == item.record else None

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all items together."""
        return sum(
            len(group.layers) * sum(map(self.nbytes, self.layer(group.layers[0])))
            for group in self.plan.groups
        )

    @cached_property
    def frame_bytes(self) -> int:
        """The largest message with pages: FRAME_BYTES, or more if one item is larger."""
        item_messages = [message_bytes(nbytes, 1) for nbytes in self._nbytes.values()]
        return max(FRAME_BYTES, *item_messages)

    def match(self, states: Sequence[GroupState]) -> None:
        """TransferError unless a sequence has the records that a prompt of its length has.

        While decoding, some codecs seal pages of other layouts or segments, or set tokens aside.
        """
        for group, state in zip(self.plan.groups, states, strict=True):
            inventory = group.inventory(self.tokens)
            ids = state.ids_by_kind()
            expected = {kind: inventory[kind] for kind in KIND_ORDER}
            counts = {kind: len(ids.get(kind, ())) for kind in KIND_ORDER}
            segments = {run.segment for run in state.runs}
            shares_segment = len(state.runs) > len(segments)
            if group.lead:  # all segments are copies of the first
                counts[Kind.SEGMENT] = expected[Kind.SEGMENT]
                shares_segment = False
            has_layout = all(run.layout == group.page for run in state.runs)
            if counts != expected or shares_segment or not has_layout:
                raise TransferError(
                    f"the pages of {group.codec} that were sealed while decoding make {counts}; "
                    f"a prompt of {self.tokens} tokens has {expected}"
                )


def least_worth_sending(plan: Plan) -> int:
    """The length from which on prompts, up to LONGEST, are sent in fewer bytes than fp16 has.

    States of a hybrid model are not counted: they have the same bytes at any length.

    0 if there is none: the plan does not compress, so that no length is better than another.
    """
    # a token takes the most bytes just before a page ends
    for end in range(LONGEST, 0, -RAW_TOKENS):
        manifest = Manifest(plan, end - 1)
        overhead = 2 * len(plan.group_of) * HEADER_BYTES
        overhead += 2 * ITEM_HEADER_BYTES * manifest.num_items
        kv_bytes = manifest.total_bytes - plan.wire_state_bytes
        if kv_bytes + overhead > 2 * plan.numbers(end - 1):
            return end if end < LONGEST else 0
    return RAW_TOKENS


def _item_counts(group: LayerGroup, tokens: int) -> dict[Kind, int]:
    """How many items of each kind a layer has; kinds without items are left out."""
    inventory = group.inventory(tokens)
    counts = {kind: inventory[kind] for kind in KIND_ORDER}
    counts[Kind.SIDE] = 1 if group.is_side_sent(tokens) else 0
    return {kind: count for kind, count in counts.items() if count}


def _row_spans(group: LayerGroup, rows: int) -> Iterator[Span]:
    """The first `rows` tokens of a raw layer page."""
    for head in range(group.heads):
        for plane in group.raw.planes:
            start = head * group.raw.block_bytes + plane.offset
            yield start, plane.nbytes // RAW_TOKENS * rows


# -- the addresses of items, and the items that arrived


class Addresses:
    """The addresses of a sequence's items in an arena, from the page ids of its groups.

    heads: which of the heads of this rank the items have
    """

    def __init__(
        self,
        manifest: Manifest,
        states: Sequence[GroupState],
        heads: HeadSlice = ALL_HEADS,
    ):
        self._manifest = manifest
        self._ids = [state.ids_by_kind() for state in states]
        self._offsets: dict[tuple[Kind, int], int] = {}  # by kind and layer
        for group, ids in zip(manifest.plan.groups, self._ids, strict=True):
            segments = ids.get(Kind.SEGMENT)
            if group.lead and segments:  # as many as a prompt would have
                expected = group.inventory(manifest.tokens)[Kind.SEGMENT]
                copies = segments[:1] * (expected - len(segments))
                ids[Kind.SEGMENT] = segments + copies
            for kind in ids:
                layout = group.layout(kind)
                for layer in group.layers:
                    offset = heads.offset(group, layout, layer)
                    self._offsets[kind, layer] = offset

    def spans(self, item: Item) -> list[Span]:
        """The bytes of an item: one span, or several for the rows of a tail."""
        kind, group, layer, record = item
        start = self._ids[group][kind][record] * ARENA_UNIT + self._offsets[kind, layer]
        if kind is Kind.RAW and (tail := self._manifest.tail(item)):
            return [(start + offset, nbytes) for offset, nbytes in tail.spans]
        return [(start, self._manifest.nbytes(item))]

    def unsent(self) -> Iterator[Span]:
        """Records that the items of all heads do not cover. A receiver fills them with zeros first.

        Not those that are written whole before they are read: states, from their wire records.
        """
        for index, group in enumerate(self._manifest.plan.groups):
            ids = self._ids[index]
            records = []
            if tail := self._manifest.tails.get(index):
                records.append((Kind.RAW, tail.record))
            if Kind.SIDE in ids and not group.is_side_sent(self._manifest.tokens):
                records.append((Kind.SIDE, 0))
            for kind, record in records:
                shape = group.record(group.layout(kind))
                if shape.zeroed:
                    yield ids[kind][record] * ARENA_UNIT, shape.nbytes


class ArenaSource:
    """Reads items of a sequence out of an arena: of all heads of this rank, or a slice of them.

    On the host nothing is copied but the rows of tails. From a device, many items are copied at
    once when they are staged; those that were not, or are read again, are copied by `read`.
    """

    def __init__(
        self,
        arena: Arena,
        manifest: Manifest,
        states: Sequence[GroupState],
        heads: HeadSlice = ALL_HEADS,
    ):
        self._arena = arena
        self._addresses = Addresses(manifest, states, heads)
        self._staged: dict[Item, memoryview] = {}

    def read(self, items: Sequence[Item]) -> list[memoryview]:
        """The bytes of each item. What was staged is handed out once."""
        if not self._staged:
            return self._begin(items)()
        absent = [item for item in items if item not in self._staged]
        copies = dict(zip(absent, self._begin(absent)(), strict=True))
        return [
            copies[item] if item in copies else self._staged.pop(item) for item in items
        ]

    def stage(self, items: Sequence[Item]) -> Callable[[], None]:
        """Begin to copy what kernels of this thread write; call the result to wait for it."""
        copies = self._begin(items, fresh=True)

        def wait() -> None:
            self._staged.update(zip(items, copies(), strict=True))

        return wait

    def _begin(self, items: Sequence[Item], fresh: bool = False) -> Copies:
        item_spans = [self._addresses.spans(item) for item in items]
        copies = self._arena.stage([*chain.from_iterable(item_spans)], fresh)

        def wait() -> list[memoryview]:
            parts = iter(copies())
            return [_joined([next(parts) for _ in spans]) for spans in item_spans]

        return wait


@dataclass(frozen=True)
class ReceivedItems:
    """The items of a prompt that a receiver has verified and stored.

    digests: of these items, by index
    """

    manifest: Manifest
    addresses: Addresses
    digests: dict[int, int]

    def verify(
        self, frame: PageFrame
    ) -> tuple[dict[int, int], list[tuple[int, Buffer]]]:
        """Check a frame: digests by index of its new items, and their bytes by arena offset.

        Raises LayoutError for an index that is no item of this prompt, or data that has not its
        size, and CorruptFrameError for an item whose bytes do not have its digest, or that came
        with another digest before.
        """
        new_digests: dict[int, int] = {}
        pieces: list[tuple[int, Buffer]] = []
        for index, sent_digest, data in zip(
            frame.indices, frame.digests, frame.payload, strict=True
        ):
            item = self.manifest.item(index)
            nbytes = self.manifest.nbytes(item)
            if len(data) != nbytes:
                raise LayoutError(
                    f"{item} comes in {len(data)} bytes; here it has {nbytes}"
                )
            earlier_digest = self.digests.get(index, new_digests.get(index))
            is_new = earlier_digest is None
            actual_digest = digest(data) if earlier_digest is None else earlier_digest
            if actual_digest != sent_digest:
                raise CorruptFrameError(
                    f"{item} is {actual_digest:x}, sent as {sent_digest:x}"
                )
            if is_new:
                new_digests[index] = sent_digest
                end = 0
                for start, length in self.addresses.spans(item):
                    pieces.append((start, data[end : end + length]))
                    end += length
        return new_digests, pieces

    def check(self, commit: Commit) -> None:
        """Raises LayoutError for a commit of another prompt, CorruptFrameError if an item arrived
        with another digest than the commit has, TransferError if one did not arrive.
        """
        manifest = self.manifest
        reserved = (manifest.tokens, manifest.plan.fingerprint, manifest.num_items)
        committed = (commit.tokens, commit.plan, len(commit.digests))
        if committed != reserved:
            raise LayoutError(
                f"tokens, plan and items are {committed}; reserved were {reserved}"
            )
        if tuple(map(self.digests.get, range(manifest.num_items))) == commit.digests:
            return
        for index, received_digest in self.digests.items():
            committed_digest = commit.digests[index]
            if received_digest != committed_digest:
                raise CorruptFrameError(
                    f"{manifest.item(index)} came as {received_digest:x}, "
                    f"committed as {committed_digest:x}"
                )
        num_absent = manifest.num_items - len(self.digests)
        if num_absent:
            first = next(x for x in range(manifest.num_items) if x not in self.digests)
            raise TransferError(
                f"{num_absent} items of the commit never came, "
                f"the first is {manifest.item(first)}"
            )


def _joined(parts: Sequence[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
