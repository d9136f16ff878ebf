"""The step plan of one layer group: made before layer 0 of a decode step, used by every layer.

It fixes, for a batch of sequences that each append m tokens: the raw slot of every new token, which
sequences seal a page and where, the page tables that the queries then see, and what is free when
the last layer is done. Layers only follow it; no bookkeeping happens between them.

    rows of the step      q0 q1 q2 | q3 | q4 q5      tokens of three sequences
    new slots             (raw page, slot) for each
    seals                 tail[0:T] of a sequence -> a fresh page
    sealed, tail          page tables after the seals, and which of their tokens each query sees
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.codecs.exact import exact_format
from disagg.codecs.seals import Growth, Seal, append_tokens, seal_rows, seal_tails, take_records
from disagg.kernels.formats import Format
from disagg.kernels.gpu.plan import Tile, Tiling, tile_of, tiling_of
from disagg.kernels.sealing import SealRows
from disagg.kernels.view import Units, View
from disagg.page import Layout
from disagg.plan import LayerGroup
from disagg.state import Allocator, GroupState, Run

Ints = NDArray[np.signedinteger]


@dataclass(frozen=True)
class PageTable:
    """Pages of one layout of B sequences, and the tokens that each of M queries sees of them.

    pages:     [B, P] int32 - page ids in token order, short rows padded with pages they do not see
    lo, hi:    [B, M] int32 - query (b, m) sees tokens lo <= t < hi, counted from pages[b, 0]
    segments:  [B, S] int32 - the segments of each sequence, in order; None: the layout has none
    owner:     [B, P] int32 - the index in `segments` of each page's
    following: the pages of the same sequences in another layout, sealed while decoding
    kept:      [B, K] int32 - raw pages of tokens kept exact beside their page; None: there are none
    sides:     [B] int32 - the side records, which say what `kept` holds
    units:     how a GPU cuts its work; None on a CPU
    """

    pages: Tensor
    lo: Tensor
    hi: Tensor
    layout: Layout
    segments: Tensor | None = None
    owner: Tensor | None = None
    following: "PageTable | None" = None
    kept: Tensor | None = None
    sides: Tensor | None = None
    units: Units | None = None

    def view(
        self,
        arena: Tensor,
        group: LayerGroup,
        layer: int,
        fmt: Format,
        segment: Layout | None = None,
    ) -> View:
        """These pages in one layer, of a format; segment: the layout of their segments."""
        return View(
            arena=arena,
            pages=self.pages,
            lo=self.lo,
            hi=self.hi,
            fmt=fmt,
            base=group.layer_offset(self.layout, layer),
            heads=group.heads,
            segments=self.segments if segment else None,
            owner=self.owner if segment else None,
            segment_base=group.layer_offset(segment, layer) if segment else 0,
            units=self.units,
        )


@dataclass(frozen=True)
class GroupStep:
    """What one layer group does in a step.

    rows:        [N] int64 - the step's rows (new tokens) that belong to this group, in order
    pages, slots: [N] int32 - the raw page and the slot in it that each row is written to
    seals:       pages that rows complete; completed: the same as the append reads it, None: no page
    queries:     [B, M] int64 - index into `rows` of each query; padding repeats a row of the batch
    valid:       [B, M] bool - False for padding
    sealed, tail: page tables after the seals; None where no sequence has such pages
    freed:       raw pages that nobody needs after the last layer
    """

    group: LayerGroup
    rows: Tensor
    pages: Tensor
    slots: Tensor
    seals: tuple[Seal, ...]
    completed: SealRows | None
    queries: Tensor
    valid: Tensor
    sealed: PageTable | None
    tail: PageTable | None
    freed: tuple[int, ...]


def block_size(group: LayerGroup, n: int, m: int) -> int:
    """How many of m tokens may be appended to n in one step: the sealed part must not move twice.

    Only the first token of a step may trigger a seal; otherwise a query would see a page sealed by
    a token after it, which decoding one by one would not.
    """
    if group.page == group.raw:
        return m  # sealing a raw page changes no value
    sealed = group.sink + group.sealed(n + 1)
    next_seal = sealed + group.page.tokens + group.residual  # sealed(n) moves when n reaches this
    return min(m, max(1, next_seal - 1 - n))


def plan_step(
    group: LayerGroup, growths: Sequence[Growth], allocator: Allocator, device: torch.device
) -> GroupStep:
    """Grow every sequence by its m tokens; CapacityError and nothing changed if no room."""
    assert all(growth.m == block_size(group, growth.n, growth.m) for growth in growths)
    longest = max(growth.m for growth in growths)
    fresh = take_records(group, growths, allocator)
    pages, slots = append_tokens(group, growths, fresh)
    done = seal_tails(group, growths, fresh)
    ends = accumulate(growth.m for growth in growths)
    queries = [
        [end - max(growth.m - j, 1) for j in range(longest)]
        for end, growth in zip(ends, growths, strict=True)
    ]
    sealed, tail = build_tables(group, growths, longest, device)
    return GroupStep(
        group=group,
        rows=torch.tensor([g.row + j for g in growths for j in range(g.m)], device=device),
        pages=torch.tensor(pages, dtype=torch.int32, device=device),
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
        seals=tuple(done.seals),
        completed=seal_rows(group, done.seals, len(pages), device) if done.seals else None,
        queries=torch.tensor(queries, device=device),
        valid=torch.tensor([[j < g.m for j in range(longest)] for g in growths], device=device),
        sealed=sealed,
        tail=tail,
        freed=tuple(done.freed),
    )


def build_tables(
    group: LayerGroup, growths: Sequence[Growth], longest: int, device: torch.device
) -> tuple[PageTable | None, PageTable | None]:
    """(sealed, tail): the page tables of sequences that now have n + m tokens each.

    The raw codec's pages and tail are the same kind, so they form one table, the tail's.
    """
    seen = _Seen(group, growths, longest, device)
    tails = [[_tail_run(group, growth.state)] for growth in growths]
    if group.page == group.raw:
        runs = [[*g.state.runs, *tail] for g, tail in zip(growths, tails, strict=True)]
        return None, seen.table(group.raw, runs)
    tail = seen.table(group.raw, tails)
    sealed = None
    for layout in (group.flush_page, group.page):  # the last one built comes first
        if layout is None:
            continue
        runs = [[r for r in g.state.runs if r.layout == layout] for g in growths]
        sealed = seen.table(layout, runs, sealed) or sealed
    if sealed is not None and any(growth.state.kept for growth in growths):
        kept = _rectangle([[array("i", growth.state.kept)] for growth in growths])
        sides = np.array([growth.state.side or 0 for growth in growths], dtype=np.int32)
        sealed = replace(sealed, kept=_on_device(kept, device), sides=_on_device(sides, device))
    return sealed, tail


@dataclass(frozen=True)
class _Seen:
    """The sequences of a step, and what each of `longest` queries of each sees."""

    group: LayerGroup
    growths: Sequence[Growth]
    longest: int
    device: torch.device

    def table(
        self, layout: Layout, runs: list[list[Run]], following: PageTable | None = None
    ) -> PageTable | None:
        """The table of consecutive runs of each sequence; None where nobody has a page."""
        if not any(run.pages for row in runs for run in row):
            return None
        pages = _rectangle([[run.pages for run in row] for row in runs])
        segments, owner = _segments(runs, pages.shape[1])
        first = np.array([row[0].first if row else 0 for row in runs])[:, None]
        count = np.array([sum(len(run.pages) for run in row) for row in runs])[:, None]
        n, m = np.array([(g.n, g.m) for g in self.growths]).T[:, :, None]
        positions = n + np.minimum(np.arange(self.longest), m - 1)
        end = np.minimum(first + count * layout.tokens, positions + 1)
        start = positions + 1 - self.group.window if self.group.window else first
        seen = np.maximum(start - first, 0), np.maximum(end - first, 0)
        ids, lo, hi = (_on_device(x, self.device) for x in (pages, *seen))
        units = None
        if self.device.type == "cuda":
            tiling = _tiling(layout, self.group.heads, self.device)
            spans = np.broadcast_to(seen[0], seen[1].shape).min(1), seen[1].max(1)
            table, starts = tiling.units(*spans, owner, segments)
            units = Units(_on_device(table, self.device), _on_device(starts, self.device))
        return PageTable(
            pages=ids,
            lo=lo.expand(hi.shape).contiguous(),
            hi=hi,
            layout=layout,
            segments=None if segments is None else _on_device(segments, self.device),
            owner=None if owner is None else _on_device(owner, self.device),
            following=following,
            units=units,
        )


def plan_units(table: PageTable, heads: int) -> PageTable:
    """A table that somebody else made, with its units; the host asks for its lengths."""
    device = table.pages.device
    if device.type != "cuda":
        return table
    given = (table.lo.amin(1), table.hi.amax(1), table.owner, table.segments)
    found = [None if x is None else x.cpu().numpy().astype(np.int64) for x in given]
    lo, hi, owner, segments = found
    assert lo is not None
    assert hi is not None
    made = _tiling(table.layout, heads, device).units(lo, hi, owner, segments)
    return replace(table, units=Units(*(_on_device(x, device) for x in made)))


def room_for_units(table: PageTable, heads: int) -> Units | None:
    """Zeros for the units of any table that has no more rows and columns; None on a CPU."""
    batch, width = table.pages.shape
    device = table.pages.device
    if device.type != "cuda":
        return None
    segments = 0 if table.segments is None else table.segments.shape[1]
    tiling = _tiling(table.layout, heads, device)
    most = tiling.most_units(batch, width * table.layout.tokens, segments)
    return Units(table.pages.new_zeros(most, 4), table.pages.new_zeros(batch + 1))


def _tiling(layout: Layout, heads: int, device: torch.device) -> Tiling:
    exact = any(plane.name == "k" for plane in layout.planes)
    tile = tile_of(exact_format(layout)) if exact else Tile(layout.tokens, layout.block_bytes)
    return tiling_of(tile, heads, device)


def _tail_run(group: LayerGroup, state: GroupState) -> Run:
    """The exact tokens of a sequence as a run."""
    return Run(group.raw, None, state.num_pages * group.page.tokens, array("i", state.tail))


def _segments(runs: list[list[Run]], width: int) -> tuple[Ints | None, Ints | None]:
    """The segments of each sequence, in order, and the index of each page's: [B, S], [B, P]."""
    owner = np.zeros((len(runs), width), dtype=np.int32)
    found: list[list[array[int]]] = []
    for row, own in zip(runs, owner, strict=True):
        indices: dict[int, int] = {}
        at = 0
        for run in row:
            if run.segment is not None:
                own[at : at + len(run.pages)] = indices.setdefault(run.segment, len(indices))
            at += len(run.pages)
        found.append([array("i", indices)])
    if not any(ids for (ids,) in found):
        return None, None
    return _rectangle(found), owner


def _rectangle(rows: list[list["array[int]"]]) -> Ints:
    """Parts joined to rows of equal length, padded with the first number of the row, or of some
    other row: what is there can be read."""
    widths = [sum(map(len, row)) for row in rows]
    other = next(part[0] for row in rows for part in row if part)
    filled = np.full((len(rows), max(widths)), other, dtype=np.int32)
    for into, row, width in zip(filled, rows, widths, strict=True):
        at = 0
        for part in row:
            into[at : at + len(part)] = np.frombuffer(part, dtype=np.int32)
            at += len(part)
        if width:
            into[width:] = into[0]
    return filled


def _on_device(values: Ints, device: torch.device) -> Tensor:
    """As int32 on a device."""
    return torch.from_numpy(values.astype(np.int32, copy=False)).to(device)
