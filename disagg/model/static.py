"""Decode steps in buffers that stay where they are, so that a recorded step can run on new inputs.

A step is cut to a shape that many steps have: its rows and the rows of each layer group are padded
to a bucket, page tables to a power of two, tails to their longest. Padding is inert: a row that
nobody asked for has token 0 at position 0, and a padding row of a group is its first row once more;
neither is written to any page or sees a token, so a padding row adds 0 to the attention of the row
that it repeats.

    rows     │ a │ b │ c │ - │        bucket of 4
    group 1  │ a │ c │                bucket of 2
    group 2  │ b │                    bucket of 1
"""

from dataclasses import fields, replace

import torch
from torch import Tensor

from disagg.codecs.seals import seal_rows
from disagg.codecs.tables import GroupStep, PageTable, Upload, room_for_units
from disagg.kernels.sealing import NO_PAGE, SealRows
from disagg.kernels.view import Units
from disagg.model.attention import Batch, Decode
from disagg.plan import LayerGroup

SMALL_BUCKETS = (1, 2, 4)
BUCKET = 8  # above, buckets are multiples of this
FEW_UNITS = 1024  # of a GPU: those that find no work in a table of as many cost little

Key = tuple[object, ...]
Width = tuple[int, int]  # of tables: tokens of pages, and segments


