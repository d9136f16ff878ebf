"""Decode steps in buffers that stay where they are, so that a recorded step can run on new inputs.

A step is split by codec, and each part is padded to a shape that many steps share: its rows to a
bucket, page tables and units of work to one of a few sizes, tails to their longest. Padding is
inert: a padded row has token 0 at position 0, is not written to any page and sees no token. Its
states are in a scratch record, behind all pages.

    rows      │ a │ b │ c │ d │ e │
    codec 1   │ a │ c │ d │ - │        bucket of 4
    codec 2   │ b │ e │                bucket of 2

Sequences with a draft feed a block of tokens; they are a part of their own, in which every sequence
has room for BLOCK queries:

    rows      │ a a a │ b b │          a with 2 drafted tokens, b with 1
    queries   │ a a a - - - - - │ b b - - - - - - │
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from disagg.kernels.sealing import NO_PAGE, SealRows
from disagg.kernels.view import WorkPlan
from disagg.kv.plan import LayerGroup
from disagg.model.attention import Batch, Decode, Size
from disagg.paged.append import seal_rows
from disagg.paged.page_tables import GroupStep, PageTable, Upload, room_for_units

SMALL_BUCKETS = (1, 2, 4)
BUCKET = 8  # larger buckets are multiples of this
# queries of a sequence that feeds several tokens; longer blocks are not recorded
BLOCK = 8
ROOM = 1024  # tokens or units of the smallest tables; each larger size has four times as many

Key = tuple[object, ...]


def bucket_of(count: int) -> int:
    """The smallest bucket that holds `count` rows."""
    for bucket in SMALL_BUCKETS:
        if count <= bucket:
            return bucket
    return -(-count // BUCKET) * BUCKET


def rooms(most: int, least: int = 0) -> list[int]:
    """The sizes, in tokens or units, from `least` up to the first that holds `most`."""
    sizes = [least or ROOM]
    while sizes[-1] < most:
        sizes.append(4 * sizes[-1])
    return sizes


def parts_of(batch: Batch) -> list[Batch]:
    """A batch of few tokens of each sequence, split by codec; each codec has rows of its own.

    Empty for a batch with a prompt or a long block, and if a page is sealed that the append cannot
    seal.
    outputs: of each row, the index of its logits among those of the batch; if it has none, the
    index behind the last
    """
    if batch.chunks or batch.states.parts:
        return []
    by_rows: dict[tuple[int, ...], list[Decode]] = {}
    for decode in batch.decodes:
        is_long = decode.step.queries.shape[1] > BLOCK
        if is_long or (decode.step.seals and not _seals(decode)):
            return []
        rows = tuple(decode.step.rows.tolist())
        by_rows.setdefault(rows, []).append(decode)
    if sum(len(rows) for rows in by_rows) != len(batch.tokens):
        return []  # plans that share some of their layer groups
    output_of = {row: output for output, row in enumerate(batch.outputs)}
    return [_part(batch, rows, output_of, by_rows[rows]) for rows in by_rows]


def _part(
    batch: Batch,
    rows: tuple[int, ...],
    output_of: dict[int, int],
    decodes: list[Decode],
) -> Batch:
    return Batch(
        tokens=[batch.tokens[row] for row in rows],
        positions=[batch.positions[row] for row in rows],
        outputs=[output_of.get(row, len(output_of)) for row in rows],
        arena=batch.arena,
        decodes=tuple(replace(decode, whole=True) for decode in decodes),
        states=batch.states.select(rows),
        long_rows=[batch.long_rows[row] for row in rows],
    )


def size_of(part: Batch) -> Size:
    """The smallest size of a step that can serve a part."""
    most_tokens = 0
    most_units = 0
    for decode in part.decodes:
        step = decode.step
        for table in step.tables:
            if not _is_tail(table, step.group):
                tokens = table.pages.shape[1] * table.layout.tokens
                most_tokens = max(most_tokens, tokens)
        if step.units is not None:
            most_units = max(most_units, len(step.units.table))
    return rooms(most_tokens)[-1], rooms(most_units)[-1]


def sizes_of(part: Batch, context: int) -> Iterator[Size]:
    """All sizes of steps with the rows of a part, up to those of `context` tokens.

    The largest comes first, so that the graphs of the others fit into its memory.
    """
    if not context:
        return
    steps = [decode.step for decode in part.decodes if decode.step.units is not None]
    least_tokens, least_units = size_of(part)
    for tokens in reversed(rooms(context, least_tokens)):
        units_needed = [
            room_for_units(step.group, _padded_tables(step, tokens), part.arena.device)
            for step in steps
        ]
        for units in reversed(rooms(max(units_needed, default=0), least_units)):
            yield tokens, units


def padded_shape(step: GroupStep) -> tuple[int, int]:
    """Sequences of a step, and queries of each, once it is padded."""
    num_sequences, num_queries = step.queries.shape
    return bucket_of(num_sequences), 1 if num_queries == 1 else BLOCK


def num_rows(part: Batch) -> int:
    """Rows of a part, once it is padded."""
    return math.prod(padded_shape(part.decodes[0].step))


def key_of(part: Batch, size: Size) -> Key:
    """Equal for all parts that one recorded step of a size can serve."""
    groups = []
    for decode in part.decodes:
        shape = padded_shape(decode.step)
        layouts = [
            (table.layout.fingerprint, table.sides is None)
            for table in decode.step.tables
        ]
        groups.append((decode.step.group.fingerprint, shape, tuple(layouts)))
    return (num_rows(part), part.arena.data_ptr(), size, *groups)


class StaticStep:
    """The buffers of one shape of step: one allocation, filled by one copy.

    tokens, positions: [1, rows] int32
    outputs, is_long: [rows] int32
    batch:   the plan of attention, over the buffers
    """

    def __init__(self, like: Batch, size: Size):
        self._size = size
        self._inputs = Upload(_padded(like, size), like.arena.device)
        rows, steps, states = self._inputs.tree
        self.tokens, self.positions, self.outputs, self.is_long = rows
        decodes = [
            replace(decode, step=step)
            for decode, step in zip(like.decodes, steps, strict=True)
        ]
        self.batch = Batch(
            tokens=(),
            positions=(),
            outputs=(),
            arena=like.arena,
            decodes=tuple(decodes),
            states=like.states.with_tables(states),
        )

    def fill(self, batch: Batch, dry: bool = False) -> None:
        """Copy in the inputs of a batch with the same key.

        dry: the states of all rows are those of the scratch record, so that none advances
        """
        self._inputs.fill(_padded(batch, self._size, dry))


def _padded(
    batch: Batch, size: Size, dry: bool = False
) -> tuple[tuple[Tensor, ...], tuple[GroupStep, ...], tuple[Tensor, ...]]:
    """The tensors of a batch on the host, padded to its key's shape.

    Tokens, positions, outputs, whether a text is long; steps of layer groups; tables of states.
    """
    count = num_rows(batch)
    device = batch.arena.device

    def padded(values: Sequence[int]) -> Tensor:
        return _extended(torch.tensor(values, dtype=torch.int32), count, 0)

    rows = (
        padded(batch.tokens)[None],
        padded(batch.positions)[None],
        padded(batch.outputs),
        padded(batch.long_rows),
    )
    return (
        rows,
        tuple(_padded_step(decode, device, size) for decode in batch.decodes),
        batch.states.padded(count, dry).tables,
    )


def _seals(decode: Decode) -> bool:
    """Whether the append of a step seals the pages that it completes.

    It cannot begin a segment, as the first page of a sequence may.
    """
    if any(seal.begins_segment for seal in decode.step.seals):
        return False
    return decode.codec.seal_format(decode.step.group) is not None


def _is_tail(table: PageTable, group: LayerGroup) -> bool:
    return group.raw != group.page and table.layout == group.raw


def _padded_step(decode: Decode, device: torch.device, size: Size) -> GroupStep:
    step = decode.step
    tokens, most_units = size
    num_sequences, num_queries = padded_shape(step)
    rows = num_sequences * num_queries
    tables = _padded_tables(step, tokens)
    units = step.units
    if units is not None:
        room = min(most_units, room_for_units(step.group, tables, device))
        units = WorkPlan(
            _extended(units.table, room, 0),
            _extended(units.starts, num_sequences + 1, units.starts[-1]),
        )
    return replace(
        step,
        rows=torch.arange(rows, dtype=torch.int32),
        pages=_extended(step.pages, rows, NO_PAGE),
        slots=_extended(step.slots, rows, step.slots[0]),
        seals=(),
        completed=_padded_seal_rows(step, rows) if _seals(decode) else None,
        queries=_widened(step.queries, num_sequences, num_queries),
        answers=_extended(_padded_answers(step), rows, 0),
        tables=tables,
        units=units,
        freed=(),
    )


def _padded_answers(step: GroupStep) -> Tensor:
    """Where the answer of each row is, with the padded number of answers for each sequence."""
    longest = step.queries.shape[1]
    _, padded_longest = padded_shape(step)
    places = step.answers.to(torch.int32)
    return places // longest * padded_longest + places % longest


def _padded_seal_rows(step: GroupStep, rows: int) -> SealRows:
    """The pages that rows complete; padded rows complete none."""
    completed = step.completed or seal_rows(step.group, (), len(step.rows))
    return SealRows(
        **{
            field.name: _extended(getattr(completed, field.name), rows, NO_PAGE)
            for field in fields(SealRows)
        }
    )


def _padded_tables(step: GroupStep, tokens: int) -> tuple[PageTable, ...]:
    """Tables with more rows and columns; those see nothing and point to existing pages."""
    return tuple(_padded_table(table, step, tokens) for table in step.tables)


def _padded_table(table: PageTable, step: GroupStep, tokens: int) -> PageTable:
    num_sequences, num_queries = padded_shape(step)
    pages, segments = _columns(table, step.group, tokens)

    def widened(x: Tensor | None, columns: int) -> Tensor | None:
        return None if x is None else _widened(x, num_sequences, columns)

    def bounds(x: Tensor) -> Tensor:
        return _widened(x, num_sequences, num_queries, 0)

    sides = table.sides
    if sides is not None:
        sides = _extended(sides, num_sequences, sides[0])
    return replace(
        table,
        pages=_widened(table.pages, num_sequences, pages),
        lo=bounds(table.lo),
        hi=bounds(table.hi),
        segments=widened(table.segments, segments),
        owner=widened(table.owner, pages),
        sides=sides,
    )


def _columns(table: PageTable, group: LayerGroup, tokens: int) -> tuple[int, int]:
    """Columns of pages and of segments in a padded table.

    Tails and kept tokens are few: they get room for as many as there ever are. The first segment
    that a window shows may be shown in part, so there is one segment more.
    """
    if _is_tail(table, group):
        longest_tail = group.sink + group.residual + group.page.tokens
        tokens = max(longest_tail, group.kept_limit)
    return -(-tokens // table.layout.tokens), -(-tokens // group.segment_tokens) + 1


def _widened(x: Tensor, rows: int, columns: int, value: int | None = None) -> Tensor:
    """x with more rows and columns, filled with a value; None: with its first element."""
    filling = x[:1, :1] if value is None else x.new_full((1, 1), value)
    wide = filling.repeat(rows, columns)
    wide[: x.shape[0], : x.shape[1]] = x
    return wide


def _extended(x: Tensor, rows: int, value: Tensor | int) -> Tensor:
    """x with more rows, filled with one value."""
    padding = torch.as_tensor(value, dtype=x.dtype)
    return torch.cat([x, padding.expand(rows - len(x), *x.shape[1:])])
