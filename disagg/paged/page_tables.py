"""The step plan of one layer group: made before layer 0 of a decode step, used by every layer.

It fixes, for a batch of sequences that each append m tokens: the raw slot of every new token, which
sequences seal a page and where, the page tables that the queries then see, and which raw pages are
free after the last layer. Layers only follow it; no bookkeeping happens between them.

    rows of the step      q0 q1 q2 | q3 | q4 q5      tokens of three sequences
    new slots             (raw page, slot) for each
    seals                 tail[0:T] of a sequence -> a fresh page
    sealed, tail          page tables after the seals, and which of their tokens each query sees
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from disagg.codecs.contract import Codec
from disagg.codecs.exact import exact_format
from disagg.kernels.cpu.library import STRIP_PAGES
from disagg.kernels.formats import Format
from disagg.kernels.gpu.plan import Ints, Span, most_units, units_of_spans
from disagg.kernels.sealing import SealRows
from disagg.kernels.view import Table, WorkPlan
from disagg.kv.page import Layout, align
from disagg.kv.plan import LayerGroup, window_start
from disagg.kv.state import GroupState, Run
from disagg.paged.append import (
    NewRecords,
    RecordIds,
    Seal,
    SequenceGrowth,
    append_tokens,
    seal_rows,
    seal_tails,
)


@dataclass(frozen=True, kw_only=True)
class PageTable(Table):
    """A table that names the layout of its pages.

    With `sides` they are raw pages of the tokens that the side records name; without, they hold
    tokens in order.
    """

    layout: Layout


@dataclass(frozen=True)
class GroupStep:
    """The plan of one layer group for a step; all tensors are int32.

    rows:    [N] - the step's rows (new tokens) that belong to this group, in order
    pages, slots: [N] - the raw page and the slot in it that each row is written to
    seals:   tails that are sealed; completed: the same for the append kernel, None: no seals
    queries: [B, M] - index into `rows` of each query; padding repeats a row of the batch
    answers: [N] - index into the queries, sequence by sequence, of each row
    tables:  page tables after the seals: of pages, those sealed while decoding, kept tokens, tails
    units:   how a GPU attends to all tables; None on a CPU
    freed:   raw pages to release after the last layer
    """

    group: LayerGroup
    rows: Tensor
    pages: Tensor
    slots: Tensor
    seals: tuple[Seal, ...]
    completed: SealRows | None
    queries: Tensor
    answers: Tensor
    tables: tuple[PageTable, ...]
    units: WorkPlan | None
    freed: tuple[int, ...]


def appendable(group: LayerGroup, n: int, m: int) -> int:
    """How many of m tokens may be appended to n in one step.

    Only the first token of a step may fill a tail. Otherwise an earlier query of the step would
    attend to the sealed page, where decoding token by token attends to the exact tokens.
    """
    if group.page == group.raw:
        return m  # sealing a raw page changes no value
    return min(m, 1 + draftable(group, n))


def draftable(group: LayerGroup, n: int) -> int:
    """How many tokens may follow one token behind n in one step, and be taken back.

    None of them may fill a tail: what is sealed stays.
    """
    sealed = group.sink + group.sealed(n + 1)
    # sealed(n) moves when n reaches this
    next_seal = sealed + group.page.tokens + group.residual
    return max(0, next_seal - 2 - n)


def plan_step(
    codec: Codec,
    group: LayerGroup,
    growths: Sequence[SequenceGrowth],
    records: NewRecords,
    device: torch.device,
) -> GroupStep:
    """Grow every sequence by its m tokens, into the records taken for that.

    The plan is for a device, and still on the host: see `upload`.
    """
    assert all(x.m == 1 or x.m == appendable(group, x.n, x.m) for x in growths)
    longest = max(growth.m for growth in growths)
    pages, slots = append_tokens(group, growths, records)
    seals = seal_tails(group, growths, records)
    tables = build_tables(codec, group, growths, longest, device)
    return GroupStep(
        group=group,
        rows=_int32([g.row + j for g in growths for j in range(g.m)]),
        pages=_int32(pages),
        slots=_int32(slots),
        seals=tuple(seals),
        completed=seal_rows(group, seals, len(pages)) if seals else None,
        queries=_int32(_query_rows(growths, longest)),
        answers=_int32(_answer_rows(growths, longest)),
        tables=tables,
        units=plan_units(group, tables, device),
        freed=tuple(page for seal in seals for page in seal.records.tail.tolist()),
    )


def _query_rows(growths: Sequence[SequenceGrowth], longest: int) -> list[list[int]]:
    """The row of each query of each sequence; padding repeats the first rows."""
    ends = accumulate(growth.m for growth in growths)
    rows = []
    for end, growth in zip(ends, growths, strict=True):
        rows.append([end - max(growth.m - j, 1) for j in range(longest)])
    return rows


def _answer_rows(growths: Sequence[SequenceGrowth], longest: int) -> list[int]:
    """Where the answer of each row is, with `longest` answers for each sequence."""
    return [b * longest + j for b, g in enumerate(growths) for j in range(g.m)]


def build_tables(
    codec: Codec,
    group: LayerGroup,
    growths: Sequence[SequenceGrowth],
    longest: int,
    device: torch.device,
) -> tuple[PageTable, ...]:
    """The page tables of sequences that now have n + m tokens each, as in `GroupStep`.

    The raw codec's pages and tail are the same kind, so they form one table. A GPU gets all tables
    that the group can have, empty ones too: one program serves every step.
    """
    builder = PageTableBuilder(
        codec, group, growths, longest, keeps_empty=device.type == "cuda"
    )
    states = [growth.state for growth in growths]
    tails = [_tail_run(group, state) for state in states]
    if group.page == group.raw:
        runs = [[*x.runs, tail] for x, tail in zip(states, tails, strict=True)]
        return _present(builder.table(group.raw, runs))
    tables = []
    for layout in (group.page, group.flush_page):
        if layout is not None:
            runs = [[run for run in x.runs if run.layout == layout] for x in states]
            tables.append(builder.table(layout, runs))
    if group.kept_limit:
        tables.append(builder.kept_table(states))
    tables.append(builder.table(group.raw, [[tail] for tail in tails]))
    return _present(*tables)


def _present(*tables: PageTable | None) -> tuple[PageTable, ...]:
    return tuple(table for table in tables if table is not None)


@dataclass(frozen=True)
class PageTableBuilder:
    """Makes the page tables of a step, from its sequences and the `longest` number of new tokens.

    keeps_empty: make a table where no sequence has a page, too; its queries see nothing
    """

    codec: Codec
    group: LayerGroup
    growths: Sequence[SequenceGrowth]
    longest: int
    keeps_empty: bool

    def table(
        self, layout: Layout, runs: list[list[Run]], in_order: bool = True
    ) -> PageTable | None:
        """The table of consecutive runs of each sequence; None where no sequence has a page.

        in_order: the pages hold tokens in order, from the first of each row on; else queries see
                  all of them
        """
        is_empty = not any(map(_num_pages, runs))
        if is_empty and not self.keeps_empty:
            return None
        if is_empty:
            runs = [[self._placeholder(layout)]] * len(runs)
        first = np.array([row[0].first if row else 0 for row in runs])
        lead = self._lead_pages(layout, first)
        if lead.any():
            pairs = zip(runs, lead.tolist(), strict=True)
            runs = [_repeat_first_page(row, pages) for row, pages in pairs]
        widths = list(map(_num_pages, runs))
        ids = b"".join(run.pages for row in runs for run in row)
        segments, owner = _segments(runs, widths)

        start, end = self._visible(layout, first, widths - lead)
        if not in_order:
            end = self._positions() + 1
        if is_empty:
            end = np.zeros_like(end)
        # positions -> tokens counted from the first page of the row
        offset = (lead * layout.tokens)[:, None]
        return PageTable(
            pages=_int32(_rectangle(widths, np.frombuffer(ids, dtype=np.int32))),
            lo=_int32(offset + np.maximum(start - first[:, None], 0)),
            hi=_int32(offset + np.maximum(end - first[:, None], 0)),
            fmt=self._format(layout),
            segments=segments,
            owner=owner,
            layout=layout,
        )

    def kept_table(self, states: Sequence[GroupState]) -> PageTable | None:
        """The table of exact tokens that seals have set aside; None where there are none."""
        group = self.group
        runs = [
            [Run(group.raw, None, 0, array("i", state.kept_pages))] for state in states
        ]
        table = self.table(group.raw, runs, in_order=False)
        if table is None:
            return None
        sides = _int32([state.side or 0 for state in states])
        return replace(table, fmt=exact_format(group.raw, group.side), sides=sides)

    def _placeholder(self, layout: Layout) -> Run:
        """A page that can be read, and that no query sees."""
        has_segment = layout != self.group.raw and self.group.segment_of(layout)
        return Run(layout, 0 if has_segment else None, 0, array("i", [0]))

    def _lead_pages(self, layout: Layout, first: Ints) -> Ints:
        """Pages by which each row begins after a strip of pages does: [B].

        Strips are cut as if no page before the window had been dropped, so that answers do not
        depend on it, to the bit.
        """
        is_tail = layout == self.group.raw != self.group.page
        if is_tail or not self.group.window:
            return np.zeros_like(first)
        return first // layout.tokens % STRIP_PAGES

    def _positions(self) -> Ints:
        """The position of each query: [B, M]; padding repeats the last one of its sequence."""
        n, m = np.array([(growth.n, growth.m) for growth in self.growths]).T[:, :, None]
        return n + np.minimum(np.arange(self.longest), m - 1)

    def _visible(
        self, layout: Layout, first: Ints, num_pages: Ints
    ) -> tuple[Ints, Ints]:
        """First and end of the tokens that each query sees, of pages in order: [B, M] positions,
        not counting the sink where the pages come after it.

        first:     [B] - first token of each row's pages
        num_pages: [B] - pages of each row
        """
        sink = self.group.sink
        positions = self._positions()
        tokens = positions + 1  # up to each query, itself included
        first = first[:, None]
        end = first + num_pages[:, None] * layout.tokens
        if layout == self.group.raw:
            # the sink is in front, in pages that are as old as the sequence
            end = np.maximum(np.minimum(end, tokens), first + np.minimum(sink, tokens))
        else:
            end = np.minimum(end, tokens - sink)
        if self.group.window is None:
            return np.broadcast_to(first, end.shape), end
        return window_start(positions, self.group.window, self.group.chunked), end

    def _format(self, layout: Layout) -> Format:
        if layout == self.group.raw:
            return exact_format(layout)
        segment = self.group.segment_of(layout)
        return self.codec.format_of(layout, segment, self.group.head_dim)


def plan_units(
    group: LayerGroup, tables: Sequence[PageTable], device: torch.device
) -> WorkPlan | None:
    """How a GPU attends to tables on the host; None for a CPU."""
    if device.type != "cuda":
        return None
    spans = [Span.of(table) for table in tables]
    units, starts = units_of_spans(spans, group.heads, device)
    return WorkPlan(torch.from_numpy(units), torch.from_numpy(starts))


def room_for_units(
    group: LayerGroup, tables: Sequence[PageTable], device: torch.device
) -> int:
    """The most units of any tables with no more rows and columns than these."""
    return most_units([Span.of(table) for table in tables], group.heads, device)


@dataclass(frozen=True)
class ChunkTables:
    """Where the layers of a chunk are written, by layer group; on the device while they are.

    record_ids:   of the prompt's records
    prefix_pages: of the raw pages that the prefix cache keeps
    """

    record_ids: tuple[RecordIds, ...]
    prefix_pages: tuple[Tensor, ...]


T = TypeVar("T")
# the classes of a step that hold tensors
PARTS = (GroupStep, PageTable, Seal, RecordIds, SealRows, WorkPlan, ChunkTables)


class Upload(Generic[T]):
    """int32 tensors of a tree on a device, side by side in one buffer, so that one copy fills all.

    tree: the same tree, with tensors of the device
    """

    def __init__(self, tree: T, device: torch.device):
        self._buffer = _packed(tree).to(device)
        shapes = [x.shape for x in _tensors(tree)]
        parts = self._buffer.split([_items(shape) for shape in shapes])
        views = (
            part[: shape.numel()].view(shape)
            for part, shape in zip(parts, shapes, strict=True)
        )
        self.tree: T = _mapped(tree, lambda _: next(views))

    def fill(self, tree: T) -> None:
        """Copy the numbers of another tree of the same shapes."""
        self._buffer.copy_(_packed(tree))


def upload(tree: T, device: torch.device) -> T:
    """A tree of the host on a device, in one copy; on a CPU it is there already."""
    return tree if device.type == "cpu" else Upload(tree, device).tree


def _items(shape: torch.Size) -> int:
    """Items of a tensor in the buffer: padded to 16 bytes, which kernels need."""
    return align(shape.numel(), 4)


def _packed(tree: Any) -> Tensor:
    tensors = _tensors(tree)
    sizes = [_items(x.shape) for x in tensors]
    packed = torch.zeros(sum(sizes), dtype=torch.int32)
    for x, part in zip(tensors, packed.split(sizes), strict=True):
        part[: x.numel()] = x.flatten()
    return packed


def _tensors(tree: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    _mapped(tree, tensors.append)
    return tensors


def _mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same tree with each tensor changed, one after another, always in the same order."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple(_mapped(part, change) for part in tree)
    if not isinstance(tree, PARTS):
        return tree
    parts = {name: _mapped(part, change) for name, part in vars(tree).items()}
    return type(tree)(**parts)


def _tail_run(group: LayerGroup, state: GroupState) -> Run:
    """The raw pages of a sequence as a run, those of the sink first."""
    first = state.num_pages * group.page.tokens
    return Run(group.raw, None, first, array("i", state.tail))


def _num_pages(row: list[Run]) -> int:
    return sum(len(run.pages) for run in row)


def _repeat_first_page(row: list[Run], count: int) -> list[Run]:
    """A row with its first page `count` more times in front."""
    if not count:
        return row
    head = row[0]
    return [replace(head, pages=head.pages[:1] * count), *row]


def _segments(
    runs: list[list[Run]], widths: list[int]
) -> tuple[Tensor | None, Tensor | None]:
    """The segments of each sequence, in order, and the index of each page's: [B, S], [B, P].

    widths: pages of each sequence
    """
    ids: list[int] = []
    counts: list[int] = []
    index_of_run: list[int] = []
    for row in runs:
        indices: dict[int, int] = {}
        for run in row:
            index = 0
            if run.segment is not None:
                index = indices.setdefault(run.segment, len(indices))
            index_of_run.append(index)
        ids += indices
        counts.append(len(indices))
    if not ids:
        return None, None
    owner = np.repeat(index_of_run, [len(run.pages) for row in runs for run in row])
    return (
        _int32(_rectangle(counts, np.array(ids))),
        _int32(_rectangle(widths, owner)),
    )


def _rectangle(widths: Sequence[int], numbers: Ints) -> Ints:
    """Numbers in rows of these widths, padded with the first number of the row, or of all where the
    row is empty: padding can be read."""
    ends = np.array(widths)[:, None]
    inside = np.arange(ends.max()) < ends
    filled = np.full(inside.shape, numbers[0], dtype=np.int32)
    filled[inside] = numbers
    return np.where(inside, filled, filled[:, :1])


def _int32(values: object) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))