def bucket_of(count: int) -> int:
    """The least bucket that holds `count` rows."""
    return next((x for x in SMALL_BUCKETS if count <= x), -(-count // BUCKET) * BUCKET)


def width_of(count: int) -> int:
    """The least power of two that holds `count` columns of a page table."""
    return 1 << max(0, count - 1).bit_length()


def is_plain(batch: Batch) -> bool:
    """Whether a batch is one token of each sequence, and what it seals is sealed by the append."""
    plain = all(
        decode.step.queries.shape[1] == 1 and (not decode.step.seals or _seals(decode))
        for decode in batch.decodes
    )
    return plain and bool(batch.decodes) and not batch.chunks


def key_of(batch: Batch) -> Key:
    """What a plain batch has in common with those that one recorded step can serve."""
    least = _least_width(batch)
    groups = [
        (
            decode.step.group.fingerprint,
            decode.whole,
            bucket_of(len(decode.step.rows)),
            _bucket_of_units(decode),
            *(_shape_of(table, decode.step.group, least) for table in decode.step.tables),
        )
        for decode in _in_order(batch)
    ]
    return (bucket_of(len(batch.tokens)), batch.arena.data_ptr(), *groups)


class StaticStep:
    """The buffers of one shape of step: all in one, which one copy fills.

    tokens, positions: [1, bucket] int32 · outputs: [bucket] int32 · batch: what attention is to
    follow, over the buffers
    """

    def __init__(self, like: Batch):
        self._inputs = Upload(_padded(like), like.arena.device)
        self.tokens, self.positions, self.outputs, steps = self._inputs.tree
        decodes = zip(_in_order(like), steps, strict=True)
        on_device = tuple(replace(decode, step=step) for decode, step in decodes)
        self.batch = Batch((), (), (), like.arena, decodes=on_device)

    def fill(self, batch: Batch) -> None:
        """Take the inputs of a batch with the same key."""
        self._inputs.fill(_padded(batch))


def _padded(batch: Batch) -> tuple[Tensor, Tensor, Tensor, tuple[GroupStep, ...]]:
    """Tokens, positions, outputs and steps of a batch on the host, as large as those of its key."""
    bucket, device = bucket_of(len(batch.tokens)), batch.arena.device
    tokens, positions, outputs = (
        _extended(torch.tensor(x, dtype=torch.int32), bucket, 0)
        for x in (batch.tokens, batch.positions, batch.outputs)
    )
    least = _least_width(batch)
    steps = tuple(_padded_step(decode, device, least) for decode in _in_order(batch))
    return tokens[None], positions[None], outputs, steps


def _seals(decode: Decode) -> bool:
    """Whether the append of a step seals the pages that it completes; the first of a sequence may
    begin a segment, which it cannot."""
    if any(seal.fresh for seal in decode.step.seals):
        return False
    return decode.codec.seal_format(decode.step.group.head_dim) is not None


def _in_order(batch: Batch) -> list[Decode]:
    """The decodes of a plain batch: one for each layer group, whatever came first."""
    return sorted(batch.decodes, key=lambda decode: decode.step.group.fingerprint)


def _least_width(batch: Batch) -> Width:
    """Where codecs share a batch, what the widest of their tables has: widths of their own would
    multiply to a new key every few steps."""
    shared = [decode.step for decode in batch.decodes if not decode.whole]
    tables = [x for step in shared for x in step.tables if not _is_tail(x, step.group)]
    tokens = (x.pages.shape[1] * x.layout.tokens for x in tables)
    segments = (x.segments.shape[1] for x in tables if x.segments is not None)
    return max(tokens, default=0), max(segments, default=0)


def _shape_of(table: PageTable, group: LayerGroup, least: Width) -> Key:
    """The layout of a table, and how wide its columns are."""
    columns = (table.pages, table.segments)
    widths = (0 if x is None else _width(x, table, group, least) for x in columns)
    return (table.layout.fingerprint, table.sides is None, *widths)


def _bucket_of_units(decode: Decode) -> int:
    """As most rows are short, steps need few of the units that tables of their width can have."""
    units = decode.step.units
    return 0 if units is None else width_of(max(FEW_UNITS, len(units.table)))


def _is_tail(table: PageTable, group: LayerGroup) -> bool:
    return table.layout == group.raw != group.page


def _width(x: Tensor, table: PageTable, group: LayerGroup, least: Width) -> int:
    """Of the columns of a padded table; a tail, which is short, is as wide as it ever is."""
    tokens, segments = least
    if _is_tail(table, group):
        tokens = group.sink + group.residual + group.page.tokens
    if x is table.segments:
        return width_of(max(x.shape[1], segments))
    return width_of(max(x.shape[1], -(-tokens // table.layout.tokens)))


def _padded_step(decode: Decode, device: torch.device, least: Width) -> GroupStep:
    step = decode.step
    rows = bucket_of(len(step.rows))
    tables = tuple(_padded_table(table, rows, step.group, least) for table in step.tables)
    units = step.units
    if units is not None:
        room = min(_bucket_of_units(decode), room_for_units(step.group, tables, device))
        units = Units(
            _extended(units.table, room, 0), _extended(units.starts, rows + 1, units.starts[-1])
        )
    return replace(
        step,
        rows=_extended(step.rows, rows, step.rows[0]),
        pages=_extended(step.pages, rows, NO_PAGE),
        slots=_extended(step.slots, rows, step.slots[0]),
        seals=(),
        completed=_padded_rows(step, rows) if _seals(decode) else None,
        queries=torch.arange(rows, dtype=torch.int32).unsqueeze(1),
        answers=torch.arange(rows, dtype=torch.int32),
        tables=tables,
        units=units,
        freed=(),
    )


def _padded_rows(step: GroupStep, rows: int) -> SealRows:
    """What rows complete; those added complete nothing."""
    given = step.completed or seal_rows(step.group, (), len(step.rows))
    padded = {x.name: _extended(getattr(given, x.name), rows, NO_PAGE) for x in fields(SealRows)}
    return SealRows(**padded)


def _padded_table(table: PageTable, rows: int, group: LayerGroup, least: Width) -> PageTable:
    """A table with more rows and columns, which see nothing and point to what is there."""

    def wider(x: Tensor) -> Tensor:
        wide = x[:1, :1].repeat(rows, _width(x, table, group, least))
        wide[: x.shape[0], : x.shape[1]] = x
        return wide

    return replace(
        table,
        pages=wider(table.pages),
        lo=_extended(table.lo, rows, 0),
        hi=_extended(table.hi, rows, 0),
        segments=None if table.segments is None else wider(table.segments),
        owner=None if table.owner is None else wider(table.owner),
        sides=None if table.sides is None else _extended(table.sides, rows, table.sides[0]),
    )


def _extended(x: Tensor, rows: int, value: Tensor | int) -> Tensor:
    """x with as many rows, those added all of one value."""
    added = torch.as_tensor(value, dtype=x.dtype).expand(rows - len(x), *x.shape[1:])
    return torch.cat([x, added])
