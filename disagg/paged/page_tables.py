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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.codecs.contract import Codec
from disagg.codecs.exact import exact_format
from disagg.kernels.cpu.library import STRIP_PAGES
from disagg.kernels.gpu.plan import Span, most_units, units_of_spans
from disagg.kernels.sealing import SealRows
from disagg.kernels.view import Table, WorkPlan
from disagg.kv.page import Layout, align
from disagg.kv.plan import LayerGroup
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

Ints = NDArray[np.signedinteger]


@dataclass(frozen=True, kw_only=True)
class PageTable(Table):
    """A table that says what the layout of its pages is; with sides, they are raw pages of tokens
    that those name, without it of tokens in order."""

    layout: Layout


@dataclass(frozen=True)
class GroupStep:
    """What one layer group does in a step; all tensors are int32.

    rows:    [N] - the step's rows (new tokens) that belong to this group, in order
    pages, slots: [N] - the raw page and the slot in it that each row is written to
    seals:   pages that rows complete; completed: the same as the append reads it, None: no page
    queries: [B, M] - index into `rows` of each query; padding repeats a row of the batch
    answers: [N] - index into the queries, sequence by sequence, of each row
    tables:  page tables after the seals: of pages, those sealed while decoding, kept tokens, tails
    units:   how a GPU attends to all tables; None on a CPU
    freed:   raw pages that nobody needs after the last layer
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


def block_size(group: LayerGroup, n: int, m: int) -> int:
    """How many of m tokens may be appended to n in one step: the sealed part must not move twice.

    Only the first token of a step may trigger a seal; otherwise a query would see a page sealed by
    a token after it, which decoding one by one would not.
    """
    if group.page == group.raw:
        return m  # sealing a raw page changes no value
    sealed = group.sink + group.sealed(n + 1)
    next_seal = (
        sealed + group.page.tokens + group.residual
    )  # sealed(n) moves when n reaches this
    return min(m, max(1, next_seal - 1 - n))


def plan_step(
    codec: Codec,
    group: LayerGroup,
    growths: Sequence[SequenceGrowth],
    fresh: NewRecords,
    device: torch.device,
) -> GroupStep:
    """Grow every sequence by its m tokens, with the records taken for that.

    The plan is for a device, and still on the host: see `upload`.
    """
    assert all(x.m == 1 or x.m == block_size(group, x.n, x.m) for x in growths)
    longest = max(growth.m for growth in growths)
    pages, slots = append_tokens(group, growths, fresh)
    seals = seal_tails(group, growths, fresh)
    ends = accumulate(growth.m for growth in growths)
    queries = [
        [end - max(growth.m - j, 1) for j in range(longest)]
        for end, growth in zip(ends, growths, strict=True)
    ]
    tables = build_tables(codec, group, growths, longest, device)
    return GroupStep(
        group=group,
        rows=_numbers([g.row + j for g in growths for j in range(g.m)]),
        pages=_numbers(pages),
        slots=_numbers(slots),
        seals=tuple(seals),
        completed=seal_rows(group, seals, len(pages)) if seals else None,
        queries=_numbers(queries),
        answers=_numbers(
            [b * longest + j for b, g in enumerate(growths) for j in range(g.m)]
        ),
        tables=tables,
        units=plan_units(group, tables, device),
        freed=tuple(page for seal in seals for page in seal.places.tail.tolist()),
    )


def build_tables(
    codec: Codec,
    group: LayerGroup,
    growths: Sequence[SequenceGrowth],
    longest: int,
    device: torch.device,
) -> tuple[PageTable, ...]:
    """The page tables of sequences that now have n + m tokens each, as in `GroupStep`.

    The raw codec's pages and tail are the same kind, so they form one table. A GPU gets all tables
    that the group can have, also those in which nobody has a page: one program serves every step.
    """
    seen = PageTableBuilder(codec, group, growths, longest, every=device.type == "cuda")
    tails = [[_tail_run(group, growth.state)] for growth in growths]
    if group.page == group.raw:
        runs = [[*g.state.runs, *tail] for g, tail in zip(growths, tails, strict=True)]
        return tuple(seen.table(group.raw, runs))
    found = []
    for layout in (group.page, group.flush_page):
        if layout is not None:
            runs = [[r for r in g.state.runs if r.layout == layout] for g in growths]
            found += seen.table(layout, runs)
    if group.kept_limit:
        kept = [
            [Run(group.raw, None, 0, array("i", growth.state.kept))]
            for growth in growths
        ]
        sides = _numbers([growth.state.side or 0 for growth in growths])
        fmt = exact_format(group.raw, group.side)
        some = seen.table(group.raw, kept, False)
        found += [replace(table, fmt=fmt, sides=sides) for table in some]
    return (*found, *seen.table(group.raw, tails))


@dataclass(frozen=True)
class PageTableBuilder:
    """The sequences of a step, and what each of `longest` queries of each sees.

    every: whether there are tables in which nobody has a page
    """

    codec: Codec
    group: LayerGroup
    growths: Sequence[SequenceGrowth]
    longest: int
    every: bool

    def table(
        self, layout: Layout, runs: list[list[Run]], counted: bool = True
    ) -> list[PageTable]:
        """The table of consecutive runs of each sequence; none where nobody has a page.

        counted: whether the pages have tokens in order, from the first of each row on
        """
        nobody = not any(run.pages for row in runs for run in row)
        is_raw = layout == self.group.raw
        shared = None if is_raw else self.group.segment_of(layout)
        if nobody:
            if not self.every:
                return []
            segment = None if shared is None else 0
            runs = [[Run(layout, segment, 0, array("i", [0]))] for _ in runs]
        first = np.array([row[0].first if row else 0 for row in runs])
        lead = np.zeros_like(first)
        is_tail = layout == self.group.raw != self.group.page
        if self.group.window and not is_tail:
            lead = first // layout.tokens % STRIP_PAGES
            runs = [
                _behind(pages, row)
                for pages, row in zip(lead.tolist(), runs, strict=True)
            ]
        widths = [sum(len(run.pages) for run in row) for row in runs]
        ids = b"".join(run.pages for row in runs for run in row)
        pages = _rectangle(widths, np.frombuffer(ids, dtype=np.int32))
        segments, owner = _segments(runs, widths)
        first, lead, count = (
            np.array(x)[:, None] for x in (first, lead, widths - lead)
        )
        n, m = np.array([(g.n, g.m) for g in self.growths]).T[:, :, None]
        positions = n + np.minimum(np.arange(self.longest), m - 1)
        end, seen, sink = first + count * layout.tokens, positions + 1, self.group.sink
        if is_raw:
            end = np.maximum(np.minimum(end, seen), first + np.minimum(sink, seen))
        else:
            end = np.minimum(end, seen - sink)  # pages begin behind the sink
        start = positions + 1 - self.group.window if self.group.window else first
        if not counted:
            end = positions + 1
        if nobody:
            end = np.zeros_like(positions)
        before = lead * layout.tokens
        lo, hi = (
            before + np.maximum(x - first, 0) for x in np.broadcast_arrays(start, end)
        )
        rest = (None if x is None else _numbers(x) for x in (segments, owner))
        head_dim = self.group.head_dim
        fmt = (
            exact_format(layout)
            if is_raw
            else self.codec.format_of(layout, shared, head_dim)
        )
        return [
            PageTable(
                _numbers(pages), _numbers(lo), _numbers(hi), fmt, *rest, layout=layout
            )
        ]


def plan_units(
    group: LayerGroup, tables: Sequence[PageTable], device: torch.device
) -> WorkPlan | None:
    """How a GPU attends to tables on the host; None for a CPU."""
    if device.type != "cuda":
        return None
    made = units_of_spans([Span.of(table) for table in tables], group.heads, device)
    return WorkPlan(*map(torch.from_numpy, made))


def room_for_units(
    group: LayerGroup, tables: Sequence[PageTable], device: torch.device
) -> int:
    """Units of tables at most, that have no more rows and columns than these."""
    return most_units([Span.of(table) for table in tables], group.heads, device)


T = TypeVar("T")
PARTS = (
    GroupStep,
    PageTable,
    Seal,
    RecordIds,
    SealRows,
    WorkPlan,
)  # where tensors of a step are


class Upload(Generic[T]):
    """int32 tensors of a tree on a device, side by side in one buffer, so that one copy fills all.

    tree: as that on the host, with tensors of the device
    """

    def __init__(self, tree: T, device: torch.device):
        self._buffer = _packed(tree).to(device)
        shapes = [x.shape for x in _tensors(tree)]
        parts = self._buffer.split([_room(shape) for shape in shapes])
        there = zip(parts, shapes, strict=True)
        shaped = (part[: shape.numel()].view(shape) for part, shape in there)
        self.tree: T = _mapped(tree, lambda _: next(shaped))

    def fill(self, tree: T) -> None:
        """Take the numbers of another tree of the same shapes."""
        self._buffer.copy_(_packed(tree))


def upload(tree: T, device: torch.device) -> T:
    """A tree of the host on a device, in one copy; on a CPU it is there already."""
    return tree if device.type == "cpu" else Upload(tree, device).tree


def _room(shape: torch.Size) -> int:
    """Items of a tensor, up to where the next one begins: on 16 bytes, as kernels want it."""
    return align(shape.numel(), 4)


def _packed(tree: Any) -> Tensor:
    found = _tensors(tree)
    packed = torch.zeros(sum(_room(x.shape) for x in found), dtype=torch.int32)
    for x, part in zip(
        found, packed.split([_room(x.shape) for x in found]), strict=True
    ):
        part[: x.numel()] = x.flatten()
    return packed


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(tree, found.append)
    return found


def _mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same tree with other tensors; they are changed in the order in which it has them."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple(_mapped(part, change) for part in tree)
    if not isinstance(tree, PARTS):
        return tree
    return type(tree)(
        **{name: _mapped(part, change) for name, part in vars(tree).items()}
    )


def _tail_run(group: LayerGroup, state: GroupState) -> Run:
    """The exact tokens of a sequence as a run."""
    return Run(
        group.raw, None, state.num_pages * group.page.tokens, array("i", state.tail)
    )


def _behind(pages: int, row: list[Run]) -> list[Run]:
    """A row behind so many pages that nobody sees: cut into strips as if none were dropped, so
    that answers do not depend on it, to the bit."""
    if not pages:
        return row
    head = row[0]
    return [replace(head, pages=head.pages[:1] * pages), *row]


def _segments(
    runs: list[list[Run]], widths: list[int]
) -> tuple[Ints | None, Ints | None]:
    """The segments of each sequence, in order, and the index of each page's: [B, S], [B, P].

    widths: pages of each
    """
    ids, counts, marks = list[int](), list[int](), list[int]()
    for row in runs:
        indices: dict[int, int] = {}
        for run in row:
            mark = (
                0
                if run.segment is None
                else indices.setdefault(run.segment, len(indices))
            )
            marks.append(mark)
        ids += indices
        counts.append(len(indices))
    if not ids:
        return None, None
    owner = np.repeat(marks, [len(run.pages) for row in runs for run in row])
    return _rectangle(counts, np.array(ids)), _rectangle(widths, owner)


def _rectangle(widths: Sequence[int], numbers: Ints) -> Ints:
    """Numbers in as many rows as there are widths, padded with the first number of the row, or of
    some other row: what is there can be read."""
    ends = np.array(widths)[:, None]
    inside = np.arange(ends.max()) < ends
    filled = np.full(inside.shape, numbers[0], dtype=np.int32)
    filled[inside] = numbers
    return np.where(inside, filled, filled[:, :1])


def _numbers(values: object) -> Tensor:
    """As int32 on the host."""
    return torch.from_numpy(np.asarray(values, dtype=np.int32))
