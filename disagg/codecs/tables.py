"""The step plan of one layer group: made before layer 0 of a decode step, used by every layer.

It fixes, for a batch of sequences that each append m tokens: the raw slot of every new token, which
sequences seal a page and where, the page tables that the queries then see, and what is free when
the last layer is done. Layers only follow it; no bookkeeping happens between them.

    rows of the step      q0 q1 q2 | q3 | q4 q5      tokens of three sequences
    new slots             (raw page, slot) for each
    seals                 tail[0:T] of a sequence -> a fresh page
    sealed, tail          page tables after the seals, and which of their tokens each query sees
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from disagg.codecs.seals import Growth, Seal, append_tokens, seal_rows, seal_tails, take_records
from disagg.kernels.sealing import SealRows
from disagg.page import Layout
from disagg.plan import Allocator, LayerGroup, Run

__all__ = ["Growth", "GroupStep", "PageTable", "Seal", "block_size", "build_tables", "plan_step"]


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
    sealed = group.sealed(n + 1)
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
    starts = [sum(g.m for g in growths[:i]) for i in range(len(growths))]
    queries = [
        [start + min(j, growth.m - 1) for j in range(longest)]
        for start, growth in zip(starts, growths, strict=True)
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
    tails = [_tail_run(group, growth) for growth in growths]
    tail = _table(group, group.raw, [[run] for run in tails], growths, longest, device)
    if group.page == group.raw:
        return None, tail
    sealed = None
    for layout in (group.flush_page, group.page):  # the last one built comes first
        if layout is None:
            continue
        runs = [[r for r in g.state.runs if r.layout == layout] for g in growths]
        sealed = _table(group, layout, runs, growths, longest, device, sealed) or sealed
    if sealed is not None and any(growth.state.kept for growth in growths):
        ids = [_rectangle([growth.state.kept for growth in growths])]
        ids += [[[growth.state.side or 0 for growth in growths]]]
        kept, sides = (torch.tensor(x, dtype=torch.int32, device=device) for x in ids)
        sealed = replace(sealed, kept=kept, sides=sides[0])
    return sealed, tail


def _tail_run(group: LayerGroup, growth: Growth) -> Run:
    """The exact tokens of a sequence as a run."""
    pages = growth.state.page_ids()
    if group.page == group.raw:
        return Run(group.raw, None, 0, pages + growth.state.tail)
    return Run(group.raw, None, len(pages) * group.page.tokens, growth.state.tail)


def _table(
    group: LayerGroup,
    layout: Layout,
    runs: list[list[Run]],
    growths: Sequence[Growth],
    longest: int,
    device: torch.device,
    following: PageTable | None = None,
) -> PageTable | None:
    """The table of consecutive runs of each sequence; None where nobody has a page."""
    pages = [[page for run in row for page in run.pages] for row in runs]
    if not any(pages):
        return None
    owners = [[run.segment for run in row for _ in run.pages] for row in runs]
    segments = [[s for s in dict.fromkeys(row) if s is not None] for row in owners]
    places = [
        [0 if s is None else own.index(s) for s in row]
        for own, row in zip(segments, owners, strict=True)
    ]
    lo, hi = [], []
    for row, own, growth in zip(runs, pages, growths, strict=True):
        start = row[0].first if row else 0
        end = min(start + len(own) * layout.tokens, growth.n + growth.m)
        positions = [growth.n + min(j, growth.m - 1) for j in range(longest)]
        hi.append([max(0, min(end, position + 1) - start) for position in positions])
        window = group.window
        lo.append([max(0, p + 1 - window - start) if window else 0 for p in positions])

    def as_ints(values: list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    shared = any(segments)
    return PageTable(
        pages=as_ints(_rectangle(pages)),
        lo=as_ints(lo),
        hi=as_ints(hi),
        layout=layout,
        segments=as_ints(_rectangle(segments)) if shared else None,
        owner=as_ints(_rectangle(places, 0)) if shared else None,
        following=following,
    )


def _rectangle(rows: list[list[int]], padding: int | None = None) -> list[list[int]]:
    """Rows of equal length: padded with their first entry, or some other row's: always finite."""
    width = max(map(len, rows))
    other = next(row[0] for row in rows if row)
    filled = []
    for row in rows:
        first = row[0] if row else other
        filled.append(row + [first if padding is None else padding] * (width - len(row)))
    return filled
