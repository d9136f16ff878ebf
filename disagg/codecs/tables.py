"""The step plan of one layer group: made before layer 0 of a decode step, used by every layer.

It fixes, for a batch of sequences that each append m tokens: the raw slot of every new token, which
sequences seal a page and where, the page tables that the queries then see, and what is free when
the last layer is done. Layers only follow it; no bookkeeping happens between them.

    rows of the step      q0 q1 q2 | q3 | q4 q5      tokens of three sequences
    new slots             (raw page, slot) for each
    seals                 tail[0:T] of a sequence -> a fresh page
    sealed, tail          page tables after the seals, and which of their tokens each query sees
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.errors import CapacityError
from disagg.page import RAW_TOKENS
from disagg.plan import Allocator, GroupState, LayerGroup, Run


@dataclass(frozen=True)
class PageTable:
    """Pages of B sequences, and the tokens that each of M queries sees of them.

    pages:  [B, P] int32 - page ids in token order, short rows padded with their first page
    lo, hi: [B, M] int32 - query (b, m) sees tokens lo <= t < hi, counted from pages[b, 0]
    """

    pages: Tensor
    lo: Tensor
    hi: Tensor


@dataclass(frozen=True)
class Growth:
    """One sequence of a step: `n` tokens so far, `m` more; its new rows begin at `row`."""

    state: GroupState
    n: int
    m: int
    row: int


@dataclass(frozen=True)
class Seal:
    """T tokens of a tail become a page.

    tail:  [1, T/16] int32 - the raw pages read; page: [1] int32 - the page written
    first: position of the first token sealed
    """

    state: GroupState
    tail: Tensor
    page: Tensor
    first: int


@dataclass(frozen=True)
class GroupStep:
    """What one layer group does in a step.

    rows:        [N] int64 - the step's rows (new tokens) that belong to this group, in order
    pages, slots: [N] int32 - the raw page and the slot in it that each row is written to
    seals:       after the append
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


def demand(group: LayerGroup, growths: Sequence[Growth]) -> tuple[int, int]:
    """(raw pages, pages) that `plan_step` will allocate for these growths."""
    raws = pages = 0
    for growth in growths:
        assert growth.m == block_size(group, growth.n, growth.m)
        sealed = len(growth.state.page_ids()) * group.page.tokens
        raws += -(-(growth.n + growth.m - sealed) // RAW_TOKENS) - len(growth.state.tail)
        if group.page != group.raw:
            pages += group.sealed(growth.n + growth.m) > sealed
    return raws, pages


def plan_step(
    group: LayerGroup, growths: Sequence[Growth], allocator: Allocator, device: torch.device
) -> GroupStep:
    """Grow every sequence by its m tokens; CapacityError and nothing changed if no room."""
    longest = max(growth.m for growth in growths)
    fresh = _allocate(group, growths, allocator)
    pages, slots = _append(group, growths, fresh[0])
    seals, freed = _seal(group, growths, fresh[1], device)
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
        seals=tuple(seals),
        queries=torch.tensor(queries, device=device),
        valid=torch.tensor([[j < g.m for j in range(longest)] for g in growths], device=device),
        sealed=sealed,
        tail=tail,
        freed=tuple(freed),
    )


def build_tables(
    group: LayerGroup, growths: Sequence[Growth], longest: int, device: torch.device
) -> tuple[PageTable | None, PageTable | None]:
    """(sealed, tail): the page tables of sequences that now have n + m tokens each.

    The raw codec's pages and tail are the same kind, so they form one table, the tail's.
    """
    sealed_rows, tail_rows = [], []
    for growth in growths:
        pages = growth.state.page_ids()
        tokens = len(pages) * group.page.tokens
        if group.page == group.raw:
            tail_rows.append((pages + growth.state.tail, 0, growth.n + growth.m))
        else:
            sealed_rows.append((pages, 0, tokens))
            tail_rows.append((growth.state.tail, tokens, growth.n + growth.m))
    return (
        _table(sealed_rows, growths, group.window, longest, device),
        _table(tail_rows, growths, group.window, longest, device),
    )


def _table(
    rows: list[tuple[list[int], int, int]],
    growths: Sequence[Growth],
    window: int | None,
    longest: int,
    device: torch.device,
) -> PageTable | None:
    """rows: (pages, position of their first token, position after their last token)."""
    width = max((len(pages) for pages, _, _ in rows), default=0)
    if not width:
        return None
    ids, lo, hi = [], [], []
    for (pages, start, end), growth in zip(rows, growths, strict=True):
        ids.append(pages + [pages[0] if pages else 0] * (width - len(pages)))
        seen = [min(end, growth.n + min(j, growth.m - 1) + 1) - start for j in range(longest)]
        first = [0] * longest
        if window is not None:
            first = [max(0, growth.n + j + 1 - window - start) for j in range(longest)]
        hi.append([max(0, count) for count in seen])
        lo.append(first)

    def as_ints(values: list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return PageTable(as_ints(ids), as_ints(lo), as_ints(hi))


def _allocate(
    group: LayerGroup, growths: Sequence[Growth], allocator: Allocator
) -> tuple[Iterator[int], Iterator[int]]:
    """(raw pages, pages) for the whole step, taken before any state changes."""
    raws, pages = demand(group, growths)
    taken = allocator.allocate(group.record(group.raw), raws)
    try:
        return iter(taken), iter(allocator.allocate(group.record(group.page), pages))
    except CapacityError:
        allocator.release(taken)
        raise


def _append(
    group: LayerGroup, growths: Sequence[Growth], fresh: Iterator[int]
) -> tuple[list[int], list[int]]:
    """The raw page and slot of every new token; the tails grow."""
    pages, slots = [], []
    for growth in growths:
        tail = growth.state.tail
        sealed = len(growth.state.page_ids()) * group.page.tokens
        while len(tail) * RAW_TOKENS < growth.n + growth.m - sealed:
            tail.append(next(fresh))
        for position in range(growth.n - sealed, growth.n - sealed + growth.m):
            pages.append(tail[position // RAW_TOKENS])
            slots.append(position % RAW_TOKENS)
    return pages, slots


def _seal(
    group: LayerGroup, growths: Sequence[Growth], fresh: Iterator[int], device: torch.device
) -> tuple[list[Seal], list[int]]:
    """Move the oldest T tokens of each full tail into a page; the raw codec only moves the id."""
    seals: list[Seal] = []
    freed: list[int] = []
    raws = group.page.tokens // RAW_TOKENS
    for growth in growths:
        state = growth.state
        first = len(state.page_ids()) * group.page.tokens
        while group.sealed(growth.n + growth.m) > first:
            tail, state.tail[:raws] = state.tail[:raws], []
            if group.page == group.raw:
                page = tail[0]
            else:
                page = next(fresh)
                source = torch.tensor([tail], dtype=torch.int32, device=device)
                target = torch.tensor([page], dtype=torch.int32, device=device)
                seals.append(Seal(state, source, target, first))
                freed.extend(tail)
            if not state.runs:
                state.runs.append(Run(group.page, None, 0))
            state.runs[-1].pages.append(page)
            first += group.page.tokens
    return seals, freed
